"""Acceptance of drafted tokens, per request: the best free alarm for garbled serving (z.ai, "Scaling Pain").

Draft and target that see different caches accept little (below 1.4 tokens per step after 128 tokens); a loop accepts nearly
everything (rate above 0.96). Both limits are of production at T=1; a request must also stand out from the run's own rate, and
all requests together are compared with the expected length, where one is given: a head without its experts still drafts well.
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
NOT_TOLD = "replies do not tell their acceptance; start vLLM with --per-request-spec-decode-metrics summary"


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
    replies = [drafts for exchange in [*session.long_replies, *session.sampled] if (drafts := drafts_of(exchange)) is not None]
    if not replies:
        return _judge_counters(session)
    num_drafts = sum(reply.num_drafts for reply in replies)
    num_accepted = sum(reply.num_accepted for reply in replies)
    length, rate = 1 + num_accepted / num_drafts, num_accepted / sum(reply.num_draft_tokens for reply in replies)
    expected = session.settings.expected_acceptance_length
    enough = [reply for reply in replies if (reply.exchange.reply.output_tokens or 0) >= ENOUGH_TOKENS]
    # 1.4 where that is well below what is expected; a draft head that reaches little is compared with half of that
    low = min(SHORT_LENGTH, 1 + ((expected or length) - 1) / 2)
    odd = [(reply, reason) for reply in enough if (reason := _oddity(reply, low, rate, len(enough))) is not None]
    upper = 1 + _accepted_per_step(replies, session.settings.level).high
    alarms_of_all = _alarms_of_all(length, upper, num_drafts, expected)
    alarms = [f"{len(odd)} of {len(enough)} replies of {ENOUGH_TOKENS} tokens or more: {odd[0][1]}"] if odd else []
    limits = f"{low:.3g} to rate {HIGH_RATE}"
    return session.result(
        "acceptance",
        trials=len(enough or replies),
        unit="request",
        alarms=[*alarms, *alarms_of_all],
        reason=None if enough else f"no reply had {ENOUGH_TOKENS} tokens: only all replies together were judged",
        num_requests=len(replies),
        witnesses=[witness(reply.exchange, reason, None, limits, f"{reply.length:.3f}") for reply, reason in odd],
        stands_without_events=bool(alarms_of_all),
        first_event_at=enough.index(odd[0][0]) + 1 if odd else None,
        details={
            "mean_length": length,
            "mean_length_upper": upper,
            "rate": rate,
            "expected_length": expected,
            "low_limit": low,
            "num_drafts": num_drafts,
            "length_by_tokens": _length_by_tokens(replies),
        },
    )


def _judge_counters(session: ProbeSession) -> ProbeResult:
    """What the server counted while this session ran: no single request can be judged."""
    num_answered = sum(exchange.is_answered for exchange in [*session.long_replies, *session.sampled])
    drafts, drafted, accepted = (session.counted(name) for name in COUNTERS)
    if not drafts or not drafted or accepted is None:
        return not_run("acceptance", "request", NOT_TOLD, num_answered)
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
        alarms=alarms,
        reason=f"only all requests together were judged: {NOT_TOLD}",
        num_requests=num_answered,
        stands_without_events=True,
        first_event_at=1 if alarms else None,
        details={"mean_length": length, "rate": accepted / drafted, "expected_length": expected, "num_drafts": int(drafts)},
    )


def drafts_of(exchange: Exchange) -> Drafts | None:
    """None: the reply does not say, or nothing was drafted."""
    drafts = exchange.reply.speculation
    if not exchange.is_answered or not drafts or not drafts["num_drafts"] or not drafts["num_draft_tokens"]:
        return None
    return Drafts(exchange, drafts["num_drafts"], drafts["num_draft_tokens"], drafts["num_accepted_tokens"])


def _accepted_per_step(replies: Sequence[Drafts], level: float) -> Interval:
    """Over all replies; the upper end holds with probability `level` by itself. One reply alone: from 0 to all."""
    if len(replies) < 2:
        [reply] = replies
        return Interval(value=reply.length - 1, low=0.0, high=reply.num_draft_tokens / reply.num_drafts, n=1, level=level)
    accepted, drafts = [reply.num_accepted for reply in replies], [reply.num_drafts for reply in replies]
    return cluster_bootstrap_ratio(accepted, drafts, range(len(replies)), level=2 * level - 1)


def _oddity(reply: Drafts, low: float, rate: float, count: int) -> str | None:
    def p_value(alternative: str) -> float:
        return float(stats.binomtest(reply.num_accepted, reply.num_draft_tokens, rate, alternative).pvalue) * count

    if reply.length < low and p_value("less") < STANDS_OUT:
        return f"{reply.length:.2f} tokens per step (limit {low:.2f})"
    if reply.rate > HIGH_RATE and p_value("greater") < STANDS_OUT:
        return f"{reply.rate:.1%} of the drafts accepted (limit {HIGH_RATE:.0%}), {rate:.1%} over all"
    return None


def _alarms_of_all(length: float, upper: float, drafts: int, expected: float | None) -> list[str]:
    if drafts < ENOUGH_DRAFTS:
        return []
    if expected is not None and upper - 1 < BELOW_EXPECTED * (expected - 1):
        return [f"{length:.3f} tokens per step over all (at most {upper:.3f}), expected {expected:.3f}"]
    if length < NOTHING_ACCEPTED:
        return [f"{length:.3f} tokens per step over all: next to nothing of what is drafted is accepted"]
    return []


def _length_by_tokens(replies: Sequence[Drafts]) -> dict[str, Value]:
    """Mean length of replies by their tokens: what a reply of that length is expected to reach on this server."""
    lengths: dict[str, Value] = {}
    for low, high in ((0, 64), (64, 128), (128, 512), (512, 1 << 30)):
        group = [reply for reply in replies if low <= (reply.exchange.reply.output_tokens or 0) < high]
        name = f"{low}-{high}" if high < 1 << 30 else f"{low}-"
        accepted, drafts = sum(reply.num_accepted for reply in group), sum(reply.num_drafts for reply in group)
        lengths[name] = 1 + accepted / drafts if group else None
    return lengths
