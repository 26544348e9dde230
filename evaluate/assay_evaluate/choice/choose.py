"""Rows of speed and verdicts -> a choice: feasible, good enough, on the front, best where; flips, regret, cost.

At each number of streams the setup with the most tokens/s among those that pass the gates and meet the objective: best against
best, so MTP on may be chosen over MTP off. A ratio is printed between like rows only (`speed/ratio.py`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from assay.records.base import Interval
from assay.records.choice.record import Cell, Choice, Flip, Pick, Quality, Regret, Setup
from assay.records.speed import SpeedRow
from assay.records.verdict import GateReport
from assay_evaluate.choice.curves import LEVEL, NOBODY, ROUNDING, Array, Curve, Envelope, Known, envelope, gap, turns
from assay_evaluate.choice.quality import judged, losses
from assay_evaluate.choice.rows import Key, Usable, latencies, usable
from assay_evaluate.choice.sentences import if_passed, recommendation, within_noise, without_speed
from assay_evaluate.roofline.rows import SPREAD, RooflineComparison
from assay_evaluate.speed.noise import Noise, noise_of_rows, sample_of
from assay_evaluate.speed.ratio import Estimate, mean_of, output_tokens_s, ratio, why_unlike

SEED, NUM_DRAWS = 17, 2000
LIMITS = {"ttft_s": "TTFT", "tpot_s": "TPOT", "end_to_end_s": "end to end"}
OPEN = ("UNDERPOWERED", "NOT MEASURED")
OneBeside = Callable[[SpeedRow], RooflineComparison | None]


@dataclass(frozen=True)
class Wanted:
    """concurrency: None: every number of streams that has rows. infeasible: checkpoint -> why it cannot be served there."""

    concurrency: tuple[int, ...] | None = None
    objective: Mapping[str, float] | None = None
    usd_per_gpu_hour: float | None = None
    prompts: str | None = None
    infeasible: Mapping[str, str] | None = None
    not_measured: Mapping[str, str] | None = None
    """Checkpoint -> why it has no row, as the speed record says."""
    beside: OneBeside | None = None


def choose(rows: Sequence[SpeedRow], gates: GateReport | None, wanted: Wanted, *, model: str | None = None) -> Choice:
    """rows: on one hardware. gates: None: quality is assumed, and said to be. AssayError: no row can be used."""
    found = usable(rows, wanted.prompts, wanted.concurrency)
    points = wanted.concurrency or tuple(sorted({at for _, at in found.rows}))
    objective = dict(wanted.objective or {})
    setups = [key[0] for key in found.setups]
    quality = judged(gates, [*setups, *(row.checkpoint for row in found.others), *_judged_labels(gates, setups)])
    noise = noise_of_rows(found.rows.values(), output_tokens_s)
    cells = {
        (key, at): _cell(found, key, at, wanted, objective, noise) for key in found.setups for at in points
    }  # fmt: skip
    may = [key for key in found.setups if quality[key[0]].may_be_chosen]
    curves = [_curve(found, key, quality[key[0]]) for key in may]
    best = envelope(curves, points, objective, num_draws=NUM_DRAWS, seed=SEED)
    names = [found.setups[key].name for key in may]
    picks = tuple(_pick(found, may, best, at, quality, cells, objective) for at in points)
    flips = tuple(_flips(found, best, curves, objective))
    regrets = tuple(_regrets(found, may, cells, picks))
    cells |= _without_rows(found, points, wanted, gates)
    open_ones = [key for key in found.setups if quality[key[0]].word in OPEN]
    return Choice(
        model=model,
        recommendation=recommendation(
            names, best, flips, points, found.conditions[0], assumed=gates is None, limited=bool(objective), picks=picks
        ),
        quality_assumed=gates is None,
        hardware=found.conditions[2],
        num_gpus=found.conditions[3],
        origin=found.conditions[0],  # type: ignore[arg-type]
        prompts=found.conditions[1],
        engine=found.conditions[4],
        objective=objective,
        usd_per_gpu_hour=wanted.usd_per_gpu_hour,
        checkpoint_sha256={row.checkpoint: row.checkpoint_sha256 for row in found.rows.values() if row.checkpoint_sha256},
        concurrency=points,
        setups=tuple(found.setups.values()),
        cells=tuple(_on_front(cells, may, losses(gates))),
        quality=tuple(quality.values()),
        picks=picks,
        flips=flips,
        within_noise=within_noise(names, best, flips),
        if_passed=tuple(_if_passed(found, may, open_ones, quality, points, objective, best)),
        undecided=tuple(without_speed(one) for one in quality.values() if one.word in OPEN and one.checkpoint not in setups),
        one_for_all=min(regrets, key=lambda one: (len(one.misses), _share(one, cells, found)), default=None),
        regrets=regrets,
        refused=found.refused,
        set_aside=found.set_aside,
        seed=SEED,
        num_draws=NUM_DRAWS if best.noisy else 0,
        noise=best.noise.words if best.noise is not None and found.conditions[0] != "predicted" else None,
    )


# ------------------------------------------------------------------------------------------------ cells
def _cell(
    found: Usable, key: Key, at: int, wanted: Wanted, objective: Mapping[str, float], noise: Noise
) -> Cell:  # fmt: skip
    setup = found.setups[key]
    row = found.rows.get((key, at))
    if row is None:
        return Cell(setup=setup.name, concurrency=at, state="missing", why=_why_missing(found, key, at, wanted))
    speed = mean_of(row, output_tokens_s, noise) or Estimate(row.tokens_s, None, None, 1)
    known, derived = latencies(row)
    meets, misses = _against(known, objective)
    seen = None if wanted.beside is None else wanted.beside(row)
    gpus = row.num_gpus or 1
    price = wanted.usd_per_gpu_hour
    return Cell(
        setup=setup.name,
        concurrency=at,
        state=row.origin,
        output_tokens_s=speed.value,
        interval=speed.interval,
        num_repeats=len(row.repeats),
        tokens_s_user=speed.value / at,
        tokens_s_gpu=speed.value / row.num_gpus if row.num_gpus else None,
        ttft_s=known.get("ttft_s"),
        tpot_s=known.get("tpot_s"),
        tpot_derived=derived,
        acceptance_length=next((one.acceptance_length for one in row.repeats if one.acceptance_length is not None), None),
        usd_per_million_tokens=None if price is None else price / (3.6e-3 * speed.value / gpus),
        meets_objective=meets,
        misses=misses,
        floor_tpot_s=seen.floor_tpot_s if seen else None,
        roofline_share=seen.share if seen else None,
        flag=seen.words if seen else None,
        source=row.source,
        kernels=row.kernels,
    )


def _without_rows(
    found: Usable, points: Sequence[int], wanted: Wanted, gates: GateReport | None
) -> dict[tuple[Key, int], Cell]:
    """Cells of checkpoints that have no row to choose by: what the roofline predicts of them, or why there is none."""
    known = [key[0] for key in found.setups]
    labels = [row.checkpoint for row in found.others] + _judged_labels(gates, known)
    made: dict[tuple[Key, int], Cell] = {}
    for label in dict.fromkeys(labels):
        if label in known or (label == "reference" and gates is not None and gates.reference in known):
            continue
        for at in points:
            rows = [row for row in found.others if (row.checkpoint, row.concurrency) == (label, at)]
            guess = max((row for row in rows if row.origin == "predicted"), key=_tokens_s, default=None)
            speed = None if guess is None else mean_of(guess, output_tokens_s)
            tpot = None if guess is None else latencies(guess)[0].get("tpot_s")
            made[(label, 0, (), ()), at] = Cell(
                setup=label,
                concurrency=at,
                state="missing" if guess is None else "predicted",
                why=_why_no_row(label, rows, wanted),
                output_tokens_s=speed.value if speed else None,
                tokens_s_user=speed.value / at if speed else None,
                tpot_s=tpot,
                source=_guessed_by(guess) if guess else None,
            )
    return made


def _tokens_s(row: SpeedRow) -> float:
    speed = mean_of(row, output_tokens_s)
    return speed.value if speed else 0.0


def _guessed_by(row: SpeedRow) -> str:
    return f"{row.source}, {row.speculation} tokens drafted a step" if row.speculation else row.source


def _judged_labels(gates: GateReport | None, known: Sequence[str]) -> list[str]:
    """Reference and candidates of the verdicts, without the repeat. known: with rows, perhaps as `reference`."""
    if gates is None:
        return []
    labels = [] if "reference" in known else [gates.reference]
    return labels + [label for label in gates.overall if label != f"{gates.reference}-repeat"]


def _why_no_row(label: str, rows: Sequence[SpeedRow], wanted: Wanted) -> str:
    if (why := (wanted.infeasible or {}).get(label)) is not None:
        return why
    if any(row.emulated for row in rows):
        return "emulated here, which says nothing about speed"
    if (lost := next((row for row in rows if row.speculation is not None and not row.is_comparable), None)) is not None:
        return f"its row {lost.why_not_chosen}"
    if any(row.origin != "predicted" for row in rows):
        return "only rows that may not be compared with the others"
    return (wanted.not_measured or {}).get(label, "nobody measured it")


def _why_missing(found: Usable, key: Key, at: int, wanted: Wanted) -> str:
    if (why := (wanted.infeasible or {}).get(key[0])) is not None:
        return why
    elsewhere = [row for row in found.others if row.checkpoint == key[0] and row.concurrency == at]
    if elsewhere and elsewhere[0].speculation is not None and elsewhere[0].why_not_chosen is not None:
        return f"its row {elsewhere[0].why_not_chosen}"
    if elsewhere:
        return f"{elsewhere[0].origin} under other conditions only"
    return "nobody measured it"


def _against(known: Mapping[str, float], objective: Mapping[str, float]) -> tuple[bool | None, str | None]:
    """(whether the objective is met, what is missed)."""
    over = [name for name, most in objective.items() if known.get(name, 0.0) > most * (1 + ROUNDING)]
    missed = [f"{LIMITS[name]} {_seconds(known[name])}" for name in over]
    if missed:
        return False, ", ".join(missed)
    unknown = [LIMITS[name] for name in objective if name not in known]
    if unknown:
        return None, f"{', '.join(unknown)} not known"
    return (True if objective else None), None


def _seconds(value: float) -> str:
    return f"{1e3 * value:.1f} ms" if value < 1 else f"{value:.2f} s"


def _on_front(cells: Mapping[tuple[Key, int], Cell], may: Sequence[Key], lost: Mapping[str, float]) -> list[Cell]:
    """All cells, those marked that nothing beats."""
    made = []
    for (key, at), cell in cells.items():
        rivals = [(other, cells[other, at]) for other in may if other != key]
        beaten = any(_beats(rival, lost.get(name[0]), cell, lost.get(key[0])) for name, rival in rivals)
        stands = key in may and cell.output_tokens_s is not None and not beaten
        made.append(cell.model_copy(update={"on_front": stands}))
    return made


def _beats(one: Cell, its_loss: float | None, other: Cell, other_loss: float | None) -> bool:
    if one.output_tokens_s is None or other.output_tokens_s is None:
        return False
    pairs = [
        (-one.output_tokens_s, -other.output_tokens_s),
        (one.ttft_s, other.ttft_s),
        (its_loss, other_loss),
    ]
    known = [(ours, theirs) for ours, theirs in pairs if ours is not None and theirs is not None]
    if any((ours is None) != (theirs is None) for ours, theirs in pairs):
        return False
    return all(ours <= theirs for ours, theirs in known) and any(ours < theirs for ours, theirs in known)


# ------------------------------------------------------------------------------------------------ picks and flips
def _curve(found: Usable, key: Key, quality: Quality) -> Curve:
    rows = sorted((row for (of, _), row in found.rows.items() if of == key), key=lambda row: row.concurrency)
    known = tuple(
        Known(row.concurrency, sample, latencies(row)[0])
        for row in rows if (sample := sample_of(row, output_tokens_s)) is not None
    )  # fmt: skip
    spread = SPREAD if found.conditions[0] == "predicted" else 1.0
    return Curve(found.setups[key].name, key[0], known, quality.chance_of_failing or 0.0, spread)


def _pick(
    found: Usable, may: Sequence[Key], best: Envelope, at: int, quality: Mapping[str, Quality],
    cells: Mapping[tuple[Key, int], Cell], objective: Mapping[str, float],
) -> Pick:  # fmt: skip
    chosen = best.at(at)
    first = int(chosen[0])
    if first == NOBODY:
        there = [cells[key, at] for key in found.setups]
        return Pick(concurrency=at, setup=None, why_none=_why_none(there, may, found))
    cell = cells[may[first], at]
    if cell.output_tokens_s is None or (objective and not cell.meets_objective):
        return Pick(concurrency=at, setup=None, why_none=_why_between(found, may[first], cell, objective))
    row = found.rows[may[first], at]
    rivals = [key for key in may if key != may[first] and (key, at) in found.rows]
    rivals = [key for key in rivals if not objective or cells[key, at].meets_objective]
    second = max(rivals, key=lambda key: cells[key, at].output_tokens_s or 0.0, default=None)
    pick = Pick(
        concurrency=at,
        setup=found.setups[may[first]].name,
        chance_best=float((chosen[1:] == first).mean()) if best.noisy else None,
    )
    if (drawn := best.logs.get((first, at))) is not None and best.noise is not None:
        pick = pick.model_copy(update={"expected_tokens_s": _expected(drawn[1:], len(rivals) + 1)})
    if second is None:
        return pick
    other = found.rows[second, at]
    why = why_unlike(row, other)
    lead = (cells[may[first], at].output_tokens_s or 0.0) - (cells[second, at].output_tokens_s or 0.0)
    return pick.model_copy(
        update={
            "next_best": found.setups[second].name,
            "lead_tokens_s": lead,
            "ratio": ratio(row, other).value if why is None else None,
            "no_ratio": why,
        }
    )


def _expected(logs: Array, num_compared: int) -> Interval:
    """Of the draws of the setup that is picked: what it will run at, after the luck of being the fastest of so many."""
    low, high = np.quantile(logs, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return Interval(value=math.exp(float(logs.mean())), low=math.exp(low), high=math.exp(high), n=num_compared)


def _why_none(there: Sequence[Cell], may: Sequence[Key], found: Usable) -> str:
    if not may:
        return "no checkpoint that has rows may be chosen: see quality"
    names = {found.setups[key].name for key in may}
    known = [cell for cell in there if cell.setup in names and cell.output_tokens_s is not None]
    if not known:
        return "nobody measured one that may be chosen"
    near = max(known, key=lambda cell: cell.output_tokens_s or 0.0)
    return f"none meets the objective; {near.setup}, the fastest, misses it: {near.misses}"


def _why_between(found: Usable, key: Key, cell: Cell, objective: Mapping[str, float]) -> str:
    """Of who is ahead by rows on both sides, and has none there, or one that lacks what is limited."""
    known = [at for (of, at), row in found.rows.items() if of == key and objective.keys() <= latencies(row)[0].keys()]
    below, above = max(at for at in known if at < cell.concurrency), min(at for at in known if at > cell.concurrency)
    what = f"nobody measured {cell.setup} there" if cell.output_tokens_s is None else f"{cell.misses} of {cell.setup} there"
    return f"{what}, which is ahead by its speeds at {below} and {above} streams"


def _flips(found: Usable, best: Envelope, curves: Sequence[Curve], objective: Mapping[str, float]) -> list[Flip]:
    known = sorted({at for _, at in found.rows})
    made = []
    for turn in turns(best):
        below = max((at for at in known if at <= turn.at), default=known[0])
        above = min((at for at in known if at >= turn.at), default=known[-1])
        made.append(
            Flip(
                before=None if turn.before == NOBODY else curves[turn.before].setup,
                after=None if turn.after == NOBODY else curves[turn.after].setup,
                at=turn.at, between=(below, above), low=turn.low, high=turn.high, chance=turn.chance,
                gap=gap(best, turn, curves, objective),
            )
        )  # fmt: skip
    return made


def _if_passed(
    found: Usable, may: Sequence[Key], open_ones: Sequence[Key], quality: Mapping[str, Quality], points: Sequence[int],
    objective: Mapping[str, float], best: Envelope,
) -> list[str]:  # fmt: skip
    """What would be chosen with each undecided checkpoint among those that may be."""
    lines = []
    for checkpoint in dict.fromkeys(key[0] for key in open_ones):
        keys = [*may, *(key for key in open_ones if key[0] == checkpoint)]
        curves = [replace(_curve(found, key, quality[key[0]]), chance_of_failing=0.0) for key in keys]
        then = envelope(curves, points, objective, num_draws=0, seed=SEED)
        new = {number for number in map(int, then.best[0]) if number >= len(may)}
        names, flips = [curve.setup for curve in curves], _flips(found, then, curves, objective)
        lines.append(if_passed(quality[checkpoint], names, then, flips, points, changes=bool(new), limited=bool(objective)))
    return lines


# ------------------------------------------------------------------------------------------------ one for all
def _regrets(
    found: Usable, may: Sequence[Key], cells: Mapping[tuple[Key, int], Cell], picks: Sequence[Pick]
) -> list[Regret]:  # fmt: skip
    by_name: dict[str, Setup] = {setup.name: setup for setup in found.setups.values()}
    keys = {found.setups[key].name: key for key in found.setups}
    made = []
    for key in may:
        taken = [(pick, cells[key, pick.concurrency]) for pick in picks if pick.setup is not None]
        if not taken or any(cell.output_tokens_s is None for _, cell in taken):
            continue
        misses = tuple(pick.concurrency for pick, cell in taken if cell.misses is not None)
        worst, ratio_there, dearer, at = -math.inf, None, None, taken[0][0].concurrency
        for pick, cell in taken:
            there = cells[keys[by_name[str(pick.setup)].name], pick.concurrency]
            behind = 1 - (cell.output_tokens_s or 0.0) / (there.output_tokens_s or 1.0)
            if behind > worst:
                ours, theirs = found.rows[key, pick.concurrency], found.rows[keys[str(pick.setup)], pick.concurrency]
                alike = why_unlike(ours, theirs) is None
                worst, at = behind, pick.concurrency
                ratio_there = behind if alike else None
                if cell.usd_per_million_tokens is not None and there.usd_per_million_tokens is not None:
                    dearer = cell.usd_per_million_tokens - there.usd_per_million_tokens
                tokens = (there.output_tokens_s or 0.0) - (cell.output_tokens_s or 0.0)
        made.append(
            Regret(
                setup=found.setups[key].name, worst_tokens_s=tokens, at=at, relative=ratio_there,
                usd_per_million_tokens=dearer, misses=misses,
            )
        )  # fmt: skip
    return made


def _share(one: Regret, cells: Mapping[tuple[Key, int], Cell], found: Usable) -> float:
    """Share of the best's tokens/s that it lacks, for the order alone."""
    key = next(key for key, setup in found.setups.items() if setup.name == one.setup)
    own = cells[key, one.at].output_tokens_s or 0.0
    return one.worst_tokens_s / (own + one.worst_tokens_s)
