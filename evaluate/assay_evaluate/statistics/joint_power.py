"""What several score gates decide together: chances of PASS and FAIL of a candidate whose true losses are known, by simulation.

The rules are those of `decisions`, over arrays of draws: Tango's score test of pairs, PASS unadjusted, FAIL adjusted over the
tasks (Holm). Tasks are independent of each other: they ask different questions, and a candidate's true loss is fixed.

- One reply to each item: (b, c) of n pairs is multinomial with probabilities (D + loss) / 2 and (D - loss) / 2, D the
  discordance.
- k replies to each item: n k such pairs, independent given the item, with the same loss on every item; the bootstrap over items
  is taken for its normal limit, with the half-width it never falls below (`graded`).
- Clusters: the test by cluster (CR2, t with Bell and McCaffrey's degrees) besides; the larger p counts (`decisions.widen`). No
  cluster effect is assumed: a lossless candidate loses nothing in any of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from assay_evaluate.statistics.clustered import cr2_factors, satterthwaite_degrees
from assay_evaluate.statistics.decisions import Claim
from assay_evaluate.statistics.paired import score_statistic

NUM_DRAWS = 20_000
"""The standard error of a chance is 0.35 points at most."""
SEED = 1
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class ScoreDesign:
    """One score gate and what is assumed of its task.

    num_samples: replies to each item. discordance: share of pairs of replies, one of each side, of which one is right and one
    wrong, if nothing is lost. cluster_sizes: items of each cluster; empty: every item stands for itself.
    """

    task: str
    num_items: int
    margin: float
    discordance: float
    num_samples: int = 1
    claim: Claim = "non_inferior"
    cluster_sizes: tuple[int, ...] = ()


@dataclass(frozen=True)
class Chances:
    """Chances of the overall verdict and of each task's; what is neither PASS nor FAIL is UNDERPOWERED.

    passes_alone, fails_alone: of each task, in the order of the designs; fails_alone is Holm-adjusted like the overall verdict.
    """

    passes: float
    fails: float
    passes_alone: tuple[float, ...]
    fails_alone: tuple[float, ...]


def chances(
    designs: Sequence[ScoreDesign],
    losses: Sequence[float],
    *,
    level: float = 0.95,
    min_items: int = 30,
    holm: bool = True,
    num_draws: int = NUM_DRAWS,
    seed: int = SEED,
) -> Chances:
    """Chances of the verdicts on a candidate that truly loses `losses`, one for each design. The same seed, the same result.

    A loss larger than the discordance raises it to the loss. ValueError without designs, or for a loss outside (-1, 1).
    """
    if not designs:
        raise ValueError("no design: without a score gate nothing passes")
    if any(not -1 < loss < 1 for loss in losses):
        raise ValueError(f"losses {list(losses)} must lie between -1 and 1")
    rng, alpha = np.random.default_rng(seed), (1 - level) / 2
    drawn = [_p_values(design, loss, num_draws, rng) for design, loss in zip(designs, losses, strict=True)]
    p_pass, p_fail = (np.stack(side) for side in zip(*drawn, strict=True))
    failed = (_holm(p_fail) if holm else p_fail) < alpha
    enough = np.array([[design.num_items >= min_items] for design in designs])
    passed = (p_pass < alpha) & enough & ~failed
    return Chances(
        passes=float(passed.all(axis=0).mean()),
        fails=float(failed.any(axis=0).mean()),
        passes_alone=tuple(float(share) for share in passed.mean(axis=1)),
        fails_alone=tuple(float(share) for share in failed.mean(axis=1)),
    )


def _p_values(design: ScoreDesign, loss: float, num_draws: int, rng: np.random.Generator) -> tuple[Floats, Floats]:
    """(p of the claim, p of its opposite) of every draw."""
    drawn = _Draws.of(design, loss, num_draws, rng)
    beyond = drawn.p_at_least(design.margin)
    if design.claim == "non_inferior":
        return beyond, drawn.p_at_most(design.margin)
    gain = drawn.p_at_most(-design.margin)
    return np.maximum(beyond, gain), np.minimum(drawn.p_at_most(design.margin), drawn.p_at_least(-design.margin))


@dataclass(frozen=True)
class _Draws:
    """Discordant pairs by draw and cluster: b and c are (draws, clusters)."""

    b_DC: Floats
    c_DC: Floats
    sizes_C: Floats
    num_samples: int
    has_clusters: bool

    @classmethod
    def of(cls, design: ScoreDesign, loss: float, num_draws: int, rng: np.random.Generator) -> _Draws:
        rate = max(design.discordance, abs(loss))
        split = [(rate + loss) / 2, (rate - loss) / 2, 1 - rate]
        sizes = np.array(design.cluster_sizes or (design.num_items,))
        found = rng.multinomial(sizes * design.num_samples, split, size=(num_draws, len(sizes))).astype(np.float64)
        return cls(found[..., 0], found[..., 1], sizes.astype(np.float64), design.num_samples, bool(design.cluster_sizes))

    @property
    def num_items(self) -> int:
        return int(self.sizes_C.sum())

    def p_at_least(self, loss: float) -> Floats:
        """One-sided p of H0: at least `loss` is lost."""
        alone = self._z(loss)
        p = stats.norm.cdf(alone)
        return np.asarray(np.maximum(p, stats.t.cdf(*self._t(loss))) if self.has_clusters else p)

    def p_at_most(self, loss: float) -> Floats:
        p = stats.norm.sf(self._z(loss))
        return np.asarray(np.maximum(p, stats.t.sf(*self._t(loss))) if self.has_clusters else p)

    def _z(self, loss: float) -> Floats:
        """Items taken for independent: how far the seen loss lies above `loss`, in standard errors."""
        b, c, n = self.b_DC.sum(axis=1), self.c_DC.sum(axis=1), self.num_items
        if self.num_samples == 1:
            return score_statistic(loss, b, c, n)
        pairs = n * self.num_samples
        seen = (b - c) / pairs
        spread = np.maximum((b + c) / pairs - seen**2, 1e-12) / self.num_samples
        apart = np.abs(seen - loss)
        # No nearer than the interval of equal differences reaches: z^2 / (n + z^2).
        least = np.sqrt(n * apart / np.maximum(1 - apart, 1e-12))
        return np.asarray(np.sign(seen - loss) * np.minimum(apart / np.sqrt(spread / n), least))

    def _t(self, loss: float) -> tuple[Floats, float]:
        """(t, degrees of freedom) of the sum over clusters (`clustered.clustered_mean`)."""
        drops = (self.b_DC - self.c_DC) / self.num_samples
        seen = drops.sum(axis=1) / self.num_items
        residual = drops - seen[:, None] * self.sizes_C
        error = np.sqrt((residual**2 * cr2_factors(self.sizes_C)).sum(axis=1)) / self.num_items
        return (seen - loss) / np.maximum(error, 1e-12), satterthwaite_degrees(self.sizes_C)


def _holm(p_TD: Floats) -> Floats:
    """`decisions.holm` of every draw; rows are tasks."""
    order = np.argsort(p_TD, axis=0)
    left = np.arange(len(p_TD), 0, -1)[:, None]
    stepped = np.maximum.accumulate(np.minimum(1.0, left * np.take_along_axis(p_TD, order, axis=0)), axis=0)
    adjusted = np.empty_like(p_TD)
    np.put_along_axis(adjusted, order, stepped, axis=0)
    return adjusted
