"""What a screening says of a checkpoint, as a part of its card or as Markdown to paste into another."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from assay.errors import AssayError
from assay.quantities import percent
from assay.records.screening import Screened, Screening, load_screening
from assay_reports.report import environment
from assay_reports.screening import damages, name_of, nats, not_said, plain_nats, why
from assay_reports.sentences import card as english


def screening_of(place: Path, weights: Mapping[str, str]) -> Screening:
    """The record there. weights: name of a checkpoint -> its `checkpoint_sha256`. AssayError: it is of none of them."""
    record = load_screening(place)
    if not any(record.of_weights(sha256) for sha256 in weights.values()):
        raise AssayError(
            f"{place}: is of other weights than {', '.join(weights)} (by their SHA-256); screen these with `assay screen`, or "
            "name the record that is of them"
        )
    return record


class ScreenedBlock(NamedTuple):
    """rows: of a table of two columns. not_said: what no figure of it is about."""

    word: str
    sentence: str
    rows: tuple[tuple[str, str], ...]
    notes: tuple[str, ...]
    not_said: tuple[str, ...]


def screened_block(record: Screening, checkpoint_sha256: str) -> ScreenedBlock | None:
    """None: the record is of other weights."""
    candidate = record.of_weights(checkpoint_sha256)
    if candidate is None:
        return None
    panel, numerics = record.panel, record.numerics
    texts = english.SCREENED_TEXTS.format(
        texts=panel.num_texts, tokens=panel.num_tokens, source=panel.stated.source or english.SOURCE_NOT_STATED,
        files=", ".join(map(name_of, panel.files)),
    )  # fmt: skip
    rows = {
        english.COMPARED_WITH: english.STORED_AS.format(name=name_of(record.reference), stored_as=record.reference_stored_as),
        english.KL: nats(candidate.drift.kl_mean),
        english.ALLOWED: f"{candidate.limit:g}{candidate.limit_for}",
        english.SAME_FIRST: percent(candidate.drift.top1_agreement.value),
        english.TEXTS: texts,
        english.NUMERICS: english.COMPUTED_IN.format(
            arithmetic=numerics.arithmetic, device=numerics.device, torch=numerics.torch, transformers=numerics.transformers
        ),
        english.REFERENCE_WEIGHTS: f"`{record.reference_sha256}`",
        english.THESE_WEIGHTS: f"`{candidate.weights_sha256}`",
        english.THESE_TEXTS: f"`{panel.sha256}`",
    }
    return ScreenedBlock(
        candidate.word, why(record, candidate), tuple(rows.items()), tuple(_notes(record, candidate)), tuple(not_said(record))
    )


def render_block(block: ScreenedBlock) -> str:
    """As Markdown by itself."""
    return environment(html=False).get_template("screened.md.j2").render(screened=block)


def _notes(record: Screening, candidate: Screened) -> list[str]:
    damaged = record.model_copy(update={"damages": {k: v for k, v in record.damages.items() if k == candidate.label}})
    notes = [english.IS_DAMAGED.format(damage=damage) for damage in damages(damaged)]
    if candidate.floor is not None:
        notes.append(english.WIDENED.format(cause=candidate.floor.cause, kl=plain_nats(candidate.floor.kl)))
    if candidate.fp8_kv_cache:
        notes.append(english.FP8_KV_CACHE)
    return [*notes, *(english.NOT_COMPUTED.format(what=what) for what in candidate.not_applied)]
