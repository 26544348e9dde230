"""mini-swe-agent's model, whose requests take our client's way: bounded in bytes and time, types checked before a reply counts.

litellm, which mini-swe-agent asks by itself, reads whatever comes: a reply of another shape ends a trajectory, one without end
holds it, and a number of 5,000 digits that the *model* wrote is an error of the machinery. Here a reply that is not what the
API promises is a failed request, asked again (`server_gate.py`), and whatever the model wrote into a call is the model's.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import minisweagent.models.litellm_model as litellm_model
from minisweagent.models import get_model_class
from minisweagent.models.utils.actions_toolcall import BASH_TOOL
from pydantic import BaseModel, ConfigDict, ValidationError

from assay_evaluate.client.journal import Reply, Request
from assay_evaluate.client.sending import MISCONFIGURED, Sender
from assay_evaluate.tasks.swebench.server_gate import RequestFailed, RequestRefused, ServerGate


@dataclass(frozen=True)
class AgentRequest(Request):
    """Keys in mini-swe-agent's order: a chat template may write the tool as it comes."""

    @functools.cached_property
    def body_json(self) -> str:
        return json.dumps(self.body)


class _Plain(BaseModel):
    model_config = ConfigDict(strict=True)


class _Function(_Plain):
    name: str
    arguments: str
    """As the model wrote it, JSON or not."""


class _Call(_Plain):
    id: str
    type: str = "function"
    function: _Function


class _Message(_Plain):
    role: str = "assistant"
    content: str
    tool_calls: list[_Call] | None
    reasoning_content: str | None


class _Choice(_Plain):
    index: int = 0
    finish_reason: str | None
    message: _Message


class Completion(_Plain):
    """A reply as mini-swe-agent reads it and writes it into the trajectory."""

    choices: list[_Choice]
    usage: dict[str, Any] | None
    metrics: dict[str, Any] | None
    system_fingerprint: str | None


def completion_of(reply: Reply, fingerprint: str | None) -> Completion:
    """An answered reply. ValidationError: its calls are not what the API promises."""
    message = {
        "content": reply.text,
        "tool_calls": reply.tool_calls and list(reply.tool_calls),
        "reasoning_content": reply.reasoning,
    }
    drafted = reply.speculation and {
        "num_spec_steps": reply.speculation["num_drafts"],
        "num_draft_tokens": reply.speculation["num_draft_tokens"],
        "num_accepted_draft_tokens": reply.speculation["num_accepted_tokens"],
    }
    return Completion.model_validate({
        "choices": [{"finish_reason": reply.finish_reason, "message": message}], "usage": reply.usage,
        "metrics": drafted and {"speculative_decoding": drafted}, "system_fingerprint": fingerprint,
    })  # fmt: skip


def make_model(spec: Mapping[str, Any], gate: ServerGate, sender: Sender) -> litellm_model.LitellmModel:
    """mini-swe-agent's model for one trajectory: its reading of commands, our requests, and history that vLLM takes."""
    base: type[litellm_model.LitellmModel] = get_model_class("", spec["model_class"])
    tools = {"tools": [BASH_TOOL]} if spec["model_class"] == "litellm" else {}

    class Model(base):  # type: ignore[misc, valid-type]
        def _prepare_messages_for_api(self, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
            return [_for_vllm(message) for message in super()._prepare_messages_for_api(messages)]

        def _query(self, messages: list[dict[str, Any]], **kwargs: Any) -> Completion:
            body = {"messages": messages, **tools, **self.config.model_kwargs, **kwargs}
            return ask(sender, gate, AgentRequest("swe", "", 0, "/v1/chat/completions", body))

        def _calculate_cost(self, response: object) -> dict[str, float]:
            return {"cost": 0.0}

    return Model(**spec["model"])


def ask(sender: Sender, gate: ServerGate, request: Request) -> Completion:
    """One request, once. RequestFailed: no reply that counts. RequestRefused: the server says why it will not."""
    with closing(sender.connect(gate.base_url)) as connection:
        received = sender.send(connection, request)
    reply = received.reply
    if reply.status == "refused":
        raise RequestRefused(str(reply.error))
    if reply.status == "failed":
        raise RequestFailed(
            str(reply.error), is_misconfigured=reply.http_status in MISCONFIGURED, retry_after_s=received.retry_after_s
        )
    gate.check_same(received.system_fingerprint)
    try:
        return completion_of(reply, received.system_fingerprint)
    except ValidationError as error:
        first = error.errors(include_input=False, include_url=False)[0]
        where = ".".join(map(str, first["loc"]))
        raise RequestFailed(f"reply is not what the API promises: {where}: {first['msg']}") from None


def _for_vllm(message: dict[str, Any]) -> dict[str, Any]:
    """Without mini-swe-agent's own fields; thinking under the name vLLM has given it (`reasoning`)."""
    kept = {
        key: value
        for key, value in message.items()
        if key in {"role", "content", "tool_calls", "tool_call_id"} and value is not None
    }
    kept.setdefault("content", "")
    thinking = message.get("reasoning_content") or message.get("reasoning")
    return {**kept, "reasoning": thinking, "reasoning_content": thinking} if thinking else kept
