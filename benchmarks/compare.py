"""Are two quantized checkpoints the same, bit by bit? Without it, a ratio of speeds would say nothing."""

from __future__ import annotations

import json
import mmap
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

QUANTIZED_DTYPES = ("F8_E4M3", "I8")
SLAB_BYTES = 4 << 20
GATE_OR_UP = re.compile(r".*\.(gate_proj|up_proj)")


@dataclass(frozen=True)
class Comparison:
    """num_packed: quantized weights of each. num_tensors: of ours, of all kinds. num_identical: same name, dtype, shape, bytes.
    num_shared_scale: tensors of gate and up projections whose NVFP4 global scale we share and llm-compressor does not.
    different: everything else; empty when all is as it should be.
    """

    scheme: str
    num_packed: tuple[int, int]
    num_tensors: int
    num_identical: int
    num_shared_scale: int
    different: tuple[str, ...]

    @property
    def passed(self) -> bool:
        return not self.different and self.num_packed[0] == self.num_packed[1] > 0


@dataclass(frozen=True)
class Stored:
    """One tensor: its bytes are `data[begin:end]`."""

    dtype: str
    shape: tuple[int, ...]
    data: mmap.mmap
    begin: int
    end: int

    def same(self, other: Stored) -> bool:
        if (self.dtype, self.shape) != (other.dtype, other.shape):
            return False
        if self.end - self.begin != other.end - other.begin:
            return False
        steps = range(0, self.end - self.begin, SLAB_BYTES)
        return all(self.slab(step) == other.slab(step) for step in steps)

    def slab(self, step: int) -> bytes:
        """A copy: bytes are compared at the speed of memory, memoryviews one by one."""
        return self.data[self.begin + step : min(self.begin + step + SLAB_BYTES, self.end)]


def compare(scheme: str, ours: Path, theirs: Path) -> Comparison:
    """Every tensor of the folder `ours` against the folder `theirs`."""
    with opened(ours) as left, opened(theirs) as right:
        excused = modules_with_other_global_scale(left, right)
        identical, shared = 0, 0
        different = [f"{name}: only in llm-compressor's" for name in sorted(right.keys() - left.keys())]
        for name, tensor in left.items():
            if name not in right:
                different.append(f"{name}: only in ours")
            elif tensor.same(right[name]):
                identical += 1
            elif module_of(name) in excused:
                shared += 1
            else:
                different.append(f"{name}: other bytes")
        return Comparison(
            scheme, (num_packed(left), num_packed(right)), len(left), identical, shared, tuple(different)
        )  # fmt: skip


def modules_with_other_global_scale(left: dict[str, Stored], right: dict[str, Stored]) -> set[str]:
    """Gate and up projections whose global scale differs: the one difference that is meant."""
    scales = (name for name in left.keys() & right.keys() if name.endswith(".weight_global_scale"))
    return {module_of(n) for n in scales if GATE_OR_UP.fullmatch(module_of(n)) and not left[n].same(right[n])}


def module_of(name: str) -> str:
    return name.rpartition(".")[0]


def num_packed(tensors: dict[str, Stored]) -> int:
    """Quantized weights: packed ones, and plain ones of a quantized dtype."""
    return sum(
        name.endswith(".weight_packed") or (name.endswith(".weight") and tensor.dtype in QUANTIZED_DTYPES)
        for name, tensor in tensors.items()
    )


@contextmanager
def opened(folder: Path) -> Iterator[dict[str, Stored]]:
    """Name -> tensor, of all safetensors files of a folder, mapped."""
    tensors: dict[str, Stored] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb") as file:
            data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        begin = 8 + int.from_bytes(data[:8], "little")
        entries = json.loads(data[8:begin])
        entries.pop("__metadata__", None)
        for name, entry in entries.items():
            first, last = entry["data_offsets"]
            tensors[name] = Stored(entry["dtype"], tuple(entry["shape"]), data, begin + first, begin + last)
    yield tensors
