"""`--quantization assay-emulate`: which layers get fake-quantized activations or keys and values, and what does it.

Which module is quantized, and how, is decided by vLLM's own CompressedTensorsConfig (targets, ignore list, fused names), so
that the emulation covers exactly what the native path would. Weight-only modules get vLLM's plain unquantized methods: their
results are bit-identical to a dense checkpoint of the same values.
"""

# mypy: disallow-subclassing-any=False
# (vLLM lives in another environment than mypy)

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from vllm.model_executor.layers.attention import Attention, MLAAttention
from vllm.model_executor.layers.fused_moe import RoutedExperts, UnquantizedFusedMoEMethod
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors import CompressedTensorsConfig
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

from assay_vllm import EMULATE
from assay_vllm.fake_quant import check_supported, describe, fake_quantize, to_fp8


class EmulatedConfig(CompressedTensorsConfig):
    """Reads the checkpoint's quantization_config as vLLM does; hands out dense methods."""

    emulated_kv_cache: dict[str, Any] | None = None
    """The checkpoint's `kv_cache_scheme`. vLLM itself is told of none: its CPU kernels for it need AVX-512."""

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> EmulatedConfig:
        """As vLLM. NotImplementedError: a KV cache that is not emulated."""
        made: EmulatedConfig = super().from_config(config)
        made.emulated_kv_cache, made.kv_cache_scheme = made.kv_cache_scheme, None
        if made.emulated_kv_cache is not None:
            check_supported_kv_cache(made.emulated_kv_cache)
        return made

    def get_name(self) -> str:
        return EMULATE

    @classmethod
    def get_min_capability(cls) -> int:
        return 0  # any device

    @classmethod
    def override_quantization_method(cls, hf_quant_cfg: Any, user_quant: str | None, hf_config: Any = None) -> str | None:
        """Claims compressed-tensors checkpoints, only when asked for by name."""
        is_emulated = user_quant == EMULATE and hf_quant_cfg.get("quant_method") == "compressed-tensors"
        return EMULATE if is_emulated else None

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> Any:
        if isinstance(layer, LinearBase):
            args = self._input_args(layer, prefix)
            return UnquantizedLinearMethod() if args is None else EmulatedLinearMethod(args, self._stored_names(prefix))
        if isinstance(layer, RoutedExperts):
            self._add_fused_moe_to_target_scheme_map()
            # vLLM lets the first expert speak for all; so do we
            args = self._input_args(layer, f"{prefix}.0.{layer.ckpt_gate_proj_name}")
            return UnquantizedFusedMoEMethod(layer.moe_config) if args is None else EmulatedMoEMethod(layer, args, prefix)
        if isinstance(layer, ParallelLMHead) and self._input_args(layer, prefix) is not None:
            raise NotImplementedError(f"{prefix}: quantized activations of the output head cannot be emulated")
        if isinstance(layer, Attention | MLAAttention) and self.emulated_kv_cache is not None:
            layer.register_forward_pre_hook(round_keys_and_values)
        return None  # embeddings, head, attention: dense

    def _input_args(self, layer: torch.nn.Module, prefix: str) -> Any:
        scheme = self.get_scheme_dict(layer, prefix)
        args: Any = scheme.get("input_activations") if scheme else None
        if args is not None:
            check_supported(args)
        return args

    def _stored_names(self, prefix: str) -> list[str]:
        """Modules of the checkpoint that vLLM fuses into the layer `prefix`."""
        parent, _, last = prefix.rpartition(".")
        return [f"{parent}.{name}" for name in self.packed_modules_mapping.get(last, [last])]


def check_supported_kv_cache(scheme: Mapping[str, Any]) -> None:
    """NotImplementedError for a `kv_cache_scheme` that is not E4M3 with one scale for all."""
    cache_format = tuple(scheme.get(name) for name in ("type", "num_bits", "strategy", "dynamic", "symmetric"))
    if cache_format != ("float", 8, "tensor", False, True):
        kind, bits, strategy, dynamic, _ = cache_format
        how = "dynamic" if dynamic else "static"
        raise NotImplementedError(
            f"a KV cache in {how} {kind}{bits} per {strategy} cannot be emulated; emulated is static float8 per tensor"
        )


def round_keys_and_values(layer: torch.nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Before attention: what goes into the cache, as E4M3 with the layer's scales, or 1, would give it back. With latent
    attention (MLA) these are the latent vector and the rotated key. Queries stay as they are, though some kernels for GPUs
    round them, too."""
    query, *cached = args[:3]
    scales = getattr(layer, _CACHE_SCALES, (1.0, 1.0))
    rounded = (
        x if x is None else (to_fp8(x.float() / scale) * scale).to(x.dtype) for x, scale in zip(cached, scales, strict=True)
    )
    return query, *rounded, *args[3:]


_CACHE_SCALES = "assay_kv_scales"
CACHE_SCALES = (".k_scale", ".v_scale")
_LAYER = re.compile(r"\blayers\.(\d+)\.")


def set_cache_scales(model: torch.nn.Module, stored: Mapping[str, torch.Tensor]) -> int:
    """Give attention layers the scales of their keys and values, by the number of the layer; how many got them.

    stored: by name (`...layers.3.self_attn.k_scale`). Latent attention gets none, as in vLLM, which loads none for it.
    ValueError: a layer has one of the two only, or some layers have scales and others of the same model have not.
    """
    by_layer: dict[str, dict[str, float]] = {}
    for name, scale in stored.items():
        if (at := _LAYER.search(name)) is not None:
            by_layer.setdefault(at[1], {})[name.rpartition(".")[2]] = float(scale.float().reshape(()))
    layers = [m for m in model.modules() if isinstance(m, Attention) and is_rounding(m)]
    numbers = {id(m): at[1] for m in layers if (at := _LAYER.search(m.layer_name)) is not None}
    have = [m for m in layers if numbers.get(id(m)) in by_layer]
    if have and len(have) < len(layers):
        without = next(m.layer_name for m in layers if m not in have)
        raise ValueError(f"{without}: the checkpoint has no scales of its KV cache, and has those of other layers")
    for module in have:
        scales = by_layer[numbers[id(module)]]
        if scales.keys() != {"k_scale", "v_scale"}:
            raise ValueError(f"{module.layer_name}: of k_scale and v_scale the checkpoint has {', '.join(scales)} only")
        setattr(module, _CACHE_SCALES, (scales["k_scale"], scales["v_scale"]))
    return len(have)


def is_rounding(module: torch.nn.Module) -> bool:
    """Whether keys and values of this attention layer are rounded."""
    return round_keys_and_values in getattr(module, "_forward_pre_hooks", {}).values()


class StaticScales:
    """Activation scales of one quantized input that the checkpoint stores; both None for dynamic schemes."""

    def __init__(self, args: Any, modules: list[str]) -> None:
        self.args = args
        self.modules = modules
        self.scale: torch.Tensor | None = None
        self.global_scale: torch.Tensor | None = None

    def find(self, stored: Mapping[str, torch.Tensor], *, global_scale_of_largest: bool) -> None:
        """Take from `stored` what the scheme needs. Several modules share one input and vLLM one scale for them.

        global_scale_of_largest: the global scale of the widest input range is its minimum; vLLM takes that for experts,
        but the maximum for fused linear layers.
        """
        scales = self._collect(stored, "input_scale")
        if scales:
            self.scale = torch.stack(scales).max()
        elif not self.args.dynamic:
            raise ValueError(f"{self.modules[0]}: the checkpoint has no input_scale, which its static activations need")
        global_scales = self._collect(stored, "input_global_scale")
        if global_scales:
            every = torch.stack(global_scales)
            self.global_scale = every.min() if global_scale_of_largest else every.max()
        elif self.args.strategy == "tensor_group":
            raise ValueError(f"{self.modules[0]}: the checkpoint has no input_global_scale, which NVFP4 activations need")

    def _collect(self, stored: Mapping[str, torch.Tensor], part: str) -> list[torch.Tensor]:
        names = (f"{module}.{part}" for module in self.modules)
        return [stored[name].float().reshape(()) for name in names if name in stored]

    def fake_quantize(self, x_TI: torch.Tensor) -> torch.Tensor:
        for name in ("scale", "global_scale"):
            value = getattr(self, name)
            if value is not None and value.device != x_TI.device:
                setattr(self, name, value.to(x_TI.device))
        return fake_quantize(x_TI, self.args, self.scale, self.global_scale)


class EmulatedLinearMethod(UnquantizedLinearMethod):
    """vLLM's dense linear layer behind a fake-quantized input. Under tensor parallelism each rank quantizes its own part."""

    def __init__(self, args: Any, modules: list[str]) -> None:
        super().__init__()
        self.input = StaticScales(args, modules)
        self.scales = (self.input,)

    def apply(self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        rounded = self.input.fake_quantize(x.reshape(-1, x.shape[-1]))
        result: torch.Tensor = super().apply(layer, rounded.view(x.shape), bias)
        return result


class EmulatedMoEMethod(UnquantizedFusedMoEMethod):
    """Experts as a loop in PyTorch: the only place where the input of the down projection can be fake-quantized too."""

    def __init__(self, layer: RoutedExperts, args: Any, prefix: str) -> None:
        super().__init__(layer.moe_config)
        if layer.moe_config.activation.value != "silu":
            raise NotImplementedError(
                f"{prefix}: experts with activation {layer.moe_config.activation.value!r} are not emulated"
            )
        experts = range(layer.global_num_experts)
        first = (layer.ckpt_gate_proj_name, layer.ckpt_up_proj_name)
        self.input = StaticScales(args, [f"{prefix}.{expert}.{name}" for expert in experts for name in first])
        self.inner = StaticScales(args, [f"{prefix}.{expert}.{layer.ckpt_down_proj_name}" for expert in experts])
        self.scales = (self.input, self.inner)

    def process_weights_after_loading(self, layer: RoutedExperts) -> None:
        """Nothing: weights stay as loaded, [experts, out, in]; the parent would re-lay them for its kernel."""

    @property
    def is_monolithic(self) -> bool:
        return False

    def apply(
        self,
        layer: RoutedExperts,
        x: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        shared_experts: Any,
        shared_experts_input: torch.Tensor | None,
    ) -> torch.Tensor:
        """Sum of the chosen experts' outputs [tokens, hidden]. Shared experts are run by vLLM's runner."""
        if layer.apply_router_weight_on_input:
            x, topk_weights = x * topk_weights.to(x.dtype), torch.ones_like(topk_weights)
        input_TH = self.input.fake_quantize(x)
        expert_TK = topk_ids.long() if layer.expert_map is None else layer.expert_map[topk_ids.long()].long()
        output_TH = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        for expert in expert_TK.unique().tolist():
            if expert < 0:
                continue  # lives on another rank
            token_N, slot_N = (expert_TK == expert).nonzero(as_tuple=True)
            gate_up = F.linear(input_TH[token_N], layer.w13_weight[expert], self._bias(layer, "w13_bias", expert))
            gate, up = gate_up.chunk(2, -1)
            inner_NI = self.inner.fake_quantize(F.silu(gate) * up)
            result_NH = F.linear(inner_NI, layer.w2_weight[expert], self._bias(layer, "w2_bias", expert))
            output_TH.index_add_(0, token_N, result_NH.float() * topk_weights[token_N, slot_N, None].float())
        return output_TH.to(x.dtype)

    def _bias(self, layer: RoutedExperts, name: str, expert: int) -> torch.Tensor | None:
        bias: torch.Tensor | None = getattr(layer, name)[expert] if self.moe.has_bias else None
        return bias


def set_static_scales(model: torch.nn.Module, stored: Mapping[str, torch.Tensor]) -> Counter[str]:
    """Give every emulated layer of `model` its scales; counts layers by kind of activation. ValueError if one is missing."""
    kinds: Counter[str] = Counter()
    for module in model.modules():
        method = getattr(module, "quant_method", None)
        if isinstance(method, EmulatedLinearMethod | EmulatedMoEMethod):
            for scales in method.scales:
                scales.find(stored, global_scale_of_largest=isinstance(method, EmulatedMoEMethod))
            kinds[describe(method.input.args)] += 1
    return kinds
