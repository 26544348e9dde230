"""How the inputs of weights lie in the range that scheme `nvfp4` gives them without having looked at any (`schemes.py`).

A group of 16 activations has one E4M3 scale, its largest magnitude / 6 times `INPUT_GLOBAL_SCALE`. Above 448 it saturates, and
the largest activations are cut off. Below 2^-6 it has fewer than three bits behind the first. At 2^-10 and below it is rounded
to 0, and the whole group with it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor

from assay.errors import QuantizeError
from assay.records.calibration import Nvfp4Inputs
from assay_quantize.formats.schemes import INPUT_GLOBAL_SCALE

GROUP = 16
LARGEST_SCALE, SMALLEST_NORMAL, ROUNDED_TO_ZERO = 448.0, 2.0**-6, 2.0**-10


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


def nvfp4_inputs(moments: Mapping[str, Moments]) -> Nvfp4Inputs:
    """All groups together, and the weights whose inputs fit worst. QuantizeError: all inputs are zero."""
    ranges = {name: one.range for name, one in moments.items() if one.range.num_groups}
    if not ranges:
        raise QuantizeError("all inputs of all weights are zero: the source is damaged; take another copy")
    zeroed = max(ranges, key=lambda name: ranges[name].num_zeroed / ranges[name].num_groups)
    largest = max(ranges, key=lambda name: ranges[name].largest)
    return Nvfp4Inputs(
        num_groups=sum(one.num_groups for one in ranges.values()),
        num_cut_off=sum(one.num_cut_off for one in ranges.values()),
        num_coarse=sum(one.num_coarse for one in ranges.values()),
        num_zeroed=sum(one.num_zeroed for one in ranges.values()),
        largest=ranges[largest].largest,
        largest_at=largest,
        most_zeroed=ranges[zeroed].num_zeroed / ranges[zeroed].num_groups,
        most_zeroed_at=zeroed,
    )
