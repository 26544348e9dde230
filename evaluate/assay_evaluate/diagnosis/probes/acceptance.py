"""Acceptance of drafted tokens, per request: the best free alarm for garbled serving (z.ai, "Scaling Pain").

Draft and target that see different caches accept little (below 1.4 tokens per step after 128 tokens); a loop accepts nearly
everything (rate above 0.96). Both limits are of production at T=1; a request must also stand out from the run's own rate, and
all requests together are held against the expected length, where one is given: a head without its experts still drafts well.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from scipy import stats

from assay.records.base import Interval
from assay.records.probe import ProbeResult, Value
from assay_evaluate.asking.acceptance import COUNTERS
from assay_evaluate.client.exchanges import Exchange
from assay_evaluate.diagnosis.probes.probe_session import ProbeSession, not_run, witness
from assay_evaluate.statistics.clustered import cluster_bootstrap_ratio

ENOUGH_TOKENS = 128
SHORT_LENGTH = 1.4
"""Tokens per step."""
HIGH_RATE = 0.96
STANDS_OUT = 1e-4
"""Binomial p value of a request against the run's rate, times the number of requests."""
BELOW_EXPECTED = 0.95
"""Drafts accepted per step, as a part of those expected, that the interval over all replies must not lie wholly below."""
NOTHING_ACCEPTED = 1.1
"""Mean length of all requests below which the draft head is as good as not there, whatever is expected."""
ENOUGH_DRAFTS = 200
WHY_NOT_TOLD = "replies do not tell their acceptance; start vLLM with --per-request-spec-decode-metrics summary"


@dataclass(frozen=True)
class Drafts:
    """What one reply says of its drafts."""

    exchange: Exchange
    num_drafts: int
    num_draft_tokens: int
    num_accepted: int

    @property
    def length(self) -> float:
        """Tokens per verification step."""
        return 1 + self.num_accepted / self.num_drafts

    @property
    def rate(self) -> float:
        return self.num_accepted / self.num_draft_tokens


def probe_acceptance(session: ProbeSession) -> ProbeResult:
    """Long replies sampled at T=1, at full concurrency. Alarm: a request, or all together."""
    if not session.endpoint.offer.speculation:
        return not_run("acceptance", "request", "the endpoint drafts nothing, or does not say so")
    told = [one for exchange in [*session.long_replies, *session.sampled] if (one := drafts_of(exchange)) is not None]
    if not told:
        return _by_counters(session)
    drafts, drafted, accepted = (
        sum(getattr(one, n) for one in told) for n in ("num_drafts", "num_draft_tokens", "num_accepted")
    )
    length, rate = 1 + accepted / drafts, accepted / drafted
    enough = [one for one in told if (one.exchange.reply.output_tokens or 0) >= ENOUGH_TOKENS]
    low = _low_limit(session.settings.expected_acceptance_length or length)
    odd = [(one, why) for one in enough if (why := _oddity(one, low, rate, len(enough))) is not None]
    alarms = [f"{len(odd)} of {len(enough)} replies of {ENOUGH_TOKENS} tokens or more: {odd[0][1]}"] if odd else []
    upper = 1 + _accepted_per_step(told, session.settings.level).high
    of_all = _alarms_of_all(length, upper, drafts, session.settings.expected_acceptance_length)
    alarms += of_all
    is_few = not enough
    return session.result(
        "acceptance",
        events=len(odd),
        trials=len(told) if is_few else len(enough),
        unit="request",
        alarm="; ".join(alarms) or None,
        reason=f"no reply had {ENOUGH_TOKENS} tokens: only all replies together were judged" if is_few else None,
        num_requests=len(told),
        witnesses=[witness(one.exchange, why, None, f"{low:.3g} to rate {HIGH_RATE}", f"{one.length:.3f}") for one, why in odd],
        stands_without_events=bool(of_all),
        first_event_at=next((enough.index(one) + 1 for one, _ in odd), None),
        details={
            "mean_length": length,
            "mean_length_upper": upper,
            "rate": rate,
            "expected_length": session.settings.expected_acceptance_length,
            "low_limit": low,
            "num_drafts": drafts,
            "length_by_tokens": _curve(told),
        },
    )


def _by_counters(session: ProbeSession) -> ProbeResult:
    """What the server counted while this session ran: no single request can be judged."""
    asked = sum(exchange.is_answered for exchange in [*session.long_replies, *session.sampled])
    drafts, drafted, accepted = (session.counted(name) for name in COUNTERS)
    if not drafts or not drafted or accepted is None:
        return not_run("acceptance", "request", WHY_NOT_TOLD, asked)
    length, expected = 1 + accepted / drafts, session.settings.expected_acceptance_length
    # of tokens as if each were drawn by itself: replies differ more than that, but nothing is told of one
    test = stats.binomtest(int(accepted), int(drafted))
    upper = 1 + float(test.proportion_ci(2 * session.settings.level - 1).high) * drafted / drafts
    alarms = _alarms_of_all(length, upper, int(drafts), expected)
    return session.result(
        "acceptance",
        events=len(alarms),
        trials=1,
        unit="server",
        alarm="; ".join(alarms) or None,
        reason=f"only all requests together were judged: {WHY_NOT_TOLD}",
        num_requests=asked,
        stands_without_events=True,
        first_event_at=1 if alarms else None,
        details={"mean_length": length, "rate": accepted / drafted, "expected_length": expected, "num_drafts": int(drafts)},
    )


def drafts_of(exchange: Exchange) -> Drafts | None:
    """None: the reply does not say, or nothing was drafted."""
    told = exchange.reply.speculation
    if not exchange.is_answered or not told or not told["num_drafts"] or not told["num_draft_tokens"]:
        return None
    return Drafts(exchange, told["num_drafts"], told["num_draft_tokens"], told["num_accepted_tokens"])


def _accepted_per_step(told: Sequence[Drafts], level: float) -> Interval:
    """Over all replies; the upper end holds with probability `level` by itself. One reply alone: from 0 to all."""
    if len(told) < 2:
        value = told[0].length - 1
        return Interval(value=value, low=0.0, high=told[0].num_draft_tokens / told[0].num_drafts, n=1, level=level)
    return cluster_bootstrap_ratio(
        [one.num_accepted for one in told], [one.num_drafts for one in told], range(len(told)), level=2 * level - 1
    )


def _low_limit(expected: float) -> float:
    """1.4 where that is well below what is expected; a draft head that reaches little is held against half of that."""
    return min(SHORT_LENGTH, 1 + (expected - 1) / 2)


def _oddity(one: Drafts, low: float, rate: float, count: int) -> str | None:
    def p_value(alternative: str) -> float:
        return float(stats.binomtest(one.num_accepted, one.num_draft_tokens, rate, alternative).pvalue) * count

    if one.length < low and p_value("less") < STANDS_OUT:
        return f"{one.length:.2f} tokens per step (limit {low:.2f})"
    if one.rate > HIGH_RATE and p_value("greater") < STANDS_OUT:
        return f"{one.rate:.1%} of the drafts accepted (limit {HIGH_RATE:.0%}), {rate:.1%} over all"
    return None


def _alarms_of_all(length: float, upper: float, drafts: int, expected: float | None) -> list[str]:
    if drafts < ENOUGH_DRAFTS:
        return []
    if expected is not None and upper - 1 < BELOW_EXPECTED * (expected - 1):
        return [f"{length:.3f} tokens per step over all (at most {upper:.3f}), expected {expected:.3f}"]
    if length < NOTHING_ACCEPTED:
        return [f"{length:.3f} tokens per step over all: next to nothing of what is drafted is accepted"]
    return []


def _curve(told: Sequence[Drafts]) -> dict[str, Value]:
    """Mean length of replies by their tokens: what a reply of that length is expected to reach on this server."""
    found: dict[str, Value] = {}
    for low, high in ((0, 64), (64, 128), (128, 512), (512, 1 << 30)):
        some = [one for one in told if low <= (one.exchange.reply.output_tokens or 0) < high]
        name = f"{low}-{high}" if high < 1 << 30 else f"{low}-"
        found[name] = 1 + sum(one.num_accepted for one in some) / sum(one.num_drafts for one in some) if some else None
    return found
