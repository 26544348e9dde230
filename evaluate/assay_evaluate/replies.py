"""What an OpenAI-compatible server sends back, as a Reply."""

from __future__ import annotations

import json
from typing import Any

import numpy as np

from assay_evaluate.journal import Reply, Request, TokenLogprobs


def message_in(text: str) -> str:
    """The server's own words in the body of an error, on one line of at most 300 characters."""
    try:
        data = json.loads(text)
        text = str(data.get("error", data).get("message", data))
    except (json.JSONDecodeError, AttributeError):
        pass
    return " ".join(text.split())[:300]


def read_reply(data: dict[str, Any], request: Request, latency_s: float) -> Reply:
    """An API response as a Reply. LookupError or TypeError if it is not shaped as the API promises."""
    choice = data["choices"][0]
    message = choice.get("message", {"content": choice.get("text")})
    usage = data.get("usage") or {}
    prompt_ids = data.get("prompt_token_ids") or choice.get("prompt_token_ids")
    token_ids = choice.get("token_ids")
    logprobs = choice.get("prompt_logprobs")
    return Reply(
        status="answered",
        text=message.get("content") or "",
        reasoning=message.get("reasoning") or message.get("reasoning_content"),
        has_tool_calls=bool(message.get("tool_calls")),
        tool_calls=tuple(message["tool_calls"]) if message.get("tool_calls") else None,
        finish_reason=choice.get("finish_reason"),
        prompt_tokens=usage.get("prompt_tokens"),
        output_tokens=usage.get("completion_tokens"),
        thinking_tokens=(usage.get("completion_tokens_details") or {}).get("reasoning_tokens"),
        # A scoring request carries its own ids; keeping them twice would only swell the journal.
        prompt_token_ids=None if prompt_ids is None or logprobs is not None else tuple(prompt_ids),
        token_ids=None if token_ids is None else tuple(token_ids),
        usage=data.get("usage"),
        speculation=_read_speculation(data),
        http_status=200,
        latency_s=latency_s,
        logprobs=None if logprobs is None else _read_logprobs(logprobs, request),
    )


def _read_speculation(data: dict[str, Any]) -> dict[str, int] | None:
    """vLLM's `--per-request-spec-decode-metrics`, when on."""
    stats = (data.get("metrics") or {}).get("speculative_decoding")
    if not stats:
        return None
    return {
        "num_drafts": stats["num_spec_steps"],
        "num_draft_tokens": stats["num_draft_tokens"],
        "num_accepted_tokens": stats["num_accepted_draft_tokens"],
    }


def _read_logprobs(rows: list[dict[str, Any] | None], request: Request) -> TokenLogprobs:
    """vLLM's `prompt_logprobs`: per position, id -> log-probability of the k most likely and of the token that stands there."""
    top_k, first = request.body["prompt_logprobs"], request.logprobs_from
    tokens_P = np.asarray(request.body["prompt"][first:], np.int32)
    p = len(tokens_P)
    ids_PK = np.full((p, top_k), -1, np.int32)
    logprobs_PK = np.full((p, top_k), np.nan, np.float32)
    chosen_P = np.full(p, np.nan, np.float32)
    if len(rows) != len(request.body["prompt"]):
        raise LookupError(f"{len(rows)} rows of prompt_logprobs for {len(request.body['prompt'])} tokens")
    for row, entries in enumerate(rows[first:]):
        if entries is None:
            continue  # nothing predicts the first token
        standing = str(tokens_P[row])
        chosen_P[row] = entries[standing]["logprob"]
        ranked = [
            (-entry["logprob"], entry.get("rank") or 0, int(token_id))
            for token_id, entry in entries.items()
            if len(entries) <= top_k or token_id != standing  # one entry too many: the token is outside the top k
        ]
        ranked.sort()
        ids_PK[row, : len(ranked)] = [token_id for _, _, token_id in ranked]
        logprobs_PK[row, : len(ranked)] = [-negative for negative, _, _ in ranked]
    return TokenLogprobs(tokens_P, ids_PK, logprobs_PK, chosen_P)
