"""How vLLM holds each module, against how its weight is stored: quantized or not, by which method, with which kernel."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from assay_vllm.replay.findings import Finding
from assay_vllm.replay.headers import Shards, layer_of

_PLAIN = frozenset(
    {
        "UnquantizedLinearMethod", "UnquantizedFusedMoEMethod", "UnquantizedEmbeddingMethod",
        "Qwen4ExpPLEUnquantizedEmbeddingMethod", "KimiK3LowLatencyLinearMethod", "KimiK3LowLatencyEmbeddingMethod",
        "Qwen4ExpLowLatencyLinearMethod", "GLM52LowLatencyLinearMethod",
    }
)  # fmt: skip
_PARTS = frozenset(
    {"weight_packed", "weight_scale", "weight_scale_inv", "weight_global_scale", "weight_shape", "qweight", "scale"}
)
"""Names of what only a quantized weight has beside it."""
_Key = tuple[str, str | None, str, str | None, str | None]
_COMPUTED = "rotary_emb.inv_freq"
"""Old checkpoints store it; vLLM computes it from the config."""
_INT8_KERNEL = "CutlassInt8ScaledMMLinearKernel"
LATER = "chosen after loading or at run time"


@dataclass(frozen=True)
class Row:
    """Modules of one kind. scheme: how the weight is stored (None: 16 or 32 bits); kernel: None and `why` if it is unknown."""

    what: str
    scheme: str | None
    method: str
    kernel: str | None
    why: str | None
    num_modules: int
    example: str


def stored_schemes(shards: Shards, schemes: Mapping[str, str | None] | None) -> dict[str, str | None]:
    """Module of the checkpoint -> scheme of its weight; without a plan `quantized` where it has scales beside it."""
    by_module: dict[str, str | None] = {}
    for tensors in shards.values():
        for name, header in tensors.items():
            module, _, part = name.rpartition(".")
            if part in _PARTS:
                by_module[module] = "quantized"
            elif part == "weight" and len(header.shape) > 1:
                by_module.setdefault(module, None)
    return by_module if schemes is None else {module: schemes.get(module, stored) for module, stored in by_module.items()}


def check_modules(
    model: torch.nn.Module,
    taken: Mapping[str, Iterable[str]],
    schemes: Mapping[str, str | None],
    converted: Collection[str] = (),
) -> tuple[list[Row], list[Finding]]:
    """(what there is, where vLLM and the stored weights disagree).

    taken: tensor of the checkpoint -> parameters. converted: modules that vLLM's loader dequantizes, as it does the `wk` of
    GLM-5's indexer (`_try_load_fp8_indexer_wk`).
    """
    modules = dict(model.named_modules())
    scheme_of: dict[str, str | None] = {}
    wrong: list[tuple[str, str | None, str, str]] = []
    for tensor, parameters in taken.items():
        stored = tensor.rpartition(".")[0]
        if stored not in schemes:
            continue
        for name in {parameter.rpartition(".")[0] for parameter in parameters}:
            method = method_of(modules[name])
            if method is None:
                continue
            scheme_of[name] = schemes[stored]
            if (schemes[stored] is None) != (method in _PLAIN) and stored not in converted:
                wrong.append((stored, schemes[stored], name, method))
    return _rows(modules, scheme_of), _disagreements(wrong)


def refused_when_run(rows: Iterable[Row], capability: int) -> Iterator[Finding]:
    """Kernels that vLLM's oracle chooses and whose compiled code refuses the GPU at the first step.

    capability: 100 is B200. `CutlassInt8ScaledMMLinearKernel` calls itself supported everywhere; `dispatch_scaled_mm`
    (csrc/libtorch_stable/quantization/w8a8/cutlass/c3x/scaled_mm_helper.hpp) has no INT8 function from SM 100 on.
    """
    for row in rows:
        if row.kernel == _INT8_KERNEL and capability >= 100:
            message = f"{row.kernel}: its compiled code says `Int8 not supported on SM{capability}` at the first step"
            remedy = "quantize to FP8 (fp8-channel, fp8) for this GPU, or serve it on Hopper or older"
            yield Finding("kernel", message, where=row.example, remedy=remedy, count=row.num_modules)


def disagreement_of(
    model: torch.nn.Module,
    tensor: str,
    parameter: str,
    schemes: Mapping[str, str | None],
    fused: Mapping[str, Sequence[str]],
) -> Finding | None:  # fmt: skip
    """Why vLLM has no `parameter` (the end of a name) for `tensor`: it holds that module in another way. None: it does not.

    fused: vLLM's `packed_modules_mapping`.
    """
    stored = tensor.rpartition(".")[0]
    held = parameter.rpartition(".")[0]
    parent, _, last = held.rpartition(".")
    ends = [held, *(f"{parent}.{name}" for name, members in fused.items() if last in members)]
    for name, module in model.named_modules():
        if (method := method_of(module)) is None or stored not in schemes:
            continue
        if any(f".{name}".endswith(f".{end}") for end in ends) and (schemes[stored] is None) != (method in _PLAIN):
            return _disagreements([(stored, schemes[stored], name, method)])[0]
    return None


def _disagreements(wrong: Iterable[tuple[str, str | None, str, str]]) -> list[Finding]:
    by_kind: dict[tuple[str | None, str], dict[str, str]] = {}
    for stored, scheme, name, method in wrong:
        by_kind.setdefault((scheme, method), {}).setdefault(stored, name)
    return [
        Finding(
            "quantization",
            f"{stored} is stored {'in 16 or 32 bits' if scheme is None else f'as {scheme}'}, vLLM holds {name} with {method}",
            where=stored,
            remedy="correct the ignore list: it must cover what is kept and nothing else",
            count=len(modules),
        )
        for (scheme, method), modules in by_kind.items()
        for stored, name in [*modules.items()][:1]
    ]


def unused_tensors(shards: Shards, by_target: Collection[str], by_draft: Collection[str] | None) -> list[Finding]:
    """Modules of which no parameter takes anything: vLLM drops them in silence. by_target, by_draft: tensors that they loaded.

    by_draft: None if none was loaded: then a layer of which nothing is taken is the MTP block. Of MTP layers beside the decoder
    layers vLLM may draft with some alone (MiMo-V2-Flash has three, and it loads the first): the others are none of its own.
    """
    used = {name.rpartition(".")[0] for name in (*by_target, *(by_draft or ()))}
    layers, drafts = _layers(by_target) | _layers(by_draft or ()), by_draft is not None
    of_the_block = {_root(layer) for layer in _layers(by_draft or ())} - {_root(layer) for layer in _layers(by_target)}
    unused: dict[str, None] = {}
    for tensors in shards.values():
        for name in tensors:
            module, place = name.rpartition(".")[0], layer_of(name)
            no_part = place is not None and place[0] not in layers
            of_a_draft = name.startswith("mtp.") or no_part
            if place is not None and no_part and _root(place[0]) in of_the_block:
                continue
            if module not in used and (drafts or not of_a_draft) and not name.endswith(_COMPUTED):
                unused[module] = None
    if not unused:
        return []
    first, *others = unused
    message = f"stored, but no parameter of vLLM takes it: {first}{f' and {len(others)} more modules' if others else ''}"
    return [Finding("unused tensor", message, where=first, remedy=None, count=len(unused))]


def _layers(names: Collection[str]) -> set[str]:
    return {place[0] for name in names if (place := layer_of(name)) is not None}


def _root(layer: str) -> str:
    """`model.mtp.layers` of `model.mtp.layers.0`."""
    return layer.rpartition(".")[0]


def cut_scales(model: torch.nn.Module, taken: Mapping[str, Sequence[str]], shards: Shards) -> list[Finding]:
    """Weights in groups of which a rank holds another part than of their scales; one finding for all of them.

    vLLM refuses that of INT4. Of NVFP4 it rounds the number of a rank's scales down
    (`CompressedTensorsW4A4Fp4.create_weights`), and `load_row_parallel_weight` cuts weight and scales each by their own number
    of columns: nothing is raised, and groups get scales of their neighbours.
    """
    stored = {name: header.shape for tensors in shards.values() for name, header in tensors.items()}
    held = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    wrong = []
    for scale in (name for name in taken if name.endswith(".weight_scale")):
        module = scale.rpartition(".")[0]
        weight = next((name for leaf in ("weight_packed", "weight") if (name := f"{module}.{leaf}") in taken), None)
        if weight is None or len(stored[scale]) != 2 or stored[scale][0] != stored[weight][0]:
            continue  # one scale, or blocks of rows
        (_, columns), (_, scales) = stored[weight], stored[scale]
        of_weight, of_scale = held[taken[weight][0]], held[taken[scale][0]]
        is_alike = len(of_weight) == len(of_scale) and of_weight[:-1] == of_scale[:-1]  # not turned for a kernel
        if is_alike and scales > 1 and of_weight[-1] * scales != of_scale[-1] * columns:
            wrong.append(
                (module, f"{of_weight[-1]:,} of {columns:,} columns as stored and {of_scale[-1]:,} of {scales:,} scales")
            )
    if not wrong:
        return []
    module, parts = wrong[0]
    message = (
        f"{module}: a rank holds {parts} of each row, so a group is cut; vLLM raises nothing, and applies scales of others"
    )
    remedy = "serve it on fewer tensor-parallel ranks, or keep this role in 16 bits"
    return [Finding("group size", message, where=module, remedy=remedy, count=len(wrong))]


# ------------------------------------------------------------------------------------------------ methods and kernels
def _rows(modules: Mapping[str, torch.nn.Module], scheme_of: Mapping[str, str | None]) -> list[Row]:
    parameters: dict[_Key, list[str]] = {}
    key: _Key
    for name, module in modules.items():
        if (attention := getattr(module, "attn_backend", None)) is not None:
            backend = attention.get_name() if hasattr(attention, "get_name") else attention.name  # of a vision tower: an enum
            key = ("attention", None, type(module).__name__, str(backend), None)
        elif (method := method_of(module)) is not None and name in scheme_of:
            kernel = kernel_of(module)
            key = (_what(module), scheme_of[name], method, kernel, LATER if kernel is None else None)
        else:
            continue
        parameters.setdefault(key, []).append(name)
    return [Row(*key, num_modules=len(names), example=names[0]) for key, names in parameters.items()]


def _what(module: torch.nn.Module) -> str:
    name = type(module).__name__
    if "Experts" in name or "MoE" in name:
        return "experts"
    return "embedding" if "Embedding" in name or "LMHead" in name else "linear"


def method_of(module: torch.nn.Module) -> str | None:
    """vLLM's quantization method of a module, the scheme where the method is one for all; None: the module has none."""
    method = getattr(module, "quant_method", None)
    if method is None or not hasattr(method, "create_weights"):
        return None
    scheme = getattr(module, "scheme", None)
    return type(scheme if scheme is not None else method).__name__


def kernel_of(module: torch.nn.Module) -> str | None:
    """The kernel that vLLM's oracle chose while it built the module; None: it has not chosen yet."""
    holder = getattr(module, "scheme", None) or module.quant_method
    backends = [value for name, value in vars(holder).items() if name.endswith("_backend") and value is not None]
    experts = getattr(holder, "experts_cls", None)
    # beside it `mxfp4_backend` keeps what it was before the choice
    if experts is not None and getattr(holder, "use_cutlass_mxfp4", False):
        return f"CUTLASS ({experts.__name__})"
    if backends:
        name = getattr(backends[0], "name", str(backends[0]))
        return name if experts is None else f"{name} ({experts.__name__})"
    kernels: list[Any] = [
        value for name, value in vars(holder).items() if "kernel" in name or name in ("fp8_linear", "w8a8_block_fp8_linear")
    ]
    named = [kernel for kernel in kernels if type(kernel).__module__.startswith("vllm.")]
    return type(named[0]).__name__ if named else None
