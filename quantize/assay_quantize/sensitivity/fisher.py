r"""Proxy `fisher`: what a part's rounding costs, to second order, from one forward and one backward pass for all parts at once.

On text that the model itself wrote, the curvature of KL in the weights is the Fisher information F of its log-probabilities, so
that KL is about 1/2 sum F_ij dW_ij^2 with F's diagonal. Of a linear layer y = W x with gradient g of the text's log-probability
at y, that diagonal is the matrix sum_t g_ti^2 x_tj^2. Kept of it are its sums over rows and over columns, and it is taken as
their product (as of independent rows and columns): a number for each row and each column, where the matrix would be another
model. Each token's g and x stay together in these sums: tokens with huge inputs have small gradients behind a norm, and
E[g_i^2] E[x_j^2] puts ten times too much on the last layer's `down_proj`. Left out: cross terms between weights and between
tokens, everything beyond second order, and the rounding of activations. The pass needs the model in memory; a scheme more costs
only its rounding.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from assay.callbacks import Say
from assay.records.diagnosis.sensitivity import WorstTensor
from assay_quantize.calibration.quiet import loading
from assay_quantize.sensitivity.rounded import largest_shares
from assay_quantize.sensitivity.texts import Batch


@dataclass
class Curvature:
    """Of one weight, FP64 sums over tokens t, with gradients g of the text's log-probability at its outputs and inputs x.

    rows_O: g_to^2 |x_t|^2. columns_I: |g_t|^2 x_ti^2. The sum of either is the same."""

    rows_O: Tensor
    columns_I: Tensor

    def of(self, delta_OI: Tensor, num_scored: int) -> float:
        """1/2 sum F_ij delta_ij^2 for each scored token."""
        total = float(self.columns_I.sum())
        if not total:
            return 0.0  # nothing that was read depends on it
        weighted = self.rows_O @ (delta_OI.double().square() @ self.columns_I)
        return float(0.5 * weighted / total / num_scored)


class _Watch(TorchFunctionMode):
    def __init__(self, names: Mapping[int, tuple[str, ...]], curvatures: dict[str, Curvature]) -> None:
        super().__init__()
        self._names, self._curvatures = names, curvatures

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        watched = func is torch.nn.functional.linear and output.requires_grad
        if watched and (names := self._names.get(args[1].data_ptr())):
            inputs = args[0].detach().reshape(-1, args[0].shape[-1])
            output.register_hook(lambda g: self._add(names, inputs, g.reshape(len(inputs), -1)))
        return output

    def _add(self, names: tuple[str, ...], inputs_TI: Tensor, gradients_TO: Tensor) -> None:
        inputs_TI = inputs_TI.double().square()
        norm_T = inputs_TI.sum(1)
        for name, part_TO in zip(names, gradients_TO.double().square().chunk(len(names), 1), strict=True):
            rows, columns = (norm_T @ part_TO).cpu(), (part_TO.sum(1) @ inputs_TI).cpu()
            curvature = self._curvatures.setdefault(name, Curvature(torch.zeros_like(rows), torch.zeros_like(columns)))
            curvature.rows_O += rows
            curvature.columns_I += columns


def curvatures(
    model: Any, names: Mapping[int, tuple[str, ...]], batches: Sequence[Batch], say: Say
) -> dict[str, Curvature]:  # fmt: skip
    """Of every weight that text reaches. batches: of one text each, so that no padding is counted. Deterministic on a CPU."""
    by_weight: dict[str, Curvature] = {}
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    for number, batch in enumerate(batches):
        assert len(batch.texts) == 1, "padding would count as tokens"
        entered = model.get_input_embeddings()(batch.ids_BT).requires_grad_(True)
        with loading(f"{model.name_or_path}: transformers cannot run it"), _Watch(names, by_weight):
            states = model.base_model(inputs_embeds=entered, use_cache=False).last_hidden_state
        scored = batch.scored_BT
        logits = model.get_output_embeddings()(states[scored]).float()
        ahead = batch.ids_BT.roll(-1, 1)[scored]
        logits.log_softmax(-1).gather(-1, ahead.unsqueeze(-1)).sum().backward()
        if (number + 1) % 16 == 0 or number + 1 == len(batches):
            say(f"fisher: {number + 1} of {len(batches)} texts")
    return by_weight


def damage(
    rounded: Iterable[tuple[str, Tensor, Tensor]], by_weight: Mapping[str, Curvature], num_scored: int
) -> tuple[float, tuple[WorstTensor, ...]]:
    """(nats a token, the weights with the largest shares) of a part. rounded: of `Rounder.weights`."""
    nats = {
        name: by_weight[name].of(back - plain, num_scored) if name in by_weight else 0.0 for name, plain, back in rounded
    }  # fmt: skip
    return sum(nats.values()), largest_shares(nats)
