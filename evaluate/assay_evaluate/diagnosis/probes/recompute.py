"""Generated against recomputed log-probability: the same server, the same tokens, once by decoding and once by prefill.

Statistic: mean exp|Δ| over tokens (NeMo-RL's token error; healthy up to about 1.03 on GPUs, 1 on a CPU), per sequence and
over all, and whether |Δ| jumps with the slot, the position or the concurrency. NeMo-RL PR #2141 found one engine at 322;
ServiceNow and AI21 found cache bugs by the same comparison.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from assay.records.probe import ProbeResult
from assay_evaluate.client.exchanges import Exchange
from assay_evaluate.diagnosis.probes.probe_session import ProbeSession, RescoredReply, not_run, witness
from assay_evaluate.statistics.trends import BestSplit, find_step

MEAN_LIMIT = 1.05
"""Of mean exp|Δ| over all tokens."""
LEAST_EXCESS = 0.05
"""A sequence is an event when its mean exp|Δ| - 1 exceeds this ..."""
EXCESS_FACTOR = 5.0
"""... and this many times the median sequence's: a server is measured by its own noise."""
HOPELESS = 2.0
"""A sequence above it is an event whatever the others are (NeMo-RL masks it: seq_logprob_error_threshold)."""
BIN_TOKENS = 16
LARGEST = 20.0
"""Nats: |Δ| is capped here, so that one impossible token does not overflow the mean."""


@dataclass(frozen=True, eq=False)
class Recomputed:
    """One reply: |Δ| of its P tokens (NaN where one side has none)."""

    exchange: Exchange
    delta_P: np.ndarray
    num_prompt_tokens: int

    @property
    def error(self) -> float:
        """Mean exp|Δ| of the sequence."""
        return float(np.nanmean(np.exp(self.delta_P)))

    @property
    def worst(self) -> int:
        """The position that differs most."""
        return int(np.nanargmax(self.delta_P))


def compare(scored: Sequence[RescoredReply]) -> list[Recomputed]:
    """|Δ| of every reply that has both kinds of log-probabilities for at least one token."""
    compared = []
    for reply in scored:
        if reply.prefill is None or not reply.exchange.rows:
            continue
        generated = np.array([row.logprob for row in reply.exchange.rows])
        count = min(len(generated), len(reply.prefill.chosen_P))
        with np.errstate(invalid="ignore"):
            delta_P = np.minimum(np.abs(generated[:count] - reply.prefill.chosen_P[:count].astype(float)), LARGEST)
        if np.isfinite(delta_P).any():
            compared.append(Recomputed(reply.exchange, delta_P, len(reply.exchange.reply.prompt_token_ids or ())))
    return compared


def probe_recompute(session: ProbeSession) -> ProbeResult:
    """Replies at full concurrency, greedy and sampled, and some alone. Alarm: the mean, a sequence, or a step."""
    if (reason := session.reason_unscorable) is not None:
        return not_run("recompute", "request", reason)
    full = compare([*session.greedy_scored, *session.sampled_scored])
    alone = compare(session.score(session.alone, 1))
    if not full:
        return not_run("recompute", "request", "no reply could be scored again")
    errors = np.array([reply.error for reply in full])
    limit = min(HOPELESS, 1 + max(LEAST_EXCESS, EXCESS_FACTOR * (float(np.median(errors)) - 1)))
    beyond = [number for number, error in enumerate(errors) if error > limit]
    deltas = np.concatenate([reply.delta_P for reply in full])
    mean = _mean_exp(full)
    steps = find_steps(full, alone)
    others = [reply for reply, error in zip(full, errors, strict=True) if error <= limit]
    # one that is far off lifts the mean, and looks like a step: do those that are no events alarm together?
    stands = (
        not others or _mean_exp(others) > MEAN_LIMIT or any(step.is_structural for step in find_steps(others, alone).values())
    )
    alarms = []
    if mean > MEAN_LIMIT:
        alarms.append(f"mean exp|Δ| is {mean:.4g} (limit {MEAN_LIMIT})")
    if beyond:
        alarms.append(f"{len(beyond)} of {len(full)} replies are above {limit:.4g}")
    alarms += [step.text(what) for what, step in steps.items() if step.is_structural]
    return session.result(
        "recompute",
        trials=len(full),
        unit="request",
        alarms=alarms,
        witnesses=[
            witness(reply.exchange, "recomputed otherwise", reply.worst, f"mean exp|Δ| <= {limit:.4g}", f"{reply.error:.4g}")
            for reply in (full[number] for number in beyond)
        ],
        first_event_at=beyond[0] + 1 if beyond else None,
        stands_without_events=stands,
        details={
            "mean_exp_delta": mean,
            "mean_exp_delta_alone": _mean_exp(alone) if alone else None,
            "largest_delta_nats": float(np.nanmax(deltas)),
            "p99_delta_nats": float(np.nanquantile(deltas, 0.99)),
            "sequence_limit": limit,
            "num_tokens": int(np.isfinite(deltas).sum()),
            **{
                f"step_{what.replace(' ', '_')}": {
                    "threshold": step.threshold, "below_nats": step.below, "above_nats": step.above,
                    "p_value": step.p_value, "spearman_rho": step.rho, "is_structural": step.is_structural,
                }
                for what, step in steps.items()
            },
        },
    )  # fmt: skip


def _mean_exp(replies: Sequence[Recomputed]) -> float:
    return float(np.nanmean(np.exp(np.concatenate([reply.delta_P for reply in replies]))))


def find_steps(full: Sequence[Recomputed], alone: Sequence[Recomputed]) -> dict[str, BestSplit]:
    """Against the slot and the concurrency by sequence, against the position by stretches of 16 tokens."""
    axes = {
        "slot": [(reply.exchange.slot, float(np.nanmean(reply.delta_P))) for reply in full],
        "concurrency": [(reply.exchange.concurrency, float(np.nanmean(reply.delta_P))) for reply in [*alone, *full]],
        "reply position": _bins(full, absolute=False),
        "text position": _bins(full, absolute=True),
    }
    steps = {name: find_step([x for x, _ in pairs], [y for _, y in pairs]) for name, pairs in axes.items()}
    return {name: step for name, step in steps.items() if step is not None}


def _bins(full: Sequence[Recomputed], *, absolute: bool) -> list[tuple[int, float]]:
    """(first position, mean |Δ|) of every stretch: tokens of one stretch are not independent, stretches nearly are."""
    bins = []
    for reply in full:
        deltas: dict[int, list[float]] = defaultdict(list)
        for position, delta in enumerate(reply.delta_P):
            if math.isfinite(delta):
                at = position + (reply.num_prompt_tokens if absolute else 0)
                deltas[at // BIN_TOKENS * BIN_TOKENS].append(float(delta))
        bins += [(start, sum(stretch) / len(stretch)) for start, stretch in sorted(deltas.items())]
    return bins
