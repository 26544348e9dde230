"""Who is best where: crossings in closed form, their range against rows drawn anew, objectives, quality that may fail."""

from __future__ import annotations

import math

import numpy as np
import pytest

from assay_evaluate.choice.curves import NOBODY, Curve, Known, envelope, turns
from assay_evaluate.speed.noise import Sample

POINTS = (1, 8, 32)


def known(at: int, values: tuple[float, ...], limits: dict[str, float], starts: tuple[int, ...] = ()) -> Known:
    """starts: how many of the values each start has; (): one start."""
    logs, made = [math.log(value) for value in values], []
    for num in starts or (len(values),):
        made.append(tuple(logs[:num]))
        logs = logs[num:]
    return Known(at, Sample(tuple(made)), limits)


def curve(name: str, speeds: dict[int, tuple[float, ...]], chance: float = 0.0, **limits: float) -> Curve:
    rows = tuple(known(at, values, limits) for at, values in speeds.items())
    return Curve(name, name, rows, chance_of_failing=chance)


W4 = {1: (125.7,), 8: (495.7,), 32: (828.4,)}
NV = {1: (116.3,), 8: (455.5,), 32: (925.2,)}


def test_a_crossing_between_two_rows() -> None:
    """Linear in the logarithms: at 8 w4a16 leads by ln(495.7 / 455.5), at 32 it is behind by ln(925.2 / 828.4)."""
    found = envelope([curve("w4a16", W4), curve("nvfp4", NV)], POINTS, {}, num_draws=50, seed=0)
    (turn,) = turns(found)
    lead, behind = math.log(495.7 / 455.5), math.log(925.2 / 828.4)
    assert (turn.before, turn.after) == (0, 1)
    assert turn.at == pytest.approx(8 * 4 ** (lead / (lead + behind)), rel=0.01)
    assert (turn.low, turn.high, turn.chance) == (None, None, None)  # one repeat each: nothing is known of the noise
    assert [int(found.at(at)[0]) for at in POINTS] == [0, 0, 1]
    assert not found.noisy


def test_a_setup_is_known_between_its_rows_only() -> None:
    found = envelope([curve("a", {8: (100.0,)}), curve("b", {1: (1.0,), 32: (10.0,)})], POINTS, {}, num_draws=0, seed=0)
    assert [int(found.at(at)[0]) for at in POINTS] == [1, 0, 1]
    alone = envelope([curve("a", {8: (100.0,)})], (1, 8), {}, num_draws=0, seed=0)
    assert [int(alone.at(at)[0]) for at in (1, 8)] == [NOBODY, 0]


def test_an_objective_ends_where_tpot_reaches_it() -> None:
    """TPOT of 10 ms at 1 and 40 ms at 16 streams is 20 ms at 4; a setup without TPOT is never chosen."""
    fast = Curve("a", "a", (known(1, (100.0,), {"tpot_s": 0.01}), known(16, (400.0,), {"tpot_s": 0.04})))
    found = envelope([fast, curve("untold", {1: (900.0,), 16: (900.0,)})], (1, 16), {"tpot_s": 0.02}, num_draws=0, seed=0)
    (turn,) = turns(found)
    assert (turn.before, turn.after, turn.at) == (0, NOBODY, pytest.approx(4.0, rel=0.01))


@pytest.mark.filterwarnings("error")
def test_an_objective_beyond_the_rows_warns_of_nothing() -> None:
    """Where a setup has no rows nothing is computed of it: numpy's warning would stand before the recommendation."""
    alone = Curve("a", "a", (known(4, (100.0, 101.0), {"tpot_s": 0.01}),))
    found = envelope([alone], (1, 4, 16), {"tpot_s": 0.02}, num_draws=20, seed=0)
    assert [int(found.at(at)[0]) for at in (1, 4, 16)] == [NOBODY, 0, NOBODY]


def test_the_range_holds_the_true_crossing() -> None:
    """Rows of five repeats, drawn 60 times around curves that cross at 8: the range of 95 % misses it in few of them."""
    rng = np.random.default_rng(3)
    inside = 0
    for number in range(60):

        def repeats(true: float) -> tuple[float, ...]:
            return tuple(float(true * math.exp(0.04 * draw)) for draw in rng.standard_normal(5))

        a = curve("a", {2: repeats(120.0), 32: repeats(400.0)})
        b = curve("b", {2: repeats(100.0), 32: repeats(480.0)})
        made = turns(envelope([a, b], (2, 32), {}, num_draws=400, seed=number))
        assert len(made) == 1 and made[0].low is not None and made[0].high is not None
        inside += made[0].low <= 8 <= made[0].high
        assert made[0].chance is not None and made[0].chance > 0.5
    assert 52 <= inside <= 60


def test_quality_that_may_fail_makes_a_flip_uncertain() -> None:
    """nvfp4 has passed, but its intervals leave one chance in four that it should not have: so many draws have no flip."""
    found = envelope([curve("w4a16", W4), curve("nvfp4", NV, chance=0.25)], POINTS, {}, num_draws=2000, seed=0)
    (turn,) = turns(found)
    assert turn.chance == pytest.approx(0.75, abs=0.03)
    assert turn.low == pytest.approx(turn.at) and turn.high == pytest.approx(turn.at)
    assert (found.at(32)[1:] == 1).mean() == pytest.approx(0.75, abs=0.03)


def test_a_change_that_happens_twice_has_two_ranges() -> None:
    """a, b, a, b: repeats leave the first lead of b in doubt; draws without it do not lend it the second, ten times higher."""
    a = curve(
        "a", {1: (120.0, 121.0, 122.0), 4: (290.0, 295.0, 300.0), 16: (820.0, 821.0, 822.0), 64: (1500.0, 1501.0, 1502.0)}
    )
    b = curve("b", {1: (90.0, 91.0, 92.0), 4: (297.0, 300.0, 303.0), 16: (700.0, 702.0, 704.0), 64: (1900.0, 1905.0, 1910.0)})
    first, back, second = turns(envelope([a, b], (1, 4, 16, 64), {}, num_draws=1000, seed=0))
    assert (first.before, first.after) == (second.before, second.after) == (0, 1) == (back.after, back.before)
    assert first.low is not None and first.high is not None and second.low is not None and second.high is not None
    assert 1 < first.low < first.at < first.high < 6 < 20 < second.low < second.at < second.high < 40
    assert first.chance is not None and 0.6 < first.chance < 0.95 and second.chance == 1.0


def test_a_prediction_may_be_wrong_by_its_spread() -> None:
    """Both may be wrong by a factor of 1.7: a lead of 12 % is none."""
    curves = [Curve(one.setup, one.setup, one.rows, spread=1.73) for one in (curve("w4a16", W4), curve("nvfp4", NV))]
    found = envelope(curves, POINTS, {}, num_draws=2000, seed=0)
    assert 0.5 < (found.at(32)[1:] == 1).mean() < 0.75
    again = envelope(curves, POINTS, {}, num_draws=2000, seed=0)
    assert (found.best == again.best).all()
