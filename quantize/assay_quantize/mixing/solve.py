"""One option for every part, least damage in all, within limits: a multiple-choice knapsack, solved exactly by HiGHS.

`least_damage` finds the optimum; `fewest_changes` then gives up a small, stated share of it so that neighbouring layers agree.
Sizes are whole bytes and are checked as such: the solver works with floating-point numbers, whose tolerances must not spend
them.
"""

from __future__ import annotations

import ctypes
import math
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import coo_array, csc_array, hstack

_NODES = 4_000
"""Of the search for fewer changes, which is cut off there: a number of nodes, since seconds would make results vary."""
_LARGEST = 1e4
"""Damages are scaled to this, far above the solver's absolute tolerances of 1e-6."""
_DIGIT = 2**12
"""Sizes are split into digits of this base, so that one is far above the solver's tolerances."""
_TRIES = 50


@dataclass(frozen=True)
class Problem:
    """damages[part][option], in nats, none negative. sizes[resource][part][option]: bytes. limits[resource]: bytes."""

    damages: tuple[tuple[float, ...], ...]
    sizes: tuple[tuple[tuple[int, ...], ...], ...]
    limits: tuple[int, ...]

    def damage(self, picks: Sequence[int]) -> float:
        return math.fsum(damages[pick] for damages, pick in zip(self.damages, picks, strict=True))

    def used(self, picks: Sequence[int]) -> tuple[int, ...]:
        """Bytes of every resource."""
        return tuple(sum(part[pick] for part, pick in zip(parts, picks, strict=True)) for parts in self.sizes)

    def is_feasible(self, picks: Sequence[int]) -> bool:
        return all(used <= limit for used, limit in zip(self.used(picks), self.limits, strict=True))

    @property
    def smallest(self) -> tuple[int, ...]:
        """The least bytes of every resource, each by itself."""
        return tuple(sum(min(part) for part in parts) for parts in self.sizes)


@dataclass(frozen=True)
class Solution:
    """picks: option of every part. bound: no choice has less damage than this; equal to `damage` up to rounding."""

    picks: tuple[int, ...]
    damage: float
    bound: float


def least_damage(problem: Problem) -> Solution | None:
    """The choice with the least damage; None: no choice is within the limits. RuntimeError: the solver did not finish."""
    if not problem.damages:
        return Solution((), 0.0, 0.0) if all(limit >= 0 for limit in problem.limits) else None
    kept = [_undominated(problem, part) for part in range(len(problem.damages))]
    costs = np.array([problem.damages[part][option] for part, options in enumerate(kept) for option in options])
    unit = _LARGEST / (costs.max() or 1.0)
    solved = _solve(problem, kept, costs * unit, (), None)
    if solved is None:
        return None
    picks, bound, is_optimal = solved
    if not is_optimal:
        raise RuntimeError("HiGHS did not finish a choice of schemes")
    return Solution(picks, problem.damage(picks), bound / unit)


def fewest_changes(
    problem: Problem, before: Sequence[tuple[int, Sequence[int | None]] | None], most: float
) -> tuple[int, ...] | None:
    """Among choices with a damage of at most `most`, one in which few parts differ from the one before them.

    before: of each part, the part before it and, for each of its options, the same option there (None: it has none); None: no
    part is before it. None as result: none was found within the nodes that the search may take.
    """
    every = [list(range(len(damages))) for damages in problem.damages]
    starts = np.concatenate([[0], np.cumsum([len(options) for options in every])]).astype(int)
    num_options = int(starts[-1])
    changes = [(part, option) for part, link in enumerate(before) if link is not None for option in every[part]]
    costs = np.zeros(num_options + len(changes))
    costs[num_options:] = 1.0
    flat = np.array([value for damages in problem.damages for value in damages])
    costs[:num_options] = flat / (2 * len(problem.damages) * (flat.max() or 1.0))  # decides between equals
    rows: list[tuple[dict[int, float], float]] = []  # {column: factor} >= limit
    for number, (part, option) in enumerate(changes):
        link = before[part]
        assert link is not None
        row = {num_options + number: 1.0, int(starts[part]) + option: -1.0}
        if (same := link[1][option]) is not None:
            row[int(starts[link[0]]) + same] = 1.0
        rows.append((row, 0.0))
    unit = _LARGEST / (flat.max() or 1.0)
    rows.append(({column: -value * unit for column, value in enumerate(flat)}, -most * unit))
    solved = _solve(problem, every, costs, rows, _NODES)
    return None if solved is None or problem.damage(solved[0]) > most * (1 + 1e-9) else solved[0]


def _undominated(problem: Problem, part: int) -> list[int]:
    """Options of a part that no other beats or equals in damage and in all sizes; of equal ones the first."""
    count = len(problem.damages[part])
    rows = [(problem.damages[part][option], *(size[part][option] for size in problem.sizes)) for option in range(count)]

    def beats(other: int, option: int) -> bool:
        no_worse = all(a <= b for a, b in zip(rows[other], rows[option], strict=True))
        return no_worse and (rows[other] != rows[option] or other < option)

    return [option for option in range(count) if not any(beats(other, option) for other in range(count))]


def _solve(
    problem: Problem,
    kept: Sequence[Sequence[int]],
    costs: NDArray[np.float64],
    rows: Sequence[tuple[dict[int, float], float]],
    nodes: int | None,
) -> tuple[tuple[int, ...], float, bool] | None:
    """(option of each part, bound of the objective, whether it is solved to the end); None: nothing was found.

    kept: options of each part that may be taken. costs: of these, part by part, then of further variables. rows: further
    constraints.
    """
    starts = np.concatenate([[0], np.cumsum([len(options) for options in kept])]).astype(int)
    parts = np.repeat(np.arange(len(kept)), np.diff(starts))
    one_option_each = coo_array((np.ones(len(parts)), (parts, np.arange(len(parts)))), shape=(len(kept), len(costs)))
    fixed = [LinearConstraint(one_option_each.tocsc(), 1, 1)]
    if rows:
        entries = [(number, column, factor) for number, (row, _) in enumerate(rows) for column, factor in row.items()]
        at, columns, factors = (np.array(each) for each in zip(*entries, strict=True))
        more = coo_array((factors, (at, columns)), shape=(len(rows), len(costs)))
        fixed.append(LinearConstraint(more.tocsc(), np.array([limit for _, limit in rows]), np.inf))
    held, carries = _size_constraints(problem, kept, len(costs))
    if held is None:
        return None

    def widened(matrix: csc_array) -> csc_array:
        """With columns of zeros for the carries."""
        return hstack([matrix, csc_array((matrix.shape[0], len(carries)))], format="csc") if len(carries) else matrix

    fixed = [LinearConstraint(widened(constraint.A), constraint.lb, constraint.ub) for constraint in fixed]
    bounds = Bounds(0, np.concatenate([np.ones(len(costs)), carries]))
    costs = np.concatenate([costs, np.zeros(len(carries))])
    bound: float | None = None
    for _ in range(_TRIES):
        options = {"mip_rel_gap": 0.0} | ({} if nodes is None else {"node_limit": nodes})
        with _silent_stdout():
            result = milp(costs, integrality=np.ones(len(costs)), bounds=bounds, constraints=[*fixed, *held], options=options)
        if result.x is None:
            return None
        chosen = [int(np.argmax(result.x[starts[part] : starts[part + 1]])) for part in range(len(kept))]
        picks = tuple(options[pick] for options, pick in zip(kept, chosen, strict=True))
        bound = float(result.mip_dual_bound) if bound is None else bound  # of all choices, also those that are cut off below
        if problem.is_feasible(picks):
            return picks, bound, result.status == 0
        cut = np.zeros(len(costs))  # within the solver's tolerance, and too large: never again
        cut[starts[:-1] + np.array(chosen)] = 1.0
        fixed.append(LinearConstraint(cut[None, :], -np.inf, len(kept) - 1))
    raise RuntimeError(f"HiGHS took {_TRIES} choices that exceed a limit by less than its tolerance")


def _size_constraints(
    problem: Problem, kept: Sequence[Sequence[int]], num_columns: int
) -> tuple[list[LinearConstraint] | None, NDArray[np.float64]]:
    """(constraints that hold sizes within the limits, most that each of their carries can be); None: no choice is within one.

    A solver's tolerances are shares of its coefficients, and a byte of 10^10 is less than any: of equal layers there
    are more choices that exceed a limit by a few bytes than can be cut off one by one. So sizes are written in digits of
    `_DIGIT`, a row for each, as numbers are added on paper: what a row exceeds its digit of the limit by is carried, as a
    whole number, into the next one.
    """
    rows: list[tuple[dict[int, int], int]] = []  # {column: factor} <= limit
    carries: list[float] = []
    for size, limit in zip(problem.sizes, problem.limits, strict=True):
        least = [min(size[part][option] for option in options) for part, options in enumerate(kept)]
        over = [size[part][option] - least[part] for part, options in enumerate(kept) for option in options]
        room = limit - sum(least)
        if room < 0:
            return None, np.zeros(0)
        unit = math.gcd(*over) or 1
        digits, room = [num_bytes // unit for num_bytes in over], room // unit
        row: dict[int, int] = {}
        while max(digits) >= _DIGIT:
            carry = num_columns + len(carries)
            carries.append(len(kept) + 1)
            row |= {column: digit % _DIGIT for column, digit in enumerate(digits)} | {carry: -_DIGIT}
            rows.append((row, room % _DIGIT))
            digits, room, row = [digit // _DIGIT for digit in digits], room // _DIGIT, {carry: 1}
        rows.append((row | dict(enumerate(digits)), room))
    held = []
    for factors, limit in rows:
        flat = np.zeros(num_columns + len(carries))
        flat[list(factors)] = list(factors.values())
        held.append(LinearConstraint(flat[None, :], -np.inf, limit))
    return held, np.array(carries)


@contextmanager
def _silent_stdout() -> Iterator[None]:
    """HiGHS prints a note of its own to C's stdout at times, `transformNewIntegerFeasibleSolution`, whatever it is told: what
    stands there is the record that `--json` asks for. C keeps what is printed until it is flushed."""
    libc = ctypes.CDLL(None)
    libc.fflush(None)
    kept, nowhere = os.dup(1), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    try:
        yield
    finally:
        libc.fflush(None)
        os.dup2(kept, 1)
        os.close(nowhere)
        os.close(kept)
