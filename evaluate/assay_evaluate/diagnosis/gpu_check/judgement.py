"""Native answers against emulated ones, within stated bounds.

Both servers compute in BF16 and round at other places, so their log-probabilities differ; where activations are quantized, a
rounding that falls to the other side is carried on as a whole step of the format. How much that is was measured without a GPU,
as emulation in BF16 against emulation in FP32 of one checkpoint; the bounds are three to six times that, because a native
kernel adds roundings of its own (docs/gpu-check.md has the figures).
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from assay.records.preflight.gpu_check import CheckOutcome, Drafts, ForeseenKernel, FormatCheck, Greedy, Kernels, Logprobs
from assay.records.preflight.replay import Replay
from assay_evaluate.client.journal import TokenLogprobs
from assay_evaluate.client.logprobs import TokenRow
from assay_evaluate.diagnosis.gpu_check.questions import GreedyReplies


class Bounds(NamedTuple):
    """In nats: of the mean difference, and of the largest at tokens of some probability."""

    mean: float
    largest: float


BOUNDS = {16: Bounds(0.01, 0.2), 8: Bounds(0.02, 0.5), 4: Bounds(0.05, 3.0)}
"""Bits of activations -> bounds."""
LEAST_PROBABILITY = 1e-3
"""Below it a difference of log-probabilities says more about rounding than about two kernels."""
LEAST_SHARE_OF_EMULATED = 0.9
"""Accepted drafts, as a share of what emulation accepts. A head without its experts is accepted at 0 %."""


def compare_replies(native: Sequence[Sequence[TokenRow]], emulated: Sequence[Sequence[TokenRow]], tie_bound: float) -> Greedy:
    """Token by token until a pair of replies parts; behind that they are other texts."""
    num_tokens = num_equal = num_ties = 0
    first = None
    for number, (reply, emulated_reply) in enumerate(zip(native, emulated, strict=True)):
        rows = enumerate(zip(reply, emulated_reply, strict=True))
        at = next((i for i, (a, b) in rows if a.token != b.token), None)
        num_tokens += len(emulated_reply) if at is None else at
        if at is None:
            num_equal += 1
            continue
        # nats by which emulation likes its own token better than the native one; infinity if it does not list that
        native_logprob = dict(emulated_reply[at].top).get(reply[at].token, -math.inf)
        margin = emulated_reply[at].logprob - native_logprob if math.isfinite(native_logprob) else math.inf
        if margin <= tie_bound:
            num_ties += 1
        elif first is None:
            first = f"reply {number} parts at token {at}, where emulation prefers its own by {margin:.2f} nats"
    return Greedy(
        num_replies=len(native), num_tokens=num_tokens, num_equal=num_equal, num_ties=num_ties, tie_bound=tie_bound,
        first=first,
    )  # fmt: skip


def compare_scores(native: Sequence[TokenLogprobs], emulated: Sequence[TokenLogprobs], bounds: Bounds) -> Logprobs:
    """Of the tokens that stand in the texts. A value that is not a number is infinitely far off."""
    native_N, emulated_N = (np.concatenate([text.chosen_P for text in side]).astype(float) for side in (native, emulated))
    apart_N = np.abs(native_N - emulated_N)
    apart_N = np.where(np.isnan(apart_N), np.inf, apart_N)
    likely_N = apart_N[~(np.exp(emulated_N) < LEAST_PROBABILITY)]
    most = float(np.finfo(np.float32).max)  # records hold no infinity
    return Logprobs(
        num_tokens=len(apart_N), mean_difference=min(float(apart_N.mean()), most),
        max_difference=min(float(likely_N.max(initial=0.0)), most), mean_bound=bounds.mean, max_bound=bounds.largest,
    )  # fmt: skip


def compare_drafts(native: GreedyReplies, emulated: GreedyReplies) -> Drafts | None:
    """None: the emulated server drafted nothing, so nothing is expected of the native one."""
    if not emulated.num_drafted:
        return None
    emulated_share = emulated.num_accepted / emulated.num_drafted
    return Drafts(
        num_drafted=native.num_drafted,
        accepted_share=native.num_accepted / native.num_drafted if native.num_drafted else 0.0,
        emulated_share=emulated_share,
        least_share=LEAST_SHARE_OF_EMULATED * emulated_share,
    )


def judge(check: FormatCheck) -> FormatCheck:
    """The check with its outcome. What was refused or could not be asked stands in its reasons already."""
    failures: list[str] = []
    if check.kernels is not None:
        failures += [
            f"{kernel.what}: the replay foresaw {kernel.kernel}, which no line of the log names"
            for kernel in check.kernels.foreseen or ()
            if kernel.line is None
        ]
    if (greedy := check.greedy) is not None and greedy.first is not None:
        failures.append(f"greedy replies differ: {greedy.first} (a tie is up to {greedy.tie_bound:g})")
    if (logprobs := check.logprobs) is not None:
        mean, largest = logprobs.mean_difference, logprobs.max_difference
        if mean > logprobs.mean_bound or largest > logprobs.max_bound:
            failures.append(
                f"log-probabilities differ by {mean:.3g} nats on average and {largest:.3g} at most "
                f"(bounds {logprobs.mean_bound:g} and {logprobs.max_bound:g})"
            )
    if (drafts := check.drafts) is not None and drafts.accepted_share < drafts.least_share:
        failures.append(
            f"{drafts.accepted_share:.0%} of {drafts.num_drafted} drafted tokens are accepted, emulation accepts "
            f"{drafts.emulated_share:.0%}: look for missing or damaged weights of the MTP head"
        )
    if (ids := check.exact_ids) is not None and ids.max_difference > ids.bound:
        failures.append(
            f"prompt_logprob_token_ids answers other values than prompt_logprobs: {ids.max_difference:.3g} nats apart "
            f"(bound {ids.bound:g})"
        )
    outcome: CheckOutcome = "FAIL" if failures else "NOT MEASURED" if check.reasons else "PASS"
    return check.model_copy(update={"outcome": outcome, "reasons": (*failures, *check.reasons)})


# ------------------------------------------------------------------------------------------------ kernels
_EXPERTS, _LINEAR = re.compile(r"\S+ \w+ MoE backend|for \w+ MoE$"), re.compile("Linear|GEMM")
_OF_PLAIN_WEIGHTS = re.compile(r"Unquantized|Using \w+ MoE backend")
"""What vLLM says of experts in 16 bits, such as those of an MTP head that was kept."""
_MARLIN = re.compile("marlin", re.IGNORECASE)


def compare_kernels(foreseen: Replay | str, lines: Sequence[str]) -> Kernels:
    """foreseen: the replay's record, or why there is none. lines: of the server's log (`kernels_in`)."""
    if isinstance(foreseen, str):
        return Kernels(foreseen=None, unknown=foreseen, chosen=tuple(lines))
    unknown = [finding.message for finding in foreseen.every_finding if finding.kind == "unknown"]
    named: dict[tuple[str, str], ForeseenKernel] = {}
    for part in foreseen.parts:
        for row in part.modules:
            if row.scheme is None:
                continue
            if row.kernel is None:
                unknown.append(f"{row.method}: {row.why}")
            else:
                line = next((line for line in lines if is_named_in(line, row.kernel)), None)
                named[row.what, row.kernel] = ForeseenKernel(what=row.what, kernel=row.kernel, line=line)
    if not named and not unknown:
        unknown = ["the replay found no quantized module"]
    return Kernels(foreseen=tuple(named.values()) or None, unknown="; ".join(unknown) or None, chosen=tuple(lines))


def is_named_in(line: str, kernel: str) -> bool:
    """Whether a line names a kernel: `MARLIN (MarlinExperts)` is named by its backend or by its class."""
    words = re.findall(r"\w+", kernel)
    return not _OF_PLAIN_WEIGHTS.search(line) and any(re.search(rf"\b{re.escape(word)}\b", line) for word in words)


def foreseen_refusal(foreseen: Replay | str) -> str | None:
    """Why vLLM will not serve it, as the replay says; None: it will, or nobody knows."""
    if isinstance(foreseen, str) or foreseen.outcome != "FAIL":
        return None
    return next(finding.message for finding in foreseen.every_finding if finding.kind != "unknown")


def keeps_activations(lines: Sequence[str]) -> bool | None:
    """Whether every quantized matrix product keeps activations in 16 bits: Marlin's do, whatever the checkpoint declares.

    None: some do and some do not, or the lines do not tell of both.
    """
    keeps = [
        {bool(_MARLIN.search(line)) for line in lines if kind.search(line) and not _OF_PLAIN_WEIGHTS.search(line)}
        for kind in (_EXPERTS, _LINEAR)
    ]
    answers = set().union(*keeps)
    return answers.pop() if len(answers) == 1 and all(keeps) else None
