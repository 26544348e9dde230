"""`Mix`: limits, choice, controls and reasons put together; the recipe that is proposed, as text.

What the mix and uniform recipes lost with all their parts quantized at once decides, where it was measured; else the sums of
what parts lose alone do.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

from assay.errors import AssayError
from assay.quantities import capital, size
from assay.recipes.calibrated.methods import INTEGERS
from assay.recipes.precision import PrecisionRecipe
from assay.records.base import sha256_of
from assay.records.choice.mix import KEPT, Advantage, Mix, MixedPart, NotTaken, PredictedMeasured
from assay.records.diagnosis.sensitivity import Sensitivity, UniformDamage, WholeDamage
from assay_quantize.mixing.choose import SLACK, Choices, advantage_of, controls_of, frontier_of, mix_of
from assay_quantize.mixing.parts import Machine
from assay_quantize.mixing.recipe_text import layers_text, recipe_data, recipe_text, usual_schemes
from assay_quantize.mixing.solve import Problem

NEAR = 0.02
"""Share of the uniform recipe's damage by which a mix must be ahead where no damage has an interval."""
SENSITIVITY = "sensitivity"
"""Who measured, where it was not a run."""


@dataclass(frozen=True)
class Request:
    """budget: as it was written; budget_bytes: of the whole checkpoint, None: what the machine holds. slack: share of the least
    damage that may be given up so that layers are alike. always_mix: the mix, also where a uniform recipe is as good."""

    model: str
    source: str
    name: str
    budget: str
    budget_bytes: int | None
    machine: Machine | None
    slack: float = SLACK
    always_mix: bool = False


@dataclass(frozen=True)
class Proposal:
    """candidate: the mix, if it was not measured with all its parts quantized at once. None: it was, or it is uniform.
    control: the best uniform recipe, where that was not measured so, as those of the record have other parts."""

    mix: Mix
    recipe: PrecisionRecipe
    text: str
    candidate: PrecisionRecipe | None = None
    control: PrecisionRecipe | None = None

    @property
    def undecided(self) -> bool:
        """A uniform recipe is proposed by sums of parts, and it or the mix was not measured."""
        return self.mix.proposes == "uniform" and (self.candidate or self.control) is not None


class Uniform(NamedTuple):
    """A recipe of one scheme, which the mix is compared with."""

    name: str
    picks: tuple[int, ...]


def propose(
    request: Request,
    base: PrecisionRecipe,
    choices: Choices,
    sensitivity: Sensitivity,
    shipped: Sequence[PrecisionRecipe],
    schemes: Sequence[str],
    measured: Mapping[str, PredictedMeasured],
) -> Proposal:
    """The mix, or the uniform recipe where that is as good, with everything that was compared with it.

    shipped: precisions to show beside it. measured: `choice_sha256` of a recipe -> what a run measured of it. AssayError:
    nothing is within the limits.
    """
    problem = choices.problem(request.budget_bytes)
    solution = mix_of(choices, problem, request.slack)
    if solution is None:
        raise AssayError(_too_little(request, choices, problem))
    picks, optimum = solution
    if set(choices.schemes(picks).values()) == {KEPT}:
        whole = size(choices.total_bytes(picks))
        raise AssayError(
            f"--budget {request.budget}: holds the whole checkpoint in 16 bits ({whole}); nothing need be quantized"
        )
    controls = controls_of(choices, base, shipped, schemes)
    every_uniform = [Uniform(name, control) for name, (kind, control) in controls.items() if kind == "uniform"]
    uniforms = [uniform for uniform in every_uniform if problem.is_feasible(uniform.picks)]
    is_uniform = tuple(picks) in {uniform.picks for uniform in every_uniform}
    wholes = whole_damages(base, choices, sensitivity)
    rival = min(uniforms, key=lambda uniform: (problem.damage(uniform.picks), problem.used(uniform.picks)), default=None)
    strongest = _strongest(base, choices, uniforms, rival, wholes)
    chosen, proposes_uniform = tuple(picks), False
    advantage: Advantage | None = None
    contest = _contest(base, choices, uniforms, strongest, picks, measured)
    contest = contest or _contest(base, choices, uniforms, strongest, picks, wholes)
    if contest is not None:
        rival = contest.rival
        proposes_uniform, reason = contest.outcome(size(choices.total_bytes(rival.picks)))
        advantage = advantage_of(choices, rival.name, rival.picks, picks)
    elif rival is not None:
        advantage = advantage_of(choices, rival.name, rival.picks, picks)
        proposes_uniform, reason = _outcome_of_sums(choices, rival, advantage, picks, problem)
        if proposes_uniform:
            rival, reason = _better_whole(base, choices, wholes, uniforms, rival, advantage) or (rival, reason)
    else:
        reason = "No uniform recipe is within these limits."
    if proposes_uniform and rival is not None:
        if request.always_mix and not is_uniform:
            proposes_uniform, reason = False, f"Written as a mix was asked for. {reason}"
        else:
            chosen = rival.picks
    kind: Literal["mix", "uniform"] = "uniform" if proposes_uniform else "mix"
    points = [choices.point(control, name, of_kind, problem) for name, (of_kind, control) in controls.items()]
    machine = request.machine
    mix = Mix(
        model=request.model,
        source=request.source,
        base=base.name,
        name=request.name,
        sensitivity_sha256=sensitivity.sha256,
        calibrated_by=None if sensitivity.calibration is None else str(sensitivity.calibration["method"]),
        method=sensitivity.method,
        texts=sensitivity.texts,
        texts_sha256=sensitivity.texts_sha256,
        num_texts=sensitivity.num_texts,
        budget=request.budget,
        budget_bytes=request.budget_bytes,
        hardware=None if machine is None else machine.profile.name,
        slack=request.slack,
        users=None if machine is None else machine.users,
        context=None if machine is None else machine.context,
        rank_limit_bytes=choices.stored.rank_limit,
        num_weights=choices.stored.num_weights,
        other_bytes=choices.stored.other_bytes + choices.stored.plain_bytes,
        proposes=kind,
        reason=reason,
        parts=_parts(choices, chosen),
        point=choices.point(chosen, request.name, kind, problem),
        optimum_nats=optimum.damage,
        bound_nats=min(optimum.damage, max(0.0, optimum.bound)),
        advantage=advantage,
        frontier=tuple(frontier_of(choices, problem, [problem.used(uniform.picks)[0] for uniform in every_uniform])),
        controls=tuple(sorted(points, key=lambda point: (point.bytes, point.name))),
        not_taken=_not_taken(choices),
        checks=(*wholes.values(), *measured.values()),
        replayed="not asked",
        assumptions=_assumptions(sensitivity, request.slack),
    )
    what = "one scheme" if proposes_uniform else "a scheme for every layer and role"
    limit = request.budget or f"what {mix.hardware or ''} holds"
    description = f"{request.model} within {limit}: {what}, by `assay recipe`."

    def recipe_of(name: str, recipe_picks: Sequence[int]) -> dict[str, Any]:
        return recipe_data(base, name, description, choices.schemes(recipe_picks))

    data = recipe_of(request.name, chosen)
    proposal = Proposal(mix, PrecisionRecipe.model_validate(data), recipe_text(mix, data))
    if contest is not None or is_uniform:
        return proposal

    def unmeasured(name: str, recipe_picks: Sequence[int]) -> PrecisionRecipe | None:
        if _damage_of(wholes, base, choices, recipe_picks) is not None:
            return None
        return PrecisionRecipe.model_validate(recipe_of(name, recipe_picks))

    control = None
    if strongest is not None and sensitivity.uniform:  # else none is measured as a whole
        control = unmeasured(f"{request.name}-uniform", strongest.picks)
    return replace(proposal, candidate=unmeasured(request.name, picks), control=control)


def with_replay(proposal: Proposal, replayed: str) -> Proposal:
    return replace(proposal, mix=proposal.mix.model_copy(update={"replayed": replayed}))


# ------------------------------------------------------------------------------------------------ measured as a whole
def choice_sha256(base: PrecisionRecipe, schemes: Mapping[tuple[int, str], str]) -> str:
    """What a choice and the plan of a checkpoint can be compared by: the scheme of each part, and how scales were found."""
    calibration = base.calibration if base.calibration == "none" else base.calibration.model_dump(mode="json")
    chosen = [[layer, role, scheme] for (layer, role), scheme in sorted(schemes.items())]
    return sha256_of([base.observer, base.mtp, calibration, chosen])


def _damage_of(
    measured: Mapping[str, PredictedMeasured], base: PrecisionRecipe, choices: Choices, picks: Sequence[int]
) -> PredictedMeasured | None:
    return measured.get(choice_sha256(base, choices.schemes(picks)))


def whole_damages(base: PrecisionRecipe, choices: Choices, sensitivity: Sensitivity) -> dict[str, PredictedMeasured]:
    """`choice_sha256` -> what a choice lost with all its parts quantized at once, on the texts of the sensitivities."""
    parts = {(part.layer, part.role): part for part in choices.parts}
    damages: dict[str, PredictedMeasured] = {}

    def add(chosen: Mapping[tuple[int, str], str], damage: UniformDamage | WholeDamage, name: str | None = None) -> None:
        if not chosen.keys() <= parts.keys() or any(scheme not in parts[key].num_bytes for key, scheme in chosen.items()):
            return
        schemes = {key: chosen.get(key, KEPT) for key in parts}
        total = choices.stored.other_bytes + sum(parts[key].num_bytes[scheme] for key, scheme in schemes.items())
        damages.setdefault(
            choice_sha256(base, schemes),
            PredictedMeasured(
                name=name or f"mix of {size(total)}",
                source=SENSITIVITY,
                predicted_nats=damage.sum_of_parts_nats,
                measured_nats=damage.damage_nats,
                interval=damage.interval,
                on_other_texts=sensitivity.num_texts_of_wholes is not None,
            ),
        )

    for uniform in sensitivity.uniform:
        rows = [part for part in sensitivity.parts if part.scheme == uniform.scheme and part.damage_nats is not None]
        chosen: dict[tuple[int, str], str] = {(row.layer, row.role): uniform.scheme for row in rows if row.layer is not None}
        add(chosen, uniform, f"uniform {uniform.scheme}")
    for whole in sensitivity.wholes:
        add({(layer, role): scheme for layer, role, scheme in whole.schemes}, whole)
    return damages


@dataclass(frozen=True)
class Contest:
    """The mix and the uniform recipe that lost least, both measured by the same with all parts quantized at once."""

    of_mix: PredictedMeasured
    rival: Uniform
    of_rival: PredictedMeasured

    def outcome(self, rival_size: str) -> tuple[bool, str]:
        """Whether the uniform recipe is proposed, and why."""
        where = f"measured in {self.of_rival.source},"
        if self.of_rival.source == SENSITIVITY:
            which = "texts that it was not" if self.of_rival.on_other_texts else "the texts that it was"
            where = f"with all parts quantized at once, on {which} chosen on,"
        mix_nats, rival_nats = self.of_mix.measured_nats, self.of_rival.measured_nats
        if mix_nats < rival_nats:
            return False, (
                f"{capital(where)} it loses {mix_nats:.4g} nats a token, and {self.rival.name} ({rival_size}), the best "
                f"uniform recipe of at most this size, {rival_nats:.4g}."
            )
        return True, (
            f"{self.rival.name} is proposed: {where} it loses {rival_nats:.4g} nats a token, and the mix {mix_nats:.4g}."
        )


def _contest(
    base: PrecisionRecipe,
    choices: Choices,
    uniforms: Sequence[Uniform],
    strongest: Uniform | None,
    picks: Sequence[int],
    measured: Mapping[str, PredictedMeasured],
) -> Contest | None:
    """None: the mix is one of the uniform recipes, or was not measured; or no uniform recipe was measured that lost less, and
    not the strongest."""
    of_mix = _damage_of(measured, base, choices, picks)
    damages = [(uniform, _damage_of(measured, base, choices, uniform.picks)) for uniform in uniforms]
    known = [(uniform, damage) for uniform, damage in damages if damage is not None]
    if of_mix is None or not known or tuple(picks) in {uniform.picks for uniform in uniforms}:
        return None
    rival, of_rival = min(known, key=lambda row: row[1].measured_nats)
    if of_mix.measured_nats < of_rival.measured_nats and strongest not in [uniform for uniform, _ in known]:
        return None  # ahead of others says nothing
    return Contest(of_mix, rival, of_rival)


def _strongest(
    base: PrecisionRecipe,
    choices: Choices,
    uniforms: Sequence[Uniform],
    rival: Uniform | None,
    wholes: Mapping[str, PredictedMeasured],
) -> Uniform | None:
    """The uniform recipe that lost least as a whole, where `rival`, which the sums favour, was measured so; else that."""
    damages = [(uniform, _damage_of(wholes, base, choices, uniform.picks)) for uniform in uniforms]
    known = [(uniform, damage.measured_nats) for uniform, damage in damages if damage is not None]
    if rival is None or rival not in [uniform for uniform, _ in known]:
        return rival
    return min(known, key=lambda row: row[1])[0]


def _better_whole(
    base: PrecisionRecipe,
    choices: Choices,
    wholes: Mapping[str, PredictedMeasured],
    uniforms: Sequence[Uniform],
    rival: Uniform,
    advantage: Advantage,
) -> tuple[Uniform, str] | None:
    """The uniform recipe that lost least where all parts were quantized at once, and why, if that is another than the one that
    the sums of the parts favour: a sum does not see what parts do to each other. None: it is not, or is not known."""
    best, of_rival = _strongest(base, choices, uniforms, rival, wholes), _damage_of(wholes, base, choices, rival.picks)
    of_best = None if best is None else _damage_of(wholes, base, choices, best.picks)
    if best is None or of_best is None or of_rival is None or of_best.measured_nats >= of_rival.measured_nats:
        return None
    by = "its error" if advantage.low_nats is not None else f"{NEAR:.0%}"
    return best, (
        f"{best.name} is proposed: of the uniform recipes within these limits it loses least with all parts quantized at once, "
        f"{of_best.measured_nats:.4g} nats a token on these texts; {rival.name}, which the sums of single parts favour, loses "
        f"{of_rival.measured_nats:.4g}, and no mix is expected to be ahead of that by more than {by}."
    )


# ------------------------------------------------------------------------------------------------ sums of parts
def _outcome_of_sums(
    choices: Choices, rival: Uniform, advantage: Advantage, picks: Sequence[int], problem: Problem
) -> tuple[bool, str]:
    """Whether the best uniform recipe within the limits is proposed, and why."""
    if rival.picks == tuple(picks):
        return True, f"The best choice is {rival.name}, one scheme for all."
    of_rival, of_mix = problem.damage(rival.picks), problem.damage(picks)
    expected = f"{rival.name} is proposed: it is expected to lose {of_rival:.4g} nats a token, the mix {of_mix:.4g}, "
    if advantage.low_nats is not None and advantage.low_nats <= 0:
        return True, f"{expected}and the difference, {advantage.nats:.2g}, is within its error."
    if advantage.low_nats is None and advantage.nats <= NEAR * of_rival:
        return True, f"{expected}less than {NEAR:.0%} apart."
    share = f"{of_mix / of_rival:.2f} times" if of_rival else "as much as"
    known = "" if advantage.low_nats is None else f", the difference at least {advantage.low_nats:.2g}"
    rival_text = f"{rival.name} ({size(choices.total_bytes(rival.picks))}, {of_rival:.4g} nats a token)"
    return (
        False,
        f"It is expected to lose {share} what {rival_text} loses, the best uniform recipe of at most this size{known}.",
    )


def _too_little(request: Request, choices: Choices, problem: Problem) -> str:
    least = problem.smallest
    sentences = []
    if request.budget_bytes is not None and least[0] > problem.limits[0]:
        total = least[0] + choices.stored.other_bytes
        sentences.append(
            f"--budget {request.budget}: is {size(request.budget_bytes)}, the smallest choice takes {size(total)} "
            f"({choices.bits_per_weight(total):.2f} bits per weight)"
        )
    if len(least) > 1 and least[1] > problem.limits[1]:
        assert request.machine is not None
        held, needed = (size(rank_bytes + choices.stored.other_rank_bytes) for rank_bytes in (problem.limits[1], least[1]))
        sentences.append(
            f"--profile {request.machine.profile.name}: the weights of one GPU may take {held} beside the KV cache of "
            f"{request.machine.users} users, the smallest choice takes {needed}"
        )
    kept = {(p.layer, p.role) for p, options in zip(choices.parts, choices.options, strict=True) if len(options) == 1}
    only = len(kept & {key[:2] for key in choices.not_taken})
    also = f"; {only} of {len(choices.parts)} parts can only stay in 16 bits (not measured, or refused)" if only else ""
    what = " and ".join(sentences) or "no choice is within all limits at once"
    return f"{what}{also}; ask for more, or measure smaller schemes (`assay sensitivity`)"


# ------------------------------------------------------------------------------------------------ reasons
def _parts(choices: Choices, picks: Sequence[int]) -> tuple[MixedPart, ...]:
    schemes = usual_schemes(choices.schemes(picks))
    parts = []
    for part, options, pick in zip(choices.parts, choices.options, picks, strict=True):
        option, usual_scheme = options[pick], schemes[part.role]
        usual = next((other for other in options if other.scheme == usual_scheme), None)
        reason = "" if usual is not None else choices.not_taken.get((part.layer, part.role, usual_scheme), "not measured")
        parts.append(
            MixedPart(
                layer=part.layer,
                role=part.role,  # type: ignore[arg-type]
                num_weights=part.num_weights,
                scheme=option.scheme,
                bytes=option.num_bytes,
                damage_nats=option.damage,
                measured_nats=option.measured,
                interval=option.interval,
                usual=usual_scheme,
                usual_bytes=None if usual is None else usual.num_bytes,
                usual_nats=None if usual is None else usual.damage,
                why=reason,
            )
        )
    return tuple(parts)


def _not_taken(choices: Choices) -> tuple[NotTaken, ...]:
    """By role, scheme and reason, layers together. A reason may name one layer's tensor: it stands for all like it."""
    layers: dict[tuple[str, str, str], list[int]] = defaultdict(list)
    for (layer, role, scheme), reason in choices.not_taken.items():
        layers[role, scheme, reason].append(layer)
    return tuple(
        NotTaken(role=role, scheme=scheme, why=reason, layers=layers_text(numbers))  # type: ignore[arg-type]
        for (role, scheme, reason), numbers in sorted(layers.items())
    )


def _assumptions(sensitivity: Sensitivity, slack: float) -> tuple[str, ...]:
    sentences = [
        "damages of parts add up: what two parts lose together is what each loses alone",
        "damages of one part are drawn towards the squared errors of its schemes, the more the less certain they are",
        "errors of different parts are independent, and none of the lead is luck of the choice",
    ]
    if sensitivity.calibration is not None:
        sentences.append("INT4 weights lose in the mix what they lost where each scheme was calibrated in every part")
    elif any(part.scheme in INTEGERS for part in sensitivity.parts):
        sentences.append(
            "INT4 weights are rounded without text in the mix and its controls alike: w4a16-gptq is not among them, and may "
            "lose less than either (`assay sensitivity --method gptq` measures it)"
        )
    if sensitivity.method.startswith("proxy"):
        sentences.append(f"damages are estimates ({sensitivity.method}), not measured while serving")
    if slack:
        sentences.append(f"up to {slack:.2g} of the least damage is given up so that neighbouring layers are alike")
    return tuple(sentences)
