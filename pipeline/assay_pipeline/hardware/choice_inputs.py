"""`assay choose`: joins what a choice rests on: rows of speed, verdicts, and, of plans, memory, floors and predictions."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from assay.callbacks import Say, say_nothing
from assay.errors import AssayError, PlanError
from assay.foreign_text import one_line, shown
from assay.recipes.load import load_recipe, recipe_names
from assay.recipes.model import ModelRecipe, Serving
from assay.recipes.precision import PrecisionRecipe
from assay.recipes.profile import ProfileRecipe
from assay.records.choice.record import CHOICE_RECORD, Choice
from assay.records.declared import difference_words
from assay.records.measurement import Measurement
from assay.records.plan import Plan
from assay.records.run import judged_bytes
from assay.records.speed import OTHER_BYTES, SPEED_RECORD, SpeedRecord, SpeedRow
from assay.records.verdict import GateReport
from assay_pipeline.hardware.plan import experts_scheme, known_model, tokens_of, weights_of
from assay_pipeline.targets import resolve_target

if TYPE_CHECKING:
    from assay_evaluate.roofline.rows import RooflineComparison
    from assay_evaluate.roofline.weights import StepWeights
    from assay_quantize.plan.stored import StoredModel

_COUNT = re.compile(r"[0-9]{1,6}")


def make_choice(
    run_dir: Path | None,
    *,
    hardware: str | None = None,
    slo: str | None = None,
    concurrency: str | None = None,
    price: float | None = None,
    speed: Sequence[Path] = (),
    prompts: str | None = None,
    is_quality_assumed: bool = False,
    model: str | None = None,
    context: str = "8k",
    say: Say = say_nothing,
) -> Choice:
    """Which checkpoint to deploy at which number of streams; in a run the record is written there.

    run_dir: None: speeds of `speed` alone, with quality assumed. hardware: as speeds name it, or a profile's name. slo: limits
    such as `ttft<2s tpot<25ms`. concurrency: `1,8,32`. price: dollars for an hour of one GPU. model: whose precisions the
    speeds are of. context: of each stream, where the roofline predicts. AssayError: these words do not go together, or nothing
    was judged.
    """
    from assay_evaluate.choice.choose import ChoiceRequest, choose
    from assay_evaluate.choice.rows import is_on, on_hardware

    if run_dir is None and not (speed and is_quality_assumed):
        raise AssayError(
            "say RUN, whose speeds and verdicts are joined; or --speed FILE --quality assumed, where speeds are known alone"
        )
    gates = None if is_quality_assumed or run_dir is None else _gates(run_dir)
    streams = None if concurrency is None else numbers_of("--concurrency", concurrency)
    objective = None if slo is None else objective_of(slo)
    length = tokens_of("--context", context)
    rows, not_measured = speed_rows(run_dir, speed)
    profile = profile_called(hardware)
    plans = plans_of(run_dir, model, rows, say) if profile is not None or on_known_gpus(rows) else {}
    here = [row for row in rows if is_on(row, hardware)]
    known = {row.checkpoint for row in here if row.is_comparable}
    unmeasured = {label: plan for label, plan in plans.items() if label not in known}
    points = streams or tuple(sorted({row.concurrency for row in here})) or (1, 8, 32)
    name, drafted = model or (None if gates is None else gates.model), 0
    if not known and name in recipe_names("models"):
        drafted = load_recipe(ModelRecipe, name).serving.num_speculative_tokens or 0
    guesses = predictions(unmeasured, profile, points, length, drafted)
    wishes = ChoiceRequest(
        concurrency=streams or (points if not known else None),
        objective=objective,
        usd_per_gpu_hour=price,
        prompts=prompts,
        infeasible=infeasible(unmeasured, profile, min(points), length),
        not_measured=not_measured,
        beside=functools.partial(beside_floor, plans),
        variants={} if run_dir is None else variants_in(run_dir),
    )
    taken = on_hardware([*rows, *guesses], hardware)
    if hardware is None and (elsewhere := sorted({row.hardware for row in rows} - {row.hardware for row in taken})):
        say(f"note: speeds on {', '.join(map(shown, elsewhere))} are left out; --hardware chooses by them")
    record = choose(taken, gates, wishes, model=name)
    if run_dir is not None:
        record.save(run_dir / CHOICE_RECORD)
    return record


def variants_in(run_dir: Path) -> dict[str, str]:
    """Label of every variant that was measured -> what it is: `fp8 with kv-cache-dtype fp8`."""
    measured = [Measurement.load(path) for path in sorted((run_dir / "measurements").glob("*.json"))]
    reference = next((m.label for m in measured if m.is_reference and not m.is_noise_floor), "the reference")
    return {m.label: f"{reference} with {difference_words(m.declared)}" for m in measured if m.is_variant}


def _gates(run_dir: Path) -> GateReport:
    if (gates := GateReport.load_if_there(run_dir / "gates.json")) is None:
        raise AssayError(
            f"{run_dir}: nothing was judged yet; run `assay gate {shown(str(run_dir))}` first, or say --quality assumed"
        )
    measured = {path.stem for path in (run_dir / "measurements").glob("*.json")}
    gone = [label for label in (gates.reference, *gates.overall) if label not in measured]
    if gone:
        raise AssayError(
            f"{run_dir}: its verdicts are about {', '.join(map(shown, gone))} as well, whose measurement is gone; run "
            f"`assay gate {shown(str(run_dir))}` again, or say --quality assumed"
        )
    return gates


def numbers_of(option: str, text: str) -> tuple[int, ...]:
    """`1,8,32` -> (1, 8, 32). AssayError: it names no numbers of streams."""
    parts = [part.strip() for part in text.split(",")]
    if not all(_COUNT.fullmatch(part) and int(part) for part in parts):
        raise AssayError(f"{option} {shown(text)}: is no list of numbers of streams; write 1,8,32")
    return tuple(sorted({int(part) for part in parts}))


def objective_of(text: str) -> dict[str, float]:
    from assay_evaluate.speed.ladder import parse_objective

    try:
        return parse_objective(text)
    except AssayError as error:
        raise AssayError(str(error).replace("--objective", "--slo", 1)) from None


def speed_rows(run_dir: Path | None, files: Sequence[Path]) -> tuple[list[SpeedRow], dict[str, str]]:
    """(rows of the run's speed record and of every file, checkpoint -> why it was not measured). AssayError: there are none."""
    from assay_evaluate.speed.imported import read_imported
    from assay_evaluate.speed.stated import Stated

    rows: list[SpeedRow] = []
    reasons: dict[str, str] = {}
    record = None if run_dir is None else SpeedRecord.load_if_there(run_dir / SPEED_RECORD)
    records = [] if record is None else [record]
    for path in files:
        if not path.is_file():
            raise AssayError(f"--speed {shown(str(path))}: no such file; give a speed record, a table (docs/speed.md) or JSON")
        if _is_record(path):
            records.append(SpeedRecord.load(path))
        else:
            try:
                rows += read_imported(path, None, Stated())
            except AssayError as error:  # options that it names are those of `assay speed`
                what = str(error).split("; say --")[0]
                stated = f"`assay speed RUN --import {shown(str(path))}` with --as, --label and --hardware"
                raise AssayError(f"{what}; write a table (docs/speed.md, `A table`), or say it to {stated}") from None
    known = {} if run_dir is None else judged_bytes(run_dir)
    for read in records:
        of_these_bytes, other = read.of_bytes(known)
        rows += of_these_bytes.rows
        reasons |= dict.fromkeys(other, OTHER_BYTES)
        for left in of_these_bytes.not_measured:
            if left.concurrency is None:
                reasons[left.checkpoint] = left.reason
    return rows, reasons


def _is_record(path: Path) -> bool:
    if path.suffix != ".json":
        return False
    start = path.read_text(encoding="utf-8", errors="replace")[:200]
    return '"schema_version"' in start


# ------------------------------------------------------------------------------------------------ plans
@dataclass(frozen=True)
class Planned:
    """What is stored of a checkpoint, by its plan. scheme: of its experts."""

    stored: StoredModel
    scheme: str | None
    weights: StepWeights


def plans_of(run_dir: Path | None, model: str | None, rows: Sequence[SpeedRow], say: Say = say_nothing) -> dict[str, Planned]:
    """Checkpoint -> its plan: of the run, or, with --model, of the precision that the row's scheme or checkpoint is called."""
    planned: dict[str, Planned] = {}
    if run_dir is not None:
        from assay_quantize.plan.stored import stored_by

        for path in sorted(run_dir.glob("*/plan.json")):
            plan = Plan.load(path)
            stored = stored_by(plan)
            try:
                planned[path.parent.name] = Planned(stored, experts_scheme(plan), weights_of(stored))
            except PlanError as problem:
                say(f"note: {path.parent.name} has no floor: {one_line(str(problem))}")
    if model is None:
        return planned
    from assay_pipeline.planning import plan_for

    target = resolve_target(model)
    known = known_model(target, say)
    for row in rows:
        name = next(
            (name_in_row for name_in_row in (row.checkpoint, row.scheme) if name_in_row in recipe_names("precisions")), None
        )
        if row.checkpoint in planned or name is None:
            continue
        try:
            plan = plan_for(target, known.checkpoint, load_recipe(PrecisionRecipe, name))
        except PlanError:
            continue  # no floor of it; the row stands
        stored = known.stored(plan)
        planned[row.checkpoint] = Planned(stored, experts_scheme(plan), weights_of(stored))
    return planned


def on_known_gpus(rows: Sequence[SpeedRow]) -> bool:
    """Whether any row is of a GPU whose bandwidth is known: elsewhere plans, which take seconds to read, say nothing."""
    from assay_evaluate.roofline.devices import device_named

    return any(device_named(row.hardware) is not None for row in rows)


def profile_called(hardware: str | None) -> ProfileRecipe | None:
    """The shipped profile of that name, in any case; None: there is none with GPUs."""
    name = (hardware or "").strip().casefold()
    if name not in recipe_names("profiles"):
        return None
    profile = load_recipe(ProfileRecipe, name)
    return profile if profile.hardware.gpu is not None and profile.usable_bytes is not None else None


def infeasible(plans: Mapping[str, Planned], profile: ProfileRecipe | None, users: int, context: int) -> dict[str, str]:
    """Checkpoint -> why it cannot be served there, of those that have a plan."""
    from assay_quantize.plan.fits import misfits, ranks_of, sentence

    reasons: dict[str, str] = {}
    if profile is None:
        return reasons
    for label, planned in plans.items():
        if wrong := misfits(planned.stored.served(True), ranks_of(profile)):
            reasons[label] = sentence(wrong)
            continue
        held = _users(planned, profile, context)
        if held < users:
            reasons[label] = f"does not fit {profile.name} with {users} streams at {context:,} tokens: {held} fit"
    return reasons


def _users(planned: Planned, profile: ProfileRecipe, context: int) -> int:
    """Sequences whose KV cache fits beside the weights."""
    from assay_quantize.plan.fits import fit_on

    fit = fit_on(planned.stored, profile, Serving(num_speculative_tokens=1 if planned.weights.draft is not None else None))
    return max(0, fit.free_bytes) // max(1, fit.kv_bytes(context))


def beside_floor(plans: Mapping[str, Planned], row: SpeedRow) -> RooflineComparison | None:
    """The row beside its floor; None: its checkpoint has no plan, or the hardware no bandwidth in the table."""
    from assay_evaluate.roofline.rows import compare_with_roofline

    return compare_with_roofline(row, plans[row.checkpoint].weights) if row.checkpoint in plans else None


def predictions(
    plans: Mapping[str, Planned], profile: ProfileRecipe | None, concurrency: Sequence[int], context: int, drafted: int
) -> list[SpeedRow]:
    """Rows that nobody measured, of every plan, where its KV cache fits; with and without speculation."""
    from assay_evaluate.roofline.devices import device_named
    from assay_evaluate.roofline.rows import predicted_rows
    from assay_quantize.plan.fits import fit_on, kv_read_bytes, ranks_of

    device = None if profile is None else device_named(profile.hardware.gpu)
    if profile is None or device is None:
        return []
    rows: list[SpeedRow] = []
    for label, planned in plans.items():
        serving = Serving(num_speculative_tokens=drafted or None)
        served = planned.stored.served(bool(drafted))
        gpus = profile.hardware.num_gpus
        read = kv_read_bytes(served, fit_on(planned.stored, profile, serving), context) * gpus
        fitting = [users for users in concurrency if users <= _users(planned, profile, context)]
        rows += predicted_rows(
            label, planned.scheme, planned.weights,
            hardware=f"{gpus}x{profile.hardware.gpu}", device=device, num_gpus=gpus,
            tensor_parallel=ranks_of(profile).tensor_parallel,
            speculation=(0, drafted) if drafted and planned.weights.draft is not None else (0,),
            concurrency=fitting, context=context, kv_bytes_each=read,
        )  # fmt: skip
    return rows
