"""The choice itself: parts and their damages become a problem, its solution picks, and picks points to show."""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from assay.recipes.precision import PrecisionRecipe
from assay.records.base import Interval
from assay.records.choice.mix import KEPT, Advantage, MixPoint
from assay.records.diagnosis.sensitivity import Sensitivity, SensitivityPart
from assay_quantize.mixing.damage import Z_95, shrunken_damages
from assay_quantize.mixing.parts import StoredPart, StoredParts
from assay_quantize.mixing.solve import Problem, Solution, fewest_changes, least_damage

SLACK = 0.02
"""Share of the optimum's damage that is given up so that neighbouring layers are alike: less than damages are known to."""
FRONTIER_POINTS = 16


@dataclass(frozen=True)
class Option:
    """One way to store a part. damage: as counted. spread: its standard error; None: not known."""

    scheme: str
    num_bytes: int
    rank_bytes: int
    damage: float
    spread: float | None
    measured: float | None
    interval: Interval | None


@dataclass(frozen=True)
class Choices:
    """What can be chosen: of each part its options, `bf16` first. unmeasured: parts that have no other, with the reason."""

    stored: StoredParts
    options: tuple[tuple[Option, ...], ...]
    not_taken: Mapping[tuple[int, str, str], str]
    """Layer, role, scheme -> the reason; of parts without any measurement under `bf16`."""

    @property
    def parts(self) -> tuple[StoredPart, ...]:
        return self.stored.parts

    def total_bytes(self, picks: Sequence[int]) -> int:
        return self.stored.other_bytes + sum(o[p].num_bytes for o, p in zip(self.options, picks, strict=True))

    def bits_per_weight(self, num_bytes: int) -> float:
        """Of a whole checkpoint's bytes; those of what is not chosen for do not count."""
        return 8 * (num_bytes - self.stored.other_bytes - self.stored.plain_bytes) / self.stored.num_weights

    def bytes_at(self, bits_per_weight: float) -> int:
        """The other way: bytes of a whole checkpoint."""
        return (
            self.stored.other_bytes + self.stored.plain_bytes + math.floor(bits_per_weight * self.stored.num_weights / 8 + 1e-6)
        )

    def problem(self, budget_bytes: int | None) -> Problem:
        sizes = [tuple(tuple(option.num_bytes for option in options) for options in self.options)]
        limits = [sum(max(part) for part in sizes[0]) if budget_bytes is None else budget_bytes - self.stored.other_bytes]
        if self.stored.rank_limit is not None:
            sizes.append(tuple(tuple(option.rank_bytes for option in options) for options in self.options))
            limits.append(self.stored.rank_limit - self.stored.other_rank_bytes)
        return Problem(
            tuple(tuple(option.damage for option in options) for options in self.options), tuple(sizes), tuple(limits)
        )

    def schemes(self, picks: Sequence[int]) -> dict[tuple[int, str], str]:
        rows = zip(self.parts, self.options, picks, strict=True)
        return {(part.layer, part.role): options[pick].scheme for part, options, pick in rows}

    def picks_of(self, schemes: Mapping[tuple[int, str], str]) -> tuple[int, ...] | None:
        """The picks with these schemes; None: some part has no such option."""
        picks = []
        for part, options in zip(self.parts, self.options, strict=True):
            offered = [option.scheme for option in options]
            if (scheme := schemes[part.layer, part.role]) not in offered:
                return None
            picks.append(offered.index(scheme))
        return tuple(picks)

    def point(self, picks: Sequence[int], name: str, kind: Literal["mix", "uniform", "shipped"], problem: Problem) -> MixPoint:
        """problem: whose limits say whether it fits; the first is the budget, which does not count."""
        total = self.total_bytes(picks)
        return MixPoint(
            name=name,
            kind=kind,
            bytes=total,
            bits_per_weight=self.bits_per_weight(total),
            damage_nats=problem.damage(picks),
            num_kept=sum(options[pick].scheme == KEPT for options, pick in zip(self.options, picks, strict=True)),
            fits=all(used <= limit for used, limit in list(zip(problem.used(picks), problem.limits, strict=True))[1:]),
        )


def choices_of(stored: StoredParts, sensitivity: Sensitivity, schemes: Sequence[str]) -> Choices:
    """Options of every part: `bf16`, and each scheme that it can take and whose damage was measured. Missing is not zero."""
    rows: dict[tuple[int | None, str], dict[str, SensitivityPart]] = dict(sensitivity.by_part.items())
    left: dict[tuple[int | None, str, str], str] = {(row.layer, row.role, row.scheme): row.why for row in sensitivity.left_out}
    every: list[tuple[Option, ...]] = []
    not_taken: dict[tuple[int, str, str], str] = {}
    for part in stored.parts:
        measured, known = rows.get((part.layer, part.role), {}), {}
        options = [Option(KEPT, part.num_bytes[KEPT], part.rank_bytes[KEPT], 0.0, 0.0, None, None)]
        for scheme in schemes:
            row = measured.get(scheme)
            if scheme in part.refused:
                not_taken[part.layer, part.role, scheme] = part.refused[scheme]
            elif row is None or row.damage_nats is None:
                reason = left.get((part.layer, part.role, scheme))
                not_taken[part.layer, part.role, scheme] = f"not measured{f': {reason}' if reason else ''}"
            else:
                known[scheme] = (row.damage_nats, row.interval)
        shrunken = shrunken_damages(known, is_calibrated=sensitivity.calibration is not None)
        for scheme, (nats, interval) in known.items():
            sizes = part.num_bytes[scheme], part.rank_bytes[scheme]
            options.append(Option(scheme, *sizes, *shrunken[scheme], nats, interval))
        every.append(tuple(options))
    return Choices(stored, tuple(every), not_taken)


# ------------------------------------------------------------------------------------------------ the mix
def mix_of(choices: Choices, problem: Problem, slack: float = SLACK) -> tuple[tuple[int, ...], Solution] | None:
    """(picks, the optimum): the optimum, or what loses at most `slack` more and differs less from layer to layer."""
    optimum = least_damage(problem)
    if optimum is None:
        return None
    links = _links(choices)
    most = optimum.damage * (1 + slack)
    smooth = fewest_changes(problem, links, most) if slack and optimum.damage else None
    if smooth is not None and problem.is_feasible(smooth) and _changes(links, smooth) < _changes(links, optimum.picks):
        return smooth, optimum
    return optimum.picks, optimum


Links = Sequence[tuple[int, Sequence[int | None]] | None]
"""Of each part the one of its role in the layer before that has it, and of each option the same one there."""


def _links(choices: Choices) -> Links:
    last: dict[str, int] = {}
    links: list[tuple[int, Sequence[int | None]] | None] = []
    for number, part in enumerate(choices.parts):
        before = last.get(part.role)
        last[part.role] = number
        if before is None:
            links.append(None)
            continue
        places = {option.scheme: pick for pick, option in enumerate(choices.options[before])}
        links.append((before, [places.get(option.scheme) for option in choices.options[number]]))
    return links


def _changes(links: Links, picks: Sequence[int]) -> int:
    """Parts that differ from the one before them."""
    return sum(link is not None and link[1][picks[number]] != picks[link[0]] for number, link in enumerate(links))


def frontier_of(choices: Choices, problem: Problem, also: Sequence[int] = ()) -> list[MixPoint]:
    """Optima for budgets from the smallest choice to the largest, equal ones once. The machine's limits hold.

    also: further budgets, of the parts alone: those of uniform recipes, which then have the best choice of their size beside
    them.
    """
    low, high = problem.smallest[0], sum(max(part) for part in problem.sizes[0])
    # dense where formats are: sizes of the schemes crowd at the low end
    budgets = [low + round((high - low) * (step / (FRONTIER_POINTS - 1)) ** 2) for step in range(FRONTIER_POINTS)]
    points: dict[int, MixPoint] = {}
    for budget in sorted({*budgets, *also}):
        solution = least_damage(Problem(problem.damages, problem.sizes, (budget, *problem.limits[1:])))
        if solution is not None:
            total = choices.total_bytes(solution.picks)
            name = f"{choices.bits_per_weight(total):.2f} bits"
            points.setdefault(total, choices.point(solution.picks, name, "mix", problem))
    rising = sorted(points.values(), key=lambda point: (point.bytes, point.damage_nats))
    return [point for i, point in enumerate(rising) if all(point.damage_nats < before.damage_nats for before in rising[:i])]


# ------------------------------------------------------------------------------------------------ what it is compared with
def controls_of(
    choices: Choices, base: PrecisionRecipe, shipped: Sequence[PrecisionRecipe], schemes: Sequence[str]
) -> dict[str, tuple[Literal["uniform", "shipped"], tuple[int, ...]]]:
    """Name -> kind and picks: one scheme wherever a part can take it, then the precisions of assay that the damages can say of.

    One scheme counts if more than half of the weights can take it. A uniform choice that a shipped precision makes has its
    name.
    """
    controls: dict[tuple[int, ...], tuple[str, Literal["uniform", "shipped"]]] = {}
    for scheme in schemes:
        schemes_of_parts = {
            (part.layer, part.role): scheme if any(option.scheme == scheme for option in options) else KEPT
            for part, options in zip(choices.parts, choices.options, strict=True)
        }
        picks = choices.picks_of(schemes_of_parts)
        of_scheme = sum(part.num_weights for part in choices.parts if schemes_of_parts[part.layer, part.role] == scheme)
        if picks is not None and 2 * of_scheme > choices.stored.num_weights:  # else it is a recipe of kept parts
            controls.setdefault(picks, (f"uniform {scheme}", "uniform"))
    for recipe in shipped:
        settings = ("observer", "mtp", "kv_cache", "calibration", "activations")
        if any(getattr(recipe, name) != getattr(base, name) for name in settings):
            continue
        schemes_of_mtp = ([each.scheme_of(role, None) for role in base.quantize] for each in (recipe, base))
        has_same_mtp = base.mtp != "quantize" or operator.eq(*schemes_of_mtp)  # its schemes are those of no layer
        if not has_same_mtp or not set(recipe.quantize) <= set(base.quantize):
            continue
        picks = choices.picks_of(
            {(part.layer, part.role): recipe.scheme_of(part.role, part.layer) or KEPT for part in choices.parts}
        )
        if picks is None:
            continue
        before = controls.get(picks)
        if before is None:
            controls[picks] = (recipe.name, "shipped")
        elif before[0].startswith("uniform "):
            controls[picks] = (recipe.name, before[1])
    return {name: (kind, picks) for picks, (name, kind) in controls.items()}


def advantage_of(choices: Choices, uniform: str, of_uniform: Sequence[int], picks: Sequence[int]) -> Advantage:
    """How much more the uniform recipe loses, and the lower end of that, parts being taken for independent."""
    difference, variance, is_known = 0.0, 0.0, True
    for options, of_control, of_mix in zip(choices.options, of_uniform, picks, strict=True):
        if of_control == of_mix:
            continue
        difference += options[of_control].damage - options[of_mix].damage
        for option in (options[of_control], options[of_mix]):
            is_known = is_known and option.spread is not None
            variance += (option.spread or 0.0) ** 2
    low = difference - Z_95 * math.sqrt(variance) if is_known else None
    return Advantage(uniform=uniform, nats=difference, low_nats=low)
