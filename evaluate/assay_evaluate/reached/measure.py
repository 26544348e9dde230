"""From measurements and stored replies: how often a wrong answer's working states the right one, and how often chance does.

The working of a reply is its thinking; where none stands apart, what comes before its final answer; all of a reply that was cut
off. It reaches the right answer if it states it (`statements`). Chance is measured by the same rule on the same working: the
share of other items' right answers, of the same form, that it states. Neither the right answer nor the one that the reply gave
is among these: a wrong reply has surely stated its own.

Sources: arXiv 2606.00206 (quantized models fail after they reached the right answer in up to 52 % of failures). The control by
other items' answers is assay's.
"""

from __future__ import annotations

import dataclasses
import random
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from assay.quantities import percent_plain, percent_short
from assay.records.base import Interval
from assay.records.measurement import ItemResult, Measurement, TaskResult
from assay.records.reached import Reached
from assay_evaluate.asking.evidence import full_text, key_of
from assay_evaluate.client.journal import Identity, Reply
from assay_evaluate.client.journal_reading import stored_replies
from assay_evaluate.client.message import separate_thinking
from assay_evaluate.reached.statements import Answer, Stated, read_answer, read_strings, statements_in
from assay_evaluate.statistics.clustered import clustered_difference, clustered_proportion
from assay_evaluate.statistics.decisions import wider_interval
from assay_evaluate.statistics.graded import graded_difference
from assay_evaluate.statistics.item_pairs import pair_items

MOST_OTHERS = 50
"""Other items' answers that a reply's working is searched for."""
FEWEST_OTHERS = 5
"""Different ones of the same form; where there are fewer, those of the same kind are taken."""
MOST_CHANCE = 0.25
"""Where the working states more of the other items' answers, that it states the right one says little."""
MOST_RIGHT, FEWEST_RIGHT = 100, 10
"""Right replies of which is seen whether they state the right answer; below the second nothing is concluded."""
LEAST_READ = 0.5
"""Share of these that must state it, or the task's right answers are not what its replies write."""
WITHOUT_ANSWER = {
    "swe": "a patch is no answer that thinking could state",
    "tools": "a call of a tool is no answer that thinking could state",
}
NO_CHAT = "without a chat template its replies run on into questions of their own"
CUT_AT_STOPS = "its replies are graded up to stop strings, which are not recorded"
NO_JOURNAL = "the run has no journal.db that can be read"
NOT_STATED = "its right answers are neither numbers, choices nor short phrases, or were not recorded"
NO_REPLIES = "the journal does not have the replies that were graded"
NO_OTHERS = "all items have the same right answer, so chance cannot be told from reaching it"
NOT_READ = "only {share} of its right replies state what is recorded as right, so a statement of it cannot be told"
TOO_LIKELY = "chance alone reaches {chance} of other items' answers, above {most}"

Key = tuple[str, int]
"""Item and sample."""
Answers = Mapping[str, Answer]
"""Item -> its right answer."""


class Look(NamedTuple):
    """One wrong reply. chance: share of other items' right answers that its working states."""

    item: ItemResult
    is_reached: bool
    chance: float


class Looks(NamedTuple):
    """Wrong replies of one task on one checkpoint, of which all is known that is needed; `reason`: why they say nothing."""

    wrong: Mapping[Key, Look]
    read_share: float | None
    reason: str | None


# ------------------------------------------------------------------------------------------------ a run
def measure_reached(measurements: Sequence[Measurement], journal: Path | None, level: float = 0.95) -> tuple[Reached, ...]:
    """Of every task and checkpoint, in the order of the measurements. journal: None, if there is none that can be read.

    MeasureError: it cannot be read.
    """
    reference = next((m for m in measurements if m.is_reference and not m.is_noise_floor), None)
    by_task = _by_task(measurements)
    answers = {name: _right_answers(tasks.values()) for name, tasks in by_task.items()}
    figures: dict[tuple[str, str], Reached] = {}
    looks: dict[tuple[str, str], Looks] = {}
    for measurement in measurements:
        for task in measurement.tasks:
            place = measurement.label, task.task
            reason = _why_not(measurement, task)
            if reason is not None or journal is None:
                looks[place] = Looks({}, None, reason or NO_JOURNAL)
            else:
                looks[place] = _looks(task, answers[task.task], _Replies(measurement, journal))
            figures[place] = _figures(measurement.label, task, looks[place], level)
    if reference is None:
        return tuple(figures.values())
    for (label, name), measured in figures.items():
        other = reference.label, name
        if label == reference.label or other not in figures or measured.not_measured or figures[other].not_measured:
            continue
        before, after = by_task[name][reference.label], by_task[name][label]
        lost_more = _lost_more((before, looks[other].wrong), (after, looks[label, name].wrong), level)
        figures[label, name] = measured.model_copy(update=lost_more)
    return tuple(figures.values())


def _by_task(measurements: Sequence[Measurement]) -> dict[str, dict[str, TaskResult]]:
    """Task -> label -> result."""
    tasks: dict[str, dict[str, TaskResult]] = defaultdict(dict)
    for measurement in measurements:
        for task in measurement.tasks:
            tasks[task.task][measurement.label] = task
    return tasks


def _why_not(measurement: Measurement, task: TaskResult) -> str | None:
    if task.kind in WITHOUT_ANSWER:
        return WITHOUT_ANSWER[task.kind]
    if task.kind == "lm_eval":
        if any(
            (row["name"], row.get("stop_strings")) == (task.task, "always") for row in measurement.suite_recipe.get("tasks", ())
        ):
            return CUT_AT_STOPS
        if measurement.asked_with is not None and not measurement.asked_with.is_chat:
            return NO_CHAT
    return None


# ------------------------------------------------------------------------------------------------ right answers
def _right_answers(tasks: Iterable[TaskResult]) -> dict[str, Answer]:
    """Item -> its right answer, as recorded; of earlier records what a right reply to it answered."""
    answers: dict[str, Answer] = {}
    for task in tasks:
        for item in task.items:
            if item.item not in answers and (answer := _right_answer(task, item)) is not None:
                answers[item.item] = answer
    return answers


def _right_answer(task: TaskResult, item: ItemResult) -> Answer | None:
    if task.kind == "ruler":
        any_of = (item.subtask or "").startswith("qa_")
        return None if item.expected is None else read_strings(item.expected, any_of=any_of)
    if item.expected is not None:
        return read_answer(item.expected)
    answer = read_answer(item.answer) if item.correct and item.answer else None
    return answer if answer is not None and answer.kind in {"number", "letter"} else None  # a phrase may be a whole reply


# ------------------------------------------------------------------------------------------------ replies
class _Replies:
    """Replies of one measurement, as they were graded."""

    def __init__(self, measurement: Measurement, journal: Path) -> None:
        self._journal = journal
        self._who = Identity(measurement.checkpoint_sha256, measurement.replies_sha256 or "", measurement.suite)
        self._is_repeat = measurement.is_noise_floor

    def to(self, task: TaskResult, items: Sequence[ItemResult]) -> Iterator[tuple[ItemResult, Reply]]:
        """Items with their replies, thinking apart; one whose graded reply is not there is left out."""
        later = int(task.is_second_replies)  # the journal has them as the first pass's
        by_name = {f"{item.item}#{n}" if (n := item.sample + later) else item.item: item for item in items}
        pass_number = int(self._is_repeat and not task.is_second_replies)
        for name, stored in stored_replies(self._journal, self._who, pass_number, task.task, by_name.keys()):
            item, reply = by_name[name], separate_thinking(stored)
            if item.text_key in {None, key_of(full_text(reply))} and item.output_tokens == reply.output_tokens:
                yield item, reply


def _looks(task: TaskResult, answers: Answers, replies: _Replies) -> Looks:
    wrong = [item for item in task.items if item.correct is False]
    with_answer = [item for item in wrong if item.item in answers]
    looks: dict[Key, Look] = {}
    reason = NO_REPLIES if with_answer else NOT_STATED
    pool = _Pool(answers.values())
    for item, reply in replies.to(task, with_answer):
        reason = NO_OTHERS
        working, final = _working_and_final(reply, item)
        right = answers[item.item]
        others = [answer for answer in pool.drawn_for(item.item, right) if answer != right and not final.has(answer)]
        if others:
            chance = sum(working.has(answer) for answer in others) / len(others)
            looks[item.item, item.sample] = Look(item, working.has(right), chance)
    if not looks:
        return Looks(looks, None, reason if wrong else None)
    read_share = _read_share(task, answers, replies)
    is_read = read_share is None or read_share >= LEAST_READ
    return Looks(looks, read_share, None if is_read else NOT_READ.format(share=percent_short(read_share or 0)))


def _read_share(task: TaskResult, answers: Answers, replies: _Replies) -> float | None:
    """Share of some right replies that state the right answer anywhere: whether the rule reads this task at all."""
    right = [item for item in task.items if item.correct and item.item in answers]
    drawn = random.Random(task.task).sample(right, min(MOST_RIGHT, len(right)))
    read = [
        Stated([*statements_in(reply.reasoning or ""), *statements_in(reply.text)]).has(answers[item.item])
        for item, reply in replies.to(task, drawn)
    ]
    return sum(read) / len(read) if len(read) >= FEWEST_RIGHT else None


class _Pool:
    """Right answers of all items of a task, from which those of other items are drawn."""

    def __init__(self, answers: Iterable[Answer]) -> None:
        self._of_form: dict[str, list[Answer]] = defaultdict(list)
        self._of_kind: dict[str, list[Answer]] = defaultdict(list)
        for answer in answers:
            self._of_form[answer.form].append(answer)
            self._of_kind[answer.kind].append(answer)
        self._num_different = {form: len(set(same)) for form, same in self._of_form.items()}

    def drawn_for(self, item: str, right: Answer) -> list[Answer]:
        """Of the form of `right`, or of its kind where there are few; always the same ones. `right` may be among them."""
        has_enough = self._num_different[right.form] > FEWEST_OTHERS
        same = self._of_form[right.form] if has_enough else self._of_kind[right.kind]
        return random.Random(item).sample(same, min(MOST_OTHERS, len(same)))


def _working_and_final(reply: Reply, item: ItemResult) -> tuple[Stated, Stated]:
    """What the working states, and what the reply answers in the end."""
    text = statements_in(reply.text)
    answered = read_answer(item.answer or "")
    given = statements_in(f"#### {answered.values[0]}") if answered else []
    if reply.reasoning:
        return Stated(statements_in(reply.reasoning)), Stated([*text, *given])
    if item.truncated:
        return Stated(text), Stated(given)
    ends = [statement.start for statement in text if statement.is_answer] or [statement.start for statement in text]
    last = max(ends, default=0)
    before = [statement for statement in text if statement.start < last]
    return Stated(before), Stated([*text[len(before) :], *given])


# ------------------------------------------------------------------------------------------------ figures
def _figures(label: str, task: TaskResult, looks: Looks, level: float) -> Reached:
    wrong, reason = list(looks.wrong.values()), looks.reason
    cut = [look for look in wrong if look.item.truncated]
    chance = sum(look.chance for look in wrong) / len(wrong) if wrong else None
    if reason is None and chance is not None and chance > MOST_CHANCE:
        reason = TOO_LIKELY.format(chance=percent_short(chance), most=percent_plain(MOST_CHANCE))
    is_known = reason is None and bool(wrong)
    return Reached(
        label=label,
        task=task.task,
        num_wrong=len(wrong),
        num_unknown=sum(item.correct is False for item in task.items) - len(wrong),
        num_cut=len(cut),
        num_reached=sum(look.is_reached for look in wrong),
        num_reached_cut=sum(look.is_reached for look in cut),
        read_share=looks.read_share,
        share=_share(wrong, level) if is_known else None,
        chance=chance,
        beyond_chance=_beyond_chance(wrong, level) if is_known else None,
        not_measured=reason,
    )


def _share(looks: Sequence[Look], level: float) -> Interval:
    reached = [look.is_reached for look in looks]
    return clustered_proportion(reached, [look.item.cluster or look.item.item for look in looks], level)


def _beyond_chance(looks: Sequence[Look], level: float) -> Interval | None:
    """Over items, each the mean of its wrong replies; the wider interval where items have clusters."""
    by_item: dict[str, list[Look]] = defaultdict(list)
    for look in looks:
        by_item[look.item.item].append(look)
    if len(by_item) < 2:
        return None
    reached = [sum(look.is_reached for look in same) / len(same) for same in by_item.values()]
    chance = [sum(look.chance for look in same) / len(same) for same in by_item.values()]
    clusters = [same[0].item.cluster or name for name, same in by_item.items()]
    differences = [share - expected for share, expected in zip(reached, chance, strict=True)]
    clustered = clustered_difference(differences, clusters) if len(set(clusters)) < len(clusters) else None
    return wider_interval(graded_difference(reached, chance, level=level), clustered)


Side = tuple[TaskResult, Mapping[Key, Look]]


def _lost_more(reference: Side, candidate: Side, level: float) -> dict[str, Interval | float | None]:
    """Paired as scores are: a reply counts as lost if it reached the right answer and does not give it."""
    before, after = (_with_lost_as_wrong(*side) for side in (reference, candidate))
    pairs = pair_items(before, after)
    if not pairs.n:
        return {}
    known = [{(item.item, item.sample) for item in task.items if item.correct is not None} for task in (before, after)]
    paired = known[0] & known[1]
    by_chance = [sum(look.chance for key, look in looks.items() if key in paired) for _, looks in (reference, candidate)]
    return {
        "lost_more": pairs.drop(level),
        "lost_more_by_chance": (by_chance[1] - by_chance[0]) / len(paired) if paired else None,
    }


def _with_lost_as_wrong(task: TaskResult, looks: Mapping[Key, Look]) -> TaskResult:
    def kept(item: ItemResult) -> bool | None:
        look = looks.get((item.item, item.sample))
        return item.correct or (None if look is None else not look.is_reached)

    items = tuple(dataclasses.replace(item, correct=None if item.correct is None else kept(item)) for item in task.items)
    return task.model_copy(update={"items": items})
