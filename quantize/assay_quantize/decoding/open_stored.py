"""A checkpoint as the weights it stands for: `open_stored`, and rows of them in FP32.

Opening reads headers and config alone, so it works for a checkpoint on the hub too; what a module is stored as follows from its
tensors and from what config.json says of numbers. A module that cannot be read is a `Problem`; the others can be read.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, Self

import numpy as np

from assay.errors import CheckpointError, PlanError
from assay.recipes.families import family_of
from assay.safe_files import read_json_object
from assay_quantize.checkpoint.checkpoint import Checkpoint
from assay_quantize.checkpoint.declaration import MODELOPT_CONFIG, read_declaration
from assay_quantize.checkpoint.fused_experts import is_fused, split_experts
from assay_quantize.checkpoint.headers import TensorHeader
from assay_quantize.checkpoint.joined_attention import split_attention
from assay_quantize.checkpoint.shard_files import OpenShards
from assay_quantize.checkpoint.stored import ATTENTION_LEAVES, CODE_LEAVES, QUANTIZED_LEAVES
from assay_quantize.decoding import gpt_oss_experts
from assay_quantize.decoding.methods import method_of
from assay_quantize.decoding.parts import FLOATS
from assay_quantize.decoding.stored_weight import PLAIN, KvRule, Method, Module, NotRead, Part, Problem, StoredWeight
from assay_quantize.formats.schemes import DTYPE_BYTES

if TYPE_CHECKING:
    from torch import Tensor

SLAB_BYTES = 64 << 20
"""Of FP32 that `slabs` gives at a time, about."""

STORED_AS_CODES = ("I8", "U8", "F8_E4M3", "F8_E5M2", "I32")


class ShardReader(Protocol):
    """Where the data of a checkpoint come from: `OpenShards` of a folder, ranges of files elsewhere."""

    def read_into(self, view: memoryview, name: str, begin: int, if_shorter: str, /) -> None:
        """Fill `view` from byte `begin` of a shard on."""

    def prefetch(self, name: str, begin: int, num_bytes: int, /) -> None:
        """These bytes of a shard are read soon, and in one go."""

    def release(self, shards: Collection[str], /) -> None:
        """Nothing of these is read again soon: what they take elsewhere than in a folder of the user's can go."""

    def close(self) -> None:
        """No more is read."""


class ByteRange(NamedTuple):
    """[begin, end) of a file."""

    shard: str
    begin: int
    end: int


class Examination(NamedTuple):
    """The scales and values of one weight, counted.

    scales: how many there are; of these not_finite are NaN or infinite, zero are 0 (their weights are lost, unless they were
    0), negative are below 0 (which AutoRound writes on purpose). bad_values: decoded values that are NaN or infinite.
    """

    scales: int = 0
    not_finite: int = 0
    zero: int = 0
    negative: int = 0
    bad_values: int = 0


@dataclass(frozen=True)
class StoredCheckpoint:
    """Every weight of a checkpoint as it is stored, and its values. A context manager, or call `close`.

    method: `quant_method` as it is declared; None: nothing is declared. what: the format in a sentence. weights: by the order
    of their names. kv: rule of the KV cache, with its scales. others: tensors that are no weight (norms, biases, buffers).
    problems: modules that cannot be read and tensors that belong to nothing.
    """

    location: str
    config: Mapping[str, Any]
    method: str | None
    what: str
    weights: tuple[StoredWeight, ...]
    kv: KvRule
    others: Mapping[str, TensorHeader]
    problems: tuple[Problem, ...]
    _shards: ShardReader | None = field(default=None, repr=False)
    _cache_scales: Mapping[str, TensorHeader] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_by_name", {weight.name: weight for weight in self.weights})

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Close all files."""
        if self._shards is not None:
            self._shards.close()

    def release(self, shards: Collection[str]) -> None:
        """As of `ShardReader`."""
        if self._shards is not None:
            self._shards.release(shards)

    def shards_of(self, name: str) -> set[str]:
        """The files that a weight, or a tensor that is none, lies in."""
        if name in self.others:
            return {self.others[name].shard}
        weight = self.weight(name)
        return {part.header.shard for part in weight.parts.values()} | {header.shard for header in weight.beside.values()}

    def byte_ranges(self, name: str, rows: tuple[int, int] | None = None) -> list[ByteRange]:
        """What `read_values` or `read_other` of a weight, or a tensor that is none, or of its rows [begin, end), reads at once
        each; of values that lie apart in their file the range that holds them."""
        if name in self.others:
            return [_range_of(Part(self.others[name], None if rows is None else 0), rows)]
        weight = self.weight(name)
        beside = [Part(header, None) for header in weight.beside.values()]
        return [_range_of(part, rows) for part in (*weight.parts.values(), *beside)]

    def prefetch(self, ranges: Collection[ByteRange]) -> None:
        """These are read soon, each in one go. CheckpointError as of `read_weight`."""
        if self._shards is not None:
            for shard, begin, end in sorted(set(ranges)):
                self._shards.prefetch(shard, begin, end - begin)

    def weight(self, name: str) -> StoredWeight:
        """By name, with or without `.weight`. CheckpointError: there is none, or it cannot be read."""
        by_name: Mapping[str, StoredWeight] = getattr(self, "_by_name")  # noqa: B009
        made = by_name.get(name) or by_name.get(f"{name}.weight")
        if made is None:
            module = name.removesuffix(".weight")
            problem = next((problem for problem in self.problems if problem.subject == module), None)
            raise CheckpointError(f"{self.location}: {name} {problem.what if problem else 'is no weight of this checkpoint'}")
        return made

    def read_weight(self, name: str, rows: tuple[int, int] | None = None) -> Tensor:
        """w_OI in FP32, or its rows [begin, end): the values that the stored codes stand for.

        Reads and decodes only those rows, widened to whole blocks. CheckpointError: no such weight, a file that cannot be read,
        parts that contradict each other, values that are not finite.
        """
        weight = self.weight(name)
        begin, end = rows or (0, weight.shape[0])
        return self._checked(weight, self._decoded(weight, begin, end))

    def read_values(self, name: str, rows: tuple[int, int] | None = None) -> Tensor:
        """As `read_weight`, but what is stored as numbers keeps its dtype: to be copied once, to where it is needed."""
        weight = self.weight(name)
        if not weight.is_plain or weight.arguments.get("transposed"):
            return self.read_weight(name, rows)
        begin, end = rows or (0, weight.shape[0])
        return self._checked(weight, self._parts(weight, begin, end)["weight"])

    def _checked(self, weight: StoredWeight, values: Tensor) -> Tensor:
        """CheckpointError: some are NaN or infinite. The least and the largest tell, in one pass over the memory."""
        least, largest = values.aminmax()
        if not bool(least.isfinite() & largest.isfinite()):
            count = int((~values.isfinite()).sum())
            raise CheckpointError(f"{self.location}: {weight.name}: {count:,} of its values are NaN or infinite; it is damaged")
        return values

    def slabs(self, name: str, num_bytes: int = SLAB_BYTES) -> Iterator[tuple[int, int, Tensor]]:
        """(begin, end, rows [begin, end) in FP32) of a weight, from its first row to its last, of about `num_bytes` each."""
        weight = self.weight(name)
        step = weight.row_step
        rows = max(step, num_bytes // (4 * weight.shape[1]) // step * step)
        for begin in range(0, weight.shape[0], rows):
            end = min(begin + rows, weight.shape[0])
            yield begin, end, self.read_weight(weight.name, (begin, end))

    def read_activation_scale(self, name: str) -> Tensor | None:
        """The stored scale of a weight's activations, FP32, as a factor: a step is it, or the scale of scales of NVFP4.

        None: the rule stores none. CheckpointError: it should be there and is not.
        """
        weight = self.weight(name)
        leaf = weight.activations.scale
        if leaf is None:
            return None
        if leaf not in weight.beside:
            raise CheckpointError(f"{self.location}: {weight.module} has no {leaf}, which its activations need")
        stored = self._read(Part(weight.beside[leaf], None), 0, 0).float()
        return stored.reciprocal() if weight.activations.scale_divides else stored

    def read_cache_scale(self, name: str) -> float:
        """A scale of keys or values (`KvRule.scales`); of several the largest."""
        return float(self._read(Part(self._cache_scales[name], None), 0, 0).float().max())

    def read_part(self, name: str, part: str) -> Tensor:
        """A whole part of a weight, as it is stored."""
        weight = self.weight(name)
        header = weight.parts[part].header if part in weight.parts else weight.beside[part]
        return self._read(Part(header, None), 0, 0)

    def read_other(self, name: str, rows: tuple[int, int] | None = None) -> Tensor:
        """A tensor that is no weight, or its rows [begin, end), as it is stored."""
        return self._read(Part(self.others[name], None if rows is None else 0), *(rows or (0, 0)))

    def examine(self, name: str, rows: tuple[int, int] | None = None) -> Examination:
        """What is wrong with the values of a weight, counted; nothing is refused for its values."""
        weight = self.weight(name)
        begin, end = rows or (0, weight.shape[0])
        parts = self._parts(weight, begin, end)
        scale = next((parts[leaf] for leaf in ("weight_scale", "scales") if leaf in parts), None)
        made = self._decode(weight, parts)
        bad = int((~made.isfinite()).sum())
        if scale is None:
            return Examination(bad_values=bad)
        from assay_quantize.decoding.numbers import float_scale

        factors = float_scale(scale)
        return Examination(
            factors.numel(), int((~factors.isfinite()).sum()), int((factors == 0).sum()), int((factors < 0).sum()), bad
        )

    # -------------------------------------------------------------------------------------------- reading
    def _decoded(self, weight: StoredWeight, begin: int, end: int) -> Tensor:
        if not 0 <= begin < end <= weight.shape[0]:
            raise CheckpointError(
                f"{self.location}: {weight.name} has rows 0 to {weight.shape[0] - 1}, not {begin} to {end - 1}"
            )
        step = weight.row_step
        first = begin // step * step
        last = min(-(-end // step) * step, weight.shape[0])
        made = self._decode(weight, self._parts(weight, first, last))
        return made[begin - first : end - first]

    def _parts(self, weight: StoredWeight, begin: int, end: int) -> dict[str, Tensor]:
        return {leaf: self._read(part, begin, end) for leaf, part in weight.parts.items()}

    def _decode(self, weight: StoredWeight, parts: Mapping[str, Tensor]) -> Tensor:
        from assay_quantize.decoding.decode import decode

        try:
            return decode(parts, weight)
        except (IndexError, RuntimeError, ValueError, AssertionError, TypeError) as problem:
            reason = " ".join(str(problem).split())[:200]
            raise CheckpointError(f"{self.location}: {weight.name} cannot be decoded as {weight.format}: {reason}") from None

    def _read(self, part: Part, begin: int, end: int) -> Tensor:
        """The elements of a part that belong to rows [begin, end) of the weight, in memory of their own."""
        import torch

        from assay_quantize.checkpoint.torch_tensors import TORCH_DTYPES, read_rows

        if self._shards is None:
            raise CheckpointError(f"{self.location}: its weights are on the hub; download it first and give the folder")
        header, shape, read_into = part.header, part.header.shape, self._shards.read_into
        if part.axis is None:
            return read_rows(read_into, header, 0, shape[0] if shape else 1).reshape(shape)
        low, high = part.span(begin, end)
        if part.axis == 0:
            return read_rows(read_into, header, low, high)
        if (low, high) == (0, shape[1]):
            return read_rows(read_into, header, 0, shape[0])
        size = DTYPE_BYTES[header.dtype]
        flat = np.empty((shape[0], (high - low) * size), np.uint8)
        for row in range(shape[0]):
            what = f"truncated: ends inside {header.name}; download it again"
            read_into(flat[row].data, header.shard, header.begin + (row * shape[1] + low) * size, what)
        return torch.from_numpy(flat).view(TORCH_DTYPES[header.dtype])


# ------------------------------------------------------------------------------------------------ opening
def open_stored(
    checkpoint: Checkpoint, modelopt_config: Mapping[str, Any] | None = None, reader: ShardReader | None = None
) -> StoredCheckpoint:
    """What a checkpoint's weights are stored as.

    checkpoint: opened with `allow_quantized=True`. modelopt_config: its hf_quant_config.json where it is on the hub; that of a
    folder is read here. reader: reads its data; None: they are read from its folder, or cannot be. Raises CheckpointError for a
    format that is not read, by its name, and for a config that is malformed.
    """
    folder = checkpoint.folder
    if modelopt_config is None and folder is not None and MODELOPT_CONFIG in checkpoint.files:
        modelopt_config = read_json_object(folder, MODELOPT_CONFIG)
    beside = {} if modelopt_config is None else {MODELOPT_CONFIG: modelopt_config}
    declaration = read_declaration(checkpoint.config, beside)
    tensors = gpt_oss_experts.split_experts(checkpoint.tensors)
    problems: list[Problem] = []
    tensors = _split_plain_experts(checkpoint, tensors, problems)
    try:
        tensors, _ = split_attention(checkpoint.location, checkpoint.config, tensors)
    except CheckpointError as error:
        problems.append(Problem("attention", str(error).removeprefix(f"{checkpoint.location}: ")))
    kv_scales = {name: ATTENTION_LEAVES[leaf] for name in tensors if (leaf := name.rpartition(".")[2]) in ATTENTION_LEAVES}
    modules: dict[str, dict[str, TensorHeader]] = {}
    for name, header in tensors.items():
        module, _, leaf = name.rpartition(".")
        if name not in kv_scales:
            modules.setdefault(module, {})[leaf] = header
    quantized = {name for name, module in modules.items() if _is_quantized(module)}
    method = None
    if declaration is not None:
        method = method_of(checkpoint.location, declaration.method, declaration.declared)
    elif quantized:
        raise CheckpointError(
            f"{checkpoint.location}: {min(quantized)} is stored as {_dtypes(modules[min(quantized)])}, but config.json has no "
            f"quantization_config and there is no {MODELOPT_CONFIG}; complete the download"
        )
    weights, others = _weights(modules, quantized, method, problems)
    return StoredCheckpoint(
        checkpoint.location,
        checkpoint.config,
        None if declaration is None else declaration.method,
        "not quantized" if method is None else method.what,
        tuple(sorted(weights, key=lambda weight: weight.name)),
        (method.kv if method else KvRule())._replace(scales=kv_scales),
        others,
        tuple(problems),
        reader if reader is not None or folder is None else OpenShards(folder, sizes=checkpoint.shards),
        {name: tensors[name] for name in kv_scales},
    )


def _is_quantized(module: Module) -> bool:
    weight = module.get("weight")
    if weight is not None and weight.dtype in STORED_AS_CODES and len(weight.shape) > 1:
        return True
    return bool(module.keys() & (QUANTIZED_LEAVES - {"scales"})) or ("scales" in module and bool(module.keys() & CODE_LEAVES))


def _range_of(part: Part, rows: tuple[int, int] | None) -> ByteRange:
    """Of the rows of a weight where they lie behind each other, else of the whole part."""
    header = part.header
    if rows is None or part.axis != 0 or header.strides is not None:
        return ByteRange(header.shard, header.begin, header.end)
    row_bytes = header.num_bytes // max(1, header.shape[0])
    low, high = part.span(*rows)
    return ByteRange(header.shard, header.begin + low * row_bytes, header.begin + high * row_bytes)


def _dtypes(module: Module) -> str:
    return ", ".join(f"{leaf} {header.dtype}" for leaf, header in sorted(module.items()))


def _split_plain_experts(
    checkpoint: Checkpoint, tensors: dict[str, TensorHeader], problems: list[Problem]
) -> dict[str, TensorHeader]:  # fmt: skip
    """Experts fused in three dimensions, one by one; as they are, with a problem, where their layout is not read."""
    try:
        family = family_of(checkpoint.config)
    except PlanError:
        return tensors  # whose experts nobody knows
    if not any(is_fused(name, family) for name in tensors):
        return tensors
    try:
        return split_experts(checkpoint.location, checkpoint.config, tensors)[0]
    except CheckpointError as error:
        problems.append(Problem("experts", str(error).removeprefix(f"{checkpoint.location}: ")))
        return tensors


def _weights(
    modules: Mapping[str, Module], quantized: set[str], method: Method | None, problems: list[Problem]
) -> tuple[list[StoredWeight], dict[str, TensorHeader]]:
    weights: list[StoredWeight] = []
    others: dict[str, TensorHeader] = {}
    for name, module in modules.items():
        taken: set[str] = set()
        if name in quantized:
            assert method is not None
            try:
                weights.append(method.weight(name, module))
                taken = {
                    header.name for header in module.values()
                }  # also what no reader asks for: `weight_shape`, `act_scales`
                taken -= {header.name for leaf, header in module.items() if leaf == "bias"}
            except NotRead as problem:
                problems.append(Problem(name, str(problem)))
        elif (plain := module.get("weight")) is not None and len(plain.shape) == 2 and plain.dtype in FLOATS:
            weights.append(_plain_weight(name, plain))
            taken = {plain.name}
        others |= {f"{name}.{leaf}" if name else leaf: header for leaf, header in module.items() if header.name not in taken}
    return weights, others


def _plain_weight(module: str, header: TensorHeader) -> StoredWeight:
    shape = (header.shape[0], header.shape[1])
    return StoredWeight(f"{module}.weight", PLAIN, header.dtype, shape, "plain", {"weight": Part(header)})
