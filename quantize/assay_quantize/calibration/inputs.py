"""What enters every weight of a model while text goes through it: squares, largest magnitudes, ranges, tokens by expert.

Scheme `nvfp4` gives inputs a range without having looked at any (`schemes.py`): a group of 16 activations has one E4M3 scale,
its largest magnitude / 6 times `INPUT_GLOBAL_SCALE`. Above 448 it saturates, and the largest activations are cut off. Below
2^-6 it has fewer than three bits behind the first. At 2^-10 and below it is rounded to 0, and the whole group with it.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from assay.errors import QuantizeError
from assay.records.calibration import LayerCoverage, Nvfp4Inputs
from assay_quantize.checkpoint.fused_experts import FUSED_PARTS
from assay_quantize.checkpoint.importance import INPUT_AMAX, K_AMAX, V_AMAX
from assay_quantize.formats.schemes import INPUT_GLOBAL_SCALE

GROUP = 16
LARGEST_SCALE, SMALLEST_NORMAL, ROUNDED_TO_ZERO = 448.0, 2.0**-6, 2.0**-10
_EXPERT = re.compile(r"(?:^|.*\.)layers\.(\d+)\..*\bexperts\.(\d+)\.down_proj\.weight")


@dataclass
class InputRange:
    """Groups of the inputs of one weight, those of zeros left out. cut_off: scale above E4M3's largest. coarse: below its
    smallest normal number, zeroed ones included. zeroed: the scale rounds to 0. largest: |x|."""

    num_groups: int = 0
    num_cut_off: int = 0
    num_coarse: int = 0
    num_zeroed: int = 0
    largest: float = 0.0

    def add(self, inputs_TI: Tensor) -> None:
        """Rows [tokens, columns]; columns that fill no group of 16 cannot be quantized, and are not counted."""
        columns = inputs_TI.shape[1] // GROUP * GROUP
        amax_TG = inputs_TI[:, :columns].float().reshape(len(inputs_TI), -1, GROUP).abs().amax(-1)
        if not amax_TG.numel():
            return
        scale = amax_TG[amax_TG > 0] / 6 * INPUT_GLOBAL_SCALE
        self.num_groups += scale.numel()
        self.num_cut_off += int((scale > LARGEST_SCALE).sum())
        self.num_coarse += int((scale < SMALLEST_NORMAL).sum())
        self.num_zeroed += int((scale <= ROUNDED_TO_ZERO).sum())
        self.largest = max(self.largest, float(amax_TG.max()))


@dataclass
class Moments:
    """Of one weight's inputs: sums of squares, FP64 [columns], the tokens they are over, the largest |x|, and their range."""

    squares: Tensor
    num_tokens: int = 0
    largest: float = 0.0
    range: InputRange = field(default_factory=InputRange)


class InputWatch(TorchFunctionMode):
    """While it is entered, adds up the squared inputs of every `linear` whose weight has a name, and watches what attention
    with heads keeps: keys (rotated) and values.

    names: address of a weight's first element -> the weights of the checkpoint that lie there (gate and up of an expert).
    """

    def __init__(self, names: Mapping[int, tuple[str, ...]]) -> None:
        super().__init__()
        self._names = names
        self._attention: str | None = None
        self.moments: dict[str, Moments] = {}
        self.caches: dict[str, tuple[float, float]] = {}
        """Attention module -> largest |key| and |value|."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.nn.functional.linear:
            names = self._names.get(args[1].data_ptr(), ())
            if names and args[0].numel():
                self._add(names, args[0])
        elif func is torch.nn.functional.scaled_dot_product_attention and self._attention is not None:
            self._keep(*args[1:3])
        return func(*args, **(kwargs or {}))

    def _add(self, names: tuple[str, ...], inputs: Tensor) -> None:
        rows = inputs.detach().reshape(-1, inputs.shape[-1])
        squares = rows.float().square().sum(0, dtype=torch.float64).cpu()
        largest = float(rows.abs().max())
        if not (math.isfinite(largest) and bool(torch.isfinite(squares).all())):
            raise _not_finite(f"what enters {names[0]}")
        for name in names:
            moments = self.moments.setdefault(name, Moments(torch.zeros_like(squares)))
            moments.squares += squares
            moments.num_tokens += len(rows)
            moments.largest = max(moments.largest, largest)
            owner, _, leaf = name.removesuffix(".weight").rpartition(".")
            if leaf in ("k_proj", "kv_b_proj"):
                # latent attention (MLA) keeps other tensors, for which vLLM loads no scales
                self._attention = owner if leaf == "k_proj" else None
        self.moments[names[0]].range.add(rows)

    def _keep(self, keys: Tensor, values: Tensor) -> None:
        assert self._attention is not None
        before = self.caches.get(self._attention, (0.0, 0.0))
        largest = float(keys.detach().abs().max()), float(values.detach().abs().max())
        if not all(map(math.isfinite, largest)):
            raise _not_finite(f"what {self._attention} keeps")
        self.caches[self._attention] = max(before[0], largest[0]), max(before[1], largest[1])
        self._attention = None


def _not_finite(what: str) -> QuantizeError:
    """Python's `max` would pass over NaN, and a scale over the batch that it was in."""
    return QuantizeError(
        f"{what} is NaN, infinite or too large to be squared: the source is damaged, or cannot be calibrated; take another "
        "copy, or a precision without calibration"
    )


def names_of(model: torch.nn.Module) -> dict[int, tuple[str, ...]]:
    """Address of every matrix of a transformers model -> names of the weights in its checkpoint.

    Experts are one 3-D parameter for all of a layer: gate_up_proj [E, 2I, H] and down_proj [E, H, I].
    """
    names: dict[int, tuple[str, ...]] = {}
    for name, parameter in model.named_parameters():
        prefix, _, leaf = name.rpartition(".")
        if parameter.dim() == 2:
            names[parameter.data_ptr()] = (name,)
        elif parameter.dim() == 3 and leaf in FUSED_PARTS:
            for expert, weight in enumerate(parameter):
                names[weight.data_ptr()] = tuple(f"{prefix}.{expert}.{part}.weight" for part in FUSED_PARTS[leaf])
    return names


def largest_inputs(watch: InputWatch) -> dict[str, float]:
    """Name in the file -> largest magnitude: of what entered each module, and of the keys and values that were kept."""
    largest = {f"{name.removesuffix('.weight')}.{INPUT_AMAX}": moments.largest for name, moments in watch.moments.items()}
    for attention, (key, value) in watch.caches.items():
        largest |= {f"{attention}.{K_AMAX}": key, f"{attention}.{V_AMAX}": value}
    return dict(sorted(largest.items()))


def nvfp4_inputs(moments: Mapping[str, Moments]) -> Nvfp4Inputs:
    """All groups together, and the weights whose inputs fit worst. QuantizeError: all inputs are zero."""
    ranges = {name: of_weight.range for name, of_weight in moments.items() if of_weight.range.num_groups}
    if not ranges:
        raise QuantizeError("all inputs of all weights are zero: the source is damaged; take another copy")
    zeroed = max(ranges, key=lambda name: ranges[name].num_zeroed / ranges[name].num_groups)
    largest = max(ranges, key=lambda name: ranges[name].largest)
    return Nvfp4Inputs(
        num_groups=sum(inputs.num_groups for inputs in ranges.values()),
        num_cut_off=sum(inputs.num_cut_off for inputs in ranges.values()),
        num_coarse=sum(inputs.num_coarse for inputs in ranges.values()),
        num_zeroed=sum(inputs.num_zeroed for inputs in ranges.values()),
        largest=ranges[largest].largest,
        largest_at=largest,
        most_zeroed=ranges[zeroed].num_zeroed / ranges[zeroed].num_groups,
        most_zeroed_at=zeroed,
    )


class TokensByExpert:
    """The experts of a checkpoint. by_layer: layer -> expert -> its down projection, whose tokens are the expert's."""

    def __init__(self, weights: Iterable[str]) -> None:
        self.by_layer: dict[int, dict[int, str]] = defaultdict(dict)
        for name in weights:
            if match := _EXPERT.fullmatch(name):
                self.by_layer[int(match[1])][int(match[2])] = name

    def coverage(self, tokens: Callable[[str], int]) -> tuple[LayerCoverage, ...]:
        """tokens: of a weight."""
        return tuple(
            LayerCoverage(layer=layer, tokens=tuple(tokens(experts[number]) for number in sorted(experts)))
            for layer, experts in sorted(self.by_layer.items())
        )

    def least(self, tokens: Callable[[str], int]) -> int:
        """Of the expert that saw fewest."""
        return min(tokens(name) for experts in self.by_layer.values() for name in experts.values())

    def spread(self, tokens: Callable[[str], int]) -> tuple[int, int, int] | None:
        """Least, median and most tokens of an expert; None: there are none."""
        counts = sorted(tokens(name) for experts in self.by_layer.values() for name in experts.values())
        return (counts[0], counts[len(counts) // 2], counts[-1]) if counts else None
