"""NaN counter: requests in which something was not a number, by every sign a client can see.

vLLM answers a request for log-probabilities whose logits are NaN with HTTP 400 "Out of range float values are not JSON
compliant", and one without them with 200 and token id 0 over and over (vLLM #55766: "!" for 32,768 tokens after a prefix-cache
hit). With VLLM_COMPUTE_NANS_IN_LOGITS=1 it counts them, too.
"""

from __future__ import annotations

import math

from assay.records.probe import ProbeResult, Witness
from assay_evaluate.client.exchanges import Exchange
from assay_evaluate.diagnosis.probes.probe_session import ProbeSession, witness
from assay_evaluate.diagnosis.probes.signs import ID_ZERO_RUN, id_zero_run

COUNTER = "vllm:corrupted_requests_total"
NOT_JSON = "not JSON compliant"


def probe_nonfinite(session: ProbeSession) -> ProbeResult:
    """Everything that was asked in this run, generated and scored. Alarm: one single request, or the server's counter."""
    _ = session.greedy, session.sampled  # asked, if they were not yet
    if session.endpoint.offer.prompt_logprobs and session.endpoint.offer.token_ids:
        _ = session.greedy_scored
    examined = [exchange for exchange in session.client.tally.exchanges.values() if exchange.status in ("answered", "refused")]
    signs = [(number, sign) for number, exchange in enumerate(examined, 1) if (sign := nonfinite_sign(exchange)) is not None]
    counted = session.counted(COUNTER) if session.endpoint.offer.counts_nans else None
    alarms = [f"{len(signs)} of {len(examined)} requests had something that is not a number"] if signs else []
    if counted:
        alarms.append(f"the server counted {counted:.0f} corrupted requests (and everybody else's, if others use it)")
    return session.result(
        "nonfinite",
        trials=len(examined),
        unit="request",
        alarms=alarms,
        witnesses=[sign for _, sign in signs],
        first_event_at=signs[0][0] if signs else None,
        requests_hit=max(len(signs), int(counted or 0)),
        details={"server_counter": counted},
    )


def nonfinite_sign(exchange: Exchange) -> Witness | None:
    """The first sign in one exchange; None: there is none."""
    if exchange.status == "refused":
        return witness(exchange, "refused: not JSON compliant") if NOT_JSON in (exchange.reply.error or "") else None
    for at, row in enumerate(exchange.rows):
        if math.isnan(row.logprob) or row.logprob == math.inf or any(math.isnan(value) for _, value in row.top):
            return witness(exchange, f"a generated log-probability is {'null' if row.has_null else 'not a number'}", at)
    if exchange.reply.logprobs is not None:  # of positions that something predicts: not of the first token of a prompt
        for at, value in enumerate(exchange.reply.logprobs.chosen_P):
            if not math.isfinite(value):
                return witness(exchange, "a prompt log-probability is not a number", at)
    start = id_zero_run(exchange.reply.token_ids or ())
    return None if start is None else witness(exchange, f"token id 0 {ID_ZERO_RUN} times in a row", start)
