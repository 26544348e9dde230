"""Calibration files: one that is asked for, or a run's: which precisions take one, and how a run makes it where none was given.

RUN/calibration/HASH/                what a calibration that is stopped goes on from
RUN/calibration/HASH.safetensors     what `assay calibrate` writes, and its record beside it; named after what was asked for
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from assay.callbacks import Say, say_nothing
from assay.errors import PlanError
from assay.recipes.load import load_recipe
from assay.recipes.model import Automatic, CalibrationData
from assay.recipes.precision import PrecisionRecipe
from assay.records.base import sha256_of, sha256_of_file
from assay.records.calibration import Calibration, record_of
from assay.records.plan import Plan
from assay.records.run import source_of
from assay_pipeline.calibration.layers import check_texts, text_asked
from assay_pipeline.calibration.sentences import lines
from assay_pipeline.calibration.texts import calibration_text
from assay_pipeline.targets import Target, local_checkpoint, local_source, resolve_source

if TYPE_CHECKING:
    from assay_pipeline.quantize_options import QuantizeOptions

FOLDER = "calibration"


def calibrate(
    target: str,
    out: Path,
    *,
    text: Sequence[str] = (),
    withhold: Sequence[str] | None = None,
    runs: Path = Path("runs"),
    num_tokens: int = 65_536,
    tokens_per_expert: int | None = None,
    length: int = 512,
    min_tokens: int = 64,
    device: str = "auto",
    seed: int = 0,
    say: Say = say_nothing,
) -> Calibration:
    """Run a model, whole in memory, in transformers, and write what enters every weight to `out`, its record beside it.

    target: a model recipe's name, a checkpoint folder or a hub id. text: sources, as of `--text`; none: what the model itself
    writes from `seed`. withhold: suites and runs whose items no text may hold; None: all shipped suites, and this model's runs.
    num_tokens: most that go through the model, in sequences of `length`; tokens_per_expert: end once every routed expert saw so
    many. min_tokens: weights that see fewer are left out. AssayError: no such source, or it does not fit.
    """
    from assay_quantize.calibration.calibrate import calibrate as write_calibration
    from assay_quantize.kernels.devices import device_here

    resolved, where = resolve_source(target), device_here(device)
    text_source, items = calibration_text(text, withhold, runs, resolved.recipe.name, seed)
    made = write_calibration(
        local_source(resolved, say=say),
        out,
        replace(text_source, withheld=items()),
        model_name=resolved.recipe.name,
        num_tokens=num_tokens,
        length=length,
        min_tokens=min_tokens,
        tokens_per_expert=tokens_per_expert,
        device=where,
        report=say,
    )
    made.save(record_of(out))
    return made


def with_importance(made: Plan, path: Path | None, say: Say = say_nothing) -> Plan:
    """The plan with the identity of the calibration file it will use. PlanError: it needs one and there is none, or the
    reverse; a file that does not have what it needs."""
    from assay_quantize.plan.calibrated import missing_calibration, needs_calibration, static_scales
    from assay_quantize.plan.slabs import observer_of

    if path is None:
        if needs_calibration(made):
            raise PlanError(missing_calibration(made))
        return made
    from assay_quantize.checkpoint.checkpoint import open_checkpoint
    from assay_quantize.checkpoint.importance import check_weights, load_importance

    if observer_of(made) == "minmax" and not needs_calibration(made):
        raise PlanError(
            f"--importance: precision {made.precision} searches no scales, so it uses no channel weights; take one with "
            "`observer: mse`, or leave the option out"
        )
    loaded = load_importance(path)
    if loaded.weights_sha256 is None:
        say(
            f"note: {path}: does not say of which weights it is, so nothing checks that it is of {made.source}: it was made by "
            f"another tool, or before files said it; `assay calibrate {made.source} --out FILE` makes one that does"
        )
    elif Path(made.source).is_dir():
        check_weights(loaded, open_checkpoint(Path(made.source)))
    if observer_of(made) != "minmax":
        say(loaded.coverage(tensor.name for tensor in made.tensors if tensor.action == "quantize"))
    if needs_calibration(made):
        scales = static_scales(made, loaded)
        say(f"{path.name}: {len(scales):,} static scales, headroom {made.precision_recipe.get('headroom', 1.0):g}")
    return made.model_copy(update={"importance_sha256": loaded.sha256})


def uses_file(made: Plan) -> bool:
    """Whether a calibration file changes what the plan makes."""
    from assay_quantize.plan.calibrated import needs_calibration
    from assay_quantize.plan.slabs import observer_of

    return needs_calibration(made) or observer_of(made) != "minmax"


def given_file(target: Target, options: QuantizeOptions) -> Path | None:
    """The file that the command line or the model's recipe names."""
    if options.importance is not None:
        return options.importance
    data = target.recipe.calibration
    return None if data is None or data.file is None else Path(data.file)


def with_files(target: Target, planned: Sequence[Plan | Automatic], options: QuantizeOptions) -> list[Plan | Automatic]:
    """What is to be made, plans that take the calibration file that is there with its identity.

    AssayError, before the first byte is written: nothing takes --importance or --text; a file or a text is not there.
    """
    from assay_quantize.checkpoint.importance import load_importance

    plans, file = [plan_or_mix for plan_or_mix in planned if isinstance(plan_or_mix, Plan)], given_file(target, options)
    check_texts(target, plans, options)
    if file is None:
        for made in plans:
            if options.stream_from is not None and _makes_file(target, made):
                raise PlanError(
                    f"precision {made.precision}: is calibrated on this machine, with a source that is there whole; leave out "
                    "--stream-from, or give --importance FILE"
                )
        if options.stream_from is not None and len(plans) < len(planned):
            raise PlanError("auto-BUDGET is chosen on this machine, with a source that is there whole; leave out --stream-from")
        return list(planned)
    if options.importance is not None and not any(map(uses_file, plans)):
        if len(planned) == len(plans) == 1:
            with_importance(plans[0], file, options.say)  # says why
        if len(plans) == len(planned) or not _mix_searches(target):
            names = ", ".join(
                plan_or_mix.precision if isinstance(plan_or_mix, Plan) else plan_or_mix.name for plan_or_mix in planned
            )
            raise PlanError(
                f"--importance: none of {names} searches scales (`observer: mse`) or has static ones, so nothing uses channel "
                "weights; name a precision that does, or leave the option out"
            )
        load_importance(file)  # for the mix, later: what is wrong with it is said now
    return [
        with_importance(plan_or_mix, file, options.say)
        if isinstance(plan_or_mix, Plan) and uses_file(plan_or_mix)
        else plan_or_mix
        for plan_or_mix in planned
    ]


def _mix_searches(target: Target) -> bool:
    base = target.recipe.automatic.base
    return base is not None and load_recipe(PrecisionRecipe, base).observer != "minmax"


def alone(target: Target, planned: Plan | Automatic, options: QuantizeOptions) -> tuple[Plan, QuantizeOptions]:
    """The plan of a checkpoint outside runs, and what it is made with. PlanError: only a run can make it."""
    if isinstance(planned, Automatic):
        raise PlanError(
            f"--out: {planned.name} is chosen in the folder of a run; leave --out out, or choose it by `assay sensitivity` and "
            "`assay recipe --out FILE.yaml`"
        )
    if planned.importance_sha256 is None:
        return with_importance(planned, None, options.say), replace(options, importance=None)
    return planned, replace(options, importance=given_file(target, options))


def _makes_file(target: Target, made: Plan) -> bool:
    """Whether a run makes a file for it: it cannot do without, or the model's recipe says what to calibrate with."""
    from assay_quantize.plan.calibrated import needs_calibration

    return needs_calibration(made) or (target.recipe.calibration is not None and uses_file(made))


def file_in_run(target: Target, made: Plan, run_dir: Path, options: QuantizeOptions) -> tuple[Plan, Path | None]:
    """The plan as it is made in a run, and the calibration file it takes; the file is made first if it is not there."""
    if made.importance_sha256 is not None:
        return made, given_file(target, options)
    if not _makes_file(target, made):
        return made, None
    file = _made(target, made, run_dir / FOLDER, options)
    return with_importance(made, file, options.say), file


def _made(target: Target, plan: Plan, folder: Path, options: QuantizeOptions) -> Path:
    """AssayError: the model cannot be calibrated here."""
    data = target.recipe.calibration or CalibrationData()
    text, withheld = text_asked(target, (), data.seed, options)
    how = data.model_dump(include={"tokens", "tokens_per_expert", "length", "min_tokens"})
    asked = sha256_of({"text": text.identity(), "source": source_of(plan).files, **how})
    file, keep = folder / f"{asked[:12]}.safetensors", folder / asked[:12]
    before = Calibration.load_if_there(record_of(file))
    if before is not None and file.is_file() and sha256_of_file(file) == before.file_sha256:
        return file
    from assay_quantize.calibration.calibrate import calibrate as write_calibration

    options.say(f"{plan.precision}: is calibrated first, for all precisions of the run that need it: {file}")
    made = write_calibration(
        local_checkpoint(target.location, source_of(plan), options.say),
        file,
        text,
        model_name=target.recipe.name,
        num_tokens=data.tokens,
        length=data.length,
        min_tokens=data.min_tokens,
        tokens_per_expert=data.tokens_per_expert,
        device=options.device,
        withheld=withheld,
        keep=keep,
        report=options.say,
    )
    made.model_copy(update={"asked_sha256": asked}).save(record_of(file))
    shutil.rmtree(keep, ignore_errors=True)
    for line in lines(made):
        options.say(line)
    return file
