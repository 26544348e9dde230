"""A shard cut into slabs: ranges of rows of one weight, small enough to be held, in the order in which they are worked on.

Nothing here reads or computes; the hollow GLM-5 (59,585 tensors, 1.5 TB) is cut in seconds.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Literal, NamedTuple

from assay.records.plan import Plan, TensorPlan
from assay_quantize.formats.schemes import DTYPE_BYTES
from assay_quantize.kernels import needs_amax, row_multiple

SLAB_BYTES = 4 << 20
"""Source bytes of a slab: large enough that Python's part is lost in it; small enough to stay near the cache, and for workers
to end together (docs/decisions/storage.md, 071)."""


Work = Literal["amax", "copy", "cast", "quantize", "add"]


class Slab(NamedTuple):
    """One unit of work.

    work: `copy` and `cast` read bytes [begin, end) of the tensor as it is stored, `quantize`, `amax` and the `cast` of a weight
    stored as FP8 read rows, `add` reads nothing. amax_key: whose largest magnitude it adds to (`amax`), or needs (`quantize`);
    None: neither.
    is_first, is_last: of its tensor.
    """

    work: Work
    tensor: TensorPlan
    begin: int
    end: int
    amax_key: str | None
    is_first: bool
    is_last: bool


def observer_of(plan: Plan) -> str:
    """How scales are chosen: `minmax`, or what the precision recipe says under `observer`."""
    return str(plan.precision_recipe.get("observer", "minmax"))


def amax_key(tensor: TensorPlan) -> str | None:
    """What shares one largest magnitude: the fused group, or the tensor itself; None when the scheme needs none."""
    if tensor.action != "quantize" or tensor.scheme is None or not needs_amax(tensor.scheme):
        return None
    return tensor.name if tensor.fused_group is None else tensor.fused_group


def amax_members(plan: Plan, tensors: Sequence[TensorPlan]) -> dict[str, list[TensorPlan]]:
    """For every magnitude that `tensors` need, all tensors of the plan it is taken over, also those of other shards."""
    needed = {key for tensor in tensors if (key := amax_key(tensor)) is not None}
    members: dict[str, list[TensorPlan]] = defaultdict(list)
    for tensor in plan.tensors if needed else ():
        if (key := amax_key(tensor)) is not None and key in needed:
            members[key].append(tensor)
    return members


def row_bytes(tensor: TensorPlan) -> int:
    """Bytes of one row of the logical weight."""
    return math.prod(tensor.shape[1:]) * DTYPE_BYTES[tensor.logical_dtype]


def least_rows(tensor: TensorPlan) -> int:
    """Rows of the smallest slab that the tensor can be cut into."""
    if tensor.action != "quantize" or tensor.scheme is None:
        return 1
    return min(tensor.shape[0], row_multiple(tensor.scheme))


def least_slab_bytes(plan: Plan) -> int:
    """The smallest slab size that works for every tensor of the plan."""
    return max((least_rows(t) * row_bytes(t) for t in plan.tensors if is_read_by_rows(t)), default=1)


def is_read_by_rows(tensor: TensorPlan) -> bool:
    """Whether a tensor is read by rows of its logical weight; else as the bytes that are stored."""
    return tensor.action in ("quantize", "dequantize")


def slab_ranges(tensor: TensorPlan, slab_bytes: int) -> Iterator[tuple[int, int]]:
    """[begin, end) of every slab of a tensor: rows, or bytes for what is copied or cast. An empty tensor is one empty slab."""
    if is_read_by_rows(tensor):
        size, smallest = tensor.shape[0], least_rows(tensor)
        step = max(smallest, slab_bytes // max(1, row_bytes(tensor)) // smallest * smallest)
    else:
        size, step = tensor.num_bytes, max(8, slab_bytes // 8 * 8)
    for begin in range(0, size, step) if size else (0,):
        yield begin, min(begin + step, size)


def slabs_of(order: Sequence[TensorPlan], members: Mapping[str, Sequence[TensorPlan]], slab_bytes: int) -> Iterator[Slab]:
    """All units of work of a shard, in order.

    order: the tensors as `layout` sorted them. members: of every magnitude that is needed. Magnitudes are taken one tensor
    ahead of where they are needed: late enough that the second reading comes from the page cache, early enough that
    no worker waits.
    """
    known: set[str] = set()

    def magnitudes(tensor: TensorPlan) -> Iterator[Slab]:
        key = amax_key(tensor)
        if key is not None and key not in known:
            known.add(key)
            for member in members[key]:
                yield from _slabs("amax", member, key, slab_bytes)

    for number, tensor in enumerate(order):
        if number == 0:
            yield from magnitudes(tensor)
        if number + 1 < len(order):
            yield from magnitudes(order[number + 1])
        yield from _slabs(_WORK.get(tensor.action, "cast"), tensor, amax_key(tensor), slab_bytes)


_WORK: Mapping[str, Work] = {"keep": "copy", "quantize": "quantize", "add": "add"}
"""Action -> work; of all others it is `cast`."""


def _slabs(work: Work, tensor: TensorPlan, key: str | None, slab_bytes: int) -> Iterator[Slab]:
    last_end = tensor.shape[0] if is_read_by_rows(tensor) else tensor.num_bytes
    for begin, end in slab_ranges(tensor, slab_bytes):
        yield Slab(work, tensor, begin, end, key, begin == 0, end == last_end)
