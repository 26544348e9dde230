"""`assay screen`: how far candidates are from a reference over the same texts, layer by layer, without a server."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from assay.callbacks import Say, say_nothing
from assay.errors import AssayError, CheckpointError
from assay.foreign_text import shown
from assay.recipes.gate import DivergenceGate, GateRecipe
from assay.recipes.load import load_recipe
from assay.records.base import Interval, sha256_of_file
from assay.records.divergence import Drift
from assay.records.run import folder_name
from assay.records.screening import Numerics, Panel, Ranking, RouterChange, Screened, Screening, ScreenWord
from assay.secret_text import hide_password
from assay_pipeline.interrupted import interruptible
from assay_pipeline.places import place_for
from assay_pipeline.targets import no_such_folder, take_up_family_of

if TYPE_CHECKING:
    from assay_evaluate.divergence.drift import Positions
    from assay_evaluate.divergence.positions import PositionDivergence, ScoredDocument
    from assay_quantize.decoding.open_stored import StoredCheckpoint
    from assay_quantize.screen.compare import TextDivergence
    from assay_quantize.screen.forward import ScreenPass
    from assay_quantize.screen.layer_model import LayerModel
    from assay_quantize.screen.texts import ScreenText

SCREENING_NAME = "screening.json"
GATES = "default"
"""Whose limit on `kl_mean`, by the bits of the weights, FAIL is about."""
ENTROPY = ((0.0, "below 0.1 nats"), (0.1, "0.1 to 0.5"), (0.5, "0.5 to 1.5"), (1.5, "1.5 and above"))
Arithmetic = Literal["fp32", "bf16"]


def screen(
    reference: str,
    candidates: Sequence[str],
    *,
    text: Sequence[Path],
    num_tokens: int = 20_000,
    length: int = 2048,
    arithmetic: Arithmetic = "fp32",
    device: str = "cpu",
    gates: str = GATES,
    out: Path | None = None,
    say: Say = say_nothing,
) -> tuple[Screening, Path]:
    """The record, and where it was written.

    reference, candidates: checkpoint folders. text: files of plain text or JSON lines; replies of the reference tell most.
    num_tokens: scored, of all texts; length: tokens of one, at most. gates: whose limits FAIL is about. out: folder of the
    record and of the states that a killed screening goes on from. AssayError: a checkpoint cannot be read or run so.
    """
    from assay_quantize.calibration.quiet import quiet
    from assay_quantize.screen.compare import compare_passes
    from assay_quantize.screen.texts import read_texts

    started = time.monotonic()
    folders = dict(_labelled([reference, *candidates]))
    gate = _gate(gates)
    place = place_for("screen", ".", out=out, say=say)
    with quiet(), interruptible(lambda: f"layers that are done are kept in {place.records}; the same command goes on"):
        labels = list(folders)
        texts = read_texts(text, folders[labels[0]], num_tokens, length)
        scored = sum(entry.scored.num_scored for entry in texts)
        say(f"{len(texts)} texts, {scored:,} tokens scored")
        screened: list[Screened] = []
        values: dict[str, list[TextDivergence]] = {}
        with ExitStack() as open_files:
            stored = {label: open_files.enter_context(_opened(folder)) for label, folder in folders.items()}
            passes = {
                label: _pass(label, stored[label], folders[label], texts, arithmetic, device, place.records, say)
                for label in labels
            }
            first = labels[0]
            sha256 = {label: passes[label][2] for label in labels}
            for label in labels[1:]:
                say(f"{label}: head against head")
                values[label] = list(compare_passes([entry.scored for entry in texts], passes[first][:2], passes[label][:2]))
                screened.append(
                    _screened(label, folders[label], stored[label], sha256[label], gate, texts, values[label],
                              _routers(texts, passes[first][1], passes[label][1]))
                )  # fmt: skip
    screened.sort(key=lambda candidate: candidate.drift.kl_mean.value)
    record = Screening(
        reference=str(folders[first]),
        reference_sha256=sha256[first],
        reference_stored_as=stored[first].what,
        numerics=_numerics(arithmetic, device),
        panel=_panel(text, texts),
        candidates=tuple(screened),
        rankings=tuple(_rankings(screened, values)),
        seconds=time.monotonic() - started,
    )
    path = place.records / SCREENING_NAME
    record.save(path)
    return record, path


def _labelled(texts: Sequence[str]) -> Iterator[tuple[str, Path]]:
    used: set[str] = set()
    for text in texts:
        if "://" in text:
            raise AssayError(
                f"{shown(hide_password(text))}: is an address, and weights are read here; give a checkpoint's folder, or "
                "compare servers with `assay judge`"
            )
        folder = Path(text).expanduser()
        if not folder.is_dir():
            raise CheckpointError(
                no_such_folder(text, folder) if not folder.exists() else f"{text}: give a checkpoint's folder"
            )
        label = folder_name(folder)
        number = 1
        while label in used:
            number += 1
            label = f"{folder_name(folder)}-{number}"
        used.add(label)
        yield label, folder


def _gate(name: str) -> DivergenceGate:
    for gate in load_recipe(GateRecipe, name).gates:
        if isinstance(gate, DivergenceGate) and gate.metric == "kl_mean" and gate.over != "spans":
            return gate
    raise AssayError(f"--gates {name}: has no limit on kl_mean; take {GATES}")


@contextmanager
def _opened(folder: Path) -> Iterator[StoredCheckpoint]:
    from assay_quantize.checkpoint.checkpoint import open_checkpoint
    from assay_quantize.decoding.open_stored import open_stored

    take_up_family_of(folder)
    with open_stored(open_checkpoint(folder, allow_quantized=True)) as stored:
        yield stored


def _pass(
    label: str, stored: StoredCheckpoint, folder: Path, texts: Sequence[ScreenText], arithmetic: Arithmetic, device: str,
    records: Path, say: Say,
) -> tuple[LayerModel, ScreenPass, str]:  # fmt: skip
    """The model, its pass over the texts, the hash of its weights."""
    import torch

    from assay_evaluate.run.identity import checkpoint_sha256
    from assay_quantize.screen.forward import pass_identity, run_pass
    from assay_quantize.screen.layer_model import LayerModel

    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[arithmetic]
    sha256 = checkpoint_sha256(folder, sha256_of_file)
    scored = [entry.scored for entry in texts]
    model = LayerModel(stored, dtype, device)
    made = run_pass(
        model, scored, records / "passes" / label, pass_identity(sha256, scored, model), lambda line: say(f"{label}: {line}")
    )
    return LayerModel(stored, dtype, device), made, sha256


def _routers(texts: Sequence[ScreenText], reference: ScreenPass, candidate: ScreenPass) -> tuple[RouterChange, ...]:
    from assay_quantize.screen.compare import other_experts

    changes = other_experts([entry.scored for entry in texts], reference, candidate)
    return tuple(
        RouterChange(layer=layer, changed=changed, replaced=replaced) for layer, (changed, replaced) in changes.items()
    )


# ------------------------------------------------------------------------------------------------ figures
def _documents(
    texts: Sequence[ScreenText], values: Sequence[TextDivergence]
) -> list[tuple[ScoredDocument, PositionDivergence]]:
    """As the statistics of served divergence take them."""
    import numpy as np

    from assay_evaluate.client.journal import TokenLogprobs
    from assay_evaluate.divergence.positions import PositionDivergence, ScoredDocument

    pairs = []
    for entry, text in zip(texts, values, strict=True):
        none = np.zeros((len(text.kl_P), 0))
        scored = TokenLogprobs(
            text.tokens_P.astype(np.int32), none.astype(np.int32), none.astype(np.float32), text.ln_p_P.astype(np.float32)
        )
        document = ScoredDocument(
            entry.name, entry.language, scored, scored, "held_out", entry.domain, entry.scored.first, entry.num_thinking
        )
        divergence = PositionDivergence(
            text.kl_P, text.kl_P, np.zeros_like(text.kl_P), text.agrees_P, np.ones(len(text.kl_P), bool), text.confidence_P,
            text.margin_P, text.ln_p_P - text.ln_q_P, np.exp(text.ln_q_P) - np.exp(text.ln_p_P),
        )  # fmt: skip
        pairs.append((document, divergence))
    return pairs


def _screened(
    label: str, folder: Path, stored: StoredCheckpoint, sha256: str, gate: DivergenceGate, texts: Sequence[ScreenText],
    values: Sequence[TextDivergence], routers: tuple[RouterChange, ...],
) -> Screened:  # fmt: skip
    import numpy as np

    from assay_evaluate.divergence.drift import NOT_NEGATIVE, SHARE, drift_of, gather, groups_of, text_mean
    from assay_evaluate.run.weight_bits import weight_bits, weight_shares
    from assay_evaluate.verdicts.divergence import limit_for

    pairs = _documents(texts, values)
    drift = drift_of("held_out", [document for document, _ in pairs], pairs, is_sampled=False)
    if drift is None:
        raise AssayError(f"{label}: {len(texts)} text is too few for a divergence; give at least two")
    positions: Positions = gather(pairs)
    flat = {
        name: np.concatenate([getattr(text, name) for text in values]) for name in ("reverse_kl_P", "js_P", "top_k_shared_P")
    }
    entropy_N = np.concatenate([text.entropy_P for text in values])
    ends = [*(low for low, _ in ENTROPY[1:]), math.inf]
    bits = weight_bits(folder)
    limit = limit_for(gate, bits, None, weight_shares=weight_shares(folder, bits))
    word, needed = _word(drift, limit.value)
    return Screened(
        label=label,
        location=str(folder),
        weights_sha256=sha256,
        stored_as=stored.what,
        bits_per_weight=8 * sum(w.num_bytes for w in stored.weights) / sum(w.shape[0] * w.shape[1] for w in stored.weights),
        word=word,
        limit=limit.value,
        limit_for=limit.reason,
        tokens_needed=needed,
        drift=drift,
        reverse_kl_mean=text_mean(positions, flat["reverse_kl_P"], NOT_NEGATIVE),
        jensen_shannon_mean=text_mean(positions, flat["js_P"], NOT_NEGATIVE),
        top_k_shared=text_mean(positions, flat["top_k_shared_P"], SHARE),
        by_entropy=groups_of(
            positions,
            [(name, (entropy_N >= low) & (entropy_N < high)) for (low, name), high in zip(ENTROPY, ends, strict=True)],
            is_sampled=False,
        ),
        routers=routers,
        not_applied=() if stored.kv.number is None else (f"KV cache in {stored.kv.number}",),
    )


def _word(drift: Drift, limit: float) -> tuple[ScreenWord, int | None]:
    """What the interval of the mean says of the limit; the scored tokens that would decide, at this spread of texts."""
    mean = drift.kl_mean
    if not isinstance(mean, Interval):
        return "UNDERPOWERED", None
    if mean.low > limit:
        return "FAIL", None
    if mean.high <= limit:
        return "not failed", None
    gap, half_width = abs(mean.value - limit), (mean.high - mean.low) / 2
    return "UNDERPOWERED", None if gap == 0 else math.ceil(drift.num_positions * (half_width / gap) ** 2)


def _rankings(screened: Sequence[Screened], values: dict[str, list[TextDivergence]]) -> Iterator[Ranking]:
    """Each candidate against the next, paired by text."""
    import numpy as np

    from assay.records.divergence import FEWEST_TEXTS
    from assay_evaluate.statistics.clustered import cluster_bootstrap_ratio

    for first, second in itertools.pairwise(screened):
        sums = [np.array([text.kl_P.sum() for text in values[label]]) for label in (first.label, second.label)]
        ratio = None
        if len(sums[0]) >= FEWEST_TEXTS and (sums[1] > 0).all():
            ratio = cluster_bootstrap_ratio(sums[0], sums[1], np.arange(len(sums[0])))
        yield Ranking(first=first.label, second=second.label, ratio=ratio, is_ranked=ratio is not None and ratio.high < 1)


def _numerics(arithmetic: Arithmetic, device: str) -> Numerics:
    import torch
    import transformers

    return Numerics(arithmetic=arithmetic, device=device, torch=torch.__version__, transformers=transformers.__version__)


def _panel(files: Sequence[Path], texts: Sequence[ScreenText]) -> Panel:
    from assay_quantize.sensitivity.texts import texts_sha256

    scored = [entry.scored for entry in texts]
    return Panel(
        files=tuple(map(str, files)),
        sha256=texts_sha256(scored),
        num_texts=len(texts),
        num_tokens=sum(text.num_scored for text in scored),
    )
