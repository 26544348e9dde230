"""Tokens on which parts are measured: texts with the positions that count, and what those positions have in common."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from assay.records.base import sha256_of


@dataclass(frozen=True)
class ScoredText:
    """Token ids; those from `first` on are predicted and scored, the others are a prompt."""

    ids: tuple[int, ...]
    first: int = 1

    @property
    def num_scored(self) -> int:
        return len(self.ids) - self.first


def texts_sha256(texts: Sequence[ScoredText]) -> str:
    """Identity of the tokens and of which of them are scored."""
    return sha256_of([[list(text.ids), text.first] for text in texts])


@dataclass(frozen=True)
class Batch:
    """Texts of about one length, padded on the right: what follows a token changes nothing at it. Indexes into `texts`.

    ids_BT: int64. real_BT: which are tokens of a text. scored_BT: places whose *next* token is scored.
    """

    texts: tuple[int, ...]
    ids_BT: Any
    real_BT: Any
    scored_BT: Any


def batched(texts: Sequence[ScoredText], batch_tokens: int) -> list[Batch]:
    """All texts, shortest first, at most `batch_tokens` with padding at once (one text at least)."""
    import torch

    order = sorted(range(len(texts)), key=lambda i: (len(texts[i].ids), i))
    groups: list[list[int]] = []
    for i in order:
        if groups and (len(groups[-1]) + 1) * len(texts[i].ids) <= batch_tokens:
            groups[-1].append(i)
        else:
            groups.append([i])
    made = []
    for group in groups:
        longest = len(texts[group[-1]].ids)
        ids = torch.zeros(len(group), longest, dtype=torch.int64)
        real, scored = torch.zeros(len(group), longest, dtype=torch.bool), torch.zeros(len(group), longest, dtype=torch.bool)
        for row, i in enumerate(group):
            length = len(texts[i].ids)
            ids[row, :length] = torch.tensor(texts[i].ids)
            real[row, :length] = True
            scored[row, texts[i].first - 1 : length - 1] = True
        made.append(Batch(tuple(group), ids, real, scored))
    return made
