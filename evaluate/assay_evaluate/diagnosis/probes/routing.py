"""Expert routing agreement: the experts each token went to while decoding, and while the same text is read again.

Where the server tells them (vLLM's --enable-return-routed-experts: GPU, model runner V2). In BF16 a few near ties flip; a
router that computes at another precision, or a stale hidden state, flips many.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from assay.records.probe import ProbeResult
from assay_evaluate.client.exchanges import Exchange
from assay_evaluate.client.logprobs import read_array
from assay_evaluate.diagnosis.probes.probe_session import ProbeSession, not_run, witness

LEAST_AGREEMENT = 0.9
"""Mean share of a token's experts that both paths chose, of a reply; a random choice of 8 in 256 agrees in 0.03."""
LEAST_OF_LAYER = 0.8


def read_experts(exchange: Exchange) -> npt.NDArray[np.int64] | None:
    """[tokens, layers, experts per token]; None: the reply does not tell. ValueError if it is no array."""
    if exchange.routed_experts is None:
        return None
    experts_TLK = read_array(exchange.routed_experts, np.int64)
    if experts_TLK.ndim != 3:
        raise ValueError(f"an array of {experts_TLK.ndim} dimensions")
    return experts_TLK


def agreement_TL(decode_TLK: npt.NDArray[np.int64], prefill_TLK: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """Share of the K experts that both name, whatever their order, for every token and layer. ValueError: unlike shapes."""
    if decode_TLK.shape != prefill_TLK.shape:
        raise ValueError(f"arrays of shapes {decode_TLK.shape} and {prefill_TLK.shape}")
    same_TLKK = decode_TLK[..., :, None] == prefill_TLK[..., None, :]
    return np.asarray(same_TLKK.any(-1).mean(-1), np.float64)


def _pairs(session: ProbeSession) -> list[tuple[Exchange, npt.NDArray[np.float64]]]:
    """(reply, agreement of its tokens) of every reply that told the experts twice. ValueError: what was told is no array."""
    pairs = []
    for scored in [*session.greedy_scored, *session.sampled_scored]:
        again = session.client.tally.exchanges.get(f"score/{scored.exchange.id}")
        decode, prefill = read_experts(scored.exchange), None if again is None else read_experts(again)
        first = len(scored.exchange.reply.prompt_token_ids or ())
        if decode is None or prefill is None or (last := min(len(decode), len(prefill))) <= first:
            continue
        pairs.append((scored.exchange, agreement_TL(decode[first:last], prefill[first:last])))
    return pairs


def probe_routing(session: ProbeSession) -> ProbeResult:
    """Decoding against prefill over the reply's tokens. Alarm: a reply below 0.9, or a layer below 0.8 over all."""
    if not session.endpoint.offer.routed_experts:
        return not_run("routing", "request", "the endpoint does not tell the experts (--enable-return-routed-experts)")
    try:
        pairs = _pairs(session)
    except ValueError as error:
        return not_run("routing", "request", f"the endpoint tells the experts in a form that cannot be read ({error})")
    if not pairs:
        return not_run("routing", "request", "no reply told the experts both while decoding and while scored again")
    means = [float(agreed.mean()) for _, agreed in pairs]
    events = [number for number, mean in enumerate(means) if mean < LEAST_AGREEMENT]
    by_layer_L = np.concatenate([agreed for _, agreed in pairs]).mean(0)
    worst = int(by_layer_L.argmin())
    others = [agreed for (_, agreed), mean in zip(pairs, means, strict=True) if mean >= LEAST_AGREEMENT]
    alarms = []
    if events:
        alarms.append(f"{len(events)} of {len(pairs)} replies agree in less than {LEAST_AGREEMENT:.0%} of their experts")
    if by_layer_L[worst] < LEAST_OF_LAYER:
        alarms.append(f"expert layer {worst} agrees in {by_layer_L[worst]:.1%}")
    return session.result(
        "routing",
        trials=len(pairs),
        unit="request",
        alarms=alarms,
        witnesses=[
            witness(pairs[n][0], "other experts when read again", None, f">= {LEAST_AGREEMENT}", f"{means[n]:.3f}")
            for n in events
        ],
        first_event_at=events[0] + 1 if events else None,
        stands_without_events=not others or bool(np.concatenate(others).mean(0).min() < LEAST_OF_LAYER),
        details={
            "mean_agreement": float(np.mean(means)),
            "worst_layer": worst,
            "worst_layer_agreement": float(by_layer_L[worst]),
        },
    )
