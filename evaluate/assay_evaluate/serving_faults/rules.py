"""Before anything is judged: are the replies to every task those of the weights, to the same questions, and whole?

A task that breaks a rule has no score, whoever it favours, and no other gate looks at its replies.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from assay.records.measurement import Measurement, TaskResult
from assay.records.verdict import ServingFinding
from assay_evaluate.serving_faults.endings import capped, contradicting_usage, cut_early, stop_at_budget, unsent_stop
from assay_evaluate.serving_faults.names import another_configuration, another_model, replayed
from assay_evaluate.serving_faults.prompts import other_prompts, shortened_prompts
from assay_evaluate.serving_faults.sides import SHORT_TOKENS, Finding, Pair, Repeated, Side
from assay_evaluate.serving_faults.temperature import not_greedy, not_sampled
from assay_evaluate.serving_faults.texts import (
    answers_in_thinking,
    longer_thinking,
    lost_text,
    one_text,
    texts_of_others,
    thinking_on_one_side,
)
from assay_evaluate.statistics.item_pairs import common_tasks

MOST_SAID = 2
"""Findings in a verdict's sentence; all of them are in the record."""
Needs = Literal["served", "marks", "asked twice", "nothing"]


class Rule(NamedTuple):
    """One rule. Its false alarms and its power are in benchmarks/trust/alike.md."""

    name: str
    check: Callable[[Pair], Iterator[Finding]]
    needs: Needs
    """Evidence that old records lack. marks: what items keep of their replies."""
    catches: str
    """What goes wrong, and where it was reported."""
    threshold: str


RULES: tuple[Rule, ...] = (
    Rule("another model", another_model, "served",
         "a fallback or split traffic answers (litellm #13486, #28241)",
         "more than 0.5 % of the replies; as many without a name where others of the server have one"),
    Rule("another configuration", another_configuration, "served",
         "questions and signature go to different servers",
         "more than 0.5 % of the replies"),
    Rule("replayed", replayed, "marks",
         "a cache replays replies (lm-evaluation-harness PR #3839, inspect_ai #2580)",
         "more than 1 % of the replies, 2 at least; of a second pass 5 %; half of 3 questions asked twice; 0.5 % by a "
         "header"),
    Rule("other prompts", other_prompts, "nothing",
         "prompts shortened, another template, first token twice, swapped replies (ollama #17889, little-coder #128)",
         "more than 0.5 % of the questions"),
    Rule("shortened prompts", shortened_prompts, "served",
         "the same on both sides, against our own count",
         "more than 8 tokens and 2 % below the count, beyond what no prompt is billed for"),
    Rule("capped", capped, "marks",
         "a cap that says stop (hermes-agent #108558, inspect_ai PR #5189)",
         "5 and 2 % of the replies end without an answer at one length of 16 tokens or more; p < 1e-6 by the lengths "
         "near it"),
    Rule("cut early", cut_early, "nothing",
         "max_tokens lowered on the way",
         "more than 0.5 % say `length` below budget and context"),
    Rule("stop at budget", stop_at_budget, "nothing",
         "finish_reason changed on the way",
         "3, and half of the replies that fill their budget, say `stop`; p < 1e-4 by the lengths below it"),
    Rule("unsent stop", unsent_stop, "served",
         "a stop string is added (vllm #53066, lm-evaluation-harness PR #3700)",
         "more than 0.5 % of the replies"),
    Rule("thinking on one side", thinking_on_one_side, "marks",
         "thinking switched or unparsed on one side (club-3090 #747, omlx #358)",
         "half of the ended replies on one side, 2 % on the other, 10 replies each"),
    Rule("longer thinking", longer_thinking, "marks",
         "another reasoning effort",
         "4 times in the median of 20 pairs or more, 90 % in one direction, 200 characters or more"),
    Rule("answers in thinking", answers_in_thinking, "marks",
         "a reasoning parser that swallows answers (vllm #41902, PR #42635)",
         "3 % of the replies, 5 at least, with the right answer at the end of the thinking"),
    Rule("one text", one_text, "marks",
         "a maintenance page or a filter answers with HTTP 200",
         "5 and 5 % of the questions, 32 characters or more, 10 % right at most, without the thinking or counts of the "
         "others (p < 1e-5)"),
    Rule("texts of others", texts_of_others, "marks",
         "replies are swapped",
         "3 and more than 0.5 % of the replies, 24 tokens or more, where no two questions share a right reply"),
    Rule("lost text", lost_text, "served",
         "text is cut while its tokens are billed",
         "2 and more than 0.5 % of the replies lack 8 tokens and 20 % by a tokenizer; or all lack 20 % next to the "
         "other side; or more than 0.5 % end before the reference's with as many tokens"),
    Rule("usage", contradicting_usage, "served",
         "usage that contradicts itself (kserve PR #3712, llama.cpp PR #27318)",
         "more than 0.5 % of the replies"),
    Rule("not greedy", not_greedy, "asked twice",
         "temperature 0 counts as not given (agno #988, OpenManus PR #642)",
         "asked twice: p < 1e-4 by one difference in 150 tokens; or p < 1e-3 by one in 350, and by three times the "
         "other side's noise; or 10 % of the reference's short replies turn in its second pass (p < 1e-6)"),
    Rule("not sampled", not_sampled, "asked twice",
         "temperature forced to 0",
         "asked twice: 90 % alike at the candidate, 50 % at the reference, 8 questions each, 32 tokens or more"),
)  # fmt: skip


def check_pair(pair: Pair) -> list[tuple[Rule, Finding]]:
    """What the rules find in one task of two sides, in their order."""
    return [(rule, finding) for rule in RULES for finding in rule.check(pair)]


def unchecked_rules(pair: Pair) -> list[str]:
    """Names of the rules for which a record, of an earlier version, has no evidence."""
    sides = (pair.reference, pair.candidate)
    missing: set[Needs] = set()
    if any(side.task.served is None for side in sides):
        missing.add("served")
    if any(item.text_key is None for side in sides for item in side.answered):
        missing.add("marks")
    if any(not side.asked_twice and not side.is_repeat for side in sides):
        missing.add("asked twice")
    return [rule.name for rule in RULES if rule.needs in missing]


# ------------------------------------------------------------------------------------------------ two measurements
@dataclass(frozen=True)
class ServingCheck:
    """What the rules found in all tasks of one candidate."""

    findings: tuple[ServingFinding, ...]
    unchecked_rules: tuple[str, ...]
    """Rules for which some task has no evidence, in their order."""

    @property
    def by_task(self) -> Mapping[str, Sequence[ServingFinding]]:
        tasks = dict.fromkeys(finding.task for finding in self.findings)
        return {task: [finding for finding in self.findings if finding.task == task] for task in tasks}


def check_serving(reference: Measurement, candidate: Measurement, repeat: Measurement | None) -> ServingCheck:
    """Every task that both were asked. repeat: the reference's second pass, which shows the noise of its server."""
    repeated = None if repeat is None else compare_passes(common_tasks(reference, repeat))
    labels = {"reference": (reference.label,), "candidate": (candidate.label,), "both": (reference.label, candidate.label)}
    findings: list[ServingFinding] = []
    missing: dict[str, None] = {}
    for task, other in common_tasks(reference, candidate):
        if task.kind in {"swe", "imported"} or not task.items or not other.items:
            continue
        pair = Pair(_side(reference, task, repeated), _side(candidate, other, None))
        findings += [
            ServingFinding(
                candidate=candidate.label, task=task.task, rule=rule.name, at_fault=labels[finding.side],
                clause=finding.clause, num=finding.num, of=finding.of,
            )
            for rule, finding in check_pair(pair)
        ]  # fmt: skip
        missing |= dict.fromkeys(unchecked_rules(pair))
    return ServingCheck(tuple(findings), tuple(missing))


def _side(measurement: Measurement, task: TaskResult, repeated: Repeated | None) -> Side:
    prompts = [prompt for other in measurement.tasks if other.served is not None for prompt in other.served.prompt_counts]
    return Side(
        measurement.label,
        task,
        measurement.signature,
        measurement.asked_twice,
        repeated,
        uncounted_tokens=max(0, min((prompt.counted - prompt.billed for prompt in prompts), default=0)),
        is_repeat=measurement.is_noise_floor,
    )


def compare_passes(passes: Sequence[tuple[TaskResult, TaskResult]]) -> Repeated:
    """Of all tasks at temperature 0 together; each in the first pass and in the second."""
    pairs = []
    for task, again in passes:
        if task.served is None or task.served.temperature > 0:
            continue
        second = {(item.item, item.sample): item for item in again.items if item.text_key is not None}
        pairs += [
            (item, second[item.item, item.sample])
            for item in task.items
            if item.text_key is not None and (item.item, item.sample) in second
        ]
    short = [pair for pair in pairs if all(0 < (item.output_tokens or 0) <= SHORT_TOKENS for item in pair)]
    return Repeated(
        len(pairs),
        sum(item.text_key != other.text_key for item, other in pairs),
        len(short),
        sum(item.correct != other.correct for item, other in short),
    )


# ------------------------------------------------------------------------------------------------ what follows
def without_tasks(measurement: Measurement, tasks: Collection[str]) -> Measurement:
    """The measurement without some of its tasks."""
    return measurement.model_copy(update={"tasks": tuple(task for task in measurement.tasks if task.task not in tasks)})


def serving_fault(title: str, findings: Sequence[ServingFinding]) -> str:
    """`Serving fault on lookup: the same question had 686 prompt tokens at fp8 and 517 at w4a16 (...).`"""
    clauses = [finding.clause for finding in findings[:MOST_SAID]]
    more = len(findings) - len(clauses)
    return f"Serving fault on {title}: {'; '.join(clauses)}{f'; and {more} more' if more else ''}."
