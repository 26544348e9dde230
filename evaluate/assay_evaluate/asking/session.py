"""One pass of a suite over one served checkpoint: makes requests, turns replies into results, and keeps the servers busy.

While one task waits for its last replies, the next ones put their requests in line. A task to come is begun for that, in the
same thread, and left at its first question, whose requests are on their way then. When its turn comes it starts from the
beginning and finds them answered or under way. Doing the preparation twice costs CPU time while the servers work; threads per
task would not do, since some of lm-eval's scorers set alarms, which only the main thread may, and take the error for a wrong
answer.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

from assay.recipes.suite import TaskBase
from assay.records.measurement import ItemResult, TaskResult
from assay_evaluate.asking.acceptance import AcceptanceTally
from assay_evaluate.asking.dialect import Dialect, Messages, seed_of
from assay_evaluate.asking.evidence import ServedTally, marks_of
from assay_evaluate.asking.language import is_wrong_script
from assay_evaluate.client.client import Client
from assay_evaluate.client.journal import Reply, Request
from assay_evaluate.client.message import separate_thinking
from assay_evaluate.client.truncation import count_loops, count_thinking_cut, count_truncations, is_looping, truncation_of
from assay_evaluate.statistics.graded import mean_of_shares
from assay_evaluate.statistics.item_pairs import accuracy_of

T = TypeVar("T")
FIRST_IN_LINE = 32
"""Requests that a streamed task puts in line when it is begun early."""
EXPECTED_CHARS = 400
"""Kept of a right answer."""


class InLine(Exception):
    """Raised at the first question of a task that was begun early: its requests are in line."""


class LookAhead:
    """Runs tasks in order and begins those to come when asked to."""

    def __init__(self) -> None:
        self.is_looking = False
        """A task is being begun early: its first question must raise `InLine` instead of waiting for replies."""
        self._tasks: Sequence[Callable[[], object]] = ()
        self._next = 0

    def run(self, tasks: Sequence[Callable[[], T]]) -> list[T]:
        """What each task returns, in order."""
        self._tasks, results = tasks, []
        for number, task in enumerate(tasks):
            self._next = max(self._next, number + 1)
            results.append(task())
        return results

    def begin_next(self) -> bool:
        """Put the first requests of the next task in line; False if none is left."""
        if self._next >= len(self._tasks):
            return False
        task = self._tasks[self._next]
        self._next += 1
        self.is_looking = True
        try:
            task()
        except InLine:
            pass
        finally:
            self.is_looking = False
        return True


@dataclass(frozen=True)
class Session:
    """What every task needs to know. `sample`: 0, or 1 for the pass that measures the noise floor."""

    client: Client
    dialect: Dialect
    seed: str
    """The suite's."""
    sample: int
    has_reasoning_parser: bool
    sends_seeds: bool = True
    tally: AcceptanceTally = field(default_factory=AcceptanceTally)
    """Speculation of all replies to the tasks."""
    ahead: LookAhead = field(default_factory=LookAhead)
    served: defaultdict[str, ServedTally] = field(default_factory=lambda: defaultdict(ServedTally))
    """Task -> what the replies to it carry beside their answers."""
    takes_second_replies: bool = False
    """Each question is answered by the second reply to it that the pass before asked for, from the journal."""

    @property
    def max_model_len(self) -> int | None:
        return self.client.endpoint.max_model_len

    def thinking_budget_tokens(self, task: TaskBase) -> int | None:
        """What the server is told; without a reasoning parser vLLM refuses to be told, and the budget is one."""
        return task.thinking_tokens if self.has_reasoning_parser else None

    def parameters(self, task: TaskBase) -> dict[str, Any]:
        """Parameters of a task's requests beyond budget and temperature."""
        budget = self.thinking_budget_tokens(task)
        thinking = {} if budget is None else {"thinking_token_budget": budget}
        return {"top_p": task.top_p, "top_k": task.top_k, **thinking}

    def ask(self, requests: Sequence[Request]) -> list[Reply]:
        """Replies to a task's requests, in order, thinking apart from the answer; their speculation is added up."""
        if self.ahead.is_looking:
            self.client.submit(requests)
            raise InLine
        replies = self.client.ask(requests, self.ahead.begin_next)
        self.tally.add(replies)
        whole = [separate_thinking(reply) for reply in replies]
        for request, reply in zip(requests, whole, strict=True):
            self.served[request.task].note(request, reply)
        return whole

    def ask_each(self, requests: Iterable[Request]) -> Iterator[Reply]:
        """Like `ask`, one reply at a time; `requests` are made while earlier ones are under way. Read it to its end."""
        if self.ahead.is_looking:
            self.client.submit(list(itertools.islice(requests, FIRST_IN_LINE)))
            raise InLine
        sent, noted = itertools.tee(requests)
        for reply in self.client.ask_each(sent, self.ahead.begin_next):
            request = next(noted)
            self.tally.add([reply])
            reply = separate_thinking(reply)
            self.served[request.task].note(request, reply)
            yield reply

    def ask_pairs(self, questions: Iterable[T], make: Callable[[T], Request]) -> Iterator[tuple[T, Reply]]:
        """What is asked, each with its reply: taken while earlier ones are under way, forgotten when answered."""
        questions, made = itertools.tee(questions)
        for reply, question in zip(self.ask_each(map(make, made)), questions, strict=True):
            yield question, reply

    def ask_items(
        self, task: TaskBase, items: Iterable[T], make: Callable[[T, int], Request]
    ) -> Iterator[tuple[T, int, Reply]]:
        """(item, number of the sample, reply), so many of each item as the task says, one after the other: see `ask_pairs`."""
        repeated = ((item, sample) for item in items for sample in range(task.fewest_samples))
        for (item, sample), reply in self.ask_pairs(repeated, lambda pair: make(*pair)):
            yield item, sample, reply

    def request(
        self,
        task: str,
        item: str,
        messages: Messages,
        *,
        max_tokens: int,
        temperature: float,
        repeat: int = 0,
        with_ids: bool = False,
        more: Mapping[str, Any] | None = None,
    ) -> Request:
        """A request for one reply; `repeat` counts samples of the same question. more: parameters put over the usual ones."""
        if self.takes_second_replies:
            repeat += 1
        room = max_tokens if self.max_model_len is None else min(max_tokens, self.max_model_len)  # more is refused
        seed = seed_of(self.seed, task, item, repeat) if self.sends_seeds else None
        path, body = self.dialect.generation(messages, max_tokens=room, temperature=temperature, seed=seed, with_ids=with_ids)
        body.update(more or {})
        whose = 0 if self.takes_second_replies else self.sample
        return Request(task, item if repeat == 0 else f"{item}#{repeat}", whose, path, body)

    def question(
        self,
        task: TaskBase,
        item: str,
        messages: Messages,
        sample: int = 0,
        *,
        max_tokens: int | None = None,
        more: Mapping[str, Any] | None = None,
    ) -> Request:
        """A request of a task, with its sampling and, unless `max_tokens` says otherwise, its budget."""
        return self.request(
            task.name, item, messages, max_tokens=max_tokens or task.max_tokens, temperature=task.temperature, repeat=sample,
            more={**self.parameters(task), **(more or {})},
        )  # fmt: skip

    def result(
        self,
        task: TaskBase,
        reply: Reply,
        *,
        item: str,
        language: str,
        prompt: str,
        expected: str,
        correct: bool,
        answer: str | None,
        max_tokens: int | None = None,
        score: float | None = None,
        sample: int = 0,
    ) -> ItemResult:
        """An item's result; without a reply, neither right nor wrong. score: 0..1, where there is partial credit.

        sample: which of `num_samples` replies to the item this is. max_tokens: as it was asked with; None: the task's.
        """
        answered = reply.status == "answered"
        cut_by = truncation_of(
            reply,
            max_tokens=max_tokens or task.max_tokens,
            max_model_len=self.max_model_len,
            has_reasoning_parser=self.has_reasoning_parser,
        )
        return ItemResult(
            item=item,
            sample=sample,
            language=language,
            correct=correct if answered else None,
            truncated=cut_by is not None,
            truncated_by=cut_by,
            loops=is_looping(reply, cut_by, self.thinking_budget_tokens(task)),
            thinking_tokens=reply.thinking_tokens,
            score=score if answered else None,
            wrong_script=answered and is_wrong_script((reply.reasoning or "") + reply.text, prompt, expected),
            finish_reason=reply.finish_reason,
            prompt_tokens=reply.prompt_tokens,
            output_tokens=reply.output_tokens,
            answer=answer if answered else None,
            expected=end_of_answer(expected) if answered else None,
            error=reply.error,
            drafted_tokens=(reply.speculation or {}).get("num_draft_tokens"),
            accepted_tokens=(reply.speculation or {}).get("num_accepted_tokens"),
            **marks_of(reply, cut_by, expected),
        )


def end_of_answer(expected: str) -> str | None:
    """What is kept of a right answer: of a worked solution its end, where the answer is. None: there is none."""
    return expected.strip()[-EXPECTED_CHARS:] or None


def task_result(
    task: str,
    kind: Literal["arithmetic", "needle", "lm_eval", "ruler", "tools"],
    items: Sequence[ItemResult],
    max_tokens: int,
    note: str | None = None,
    thinking_budget_tokens: int | None = None,
) -> TaskResult:
    """All replies to a task as one record. Accuracy is over those that came; truncated ones count as scored.

    With several samples of an item it is the mean over the items' own means (avg@k), with an interval over items. So is the
    mean score of tasks with partial credit: with Wilson's interval where all are alike, else BCa; None for fewer than two
    items. thinking_budget_tokens: those of `max_tokens` after which the server ended the thinking, if it was told to.
    """
    scored = [item.correct for item in items if item.correct is not None]
    accuracy, pass_at_k, num_samples = accuracy_of(items)
    tokens = [item.output_tokens for item in items if item.output_tokens is not None]
    scores: dict[str, list[float]] = defaultdict(list)
    for item in items:
        if item.score is not None:
            scores[item.item].append(item.score)
    if not scored and not note:
        error = next((item.error for item in items if item.error), None)
        note = f"no item has a reply; the first error: {error}" if items else "the task has no items"
    return TaskResult(
        task=task,
        kind=kind,
        num_items=len(items),
        num_failed=len(items) - len(scored),
        num_truncated=sum(item.truncated for item in items),
        accuracy=accuracy,
        mean_output_tokens=sum(tokens) / len(tokens) if tokens else None,
        max_tokens=max_tokens,
        items=tuple(items),
        note=note,
        truncated_by=count_truncations(items),
        num_loops=count_loops(items),
        thinking_budget_tokens=thinking_budget_tokens,
        num_thinking_cut=count_thinking_cut(items, thinking_budget_tokens),
        mean_score=mean_of_shares([sum(values) / len(values) for values in scores.values()]) if len(scores) > 1 else None,
        num_samples=num_samples,
        pass_at_k=pass_at_k,
    )
