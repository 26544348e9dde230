"""How far `assay choose` may be believed: the speed of what it picks, "best with a chance of 90 %", the range of a flip.

    python benchmarks/choice/choose_start.py [--draws 300] [--write FILE]

Speeds are drawn with a known truth: a setup's own, an effect of each start of its server (standard deviation 3 %, unless said),
and noise of each repeat (1 %). *Before* is what was done until restarts were modelled: the mean of three repeats of one start,
and Student's t over them. *Now* is `assay_evaluate.choice.curves`, on data of several protocols. No model and no server: five
minutes on one core.
"""

from __future__ import annotations

import argparse
import itertools
import math
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from assay_evaluate.choice.curves import Curve, Known, envelope, turns
from assay_evaluate.speed.noise import Sample

Array = npt.NDArray[np.float64]
START, REPEAT, DRAWS = 0.03, 0.01, 400
AT = 8
PROTOCOLS: dict[str, tuple[int, ...]] = {
    "a table, one run": (1,), "one start, 3 repeats": (3,), "two starts, 3 repeats": (2, 1),
    "three starts, 3 repeats": (1, 1, 1),
}  # fmt: skip
"""Name -> repeats of each start."""
BEFORE = "before: one start, 3 repeats"


class Design(NamedTuple):
    """truth: logarithms of the setups' speeds, drawn anew. start: standard deviation of the effects of starts."""

    name: str
    truth: Callable[[np.random.Generator], Array]
    start: float = START


def spread(num: int, width: float) -> Callable[[np.random.Generator], Array]:
    return lambda rng: rng.normal(0, width, num)


DESIGNS = (
    Design("8 equal", spread(8, 1e-9)),
    Design("4 equal, 4 slower by 30 %", lambda rng: np.repeat([0.0, -0.3], 4) + rng.normal(0, 1e-9, 8)),
    *(Design(f"{num} that differ by {width:.0%}", spread(num, width)) for num in (2, 4, 8) for width in (0.03, 0.1)),
    Design("8, each 1.5 % behind the one before", lambda rng: -0.015 * np.arange(8)),
    Design("4 that differ by 3 %, starts by 1 %", spread(4, 0.03), 0.01),
    Design("4 that differ by 3 %, starts by 6 %", spread(4, 0.03), 0.06),
)


def measured(truth: float, effects: Sequence[float], starts: Sequence[int], rng: np.random.Generator) -> Sample:
    return Sample(
        tuple(tuple(truth + effect + rng.normal(0, REPEAT, num)) for effect, num in zip(effects, starts, strict=True))
    )  # fmt: skip


def as_before(samples: Sequence[Sample], rng: np.random.Generator) -> Array:
    """Draws of each setup's logarithm, by Student's t over repeats."""
    logs = [np.array(sample.starts[0]) for sample in samples]
    return np.stack(
        [one.mean() + one.std(ddof=1) / math.sqrt(len(one)) * rng.standard_t(len(one) - 1, DRAWS) for one in logs], axis=1
    )


class Outcome(NamedTuple):
    """over: the speed that is said of the pick over its true one, less 1. said: chance that it is the best. covers: None: no
    range of that speed was printed."""

    over: float
    said: float
    is_best: bool
    covers: bool | None


def picked(design: Design, protocol: str, rng: np.random.Generator, seed: int) -> Outcome:
    truth = design.truth(rng)
    starts = PROTOCOLS.get(protocol, (3,))
    samples = [measured(one, rng.normal(0, design.start, len(starts)), starts, rng) for one in truth]
    logs = [sample.mean for sample in samples]
    pick = int(np.argmax(logs))
    if protocol == BEFORE:
        chance = float((as_before(samples, rng).argmax(axis=1) == pick).mean())
        return Outcome(math.expm1(logs[pick] - truth[pick]), chance, pick == int(truth.argmax()), None)
    curves = [Curve(str(at), str(at), (Known(AT, sample, {}),)) for at, sample in enumerate(samples)]
    found = envelope(curves, (AT,), {}, num_draws=DRAWS, seed=seed)
    drawn = found.logs[pick, AT][1:]
    low, high = np.quantile(drawn, (0.025, 0.975))
    return Outcome(
        math.expm1(drawn.mean() - truth[pick]), float((found.at(AT)[1:] == pick).mean()), pick == int(truth.argmax()),
        bool(low <= truth[pick] <= high),
    )  # fmt: skip


def share(flags: Sequence[bool]) -> str:
    return f"{100 * sum(flags) / len(flags):.0f} % of {len(flags)}" if flags else "never said"


def line_of(design: Design, protocol: str, num: int) -> tuple[str, list[Outcome]]:
    rng = np.random.default_rng(zlib.crc32(f"{design.name}:{protocol}".encode()))
    made = [picked(design, protocol, rng, seed) for seed in range(num)]
    over = 100 * sum(one.over for one in made) / num
    sure = [one.is_best for one in made if one.said >= 0.9]
    likely = [one.is_best for one in made if 0.7 <= one.said < 0.9]
    covers = [one.covers for one in made if one.covers is not None]
    said = sum(one.said for one in made) / num
    best = sum(one.is_best for one in made) / num
    name = protocol if protocol == BEFORE else f"now: {protocol}"
    cells = (name, f"{over:+.1f} %", share(covers) if covers else "-", f"{said:.0%} / {best:.0%}", share(sure), share(likely))
    return f"| {design.name} | {' | '.join(cells)} |", made


# ------------------------------------------------------------------------------------------------ flips
FLIPS = (2, 32)
TRUE_AT = 8.0


def flip(protocol: str, is_shared: bool, gap: float, rng: np.random.Generator, seed: int) -> tuple[bool, bool, float] | None:
    """Two setups that cross at 8 of 2 to 32 streams, each ahead by `gap` at an end. (seen, covered, width in octaves)."""
    starts = PROTOCOLS.get(protocol, (3,))
    curves = []
    for number, sign in enumerate((0.5, -0.5)):
        common = rng.normal(0, START, len(starts))
        samples = []
        for at, side in zip(FLIPS, (1, -1), strict=True):
            effects = common if is_shared else rng.normal(0, START, len(starts))
            samples.append(Known(at, measured(math.log(100 * at**0.6) + sign * side * gap, effects, starts, rng), {}))
        curves.append(Curve(str(number), str(number), tuple(samples)))
    if protocol == BEFORE:
        ends = [as_before([curve.rows[end].sample for curve in curves], rng) for end in (0, 1)]
        leads = [one[:, 0] - one[:, 1] for one in ends]
        seen = curves[0].rows[0].log > curves[1].rows[0].log and curves[0].rows[1].log < curves[1].rows[1].log
        crossing = [float(first / (first - last)) for first, last in zip(*leads, strict=True) if first > 0 > last]
        if not seen or not crossing:
            return None
        low, high = (FLIPS[0] * (FLIPS[1] / FLIPS[0]) ** one for one in np.quantile(crossing, (0.025, 0.975)))
    else:
        made = [
            one for one in turns(envelope(curves, FLIPS, {}, num_draws=DRAWS, seed=seed)) if (one.before, one.after) == (0, 1)
        ]
        if not made or made[0].low is None or made[0].high is None:
            return None
        low, high = made[0].low, made[0].high
    return True, low <= TRUE_AT <= high, math.log2(high / low)


def flip_line(protocol: str, is_shared: bool, gap: float, num: int) -> str:
    rng = np.random.default_rng(zlib.crc32(f"{protocol}:{is_shared}:{gap}".encode()))
    made = [one for seed in range(num) if (one := flip(protocol, is_shared, gap, rng, seed)) is not None]
    name = protocol if protocol == BEFORE else f"now: {protocol}"
    effect = "one effect of a start at both ends" if is_shared else "an effect of its own at each end"
    width = sum(one[2] for one in made) / len(made)
    return f"| {gap:.0%} ahead at an end, {effect} | {name} | {share([one[1] for one in made])} | {width:.1f} |"


HEAD = """# How far a choice may be believed

`python benchmarks/choice/choose_start.py --draws {num}`

{num} draws a line. Starts of a server differ by 3 % (standard deviation) unless said, repeats by 1 %. *Before*: the mean of
three repeats of one start, Student's t over them. *Now*: the product's own code (`assay_evaluate/choice/curves.py`).

## What is picked
*Overstated*: the speed that is said of the pick against its true one. *Covered*: the range of 95 % of that speed holds the
true one. *Said / right*: the mean chance that the pick is said to be the best, and how often it is. *90 % and more*, *70 to
90 %*: how often it is the best where that is said.

| truth | protocol | overstated | covered | said / right | 90 % and more | 70 to 90 % |
|---|---|---|---|---|---|---|
"""
FLIP_HEAD = """
All of these but the tables and the equal setups, of which none is the best: said 90 % and more, right in {sure}; before
{before}.

## Where the choice flips
Two setups that cross at 8 streams, measured at 2 and 32. *Covered*: the range of 95 % holds 8. *Octaves*: its mean width.

| truth | protocol | covered | octaves |
|---|---|---|---|
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--draws", type=int, default=300)
    parser.add_argument("--write", type=Path)
    given = parser.parse_args()
    text, sure = HEAD.format(num=given.draws), {True: list[bool](), False: list[bool]()}
    for design, protocol in itertools.product(DESIGNS, (BEFORE, *PROTOCOLS)):
        line, made = line_of(design, protocol, given.draws)
        print(line, flush=True)
        text += f"{line}\n"
        if "equal" not in design.name and protocol != "a table, one run":
            sure[protocol == BEFORE] += [one.is_best for one in made if one.said >= 0.9]
    text += FLIP_HEAD.format(sure=share(sure[False]), before=share(sure[True]))
    for gap, is_shared, protocol in itertools.product((0.05, 0.15), (True, False), (BEFORE, *PROTOCOLS)):
        line = flip_line(protocol, is_shared, gap, given.draws)
        print(line, flush=True)
        text += f"{line}\n"
    if given.write is not None:
        given.write.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
