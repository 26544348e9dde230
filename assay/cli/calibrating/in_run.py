"""The calibration file of a run: which precisions take one, and how a run makes it in its folder where none was given.

RUN/calibration/HASH/                what a calibration that is stopped goes on from
RUN/calibration/HASH.safetensors     what `assay calibrate` writes, and its record beside it; named after what was asked for
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from assay.cli.calibrating.layers import check_texts, text_asked
from assay.cli.calibrating.shown import lines
from assay.cli.terminal import say
from assay.errors import PlanError
from assay.recipes.load import load_recipe
from assay.recipes.model import Automatic, CalibrationData
from assay.recipes.precision import PrecisionRecipe
from assay.records.base import sha256_of, sha256_of_file
from assay.records.calibration import Calibration, record_of
from assay.records.plan import Plan
from assay.records.run import source_of

if TYPE_CHECKING:
    from assay.cli.options import QuantizeOptions
    from assay.cli.targets import Target

FOLDER = "calibration"


def with_importance(made: Plan, path: Path | None) -> Plan:
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


def given_file(aim: Target, options: QuantizeOptions) -> Path | None:
    """The file that the command line or the model's recipe names."""
    if options.importance is not None:
        return options.importance
    data = aim.recipe.calibration
    return None if data is None or data.file is None else Path(data.file)


def with_files(aim: Target, wanted: Sequence[Plan | Automatic], options: QuantizeOptions) -> list[Plan | Automatic]:
    """What is to be made, plans that take the calibration file that is there with its identity.

    AssayError, before the first byte is written: nothing takes --importance or --text; a file or a text is not there.
    """
    from assay_quantize.checkpoint.importance import load_importance

    plans, file = [one for one in wanted if isinstance(one, Plan)], given_file(aim, options)
    check_texts(aim, plans, options)
    if file is None:
        for made in plans:
            if options.stream_from is not None and _makes_file(aim, made):
                raise PlanError(
                    f"precision {made.precision}: is calibrated on this machine, with a source that is there whole; leave out "
                    "--stream-from, or give --importance FILE"
                )
        if options.stream_from is not None and len(plans) < len(wanted):
            raise PlanError("auto-BUDGET is chosen on this machine, with a source that is there whole; leave out --stream-from")
        return list(wanted)
    if options.importance is not None and not any(map(uses_file, plans)):
        if len(wanted) == len(plans) == 1:
            with_importance(plans[0], file)  # says why
        if len(plans) == len(wanted) or not _mix_searches(aim):
            names = ", ".join(one.precision if isinstance(one, Plan) else one.name for one in wanted)
            raise PlanError(
                f"--importance: none of {names} searches scales (`observer: mse`) or has static ones, so nothing uses channel "
                "weights; name a precision that does, or leave the option out"
            )
        load_importance(file)  # for the mix, later: what is wrong with it is said now
    return [with_importance(one, file) if isinstance(one, Plan) and uses_file(one) else one for one in wanted]


def _mix_searches(aim: Target) -> bool:
    base = aim.recipe.automatic.base
    return base is not None and load_recipe(PrecisionRecipe, base).observer != "minmax"


def alone(aim: Target, wanted: Plan | Automatic, options: QuantizeOptions) -> tuple[Plan, QuantizeOptions]:
    """The plan of a checkpoint outside runs, and what it is made with. PlanError: only a run can make it."""
    if isinstance(wanted, Automatic):
        raise PlanError(
            f"--out: {wanted.name} is chosen in the folder of a run; leave --out out, or choose it by `assay sensitivity` and "
            "`assay recipe --out FILE.yaml`"
        )
    if wanted.importance_sha256 is None:
        return with_importance(wanted, None), replace(options, importance=None)
    return wanted, replace(options, importance=given_file(aim, options))


def _makes_file(aim: Target, made: Plan) -> bool:
    """Whether a run makes a file for it: it cannot do without, or the model's recipe says what to calibrate with."""
    from assay_quantize.plan.calibrated import needs_calibration

    return needs_calibration(made) or (aim.recipe.calibration is not None and uses_file(made))


def file_in_run(aim: Target, made: Plan, run_dir: Path, options: QuantizeOptions) -> tuple[Plan, Path | None]:
    """The plan as it is made in a run, and the calibration file it takes; the file is made first if it is not there."""
    if made.importance_sha256 is not None:
        return made, given_file(aim, options)
    if not _makes_file(aim, made):
        return made, None
    file = _made(aim, made, run_dir / FOLDER, options)
    return with_importance(made, file), file


def _made(aim: Target, plan: Plan, folder: Path, options: QuantizeOptions) -> Path:
    """AssayError: the model cannot be calibrated here."""
    data = aim.recipe.calibration or CalibrationData()
    text, withheld = text_asked(aim, (), data.seed, options)
    how = data.model_dump(include={"tokens", "tokens_per_expert", "length", "min_tokens"})
    asked = sha256_of({"text": text.identity(), "source": source_of(plan).files, **how})
    file, keep = folder / f"{asked[:12]}.safetensors", folder / asked[:12]
    before = Calibration.load_if_there(record_of(file))
    if before is not None and file.is_file() and sha256_of_file(file) == before.file_sha256:
        return file
    from assay.cli.targets import local_checkpoint
    from assay_quantize.calibration.calibrate import calibrate

    say(f"{plan.precision}: is calibrated first, for all precisions of the run that need it: {file}")
    made = calibrate(
        local_checkpoint(aim.location, source_of(plan)),
        file,
        text,
        model_name=aim.recipe.name,
        num_tokens=data.tokens,
        length=data.length,
        min_tokens=data.min_tokens,
        tokens_per_expert=data.tokens_per_expert,
        device=options.device,
        withheld=withheld,
        keep=keep,
        report=say,
    )
    made.model_copy(update={"asked_sha256": asked}).save(record_of(file))
    shutil.rmtree(keep, ignore_errors=True)
    for line in lines(made):
        say(line)
    return file
