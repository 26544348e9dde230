"""A mix: joins headers, a sensitivity record, what kernels compute and what a run measured; asks vLLM's loaders."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, get_args

from assay.callbacks import Say, say_nothing
from assay.errors import AssayError, did_you_mean
from assay.foreign_text import one_line, safe_name, shown
from assay.quantities import Budget
from assay.recipes.family_names import split_layer
from assay.recipes.load import load_recipe, recipe_names
from assay.recipes.precision import PrecisionRecipe, SchemeName
from assay.recipes.profile import ProfileRecipe
from assay.records.base import sha256_of
from assay.records.choice.mix import KEPT, PredictedMeasured
from assay.records.diagnosis.sensitivity import Sensitivity
from assay.records.measurement import Measurement
from assay.records.plan import Plan
from assay_pipeline.hardware.plan import Known, known_model
from assay_pipeline.targets import Target

if TYPE_CHECKING:
    from assay_quantize.mixing.build import Proposal
    from assay_quantize.mixing.choose import Choices
    from assay_quantize.mixing.parts import Machine

_BASES = {("minmax", "none"): "w4a16", ("mse", "none"): "w4a16-mse", ("minmax", "gptq"): "w4a16-gptq"}
"""How the sensitivities' scales were found, and INT4 weights rounded -> the precision that is extended where none is named."""

MOST_NATS = 1e6
"""A token's divergence in FP32 logits is far below."""
ANYWHERE = "4xb200"
"""Of its profile one GPU is asked for where no hardware is named."""


# ------------------------------------------------------------------------------------------------ what is asked
def check_adds_up(sensitivity: Sensitivity, path: Path) -> None:
    """AssayError: its damages are scores of another kind, whose sum means nothing, or no divergences; or of no scheme."""
    if not sensitivity.in_nats:
        raise AssayError(
            f"{path}: its damages are no nats ({sensitivity.method}): they order parts, and do not add up to what a mix loses; "
            "measure with `assay sensitivity --proxy kl`"
        )
    for part in sensitivity.parts:
        where = f"{path}: layer {part.layer} {part.role}"
        if part.scheme != KEPT and part.scheme not in get_args(SchemeName):
            raise AssayError(
                f"{where}: {shown(part.scheme)} is no scheme; {did_you_mean(part.scheme, get_args(SchemeName))}run "
                "`assay sensitivity` again"
            )
        if abs(part.damage_nats or 0.0) > MOST_NATS:
            raise AssayError(
                f"{where}: loses {part.damage_nats:g} nats a token in {part.scheme}, which no divergence does; run "
                "`assay sensitivity` again"
            )
    wholes = [(f"uniform {shown(damage.scheme)}", damage.damage_nats) for damage in sensitivity.uniform]
    for name, nats in (*wholes, *(("a mix", damage.damage_nats) for damage in sensitivity.wholes)):
        if not 0 <= nats <= MOST_NATS:
            raise AssayError(
                f"{path}: {name} loses {nats:g} nats a token as a whole, which no divergence does; run "
                "`assay sensitivity` again"
            )


def base_for(named: str | None, sensitivity: Sensitivity) -> PrecisionRecipe:
    """AssayError: its scales are found, or its INT4 weights are rounded, otherwise than what was measured."""
    method = "none" if sensitivity.calibration is None else str(sensitivity.calibration["method"])
    usual = _BASES.get((sensitivity.observer, method))
    if named is None and usual is None:
        raise AssayError(f"say --base FILE, a precision with `observer: {sensitivity.observer}` and calibration by {method}")
    base = load_recipe(PrecisionRecipe, named or usual or "")
    if base.needs_calibration:
        raise AssayError(
            f"--base {base.name}: has scales that come from a file of `assay calibrate`, with which nothing was measured; take "
            f"{usual or 'one'} or another base without"
        )
    of_base_method = "none" if base.calibration == "none" else base.calibration.method
    for key, of_base, measured in (("observer", base.observer, sensitivity.observer), ("calibration", of_base_method, method)):
        if of_base != measured:
            raise AssayError(
                f"--base {base.name}: has `{key}: {of_base}`, the sensitivities were measured with {measured}; take "
                f"{usual or 'one'} or another base with that"
            )
    return base


def schemes_for(named: Sequence[str] | None, sensitivity: Sensitivity) -> list[str]:
    """Schemes that were measured, or those of them that were named. AssayError: it was not measured, or nothing was."""
    measured = sorted({part.scheme for part in sensitivity.parts if part.scheme != KEPT and part.damage_nats is not None})
    if not measured:
        raise AssayError("the sensitivity record has no damage of any scheme; run `assay sensitivity` again")
    for scheme in named or ():
        if scheme not in measured:
            raise AssayError(
                f"--schemes {shown(scheme)}: {did_you_mean(scheme, measured)}the sensitivity record has {', '.join(measured)}"
            )
    return list(named or measured)


def machine_for(
    target: Target, hardware: str | None, schemes: Sequence[str], users: int, context: int, say: Say = say_nothing
) -> Machine | None:
    """The profile, and which schemes do not run there as what they are. AssayError: it names no GPU."""
    from assay_evaluate.roofline.devices import device_named
    from assay_evaluate.roofline.kernels import runs_as
    from assay_quantize.mixing.parts import Machine

    if hardware is None:
        return None
    profile = load_recipe(ProfileRecipe, hardware)
    if profile.hardware.device != "cuda" or profile.usable_bytes is None or not profile.hardware.num_gpus:
        raise AssayError(
            f"--profile {profile.name}: says of no GPU how much memory it has, or how many there are; take a profile such as "
            "4xh200 (`assay recipes` lists them), or leave it out for a choice by bytes alone"
        )
    device = device_named(profile.hardware.gpu)
    refused = {}
    for scheme, experts in product(schemes, (True, False)):
        runs = runs_as(scheme, device.architecture if device else None, experts=experts)
        if runs is None and experts:
            say(f"note: whether {scheme} runs as such on {profile.hardware.gpu} is not known; it may be chosen")
        elif runs is not None and not runs.computes:
            refused[scheme, experts] = f"vLLM's compiled kernels refuse {profile.hardware.gpu}"
        elif runs is not None and not runs.native:
            refused[scheme, experts] = f"{profile.hardware.gpu} computes it as {runs.computes}, which was not what was measured"
    return Machine(profile, target.recipe.serving, users, context, refused)


def check_same_source(known: Known, choices: Choices, sensitivity: Sensitivity, path: Path, say: Say) -> None:
    """AssayError: the record is of another checkpoint, by its hash or by the bytes of some part."""
    if known.shipped is None and sensitivity.source_sha256 != known.checkpoint.sha256:
        raise AssayError(
            f"{path}: was made of {shown(sensitivity.source)}, whose tensors are not those of {known.source}; run "
            "`assay sensitivity` on this checkpoint"
        )
    from assay_quantize.checkpoint.identity import weights_sha256

    if known.shipped is None and sensitivity.weights_sha256 is not None:
        weights = weights_sha256(known.checkpoint)
        if weights is not None and weights != sensitivity.weights_sha256:
            raise AssayError(
                f"{path}: was made of {shown(sensitivity.source)}, whose weights are others than those of {known.source}; run "
                "`assay sensitivity` on this checkpoint"
            )
        if weights is not None:
            _check_parts(known, choices, sensitivity, path)
            return
    is_same_revision = sensitivity.source_revision is not None and sensitivity.source_revision == known.checkpoint.revision
    is_other = not is_same_revision and sensitivity.data_sha256 != sha256_of(dict(known.checkpoint.data))
    if known.shipped is None and is_other:
        say(
            f"note: {path}: was made of other files than those of {known.source}, another copy or weights that have changed "
            "since; run `assay sensitivity` on this checkpoint if the weights are others"
        )
    _check_parts(known, choices, sensitivity, path)


def _check_parts(known: Known, choices: Choices, sensitivity: Sensitivity, path: Path) -> None:
    stored = {(part.layer, part.role): part for part in choices.parts}
    for row in sensitivity.parts:
        part = None if row.layer is None else stored.get((row.layer, row.role))
        if part is not None and part.num_bytes.get(row.scheme, row.bytes) != row.bytes:
            raise AssayError(
                f"{path}: layer {row.layer} {row.role} takes {row.bytes:,} bytes in {row.scheme} there, and "
                f"{part.num_bytes[row.scheme]:,} in {known.source}; run `assay sensitivity` on this checkpoint"
            )


# ------------------------------------------------------------------------------------------------ what was measured
def measured_in(run: Path | None, base: PrecisionRecipe, choices: Choices, say: Say) -> dict[str, PredictedMeasured]:
    """Identity of a choice -> what a run measured of a checkpoint that was made so, where all its damages are known."""
    from assay_quantize.mixing.build import choice_sha256

    measured_by_identity: dict[str, PredictedMeasured] = {}
    if run is None:
        return measured_by_identity
    measurements = [Measurement.load(path) for path in sorted((run / "measurements").glob("*.json"))]
    reference = next((each.label for each in measurements if each.is_reference), "its reference")
    for measurement in measurements:
        plan = Plan.load_if_there(run / measurement.label / "plan.json")
        if measurement.divergence is None or plan is None or measurement.divergence.gap_of_unsampled is not None:
            continue
        schemes = _schemes_of(plan, choices)
        picks = choices.picks_of(schemes)
        options_of_plan = [plan.precision_recipe.get(key) for key in ("observer", "mtp", "calibration")]
        has_same_options = options_of_plan == [base.model_dump(mode="json")[key] for key in ("observer", "mtp", "calibration")]
        if picks is None or not has_same_options:
            reason = "its damages are not all known, or it was made in another way"
            say(f"note: {measurement.label} of {run} is not compared: {reason}")
            continue
        damages = [options[pick].measured or 0.0 for options, pick in zip(choices.options, picks, strict=True)]
        kl = measurement.divergence.kl_corrected_mean
        measured_by_identity[choice_sha256(base, schemes)] = PredictedMeasured(
            name=measurement.label,
            source=f"{run}, against {reference}",
            predicted_nats=sum(damages),
            measured_nats=kl.value,
            interval=kl if hasattr(kl, "low") else None,  # type: ignore[arg-type]
        )
    return measured_by_identity


def _schemes_of(plan: Plan, choices: Choices) -> dict[tuple[int, str], str]:
    schemes = {(part.layer, part.role): KEPT for part in choices.parts}
    for tensor in plan.tensors:
        at = split_layer(tensor.name)
        if tensor.scheme is not None and at is not None and (at.layer, tensor.role) in schemes:
            schemes[at.layer, tensor.role] = tensor.scheme
    return schemes


# ------------------------------------------------------------------------------------------------ the proposal
def propose_for(
    target: Target,
    sensitivity: Sensitivity,
    record: Path,
    *,
    budget: Budget | None,
    hardware: str | None,
    base: str | None,
    schemes: Sequence[str] | None,
    users: int,
    context: int,
    run: Path | None,
    name: str | None,
    slack: float,
    always_mix: bool = False,
    say: Say = say_nothing,
) -> tuple[Proposal, Known]:
    """The proposal, planned and compared with its own figures; vLLM has not been asked yet."""
    from assay_pipeline.planning import plan_for
    from assay_quantize.mixing.build import Request, propose
    from assay_quantize.mixing.choose import choices_of
    from assay_quantize.mixing.parts import stored_parts
    from assay_quantize.plan.fits import check_served

    check_adds_up(sensitivity, record)
    taken, scheme_names = base_for(base, sensitivity), schemes_for(schemes, sensitivity)
    machine = machine_for(target, hardware, scheme_names, users, context, say)
    known = known_model(target, say)
    whole = (lambda model: model) if known.shipped is None else known.shipped.whole
    stored = stored_parts(known.checkpoint, taken, scheme_names, whole=whole, machine=machine)
    choices = choices_of(stored, sensitivity, scheme_names)
    check_same_source(known, choices, sensitivity, record, say)
    limit = None if budget is None else budget.num_bytes or choices.bytes_at(budget.bits or 0.0)
    label = name or safe_name(f"{known.name}-{(budget.text if budget else hardware or '').replace(' ', '')}")
    asked = Request(known.name, known.source, label, budget.text if budget else "", limit, machine, slack, always_mix)
    shipped = [load_recipe(PrecisionRecipe, name) for name in recipe_names("precisions")]
    made = propose(asked, taken, choices, sensitivity, shipped, scheme_names, measured_in(run, taken, choices, say))
    plan = plan_for(target, known.checkpoint, made.recipe)
    served = known.stored(plan)
    total = sum(weight.num_bytes for weight in served.weights)
    assert total == made.mix.point.bytes, (total, made.mix.point.bytes)
    if machine is not None:
        check_served(served, machine.profile, target.recipe.serving)
    return made, known


def replayed(target: Target, known: Known, made: Proposal, hardware: str | None, say: Say = say_nothing) -> tuple[str, bool]:
    """(what vLLM's own loaders say, whether nothing stands against it).

    hardware: None: one GPU of `ANYWHERE` is asked for, whose kernels compute every scheme and whose memory does not count.
    """
    from assay_evaluate.preflight.loading import check_loading
    from assay_evaluate.serving.replay import Candidate, planned
    from assay_pipeline.planning import plan_for
    from assay_quantize.formats.config_groups import config_json

    if known.shipped is not None:
        return (
            "not asked: the shapes that ship with assay lack most experts; `assay preflight` asks with the model's headers",
            True,
        )
    profile = load_recipe(ProfileRecipe, hardware) if hardware is not None else _one_gpu(load_recipe(ProfileRecipe, ANYWHERE))
    plan = plan_for(target, known.checkpoint, made.recipe)
    candidate = Candidate(made.mix.name, planned(plan, config_json(plan)), profile, target.recipe.serving)
    checks = list(check_loading([candidate], profile, say))
    answer = "; ".join(f"{check.outcome}: {check.detail}" for check in checks)
    answer = answer if hardware is not None else f"{answer} (asked for one {profile.hardware.gpu}, as no --profile is said)"
    return one_line(answer), not any(check.outcome == "FAIL" for check in checks)


def _one_gpu(profile: ProfileRecipe) -> ProfileRecipe:
    """The profile with one GPU whose memory is not known."""
    hardware = profile.hardware.model_copy(update={"num_gpus": 1, "memory_bytes_each": None})
    flags = {name: value for name, value in profile.flags.items() if not name.endswith("-parallel-size")}
    return profile.model_copy(update={"name": f"one of {profile.name}", "hardware": hardware, "vllm": flags})
