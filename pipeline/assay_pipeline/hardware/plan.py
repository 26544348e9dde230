"""`assay plan TARGET --profile P`: joins what quantize knows of memory with what evaluate knows of speed, per precision."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from assay.callbacks import Say, say_nothing
from assay.errors import AssayError, PlanError
from assay.foreign_text import one_line, shown
from assay.recipes.families import family_of
from assay.recipes.load import load_recipe
from assay.recipes.model import Serving, is_automatic
from assay.recipes.precision import PrecisionRecipe
from assay.recipes.profile import ProfileRecipe
from assay.records.choice.hardware import HardwarePlan, PrecisionOnHardware, StepRead
from assay.records.plan import Plan
from assay_pipeline.targets import Target, open_source, resolve_source, source_label

if TYPE_CHECKING:
    from assay_evaluate.roofline.weights import StepWeights
    from assay_quantize.checkpoint.checkpoint import Checkpoint
    from assay_quantize.plan.shipped import ShippedModel
    from assay_quantize.plan.stored import StoredModel

USUAL = ("fp8", "w4a16", "w4a16-fp8-attention", "nvfp4a16", "nvfp4-fp8-attention")
"""Precisions that are shown where none is named, beside those of the model's recipe and the source itself."""
_TOKENS = re.compile(r"(\d{1,9})([kKmM]?)")
MAX_TOKENS = 100_000_000


def tokens_of(option: str, text: str) -> int:
    """`32k` -> 32,768, `1m` -> 1,048,576, `200000`. AssayError names the option."""
    written = _TOKENS.fullmatch(text.strip())
    count = 0 if written is None else int(written[1]) * {"": 1, "k": 1024, "m": 1024**2}[written[2].lower()]
    if not 1 <= count <= MAX_TOKENS:
        raise AssayError(f"{option} {shown(text)}: is no number of tokens; write 32768, or 32k for it")
    return count


# ------------------------------------------------------------------------------------------------ what would be stored
@dataclass(frozen=True)
class Known:
    """A model by its headers, or by the shapes that ship with assay."""

    name: str
    source: str
    checkpoint: Checkpoint
    shipped: ShippedModel | None

    def stored(self, plan: Plan) -> StoredModel:
        from assay_quantize.plan.stored import stored_by

        return self._whole(stored_by(plan))

    @property
    def source_itself(self) -> StoredModel:
        from assay_quantize.plan.stored import stored_in

        config = self.checkpoint.config
        return self._whole(stored_in(self.checkpoint, family_of(config), f"source {source_label(config)}"))

    def _whole(self, stored: StoredModel) -> StoredModel:
        return stored if self.shipped is None else self.shipped.whole(stored)


def known_model(target: Target, say: Say = say_nothing) -> Known:
    """Shapes that ship with assay where the recipe has them: no network, no file of the model."""
    from assay_quantize.plan.shipped import has_shapes, shipped_model

    name = target.recipe.name
    if target.location.hub is not None and has_shapes(name):
        shipped = shipped_model(name)
        if shipped.source == target.location.hub:
            return Known(name, shipped.checkpoint.location, shipped.checkpoint, shipped)
    checkpoint = open_source(target)
    for note in checkpoint.notes:
        say(f"note: {note}")
    return Known(name, checkpoint.location, checkpoint, None)


def weights_of(stored: StoredModel) -> StepWeights:
    """What a server of it reads, target and draft apart."""
    from assay_evaluate.roofline.weights import step_weights
    from assay_quantize.plan.stored import is_draft

    target = stored.served(False).weights
    draft = (weight for weight in stored.served(True).weights if is_draft(stored, weight.name))
    sizes = (((weight.name, weight.shape, weight.num_bytes) for weight in part) for part in (target, draft))
    return step_weights(stored.family, stored.config, *sizes)


def experts_scheme(plan: Plan) -> str | None:
    """Scheme of most of the routed experts, of any quantized weight where there are no experts; None: unquantized."""
    matrices = [tensor for tensor in plan.tensors if tensor.role != "mtp" and tensor.outputs and len(tensor.shape) > 1]
    experts = [tensor.scheme for tensor in matrices if tensor.role == "routed_expert"]
    schemes = experts or [tensor.scheme for tensor in matrices if tensor.scheme is not None]
    return Counter(schemes).most_common(1)[0][0] if schemes else None


# ------------------------------------------------------------------------------------------------ the table
def plan_for_hardware(
    target_name: str,
    profile_name: str,
    precision: str | None = None,
    *,
    users: int = 32,
    context: str = "32k",
    mtp: str | None = None,
    reference: str | None = None,
    say: Say = say_nothing,
) -> HardwarePlan:
    """What each precision of a model needs on a profile's GPUs: memory with KV cache, kernels, bytes of a step.

    target_name: a model recipe's name, a checkpoint folder or a hub id. precision: None: the source, what the recipe names for
    the profile, and the usual ones. users: sequences in flight, of `context` tokens each. mtp: as in a model's recipe.
    reference: what candidates are compared with, instead of the recipe's. AssayError: no GPU is named.
    """
    profile, length = load_recipe(ProfileRecipe, profile_name), tokens_of("--context", context)
    target = resolve_source(target_name, mtp=mtp, reference=reference)
    from assay_quantize.plan.fits import WORKSPACE_BYTES, fit_on

    hardware = profile.hardware
    if hardware.device != "cuda" or hardware.gpu is None or profile.usable_bytes is None or not hardware.num_gpus:
        raise AssayError(
            f"--profile {profile.name}: says of no GPU what it is, how much memory it has, or how many there are; take a "
            "profile such as 4xh200 (`assay recipes` lists them)"
        )
    known = known_model(target, say)
    serving = target.recipe.serving
    rows = list(_rows(known, target, profile, None if precision is None else [precision], users, length))
    fit = fit_on(known.source_itself, profile, serving)
    assumptions = [
        "weights, KV cache and kernels by names, shapes and tables; nothing was measured",
        "every token is routed on its own and to every expert alike",
        "a floor is what memory bandwidth allows: published servers reach 0.1 to 0.3 of it",
    ]
    if serving.num_speculative_tokens:
        assumptions.append(f"{_ACCEPTED:.0%} of drafted tokens are accepted, the most that is published for natural text")
    return HardwarePlan(
        model=known.name,
        source=known.source,
        profile=profile.name,
        gpu=hardware.gpu,
        num_gpus=hardware.num_gpus,
        usable_bytes=profile.usable_bytes,
        workspace_bytes=WORKSPACE_BYTES,
        kv_dtype=fit.kv_dtype,
        users=users,
        context=length,
        rows=tuple(sorted(rows, key=lambda row: -(row.weight_bytes or 0))),
        assumptions=tuple(assumptions),
    )


_ACCEPTED = 0.52
"""Of drafted tokens, as published for natural text (`roofline/rows.py: ACCEPTED_SHARE`; its upper end, for floors)."""


def _rows(
    known: Known, target: Target, profile: ProfileRecipe, precisions: Sequence[str] | None, users: int, context: int
) -> Iterator[PrecisionOnHardware]:
    from assay_pipeline.planning import plan_for

    if precisions is None:
        label = source_label(known.checkpoint.config)
        yield _row(label, None, known.source_itself, profile, target.recipe.serving, users, context)
        precisions = list(dict.fromkeys([*target.recipe.on_profile(profile.name).precisions, *USUAL]))
    for text in precisions:
        if is_automatic(text):
            problem_text = "its schemes are chosen in a run; `assay recipe --hardware` chooses them for a machine"
            yield PrecisionOnHardware(precision=text, experts=None, problem=problem_text)
            continue
        recipe = load_recipe(PrecisionRecipe, text)
        try:
            plan = plan_for(target, known.checkpoint, recipe)
        except PlanError as problem:
            yield PrecisionOnHardware(precision=recipe.name, experts=None, problem=one_line(str(problem)))
            continue
        scheme = experts_scheme(plan)
        yield _row(recipe.name, scheme, known.stored(plan), profile, target.recipe.serving, users, context)


def _row(
    name: str, scheme: str | None, stored: StoredModel, profile: ProfileRecipe, serving: Serving, users: int, context: int
) -> PrecisionOnHardware:
    from assay_evaluate.roofline.devices import device_named
    from assay_evaluate.roofline.kernels import runs_as
    from assay_quantize.plan.fits import fit_on, kv_read_bytes, misfits, ranks_of, sentence
    from assay_quantize.plan.stored import is_speculative

    fit = fit_on(stored, profile, serving)
    device = device_named(profile.hardware.gpu)
    each = fit.kv_bytes(context)
    held = max(0, fit.free_bytes) // max(1, each)
    wrong = misfits(stored.served(is_speculative(profile, serving)), ranks_of(profile))
    fits = held >= users and not wrong
    runs = runs_as(scheme, device.architecture if device else None)
    kv_read = kv_read_bytes(stored.served(is_speculative(profile, serving)), fit, context) * profile.hardware.num_gpus
    problem = sentence(wrong) if wrong else None
    if runs is not None and not runs.computes:
        fits, problem = False, problem or f"vLLM's compiled kernels for {scheme} refuse this GPU"
    if problem is None and not fits:
        gib = 2**30
        room = f"{max(0, fit.free_bytes) / gib:.0f} GiB are left for KV cache"
        problem = f"{room} on each GPU, {users} users need {users * each / gib:.0f}; {held} fit" if fit.free_bytes > 0 else (
            f"its weights do not fit: {fit.weight_bytes / gib:.0f} GiB of {fit.usable_bytes / gib:.0f} usable on each GPU"
        )  # fmt: skip
    weights = weights_of(stored)
    drafted = [0] + [serving.num_speculative_tokens] * bool(serving.num_speculative_tokens and weights.draft is not None)
    return PrecisionOnHardware(
        precision=name,
        experts=scheme,
        weight_bytes=fit.weight_bytes,
        kv_bytes=users * each,
        free_bytes=fit.free_bytes,
        users_that_fit=held,
        fits=fits,
        native=runs.native if runs else None,
        runs_as=runs.computes if runs else None,
        kernels=runs.kernels if runs else (),
        steps=tuple(_step(weights, profile, users, k or 0, kv_read) for k in drafted),
        problem=problem,
    )


def _step(weights: StepWeights, profile: ProfileRecipe, users: int, drafted: int, kv_read: float) -> StepRead:
    from assay_evaluate.roofline.devices import device_named
    from assay_evaluate.roofline.weights import step_of, tpot_floor_s

    device = device_named(profile.hardware.gpu)
    step = step_of(weights, users=users, drafted=drafted, kv_bytes_each=kv_read)
    length = 1 + _ACCEPTED * drafted
    experts = weights.target.num_experts
    return StepRead(
        drafted=drafted,
        tokens=step.tokens,
        experts_touched=step.experts_share * experts if experts else None,
        target_bytes=step.target_bytes,
        draft_bytes=step.draft_bytes,
        kv_bytes=step.kv_bytes,
        acceptance_length=length,
        floor_tpot_s=None if device is None else tpot_floor_s(step, device, profile.hardware.num_gpus, length),
    )
