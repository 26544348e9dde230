"""The choice itself: parts and their damages become a problem, its solution picks, and picks points to show."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from assay.recipes.precision import PrecisionRecipe
from assay.records.base import Interval
from assay.records.choice.mix import KEPT, Advantage, MixPoint
from assay.records.diagnosis.sensitivity import Sensitivity, SensitivityPart
from assay_quantize.mixing.damage import Z_95, damages_used
from assay_quantize.mixing.parts import StoredPart, StoredParts
from assay_quantize.mixing.solve import Problem, Solution, cheapest, fewest_changes

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
    """Layer, role, scheme -> why; of parts without any measurement under `bf16`."""

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
        sizes = [tuple(tuple(one.num_bytes for one in options) for options in self.options)]
        limits = [sum(max(part) for part in sizes[0]) if budget_bytes is None else budget_bytes - self.stored.other_bytes]
        if self.stored.rank_limit is not None:
            sizes.append(tuple(tuple(one.rank_bytes for one in options) for options in self.options))
            limits.append(self.stored.rank_limit - self.stored.other_rank_bytes)
        return Problem(tuple(tuple(one.damage for one in options) for options in self.options), tuple(sizes), tuple(limits))

    def schemes(self, picks: Sequence[int]) -> dict[tuple[int, str], str]:
        rows = zip(self.parts, self.options, picks, strict=True)
        return {(part.layer, part.role): options[pick].scheme for part, options, pick in rows}

    def picks_of(self, schemes: Mapping[tuple[int, str], str]) -> tuple[int, ...] | None:
        """The picks with these schemes; None: some part has no such option."""
        found = []
        for part, options in zip(self.parts, self.options, strict=True):
            wanted = schemes[part.layer, part.role]
            at = next((number for number, one in enumerate(options) if one.scheme == wanted), None)
            if at is None:
                return None
            found.append(at)
        return tuple(found)

    def point(self, picks: Sequence[int], name: str, kind: Literal["mix", "uniform", "shipped"], problem: Problem) -> MixPoint:
        """problem: whose limits say whether it fits; the first is the budget, which does not count."""
        total = self.total_bytes(picks)
        held = list(zip(problem.used(picks), problem.limits, strict=True))[1:]
        return MixPoint(
            name=name,
            kind=kind,
            bytes=total,
            bits_per_weight=self.bits_per_weight(total),
            damage_nats=problem.damage(picks),
            num_kept=sum(options[pick].scheme == KEPT for options, pick in zip(self.options, picks, strict=True)),
            fits=all(used <= limit for used, limit in held),
        )


def choices_of(stored: StoredParts, sensitivity: Sensitivity, schemes: Sequence[str]) -> Choices:
    """Options of every part: `bf16`, and each scheme that it can take and whose damage was measured. Missing is not zero."""
    rows: dict[tuple[int | None, str], dict[str, SensitivityPart]] = dict(sensitivity.by_part.items())
    left: dict[tuple[int | None, str, str], str] = {(one.layer, one.role, one.scheme): one.why for one in sensitivity.left_out}
    every, not_taken = [], {}
    for part in stored.parts:
        measured, known = rows.get((part.layer, part.role), {}), {}
        options = [Option(KEPT, part.num_bytes[KEPT], part.rank_bytes[KEPT], 0.0, 0.0, None, None)]
        for scheme in schemes:
            row = measured.get(scheme)
            if scheme in part.refused:
                not_taken[part.layer, part.role, scheme] = part.refused[scheme]
            elif row is None or row.damage_nats is None:
                why = left.get((part.layer, part.role, scheme))
                not_taken[part.layer, part.role, scheme] = f"not measured{f': {why}' if why else ''}"
            else:
                known[scheme] = (row.damage_nats, row.interval)
        used = damages_used(known, is_calibrated=sensitivity.calibration is not None)
        for scheme, (nats, interval) in known.items():
            sizes = part.num_bytes[scheme], part.rank_bytes[scheme]
            options.append(Option(scheme, *sizes, *used[scheme], nats, interval))
        every.append(tuple(options))
    return Choices(stored, tuple(every), not_taken)


# ------------------------------------------------------------------------------------------------ the mix
def mix_of(choices: Choices, problem: Problem, slack: float = SLACK) -> tuple[tuple[int, ...], Solution] | None:
    """(picks, the optimum): the optimum, or what loses at most `slack` more and differs less from layer to layer."""
    best = cheapest(problem)
    if best is None:
        return None
    links = _links(choices)
    most = best.damage * (1 + slack)
    alike = fewest_changes(problem, links, most) if slack and best.damage else None
    if alike is not None and problem.holds(alike) and changes(links, alike) < changes(links, best.picks):
        return alike, best
    return best.picks, best


Links = Sequence[tuple[int, Sequence[int | None]] | None]
"""Of each part the one of its role in the layer before that has it, and of each option the same one there."""


def _links(choices: Choices) -> Links:
    last: dict[str, int] = {}
    found: list[tuple[int, Sequence[int | None]] | None] = []
    for number, part in enumerate(choices.parts):
        before = last.get(part.role)
        last[part.role] = number
        if before is None:
            found.append(None)
            continue
        places = {one.scheme: at for at, one in enumerate(choices.options[before])}
        found.append((before, [places.get(one.scheme) for one in choices.options[number]]))
    return found


def changes(links: Links, picks: Sequence[int]) -> int:
    """Parts that differ from the one before them."""
    return sum(link is not None and link[1][picks[number]] != picks[link[0]] for number, link in enumerate(links))


def frontier_of(choices: Choices, problem: Problem, also: Sequence[int] = ()) -> list[MixPoint]:
    """Optima for budgets from the smallest choice to the largest, those that are alike once. The machine's limits hold.

    also: further budgets, of the parts alone: those of uniform recipes, which then have the best choice of their size beside
    them.
    """
    low, high = problem.smallest[0], sum(max(part) for part in problem.sizes[0])
    # dense where formats are: sizes of the schemes crowd at the low end
    budgets = [low + round((high - low) * (step / (FRONTIER_POINTS - 1)) ** 2) for step in range(FRONTIER_POINTS)]
    found: dict[int, MixPoint] = {}
    for budget in sorted({*budgets, *also}):
        solution = cheapest(Problem(problem.damages, problem.sizes, (budget, *problem.limits[1:])))
        if solution is not None:
            total = choices.total_bytes(solution.picks)
            name = f"{choices.bits_per_weight(total):.2f} bits"
            found.setdefault(total, choices.point(solution.picks, name, "mix", problem))
    rising = sorted(found.values(), key=lambda one: (one.bytes, one.damage_nats))
    return [one for i, one in enumerate(rising) if all(one.damage_nats < before.damage_nats for before in rising[:i])]


# ------------------------------------------------------------------------------------------------ what it is held against
def controls_of(
    choices: Choices, base: PrecisionRecipe, shipped: Sequence[PrecisionRecipe], schemes: Sequence[str]
) -> dict[str, tuple[Literal["uniform", "shipped"], tuple[int, ...]]]:
    """Name -> kind and picks: one scheme wherever a part can take it, then the precisions of assay that the damages can say of.

    One scheme counts if more than half of the weights can take it. A uniform choice that a shipped precision makes has its
    name.
    """
    found: dict[tuple[int, ...], tuple[str, Literal["uniform", "shipped"]]] = {}
    for scheme in schemes:
        wanted = {
            (part.layer, part.role): scheme if any(one.scheme == scheme for one in options) else KEPT
            for part, options in zip(choices.parts, choices.options, strict=True)
        }
        picks = choices.picks_of(wanted)
        of_scheme = sum(part.num_weights for part in choices.parts if wanted[part.layer, part.role] == scheme)
        if picks is not None and 2 * of_scheme > choices.stored.num_weights:  # else it is a recipe of kept parts
            found.setdefault(picks, (f"uniform {scheme}", "uniform"))
    for recipe in shipped:
        settings = ("observer", "mtp", "kv_cache", "calibration", "activations")
        same = all(getattr(recipe, name) == getattr(base, name) for name in settings) and same_mtp(recipe, base)
        if not same or not set(recipe.quantize) <= set(base.quantize):
            continue
        picks = choices.picks_of(
            {(part.layer, part.role): recipe.scheme_of(part.role, part.layer) or KEPT for part in choices.parts}
        )
        if picks is None:
            continue
        before = found.get(picks)
        if before is None:
            found[picks] = (recipe.name, "shipped")
        elif before[0].startswith("uniform "):
            found[picks] = (recipe.name, before[1])
    return {name: (kind, picks) for picks, (name, kind) in found.items()}


def same_mtp(recipe: PrecisionRecipe, base: PrecisionRecipe) -> bool:
    """Whether a quantized MTP block, whose schemes are those of no layer, has the same ones."""
    return base.mtp != "quantize" or [recipe.scheme_of(role, None) for role in base.quantize] == [
        base.scheme_of(role, None) for role in base.quantize
    ]


def advantage_of(choices: Choices, uniform: str, of_uniform: Sequence[int], picks: Sequence[int]) -> Advantage:
    """How much more the uniform recipe loses, and the lower end of that, parts being taken for independent."""
    difference, variance, known = 0.0, 0.0, True
    for options, theirs, ours in zip(choices.options, of_uniform, picks, strict=True):
        if theirs == ours:
            continue
        difference += options[theirs].damage - options[ours].damage
        for one in (options[theirs], options[ours]):
            known = known and one.spread is not None
            variance += (one.spread or 0.0) ** 2
    low = difference - Z_95 * math.sqrt(variance) if known else None
    return Advantage(uniform=uniform, nats=difference, low_nats=low)
