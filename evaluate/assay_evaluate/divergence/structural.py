"""Structural tokens apart: ends of text and turn, thinking and tool tags, by the names the tokenizer adds to its vocabulary.

A reply has a handful of them among hundreds of tokens, so a mean over all positions says nothing of them; yet a candidate that
does not close its thinking, breaks a tool's tag or does not stop is of no use. The token that ends a reply is among those that
vLLM returns and scores. A tag that a tokenizer writes in several tokens is not told apart.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

from assay.errors import AssayError
from assay.recipes.text_config import text_of
from assay.records.divergence import StopChance, Structural, TextMean
from assay.safe_files import read_json_object
from assay_evaluate.client.client import NotMeasured
from assay_evaluate.client.journal import TokenLogprobs
from assay_evaluate.divergence.drift import NOT_NEGATIVE, SHARE, Positions, groups_of, text_mean
from assay_evaluate.divergence.positions import Bools, Floats, PositionDivergence, ScoredDocument

TokenKind = Literal["end", "thinking", "tools", "other"]
KINDS: tuple[tuple[TokenKind, tuple[str, ...]], ...] = (
    ("thinking", ("think", "reason")),
    ("tools", ("tool", "arg_key", "arg_value", "function", "invoke", "parameter")),
)
"""Kind -> what the names of its tokens have in them (the tags of vLLM's reasoning and tool-call parsers)."""
CHANGE = (-1.0, 1.0)
StructuralIds = Mapping[int, TokenKind]
"""Token id -> kind."""


def structural_ids(checkpoint: Path) -> StructuralIds:
    """Of a checkpoint's folder: the tokens that tokenizer.json (or tokenizer_config.json) adds, and the ends that
    generation_config.json and config.json name. NotMeasured if it has neither file, or names no end."""
    names, ends = _added_tokens(checkpoint), _ends(checkpoint)
    if not names or not ends:
        what = "added tokens in tokenizer.json or tokenizer_config.json" if not names else "eos_token_id in its config files"
        raise NotMeasured(f"{checkpoint.name}: no {what}")
    kinds: dict[int, TokenKind] = dict.fromkeys(ends, "end")
    for token, name in names.items():
        kinds.setdefault(token, next((kind for kind, parts in KINDS if any(part in name.lower() for part in parts)), "other"))
    return kinds


def _added_tokens(checkpoint: Path) -> dict[int, str]:
    listed = _read(checkpoint, "tokenizer.json").get("added_tokens")
    if isinstance(listed, list):
        tokens = [(entry.get("id"), entry.get("content")) for entry in listed if isinstance(entry, dict)]
    else:
        decoder = _read(checkpoint, "tokenizer_config.json").get("added_tokens_decoder")
        entries = decoder.items() if isinstance(decoder, dict) else ()
        tokens = [
            (int(token), entry.get("content")) for token, entry in entries if isinstance(entry, dict) and token.isdecimal()
        ]
    return {token: name for token, name in tokens if isinstance(token, int) and isinstance(name, str)}


def _ends(checkpoint: Path) -> list[int]:
    config = _read(checkpoint, "config.json")
    for source in (_read(checkpoint, "generation_config.json"), config, text_of(config)):
        ends = source.get("eos_token_id")
        if isinstance(ends, int):
            return [ends]
        if isinstance(ends, list) and ends:
            return [end for end in ends if isinstance(end, int)]
    return []


def _read(checkpoint: Path, name: str) -> dict[str, Any]:
    """{} if the folder has no such file."""
    if not (checkpoint / name).is_file():
        return {}
    try:
        return read_json_object(checkpoint, name)
    except AssayError as error:
        raise NotMeasured(str(error)) from None


def structural(
    scored: Sequence[tuple[ScoredDocument, PositionDivergence]], positions: Positions, kinds: StructuralIds
) -> Structural | str:
    """Over the finite positions of sampled texts; `found` are theirs. A sentence if no structural token stands in them."""
    tokens_N = np.concatenate([doc.reference.tokens_P[values.finite_P] for doc, values in scored])
    kind_N = np.array([kinds.get(int(token), "") for token in tokens_N])
    inside_N = kind_N != ""
    if not inside_N.any():
        return "no structural token stands in the texts"
    inside = positions.only(inside_N)
    masks = [(kind, kind_N == kind) for kind in ("end", "thinking", "tools", "other")]
    return Structural(
        num_documents=len(np.unique(inside.cluster_N)),
        num_positions=int(inside_N.sum()),
        kl_mean=text_mean(inside, inside.kl_N, NOT_NEGATIVE),
        top1_agreement=text_mean(inside, inside.agrees_N.astype(np.float64), SHARE),
        groups=groups_of(positions, masks, is_sampled=False),
        stop=_stop(scored, positions, kind_N == "end", [token for token, kind in kinds.items() if kind == "end"]),
    )


def _stop(
    scored: Sequence[tuple[ScoredDocument, PositionDivergence]],
    positions: Positions,
    is_end_N: Bools,
    ends: list[int],
) -> StopChance:
    reference_N, candidate_N = (
        np.concatenate([_chance(side, ends)[values.finite_P] for side, values in sides])
        for sides in (
            [(doc.reference, values) for doc, values in scored],
            [(doc.candidate, values) for doc, values in scored if doc.candidate is not None],
        )
    )

    def change(mask_N: Bools) -> TextMean | None:
        difference_N = (candidate_N - reference_N)[mask_N]
        return text_mean(positions.only(mask_N), difference_N, CHANGE) if mask_N.any() else None

    def mean(values_N: Floats, mask_N: Bools) -> float:
        return float(values_N[mask_N].mean()) if mask_N.any() else 0.0

    return StopChance(
        num_stops=int(is_end_N.sum()),
        reference_at_stops=mean(reference_N, is_end_N),
        candidate_at_stops=mean(candidate_N, is_end_N),
        change_at_stops=change(is_end_N),
        reference_elsewhere=mean(reference_N, ~is_end_N),
        candidate_elsewhere=mean(candidate_N, ~is_end_N),
        change_elsewhere=change(~is_end_N),
    )


def _chance(side: TokenLogprobs, ends: list[int]) -> Floats:
    """Probability of the `ends` together at each position; of those that are listed, or stand there."""
    is_end_PK = np.isin(side.ids_PK, ends)
    listed_P = np.where(is_end_PK, np.exp(np.where(is_end_PK, side.logprobs_PK.astype(np.float64), 0.0)), 0.0).sum(axis=1)
    unlisted_P = np.isin(side.tokens_P, ends) & ~(side.ids_PK == side.tokens_P[:, None]).any(axis=1)
    stands_P = np.exp(np.where(unlisted_P, side.chosen_P.astype(np.float64), 0.0))
    return np.asarray(np.minimum(listed_P + np.where(unlisted_P, stands_P, 0.0), 1.0))
