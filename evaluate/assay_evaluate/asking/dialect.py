"""How questions are put to one server: as chat, if the checkpoint has a chat template, else as a plain completion.

Sampling is pinned in every request: what a body does not say, the server would take from the checkpoint's
generation_config.json, and two checkpoints could then be sampled differently.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from assay.errors import MeasureError
from assay.foreign_text import shown
from assay.records.serving import Fingerprint
from assay_evaluate.client.client import Client, NotMeasured
from assay_evaluate.transport.foreign_json import objects_in

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
Messages = Sequence[dict[str, str]]


@dataclass(frozen=True)
class Dialect:
    """What a server understands. `is_chat`: it has a chat template. `can_tokenize`: it offers vLLM's /tokenize."""

    is_chat: bool
    can_tokenize: bool
    chat_template_kwargs: dict[str, Any]

    def generation(
        self, messages: Messages, *, max_tokens: int, temperature: float, seed: int | None, with_ids: bool = False
    ) -> tuple[str, dict[str, Any]]:
        """API path and body that ask for one reply. A last message of the assistant is continued, not answered.

        with_ids: ask for the exact token ids of prompt and reply (vLLM's `return_token_ids`).
        """
        body: dict[str, Any] = {"max_tokens": max_tokens, **sampling(temperature, seed)}
        if with_ids:
            body["return_token_ids"] = True
        if not self.is_chat:
            return COMPLETIONS, {"prompt": plain_prompt(messages), **body}
        if self.chat_template_kwargs:
            body["chat_template_kwargs"] = self.chat_template_kwargs
        return CHAT, {"messages": list(messages), **body, **_continuing(messages)}


def _continuing(messages: Messages) -> dict[str, bool]:
    """A last message of the assistant is gone on with, not answered."""
    is_continued = messages[-1]["role"] == "assistant"
    return {"add_generation_prompt": False, "continue_final_message": True} if is_continued else {}


def sampling(temperature: float, seed: int | None) -> dict[str, Any]:
    """Every sampling parameter a checkpoint's generation_config.json could otherwise set; `seed` None: not sent."""
    parameters = {
        "temperature": temperature, "top_p": 1.0, "top_k": -1, "min_p": 0.0,
        "repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0,
    }  # fmt: skip
    return parameters if seed is None else {**parameters, "seed": seed}


def takes_seeds(fingerprint: Fingerprint) -> bool:
    """Whether a server may be sent a seed with each request.

    Not vLLM on a CPU: a seeded request whose prompt is read in several steps kills the engine ("CPU Generator does not use
    offset", vLLM 0.32, gpu_model_runner.py `_bookkeeping_sync`). With speculation a seed is not honoured anyway. Sampled
    text is journaled, so every candidate is scored on the same text whether it was seeded or not.
    """
    return fingerprint.speculation is None and "gpus" in fingerprint.hardware


def seed_of(*parts: str | int) -> int:
    """A sampling seed (31 bits) from what it is for: the same in every run."""
    return int.from_bytes(hashlib.sha256("\0".join(map(str, parts)).encode()).digest()[:4], "big") >> 1


def plain_prompt(messages: Messages) -> str:
    """A chat as plain text, for a checkpoint without a chat template."""
    return "\n\n".join(message["content"] for message in messages) + "\n"


def learn_dialect(client: Client, chat_template_kwargs: dict[str, Any]) -> Dialect:
    """Ask the server what it understands: three small requests at most. MeasureError: it is away, or answers no chat.

    An endpoint is there if what it answers is what it is for: gateways answer any path, with {} or a page.
    """
    messages = [{"role": "user", "content": "1 + 1"}]
    counted = client.post("/tokenize", {"messages": messages})
    if counted.status == 200 and counted.num_prompt_tokens is not None:
        return Dialect(True, True, chat_template_kwargs)
    can_tokenize = counted.status == 400 and client.post("/tokenize", {"prompt": "1 + 1"}).num_prompt_tokens is not None
    response = client.post(CHAT, {"messages": messages, "max_tokens": 1})
    if response.status == 200 and any(objects_in(response.data, "choices")):
        return Dialect(True, can_tokenize, chat_template_kwargs)
    if response.status == 400 and "template" in response.message:
        return Dialect(False, can_tokenize, {})
    url = f"{client.endpoint.base_url}{CHAT}: HTTP {response.status}"
    if response.status != 200:
        raise MeasureError(f"{url}: {response.message}")
    explanation = response.message or f"no completion: {shown(response.data, 100)}"
    raise MeasureError(f"{url}: {explanation}; give the address of an OpenAI-compatible server")


def count_prompt(client: Client, dialect: Dialect, prompt: str | Messages, tools: Sequence[dict[str, Any]] = ()) -> int:
    """Tokens of a text, or of messages as the server puts them: with chat template and tools, if it has a template.

    Where the server has no /tokenize, the prompt_tokens it bills for a one-token reply; a prompt it refuses as too long
    counts one more than it takes. NotMeasured if it gives neither.
    """
    path, body = "/tokenize", dict[str, Any]()
    if isinstance(prompt, str):
        body = {"prompt": prompt}
    elif not dialect.can_tokenize:
        path, body = dialect.generation(prompt, max_tokens=1, temperature=0.0, seed=0)
    elif dialect.is_chat:
        body = {"messages": list(prompt), "chat_template_kwargs": dialect.chat_template_kwargs, **_continuing(prompt)}
    else:
        body = {"prompt": plain_prompt(prompt)}
    if tools:
        body |= {"tools": list(tools)} | ({} if dialect.can_tokenize else {"tool_choice": "auto"})
    response = client.post(path, body)
    if response.num_prompt_tokens is not None:
        return response.num_prompt_tokens
    longest = client.endpoint.max_model_len
    is_too_long = "context length" in response.message if tools else not dialect.can_tokenize
    if response.status == 400 and longest is not None and is_too_long:
        return longest + 1
    raise NotMeasured(f"tokens cannot be counted: {path}: HTTP {response.status}: {response.message}")
