"""GGUF files (llama.cpp, Unsloth): the same `StoredCheckpoint`, with the names of the published checkpoint where they are
known.

Headers are read by `gguf_header.py`, and blocks are decoded by `gguf.quants.dequantize` of the package `gguf`, an extra
(`pip install 'assay-quant[gguf]'`). A row of a tensor is a whole number of blocks, so that rows are read as elsewhere.

Names are translated for architectures whose converter (llama.cpp's convert_hf_to_gguf.py) renames weights and stacks experts
but changes no value; a name is taken that `gguf` maps and that the family in config.json has. Any other weight keeps
llama.cpp's name: permuted heads (Llama), the halves of `kv_b_proj` of MLA.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from assay.errors import AssayError, CheckpointError, PlanError
from assay.foreign_text import shown
from assay.recipes.families import family_of
from assay.recipes.family_names import form_of
from assay_quantize.checkpoint.headers import TensorHeader
from assay_quantize.checkpoint.shard_files import OpenShards
from assay_quantize.decoding.gguf_header import GgufTensor, read_header
from assay_quantize.decoding.gpt_oss_experts import slices
from assay_quantize.decoding.open_stored import StoredCheckpoint
from assay_quantize.decoding.stored_weight import PLAIN, KvRule, Part, Problem, StoredWeight

RENAMED_ONLY = frozenset({"qwen2moe", "qwen3moe", "glm4moe", "minimax-m2", "ernie4_5-moe", "deepseek2", "glm-dsa", "dots1"})
"""`general.architecture` of files whose converters change no value of a weight that `gguf` has a name for."""
PLAIN_TYPES = frozenset({"F32", "F16", "BF16"})
BLOCK_TYPES = frozenset({
    "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "TQ1_0", "TQ2_0", "MXFP4", "NVFP4",
    "IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ4_NL", "IQ4_XS",
})  # fmt: skip
"""What `gguf.quants` 0.19 decodes."""
MOST_BLOCKS = 1000
"""Of a model; a file that says more is not believed."""
CHANGED = ("attn_k_b.weight", "attn_v_b.weight")
"""Ends of names of what a converter makes of one weight, transposed."""


def open_gguf(files: Iterable[Path], config: Mapping[str, Any] | None = None) -> StoredCheckpoint:
    """What the weights in GGUF files of one folder are stored as.

    files: one model, split or not. config: config.json of the model that was converted; with it names are the published ones.
    Raises CheckpointError: files that cannot be read, that are not GGUF, or hold no weight. ModuleNotFoundError: the extra
    `gguf` is not installed.
    """
    paths = sorted(files)
    if not paths or len({path.parent for path in paths}) != 1:
        raise CheckpointError("GGUF files of one folder are needed; give the folder, or all files of one model")
    folder = paths[0].parent
    weights: list[StoredWeight] = []
    others: dict[str, TensorHeader] = {}
    problems: list[Problem] = []
    headers = {path: read_header(path) for path in paths}
    for path, header in headers.items():
        if (behind := next(header.behind_the_end(), None)) is not None:
            what = f"it ends at byte {header.num_bytes:,}, before the data of {shown(behind.name, 80)}"
            raise CheckpointError(f"{path}: is not a whole GGUF file ({what}); download it again")
    # of a split model only the first file says what it is
    architecture = next((text for header in headers.values() if (text := header.text("general.architecture"))), "")
    counts = (header.count(f"{architecture}.block_count") or 0 for header in headers.values())
    names = Names(architecture, config or {}, max(count if count <= MOST_BLOCKS else 0 for count in counts))
    for header in headers.values():
        for tensor in header.tensors:
            _add(tensor, names, weights, others, problems)
    if not weights:
        raise CheckpointError(f"{paths[0]}: holds no weights; give all files of the model")
    if config and architecture not in RENAMED_ONLY:
        known = ", ".join(sorted(RENAMED_ONLY))
        what = f"keeps llama.cpp's names of weights; those of {known} are translated"
        problems.append(Problem(f"architecture {shown(architecture)}", what))
    sizes = {path.name: path.stat().st_size for path in paths}
    types = sorted({weight.number for weight in weights if not weight.is_plain})
    return StoredCheckpoint(
        str(folder),
        config or {},
        "gguf",
        f"GGUF ({', '.join(types) or 'not quantized'})",
        tuple(sorted(weights, key=lambda weight: weight.name)),
        KvRule(),
        others,
        tuple(problems),
        OpenShards(folder, sizes=sizes),
    )


class Names:
    """llama.cpp's names of weights -> those of the published checkpoint."""

    def __init__(self, architecture: str, config: Mapping[str, Any], blocks: int) -> None:
        """config: of the published checkpoint; empty, or of an unknown family: no name is translated."""
        self._config, self._family = config, None
        self._candidates: dict[str, list[str]] = {}
        if architecture not in RENAMED_ONLY:
            return
        from gguf import MODEL_ARCH_NAMES, get_tensor_name_map

        try:
            self._family = family_of(config)
        except (AssayError, KeyError):
            return
        arch = next(arch for arch, name in MODEL_ARCH_NAMES.items() if name == architecture)
        for published, (_, name) in get_tensor_name_map(arch, blocks).mapping.items():
            self._candidates.setdefault(name, []).append(published)

    def of(self, name: str, expert: int | None = None) -> str | None:
        """The published name of a weight, of one expert where they are stacked; None: it is not known."""
        if self._family is None or name.endswith(CHANGED):
            return None
        base = name.removesuffix(".weight")
        for published in self._candidates.get(base, ()):
            candidate = f"{published}.weight"
            if expert is not None:
                parent, dot, leaf = published.rpartition(".experts.")
                candidate = f"{parent}{dot}{expert}.{leaf}.weight"
            if self._has(candidate):
                return candidate
        return None

    def _has(self, name: str) -> bool:
        assert self._family is not None
        try:
            form_of(self._family, name, self._config)
        except PlanError:
            return False
        return True


def _add(
    tensor: GgufTensor,
    names: Names,
    weights: list[StoredWeight],
    others: dict[str, TensorHeader],
    problems: list[Problem],
) -> None:
    name, kind, shape = tensor.name, tensor.kind, tensor.shape
    stored_dtype = kind if kind in PLAIN_TYPES else "U8"
    # a row is whole blocks: of codes that are bytes, its last dimension is their number
    stored_shape = shape if stored_dtype != "U8" else (*shape[:-1], tensor.num_bytes // math.prod(shape[:-1]))
    header = TensorHeader(name, stored_dtype, stored_shape, tensor.shard, tensor.begin, tensor.end)
    if len(shape) not in (2, 3) or not name.endswith(".weight"):
        others[name] = header
        return
    for published, piece in _pieces(name, header, names):
        if kind not in PLAIN_TYPES and kind not in BLOCK_TYPES:
            problems.append(Problem(published, f"is {kind}, which is not decoded; {', '.join(sorted(BLOCK_TYPES))} are"))
            continue
        size, part = (shape[-2], shape[-1]), {"weight": Part(piece)}
        if kind in PLAIN_TYPES:
            weights.append(StoredWeight(published, PLAIN, kind, size, "plain", part))
        else:
            weights.append(StoredWeight(published, f"GGUF {kind}", kind, size, "ggml", part, {"type": kind}))


def _pieces(name: str, header: TensorHeader, names: Names) -> Iterator[tuple[str, TensorHeader]]:
    """(name of a weight, its bytes): one for each expert of a stack."""
    if len(header.shape) == 2:
        yield names.of(name) or name, header
        return
    for expert, piece in enumerate(slices(header)):
        yield names.of(name, expert) or f"{name.removesuffix('.weight')}.{expert}.weight", piece
