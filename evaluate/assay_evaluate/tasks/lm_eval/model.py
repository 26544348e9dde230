"""The model class lm-eval talks to: chat over HTTP through the journal, keeping what lm-eval throws away.

Unlike lm-eval's own API models it sends no stop strings (they fire inside thinking; where a task needs them they are applied
to the finished reply), never cuts a prompt, takes its budget
from the suite instead of the task, lets the *server* apply the chat template, and remembers finish reasons and token
counts. Importing this module imports lm-eval, which is slow: do it inside functions.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from lm_eval.api.instance import Instance
from lm_eval.api.model import LM

Messages = list[dict[str, str]]
K = TypeVar("K")
CHAT_MARK = "\x02chat\x02"
"""Begins a context that holds a conversation as JSON rather than a plain prompt."""


@dataclass(frozen=True)
class LmEvalQuestion:
    """One prompt of an lm-eval task."""

    task: str
    doc_id: int
    messages: Messages

    @property
    def text(self) -> str:
        return "\n".join(message["content"] for message in self.messages)


class JournaledLM(LM, Generic[K]):  # type: ignore[misc]  # lm_eval has no types
    """lm-eval's view of a served checkpoint."""

    def __init__(
        self, ask: Callable[[Iterable[LmEvalQuestion]], Iterator[tuple[str, K]]], *, cuts_at_stops: bool = False
    ) -> None:
        """ask: gives for each question, in order, the text of the reply and what is to be kept of it beside the text.

        cuts_at_stops: cut finished replies where the task's stop strings would have ended them.
        """
        super().__init__()
        self._ask = ask
        self._cuts_at_stops = cuts_at_stops
        self.num_cut_at_stops = 0
        self.kept: dict[tuple[str, int], K] = {}
        """(task name, document id) -> what `ask` said to keep."""

    def generate_until(self, requests: list[Instance]) -> list[str]:
        """Replies to `requests`. The task's own budget and sampling are ignored by design, its stop strings are never sent.

        What is returned, and scored, may be cut at them. Whole replies are not held here: the journal has them.
        """
        docs = [(request.task_name, request.doc_id) for request in requests]
        contexts = (request.args[0] for request in requests)
        # a context that did not go through apply_chat_template is one user message
        messages = (
            json.loads(context.removeprefix(CHAT_MARK))
            if context.startswith(CHAT_MARK)
            else [{"role": "user", "content": context}]
            for context in contexts
        )
        questions = (LmEvalQuestion(*doc, own) for doc, own in zip(docs, messages, strict=True))
        texts = []
        for doc, request, (text, kept) in zip(docs, requests, self._ask(questions), strict=True):
            assert doc not in self.kept, "a document is asked once by each model: tasks with repeats are not loaded"
            self.kept[doc] = kept
            cut = cut_at_stops(text, stop_strings(request.args[1])) if self._cuts_at_stops else text
            self.num_cut_at_stops += len(cut) < len(text)
            texts.append(cut)
        return texts

    def loglikelihood(self, requests: list[Instance]) -> list[tuple[float, bool]]:
        """Not offered: the likelihood of given answers says little about a model that thinks first. Callers check."""
        raise NotImplementedError(f"task {requests[0].task_name} compares log-likelihoods")

    loglikelihood_rolling = loglikelihood

    def apply_chat_template(self, chat_history: Messages, add_generation_prompt: bool = True) -> str:
        """The messages as JSON: the server applies its template. A prefilled answer is the last message, the assistant's."""
        return CHAT_MARK + json.dumps(chat_history, ensure_ascii=False)

    @property
    def tokenizer_name(self) -> str:
        """lm-eval names request caches after it; we use none."""
        return "applied-by-the-server"


def stop_strings(generation: Mapping[str, Any]) -> tuple[str, ...]:
    """`until` of a task's generation arguments: a string, a list, or nothing."""
    until = generation.get("until") or ()
    return (until,) if isinstance(until, str) else tuple(until)


def cut_at_stops(text: str, stops: Sequence[str]) -> str:
    """`text` up to the first place where any stop string begins: what a server would have returned had it been sent them."""
    places = [place for stop in stops if stop and (place := text.find(stop)) >= 0]
    return text[: min(places)] if places else text
