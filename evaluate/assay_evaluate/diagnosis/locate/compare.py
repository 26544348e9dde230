"""Two readings of activations -> where they part. Pure functions of numbers; nothing is asked of a server here.

Two questions, because quantization moves every layer a little:
first    the first place, in order of execution, that differs by more than noise. Right for one checkpoint served twice.
outlier  the place that adds far more to the distance than its like do in other layers. Right for two precisions.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from assay.recipes.runtime_names import role_of
from assay.records.diagnosis.locate import Parting, PointDifference
from assay_evaluate.diagnosis.locate.reading import PointReading, Reading

NOISE_FACTOR = 5.0
"""Differences below so many times the noise of side A against itself are none."""
LEAST_DISTANCE = 1e-6
"""Differences below this are none: rounding of FP32, where noise is zero."""
OUTLIER_FACTOR = 4.0
"""How much more than its like a place must add. On tiny-glm the largest of a healthy W4A16 adds 1.6 times the median."""
LEAST_LIKE = 3
"""Places of a kind from which a median says something."""
RATIO_DEVIATIONS = 6.0
"""Robust standard deviations by which the size of a rank's weights must stand out from the others' ..."""
LEAST_RATIO = 1.3
"""... and the factor. In tiny-glm halves of experts differ by 5 %, halves of attention by 17 % at most; halves of healthy
activations by a factor of 6, so their sizes are not compared between ranks."""

WRITING_ROLES = ("attention", "dense_mlp", "shared_expert", "routed_expert")
"""Roles whose output is added to the residual stream."""


def compare(a: Reading, b: Reading, again: Reading | None = None) -> tuple[list[PointDifference], list[str]]:
    """(differences in order of execution, ranks innermost; what could not be compared). again: side A, read once more."""
    missing: list[str] = []
    differences: list[PointDifference] = []
    if len(a) != len(b):
        missing.append(f"shares of single ranks: A has {len(a)}, B has {len(b)}; only rank 0's sums are compared")
    ranks = sorted(set(a) & set(b)) if len(a) == len(b) else [0]
    names = list(dict.fromkeys(name for rank in ranks for name in a[rank]))
    for name in names:
        for rank in ranks:
            point_a, point_b = a[rank].get(name), b[rank].get(name)
            if point_a is None:
                continue  # an expert that this rank was never asked for
            if point_b is None:
                missing.append(f"{name}: only on side A (rank {rank})")
            elif len(a) == len(b) or not (point_a.partial or point_b.partial):
                repeat = again[rank].get(name) if again is not None else None
                noise = 0.0 if repeat is None else _distance(point_a, repeat) or 0.0
                differences.append(_difference(point_a, point_b, rank, noise))
    extra = {name for rank in ranks for name in b[rank]} - set(names)
    missing += [f"{name}: only on side B" for name in sorted(extra)]
    return differences, missing


def _difference(a: PointReading, b: PointReading, rank: int, noise: float) -> PointDifference:
    distance = _distance(a, b)
    before = _distance(a, b, of_inputs=True)
    added = None if distance is None or before is None else math.sqrt(max(distance**2 - before**2, 0.0))
    layer = re.search(r"\.layers\.(\d+)(\.|$)", f".{a.name}")
    expert = re.search(r"\.experts\.(\d+)(\.|$)", a.name) if a.kind in ("expert", "weight") else None
    agreement = None
    if a.chosen_TK is not None and b.chosen_TK is not None and a.chosen_TK.shape == b.chosen_TK.shape:
        agreement = float((a.chosen_TK == b.chosen_TK).all(-1).mean())
    return PointDifference(
        name=a.name, kind=a.kind, layer=int(layer[1]) if layer else None, expert=int(expert[1]) if expert else None,
        role=role_of(a.name), rank=rank, partial=a.partial, distance=distance, added=added, noise=noise,
        max_abs=(a.max_abs, b.max_abs), mean=(a.mean, b.mean), rms=(a.rms, b.rms), non_finite=(a.non_finite, b.non_finite),
        agreement=agreement,
    )  # fmt: skip


def _distance(a: PointReading, b: PointReading, of_inputs: bool = False) -> float | None:
    """Relative distance over the tokens both have seen. None: no sketch, or no such token."""
    a_TS, b_TS = (a.input_TS, b.input_TS) if of_inputs else (a.sketch_TS, b.sketch_TS)
    if a_TS is None or b_TS is None:
        return None
    if a.row_T is not None and b.row_T is not None:
        _, rows_a, rows_b = np.intersect1d(a.row_T, b.row_T, return_indices=True)
        a_TS, b_TS = a_TS[rows_a], b_TS[rows_b]
    if a_TS.shape != b_TS.shape or not a_TS.size:
        return None
    return relative_distance(a_TS, b_TS)


def relative_distance(a: NDArray[np.float32], b: NDArray[np.float32]) -> float:
    """||a - b|| / max(||a||, ||b||) (Frobenius); 0 if both are zero."""
    largest = max(float(np.linalg.norm(a)), float(np.linalg.norm(b)))
    return float(np.linalg.norm(a - b)) / largest if largest > 0 else 0.0


# ------------------------------------------------------------------------------------------------ servers
def find_first_parting(points: Sequence[PointDifference]) -> Parting | None:
    """The first place where the sides differ by more than noise, with the ranks that do. None: nowhere."""
    for point in points:
        if reason := _describe_difference(point):
            ranks = [other for other in points if other.name == point.name]
            parted = [other for other in ranks if _describe_difference(other)]
            rank = parted[0].rank if len(parted) < len(ranks) else None
            where = "" if len(ranks) == 1 else f" on rank {rank}" if rank is not None else " on every rank"
            return _parting(point, rank, reason + where)
    return None


def _describe_difference(point: PointDifference) -> str | None:
    """How the sides differ at one point, in words. None: they do not."""
    if point.non_finite[0] != point.non_finite[1]:
        return f"{point.non_finite[0]} non-finite values on side A, {point.non_finite[1]} on side B"
    if point.agreement is not None and point.agreement < 1 and point.distance is None:
        return f"other experts are chosen for {1 - point.agreement:.1%} of the tokens"
    if point.distance is not None and point.distance > max(NOISE_FACTOR * point.noise, LEAST_DISTANCE):
        return f"outputs differ by {point.distance:.3g} of their size (RMS {point.rms[0]:.3g} and {point.rms[1]:.3g})"
    return None


def find_outlier(points: Sequence[PointDifference]) -> Parting | None:
    """The place that adds most, if that is OUTLIER_FACTOR times the median of its like in other layers. None: none does."""
    outliers: list[tuple[float, PointDifference, float]] = []
    for group in _groups(points).values():
        added = [point.added for point in group if point.added is not None]
        typical = float(np.median(added)) if len(added) >= LEAST_LIKE else 0.0
        if typical > LEAST_DISTANCE:  # else most of its like do not differ at all: the first place says it all
            outliers += [
                (point.added / typical, point, typical)
                for point in group
                if point.added is not None and point.added > max(OUTLIER_FACTOR * typical, NOISE_FACTOR * point.noise)
            ]
    if not outliers:
        return None
    _, point, typical = max(outliers, key=lambda outlier: outlier[0])
    ranks = {other.rank for other in points if other.name == point.name}
    rank = point.rank if point.partial and len(ranks) > 1 else None
    return _parting(point, rank, f"adds {point.added:.3g} of its output's size, such places typically {typical:.3g}")


def shares_of_error(points: Sequence[PointDifference], roles: Collection[str]) -> dict[str, float]:
    """Role -> its share of the squared error that enters the residual stream, largest first; empty where none is read.

    What the stream's error grows by from one norm to the next is laid on those of `roles` in between, by the error of what each
    put out last: the quantized ones, for the others only hand on what they were given. Where the error shrinks (errors of
    two layers that cancel), nothing is laid on anyone.
    """
    squares: dict[str, float] = defaultdict(float)
    between: dict[str, float] = {}
    before = 0.0
    for point in points:
        if point.rank != 0 or point.distance is None:
            continue
        square = (point.distance * max(point.rms)) ** 2
        if point.kind != "residual":
            if point.role in WRITING_ROLES and point.role in roles and point.kind != "expert":
                between[point.role] = square
            continue
        total = sum(between.values())
        for role, part in between.items():
            squares[role] += max(square - before, 0.0) * part / total if total else 0.0
        before, between = square, {}
    total = sum(squares.values())
    return {role: squares[role] / total for role in sorted(squares, key=lambda r: -squares[r])} if total else {}


def _groups(points: Iterable[PointDifference]) -> dict[tuple[str, str], list[PointDifference]]:
    """Places of one kind that stand in different layers, experts and ranks: (kind, name without numbers) -> places."""
    groups: dict[tuple[str, str], list[PointDifference]] = defaultdict(list)
    for point in points:
        groups[_group_of(point)].append(point)
    return groups


def _group_of(point: PointDifference) -> tuple[str, str]:
    return point.kind, re.sub(r"\.\d+(?=\.|$)", ".*", point.name)


def _parting(point: PointDifference, rank: int | None, reason: str) -> Parting:
    return Parting(name=point.name, layer=point.layer, expert=point.expert, role=point.role, rank=rank, why=reason)


# ------------------------------------------------------------------------------------------------ ranks
def compare_ranks(reading: Reading) -> tuple[list[PointDifference], list[str]]:
    """Every rank against another: side B of a point is the rank, side A is rank 0, or rank 1 for rank 0.

    What all ranks must hold alike is compared token by token; of a rank's own share of the weights, the size is.
    """
    differences: list[PointDifference] = []
    missing: list[str] = []
    for name in dict.fromkeys(name for points in reading.values() for name in points):
        if any(name not in points for points in reading.values()):
            missing.append(f"{name}: not on every rank")
            continue
        for rank, points in reading.items():
            other = next(other for other in reading if other != rank)
            difference = _difference(reading[other][name], points[name], rank, 0.0)
            if points[name].partial:
                difference = difference.model_copy(update={"distance": None, "added": None})
            differences.append(difference)
    return differences, missing


def find_rank_parting(points: Sequence[PointDifference]) -> Parting | None:
    """The first place, in order of execution and then of weights, where one rank does not fit the others. None: nowhere."""
    odd = _odd_shares(points)
    for point in points:
        ranks = [other for other in points if other.name == point.name]
        if candidates := [other for other in ranks if (other.name, other.rank) in odd]:
            oddest = max(candidates, key=lambda candidate: _distance_to_neighbours(candidate, points))
            times = odd[oddest.name, oddest.rank]
            return _parting(oddest, oddest.rank, f"its weights are {times:.3g} times as large as the other ranks' suggest")
        if point.partial and (bad := [other for other in ranks if other.non_finite[1]]):
            rank = bad[0].rank if len(bad) < len(ranks) else None
            return _parting(point, rank, f"{bad[0].non_finite[1]} non-finite values")
        if not point.partial and (reason := _describe_rank_difference(point)):
            parted = [other.rank for other in ranks if other.rank and _describe_rank_difference(other)]
            # the one rank that differs from rank 0 while others do not; two ranks cannot tell which of them is odd
            lone = parted[0] if len(parted) == 1 else 0 if len(parted) == len(ranks) - 1 else None
            reason = f"ranks hold different values of what they must hold alike: {reason}"
            return _parting(point, lone if len(ranks) >= 3 else None, reason)
    return None


def _describe_rank_difference(point: PointDifference) -> str | None:
    """As `_describe_difference`; of a weight that every rank holds whole, the size says it too."""
    if reason := _describe_difference(point):
        return reason
    if point.kind == "weight" and abs(point.rms[0] - point.rms[1]) > LEAST_DISTANCE * max(point.rms):
        return f"RMS {point.rms[0]:.6g} and {point.rms[1]:.6g}"
    return None


def _distance_to_neighbours(point: PointDifference, points: Sequence[PointDifference]) -> float:
    """How far the rank's RMS is from its like in the same layer, in logarithms: of two ranks, which is the odd one?"""
    groups = _groups(other for other in points if other.rank == point.rank)
    group = [other for other in groups[_group_of(point)] if other.rms[1] > 0]
    beside = [other for other in group if other.layer == point.layer and other.name != point.name] or group
    return abs(math.log(point.rms[1]) - float(np.median([math.log(other.rms[1]) for other in beside])))


def _odd_shares(points: Sequence[PointDifference]) -> dict[tuple[str, int], float]:
    """(name, rank) -> how many times too large its weights are, where they stand out."""
    odd: dict[tuple[str, int], float] = {}
    for group in _groups(point for point in points if point.partial and point.kind == "weight").values():
        usable = [(point, math.log(point.rms[1] / point.rms[0])) for point in group if min(point.rms) > 0]
        if len(usable) < 2 * LEAST_LIKE:
            continue
        for rank in {point.rank for point, _ in usable}:
            own = [(point, ratio) for point, ratio in usable if point.rank == rank]
            middle = float(np.median([ratio for _, ratio in own]))
            spread = 1.4826 * float(np.median([abs(ratio - middle) for _, ratio in own]))
            for point, ratio in own:
                if abs(ratio - middle) > max(RATIO_DEVIATIONS * spread, math.log(LEAST_RATIO)):
                    odd[point.name, rank] = math.exp(ratio - middle)
    return odd
