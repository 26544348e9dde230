"""The headline of a candidate: what decided its overall verdict, in one clause, and how many gates said what."""

from __future__ import annotations

import re
from collections.abc import Sequence

from assay.quantities import interval_name, percent_short, points
from assay.records.verdict import Attempt, Overall, Status, Verdict
from assay_evaluate.verdicts.divergence import DIVERGENCE
from assay_evaluate.verdicts.score_sentences import allowed, gains_more_than, if_cut_replies_were_wrong, open_question
from assay_evaluate.verdicts.whole import GATE as WHOLE

WORDS: dict[Status, str] = {
    "PASS": "passed", "FAIL": "failed", "UNDERPOWERED": "underpowered", "NOT MEASURED": "not measured",
}  # fmt: skip
TRUNCATION = "truncation"
"""Name of the gate on replies that are cut off or loop."""
OPENING = re.compile(r"(Both sides|Exact mode|Neither|No|Not|Nothing|Probe|Recorded|Serving fault|Structural tokens|Within) ")
"""Words that sentences without a clause begin with, where it is not a name."""
NO_TASK = "no task was asked, and only tasks can pass it"
NOTHING_SCORED = "no score was judged, and a small divergence alone does not show that a candidate is as good"


def reason_for(status: Overall, verdicts: Sequence[Verdict], *, asks_tasks: bool = True) -> str:
    """`loses 25.0 points on Chinese code lookup; 10 allowed; also failed: MMLU-Pro; 7 gates passed, 2 failed`.

    More replies cut off or looping, where they failed too, are said beside the score, for the loss may come from them.
    status: overall. verdicts: of one candidate, in the order of its gates. asks_tasks: the suite does. No full stop at the end.
    """
    deciding = [v for v in verdicts if v.has_say and v.status == ("PASS" if status == "not failed" else status)]
    if status == "PASS":
        whole = next((v.clause for v in deciding if v.gate == WHOLE), None)
        gains = [
            f"gains {points(-v.observed.value)} points on {name_of(v)}, a change of behaviour as large as a failure's"
            for v in verdicts
            if v.gate.startswith("score ")
            and v.observed is not None
            and v.limit is not None
            and v.status != "NOT MEASURED"
            and gains_more_than(v.observed, v.limit)
        ]
        parts = [whole or _closest(deciding), *gains]
    elif status == "not failed":
        parts = [_clause(next(v for v in deciding if v.gate.startswith(DIVERGENCE)))]
    elif deciding:
        parts = _what_decided(deciding, status)
    else:
        parts = [NOTHING_SCORED]
    if not asks_tasks and status in ("not failed", "UNDERPOWERED"):
        parts.append(NO_TASK)
    if status == "FAIL":
        parts += [_without_capital(v) for v in verdicts if v.faults][:1]
    return "; ".join([*parts, _counts(verdicts, status, deciding)])


def attempt_of(earlier: Sequence[Attempt], status: Overall, alpha: float) -> str:
    """`attempt 3 on these weights, after FAIL and UNDERPOWERED: ...`, with what that does to a PASS. alpha: of one."""
    number = len(earlier) + 1
    *others, last = (attempt.status for attempt in earlier)
    statuses = f"{', '.join(others)} and {last}" if others else last
    text = f"attempt {number} on these weights, after {statuses}"
    if status != "PASS":
        return text
    return f"{text}: one of {number} attempts passes a lost margin in up to {percent_short(min(1.0, number * alpha))}"


def suspect_reason(reference: str, verdicts: Sequence[Verdict]) -> str:
    """Why no candidate of the run is judged: `bf16 fails against itself: loses 6.2 points on GSM8K; 5 allowed`.

    verdicts: of the reference's own repeat, which failed.
    """
    decided = "; ".join(_what_decided([v for v in verdicts if v.has_say and v.status == "FAIL"], "FAIL"))
    return f"{reference} fails against itself: {decided}; so no loss in this run can be put down to a candidate"


def _what_decided(deciding: Sequence[Verdict], status: Status) -> list[str]:
    """The first score in a clause, replies that failed beside it in another, and the other gates by name."""
    scores = [v for v in deciding if v.gate.startswith("score ")]
    first = next((v for v in scores if v.faults), next(iter(scores), deciding[0]))
    rest = [v for v in deciding if v is not first]
    replies = [v.clause for v in rest if status == "FAIL" and v.gate == TRUNCATION and v.clause is not None]
    others = [v for v in rest if status != "FAIL" or v.gate != TRUNCATION]
    return [_clause(first), *replies, *([f"also {WORDS[status]}: {_names(others)}"] if others else [])]


def _counts(verdicts: Sequence[Verdict], overall: Overall, deciding: Sequence[Verdict]) -> str:
    """`7 gates passed, 1 failed, 2 not measured: RULER, tool calls`; names of those that no earlier part names."""
    numbers = {word: sum(v.status == status for v in verdicts) for status, word in WORDS.items()}
    (word, number), *rest = ((word, number) for word, number in numbers.items() if number)
    counts = [f"{number} gate{'s' if number != 1 else ''} {word}", *(f"{number} {word}" for word, number in rest)]
    unnamed = [v for v in verdicts if v.status == "NOT MEASURED" and not (overall == "NOT MEASURED" and v in deciding)]
    is_all = len(unnamed) == numbers[WORDS["NOT MEASURED"]]
    names = (f": {_names(unnamed)}" if is_all else f", {_names(unnamed)} among them") if unnamed else ""
    return ", ".join(counts) + names


def _names(verdicts: Sequence[Verdict]) -> str:
    return ", ".join(name_of(v) for v in verdicts)


def name_of(verdict: Verdict) -> str:
    """The task as sentences call it, or the gate."""
    return verdict.title or verdict.gate.removeprefix("score ")


def _closest(passed: Sequence[Verdict]) -> str:
    """Of a PASS the task that comes closest to its margin, by the end of its interval."""
    scores = [(v.observed, v.limit, v) for v in passed if v.gate.startswith("score ")]
    ends = [(drop.high / limit, drop, limit, v) for drop, limit, v in scores if drop is not None and limit is not None]
    _, drop, limit, closest = max(ends, key=lambda end: end[0])
    most = f"at most {points(drop.high)} lost" if drop.high >= 0 else f"at least {points(-drop.high)} gained"
    which = "the task that counts" if len(scores) == 1 else f"each of the {len(scores)} tasks that count"
    return (
        f"a loss of the margin is excluded on {which} (at {percent_short(0.5 + drop.level / 2)}); closest is "
        f"{name_of(closest)}, {most} ({interval_name(drop.level, drop.coverage)}); "
        f"{allowed(drop.model_copy(update={'value': drop.high}), limit)}"
    )


def _clause(verdict: Verdict) -> str:
    """What one gate saw: the loss on a task and what is allowed, or the sentence of any other gate."""
    drop, limit = verdict.observed, verdict.limit
    if verdict.status == "NOT MEASURED" or verdict.clause is None:
        return _without_capital(verdict)
    if verdict.status != "UNDERPOWERED" or not verdict.gate.startswith("score ") or drop is None or limit is None:
        return verdict.clause
    if verdict.worst_case is not None and drop.high < limit:
        return f"{verdict.clause}: {if_cut_replies_were_wrong(verdict.worst_case)}"
    return f"{verdict.clause}: {open_question(drop, limit)}"


def _without_capital(verdict: Verdict) -> str:
    """Its sentence as a clause; a title or name that begins it stays as it is written."""
    text = verdict.detail.removesuffix(".")
    return text if text.startswith(name_of(verdict)) or not OPENING.match(text) else text[:1].lower() + text[1:]
