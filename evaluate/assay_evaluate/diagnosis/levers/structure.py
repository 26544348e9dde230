"""Does a changed parameter change how something fails, or only how often? Statistics of two observations.

The method is that of the people who found vLLM's stale Mamba slots (AI21, "One token to corrupt them all" and "Stride and
Prejudice"): look for the variable that changes the structure of a failure, not its size. A failure that needs more than N cache
slots vanishes with a smaller cache; one that is merely rarer there does not depend on it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from assay.records.diagnosis.lever import Effect, Observation

ALPHA = 0.01
"""Of all levers together (Holm): a lever named wrongly costs an engineer a day."""
EXPLAINED_BY: dict[str, tuple[str, ...]] = {
    "max_num_seqs": ("concurrency",),
    "n": ("concurrency",),
    "concurrency": ("kv_cache",),
    "prefix_caching": ("kv_cache",),
}
"""Lever -> levers that, if they work as well, are the reason: fewer sequences at once need fewer slots, but a smaller cache
that still holds all of them does not lower the number of sequences. Earlier in a chain of reasons is better."""


@dataclass(frozen=True)
class Change:
    """What one comparison says, before adjustment for the others. `p_value` belongs to `effect`."""

    effect: Effect
    p_value: float
    sentence: str


def compare_observations(before: Observation, after: Observation) -> list[Change]:
    """Every way in which the two differ, each with its p value; most telling first. Nothing is left out for being unlikely."""
    from scipy.stats import fisher_exact

    k0, n0, k1, n1 = len(before.failures), before.num_requests, len(after.failures), after.num_requests
    p_rate = float(fisher_exact([[k0, n0 - k0], [k1, n1 - k1]]).pvalue)
    counts = f"{k0} of {n0} requests failed before, {k1} of {n1} after"
    if k0 and not k1:
        return [Change("gone", p_rate, f"the failure is gone: {counts}")]
    if k1 and not k0:
        return [Change("appears", p_rate, f"the failure appears: {counts}")]
    if not k0:
        return [Change("none", 1.0, counts)]
    return [
        Change("other kind", p_kinds(before, after), f"other symptoms: {_kinds(before)} before, {_kinds(after)} after"),
        Change("moved", p_positions(before, after), f"elsewhere: {_positions(before)} before, {_positions(after)} after"),
        Change("moved", p_requests(before, after), "other requests fail than did before, where the same ones had failed again"),
        Change("size", p_rate, f"only the rate changes: {counts}"),
    ]


def p_kinds(before: Observation, after: Observation) -> float:
    """That kinds of failures are drawn from one distribution: exact for two kinds, else by permutation (seeded)."""
    from scipy.stats import fisher_exact

    sides = [Counter(failure.kind for failure in one.failures) for one in (before, after)]
    kinds = sorted(sides[0] | sides[1])
    if len(kinds) < 2:
        return 1.0
    table = [[side[kind] for kind in kinds] for side in sides]
    if len(kinds) == 2:
        return float(fisher_exact(table).pvalue)
    import numpy as np

    return float(fisher_exact(table, method=_permutations(np.random.default_rng(0))).pvalue)


def _permutations(rng: object) -> object:
    from scipy.stats import PermutationMethod

    return PermutationMethod(n_resamples=9999, rng=rng)


def p_positions(before: Observation, after: Observation) -> float:
    """That first wrong tokens stand at the same positions (Kolmogorov-Smirnov, two samples)."""
    from scipy.stats import ks_2samp

    sides = [[f.position for f in one.failures if f.position is not None] for one in (before, after)]
    if min(map(len, sides)) < 5:
        return 1.0
    return float(ks_2samp(*sides).pvalue)


def p_requests(before: Observation, after: Observation) -> float:
    """That the same requests fail as did before. 1 where not even two passes before had failing requests in common."""
    from scipy.stats import binom

    if len(before.passes) < 2:
        return 1.0
    first, second, *_ = ({failure.request for failure in one} for one in before.passes)
    other = {failure.request for failure in after.passes[0]}
    each = before.num_requests // len(before.passes)
    repeated, expected = len(first & second), min(len(first), len(second))
    if not expected or _p_overlap(repeated, len(first), len(second), each) > ALPHA:
        return 1.0
    common = min(len(first), len(other))
    if not common:
        return 1.0
    # Jeffreys' estimate: requests that failed again by chance alone must not count as certain to
    share = (repeated + 0.5) / (expected + 1)
    return float(binom.cdf(len(first & other), common, share))


def _p_overlap(overlap: int, one: int, other: int, total: int) -> float:
    """That so many are in both of two random subsets."""
    from scipy.stats import hypergeom

    return float(hypergeom.sf(overlap - 1, total, one, other))


def _kinds(one: Observation) -> str:
    return ", ".join(f"{kind} {count}" for kind, count in Counter(f.kind for f in one.failures).most_common())


def _positions(one: Observation) -> str:
    found = sorted(f.position for f in one.failures if f.position is not None)
    return f"{found[0]} to {found[-1]}, median {found[len(found) // 2]}" if found else "none known"


def choose_changes(changes: Sequence[Sequence[Change]], alpha: float = ALPHA) -> list[Change]:
    """Of every lever's changes the first that chance does not explain, p values Holm-adjusted over all levers and changes."""
    from assay_evaluate.statistics.decisions import holm

    flat = [change.p_value for several in changes for change in several]
    adjusted = iter(holm(flat))
    chosen: list[Change] = []
    for several in changes:
        own = [Change(change.effect, next(adjusted), change.sentence) for change in several]
        real = [change for change in own if change.p_value < alpha and change.effect != "none"]
        if real:
            chosen.append(real[0])
        else:
            chosen.append(Change("none", min(change.p_value for change in own), f"no difference ({own[-1].sentence})"))
    return chosen


def pick(effects: Sequence[tuple[str, Effect]]) -> tuple[str | None, tuple[str, ...]]:
    """(the lever, others that its working explains). A failure that goes away outranks one that changes."""
    ranks: list[Effect] = ["gone", "appears", "other kind", "moved"]
    working = [(lever, effect) for lever, effect in effects if effect in ranks]
    if not working:
        return None, ()
    best = min(ranks.index(effect) for _, effect in working)
    names = [lever for lever, effect in working if ranks.index(effect) == best]
    reasons = [lever for lever in names if not any(reason in names for reason in EXPLAINED_BY.get(lever, ()))]
    lever = (reasons or names)[0]
    return lever, tuple(name for name, _ in working if name != lever)
