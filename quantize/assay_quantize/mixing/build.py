"""`Mix`: limits, choice, control and reasons put together; the recipe that is proposed, as text."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from assay.errors import AssayError
from assay.quantities import size
from assay.recipes.calibrated.methods import INTEGERS
from assay.recipes.precision import PrecisionRecipe
from assay.records.choice.mix import KEPT, Advantage, Mix, MixedPart, MixPoint, NotTaken, PredictedMeasured
from assay.records.diagnosis.sensitivity import Sensitivity
from assay_quantize.mixing.choose import (
    SLACK,
    Choices,
    Option,
    advantage_of,
    controls_of,
    frontier_of,
    mix_of,
)
from assay_quantize.mixing.measured import Control, duel_of, meaning_of, strongest_of, wholes_of
from assay_quantize.mixing.parts import Machine
from assay_quantize.mixing.recipe_text import layers_text, recipe_data, recipe_text, usual_schemes
from assay_quantize.mixing.solve import Problem, Solution

NEAR = 0.02
"""Share of the uniform recipe's damage by which a mix must be ahead where no damage has an interval."""


@dataclass(frozen=True)
class Asked:
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


def propose(
    asked: Asked,
    base: PrecisionRecipe,
    choices: Choices,
    sensitivity: Sensitivity,
    shipped: Sequence[PrecisionRecipe],
    schemes: Sequence[str],
    measured: Mapping[str, PredictedMeasured],
) -> Proposal:
    """The mix, or the uniform recipe where that is as good, with everything that was held against it.

    What was measured with all parts quantized at once, of the mix and of uniform recipes, decides; else sums of parts do.
    shipped: precisions to show beside it. measured: SHA-256 of a recipe's meaning -> what a run measured of it. AssayError:
    nothing is within the limits.
    """
    problem = choices.problem(asked.budget_bytes)
    found = mix_of(choices, problem, asked.slack)
    if found is None:
        raise AssayError(_too_little(asked, choices, problem))
    picks, best = found
    if set(choices.schemes(picks).values()) == {KEPT}:
        whole = size(choices.total_bytes(picks))
        raise AssayError(f"--budget {asked.budget}: holds the whole checkpoint in 16 bits ({whole}); nothing need be quantized")
    controls = controls_of(choices, base, shipped, schemes)
    uniforms = [(name, at) for name, (kind, at) in controls.items() if kind == "uniform" and problem.holds(at)]
    wholes = wholes_of(base, choices, sensitivity)
    rival = min(uniforms, key=lambda one: (problem.damage(one[1]), problem.used(one[1])), default=None)
    strongest = strongest_of(base, choices, uniforms, rival, wholes)
    duel = next(
        (one for known in (measured, wholes) if (one := duel_of(base, choices, uniforms, strongest, picks, known))), None
    )
    rival = rival if duel is None else duel.rival
    advantage = None if rival is None else advantage_of(choices, rival[0], rival[1], picks)
    if duel is not None:
        reason, won = duel.uniform_wins, duel.mix_wins(size(choices.total_bytes(duel.rival[1])))
    else:
        reason = _uniform_wins(choices, rival, advantage, picks, problem)
        won = _mix_wins(choices, rival, advantage, picks, problem)
    taken = rival[1] if reason is not None and rival is not None else picks
    if reason is not None and rival is not None and duel is None:
        better = _better_whole(base, choices, wholes, uniforms, rival, advantage)
        if better is not None:
            taken, reason = better
    is_uniform = tuple(picks) in {at for kind, at in controls.values() if kind == "uniform"}
    if reason is not None and asked.always_mix and not is_uniform:
        taken, won, reason = picks, f"Written as a mix was asked for. {reason}", None
    why = reason or won
    mixed = _parts(choices, taken)
    points = [choices.point(at, name, kind, problem) for name, (kind, at) in controls.items()]
    mix = Mix(
        model=asked.model,
        source=asked.source,
        base=base.name,
        name=asked.name,
        sensitivity_sha256=sensitivity.sha256,
        calibrated_by=None if sensitivity.calibration is None else str(sensitivity.calibration["method"]),
        method=sensitivity.method,
        texts=sensitivity.texts,
        texts_sha256=sensitivity.texts_sha256,
        num_texts=sensitivity.num_texts,
        budget=asked.budget,
        budget_bytes=asked.budget_bytes,
        hardware=None if asked.machine is None else asked.machine.profile.name,
        slack=asked.slack,
        users=None if asked.machine is None else asked.machine.users,
        context=None if asked.machine is None else asked.machine.context,
        rank_limit_bytes=choices.stored.rank_limit,
        num_weights=choices.stored.num_weights,
        other_bytes=choices.stored.other_bytes + choices.stored.plain_bytes,
        proposes="uniform" if reason is not None else "mix",
        reason=why,
        parts=mixed,
        point=choices.point(taken, asked.name, "uniform" if reason is not None else "mix", problem),
        optimum_nats=best.damage,
        bound_nats=_bound(best),
        advantage=advantage,
        frontier=tuple(
            frontier_of(choices, problem, [problem.used(at)[0] for kind, at in controls.values() if kind == "uniform"])
        ),
        controls=tuple(sorted(points, key=lambda one: (one.bytes, one.name))),
        not_taken=_not_taken(choices),
        checks=(*wholes.values(), *measured.values()),
        replayed="not asked",
        assumptions=_assumptions(sensitivity, asked.slack),
    )
    said = f"{asked.model} within {asked.budget or 'what ' + (mix.hardware or '') + ' holds'}: {_kind(mix)}, by `assay recipe`."
    data = recipe_data(base, asked.name, said, choices.schemes(taken))
    made = Proposal(mix, PrecisionRecipe.model_validate(data), recipe_text(mix, data))
    if duel is not None or is_uniform:
        return made

    def unmeasured(recipe: str, at: Sequence[int]) -> PrecisionRecipe | None:
        chosen = choices.schemes(at)
        if meaning_of(base, chosen) in wholes:
            return None
        return PrecisionRecipe.model_validate(recipe_data(base, recipe, said, chosen))

    control = None
    if strongest is not None and sensitivity.uniform:  # else none is measured as a whole
        control = unmeasured(f"{asked.name}-uniform", strongest[1])
    return replace(made, candidate=unmeasured(asked.name, picks), control=control)


def _kind(mix: Mix) -> str:
    return "one scheme" if mix.proposes == "uniform" else "a scheme for every layer and role"


def _bound(best: Solution) -> float:
    return min(best.damage, max(0.0, best.bound))


# ------------------------------------------------------------------------------------------------ who wins
def _uniform_wins(
    choices: Choices, rival: Control | None, advantage: Advantage | None, picks: Sequence[int], problem: Problem
) -> str | None:
    """By the sums of parts: why the best uniform recipe within the limits is proposed; None: the mix is."""
    if rival is None or advantage is None:
        return None
    name, of_rival = rival
    if of_rival == tuple(picks):
        return f"The best choice is {name}, one scheme for all."
    lost = problem.damage(of_rival)
    if advantage.low_nats is not None and advantage.low_nats <= 0:
        return (
            f"{name} is proposed: it is expected to lose {lost:.4g} nats a token, the mix {problem.damage(picks):.4g}, and the "
            f"difference, {advantage.nats:.2g}, is within its error."
        )
    if advantage.low_nats is None and advantage.nats <= NEAR * lost:
        return (
            f"{name} is proposed: it is expected to lose {lost:.4g} nats a token, the mix {problem.damage(picks):.4g}, "
            f"less than {NEAR:.0%} apart."
        )
    return None


def _better_whole(
    base: PrecisionRecipe,
    choices: Choices,
    wholes: Mapping[str, PredictedMeasured],
    uniforms: Sequence[Control],
    rival: Control,
    advantage: Advantage | None,
) -> tuple[tuple[int, ...], str] | None:
    """(picks, reason) of the uniform recipe that lost least where all parts were quantized at once, if that is another than the
    one that the sums of the parts favour: a sum does not see what parts do to each other. None: it is not, or is not known."""
    found = {name: (wholes.get(meaning_of(base, choices.schemes(at))), at) for name, at in uniforms}
    known = {name: (whole.measured_nats, at) for name, (whole, at) in found.items() if whole is not None}
    if rival[0] not in known:
        return None
    best = min(known, key=lambda name: known[name][0])
    if known[best][0] >= known[rival[0]][0]:
        return None
    by = "its error" if advantage is not None and advantage.low_nats is not None else f"{NEAR:.0%}"
    return known[best][1], (
        f"{best} is proposed: of the uniform recipes within these limits it loses least with all parts quantized at once, "
        f"{known[best][0]:.4g} nats a token on these texts; {rival[0]}, which the sums of single parts favour, loses "
        f"{known[rival[0]][0]:.4g}, and no mix is expected to be ahead of that by more than {by}."
    )


def _mix_wins(
    choices: Choices, rival: Control | None, advantage: Advantage | None, picks: Sequence[int], problem: Problem
) -> str:
    if rival is None or advantage is None:
        return "No uniform recipe is within these limits."
    lost, ours = problem.damage(rival[1]), problem.damage(picks)
    share = f"{ours / lost:.2f} times" if lost else "as much as"
    known = "" if advantage.low_nats is None else f", the difference at least {advantage.low_nats:.2g}"
    theirs = f"{rival[0]} ({size(choices.total_bytes(rival[1]))}, {lost:.4g} nats a token)"
    return f"It is expected to lose {share} what {theirs} loses, the best uniform recipe of at most this size{known}."


def _too_little(asked: Asked, choices: Choices, problem: Problem) -> str:
    least = problem.smallest
    said = []
    if asked.budget_bytes is not None and least[0] > problem.limits[0]:
        total = least[0] + choices.stored.other_bytes
        said.append(
            f"--budget {asked.budget}: is {size(asked.budget_bytes)}, the smallest choice takes {size(total)} "
            f"({choices.bits_per_weight(total):.2f} bits per weight)"
        )
    if len(least) > 1 and least[1] > problem.limits[1]:
        assert asked.machine is not None
        held, needed = (size(each + choices.stored.other_rank_bytes) for each in (problem.limits[1], least[1]))
        said.append(
            f"--hardware {asked.machine.profile.name}: the weights of one GPU may take {held} beside the KV cache of "
            f"{asked.machine.users} users, the smallest choice takes {needed}"
        )
    kept = [key for key in choices.not_taken if all(one.scheme == KEPT for one in _options(choices, key))]
    only = len({key[:2] for key in kept})
    also = f"; {only} of {len(choices.parts)} parts can only stay in 16 bits (not measured, or refused)" if only else ""
    what = " and ".join(said) or "no choice is within all limits at once"
    return f"{what}{also}; ask for more, or measure smaller schemes (`assay sensitivity`)"


def _options(choices: Choices, key: tuple[int, str, str]) -> Sequence[Option]:
    return next(o for part, o in zip(choices.parts, choices.options, strict=True) if (part.layer, part.role) == key[:2])


# ------------------------------------------------------------------------------------------------ reasons
def _parts(choices: Choices, picks: Sequence[int]) -> tuple[MixedPart, ...]:
    schemes = usual_schemes(choices.schemes(picks))
    found = []
    for part, options, pick in zip(choices.parts, choices.options, picks, strict=True):
        one, usual = options[pick], schemes[part.role]
        there = next((each for each in options if each.scheme == usual), None)
        out = None if there is not None else choices.not_taken.get((part.layer, part.role, usual), "not measured")
        found.append(
            MixedPart(
                layer=part.layer,
                role=part.role,  # type: ignore[arg-type]
                num_weights=part.num_weights,
                scheme=one.scheme,
                bytes=one.num_bytes,
                damage_nats=one.damage,
                measured_nats=one.measured,
                interval=one.interval,
                usual=usual,
                usual_bytes=None if there is None else there.num_bytes,
                usual_nats=None if there is None else there.damage,
                why=out or "",
            )
        )
    return tuple(found)


def _not_taken(choices: Choices) -> tuple[NotTaken, ...]:
    """By role, scheme and reason, layers together. A reason may name one layer's tensor: it stands for all like it."""
    layers: dict[tuple[str, str, str], list[int]] = defaultdict(list)
    for (layer, role, scheme), why in choices.not_taken.items():
        layers[role, scheme, why].append(layer)
    return tuple(
        NotTaken(role=role, scheme=scheme, why=why, layers=layers_text(numbers))  # type: ignore[arg-type]
        for (role, scheme, why), numbers in sorted(layers.items())
    )


def _assumptions(sensitivity: Sensitivity, slack: float) -> tuple[str, ...]:
    said = [
        "damages of parts add up: what two parts lose together is what each loses alone",
        "damages of one part are drawn towards the squared errors of its schemes, the more the less certain they are",
        "errors of different parts are independent, and none of the lead is luck of the choice",
    ]
    if sensitivity.calibration is not None:
        said.append("INT4 weights lose in the mix what they lost where each scheme was calibrated in every part")
    elif any(part.scheme in INTEGERS for part in sensitivity.parts):
        said.append(
            "INT4 weights are rounded without text in the mix and its controls alike: w4a16-gptq is not among them, and may "
            "lose less than either (`assay sensitivity --method gptq` measures it)"
        )
    if sensitivity.method.startswith("proxy"):
        said.append(f"damages are estimates ({sensitivity.method}), not measured while serving")
    if slack:
        said.append(f"up to {slack:.2g} of the least damage is given up so that neighbouring layers are alike")
    return tuple(said)


def with_replay(proposal: Proposal, said: str) -> Proposal:
    return replace(proposal, mix=proposal.mix.model_copy(update={"replayed": said}))


__all__ = ["Asked", "Machine", "MixPoint", "Proposal", "meaning_of", "propose", "with_replay"]
