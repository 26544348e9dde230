"""Which GGUF files of a folder are one model, by their names."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable

SPLIT = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")
"""How llama.cpp calls a part of a split model."""
BESIDE = re.compile(r"(?i)(.*[-._])?(mmproj|imatrix|mtp)([-._].*)?\.gguf")
"""Files beside a language model: its vision tower, the data it was quantized by, a draft head."""


def gguf_models(names: Iterable[str]) -> tuple[list[tuple[str, ...]], tuple[str, ...]]:
    """(models by their files, GGUF files beside them)."""
    models: dict[str, list[str]] = defaultdict(list)
    for name in sorted(name for name in names if name.endswith(".gguf")):
        models[_model_of(name)].append(name)
    beside = [parts for parts in models.values() if BESIDE.fullmatch(parts[0]) is not None]
    if len(beside) == len(models):
        beside = []
    return [tuple(parts) for parts in models.values() if parts not in beside], tuple(name for parts in beside for name in parts)


def with_one_model(names: Iterable[str], chosen: str) -> frozenset[str]:
    """The names without weights that are not of the model that the file `chosen` belongs to."""
    return frozenset(
        name for name in names if not name.endswith((".gguf", ".safetensors")) or _model_of(name) == _model_of(chosen)
    )


def _model_of(name: str) -> str:
    split = SPLIT.fullmatch(name)
    return name if split is None else f"{split['stem']}-*-of-{split['count']}.gguf"
