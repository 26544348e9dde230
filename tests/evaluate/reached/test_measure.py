"""Right answers that were reached and lost, from replies in a journal: whole records, counted by hand."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from blank_records import item_result
from scipy import optimize, stats
from synthetic_run import make_measurement, task_of

from assay.recipes.load import load_recipe
from assay.recipes.suite import SuiteRecipe
from assay.records.measurement import AskedWith, ItemResult, Measurement
from assay.records.reached import Reached
from assay_evaluate.asking.evidence import full_text, key_of
from assay_evaluate.client.journal import Identity, Journal, Reply, Request
from assay_evaluate.client.message import separate_thinking
from assay_evaluate.reached import measure
from assay_evaluate.reached.measure import measure_reached
from assay_evaluate.statistics.graded import graded_difference
from assay_evaluate.statistics.paired import paired_difference
from assay_evaluate.statistics.proportions import wilson

SUITE = load_recipe(SuiteRecipe, "quick")
RIGHT = {f"i{number}": str(11 * number) for number in range(1, 9)}
"""Eight items: 11, 22, ... 88."""


class Said(NamedTuple):
    """A reply, and how it was graded."""

    text: str
    thinking: str | None = None
    correct: bool | None = False
    truncated: bool = False


def right(item: str) -> Said:
    return Said(f"#### {RIGHT[item]}", f"It is {RIGHT[item]}.", correct=True)


REFERENCE = {item: right(item) for item in RIGHT} | {
    "i2": Said("#### 98", "10 + 12 = 22. No, 98."),
    "i7": Said("#### 78", "70 + 7 = 77. No, 78."),
}
CANDIDATE = {item: right(item) for item in RIGHT} | {
    "i2": Said("#### 99", "10 + 12 = 22. Or 9 * 11 = 99."),  # as in the reference
    "i3": Said("#### 45", "30 + 3 = 33. 33 + 11 = 44."),  # and states one of seven other answers
    "i4": Said("", "So 40 + 4 = 44. Wait", truncated=True),
    "i5": Said("#### 45", "50 - 5 = 45."),  # never reached
    "i6": Said("60 + 6 = 66. No: 60 + 7 = 67.\n#### 67"),  # without thinking
    "i8": Said("", correct=None),
}


def measured(
    folder: Path, label: str, said: dict[str, Said], *, name: str = "sums", kind: Any = "arithmetic", expected: bool = True,
    in_journal: bool = True, right_answers: dict[str, str] = RIGHT, sample: int = 0, suffix: str = "", **changes: Any,
) -> Measurement:  # fmt: skip
    """A measurement of one task and its replies in the journal of the folder."""
    plain = make_measurement(label, SUITE)
    who = Identity(plain.checkpoint_sha256, "f" * 64, plain.suite)
    items: list[ItemResult] = []
    with Journal(folder / "journal.db") as journal:
        for number, (item, (text, thinking, correct, truncated)) in enumerate(said.items()):
            reply = Reply("answered", text=text, reasoning=thinking, finish_reason="stop", output_tokens=20 + number)
            request = Request(name, item + suffix, sample, "/v1/chat/completions", {"messages": []})
            if correct is not None and in_journal:
                journal.write_requests([(request.key(who), request)], who)
                journal.write_replies([(request.key(who), reply, 1)])
            items.append(
                item_result(
                    item, correct, truncated=truncated, output_tokens=20 + number,
                    answer=text.removeprefix("#### ") if text.startswith("####") else None,
                    text_key=key_of(full_text(separate_thinking(reply))), expected=right_answers[item] if expected else None,
                )
            )  # fmt: skip
    task = task_of(name, kind, items)
    return plain.model_copy(update={"tasks": (task,), "replies_sha256": "f" * 64, **changes})


def nothing(label: str, reason: str | None, num_unknown: int, **changes: Any) -> Reached:
    plain = Reached(
        label=label, task="sums", num_wrong=0, num_unknown=num_unknown, num_cut=0, num_reached=0, num_reached_cut=0, share=None,
        chance=None, beyond_chance=None, not_measured=reason,
    )  # fmt: skip
    return plain.model_copy(update=changes)


# ------------------------------------------------------------------------------------------------ whole records
def test_reached_and_lost(tmp_path: Path) -> None:
    sides = [measured(tmp_path, "fp8", REFERENCE), measured(tmp_path, "w4a16", CANDIDATE)]
    reference, candidate = measure_reached(sides, tmp_path / "journal.db")
    assert reference == Reached(
        label="fp8", task="sums", num_wrong=2, num_unknown=0, num_cut=0, num_reached=2, num_reached_cut=0, share=wilson(2, 2),
        chance=0.0, beyond_chance=graded_difference([1, 1], [0, 0]),
    )  # fmt: skip
    assert candidate == Reached(
        label="w4a16", task="sums", num_wrong=5, num_unknown=0, num_cut=1, num_reached=4, num_reached_cut=1, share=wilson(4, 5),
        chance=1 / 7 / 5, beyond_chance=graded_difference([1, 1, 1, 0, 1], [0, 1 / 7, 0, 0, 0]),
        lost_more=candidate.lost_more, lost_more_by_chance=1 / 7 / 7,
    )  # fmt: skip
    assert candidate.lost_more is not None
    assert (candidate.lost_more.value, candidate.lost_more.n) == (2 / 7, 7)  # i3, i4, i6 here, i7 there; i8 is not known


def test_intervals_against_scipy(tmp_path: Path) -> None:
    """Wilson's by scipy; Tango's by a restricted likelihood that is maximised numerically."""
    sides = [measured(tmp_path, "fp8", REFERENCE), measured(tmp_path, "w4a16", CANDIDATE)]
    _, candidate = measure_reached(sides, tmp_path / "journal.db")
    share, more = candidate.share, candidate.lost_more
    assert share is not None and more is not None
    by_scipy = stats.binomtest(4, 5).proportion_ci(0.95, method="wilson")
    assert (share.low, share.high) == pytest.approx((by_scipy.low, by_scipy.high))
    b, c, n = 3, 1, 7

    def score(delta: float) -> float:
        def minus_likelihood(q: float) -> float:
            return -(b * np.log(q + delta) + c * np.log(q) + (n - b - c) * np.log(1 - 2 * q - delta))

        bounds = (max(0.0, -delta) + 1e-12, (1 - delta) / 2 - 1e-12)
        q = optimize.minimize_scalar(minus_likelihood, bounds=bounds, method="bounded", options={"xatol": 1e-12}).x
        return float((b - c - n * delta) / np.sqrt(n * (2 * q + delta - delta**2)))

    assert more.low < 0 < more.high
    assert [score(more.low), score(more.high)] == pytest.approx([stats.norm.ppf(0.975), stats.norm.ppf(0.025)], abs=1e-4)


def test_a_candidate_like_the_reference_loses_no_more(tmp_path: Path) -> None:
    sides = [measured(tmp_path, label, REFERENCE) for label in ("fp8", "w4a16")]
    reference, candidate = measure_reached(sides, tmp_path / "journal.db")
    assert candidate.lost_more is not None
    assert (candidate.lost_more.value, candidate.lost_more_by_chance) == (0.0, 0.0)
    assert candidate == reference.model_copy(
        update={"label": "w4a16", "lost_more": candidate.lost_more, "lost_more_by_chance": 0.0}
    )


def test_all_that_chance_reaches_is_not_measured(tmp_path: Path) -> None:
    """Thinking that states every number reaches each right answer, and each other one as well."""
    every = " ".join(f"x = {value}." for value in RIGHT.values())
    rambling = {item: Said("#### 99", every) for item in RIGHT}
    sides = [measured(tmp_path, "fp8", REFERENCE), measured(tmp_path, "w4a16", rambling)]
    _, candidate = measure_reached(sides, tmp_path / "journal.db")
    assert candidate == nothing(
        "w4a16", "chance alone reaches 100 % of other items' answers, above 25 %", 0, num_wrong=8, num_reached=8, chance=1.0
    )


def test_what_the_reply_answers_is_not_taken_for_chance(tmp_path: Path) -> None:
    """Every reply thinks and answers what is right for the next item: its own wrong answer, and no chance."""
    names = list(RIGHT)
    shifted = {name: Said(f"#### {(wrong := RIGHT[names[at - 1]])}", f"It is {wrong}.") for at, name in enumerate(names)}
    [side] = measure_reached([measured(tmp_path, "fp8", shifted)], tmp_path / "journal.db")
    assert (side.num_wrong, side.num_reached, side.chance) == (8, 0, 0.0)


def test_choices(tmp_path: Path) -> None:
    """(C) is right of the first four, (A) of the others; of three that are wrong one had chosen C."""
    answers = {item: "(C)" if number < 4 else "(A)" for number, item in enumerate(RIGHT)}
    said = {item: Said("The answer is (B).", "Option C or B? B is right.") for item in RIGHT}
    said |= {"i1": Said("The answer is (B).", "So C. Hmm, no: B is correct."), "i2": Said("(B)", "C is correct. So (A).")}
    [side] = measure_reached([measured(tmp_path, "fp8", said, right_answers=answers)], tmp_path / "journal.db")
    assert (side.num_wrong, side.num_reached, side.chance) == (8, 2, 1 / 8)


def test_strings_of_ruler(tmp_path: Path) -> None:
    """All of them in one statement; of aliases, one. What another haystack hides is chance."""
    answers = {item: f"red{item}\nblue{item}" for item in RIGHT}
    said = {item: Said("I do not know.", f"The words are red{item} and green.") for item in RIGHT}
    said["i1"] = Said("redi1, green", "The words are: redi1, BLUEi1.")
    said["i2"] = Said("redi2, green", "redi2 stands there. blueI2 stands there.")
    for subtask, num_reached in (("niah_multivalue", 1), ("qa_1", 7)):
        side = measured(tmp_path, "fp8", said, kind="ruler", right_answers=answers)
        items = tuple(dataclasses.replace(item, subtask=subtask) for item in side.tasks[0].items)
        side = side.model_copy(update={"tasks": (side.tasks[0].model_copy(update={"items": items}),)})
        [reached] = measure_reached([side], tmp_path / "journal.db")
        assert (reached.num_wrong, reached.num_reached, reached.chance) == (8, num_reached, 0.0)


# ------------------------------------------------------------------------------------------------ what cannot be measured
@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"kind": "swe"}, measure.WITHOUT_ANSWER["swe"]),
        ({"kind": "tools"}, measure.WITHOUT_ANSWER["tools"]),
        ({"kind": "lm_eval", "asked_with": AskedWith(
            is_chat=False, chat_template_sha256=None, chat_template_kwargs={}, reasoning_parser=None, tool_call_parser=None,
            sends_seeds=True)}, measure.NO_CHAT),
        ({"kind": "lm_eval", "suite_recipe": {"tasks": [{"name": "sums", "stop_strings": "always"}]}}, measure.CUT_AT_STOPS),
        ({"in_journal": False}, measure.NO_REPLIES),
        ({"replies_sha256": "0" * 64}, measure.NO_REPLIES),
        ({"right_answers": dict.fromkeys(RIGHT, "7")}, measure.NO_OTHERS),
        ({"right_answers": dict.fromkeys(RIGHT, "def f():\n    pass")}, measure.NOT_STATED),
    ],
)  # fmt: skip
def test_named_when_it_cannot_be_measured(tmp_path: Path, changes: dict[str, Any], reason: str) -> None:
    sides = [measured(tmp_path, "fp8", REFERENCE, **changes)]
    assert measure_reached(sides, tmp_path / "journal.db") == (nothing("fp8", reason, 2),)


def test_no_journal(tmp_path: Path) -> None:
    sides = [measured(tmp_path, "fp8", REFERENCE)]
    assert measure_reached(sides, None) == (nothing("fp8", measure.NO_JOURNAL, 2),)


def test_nothing_wrong(tmp_path: Path) -> None:
    sides = [measured(tmp_path, label, {item: right(item) for item in RIGHT}) for label in ("fp8", "w4a16")]
    reference, candidate = measure_reached(sides, tmp_path / "journal.db")
    assert reference == nothing("fp8", None, 0)
    assert candidate == nothing("w4a16", None, 0, lost_more_by_chance=0.0, lost_more=paired_difference(0, 0, 8))


def test_right_answers_that_right_replies_do_not_state(tmp_path: Path) -> None:
    """What is recorded as right is the place of a choice; replies give its letter. Of twelve right ones four state a number."""
    answers = {f"i{number}": str(number % 3) for number in range(20)}
    said = {item: Said("The answer is (A).", "Is it (A)?", correct=number < 12) for number, item in enumerate(answers)}
    said |= {item: Said(f"The answer is {answers[item]}.", correct=True) for item in ("i0", "i1", "i2", "i3")}
    side = measured(tmp_path, "fp8", said, right_answers=answers)
    reason = "only 33.3 % of its right replies state what is recorded as right, so a statement of it cannot be told"
    assert measure_reached([side], tmp_path / "journal.db") == (
        nothing("fp8", reason, 0, num_wrong=8, read_share=4 / 12, chance=0.0),
    )
    few = measured(tmp_path / "few", "fp8", {item: said[item] for item in list(said)[3:]}, right_answers=answers)
    [reached] = measure_reached([few], tmp_path / "few" / "journal.db")  # nine right replies tell too little
    assert (reached.num_wrong, reached.num_reached, reached.read_share, reached.not_measured) == (8, 0, None, None)


# ------------------------------------------------------------------------------------------------ which reply
def test_a_reply_that_is_not_the_graded_one_does_not_count(tmp_path: Path) -> None:
    side = measured(tmp_path, "fp8", REFERENCE)
    [task] = side.tasks
    items = tuple(dataclasses.replace(item, text_key=1) if item.item == "i2" else item for item in task.items)
    side = side.model_copy(update={"tasks": (task.model_copy(update={"items": items}),)})
    [reached] = measure_reached([side], tmp_path / "journal.db")
    assert (reached.num_wrong, reached.num_unknown, reached.num_reached) == (1, 1, 1)


def test_the_repeat_has_replies_of_its_own(tmp_path: Path) -> None:
    """Those of the second pass; of a task that takes second replies, the second ones of the first pass."""
    other = CANDIDATE | {"i8": right("i8")}
    sides = [measured(tmp_path, "fp8", REFERENCE), measured(tmp_path, "fp8-repeat", other, sample=1)]
    assert [side.num_reached for side in measure_reached(sides, tmp_path / "journal.db")] == [2, 4]
    second = measured(tmp_path, "fp8-repeat", other, suffix="#1", name="drawn")
    task = second.tasks[0].model_copy(update={"is_second_replies": True})
    [reached] = measure_reached([second.model_copy(update={"tasks": (task,)})], tmp_path / "journal.db")
    assert (reached.num_wrong, reached.num_reached) == (5, 4)


def test_records_without_right_answers_take_those_of_right_replies(tmp_path: Path) -> None:
    """i2, which nobody gets right, is not known; what the others lost is."""
    sides = [measured(tmp_path, label, said, expected=False) for label, said in (("fp8", REFERENCE), ("w4a16", CANDIDATE))]
    reference, candidate = measure_reached(sides, tmp_path / "journal.db")
    assert (reference.num_wrong, reference.num_unknown, reference.num_reached) == (1, 1, 1)
    assert (candidate.num_wrong, candidate.num_unknown, candidate.num_reached) == (4, 1, 3)
    assert candidate.lost_more is not None
    assert (candidate.lost_more.value, candidate.lost_more.n) == (2 / 6, 6)
