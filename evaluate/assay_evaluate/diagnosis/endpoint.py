"""Who is there and what it offers: asked with a dozen small requests, believed only when the reply shows it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from assay.errors import MeasureError, ServeError
from assay.foreign_text import shown
from assay.records.probe import Offer
from assay_evaluate.asking.dialect import CHAT, COMPLETIONS
from assay_evaluate.client.client import Address, Client
from assay_evaluate.client.exchanges import Ask, Exchange
from assay_evaluate.client.logprob_checks import find_logprob_problem
from assay_evaluate.serving.external import find_version, get, list_models, sum_metrics
from assay_evaluate.transport.connection import root_url

QUESTION = [{"role": "user", "content": "1 + 1"}]
MOST_DISCOVERY_REQUESTS = 17
"""Requests to the model with which `find_endpoint` finds out what it offers, at most; each for one or two tokens."""
TIMEOUT_S = 600.0
"""Of a short reply, unless the settings say otherwise."""
EXTENDED = {"top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0}


@dataclass(frozen=True)
class ProbedEndpoint:
    """A server and what it was found to offer. `base_url` has no /v1 at its end."""

    base_url: str
    model: str
    max_model_len: int | None
    offer: Offer
    system_fingerprint: str | None = None
    checkpoint_sha256: str | None = None
    """Of a checkpoint that was served for the probes."""
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Sent with every request: an authorization, say. In no record and no ledger."""

    @property
    def base_urls(self) -> tuple[str, ...]:
        return (self.base_url,)

    def check_alive(self) -> None:
        """Nobody watches it: the next request will tell."""

    def metrics(self) -> dict[str, float]:
        """The server's counters, summed over labels; empty if it has none."""
        return _metrics(self.base_url, self.headers)


def find_endpoint(
    url: str,
    model: str | None = None,
    *,
    timeout_s: float = TIMEOUT_S,
    headers: Mapping[str, str] | None = None,
    before_asking: Callable[[], None] = lambda: None,
) -> ProbedEndpoint:
    """Ask the server at `url` who it is and what it offers. model: its name there; None: the first one listed.

    before_asking: called when the server is there and has the model, before the model is asked anything.
    MeasureError if nothing answers, the model is not there, or it offers neither chat nor completions.
    """
    base_url, headers = root_url(url), dict(headers or {})
    try:
        listed = list_models(base_url, what="the endpoint", headers=headers)
    except ServeError as error:
        raise MeasureError(str(error)) from None
    names = [served.id for served in listed]
    if model is not None and model not in names:
        raise MeasureError(f"{url}: has no model {model!r}; it lists {', '.join(map(shown, names))}")
    about = next(served for served in listed if model is None or served.id == model)
    before_asking()
    with Client(Address(base_url, about.id, headers), timeout_s=timeout_s) as client:
        return ProbedEndpoint(
            base_url=base_url,
            model=about.id,
            max_model_len=about.max_model_len,
            offer=_find_offer(client, headers),
            system_fingerprint=client.tally.system_fingerprint,
            headers=headers,
        )


def _find_offer(client: Client, headers: Mapping[str, str]) -> Offer:
    def ask(path: str, **body: Any) -> Exchange:
        [exchange] = client.ask_together([Ask(f"find/{path}", path, {"max_tokens": 1, "temperature": 0, **body})], 1)
        return exchange

    chat = ask(CHAT, messages=QUESTION).is_answered
    completions = ask(COMPLETIONS, prompt="1 + 1").is_answered
    if not chat and not completions:
        errors = ", ".join(f"{error} ({count})" for error, count in client.tally.errors.items())
        raise MeasureError(f"{client.endpoint.base_url}: answers neither {CHAT} nor {COMPLETIONS}: {errors}")
    path = CHAT if chat else COMPLETIONS
    base: dict[str, Any] = {"messages": QUESTION} if chat else {"prompt": "1 + 1"}

    reasons_unusable: list[str] = []

    def is_usable(values: Iterable[float | None]) -> bool:
        if (reason := find_logprob_problem(values)) is not None:
            reasons_unusable.append(reason)
        return reason is None

    def most_logprobs() -> int | None:
        for k in (128, 64, 20, 5, 1):
            options = {"logprobs": True, "top_logprobs": k} if chat else {"logprobs": k}
            rows = ask(path, **base, **options).rows
            if rows and rows[0].top:
                values = [value for row in rows for value in (row.logprob, *(logprob for _, logprob in row.top))]
                return min(k, len(rows[0].top)) if is_usable(values) else None
        return None

    def most_prompt_logprobs() -> int | None:
        for k in (128, 64, 20, 5):
            scored = ask(COMPLETIONS, prompt=[1, 2, 3], prompt_logprobs=k).reply.logprobs
            if scored is not None:
                return int(scored.ids_PK.shape[1]) if is_usable(scored.logprobs_PK.ravel().tolist()) else None
        return None

    with_ids = ask(path, **base, return_token_ids=True)
    token_ids = with_ids.reply.token_ids is not None and with_ids.reply.prompt_token_ids is not None
    counters = _metrics(client.endpoint.base_url, headers)
    streamed = {"max_tokens": 2, "temperature": 0, **base}
    version = find_version(client.endpoint.base_url, what="the endpoint", headers=headers)
    return Offer(
        is_vllm=version is not None and any(name.startswith("vllm:") for name in counters),
        version=version,
        chat=chat,
        completions=completions,
        logprobs=most_logprobs(),
        prompt_logprobs=most_prompt_logprobs() if completions and token_ids else None,
        token_ids=token_ids,
        extended_sampling=token_ids and ask(path, **base, **EXTENDED).is_answered,
        tokenize=bool(client.post("/tokenize", {"prompt": "1 + 1"}).tokens),
        detokenize=isinstance(client.post("/detokenize", {"tokens": [1]}).data.get("prompt"), str),
        metrics=bool(counters),
        counts_nans="vllm:corrupted_requests_total" in counters,
        speculation=with_ids.reply.speculation is not None or "vllm:spec_decode_num_drafts_total" in counters,
        routed_experts=with_ids.routed_experts is not None,
        cache_salt=token_ids and ask(path, **base, cache_salt="probe").is_answered,
        streams=bool(client.exchange(Ask("find/stream", path, streamed, abort_after=1)).reply.output_tokens),
        no_logprobs=reasons_unusable[0] if reasons_unusable else None,
    )


def _metrics(base_url: str, headers: Mapping[str, str]) -> dict[str, float]:
    try:
        return sum_metrics(get(base_url, "/metrics", what="the endpoint's metrics", headers=headers).text)
    except (ServeError, ValueError):
        return {}
