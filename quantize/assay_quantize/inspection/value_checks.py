"""What scales and weights hold, once `values.py` has read them: one function for each defect."""

from __future__ import annotations

import math
from collections.abc import Iterator

from assay_quantize.checkpoint.stored import GLOBAL_LEAVES, INPUT_LEAVES
from assay_quantize.inspection.defect import Place
from assay_quantize.inspection.subject import Counts, Subject

MOST_MULTIPLIER = 10.0
"""Largest plausible global scale as a factor: 2688 times it is the largest weight."""
LARGEST_F32 = 3.4028234663852886e38
SMALLEST_INVERTIBLE = 1 / LARGEST_F32
"""Of what is smaller, vLLM's kernels take the inverse as infinity."""


def scale_not_finite(subject: Subject) -> Iterator[Place]:
    return _bad(subject, "non_finite", "NaN or infinite")


def scale_zero(subject: Subject) -> Iterator[Place]:
    return _bad(subject, "zero", "zero")


def scale_negative(subject: Subject) -> Iterator[Place]:
    """Not of integers: AutoRound gives a group whose largest value is positive a negative scale, so that the code -8 is used.
    Kernels for integers only multiply by it."""
    return (place for place in _bad(subject, "negative", "negative") if place.where.rpartition(".")[2] != "scales")


def _bad(subject: Subject, fault: str, adjective: str) -> Iterator[Place]:
    for name, counts in subject.values.scales.items():
        if number := getattr(counts, fault):
            yield Place(name, f"{number:,} of {counts.elements:,} scales are {adjective}")


def scale_not_invertible(subject: Subject) -> Iterator[Place]:
    for name, value in subject.values.scalars.items():
        if name.rpartition(".")[2] in (*INPUT_LEAVES, *GLOBAL_LEAVES) and 0 < abs(value) < SMALLEST_INVERTIBLE:
            yield Place(name, f"is {value:.3g}; its inverse is infinite in FP32")


def global_scale_inverted(subject: Subject) -> Iterator[Place]:
    """A global scale is 2688 over the largest weight, or the inverse: beyond `MOST_MULTIPLIER` it would be of weights in the
    tens of thousands."""
    for name, value in subject.values.scalars.items():
        leaf = name.rpartition(".")[2]
        if leaf == "weight_global_scale" and 0 < value < 1 / MOST_MULTIPLIER:
            yield Place(name, f"is {value:.3g}, and divides: the largest weight would be {2688 / value:,.0f}")
        elif leaf == "weight_scale_2" and MOST_MULTIPLIER < value < math.inf:
            yield Place(name, f"is {value:.6g}, and multiplies: the largest weight would be {2688 * value:,.0f}")


def global_scales_differ(subject: Subject) -> Iterator[Place]:
    for group, members in subject.fused_groups():
        for leaf in GLOBAL_LEAVES:
            headers = [weight.parts[leaf] for weight in members if leaf in weight.parts]
            told = {header.name: value for header in headers if (value := subject.values.scalars.get(header.name)) is not None}
            if len(set(told.values())) > 1:
                listed = ", ".join(f"{name.split('.')[-2]} {value:.6g}" for name, value in told.items())
                low, high = min(map(abs, told.values())), max(map(abs, told.values()))
                times = f", {high / low:.3g} times" if low and math.isfinite(high / low) else ""
                yield Place(group, f"{leaf}: {listed}{times}")


def zero_points_wrong(subject: Subject) -> Iterator[Place]:
    return _packed(subject, ("qzeros", "weight_zero_point"))


def column_order_wrong(subject: Subject) -> Iterator[Place]:
    return _packed(subject, ("g_idx", "weight_g_idx"))


def packed_shape_wrong(subject: Subject) -> Iterator[Place]:
    return _packed(subject, ("weight_shape",))


def _packed(subject: Subject, leaves: tuple[str, ...]) -> Iterator[Place]:
    for name, problem in subject.values.packed.items():
        if name.rpartition(".")[2] in leaves:
            yield Place(name, problem)


def weight_not_finite(subject: Subject) -> Iterator[Place]:
    for name, counts in subject.values.weights.items():
        if counts.non_finite:
            yield Place(name, f"{counts.non_finite:,} of {counts.elements:,} values are NaN or infinite")


def weight_all_zero(subject: Subject) -> Iterator[Place]:
    for name, counts in subject.values.weights.items():
        if _is_all_zero(counts) and name.rpartition(".")[2] in ("weight", "weight_packed"):
            yield Place(name, f"all {counts.elements:,} values are zero")


def _is_all_zero(counts: Counts) -> bool:
    return counts.elements > 1 and counts.zero == counts.elements
