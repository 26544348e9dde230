"""What an OpenAI-compatible server sends back, as a Reply."""

from __future__ import annotations

from typing import Any

from assay.foreign_text import shown
from assay_evaluate.client.journal import Reply, Request
from assay_evaluate.client.prompt_logprobs import read_prompt_logprobs
from assay_evaluate.transport.foreign_json import MOST_COUNT, fingerprint_in, plain, text_of


def read_reply(data: dict[str, Any], request: Request, latency_s: float) -> Reply:
    """An API response as a Reply. LookupError, TypeError, ValueError, AttributeError: not shaped as the API promises.

    Everything in it can be written down: text is Unicode (a lone surrogate becomes U+FFFD), counts are numbers, nothing is
    nested without end.
    """
    choice = data["choices"][0]
    message = choice.get("message", {"content": choice.get("text")})
    usage = data.get("usage") or {}
    prompt_ids = data.get("prompt_token_ids") or choice.get("prompt_token_ids")
    token_ids = choice.get("token_ids")
    logprobs = read_prompt_logprobs(data, choice, request)
    says_something = any(message.values()) or choice.get("finish_reason") or token_ids or logprobs is not None
    if not says_something:
        raise ValueError("a choice that says nothing, not even that it has ended")
    return Reply(
        status="answered",
        text=text_of(message.get("content")) or "",
        reasoning=text_of(message.get("reasoning") or message.get("reasoning_content")),
        has_tool_calls=bool(message.get("tool_calls")),
        tool_calls=tuple(_objects(message["tool_calls"])) if message.get("tool_calls") else None,
        finish_reason=text_of(choice.get("finish_reason")),
        prompt_tokens=_count(usage.get("prompt_tokens")),
        output_tokens=_count(usage.get("completion_tokens")),
        thinking_tokens=_count((usage.get("completion_tokens_details") or {}).get("reasoning_tokens")),
        # A scoring request carries its own ids; keeping them twice would only swell the journal.
        prompt_token_ids=None if prompt_ids is None or logprobs is not None else _ids(prompt_ids),
        token_ids=None if token_ids is None else _ids(token_ids),
        usage=plain(data.get("usage")),
        speculation=_read_speculation(data),
        http_status=200,
        latency_s=latency_s,
        logprobs=logprobs,
        reply_id=_name(data.get("id")),
        model=_name(data.get("model")),
        system_fingerprint=fingerprint_in(data),
        stop_reason=_stop_reason(choice.get("stop_reason")),
    )


def _read_speculation(data: dict[str, Any]) -> dict[str, int] | None:
    """vLLM's `--per-request-spec-decode-metrics`, when on."""
    stats = (data.get("metrics") or {}).get("speculative_decoding")
    if not stats:
        return None
    return {
        "num_drafts": _known(stats["num_spec_steps"]),
        "num_draft_tokens": _known(stats["num_draft_tokens"]),
        "num_accepted_tokens": _known(stats["num_accepted_draft_tokens"]),
    }


# ---------------------------------------------------------------------------------------------------- values, checked
def _count(told: Any) -> int | None:
    if told is None:
        return None
    if type(told) in {int, float} and 0 <= told < MOST_COUNT and told == int(told):
        return int(told)
    raise TypeError(f"{type(told).__name__} in place of a count")


def _name(told: Any) -> str | None:
    """A name that the reply gives itself, for people and records. None: it gives none."""
    return shown(told) if isinstance(told, str) and told else None


def _stop_reason(told: Any) -> str | int | None:
    """vLLM's `stop_reason`: the stop string or the id of the stop token that ended the reply. None: neither did."""
    return told if type(told) is int and 0 <= told < MOST_COUNT else _name(told)


def _known(told: Any) -> int:
    count = _count(told)
    if count is None:
        raise TypeError("null in place of a count")
    return count


def _ids(told: Any) -> tuple[int, ...]:
    if type(told) is list and set(map(type, told)) <= {int} and (not told or (min(told) >= 0 and max(told) < MOST_COUNT)):
        return tuple(told)
    raise TypeError("token ids that are no list of counts")


def _objects(told: Any) -> list[dict[str, Any]]:
    found = plain(told)
    if type(found) is list and set(map(type, found)) <= {dict}:
        return found
    raise TypeError("tool calls that are no list of objects")
