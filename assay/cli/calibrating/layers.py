"""Calibrated layers of a precision, before the engine writes them, and the record of a calibration file beside a checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from assay.cli.terminal import say
from assay.errors import PlanError
from assay.records.calibration import Calibration, record_of
from assay.records.manifest import load_manifest
from assay.records.plan import Plan
from assay.records.run import CALIBRATION_INSIDE

if TYPE_CHECKING:
    from assay.cli.options import QuantizeOptions
    from assay_quantize.calibration.text import Text


def keep_calibration(made: Plan, file: Path | None, beside: Path | None, folder: Path) -> None:
    """Its record goes with the checkpoint, if it is about the file it lies beside. beside: the folder around it, in a run."""
    if file is None or (record := Calibration.load_if_there(record_of(file))) is None:
        return
    if record.file_sha256 == made.importance_sha256:
        record.save(folder / CALIBRATION_INSIDE if beside is None else beside / "calibration.json")


def calibrated_before(made: Plan, folder: Path, options: QuantizeOptions) -> Plan:
    """The plan with the calibrated layers of a finished checkpoint that was asked for in the same words."""
    from assay_quantize.plan.calibrated import is_asked

    if not is_asked(made):
        if options.text:
            raise PlanError(f"--text: precision {made.precision} is not calibrated; take one that is, such as w4a16-gptq")
        return made
    if options.stream_from is not None or options.runner != "local":
        raise PlanError(
            f"precision {made.precision}: layers are calibrated on this machine, from a source that is there whole; leave out "
            "--runner and --stream-from"
        )
    from assay_quantize.calibration.layerwise import asked_sha256

    manifest = load_manifest(folder)
    if manifest is None or manifest.calibrated is None:
        return made
    same = manifest.calibrated.asked_sha256 == asked_sha256(made, _text(made, options))
    return made.model_copy(update={"calibrated": manifest.calibrated}) if same else made


def calibrated_layers(made: Plan, source: Path, folder: Path, options: QuantizeOptions) -> tuple[Plan, Path | None]:
    """The plan with its calibrated layers, and their folder, beside the checkpoint's; None: there are none to take from."""
    from assay_quantize.plan.calibrated import is_asked

    if not is_asked(made) or made.calibrated is not None:
        return made, None
    from assay_quantize.calibration.layerwise import calibrate_layers

    work = folder.with_name(f".{folder.name}.calibration")
    found = calibrate_layers(
        made,
        source,
        work,
        _text(made, options),
        memory_bytes=options.memory_bytes,
        workers=options.workers,
        report=say,
    )
    if found.fell_back:
        say(f"note: {len(found.fell_back)} weights are rounded to the nearest, such as {found.fell_back[0]}: give more text")
    return made.model_copy(update={"calibrated": found}), work


def _text(made: Plan, options: QuantizeOptions) -> Text:
    """What a calibration is made with."""
    from assay_quantize.calibration.text import Text

    return Text(options.text, int(made.precision_recipe["calibration"]["seed"]))
