"""Stored tensors -> weights: which tensors make up one weight, in which form it is stored, what shape and how many bits it has.

The one place that knows what the parts of a quantized weight are called. Forms are told by local names, dtypes and shapes
alone; what is declared (`declaration.py`) is compared with them elsewhere.

    plain     bf16, fp16, fp32                             weight
    FP8       fp8_block, fp8_channel, fp8_tensor, mxfp8    weight F8_E4M3, weight_scale(_inv) or scale
    INT8      int8                                         weight I8, weight_scale
    INT       int_packed                                   weight_packed I32, weight_scale (compressed-tensors)
              gptq, awq                                    qweight I32, scales, qzeros (g_idx)
    FP4       nvfp4                                        weight_packed or weight U8, weight_scale F8_E4M3, global scale
              mxfp4                                        the same with exponents for scales; DeepSeek-V4: I8, scale
    MLX       mlx                                          weight U32, scales (biases)
    others    bitsandbytes, unknown
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from assay.recipes.family import Stacked
from assay.recipes.family_names import split_layer
from assay_quantize.checkpoint.headers import TensorHeader

PLAIN = {"BF16": "bf16", "F16": "fp16", "F32": "fp32", "F64": "fp64"}

WEIGHT_LEAVES = frozenset({
    "weight", "weight_packed", "weight_scale", "weight_scale_inv", "weight_scale_2", "weight_global_scale", "weight_zero_point",
    "weight_g_idx", "weight_shape", "scale", "qweight", "qzeros", "scales", "g_idx", "input_scale", "input_global_scale",
    "input_zero_point", "activation_scale", "pre_quant_scale", "smooth_factor", "biases",
})  # fmt: skip
"""Local names of what belongs to one weight."""
BARE_SCALE = "scale"
"""Of DeepSeek-V4; elsewhere something else may be called so."""
WEIGHT_SCALE_LEAVES = ("weight_scale_inv", "weight_scale", BARE_SCALE)
"""Scales of FP8 and FP4 weights, and of INT4 by compressed-tensors."""
SHAPE_LEAF = "weight_shape"
"""Rows and columns of a packed weight."""
PACKED_LEAVES = frozenset({
    "weight_packed", "weight_global_scale", "weight_zero_point", "weight_g_idx", "qweight", "qzeros", "scales", "g_idx",
    "weight_scale_2",
})  # fmt: skip
"""Parts that only weights of less than 8 bits have."""
ACTIVATION_LEAVES = ("input_scale", "activation_scale")
"""Scales of activations, measured for another scheme."""
CODE_LEAVES = frozenset({"weight_packed", "qweight", "blocks"})
QUANTIZED_LEAVES = (WEIGHT_LEAVES - {"weight", BARE_SCALE, "pre_quant_scale", "smooth_factor"}) | {"blocks", "act_scales"}
"""Local names that only quantized modules have; `scale` of DeepSeek-V4 is one where its weight is not plain."""
ATTENTION_LEAVES = {
    "k_scale": "key", "v_scale": "value", "q_scale": "query", "kv_scale": "key and value", "prob_scale": "probability",
    "k_zero_point": "key zero", "v_zero_point": "value zero", "output_scale": "output",
    "k_global_scale": "key", "v_global_scale": "value", "q_global_scale": "query",
}  # fmt: skip
"""Local name of a tensor -> what of the attention it scales."""
CACHE_LEAVES = ("k_scale", "v_scale", "q_scale", "kv_scale", "prob_scale")
"""Scales of attention's own numbers, its KV cache above all, one for a layer: beside the projections, as ModelOpt writes them,
or beside their module."""
MARKS = PACKED_LEAVES | {*ACTIVATION_LEAVES, SHAPE_LEAF, "weight_scale", "weight_scale_inv", "absmax", "quant_map", "SCB"}
"""Last parts of names that only quantized checkpoints have; the last three are bitsandbytes'."""
GLOBAL_LEAVES = ("weight_global_scale", "weight_scale_2")
"""Scales of a whole weight in NVFP4; the first divides, the second multiplies."""
INPUT_LEAVES = ("input_scale", "input_global_scale", "activation_scale")
SCALE_LEAVES = (*WEIGHT_SCALE_LEAVES, "scales", *GLOBAL_LEAVES, *INPUT_LEAVES)
_CODES = ("qweight", "weight_packed", "weight")
_BITSANDBYTES = (".absmax", ".quant_map", ".nested_absmax", ".nested_quant_map")
_STACKED = re.compile(
    r"(?P<experts>.+\.experts)\.(?P<part>gate_up_proj|down_proj|gate_proj|up_proj|w13|w2)(?:\.|_)?(?P<leaf>[a-z]\w*)?"
)
"""All experts of a layer in one tensor: `mlp.experts.gate_up_proj`, `..._packed`, `..._blocks`, `....weight_scale`."""
_STACKED_MOE = re.compile(r"(?P<moe>.+\.moe)\.(?P<part>gate_proj|up_proj|down_proj)")
"""The same of Step-3.5: `moe.gate_proj.weight`."""
STACKED_PARTS = {"gate_up_proj": ("gate_proj", "up_proj"), "w13": ("w1", "w3")}


class Weight(NamedTuple):
    """One weight as it is stored.

    module: its name without the last component; of stacked experts the name of the tensor. form: see above. shape: of what it
    stands for, experts first where they are stacked; None where that cannot be told. parts: local name -> tensor.
    of_expert_0: of experts that are stacked under names of their family's own, the modules of the first.
    """

    module: str
    form: str
    shape: tuple[int, ...] | None
    parts: Mapping[str, TensorHeader]
    is_stacked: bool
    of_expert_0: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return f"{self.module}.weight"

    @property
    def is_quantized(self) -> bool:
        return self.form not in PLAIN.values()

    @property
    def num_bytes(self) -> int:
        return sum(part.num_bytes for part in self.parts.values())

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape) if self.shape is not None else 0

    @property
    def representatives(self) -> tuple[str, ...]:
        """Modules as vLLM's rules see them: of stacked experts the projections of expert 0."""
        if self.of_expert_0:
            return self.of_expert_0
        if not self.is_stacked:
            return (self.module,)
        experts, _, part = self.module.rpartition(".")
        experts = experts if experts.endswith(".experts") else f"{experts}.experts"
        return tuple(f"{experts}.0.{name}" for name in STACKED_PARTS.get(part, (part,)))


class StoredTensors(NamedTuple):
    """weights: module -> weight. others: tensors that are no part of one: norms, biases, scales of the KV cache, ..."""

    weights: dict[str, Weight]
    others: dict[str, TensorHeader]


def weights_of(
    tensors: Iterable[TensorHeader],
    bits: int | None,
    stacked_names: Mapping[str, Stacked] | None = None,
    packings: Sequence[tuple[int, int]] = (),
) -> StoredTensors:  # fmt: skip
    """bits: of packed integers, as config.json says; None: it does not. stacked_names: `FamilyNames.stacked`.
    packings: (bits, columns that share a scale) of packed integers, where config.json has several."""
    by_family = {name.removesuffix(".weight"): form for name, form in (stacked_names or {}).items()}
    of_expert_0: dict[str, tuple[str, ...]] = {}
    parts: dict[str, dict[str, TensorHeader]] = {}
    others: dict[str, TensorHeader] = {}
    stacked: set[str] = set()
    for header in tensors:
        module, _, leaf = header.name.rpartition(".")
        if first := _stacked_by_family(header.name, by_family):
            module, leaf = header.name.removesuffix(".weight"), "weight"
            of_expert_0[module] = first
        elif (match := _stacked(header.name)) is not None:
            module, leaf = match
            stacked.add(module)
        elif header.name.endswith(_BITSANDBYTES) or ".quant_state." in header.name:
            module, leaf = header.name.partition(".weight.")[0], "weight." + header.name.partition(".weight.")[2]
        elif leaf not in WEIGHT_LEAVES:
            others[header.name] = header
            continue
        parts.setdefault(module, {})[leaf] = header
    weights = {}
    for module, of_module in parts.items():
        codes = next((of_module[leaf] for leaf in _CODES if leaf in of_module), None)
        if codes is None or (len(codes.shape) < 2 and len(of_module) == 1 and codes.dtype in PLAIN):
            others |= {header.name: header for header in of_module.values()}  # norms, and scales without a weight
            continue
        is_stacked = (
            module in stacked or module in of_expert_0 or (len(codes.shape) == 3 and _STACKED_MOE.fullmatch(module) is not None)
        )
        form, first = _form(of_module), of_expert_0.get(module, ())
        told = None if form == "mlx" else bits  # of which single modules may have others
        shape = _shape(form, of_module, told or _bits_of(of_module, packings))
        weights[module] = Weight(module, form, shape, of_module, is_stacked, first)
    return StoredTensors(weights, others)


def _stacked_by_family(name: str, stacked: Mapping[str, Stacked]) -> tuple[str, ...]:
    """The modules of expert 0 in a tensor that the family stacks; empty: it is none."""
    at = split_layer(name) if stacked else None
    form = None if at is None else stacked.get(at.rest.removesuffix(".weight"))
    if at is None or form is None or form.parts[0].endswith(".bias"):
        return ()
    parts = (part.replace("{expert}", "0").removesuffix(".weight") for part in form.parts)
    return tuple(f"{at.root}.{at.layer}.{part}" for part in parts)


def _stacked(name: str) -> tuple[str, str] | None:
    """(module, local name) of a tensor of all experts of a layer; None: it is none."""
    match = _STACKED.fullmatch(name)
    if match is None or re.search(r"\.experts\.\d+\.", name):
        return None
    leaf = {None: "weight", "blocks": "weight_packed", "scales": "weight_scale", "packed": "weight_packed",
            "scale": "weight_scale", "scale_inv": "weight_scale_inv", "shape": "weight_shape",
            "global_scale": "weight_global_scale"}.get(match["leaf"], match["leaf"])  # fmt: skip
    if leaf not in WEIGHT_LEAVES:
        return None
    return f"{match['experts']}.{match['part']}", str(leaf)


def _form(parts: Mapping[str, TensorHeader]) -> str:
    dtypes = {leaf: header.dtype for leaf, header in parts.items()}
    scale = next((parts[leaf] for leaf in ("weight_scale", "weight_scale_inv", "scale") if leaf in parts), None)
    has_exponents = scale is not None and scale.dtype in ("U8", "F8_E8M0")
    if any(leaf.startswith("weight.") for leaf in parts):
        return "bitsandbytes"
    if "qweight" in parts:
        qweight, scales = parts["qweight"], parts.get("scales")
        is_awq = scales is not None and len(scales.shape) == len(qweight.shape) and scales.shape[-1] != qweight.shape[-1]
        return "awq" if is_awq else "gptq"
    codes = dtypes.get("weight_packed", dtypes.get("weight"))
    if codes == "I32":
        return "int_packed"
    if codes == "U32" and "scales" in parts:
        return "mlx"
    if codes == "U8" or (codes == "I8" and has_exponents):
        return "mxfp4" if has_exponents and not any(leaf in parts for leaf in GLOBAL_LEAVES) else "nvfp4"
    if codes == "I8":
        return "int8"
    if codes in ("F8_E4M3", "F8_E5M2"):
        return _fp8_form(parts.get("weight", parts.get("weight_packed")), scale, has_exponents=has_exponents)
    return PLAIN.get(str(codes), "unknown")


def _fp8_form(codes: TensorHeader | None, scale: TensorHeader | None, *, has_exponents: bool) -> str:
    if codes is None or scale is None:
        return "fp8"
    if math.prod(scale.shape) == 1:
        return "fp8_tensor"
    if has_exponents and scale.shape[:-1] == codes.shape[:-1] and scale.shape[-1] * 32 == codes.shape[-1]:
        return "mxfp8"
    experts = codes.shape[0] if len(codes.shape) == 3 else 1
    rows = codes.shape[-2] if len(codes.shape) > 1 else 0
    return "fp8_channel" if math.prod(scale.shape) == experts * rows else "fp8_block"


def _bits_of(parts: Mapping[str, TensorHeader], packings: Sequence[tuple[int, int]]) -> int | None:
    """Of packed integers, the one way of packing after which their groups come out even; None: not one."""
    codes, scale = parts.get("weight_packed", parts.get("weight")), parts.get("weight_scale", parts.get("scales"))
    if codes is None or scale is None or not codes.shape or len(scale.shape) != len(codes.shape):
        return None
    columns = {bits: codes.shape[-1] * 32 // bits for bits, _ in packings}
    fitting = {bits for bits, group in packings if columns[bits] == group * scale.shape[-1]}
    return fitting.pop() if len(fitting) == 1 else None


def _shape(form: str, parts: Mapping[str, TensorHeader], bits: int | None) -> tuple[int, ...] | None:
    codes = next(parts[leaf] for leaf in _CODES if leaf in parts)
    shape = codes.shape
    if form in ("nvfp4", "mxfp4"):
        if len(shape) == 4:  # gpt-oss: [experts, rows, blocks, 16 bytes]
            return (*shape[:2], shape[2] * shape[3] * 2)
        return (*shape[:-1], shape[-1] * 2)
    if form == "int_packed":
        return (*shape[:-1], shape[-1] * 32 // (bits or 4))
    if form == "mlx":
        return None if bits is None else (*shape[:-1], shape[-1] * 32 // bits)
    if form in ("gptq", "awq"):
        scales = parts.get("scales")
        if scales is None or len(scales.shape) != 2 or len(shape) != 2:
            return None
        columns = shape[0] if form == "awq" else shape[0] * 32 // packed_bits(parts, bits)
        return scales.shape[-1], columns
    return None if form == "bitsandbytes" else shape


def packed_bits(parts: Mapping[str, TensorHeader], bits: int | None) -> int:
    """Bits of GPTQ and AWQ codes: as the shapes of their zero points say, else as config.json does, else 4."""
    qzeros, scales = parts.get("qzeros"), parts.get("scales")
    if qzeros is not None and scales is not None and len(qzeros.shape) == len(scales.shape) == 2 and scales.shape[1]:
        return max(1, qzeros.shape[1] * 32 // scales.shape[1])
    return bits or 4
