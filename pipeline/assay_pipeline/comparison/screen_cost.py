"""What a screening will take, in a line, and whether it may."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from assay.errors import AssayError
from assay.quantities import size
from assay.records.screening import ScreenEstimate

if TYPE_CHECKING:
    from assay_quantize.screen.estimate import PassCost
    from assay_quantize.sensitivity.texts import ScoredText


@dataclass(frozen=True)
class Most:
    """What a screening may take. price: dollars for an hour of the machine. AssayError: dollars without a price."""

    hours: float | None = None
    usd: float | None = None
    price: float | None = None

    def __post_init__(self) -> None:
        if self.usd is not None and self.price is None:
            raise AssayError("--max-cost: say what an hour of this machine costs with --price")


def estimated(
    costs: Mapping[str, PassCost | None], texts: Sequence[ScoredText], most: Most, states: Path
) -> ScreenEstimate | None:
    """Of all passes together; None: one was begun before. states: where they will lie.

    AssayError: it would take more than it may, or than the disk has.
    """
    known = [cost for cost in costs.values() if cost is not None]
    if len(known) < len(costs):
        return None
    seconds = sum(cost.seconds for cost in known)
    state_bytes = sum(cost.kept_bytes for cost in known) + max(cost.working_bytes for cost in known)
    estimate = ScreenEstimate(
        read_bytes=sum(cost.read_bytes for cost in known),
        flop=sum(cost.flop for cost in known),
        state_bytes=state_bytes,
        seconds=seconds,
        usd=None if most.price is None else most.price * seconds / 3600,
    )
    free = shutil.disk_usage(states).free
    if state_bytes > free:
        raise AssayError(
            f"{states}: states need {size(state_bytes)} and {size(free)} are free; give another --out, or fewer --tokens"
        )
    limits = [most.hours] if most.hours is not None else []
    if most.usd is not None and most.price:
        limits.append(most.usd / most.price)
    if limits and seconds > 3600 * min(limits):
        fixed_s = sum(cost.fixed_s for cost in known)
        share = (3600 * min(limits) - fixed_s) / (seconds - fixed_s)
        scored = int(share * sum(text.num_scored for text in texts))
        option = "--max-hours" if most.hours == min(limits) else "--max-cost"
        remedy = f"--tokens {scored} would fit" if scored >= 2 else "no number of tokens would fit"
        raise AssayError(f"{option}: {shown_estimate(estimate)}; {remedy}")
    return estimate


def shown_estimate(estimate: ScreenEstimate) -> str:
    """In a line."""
    from assay_quantize.estimate.show import duration

    usd = "" if estimate.usd is None else f", ${estimate.usd:.2f}"
    return (
        f"reads {size(estimate.read_bytes)}, {estimate.flop:.2g} FLOP, {size(estimate.state_bytes)} of states on the disk, "
        f"about {duration(estimate.seconds)}{usd}"
    )


def shown_memory(costs: Mapping[str, PassCost | None]) -> str:
    """What of a layer is in memory at once, in a few words."""
    known = [cost for cost in costs.values() if cost is not None]
    layer_bytes, num_groups = max(cost.layer_bytes for cost in known), max(cost.num_groups for cost in known)
    if num_groups == 1:
        return f"layers of up to {size(layer_bytes)} in memory"
    return f"layers of up to {size(layer_bytes)}, their experts in {num_groups} groups, attention computed twice"
