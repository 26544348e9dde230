"""Replies of reference and candidate to one task, drawn for many runs at once, and what its gate sees of them at each look.

The population behind a discordance D (the share of pairs of replies, one of each side, of which one is right and one wrong) and
a loss L, which is taken where the two sides differ:

- reply noise: a share `noise` of D comes from items that are open, right in half of the replies of a model. There are
  2 D noise of them; the candidate is right with (1 - L / D) / 2.
- the rest of D are items that only one side gets right, in every reply: (D + L) / 2 D of them only the reference.
- what L is above D comes from items that the candidate alone gets wrong, always.

So of one reply to each item (b, c) is multinomial with (D + L) / 2 and (D - L) / 2, as in `power`. The tests are those of the
verdicts: `paired`, `graded` and `clustered`, over arrays.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from assay_evaluate.statistics.clustered import cr2_factors, satterthwaite_degrees
from assay_evaluate.statistics.decisions import Claim
from assay_evaluate.statistics.graded import POWERS, MeanDifference
from assay_evaluate.statistics.paired import exact_tail, paired_difference, score_statistic
from assay_evaluate.statistics.uneven_clusters import UnevenMean

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]
SMALL_P = 0.05
"""By the normal tail: where p is larger, the exact one decides nothing either."""


class LookDesign(NamedTuple):
    """What is compared with the margin at one look: replies of either side to each of so many items, a planned share of all."""

    reference_samples: int
    candidate_samples: int
    num_items: int
    share: float = 1.0


class Assumption(NamedTuple):
    """Of two runs of one model. noise: share of the discordance that other replies would not show again."""

    discordance: float
    noise: float = 1.0


@dataclass(frozen=True)
class ScoreDesign:
    """One score gate and what is assumed of its task.

    looks: ascending. cluster_sizes: items of each cluster; empty: every item stands for itself.
    """

    task: str
    margin: float
    assumed: Assumption
    looks: tuple[LookDesign, ...]
    claim: Claim = "non_inferior"
    cluster_sizes: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        discordance, noise = self.assumed
        if not 0 <= discordance <= 0.5:
            raise ValueError(f"{self.task}: discordance {discordance} must lie between 0 and 0.5, that of guessing")
        if not 0 <= noise <= 1:
            raise ValueError(f"{self.task}: noise {noise} must lie between 0 and 1")
        if self.cluster_sizes and {look.num_items for look in self.looks} != {sum(self.cluster_sizes)}:
            raise ValueError(f"{self.task}: clusters of {sum(self.cluster_sizes)} items, looks at {self.looks}")

    @property
    def num_items(self) -> int:
        return self.looks[-1].num_items


@dataclass(frozen=True)
class LookEvidence:
    """One look of every run. information: 1 / variance of the difference."""

    design: LookDesign
    p_pass: Floats
    p_fail: Floats
    information: Floats


# ------------------------------------------------------------------------------------------------ what a look says
@dataclass(frozen=True)
class Evidence:
    """Sums over the items of every run: of the differences and their powers (`POWERS`); by cluster where there are some."""

    num_items: int
    is_sampled: bool
    """Several replies to an item on some side: over items' shares. Else exact, of right and wrong."""
    sums_DP: tuple[Floats, ...]
    totals_DC: Floats | None
    sizes_C: Floats

    @property
    def drop(self) -> Floats:
        return self.sums_DP[0] / self.num_items

    @property
    def information(self) -> Floats:
        """As `Pairs.variance` has it."""
        error_D = np.zeros_like(self.drop) if self._uneven is None else self._uneven.error
        return np.asarray(1 / np.maximum(self._graded.variance, error_D**2))

    def p_at_least(self, loss: float) -> Floats:
        """One-sided p of H0: at least `loss` is lost; of one reply to each item as `decisions.noninferiority_p`."""
        lost, gained = self._discordant
        if self.is_sampled:
            p = self._graded.p_at_least(loss)
        elif loss < 0:
            p = self._exact_tail(-loss, gained, lost)
        else:
            p = np.asarray(stats.norm.cdf(score_statistic(loss, lost, gained, self.num_items)))
        return p if self._uneven is None else np.maximum(p, self._uneven.p_at_least(loss))

    def p_at_most(self, loss: float) -> Floats:
        """As `decisions.inferiority_p`."""
        lost, gained = self._discordant
        if self.is_sampled:
            p = self._graded.p_at_most(loss)
        elif loss > 0:
            p = self._exact_tail(loss, lost, gained)
        else:
            p = np.asarray(stats.norm.sf(score_statistic(loss, lost, gained, self.num_items)))
        return p if self._uneven is None else np.maximum(p, self._uneven.p_at_most(loss))

    def ends(self, levels: Floats) -> tuple[Floats, Floats]:
        """Of the interval of the drop, at a level for each run."""
        low, high = self._graded.ends(levels) if self.is_sampled else self._tango(levels)
        if (uneven := self._uneven) is None:
            return low, high
        below, above = uneven.ends(levels)
        return np.maximum(np.minimum(low, below), -1.0), np.minimum(np.maximum(high, above), 1.0)

    @property
    def _graded(self) -> MeanDifference:
        return MeanDifference.of_sums(self.num_items, self.sums_DP)

    @property
    def _discordant(self) -> tuple[Floats, Floats]:
        """(b, c) of differences that are -1, 0 or 1."""
        total, squares, *_ = self.sums_DP
        return (squares + total) / 2, (squares - total) / 2

    def _exact_tail(self, loss: float, lost: Floats, gained: Floats) -> Floats:
        """Of the tables for which the normal tail is small; elsewhere that one, as neither decides."""
        p = np.asarray(stats.norm.sf(score_statistic(loss, lost, gained, self.num_items)))
        small = p < SMALL_P
        tables, index = np.unique(np.column_stack([lost, gained])[small], axis=0, return_inverse=True)
        p[small] = exact_tail(loss, tables[:, 0], tables[:, 1], self.num_items)[index.ravel()]
        return p

    def _tango(self, levels: Floats) -> tuple[Floats, Floats]:
        tables = np.column_stack([*self._discordant, levels])
        different, index = np.unique(tables, axis=0, return_inverse=True)
        intervals = [_tango_ends(round(b), round(c), self.num_items, float(level)) for b, c, level in different]
        ends = np.array(intervals)[index.ravel()]
        return ends[:, 0], ends[:, 1]

    @functools.cached_property
    def _uneven(self) -> UnevenMean | None:
        """Of the means over clusters (`clustered.clustered_difference`). None: there are no clusters."""
        if self.totals_DC is None:
            return None
        sizes = tuple(self.sizes_C.astype(int).tolist())
        degrees = satterthwaite_degrees(self.sizes_C)
        return UnevenMean.of_totals(self.totals_DC, self.sums_DP[1], sizes, cr2_factors(self.sizes_C), degrees)


@functools.lru_cache(maxsize=1 << 16)
def _tango_ends(b: int, c: int, n: int, level: float) -> tuple[float, float]:
    """Of one table, which comes up again in other draws, and for the other end of the interval: an exact end takes 10 ms."""
    interval = paired_difference(b, c, n, level)
    return interval.low, interval.high


# ------------------------------------------------------------------------------------------------ the draws
class Draws:
    """All runs of one task: of each run, and cluster, how many items are in which state. `see` draws one look after the other.

    A state of an open item is how often each side was right; lost and gained items are states of their own.
    """

    def __init__(self, design: ScoreDesign, loss: float, num_draws: int, rng: np.random.Generator) -> None:
        """ValueError for a loss outside (-1, 1)."""
        if not -1 < loss < 1:
            raise ValueError(f"{design.task}: loss {loss} must lie between -1 and 1")
        self._design, self._rng = design, rng
        (self._open, *self._fixed), self._right = _population(design.assumed, loss)
        self._sizes_C = np.array(design.cluster_sizes or (0,), dtype=np.int64)
        shape = (num_draws, len(self._sizes_C))
        self._fixed_DCF = np.zeros((*shape, 2), dtype=np.int64)
        self._open_DCRK = np.zeros((*shape, 1, 1), dtype=np.int64)
        """By right replies of reference and candidate."""
        self._num_items = 0

    def see(self, number: int) -> Evidence:
        """The look of that number; those before it have been seen."""
        look = self._design.looks[number]
        self._ask(look.reference_samples, look.candidate_samples)
        self._add(look)
        differences_S = np.concatenate([[1.0, -1.0], self._differences(look).ravel()])
        counts_DCS = np.concatenate([self._fixed_DCF, self._open_DCRK.reshape(*self._open_DCRK.shape[:2], -1)], axis=2)
        sums = tuple((counts_DCS @ differences_S**power).sum(axis=1) for power in POWERS)
        by_cluster = counts_DCS @ differences_S if self._design.cluster_sizes else None
        is_sampled = (look.reference_samples, look.candidate_samples) != (1, 1)
        return Evidence(look.num_items, is_sampled, sums, by_cluster, self._sizes_C.astype(np.float64))

    def _ask(self, num_reference: int, num_candidate: int) -> None:
        """More replies to the items that there are: so many of either side in all."""
        have_reference, have_candidate = self._open_DCRK.shape[2] - 1, self._open_DCRK.shape[3] - 1
        if not self._num_items or (have_reference, have_candidate) == (num_reference, num_candidate):
            return
        shares = self._shares(num_reference - have_reference, num_candidate - have_candidate)
        after = np.zeros((*self._open_DCRK.shape[:2], num_reference + 1, num_candidate + 1), dtype=np.int64)
        for right in range(have_reference + 1):
            for other in range(have_candidate + 1):
                drawn = self._rng.multinomial(self._open_DCRK[:, :, right, other], shares.ravel())
                drawn = drawn.reshape(*drawn.shape[:2], *shares.shape)
                after[:, :, right : right + shares.shape[0], other : other + shares.shape[1]] += drawn
        self._open_DCRK = after

    def _add(self, look: LookDesign) -> None:
        """The items that are asked for the first time."""
        new = look.num_items - self._num_items
        if not new:
            return
        states = self._open * self._shares(look.reference_samples, look.candidate_samples)
        sizes_C = self._sizes_C if self._design.cluster_sizes else np.array([new])
        shares = [*self._fixed[:2], *states.ravel()]
        counts = self._rng.multinomial(sizes_C, [*shares, max(0.0, 1 - sum(shares))], size=self._fixed_DCF.shape[:2])
        self._fixed_DCF = self._fixed_DCF + counts[..., :2]
        new_DCRK = counts[..., 2:-1].reshape(*counts.shape[:2], *states.shape)
        self._open_DCRK = new_DCRK if not self._num_items else self._open_DCRK + new_DCRK
        self._num_items = look.num_items

    def _shares(self, num_reference: int, num_candidate: int) -> Floats:
        """Chances of so many right replies to an open item: (reference, candidate)."""
        right, other = (
            stats.binom.pmf(range(num_reference + 1), num_reference, 0.5),
            stats.binom.pmf(range(num_candidate + 1), num_candidate, self._right),
        )
        return np.outer(right, other)

    @staticmethod
    def _differences(look: LookDesign) -> Floats:
        """Reference minus candidate, of every state of an open item."""
        reference, candidate = np.arange(look.reference_samples + 1), np.arange(look.candidate_samples + 1)
        return np.asarray(reference[:, None] / look.reference_samples - candidate[None, :] / look.candidate_samples)


def _population(assumed: Assumption, loss: float) -> tuple[list[float], float]:
    """(shares of the items that are open, lost, gained, alike; chance of the candidate to get an open one right)."""
    discordance, noise = assumed
    lean = float(np.clip(loss / discordance, -1, 1)) if discordance > 0 else float(np.sign(loss))
    beyond = max(abs(loss) - discordance, 0.0)
    lasting = discordance * (1 - noise)
    lost = lasting * (1 + lean) / 2 + (beyond if loss > 0 else 0.0)
    gained = lasting * (1 - lean) / 2 + (beyond if loss < 0 else 0.0)
    is_open = 2 * discordance * noise
    if is_open + lost + gained > 1:  # so large a loss leaves fewer items open
        is_open = 2 * (1 - abs(loss))
        lost, gained = (1 - is_open, 0.0) if loss > 0 else (0.0, 1 - is_open)
    return [is_open, lost, gained, max(0.0, 1 - is_open - lost - gained)], (1 - lean) / 2
