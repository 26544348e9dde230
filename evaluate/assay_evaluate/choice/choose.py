"""Rows of speed and verdicts -> a choice: feasible, good enough, on the front, best where; flips, regret, cost.

At each number of streams the setup with the most tokens/s among those that pass the gates and meet the objective: best against
best, so MTP on may be chosen over MTP off. A ratio is printed between like rows only (`speed/ratio.py`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from assay.records.base import Interval
from assay.records.choice.record import Cell, Choice, Flip, Pick, Quality, Regret
from assay.records.speed import SpeedRow
from assay.records.verdict import GateReport
from assay_evaluate.choice import english
from assay_evaluate.choice.curves import LEVEL, NOBODY, ROUNDING, Curve, Envelope, Known, envelope, gap, turns
from assay_evaluate.choice.quality import mean_losses, quality_of
from assay_evaluate.choice.rows import Key, SelectedRows, latencies, select_rows
from assay_evaluate.choice.sentences import if_passed, recommendation, within_noise, without_speed
from assay_evaluate.roofline.rows import SPREAD, RooflineComparison
from assay_evaluate.speed.noise import Noise, noise_of_rows, sample_of
from assay_evaluate.speed.ratio import Estimate, mean_of, output_tokens_s, ratio, why_unlike

SEED, NUM_DRAWS = 17, 2000
OPEN = ("UNDERPOWERED", "NOT MEASURED", "not failed")
OneBeside = Callable[[SpeedRow], RooflineComparison | None]


@dataclass(frozen=True)
class ChoiceRequest:
    """concurrency: None: every number of streams that has rows. infeasible: checkpoint -> why it cannot be served there."""

    concurrency: tuple[int, ...] | None = None
    objective: Mapping[str, float] | None = None
    usd_per_gpu_hour: float | None = None
    prompts: str | None = None
    infeasible: Mapping[str, str] | None = None
    not_measured: Mapping[str, str] | None = None
    """Checkpoint -> why it has no row, as the speed record says."""
    beside: OneBeside | None = None
    variants: Mapping[str, str] = field(default_factory=dict)
    """Label of another way of serving the reference -> what it is: `fp8 with kv-cache-dtype fp8`."""


def choose(rows: Sequence[SpeedRow], gates: GateReport | None, request: ChoiceRequest, *, model: str | None = None) -> Choice:
    """rows: on one hardware. gates: None: quality is assumed, and said to be. AssayError: no row can be used."""
    selected = select_rows(rows, request.prompts, request.concurrency, request.variants)
    points = request.concurrency or tuple(sorted({at for _, at in selected.rows}))
    objective = dict(request.objective or {})
    setups = [key[0] for key in selected.setups]
    labels = [*setups, *(row.checkpoint for row in selected.others), *_judged_labels(gates, setups)]
    quality = {label: quality_of(gates, label, request.variants.get(label)) for label in dict.fromkeys(labels)}
    noise = noise_of_rows(selected.rows.values(), output_tokens_s)
    cells = {
        (key, at): _cell(selected, key, at, request, objective, noise) for key in selected.setups for at in points
    }  # fmt: skip
    may = [key for key in selected.setups if quality[key[0]].may_be_chosen]
    curves = [_curve(selected, key, quality[key[0]]) for key in may]
    best = envelope(curves, points, objective, num_draws=NUM_DRAWS, seed=SEED)
    names = [selected.setups[key].name for key in may]
    picks = tuple(_pick(selected, may, best, at, cells, objective) for at in points)
    flips = tuple(_flips(selected, best, curves, objective))
    regrets = tuple(_regrets(selected, may, cells, picks))
    keys = {setup.name: key for key, setup in selected.setups.items()}

    def share_lost(regret: Regret) -> tuple[int, float]:
        """Objectives missed; share of the best's tokens/s that the setup lacks, for the order alone."""
        own = cells[keys[regret.setup], regret.at].output_tokens_s or 0.0
        return len(regret.misses), regret.worst_tokens_s / (own + regret.worst_tokens_s)

    cells |= _without_rows(selected, points, request, gates)
    open_ones = [key for key in selected.setups if quality[key[0]].word in OPEN]
    return Choice(
        model=model,
        recommendation=recommendation(
            names, best, flips, points, selected.conditions[0], assumed=gates is None, limited=bool(objective), picks=picks
        ),
        quality_assumed=gates is None,
        hardware=selected.conditions[2],
        num_gpus=selected.conditions[3],
        origin=selected.conditions[0],  # type: ignore[arg-type]
        prompts=selected.conditions[1],
        engine=selected.conditions[4],
        objective=objective,
        usd_per_gpu_hour=request.usd_per_gpu_hour,
        checkpoint_sha256={row.checkpoint: row.checkpoint_sha256 for row in selected.rows.values() if row.checkpoint_sha256},
        concurrency=points,
        setups=tuple(selected.setups.values()),
        cells=tuple(_on_front(cells, may, mean_losses(gates))),
        quality=tuple(quality.values()),
        picks=picks,
        flips=flips,
        within_noise=within_noise(names, best, flips),
        if_passed=tuple(_if_passed(selected, may, open_ones, quality, points, objective)),
        undecided=tuple(
            without_speed(checkpoint_quality)
            for checkpoint_quality in quality.values()
            if checkpoint_quality.word in OPEN and checkpoint_quality.checkpoint not in setups
        ),
        one_for_all=min(regrets, key=share_lost, default=None),
        regrets=regrets,
        refused=selected.refused,
        set_aside=selected.set_aside,
        seed=SEED,
        num_draws=NUM_DRAWS if best.noisy else 0,
        noise=best.noise.words if best.noise is not None and selected.conditions[0] != "predicted" else None,
    )


# ------------------------------------------------------------------------------------------------ cells
def _cell(
    selected: SelectedRows, key: Key, at: int, request: ChoiceRequest, objective: Mapping[str, float], noise: Noise
) -> Cell:  # fmt: skip
    setup = selected.setups[key]
    row = selected.rows.get((key, at))
    if row is None:
        return Cell(setup=setup.name, concurrency=at, state="missing", why=_why_missing(selected, key, at, request))
    speed = mean_of(row, output_tokens_s, noise) or Estimate(row.tokens_s, None, None, 1)
    known, derived = latencies(row)
    meets, misses = _against(known, objective)
    prediction = None if request.beside is None else request.beside(row)
    gpus = row.num_gpus or 1
    price = request.usd_per_gpu_hour
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
        acceptance_length=next(
            (repeat.acceptance_length for repeat in row.repeats if repeat.acceptance_length is not None), None
        ),
        usd_per_million_tokens=None if price is None else price / (3.6e-3 * speed.value / gpus),
        meets_objective=meets,
        misses=misses,
        floor_tpot_s=prediction.floor_tpot_s if prediction else None,
        roofline_share=prediction.share if prediction else None,
        flag=prediction.words if prediction else None,
        source=row.source,
        kernels=row.kernels,
    )


def _without_rows(
    selected: SelectedRows, points: Sequence[int], request: ChoiceRequest, gates: GateReport | None
) -> dict[tuple[Key, int], Cell]:
    """Cells of checkpoints that have no row to choose by: what the roofline predicts of them, or why there is none."""
    known = [key[0] for key in selected.setups]
    labels = [row.checkpoint for row in selected.others] + _judged_labels(gates, known)
    made: dict[tuple[Key, int], Cell] = {}
    for label in dict.fromkeys(labels):
        if label in known or (label == "reference" and gates is not None and gates.reference in known):
            continue
        for at in points:
            rows = [row for row in selected.others if (row.checkpoint, row.concurrency) == (label, at)]
            predicted = [(row, mean_of(row, output_tokens_s)) for row in rows if row.origin == "predicted"]
            guess, speed = max(predicted, key=lambda pair: pair[1].value if pair[1] else 0.0, default=(None, None))
            tpot = None if guess is None else latencies(guess)[0].get("tpot_s")
            source = None if guess is None else guess.source
            if guess is not None and guess.speculation:
                source = english.DRAFTED.format(source=source, tokens=guess.speculation)
            made[(label, 0, (), ()), at] = Cell(
                setup=label,
                concurrency=at,
                state="missing" if guess is None else "predicted",
                why=_why_no_row(label, rows, request),
                output_tokens_s=speed.value if speed else None,
                tokens_s_user=speed.value / at if speed else None,
                tpot_s=tpot,
                source=source,
            )
    return made


def _judged_labels(gates: GateReport | None, known: Sequence[str]) -> list[str]:
    """Reference and candidates of the verdicts, without the repeat. known: with rows, perhaps as `reference`."""
    if gates is None:
        return []
    labels = [] if "reference" in known else [gates.reference]
    return labels + [label for label in gates.overall if label != f"{gates.reference}-repeat"]


def _why_no_row(label: str, rows: Sequence[SpeedRow], request: ChoiceRequest) -> str:
    if (reason := (request.infeasible or {}).get(label)) is not None:
        return reason
    if any(row.emulated for row in rows):
        return english.EMULATED
    if (lost := next((row for row in rows if row.speculation is not None and not row.is_comparable), None)) is not None:
        return english.ITS_ROW.format(reason=lost.why_not_chosen)
    if any(row.origin != "predicted" for row in rows):
        return english.NOT_COMPARABLE
    return (request.not_measured or {}).get(label, english.NOT_MEASURED)


def _why_missing(selected: SelectedRows, key: Key, at: int, request: ChoiceRequest) -> str:
    if (reason := (request.infeasible or {}).get(key[0])) is not None:
        return reason
    elsewhere = [row for row in selected.others if row.checkpoint == key[0] and row.concurrency == at]
    if elsewhere and elsewhere[0].speculation is not None and elsewhere[0].why_not_chosen is not None:
        return english.ITS_ROW.format(reason=elsewhere[0].why_not_chosen)
    if elsewhere:
        return english.OTHER_CONDITIONS.format(origin=elsewhere[0].origin)
    return english.NOT_MEASURED


def _against(known: Mapping[str, float], objective: Mapping[str, float]) -> tuple[bool | None, str | None]:
    """(whether the objective is met, what is missed)."""
    over = [name for name, most in objective.items() if known.get(name, 0.0) > most * (1 + ROUNDING)]
    times = {name: f"{1e3 * known[name]:.1f} ms" if known[name] < 1 else f"{known[name]:.2f} s" for name in over}
    missed = [f"{english.LIMITS[name]} {time}" for name, time in times.items()]
    if missed:
        return False, ", ".join(missed)
    unknown = [english.LIMITS[name] for name in objective if name not in known]
    if unknown:
        return None, english.NOT_KNOWN.format(limits=", ".join(unknown))
    return (True if objective else None), None


def _on_front(cells: Mapping[tuple[Key, int], Cell], may: Sequence[Key], lost: Mapping[str, float]) -> list[Cell]:
    """All cells, those marked that nothing beats."""
    made = []
    for (key, at), cell in cells.items():
        rivals = [(other, cells[other, at]) for other in may if other != key]
        beaten = any(_beats(rival, lost.get(name[0]), cell, lost.get(key[0])) for name, rival in rivals)
        stands = key in may and cell.output_tokens_s is not None and not beaten
        made.append(cell.model_copy(update={"on_front": stands}))
    return made


def _beats(cell: Cell, its_loss: float | None, other: Cell, other_loss: float | None) -> bool:
    if cell.output_tokens_s is None or other.output_tokens_s is None:
        return False
    pairs = [(-cell.output_tokens_s, -other.output_tokens_s), (cell.ttft_s, other.ttft_s), (its_loss, other_loss)]
    known = [(value, other_value) for value, other_value in pairs if value is not None and other_value is not None]
    if any((value is None) != (other_value is None) for value, other_value in pairs):
        return False
    return all(value <= other_value for value, other_value in known) and any(own < others for own, others in known)


# ------------------------------------------------------------------------------------------------ picks and flips
def _curve(selected: SelectedRows, key: Key, quality: Quality) -> Curve:
    rows = sorted((row for (of, _), row in selected.rows.items() if of == key), key=lambda row: row.concurrency)
    known = tuple(
        Known(row.concurrency, sample, latencies(row)[0])
        for row in rows if (sample := sample_of(row, output_tokens_s)) is not None
    )  # fmt: skip
    spread = SPREAD if selected.conditions[0] == "predicted" else 1.0
    return Curve(selected.setups[key].name, key[0], known, quality.chance_of_failing or 0.0, spread)


def _pick(
    selected: SelectedRows, may: Sequence[Key], best: Envelope, at: int, cells: Mapping[tuple[Key, int], Cell],
    objective: Mapping[str, float],
) -> Pick:  # fmt: skip
    chosen = best.at(at)
    first = int(chosen[0])
    if first == NOBODY:
        cells_there = [cells[key, at] for key in selected.setups]
        return Pick(concurrency=at, setup=None, why_none=_why_none(cells_there, may, selected))
    cell = cells[may[first], at]
    if cell.output_tokens_s is None or (objective and not cell.meets_objective):
        return Pick(concurrency=at, setup=None, why_none=_why_between(selected, may[first], cell, objective))
    row = selected.rows[may[first], at]
    rivals = [key for key in may if key != may[first] and (key, at) in selected.rows]
    rivals = [key for key in rivals if not objective or cells[key, at].meets_objective]
    second = max(rivals, key=lambda key: cells[key, at].output_tokens_s or 0.0, default=None)
    pick = Pick(
        concurrency=at,
        setup=selected.setups[may[first]].name,
        chance_best=float((chosen[1:] == first).mean()) if best.noisy else None,
    )
    if (drawn := best.logs.get((first, at))) is not None and best.noise is not None:
        # Of the draws of the picked setup: what it will run at, after the luck of being the fastest of so many.
        low, high = (math.exp(end) for end in np.quantile(drawn[1:], [(1 - LEVEL) / 2, (1 + LEVEL) / 2]))
        expected = Interval(value=math.exp(float(drawn[1:].mean())), low=low, high=high, n=len(rivals) + 1)
        pick = pick.model_copy(update={"expected_tokens_s": expected})
    if second is None:
        return pick
    other = selected.rows[second, at]
    reason = why_unlike(row, other)
    lead = (cells[may[first], at].output_tokens_s or 0.0) - (cells[second, at].output_tokens_s or 0.0)
    return pick.model_copy(
        update={
            "next_best": selected.setups[second].name,
            "lead_tokens_s": lead,
            "ratio": ratio(row, other).value if reason is None else None,
            "no_ratio": reason,
        }
    )


def _why_none(cells_there: Sequence[Cell], may: Sequence[Key], selected: SelectedRows) -> str:
    if not may:
        return english.NONE_MAY_BE_CHOSEN
    names = {selected.setups[key].name for key in may}
    known = [cell for cell in cells_there if cell.setup in names and cell.output_tokens_s is not None]
    if not known:
        return english.NONE_WAS_MEASURED
    near = max(known, key=lambda cell: cell.output_tokens_s or 0.0)
    return english.NONE_MEETS.format(setup=near.setup, misses=near.misses)


def _why_between(selected: SelectedRows, key: Key, cell: Cell, objective: Mapping[str, float]) -> str:
    """Of who is ahead by rows on both sides, and has none there, or one that lacks what is limited."""
    known = [at for (of, at), row in selected.rows.items() if of == key and objective.keys() <= latencies(row)[0].keys()]
    below, above = max(at for at in known if at < cell.concurrency), min(at for at in known if at > cell.concurrency)
    template = english.NOT_MEASURED_THERE if cell.output_tokens_s is None else english.MISSED_THERE
    return english.AHEAD.format(what=template.format(setup=cell.setup, misses=cell.misses), below=below, above=above)


def _flips(selected: SelectedRows, best: Envelope, curves: Sequence[Curve], objective: Mapping[str, float]) -> list[Flip]:
    known = sorted({at for _, at in selected.rows})
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
    selected: SelectedRows, may: Sequence[Key], open_ones: Sequence[Key], quality: Mapping[str, Quality], points: Sequence[int],
    objective: Mapping[str, float],
) -> list[str]:  # fmt: skip
    """What would be chosen with each undecided checkpoint among those that may be."""
    lines = []
    for checkpoint in dict.fromkeys(key[0] for key in open_ones):
        keys = [*may, *(key for key in open_ones if key[0] == checkpoint)]
        curves = [replace(_curve(selected, key, quality[key[0]]), chance_of_failing=0.0) for key in keys]
        then = envelope(curves, points, objective, num_draws=0, seed=SEED)
        new = {number for number in map(int, then.best[0]) if number >= len(may)}
        names, flips = [curve.setup for curve in curves], _flips(selected, then, curves, objective)
        lines.append(if_passed(quality[checkpoint], names, then, flips, points, changes=bool(new), limited=bool(objective)))
    return lines


# ------------------------------------------------------------------------------------------------ one for all
def _regrets(
    selected: SelectedRows, may: Sequence[Key], cells: Mapping[tuple[Key, int], Cell], picks: Sequence[Pick]
) -> list[Regret]:  # fmt: skip
    keys = {selected.setups[key].name: key for key in selected.setups}
    made = []
    for key in may:
        taken = [(pick, cells[key, pick.concurrency]) for pick in picks if pick.setup is not None]
        if not taken or any(cell.output_tokens_s is None for _, cell in taken):
            continue
        misses = tuple(pick.concurrency for pick, cell in taken if cell.misses is not None)
        worst, ratio_there, dearer, at = -math.inf, None, None, taken[0][0].concurrency
        for pick, cell in taken:
            best_cell = cells[keys[str(pick.setup)], pick.concurrency]
            behind = 1 - (cell.output_tokens_s or 0.0) / (best_cell.output_tokens_s or 1.0)
            if behind > worst:
                row, best_row = selected.rows[key, pick.concurrency], selected.rows[keys[str(pick.setup)], pick.concurrency]
                is_like = why_unlike(row, best_row) is None
                worst, at = behind, pick.concurrency
                ratio_there = behind if is_like else None
                if cell.usd_per_million_tokens is not None and best_cell.usd_per_million_tokens is not None:
                    dearer = cell.usd_per_million_tokens - best_cell.usd_per_million_tokens
                tokens = (best_cell.output_tokens_s or 0.0) - (cell.output_tokens_s or 0.0)
        made.append(
            Regret(
                setup=selected.setups[key].name, worst_tokens_s=tokens, at=at, relative=ratio_there,
                usd_per_million_tokens=dearer, misses=misses,
            )
        )  # fmt: skip
    return made
