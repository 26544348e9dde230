"""Calibrated layers of a precision, before the engine writes them, and the record of a calibration file beside a checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from assay.errors import PlanError
from assay.installation import require_extra
from assay.quantities import size
from assay.recipes.model import CalibrationData
from assay.records.calibration import Calibration, record_of
from assay.records.manifest import load_manifest
from assay.records.plan import Plan
from assay.records.run import CALIBRATION_INSIDE
from assay_pipeline.calibration.sentences import repeated_lines, text_lines
from assay_pipeline.calibration.texts import calibration_text

if TYPE_CHECKING:
    from assay_pipeline.quantize_options import QuantizeOptions
    from assay_pipeline.targets import Target
    from assay_quantize.calibration.text import Text
    from assay_quantize.calibration.withheld import Withheld


def keep_calibration(made: Plan, file: Path | None, beside: Path | None, folder: Path) -> None:
    """Its record goes with the checkpoint, if it is about the file it lies beside. beside: the folder around it, in a run."""
    if file is None or (record := Calibration.load_if_there(record_of(file))) is None:
        return
    if record.file_sha256 == made.importance_sha256:
        record.save(folder / CALIBRATION_INSIDE if beside is None else beside / "calibration.json")


def text_asked(
    target: Target, named: Sequence[str], seed: int, options: QuantizeOptions
) -> tuple[Text, Callable[[], Withheld]]:  # fmt: skip
    """What the command line says, else a precision (`named`), else the model's recipe; the model's own text where none does."""
    data = target.recipe.calibration or CalibrationData()
    words = options.text
    withhold = data.withhold if words.withhold is None else words.withhold
    return calibration_text(words.sources or named or data.text, withhold, words.runs, target.recipe.name, seed)


def calibrated_before(target: Target, made: Plan, folder: Path, options: QuantizeOptions) -> Plan:
    """The plan with the calibrated layers of a finished checkpoint that was asked for in the same words."""
    from assay_quantize.plan.calibrated import is_calibrated

    if not is_calibrated(made):
        return made
    if options.runner != "local":
        raise PlanError(
            f"precision {made.precision}: layers are calibrated one after the other, each on what the one before it gives, so "
            f"a cluster has nothing to share: leave out --runner {options.runner}"
        )
    if options.stream_from is not None:
        raise PlanError(
            f"precision {made.precision}: the source is read twice, by calibration and by what writes the checkpoint, and "
            f"{size(made.bytes_in)} would be downloaded twice: leave out --stream-from, then it is downloaded once"
        )
    require_extra("calibrate")  # before torch is asked for: it includes that
    from assay_quantize.calibration.layerwise import asked_sha256

    manifest = load_manifest(folder)
    if manifest is None or manifest.calibrated is None:
        return made
    same = manifest.calibrated.asked_sha256 == asked_sha256(made, _text(target, made, options)[0])
    return made.model_copy(update={"calibrated": manifest.calibrated}) if same else made


def calibrated_layers(
    target: Target, made: Plan, source: Path, folder: Path, options: QuantizeOptions
) -> tuple[Plan, Path | None]:  # fmt: skip
    """The plan with its calibrated layers, and their folder, beside the checkpoint's; None: there are none to take from."""
    from assay_quantize.plan.calibrated import is_calibrated

    if not is_calibrated(made) or made.calibrated is not None:
        return made, None
    from assay_quantize.calibration.layerwise import calibrate_layers

    work = folder.with_name(f".{folder.name}.calibration")
    text, withheld = _text(target, made, options)
    record = calibrate_layers(
        made,
        source,
        work,
        text,
        memory_bytes=options.memory_bytes,
        workers=options.workers,
        device=options.device,
        withheld=withheld,
        report=options.say,
    )
    for line in (*text_lines(record.sources, record.withheld), *repeated_lines(record)):
        options.say(line)
    if record.fell_back:
        reason = "no step of AutoRound had a finite loss" if record.method == "autoround" else "give more text"
        options.say(
            f"note: {len(record.fell_back)} weights are rounded to the nearest, such as {record.fell_back[0]}: {reason}"
        )
    return made.model_copy(update={"calibrated": record}), work


def check_texts(target: Target, plans: Sequence[Plan], options: QuantizeOptions) -> None:
    """Before the first byte is written. AssayError: a source of text, a suite or a GPU that is not there, nothing is
    calibrated, or schemes that cannot be calibrated together."""
    from assay_quantize.kernels.devices import device_here
    from assay_quantize.plan.calibrated import check_scaled, is_calibrated, needs_calibration

    asked = [made for made in plans if is_calibrated(made)]
    in_run = options.importance is None and (target.recipe.calibration is not None or any(map(needs_calibration, plans)))
    words, is_cuda = options.text, options.device == "cuda"
    option = "--text" if words.sources else "--withhold" if words.withhold is not None else "--device cuda" if is_cuda else None
    if option is not None and not asked and not in_run:
        names = [made.precision for made in plans]
        none = f"precision {names[0]} is not" if len(names) == 1 else f"none of {', '.join(names)} is"
        raise PlanError(f"{option}: {none} calibrated; take one that is, such as w4a16-gptq")
    if is_cuda:
        device_here(options.device)
    for made in asked:
        check_scaled(made)
        _text(target, made, options)[0].identity()


def _text(target: Target, made: Plan, options: QuantizeOptions) -> tuple[Text, Callable[[], Withheld]]:
    """What layers are calibrated with."""
    how = made.precision_recipe["calibration"]
    return text_asked(target, how.get("text", ()), int(how["seed"]), options)
