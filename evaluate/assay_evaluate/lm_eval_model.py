"""The model class lm-eval talks to: chat over HTTP through the journal, keeping what lm-eval throws away.

Unlike lm-eval's own API models it sends no stop strings (they fire inside thinking), never cuts a prompt, takes its budget
from the suite instead of the task, lets the *server* apply the chat template, and remembers finish reasons and token
counts. Importing this module imports lm-eval, which is slow: do it inside functions.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from lm_eval.api.instance import Instance
from lm_eval.api.model import LM

from assay_evaluate.journal import Reply

Messages = list[dict[str, str]]
CHAT_MARK = "\x02chat\x02"
"""Begins a context that holds a conversation as JSON rather than a plain prompt."""


@dataclass(frozen=True)
class Question:
    """One prompt of an lm-eval task. `repeat` counts samples of the same document."""

    task: str
    doc_id: int
    repeat: int
    messages: Messages


class JournaledLM(LM):  # type: ignore[misc]  # lm_eval has no types
    """lm-eval's view of a served checkpoint."""

    def __init__(self, ask: Callable[[Sequence[Question]], list[Reply]]) -> None:
        """ask: gives the replies to questions, in order; one that failed has a status other than `answered`."""
        super().__init__()
        self._ask = ask
        self.replies: dict[tuple[str, int], list[Reply]] = {}
        """(task name, document id) -> replies, one per repeat."""
        self.prompts: dict[tuple[str, int], str] = {}

    def generate_until(self, requests: list[Instance]) -> list[str]:
        """Replies to `requests`; the task's own generation arguments (stop strings, budgets) are ignored by design."""
        seen: Counter[tuple[str, int]] = Counter()
        questions = []
        for request in requests:
            doc = (request.task_name, request.doc_id)
            context = request.args[0]
            # A context that did not go through apply_chat_template is one user message.
            is_chat = context.startswith(CHAT_MARK)
            messages = json.loads(context[len(CHAT_MARK) :]) if is_chat else [{"role": "user", "content": context}]
            questions.append(Question(*doc, seen[doc], messages))
            self.prompts[doc] = "\n".join(message["content"] for message in messages)
            seen[doc] += 1
        replies = self._ask(questions)
        for question, reply in zip(questions, replies, strict=True):
            self.replies.setdefault((question.task, question.doc_id), []).append(reply)
        return [reply.text for reply in replies]

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
