"""All formats of one small model: natively and emulated, a few at once, until the time is up.

Servers of a wave start together, because starting them is work for the CPU: first the native ones, then their emulated twins,
for which one must know whether the native kernel quantizes activations. They are asked one after the other, so that the speed
of each is its own.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from assay.callbacks import Say
from assay.errors import MeasureError, ServeError
from assay.foreign_text import one_line
from assay.records.preflight.gpu_check import FormatCheck
from assay.records.preflight.replay import Replay
from assay_evaluate.diagnosis.gpu_check.judgement import (
    BOUNDS,
    compare_drafts,
    compare_kernels,
    compare_replies,
    compare_scores,
    foreseen_refusal,
    judge,
)
from assay_evaluate.diagnosis.gpu_check.questions import (
    Length,
    answer_greedily,
    client_of,
    exact_ids,
    make_prompts,
    score,
    take_speed,
)
from assay_evaluate.diagnosis.gpu_check.sides import (
    Sides,
    activation_bits,
    activations_of,
    quantizes_activations,
    reason_without_kernel,
    with_plain_activations,
)
from assay_evaluate.serving.server import Server, ServerSpec, serve

WAVE_S = 170.0
"""Until one has been seen: 70 s to start native servers, 50 s their twins, 12 s to ask each pair. An estimate, not measured."""
CORES_PER_FORMAT, MOST_AT_ONCE = 4, 4
Foresee = Callable[[], Mapping[str, Replay | str]]
"""Precision -> the replay's record, or why there is none."""
StartServer = Callable[[ServerSpec, Say], AbstractContextManager[Server]]


@dataclass
class _Pair:
    """One precision in its wave. refused: why it is not served natively; problem: why it cannot be compared.

    quantizes: whether the native kernels quantize activations; None: some do, or it is not known yet.
    """

    precision: str
    checkpoint: Path
    native: Server | None = None
    emulated: Server | None = None
    refused: str | None = None
    problem: str | None = None
    quantizes: bool | None = None


def formats_at_once() -> int:
    """By the cores of this machine; each format has two servers."""
    return max(1, min(MOST_AT_ONCE, (os.cpu_count() or 1) // CORES_PER_FORMAT))


def check_formats(
    checkpoints: Mapping[str, Path],
    sides: Sides,
    folder: Path,
    *,
    foresee: Foresee,
    deadline: float,
    at_once: int,
    length: Length | None = None,
    on_progress: Say = lambda line: None,
    start_server: StartServer = serve,
) -> tuple[FormatCheck, ...]:
    """One check for each precision, in their order. folder: of logs, and of checkpoints declared in another way.

    deadline: of `time.monotonic()`; a wave that would end after it is not begun. length: of replies; None: the usual.
    """
    waiting, checks, expected_s = list(checkpoints.items()), list[FormatCheck](), WAVE_S
    while waiting:
        wave, waiting = waiting[:at_once], waiting[at_once:]
        if time.monotonic() + expected_s > deadline:
            late = f"no time was left for it: a wave takes about {expected_s:.0f} s; name it with --formats, or give --minutes"
            checks += [_check(name, "NOT MEASURED", late) for name, _ in [*wave, *waiting]]
            break
        began = time.monotonic()
        on_progress(f"{', '.join(name for name, _ in wave)}: native servers, then emulated ones")
        checks += _check_wave(wave, sides, folder, foresee, length or Length(), on_progress, start_server)
        expected_s = time.monotonic() - began
    return tuple(checks)


def _check(precision: str, outcome: str, *reasons: str) -> FormatCheck:
    return FormatCheck.model_validate({"precision": precision, "outcome": outcome, "reasons": reasons})


def _check_wave(
    wave: Sequence[tuple[str, Path]],
    sides: Sides,
    folder: Path,
    foresee: Foresee,
    length: Length,
    report: Say,
    start_server: StartServer,
) -> list[FormatCheck]:
    pairs = [_Pair(name, checkpoint) for name, checkpoint in wave]
    with ExitStack() as stack:

        def start(pairs: Sequence[_Pair], *, emulated: bool) -> list[Server | ServeError]:
            kind, specs = "emulated" if emulated else "native", []
            for pair in pairs:
                checkpoint = pair.checkpoint
                # where the native kernel keeps activations in 16 bits, so must emulation
                if emulated and pair.quantizes is False and activations_of(checkpoint):
                    checkpoint = with_plain_activations(checkpoint, folder / f"{pair.precision}-16-bit-activations")
                specs.append(sides.spec(checkpoint, folder / f"{pair.precision}-{kind}.log", emulated=emulated))
            return stack.enter_context(_started(specs, report, start_server))

        for pair, server in zip(pairs, start(pairs, emulated=False), strict=True):
            if isinstance(server, ServeError):
                pair.refused = _first_line(server)
            else:
                pair.native = server
                pair.quantizes = quantizes_activations(pair.checkpoint, server.fingerprint.kernels)
        alive = [pair for pair in pairs if pair.native is not None]
        for pair, server in zip(alive, start(alive, emulated=True), strict=True):
            if isinstance(server, ServeError):
                pair.problem = f"emulation could not be served: {_first_line(server)}"
            else:
                pair.emulated = server
        foreseen = foresee()
        return [_check_pair(pair, sides, foreseen.get(pair.precision, "not foreseen"), length, report) for pair in pairs]


@contextmanager
def _started(specs: Sequence[ServerSpec], report: Say, start_server: StartServer) -> Iterator[list[Server | ServeError]]:
    """All servers at once, each entered and left; one that does not start is its error."""
    contexts = [start_server(spec, report) for spec in specs]

    def enter(context: AbstractContextManager[Server]) -> Server | ServeError:
        try:
            return context.__enter__()
        except ServeError as error:
            return error

    servers: list[Server | ServeError] = []
    with ThreadPoolExecutor(max(1, len(contexts))) as pool, ExitStack() as stack:
        for context, server in zip(contexts, pool.map(enter, contexts), strict=True):
            if not isinstance(server, ServeError):
                stack.push(context.__exit__)
            servers.append(server)
        yield servers


def _check_pair(pair: _Pair, sides: Sides, foreseen: Replay | str, length: Length, report: Say) -> FormatCheck:
    """The check of one pair whose servers run, or did not start."""
    if pair.native is None:
        refusal = foreseen_refusal(foreseen) or reason_without_kernel(pair.checkpoint, sides.gpu)
        if refusal is not None:
            return _check(pair.precision, "NOT SERVED", f"as foreseen: {one_line(refusal)}", pair.refused or "")
        return _check(pair.precision, "FAIL", f"not served: {pair.refused}")
    report(f"{pair.precision}: asked")
    reasons = [] if pair.problem is None else [pair.problem]
    result = FormatCheck(
        precision=pair.precision,
        outcome="PASS",
        reasons=(),
        kernels=compare_kernels(foreseen, pair.native.fingerprint.kernels),
        fingerprint=pair.native.fingerprint,
    )
    try:
        result, more_reasons = _ask_pair(pair, result, length)
        reasons += more_reasons
    except (MeasureError, ServeError) as error:
        reasons.append(_first_line(error))
    return judge(result.model_copy(update={"reasons": tuple(map(one_line, reasons))}))


def _ask_pair(pair: _Pair, check: FormatCheck, length: Length) -> tuple[FormatCheck, list[str]]:
    """(the check with everything that was measured, what was not and why). MeasureError: the native server does not answer."""
    assert pair.native is not None
    reasons = []
    with client_of(pair.native) as native:
        prompts = make_prompts(native)
        greedy = answer_greedily(native, prompts, length)
        if pair.emulated is None:
            pass
        elif pair.quantizes is None:
            reasons.append("some of the kernels quantize activations and some do not; emulation does both or neither")
        else:
            bounds = BOUNDS[activation_bits(pair.checkpoint) if pair.quantizes else 16]
            with client_of(pair.emulated) as emulated:
                emulated_greedy = answer_greedily(emulated, prompts, length)
                texts = emulated_greedy.texts(prompts)
                compared = {
                    "greedy": compare_replies(greedy.replies, emulated_greedy.replies, bounds.largest),
                    "logprobs": compare_scores(score(native, texts, length), score(emulated, texts, length), bounds),
                    "drafts": compare_drafts(greedy, emulated_greedy),
                }
            check = check.model_copy(update=compared)
        try:
            check = check.model_copy(update={"exact_ids": exact_ids(native, greedy.texts(prompts)[0])})
        except MeasureError as error:
            reasons.append(f"prompt_logprob_token_ids: {error}")
        check = check.model_copy(update={"speed": take_speed(native, prompts, length)})
    return check, reasons


def _first_line(error: Exception) -> str:
    return one_line(str(error).split("\n", 1)[0])
