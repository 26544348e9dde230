"""The choice against looking at all of them: exact, within the limits to the byte, and with the fewest changes there are."""

from __future__ import annotations

import ctypes
import itertools
import math
import random
from collections.abc import Sequence

import pytest

from assay_quantize.mixing.solve import Problem, fewest_changes, least_damage

BITS = (4.0, 4.125, 4.25, 4.5, 8.0, 16.0)


def random_problem(seed: int, *, parts: int, resources: int) -> Problem:
    """Sizes as of real parts, up to 10^10 bytes, damages over three decades; limits somewhere between least and most."""
    drawn = random.Random(seed)
    damages, sizes = [], [[] for _ in range(resources)]
    for _ in range(parts):
        options = sorted(drawn.sample(BITS, drawn.randint(2, 4)))
        count = drawn.choice([2**16, 3 * 2**20, 5 * 2**30]) * drawn.randint(1, 4)
        base = drawn.lognormvariate(-6, 1.5)
        damages.append(tuple(0.0 if bits == 16 else base * 2.0 ** -(bits - 4) * drawn.uniform(0.7, 1.3) for bits in options))
        for number, part in enumerate(sizes):
            part.append(tuple(int(count * bits / 8) // (1 + number) + drawn.randint(0, 99) * number for bits in options))
    limits = []
    for part in sizes:
        least, most = sum(map(min, part)), sum(map(max, part))
        limits.append(least + int((most - least) * drawn.uniform(-0.08, 0.6)))
    return Problem(tuple(damages), tuple(map(tuple, sizes)), tuple(limits))


def every_choice(problem: Problem) -> list[tuple[int, ...]]:
    return [
        picks
        for picks in itertools.product(*(range(len(damages)) for damages in problem.damages))
        if all(
            sum(part[pick] for part, pick in zip(row, picks, strict=True)) <= limit
            for row, limit in zip(problem.sizes, problem.limits, strict=True)
        )
    ]


def lost(problem: Problem, picks: Sequence[int]) -> float:
    return math.fsum(damages[pick] for damages, pick in zip(problem.damages, picks, strict=True))


@pytest.mark.parametrize("resources", [1, 2])
def test_no_choice_is_better(resources: int) -> None:
    nothing = 0
    for seed in range(60):
        problem = random_problem(seed, parts=6, resources=resources)
        within, solution = every_choice(problem), least_damage(problem)
        if not within:
            nothing += 1
            assert solution is None, seed
            continue
        assert solution is not None and solution.picks in within, seed
        least = min(lost(problem, picks) for picks in within)
        assert solution.damage == lost(problem, solution.picks) == pytest.approx(least, rel=1e-9, abs=1e-15), seed
        assert solution.bound == pytest.approx(least, rel=1e-6, abs=1e-12), seed
    assert 0 < nothing < 20  # both outcomes were seen


def test_the_last_byte_counts() -> None:
    """Sizes of 10^10 bytes: the solver's tolerances must neither spend a byte that is not there nor leave one that is."""
    for seed in range(20):
        problem = random_problem(1000 + seed, parts=5, resources=1)
        free = Problem(problem.damages, problem.sizes, (sum(map(max, problem.sizes[0])),))
        best = min(every_choice(free), key=lambda picks: (lost(problem, picks), free.used(picks)))
        exact = free.used(best)[0]
        at, below = (least_damage(Problem(problem.damages, problem.sizes, (limit,))) for limit in (exact, exact - 1))
        assert at is not None and lost(problem, at.picks) == pytest.approx(lost(problem, best), abs=1e-15)
        assert below is None or free.used(below.picks)[0] < exact
        if below is not None:
            assert below.damage == pytest.approx(
                min(lost(problem, p) for p in every_choice(free) if free.used(p)[0] < exact), abs=1e-15
            )


def test_layers_that_are_alike_to_a_few_bytes() -> None:
    """More choices than can be counted exceed the limit by a few bytes of 10^10: one must not be taken for within it.

    Against adding up part by part, where of choices that are no larger the best is kept.
    """
    for seed, (layers, resources) in enumerate(itertools.product((12, 40), (1, 2))):
        drawn = random.Random(seed)
        count = drawn.choice((2**23, 9 * 2**30))
        sizes = tuple(int(count * bits / 8) + more for more, bits in enumerate((4.125, 4.25, 4.5, 8, 16)))
        damages = (0.01, 0.009, 0.0075, 0.0005, 0.0)
        for over in (0, -1):
            limit = layers * sizes[0] + drawn.randint(1, layers - 1) * (sizes[2] - sizes[0]) + over
            problem = Problem((damages,) * layers, ((sizes,) * layers,) * resources, (limit,) * resources)
            least = {0: 0.0}
            for _ in range(layers):
                further = sorted((a + b, c + d) for a, c in least.items() for b, d in zip(sizes, damages, strict=True))
                least = {}
                for size, lost_so_far in further:
                    if size <= limit and lost_so_far < min(least.values(), default=math.inf) - 1e-12:
                        least[size] = lost_so_far
            solution = least_damage(problem)
            assert solution is not None and problem.is_feasible(solution.picks)
            assert solution.damage == pytest.approx(min(least.values()), rel=1e-9)
            assert solution.bound == pytest.approx(solution.damage, rel=1e-6)


def test_nothing_is_written_to_stdout(capfd: pytest.CaptureFixture[str]) -> None:
    """HiGHS prints a line there about this problem: `--json` has the record there and nothing else."""
    damages = (
        (0, 13772, 12019, 9405, 9235, 639), (0, 15868, 13671, 10835, 12234, 310), (0, 13108, 10879, 9984, 10447, 495),
        (0, 20543, 16302, 14319, 13720, 400), (0, 4445, 4241, 3595, 3496, 250), (0, 18607, 16180, 14227, 12274, 1036),
        (0, 4249, 4118, 2877, 3017, 206),
    )  # fmt: skip
    part = (2097152, 540672, 557056, 589824, 589824, 1048707)
    sizes = tuple(tuple(count * row for row in part) for count in (1, 7, 1, 2, 5, 3, 6))
    problem = Problem(tuple(tuple(map(float, row)) for row in damages), (sizes,), (15_466_496,))
    solution = least_damage(problem)
    ctypes.CDLL(None).fflush(None)  # C keeps what is printed
    assert solution is not None and capfd.readouterr().out == ""
    within = (picks for picks in itertools.product(range(6), repeat=7) if problem.is_feasible(picks))
    assert solution.damage == min(lost(problem, picks) for picks in within)


def test_fewest_changes_within_a_slack() -> None:
    """Six layers of one role: the number of changes is the least that any choice within the slack has."""
    for seed in range(15):
        drawn = random.Random(seed)
        damages = tuple(tuple(drawn.uniform(0.5, 1.5) * each for each in (1.0, 0.6, 0.1)) for _ in range(6))
        sizes = ((4_000_000, 4_500_000, 8_000_000),) * 6
        problem = Problem(damages, (sizes,), (drawn.randint(26_000_000, 44_000_000),))
        links = [None, *((number - 1, (0, 1, 2)) for number in range(1, 6))]
        best = least_damage(problem)
        assert best is not None
        most = 1.1 * best.damage

        def count(picks: Sequence[int]) -> int:
            return sum(a != b for a, b in itertools.pairwise(picks))

        solution = fewest_changes(problem, links, most)
        assert solution is not None and problem.is_feasible(solution) and lost(problem, solution) <= most * (1 + 1e-9)
        allowed = [picks for picks in every_choice(problem) if lost(problem, picks) <= most]
        assert count(solution) == min(map(count, allowed)), seed


def test_nothing_to_choose() -> None:
    assert least_damage(Problem((), (((),),), (0,))) is not None
    assert least_damage(Problem(((0.0,),), (((5,),),), (4,))) is None
