"""A model in GGUF files: what their headers say of it, in llama.cpp's names."""

from __future__ import annotations

import functools
import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from assay.errors import CheckpointError
from assay.foreign_text import shown
from assay.quantities import and_more
from assay_quantize.decoding.gguf_files import PLAIN_TYPES
from assay_quantize.decoding.gguf_header import GgufHeader, GgufTensor, read_header
from assay_quantize.inspection.files import Files, only_in_a_folder
from assay_quantize.inspection.gguf_names import gguf_models
from assay_quantize.inspection.subject import Counts

MOST_BLOCKS = 1000
_BLOCK = re.compile(r"blk\.(\d{1,4})\.(.+)")
NEXTN = "nextn."
"""Begins what only an MTP block has."""


class Piece(NamedTuple):
    """What is counted for itself: a tensor, or one expert of a stack."""

    tensor: str
    expert: int | None


@dataclass(frozen=True, eq=False)
class GgufModel:
    """names: of the files, in order. headers: of those that can be read. broken: of the others what is wrong. others: GGUF
    files that are no part of it. values: what was read of the data, empty where only headers were. hollow: files without data.
    """

    files: Files
    names: tuple[str, ...]
    headers: Mapping[str, GgufHeader]
    broken: Mapping[str, str]
    others: tuple[str, ...]
    values: dict[Piece, Counts] = field(default_factory=dict)
    hollow: set[str] = field(default_factory=set)

    @functools.cached_property
    def tensors(self) -> dict[str, GgufTensor]:
        """By name; of one that is there twice the first."""
        named: dict[str, GgufTensor] = {}
        for header in self.headers.values():
            for tensor in header.tensors:
                named.setdefault(tensor.name, tensor)
        return named

    @functools.cached_property
    def main(self) -> GgufHeader:
        """The header that describes the model: of a split one the first file's."""
        first = next(iter(self.headers.values()))
        return next((h for h in self.headers.values() if h.text("general.architecture") is not None), first)

    @property
    def architecture(self) -> str | None:
        return self.main.text("general.architecture")

    def key(self, name: str) -> str:
        return f"{self.architecture or '?'}.{name}"

    def count(self, name: str) -> int | None:
        """A number of the architecture's, `block_count`; None: it is not told, or told layer by layer."""
        return self.main.count(self.key(name))

    @property
    def num_blocks(self) -> int | None:
        told = self.count("block_count")
        return told if told is not None and told <= MOST_BLOCKS else None

    @property
    def num_tokens(self) -> int | None:
        return self.main.counts.get("tokenizer.ggml.tokens")

    @functools.cached_property
    def blocks(self) -> dict[int, dict[str, GgufTensor]]:
        """Block -> what is in it, by the name behind its number."""
        blocks: dict[int, dict[str, GgufTensor]] = defaultdict(dict)
        for name, tensor in self.tensors.items():
            if (match := _BLOCK.fullmatch(name)) is not None:
                blocks[int(match[1])][match[2]] = tensor
        return dict(sorted(blocks.items()))

    @functools.cached_property
    def mtp_blocks(self) -> tuple[int, ...]:
        """Those that are stored."""
        return tuple(n for n, names in self.blocks.items() if any(name.startswith(NEXTN) for name in names))

    @property
    def declared_mtp(self) -> int | None:
        return self.count("nextn_predict_layers")

    @functools.cached_property
    def trunk(self) -> range:
        """The blocks that a model without MTP has. Where no MTP block is stored: all, if all are, else those before the
        declared ones."""
        blocks = self.num_blocks or 0
        if self.mtp_blocks:
            return range(min((*self.mtp_blocks, blocks)))
        is_whole = all(number in self.blocks for number in range(blocks))
        return range(blocks if is_whole else blocks - min(self.declared_mtp or 0, blocks))

    @property
    def is_draft(self) -> bool:
        """Whether it is an MTP block alone, as llama.cpp's converter writes it with `--mtp`."""
        return bool(self.mtp_blocks) and set(self.blocks) == set(self.mtp_blocks)

    def block_of(self, name: str) -> int | None:
        match = _BLOCK.fullmatch(name)
        return None if match is None else int(match[1])

    def role(self, name: str) -> str:
        """In the words of assay's families."""
        match = _BLOCK.fullmatch(name)
        if match is None:
            return {"token_embd.weight": "embedding", "output.weight": "lm_head"}.get(name, "other")
        if int(match[1]) in self.mtp_blocks:
            return "mtp"
        return next((role for pattern, role in _ROLES if pattern.match(match[2])), "other")


_ROLES = tuple(
    (re.compile(pattern), role)
    for pattern, role in (
        (r"ffn_gate_inp\.", "router"), (r"ffn_\w+_exps\.", "routed_expert"),
        (r"ffn_\w+\.\d+\.", "routed_expert"), (r"ffn_\w*shexp\.", "shared_expert"), (r"ffn_\w+\.", "dense_mlp"),
        (r"(attn|ssm|indexer|shortconv)[_.]", "attention"),
    )
)  # fmt: skip
"""What stands behind the number of a block -> its role; the first that fits."""


def is_gguf(files: Files) -> bool:
    """Whether its only weights are GGUF."""
    names = files.names
    return any(name.endswith(".gguf") for name in names) and not any(name.endswith(".safetensors") for name in names)


def open_model(files: Files) -> GgufModel:
    """Read all headers. CheckpointError: files that are not at hand, several models, or not one header that can be read."""
    if not files.is_local:
        raise only_in_a_folder(files.location)
    models, others = gguf_models(files.names)
    if len(models) > 1:
        first = and_more([shown(parts[0], 80) for parts in models])
        raise CheckpointError(f"{files.location}: holds {len(models)} GGUF models ({first}); give the file of one")
    headers: dict[str, GgufHeader] = {}
    broken: dict[str, str] = {}
    place = Path(files.location)
    folder = place if place.is_dir() else place.parent
    for name in models[0]:
        try:
            headers[name] = read_header(folder / name)
        except CheckpointError as problem:
            broken[name] = str(problem).removeprefix(f"{folder / name}: ")
    if not headers:
        name, what = next(iter(broken.items()))
        raise CheckpointError(f"{folder / name}: {what}")
    model = GgufModel(files, models[0], headers, broken, others)
    kind = model.main.text("general.type") or "model"
    if kind != "model" or model.architecture == "clip":
        what = "mmproj" if model.architecture == "clip" else shown(kind, 40)
        raise CheckpointError(f"{files.location}: is no language model (general.type {what}); give the file of one")
    return model


def is_plain(tensor: GgufTensor) -> bool:
    return tensor.kind in PLAIN_TYPES
