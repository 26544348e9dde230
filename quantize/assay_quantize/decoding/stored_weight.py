"""What one weight of a published checkpoint is stored as: its parts, its number format, the rules of its activations.

A weight w_OI (O = output features, I = input features) is stored as *parts*: codes, scales, zero points. A part is a byte range
of a shard, with a rule that says which of its elements belong to which rows of the weight, so that a slab of rows can be read
alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any, Literal, NamedTuple

from assay_quantize.checkpoint.headers import TensorHeader


class NotRead(Exception):
    """A module's parts cannot be read as the format that config.json declares; the reason, in words."""


class ActivationRule(NamedTuple):
    """How the inputs of a weight are rounded before they are multiplied.

    kind: `none`: they stay in 16 bits. `dynamic`: scales are computed from the inputs. `static`: the scale is stored.
    number: what they are rounded to (`fp8_e4m3`, `int8`, `fp4_e2m1`, ...); None with kind `none`.
    granularity: what shares a scale: `tensor`, `token`, `channel` or `group`. group_size: columns in a group.
    scale: the part that holds the stored scale, or, of NVFP4 activations, the scale of their scales; None: none is stored.
    scale_divides: the stored number divides, as compressed-tensors' `input_global_scale`; else it multiplies.
    symmetric: without zero points.
    """

    kind: Literal["none", "dynamic", "static"] = "none"
    number: str | None = None
    granularity: str | None = None
    group_size: int | None = None
    scale: str | None = None
    scale_divides: bool = False
    symmetric: bool = True


class KvRule(NamedTuple):
    """How keys and values are rounded in the cache, as the checkpoint asks for it.

    number: `fp8_e4m3`, `fp4_e2m1`, `int8`, ...; None: nothing is asked for. granularity: `tensor`, `attn_head`, `token` or
    `group`. dynamic: scales are computed while serving. scales: every tensor that holds a scale of keys, values, queries or
    attention probabilities -> which of these.
    """

    number: str | None = None
    granularity: str | None = None
    dynamic: bool = False
    scales: Mapping[str, str] = {}


class Part(NamedTuple):
    """Some bytes of a weight.

    header: of the tensor, or of the byte range of one expert in it; `shape` as it is decoded, of one to three dimensions.
    axis: dimension of the part along which rows of the weight lie; None: all of the part belongs to every row.
    per_row: elements along that axis for one row of the weight: 1, or 1/128 where blocks share a scale, or 1/8 where codes
    are packed along rows.
    """

    header: TensorHeader
    axis: int | None = 0
    per_row: Fraction = Fraction(1)

    def span(self, begin: int, end: int) -> tuple[int, int]:
        """Elements along `axis` that belong to rows [begin, end) of the weight."""
        assert self.axis is not None
        last = math.ceil(end * self.per_row)
        return math.floor(begin * self.per_row), min(last, self.header.shape[self.axis])


Layout = Literal[
    "plain", "scaled", "compressed_tensors", "group_indexed", "compressed_fp4", "nvfp4", "mxfp4", "gptq", "awq", "ggml"
]
"""How parts become numbers: a row of `decode.py: LAYOUTS`."""


@dataclass(frozen=True)
class StoredWeight:
    """One weight as it is stored.

    name: the weight, `model.layers.0.mlp.down_proj.weight`. format: a row of docs/formats.md. number: what the codes are
    (`int4`, `fp8_e4m3`, `fp4_e2m1`, `Q4_K`, `BF16`). shape: (O, I). layout: how `parts` (local name -> part) become numbers;
    arguments: what that needs to know beside them. shares: (rows, columns) that share a scale; None: no scales. symmetric:
    without zero points. activations: their rule. beside: tensors of the module that say nothing of the weight (scales of
    activations).
    """

    name: str
    format: str
    number: str
    shape: tuple[int, int]
    layout: Layout
    parts: Mapping[str, Part]
    arguments: Mapping[str, Any] = field(default_factory=dict)
    shares: tuple[int, int] | None = None
    symmetric: bool = True
    activations: ActivationRule = field(default_factory=ActivationRule)
    beside: Mapping[str, TensorHeader] = field(default_factory=dict)

    @property
    def module(self) -> str:
        """The module that the weight belongs to."""
        return self.name.removesuffix(".weight")

    @property
    def is_plain(self) -> bool:
        """Stored as numbers of 16 or 32 bits."""
        return self.format == PLAIN

    @property
    def num_bytes(self) -> int:
        """Of all parts: codes, scales, zero points."""
        return sum(part.header.num_bytes for part in self.parts.values())

    @property
    def bits_per_weight(self) -> float:
        """Bits of all parts for one element."""
        return 8 * self.num_bytes / math.prod(self.shape)

    @property
    def row_step(self) -> int:
        """Slabs are decoded from multiples of so many rows on."""
        return math.lcm(*(part.per_row.denominator for part in self.parts.values()))

    @property
    def tensor_names(self) -> tuple[str, ...]:
        """Every stored tensor of the weight, scales of activations included."""
        return tuple(header.name for header in (*(part.header for part in self.parts.values()), *self.beside.values()))


PLAIN = "plain"
"""Format of what is not quantized."""


class Problem(NamedTuple):
    """Something about stored tensors that does not fit. subject: a tensor or module. what: continues the subject's name."""

    subject: str
    what: str


Module = Mapping[str, TensorHeader]
"""Local name -> header, of all tensors of one module."""
Declared = Mapping[str, Any]
"""`quantization_config` of a config.json, or what stands for it."""


class Method(NamedTuple):
    """What a config declares, ready to be asked about modules.

    weight: (module, its tensors) -> what its weight is stored as; NotRead: it cannot be read, with the reason. kv: rule of the
    KV cache, without its scales. what: the format in a sentence.
    """

    weight: Callable[[str, Module], StoredWeight]
    kv: KvRule
    what: str
