r"""Statistics of activations, layer by layer, from inside vLLM's workers: what `assay diagnose locate` compares.

    VLLM_SERVER_DEV_MODE=1 python -m vllm.entrypoints.openai.api_server ... --enforce-eager \
        --worker-extension-cls assay_vllm.activations.ActivationWorker
    POST /collective_rpc {"method": "watch_activations"}, then "take_activations", then "unwatch_activations"

Every rank answers for itself. Nothing is hooked until `watch_activations`, nothing stays hooked after `unwatch_activations`;
only numbers leave the server: extremes, mean, RMS, non-finite counts, the experts chosen, and a sketch of every token's
activation (a seeded random projection), from which distances between two servers are estimated without shipping tensors.

What is recorded is the rank's own share, before ranks are summed: a fault of one rank is otherwise seen in all of them.
Compiled graphs do not call hooks: the server must run eagerly.
"""

from __future__ import annotations

import base64
import functools
import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor, nn


class ActivationWorker:
    """Methods for vLLM's worker class (`--worker-extension-cls`); arguments and results are JSON."""

    rank: int
    model_runner: Any
    _watch: Watch | None = None

    def watch_activations(self, options: str = "{}") -> dict[str, Any]:
        """Start recording. options: {"sketch_width": numbers per token and module, default 16}. Tells rank and ranks."""
        self.unwatch_activations()
        self._watch = Watch(self.model_runner.get_model(), **json.loads(options))
        parallel = self.model_runner.vllm_config.parallel_config
        return {"rank": self.rank, "tensor_parallel_size": parallel.tensor_parallel_size, "num_points": self._watch.num_points}

    def take_activations(self) -> dict[str, Any]:
        """What was recorded since the last call, in order of first use, and forget it."""
        return {"rank": self.rank, "points": [] if self._watch is None else self._watch.take()}

    def weigh_parameters(self) -> dict[str, Any]:
        """Sizes of every weight this rank holds, experts one by one."""
        return {"rank": self.rank, "points": weights_of(self.model_runner.get_model())}

    def unwatch_activations(self) -> dict[str, Any]:
        """Remove every hook."""
        if self._watch is not None:
            self._watch.remove()
            self._watch = None
        return {"rank": self.rank}


@functools.cache
def projection(width: int, sketch_width: int) -> Tensor:
    """Random signs [width, sketch_width] / sqrt(sketch_width), the same in every process: E |x P|^2 = |x|^2."""
    import torch

    signs = torch.randint(0, 2, (width, sketch_width), generator=torch.Generator().manual_seed(width)) * 2 - 1
    scaled: Tensor = signs.float() / sketch_width**0.5
    return scaled


def as_base64(pieces: list[Tensor]) -> str:
    """Bytes of the pieces, one after the other."""
    return base64.b64encode(b"".join(piece.contiguous().numpy().tobytes() for piece in pieces)).decode("ascii")


class Point:
    """All values [tokens, width] that one place of the model produced on this rank, reduced to numbers as they come.

    kind: embedding, norm, residual, linear, sum (of a row-parallel linear layer over ranks), attention, experts (their sum),
    expert (one of them, unweighted), router, logits; weight: a parameter, not an activation.
    partial: a share that differs between ranks; else all ranks must hold the same values.
    """

    def __init__(self, name: str, kind: str, partial: bool) -> None:
        self.name, self.kind, self.partial = name, kind, partial
        self.num_tokens = self.num_values = self.non_finite = 0
        self.total = self.squares = 0.0
        self.largest = 0.0
        self.sketches: list[Tensor] = []
        self.inputs: list[Tensor] = []
        self.chosen: list[Tensor] = []
        self.rows: list[Tensor] = []

    def add(self, values: Tensor, sketch_width: int) -> None:
        """Values [..., width] of one call. sketch_width 0: sizes only."""
        import torch

        flat_TW = values.detach().float().cpu().reshape(-1, values.shape[-1])
        finite = torch.isfinite(flat_TW)
        self.non_finite += int((~finite).sum())
        clean_TW = torch.where(finite, flat_TW, 0.0)
        self.num_tokens += flat_TW.shape[0]
        self.num_values += flat_TW.numel()
        self.total += float(clean_TW.sum(dtype=torch.float64))
        self.squares += float(clean_TW.double().square().sum())
        self.largest = max(self.largest, float(clean_TW.abs().max()) if clean_TW.numel() else 0.0)
        if sketch_width:
            self.sketches.append(clean_TW @ projection(flat_TW.shape[1], sketch_width))

    def add_input(self, values: Tensor, sketch_width: int) -> None:
        """What the module was given in that call: without it, what it adds cannot be told from what it passes on."""
        import torch

        flat_TW = torch.nan_to_num(values.detach().float().cpu().reshape(-1, values.shape[-1]), 0.0, 0.0, 0.0)
        self.inputs.append(flat_TW @ projection(flat_TW.shape[1], sketch_width))

    def summary(self) -> dict[str, Any]:
        """JSON. base64: FP32 sketches [tokens, sketch_width] of outputs and inputs; INT32 experts chosen [tokens, k], ascending
        per token; INT32 rows [tokens], which tokens an expert saw."""
        count = max(self.num_values, 1)
        return {
            "name": self.name,
            "kind": self.kind,
            "partial": self.partial,
            "num_tokens": self.num_tokens,
            "max_abs": self.largest,
            "mean": self.total / count,
            "rms": (self.squares / count) ** 0.5,
            "non_finite": self.non_finite,
            "sketch": as_base64(self.sketches),
            "input": as_base64(self.inputs),
            "chosen": as_base64(self.chosen),
            "top_k": self.chosen[0].shape[1] if self.chosen else 0,
            "rows": as_base64(self.rows),
        }


def weights_of(model: nn.Module) -> list[dict[str, Any]]:
    """A point of kind `weight` for every floating-point parameter of linear layers and experts; of packed ones, the scales.

    Shares of one weight on two ranks have nearly the same RMS (5 % at most in the experts of tiny-glm), activations do not.
    """
    from vllm.model_executor.layers.fused_moe import RoutedExperts
    from vllm.model_executor.layers.linear import ColumnParallelLinear, LinearBase, RowParallelLinear

    weights: list[Point] = []

    def weigh(name: str, values: Tensor, partial: bool) -> None:
        if not values.numel():
            return  # vLLM's CPU linear layers keep a packed copy that nobody can read, and empty the weight
        weights.append(Point(name, "weight", partial))
        weights[-1].add(values.detach().reshape(1, -1), 0)

    for name, module in model.named_modules():
        if isinstance(module, LinearBase):
            partial = isinstance(module, ColumnParallelLinear | RowParallelLinear) and module.tp_size > 1
            for own, values in module.named_parameters(recurse=False):
                if values.is_floating_point() and own != "bias":
                    weigh(f"{name}.{own}", values, partial)
        elif isinstance(module, RoutedExperts):
            numbers = (
                module.expert_map.ge(0).nonzero().flatten().tolist() if module.use_ep else range(module.global_num_experts)
            )
            for own, values in module.named_parameters(recurse=False):
                if values.is_floating_point() and values.ndim > 1 and len(values) == len(numbers):
                    for expert, share in zip(numbers, values, strict=True):
                        partial = module.moe_config.tp_size > 1
                        weigh(f"{name.removesuffix('.routed_experts')}.{expert}.{own}", share, partial)
    return [point.summary() for point in weights]


class Watch:
    """Hooks on one model. vLLM's own classes say what a module is, so that every architecture is covered."""

    def __init__(self, model: nn.Module, sketch_width: int = 16) -> None:
        from vllm.distributed import get_tensor_model_parallel_world_size
        from vllm.model_executor.layers.attention import Attention
        from vllm.model_executor.layers.fused_moe.runner.moe_runner_interface import MoERunnerInterface
        from vllm.model_executor.layers.layernorm import RMSNorm
        from vllm.model_executor.layers.linear import LinearBase
        from vllm.model_executor.layers.logits_processor import LogitsProcessor
        from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding

        self.sketch_width = sketch_width
        self.num_ranks = get_tensor_model_parallel_world_size()
        self._points: dict[str, Point] = {}
        self._remove: list[Callable[[], None]] = []
        kinds: list[tuple[type, Callable[[str, Any], None]]] = [
            (ParallelLMHead, lambda name, module: None),  # used through the logits processor
            (VocabParallelEmbedding, functools.partial(self._hook, kind="embedding", partial=False)),
            (RMSNorm, self._hook_norm),
            (LinearBase, self._hook_linear),
            (Attention, functools.partial(self._hook, kind="attention", partial=self.num_ranks > 1)),
            (MoERunnerInterface, self._hook_experts),
            (LogitsProcessor, functools.partial(self._hook, kind="logits", partial=False)),
        ]
        for name, module in model.named_modules():
            for kind, hook in kinds:
                if isinstance(module, kind):
                    hook(name, module)
                    break
        self.num_points = len(self._remove)

    def take(self) -> list[dict[str, Any]]:
        points, self._points = self._points, {}
        return [point.summary() for point in points.values()]

    def remove(self) -> None:
        for step in self._remove:
            step()
        self._remove = []

    def _point(self, name: str, kind: str, partial: bool) -> Point:
        return self._points.setdefault(name, Point(name, kind, partial))

    def _add(self, name: str, kind: str, partial: bool, values: Any, given: Any = None) -> None:
        """Outputs `values` and, of modules with weights, the input they were `given`."""
        if values is None or not values.numel():
            return
        point = self._point(name, kind, partial)
        point.add(values, self.sketch_width)
        if given is not None:
            point.add_input(given, self.sketch_width)

    def _hook(self, name: str, module: nn.Module, kind: str, partial: bool) -> None:
        def see(_: nn.Module, inputs: Any, output: Any) -> None:
            self._add(name, kind, partial, output[0] if isinstance(output, tuple) else output)

        self._remove.append(module.register_forward_hook(see).remove)

    def _hook_norm(self, name: str, module: nn.Module) -> None:
        """A norm that adds its input to the residual stream returns both. Norms inside heads are the rank's own."""
        partial = self.num_ranks > 1 and name.endswith(("q_norm", "k_norm"))

        def see(_: nn.Module, inputs: Any, output: Any) -> None:
            if isinstance(output, tuple):
                self._add(f"{name}.residual", "residual", partial, output[1])
                output = output[0]
            self._add(name, "norm", partial, output)

        self._remove.append(module.register_forward_hook(see).remove)

    def _hook_linear(self, name: str, module: Any) -> None:
        """Row-parallel layers sum over ranks before they return: their own share is computed once more."""
        from vllm.model_executor.layers.linear import ColumnParallelLinear, RowParallelLinear

        shared = isinstance(module, RowParallelLinear) and module.tp_size > 1
        partial = isinstance(module, ColumnParallelLinear | RowParallelLinear) and module.tp_size > 1

        def see(_: nn.Module, inputs: Any, output: Any) -> None:
            output = output[0] if isinstance(output, tuple) else output
            if shared and module.input_is_parallel and module.reduce_results:
                self._add(name, "linear", True, module.quant_method.apply(module, inputs[0], None), inputs[0])
                self._add(f"{name}.sum", "sum", False, output)
            else:
                self._add(name, "linear", partial, output, inputs[0])

        self._remove.append(module.register_forward_hook(see).remove)

    # ---------------------------------------------------------------------------------------- experts
    def _hook_experts(self, name: str, module: Any) -> None:
        """The sum of all experts, the router's choice, and every expert alone on the tokens that were sent to it."""
        self._hook(name, module, "experts", False)
        experts = module.routed_experts
        method = "forward_monolithic" if experts.quant_method.is_monolithic else "forward_modular"
        own = getattr(experts, method)

        def modular(x: Tensor, topk_weights: Tensor, topk_ids: Tensor, *others: Any, **named: Any) -> Any:
            kept = x.clone()  # some kernels work in place
            result = own(x, topk_weights, topk_ids, *others, **named)
            first_row = self._see_routing(name, topk_ids)
            if not experts.use_ep:  # else every call is a collective one
                self._see_each_expert(name, experts, kept, topk_ids, first_row)
            return result

        def monolithic(x: Tensor, router_logits: Tensor, input_ids: Any = None) -> Any:
            _, topk_ids = module.router.select_experts(hidden_states=x, router_logits=router_logits, input_ids=input_ids)
            self._see_routing(name, topk_ids)
            return own(x, router_logits, input_ids)

        setattr(experts, method, monolithic if method == "forward_monolithic" else modular)
        self._remove.append(lambda: delattr(experts, method))

    def _see_routing(self, name: str, topk_ids: Tensor) -> int:
        """Number of tokens seen before these."""
        point = self._point(f"{name}.router", "router", False)
        before = point.num_tokens
        point.num_tokens += topk_ids.shape[0]
        point.chosen.append(topk_ids.detach().cpu().int().sort(dim=-1).values)
        return before

    def _see_each_expert(self, name: str, experts: Any, x_TH: Tensor, topk_ids_TK: Tensor, first_row: int) -> None:
        """Each expert's unweighted output, by the kernel that serves: once more for its tokens, with weight 1."""
        import torch

        for expert in sorted(set(topk_ids_TK.flatten().tolist())):
            token_N = (topk_ids_TK == expert).any(-1).nonzero().flatten()
            ids_N1 = torch.full((len(token_N), 1), expert, dtype=topk_ids_TK.dtype, device=topk_ids_TK.device)
            ones_N1 = torch.ones((len(token_N), 1), dtype=torch.float32, device=x_TH.device)
            output_NH = experts.quant_method.apply(
                layer=experts,
                x=x_TH[token_N].contiguous(),
                topk_weights=ones_N1,
                topk_ids=ids_N1,
                shared_experts=None,
                shared_experts_input=None,
            )
            self._add(f"{name}.{expert}", "expert", experts.moe_config.tp_size > 1, output_NH, x_TH[token_N])
            self._points[f"{name}.{expert}"].rows.append((token_N + first_row).cpu().int())
