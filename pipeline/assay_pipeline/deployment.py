"""Whether the verdicts of a judged run hold on hardware that only its candidates fit."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from assay.callbacks import Say, say_nothing
from assay.errors import AssayError, did_you_mean
from assay.foreign_text import shown
from assay.recipes.load import load_recipe, recipe_names
from assay.recipes.model import ModelRecipe
from assay.recipes.profile import ProfileRecipe
from assay.records.deployment.record import Deployment
from assay.records.manifest import MANIFEST
from assay.records.measurement import Measurement
from assay.records.verdict import GateReport
from assay_pipeline.evaluating import replies_kept
from assay_pipeline.interrupted import interruptible
from assay_pipeline.judging import load_measurements, write_again
from assay_pipeline.profiles import check_folder_served, profile_named
from assay_pipeline.run_folders import locked_run


def deploy_candidates(
    run_dir: Path, labels: list[str] | None = None, profile: str | None = None, say: Say = say_nothing
) -> list[Deployment]:
    """Serve candidates of a run on another profile, each compared with itself where it was judged; write report and cards.

    labels: None: all that have passed. profile: None: the first of the model's deployment profiles that fits this machine.
    AssayError: nothing was judged, no such candidate, a checkpoint is not on this machine.
    """
    from assay.records.probe import find_probes, load_probes
    from assay_evaluate.client.journal import Journal
    from assay_evaluate.run.deployment import check_deployable, deploy, served_there, serving_of

    measurements = load_measurements(run_dir)
    if (gates := GateReport.load_if_there(run_dir / "gates.json")) is None:
        raise AssayError(f"{run_dir}: nothing was judged yet, so no verdict can travel; run `assay gate {run_dir}` first")
    chosen = _candidates(measurements, gates, labels, run_dir)
    where = profile_named(profile) if profile is not None else _deployment_profile(measurements[0].model)
    folders = {measurement.label: folder_of(measurement, run_dir) for measurement in chosen}
    for measurement in chosen:
        check_folder_served(
            folders[measurement.label], measurement.label, serving_of(measurement), served_there(measurement, where)
        )
    deployments: list[Deployment] = []
    with locked_run(run_dir), interruptible(lambda: replies_kept(run_dir)):
        with Journal(run_dir / "journal.db") as journal:
            for measurement in chosen:  # all of them before the first server is started
                check_deployable(measurement, folders[measurement.label], where, journal)
        probed = load_probes(run_dir)
        for measurement in chosen:
            say(f"{measurement.label}: on {where.name}, beside {measurement.fingerprint.profile}")
            deployments.append(
                deploy(
                    measurement,
                    folders[measurement.label],
                    gates,
                    profile=where,
                    run_dir=run_dir,
                    probed=find_probes(probed, measurement),
                    on_progress=say,
                )
            )
    write_again(run_dir, say)
    return deployments


def _candidates(
    measurements: Sequence[Measurement], gates: GateReport, named: list[str] | None, run_dir: Path
) -> list[Measurement]:  # fmt: skip
    """Those that were named, else all that have passed. AssayError: there is no such candidate, or none has passed."""
    measured = {
        measurement.label: measurement
        for measurement in measurements
        if not measurement.is_reference and not measurement.is_noise_floor
    }
    measured = {label: measurement for label, measurement in measured.items() if label in gates.overall}
    for label in named or ():
        if label not in measured:
            hint = did_you_mean(label, list(measured))
            raise AssayError(f"--precisions {shown(label)}: {hint}candidates of {run_dir}: {', '.join(measured) or 'none'}")
    requested = named or [label for label in measured if gates.overall[label] == "PASS"]
    if not requested:
        verdicts = ", ".join(f"{label} {gates.overall[label]}" for label in measured) or "there is none"
        raise AssayError(
            f"{run_dir}: no candidate has passed ({verdicts}); name with --precisions what is to be served all the same"
        )
    return [measured[label] for label in requested]


def _deployment_profile(model: str) -> ProfileRecipe:
    """The first of the model's deployment profiles whose hardware is here."""
    from assay_evaluate.serving.hardware import describe_hardware, find_gpus, fits

    known = load_recipe(ModelRecipe, model).deployment_profiles if model in recipe_names("models") else ()
    gpus = find_gpus()
    for name in known:
        if fits((profile := load_recipe(ProfileRecipe, name)).hardware, gpus):
            return profile
    names = f"none of {', '.join(known)} fits" if known else "its model recipe names no `deployment_profiles` for"
    raise AssayError(
        f"{model}: {names} this machine ({describe_hardware().get('gpus', 'no GPU')}); say --profile NAME, a name of "
        "recipes/profiles/ or a YAML file"
    )


def folder_of(measured: Measurement, run_dir: Path) -> Path:
    """The checkpoint on this machine: in the run, which may have been copied, else where it was measured."""
    inside = run_dir / measured.label / "checkpoint"
    if (inside / MANIFEST).is_file():
        return inside
    if measured.checkpoint_bytes is None or not Path(measured.checkpoint).is_dir():
        raise AssayError(
            f"{measured.label}: its checkpoint is neither at {inside} nor at {measured.checkpoint}, where it was measured; "
            "copy it into the run"
        )
    return Path(measured.checkpoint)
