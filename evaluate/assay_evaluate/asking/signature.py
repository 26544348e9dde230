"""Which weights answer: log-probabilities over fixed prompts (assay.records.serving.Signature), asked of a running server."""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from assay.errors import MeasureError
from assay.foreign_text import shown
from assay.records.base import sha256_of
from assay.records.serving import Signature, SignedPrompt, mean_difference
from assay_evaluate.asking.dialect import COMPLETIONS, sampling
from assay_evaluate.client.client import Endpoint, NotMeasured
from assay_evaluate.client.logprob_checks import PROBABILITIES, find_logprob_problem
from assay_evaluate.client.sending import COME_LATER, MISCONFIGURED, TRY_AGAIN
from assay_evaluate.transport.connection import HttpReply, post_once, root_url, unmask_error
from assay_evaluate.transport.errors import TransportError
from assay_evaluate.transport.foreign_json import WRONG_SHAPE, fingerprint_in, text_in, text_of

PROMPTS = (
    "The harbour master closed his ledger, looked out at the grey water and said that the ferry would not sail before",
    "def median(values):\n    ordered = sorted(values)\n    middle = len(ordered) // 2\n    return ordered[middle] if len(",
    "17 + 25 = 42, 42 - 9 = 33, 33 * 3 = 99, 99 + 156 = 255, 255 - 128 =",
    "从前有一座山，山上有一座庙，庙里有一个老和尚在给小和尚讲故事，他说",
    "Die Messung begann um acht Uhr morgens; gegen Mittag fiel der Druck, und am Abend zeigte das Geraet",
    '{"name": "w4a16", "layers": [0, 1, 2, 3], "kept": {"router": "bf16", "norm": "fp32"}, "size": ',
    "7f 3a 00 c4 91 5e 22 d8 0b 6c f0 19 a7 44 e3 8d 52 bb 07 96 2e 71 cd 38 f4 05",
    "Q: Which is heavier, a litre of mercury or three litres of water? A: Mercury has a density of 13.5, so",
)
"""Of several kinds: weights that answer one kind with certainty show differences in another. Never change one by itself."""
NUM_NEXT = (20, 5, 1)
"""How many of the likeliest tokens are asked for; vLLM refuses more than its --max-logprobs (20 unless it is told)."""
PAUSES_S = (1.0, 4.0)
"""Before a request that was not answered is sent again."""
TIMEOUT_S = 600.0
ANSWERS_NOTHING = MISCONFIGURED | COME_LATER | {502, 503, 504}
"""HTTP statuses that say nothing about log-probabilities."""
NOT_JSON = "not JSON compliant"
"""vLLM's words where it would have to write NaN."""
AskPrompt = Callable[[str, Mapping[str, Any]], HttpReply]


def take_signature(endpoint: Endpoint) -> Signature:
    """Ask every server of the endpoint the fixed prompts, one by one and then all at once; the first one's signature.

    NotMeasured: one gives no log-probabilities. MeasureError: one cannot be reached, or has other weights than the first.
    """
    first, *others = (_signature(endpoint, root_url(url)) for url in endpoint.base_urls)
    for url, other in zip(endpoint.base_urls[1:], others, strict=True):
        if not first.agrees_with(other):
            raise MeasureError(
                f"{endpoint.base_urls[0]} and {url} do not have the same weights ({describe_distance(first, other)}); servers "
                "that share a label must: start them on one checkpoint"
            )
    return first


def describe_distance(first: Signature, second: Signature) -> str:
    """How far two signatures are apart, and how far noise alone brings them."""
    distance, noise = first.distance(second), first.tolerance(second)
    return f"log-probabilities over fixed prompts differ by {distance:.2g} nats; up to {noise:.2g} is noise"


def _signature(endpoint: Endpoint, url: str) -> Signature:
    ask = functools.partial(_ask, endpoint, url)
    form = _learn_form(ask)
    readings = [_sign(ask, prompt, form) for prompt in PROMPTS]
    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        readings += pool.map(lambda prompt: _sign(ask, prompt, form), PROMPTS)
    signed = tuple(reading.signed for reading in readings)
    alone, together = signed[: len(PROMPTS)], signed[len(PROMPTS) :]
    noise = mean_difference(alone, together)
    if not math.isfinite(noise):
        raise NotMeasured(_why_incomparable(readings))
    return Signature(prompts_sha256=sha256_of(PROMPTS), prompts=alone, noise=noise)


def _why_incomparable(readings: Sequence[_Read]) -> str:
    """NaN is said of what was NaN: a server that writes null has shown nothing that it computed."""
    if any(reading.has_nan for reading in readings):
        return "its log-probabilities are no numbers (NaN or infinite); see `assay diagnose probe`"
    if any(None in (*reading.signed.logprobs, *reading.signed.next.values()) for reading in readings):
        return "it gives null in place of log-probabilities"
    return "asked twice, it gives log-probabilities of other tokens of a prompt; see `assay diagnose probe`"


def _learn_form(ask: AskPrompt) -> dict[str, Any]:
    """The largest request for log-probabilities that the server answers with some. NotMeasured: it answers none."""
    problem = "no log-probabilities in its replies"
    for next_tokens in NUM_NEXT:
        for more in ({"prompt_logprobs": 0}, {}):
            form = {"logprobs": next_tokens, "return_tokens_as_token_ids": True, **more}
            reply = ask(PROMPTS[0], form)
            if reply.status != 200:
                problem = f"HTTP {reply.status}: {reply.message}"
                if NOT_JSON in problem:
                    raise NotMeasured(f"its log-probabilities are no numbers ({problem}); see `assay diagnose probe`")
                continue
            signed = _read(reply).signed
            if find_logprob_problem([*signed.logprobs, *signed.next.values()]) == PROBABILITIES:
                raise NotMeasured(PROBABILITIES)  # other weights are nearer there than noise is; logits show them as well
            if signed.logprobs or signed.next:
                return form
    raise NotMeasured(f"it gives no log-probabilities ({problem}); start vLLM without --max-logprobs 0")


def _sign(ask: AskPrompt, prompt: str, form: Mapping[str, Any]) -> _Read:
    reply = ask(prompt, form)
    if reply.status != 200:
        raise NotMeasured(f"it does not answer a prompt of the signature: HTTP {reply.status}: {reply.message}")
    return _read(reply)


def _ask(endpoint: Endpoint, url: str, prompt: str, form: Mapping[str, Any]) -> HttpReply:
    """MeasureError: the server cannot be reached, or answers no request at all."""
    body = {"model": endpoint.model, "prompt": prompt, "max_tokens": 1, **sampling(0.0, None), **form}
    for seconds in (*PAUSES_S, None):
        try:
            reply = unmask_error(post_once(url, COMPLETIONS, body, total_s=TIMEOUT_S, headers=endpoint.headers))
            if seconds is None or reply.status not in TRY_AGAIN:
                break
        except TransportError as error:
            if seconds is None:
                raise MeasureError(f"{url}: cannot be asked for its signature: {error}; run again when it answers") from None
        time.sleep(seconds)
    if reply.status in ANSWERS_NOTHING:
        key = "; is its key the right one?" if reply.status in {401, 403} else ""
        raise MeasureError(
            f"{url}: cannot be asked for its signature: {COMPLETIONS}: HTTP {reply.status}: {reply.message}{key}"
        )
    return reply


@dataclass(frozen=True)
class _Read:
    """What one reply gives. has_nan: numbers are among it that are none, or infinite."""

    signed: SignedPrompt
    has_nan: bool


def _read(reply: HttpReply) -> _Read:
    """What is in the reply; nothing, if it is not as vLLM has it."""
    try:
        data = reply.json()
        choice = data["choices"][0]
        rows = (choice.get("prompt_logprobs") or [None])[1:]
        tokens = [next(iter(row.items())) for row in rows]
        following = ((choice.get("logprobs") or {}).get("top_logprobs") or [{}])[0]
        logprobs_as_sent = [entry["logprob"] for _, entry in tokens]
        signed = SignedPrompt(
            token_ids=tuple(int(token) for token, _ in tokens),
            logprobs=tuple(map(_number, logprobs_as_sent)),
            next={str(text_of(token)): _number(value) for token, value in following.items()},
            model=shown(text_in(data, "model")) or None,
            system_fingerprint=fingerprint_in(data),
        )
        numbers = [float(value) for value in (*logprobs_as_sent, *following.values()) if value is not None]
        return _Read(signed, not all(map(math.isfinite, numbers)))
    except (*WRONG_SHAPE, StopIteration):
        return _Read(SignedPrompt(token_ids=(), logprobs=(), next={}), False)


def _number(value: Any) -> float | None:
    return round(float(value), 5) if value is not None and math.isfinite(float(value)) else None
