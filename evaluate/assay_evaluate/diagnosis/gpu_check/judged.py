"""Native answers against emulated ones, within stated bounds.

Both servers compute in BF16 and round at other places, so their log-probabilities differ; where activations are quantized, a
rounding that falls to the other side is carried on as a whole step of the format. How much that is was measured without a GPU,
as emulation in BF16 against emulation in FP32 of one checkpoint; the bounds are three to six times that, because a native
kernel adds roundings of its own (docs/gpu-check.md has the figures).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from assay.records.preflight.gpu_check import CheckOutcome, Drafts, FormatCheck, Greedy, Kernels, Logprobs
from assay_evaluate.client.journal import TokenLogprobs
from assay_evaluate.client.logprobs import TokenRow
from assay_evaluate.diagnosis.gpu_check.asked import Greedily


class Bounds(NamedTuple):
    """In nats: of the mean difference, and of the largest at tokens of some probability."""

    mean: float
    largest: float


BOUNDS = {16: Bounds(0.01, 0.2), 8: Bounds(0.02, 0.5), 4: Bounds(0.05, 3.0)}
"""Bits of activations -> bounds."""
SEEN_PROBABILITY = 1e-3
"""Below it a difference of log-probabilities says more about rounding than about two kernels."""
LEAST_SHARE_OF_EMULATED = 0.9
"""Accepted drafts, as a share of what emulation accepts. A head without its experts is accepted at 0 %."""


def compare_replies(native: Sequence[Sequence[TokenRow]], emulated: Sequence[Sequence[TokenRow]], tie_bound: float) -> Greedy:
    """Token by token until a pair of replies parts; behind that they are other texts."""
    num_tokens = num_equal = num_ties = 0
    first = None
    for number, (ours, theirs) in enumerate(zip(native, emulated, strict=True)):
        at = next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=True)) if a.token != b.token), None)
        num_tokens += len(theirs) if at is None else at
        if at is None:
            num_equal += 1
        elif (margin := _margin(theirs[at], ours[at])) <= tie_bound:
            num_ties += 1
        elif first is None:
            first = f"reply {number} parts at token {at}, where emulation prefers its own by {margin:.2f} nats"
    return Greedy(
        num_replies=len(native), num_tokens=num_tokens, num_equal=num_equal, num_ties=num_ties, tie_bound=tie_bound,
        first=first,
    )  # fmt: skip


def _margin(emulated: TokenRow, native: TokenRow) -> float:
    """Nats by which emulation likes its own token better than the native one; infinity if it does not list that."""
    found = dict(emulated.top).get(native.token, -math.inf)
    return emulated.logprob - found if math.isfinite(found) else math.inf


def compare_scores(native: Sequence[TokenLogprobs], emulated: Sequence[TokenLogprobs], bounds: Bounds) -> Logprobs:
    """Of the tokens that stand in the texts. A value that is not a number is infinitely far off."""
    ours_N, theirs_N = (np.concatenate([one.chosen_P for one in side]).astype(np.float64) for side in (native, emulated))
    apart_N = np.abs(ours_N - theirs_N)
    apart_N = np.where(np.isnan(apart_N), np.inf, apart_N)
    seen_N = apart_N[~(np.exp(theirs_N) < SEEN_PROBABILITY)]
    return Logprobs(
        num_tokens=len(apart_N),
        mean_difference=_finite(apart_N.mean()),
        max_difference=_finite(seen_N.max(initial=0.0)),
        mean_bound=bounds.mean,
        max_bound=bounds.largest,
    )


def _finite(value: float) -> float:
    """Records hold no infinity: what is not a number is as far off as any number can be."""
    return min(float(value), float(np.finfo(np.float32).max))


def compare_drafts(native: Greedily, emulated: Greedily) -> Drafts | None:
    """None: the emulated server drafted nothing, so nothing is expected of the native one."""
    if not emulated.num_drafted:
        return None
    emulated_share = emulated.num_accepted / emulated.num_drafted
    return Drafts(
        num_drafted=native.num_drafted,
        accepted_share=native.num_accepted / native.num_drafted if native.num_drafted else 0.0,
        emulated_share=emulated_share,
        least_share=LEAST_SHARE_OF_EMULATED * emulated_share,
    )


def judged(check: FormatCheck) -> FormatCheck:
    """The check with its outcome. What was refused or could not be asked stands in its reasons already."""
    failed = [*_failures(check)]
    outcome: CheckOutcome = "FAIL" if failed else "NOT MEASURED" if check.reasons else "PASS"
    return check.model_copy(update={"outcome": outcome, "reasons": (*failed, *check.reasons)})


def _failures(check: FormatCheck) -> Sequence[str]:
    found: list[str] = []
    if (kernels := check.kernels) is not None:
        found += _other_kernels(kernels)
    if (greedy := check.greedy) is not None and greedy.first is not None:
        found.append(f"greedy replies differ: {greedy.first} (a tie is up to {greedy.tie_bound:g})")
    if (logprobs := check.logprobs) is not None:
        mean, largest = logprobs.mean_difference, logprobs.max_difference
        if mean > logprobs.mean_bound or largest > logprobs.max_bound:
            found.append(
                f"log-probabilities differ by {mean:.3g} nats on average and {largest:.3g} at most "
                f"(bounds {logprobs.mean_bound:g} and {logprobs.max_bound:g})"
            )
    if (drafts := check.drafts) is not None and drafts.accepted_share < drafts.least_share:
        found.append(
            f"{drafts.accepted_share:.0%} of {drafts.num_drafted} drafted tokens are accepted, emulation accepts "
            f"{drafts.emulated_share:.0%}: look for missing or damaged weights of the MTP head"
        )
    if (ids := check.exact_ids) is not None and ids.max_difference > ids.bound:
        found.append(
            f"prompt_logprob_token_ids answers other values than prompt_logprobs: {ids.max_difference:.3g} nats apart "
            f"(bound {ids.bound:g})"
        )
    return found


def _other_kernels(kernels: Kernels) -> Sequence[str]:
    return [
        f"{one.what}: the replay foresaw {one.kernel}, which no line of the log names"
        for one in kernels.foreseen or ()
        if one.line is None
    ]
