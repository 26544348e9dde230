"""Divergence at each position of some texts -> what stands in the record: mean, interval over texts, and kinds apart."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from assay.records.base import Interval
from assay.records.diagnosis.sensitivity import KindDamage, KindOfPosition
from assay.records.divergence import FEWEST_TEXTS
from assay_evaluate.divergence.documents import Document
from assay_evaluate.divergence.strata import strata_of
from assay_evaluate.statistics.skewed import skewed_mean

CONTEXTS = (0, 1024, 8192, 32_768, 131_072)
"""Tokens before a position from which on it counts as further into a context."""

Floats = npt.NDArray[np.floating[Any]]


@dataclass(frozen=True)
class Positions:
    """All scored positions of some texts, text after text. text_N: number of the text, those of one cluster share it.
    stratum_N: of the interval. masks: (kind, name) -> which positions are such. longest: tokens of the longest text."""

    text_N: npt.NDArray[np.intp]
    stratum_N: npt.NDArray[np.intp]
    num_texts: int
    masks: Mapping[tuple[KindOfPosition, str], npt.NDArray[np.bool_]]
    longest: int


def positions_of(documents: Sequence[Document], structural: Mapping[int, str] | None = None) -> Positions:
    """structural: token id -> kind of structural token; None: they are not known."""
    clusters = list(dict.fromkeys(document.cluster or f"\0{i}" for i, document in enumerate(documents)))
    number = {cluster: i for i, cluster in enumerate(clusters)}
    of_document = [number[document.cluster or f"\0{i}"] for i, document in enumerate(documents)]
    languages: dict[int, set[str]] = {}
    kinds: dict[int, tuple[str, str]] = {}
    for document, text in zip(documents, of_document, strict=True):
        languages.setdefault(text, set()).add(document.language)
        kinds.setdefault(text, (document.texts, document.domain))
    strata = strata_of([(*kinds[i], *(languages[i] if len(languages[i]) == 1 else {""})) for i in range(len(clusters))])
    stratum_number = {stratum: i for i, stratum in enumerate(dict.fromkeys(strata))}
    lengths = [len(document.reply_ids) for document in documents]
    text_N = np.repeat(np.array(of_document, np.intp), lengths)
    stratum_N = np.array([stratum_number[stratum] for stratum in strata], np.intp)[text_N]
    longest = max(len(document.prompt_ids) + len(document.reply_ids) for document in documents)
    return Positions(text_N, stratum_N, len(clusters), dict(_masks(documents, lengths, structural, longest)), longest)


def _masks(
    documents: Sequence[Document], lengths: Sequence[int], structural: Mapping[int, str] | None, longest: int
) -> Iterator[tuple[tuple[KindOfPosition, str], npt.NDArray[np.bool_]]]:
    labels: dict[KindOfPosition, Any] = {
        "domain": np.repeat(np.array([document.domain for document in documents], np.str_), lengths),
        "language": np.repeat(np.array([document.language for document in documents], np.str_), lengths),
        "part": np.concatenate([_parts(document) for document in documents]),
    }
    if structural is not None:
        labels["structural"] = np.array(
            [structural.get(token, "") for document in documents for token in document.reply_ids], np.str_
        )
    before_N = np.concatenate([len(document.prompt_ids) + np.arange(len(document.reply_ids)) for document in documents])
    spans = [first for first in CONTEXTS if first < longest]
    if len(spans) > 1:
        named = [
            f"{first} tokens and more" if i + 1 == len(spans) else f"{first} to {spans[i + 1] - 1} tokens"
            for i, first in enumerate(spans)
        ]
        labels["context"] = np.array(named, np.str_)[np.searchsorted(spans, before_N, side="right") - 1]
    for kind, label_N in labels.items():
        for name in sorted({*label_N.tolist()} - {""}):
            yield (kind, name), label_N == name


def _parts(document: Document) -> Any:
    if document.num_thinking is None:
        return np.full(len(document.reply_ids), "", dtype="<U8")
    return np.where(np.arange(len(document.reply_ids)) < document.num_thinking, "thinking", "answer")


def halves(positions: Positions) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.bool_]] | None:
    """Positions of the texts that parts are measured on, and of those that wholes are: every second text of each stratum.

    A mix is chosen by its parts, so on the same texts it looks better than it is: by a sixth on 64 texts of which a few have
    most of the KL (benchmarks/verdicts/divergence/mix_split.md). None: fewer than twice `FEWEST_TEXTS`, of which a half has no
    interval.
    """
    if positions.num_texts < 2 * FEWEST_TEXTS:
        return None
    texts, first = np.unique(positions.text_N, return_index=True)
    is_second = np.zeros(len(texts), np.bool_)
    for stratum in np.unique(positions.stratum_N):
        is_second[np.flatnonzero(positions.stratum_N[first] == stratum)[1::2]] = True
    second_N = is_second[np.searchsorted(texts, positions.text_N)]
    return ~second_N, second_N


def only(positions: Positions, mask_N: npt.NDArray[np.bool_]) -> Positions:
    """Those where `mask_N`."""
    text_N, stratum_N = positions.text_N[mask_N], positions.stratum_N[mask_N]
    masks = {name: mask[mask_N] for name, mask in positions.masks.items() if mask[mask_N].any()}
    return Positions(text_N, stratum_N, len(np.unique(text_N)), masks, positions.longest)


@dataclass(frozen=True)
class Damage:
    mean: float
    interval: Interval | None
    by_kind: tuple[KindDamage, ...]


def damage_of(kl_N: Floats, positions: Positions) -> Damage:
    """Mean KL a token; its interval is over whole texts, None where there are fewer than `FEWEST_TEXTS`."""
    values = kl_N.astype(np.float64)
    interval = None
    if positions.num_texts >= FEWEST_TEXTS:
        interval = skewed_mean(values, positions.text_N, positions.stratum_N, least=0.0)
    kinds = tuple(
        KindDamage(kind=kind, name=name, num_positions=int(mask.sum()), damage_nats=float(values[mask].mean()))
        for (kind, name), mask in positions.masks.items()
    )
    return Damage(float(values.mean()), interval, kinds)
