"""Chain-of-thought through lm-eval: our items, and tasks by name, scored item by item as lm-eval itself scores them."""

from __future__ import annotations

import dataclasses
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from blank_records import blank_fingerprint
from fake_server import FakeServer, Scripted
from lm_eval_questions import ANSWERS, WHO, lm_eval_alone, reply_from_file, reply_to, session_with

from assay.recipes.gate import Stopping
from assay.recipes.load import load_recipe
from assay.recipes.suite import ArithmeticTask, LmEvalTask, Range, SuiteRecipe
from assay.records.serving import Fingerprint
from assay_evaluate.asking.acceptance import AcceptanceTally, acceptance
from assay_evaluate.asking.dialect import takes_seeds
from assay_evaluate.asking.language import count_scripts, is_wrong_script
from assay_evaluate.client.client import Client, NotMeasured
from assay_evaluate.run.suite import _measure_task
from assay_evaluate.tasks.generated import arithmetic_items, run_generated
from assay_evaluate.tasks.items import arithmetic_item
from assay_evaluate.tasks.lm_eval.task import _part_of_translation, run_lm_eval
from assay_evaluate.tasks.looks import Look, in_drawn_order, items_at, planned_looks, task_at_look

ARITHMETIC = ArithmeticTask(kind="arithmetic", name="arithmetic", num_items=3, num_steps=(3, 4), max_tokens=64)


@pytest.mark.slow
def test_named_task_scores_item_by_item_as_lm_eval_does(tmp_path: Path, task_folder: Path) -> None:
    task = LmEvalTask(kind="lm_eval", name="maths", tasks=("local_gsm8k",), max_tokens=64, include_path=str(task_folder))
    with FakeServer(reply_from_file) as server, session_with(server, tmp_path) as session:
        result = run_lm_eval(session, task)
        again = run_lm_eval(session, task)
    alone = lm_eval_alone(task_folder, "local_gsm8k", reply_to)
    assert {int(i.item.split("/")[1]): i.correct for i in result.items} == alone["flexible-extract"]
    assert [item.expected for item in result.items] == [f"Think. #### {answer}" for answer in ANSWERS.values()]
    assert alone["flexible-extract"] == {0: True, 1: True, 2: False, 3: True, 4: True, 5: False}
    assert alone["flexible-extract"] != alone["strict-match"]
    assert result.accuracy is not None
    assert (result.task, result.num_items, result.num_failed, result.accuracy.value) == ("maths", 6, 0, pytest.approx(4 / 6))
    assert (result.items[0].answer, result.items[2].answer) == ("4.", "41.")
    assert result.note == "local_gsm8k scored by exact_match after flexible-extract"
    assert again == result
    assert server.count("/v1/chat/completions") == 6  # the second run came from the journal
    bodies = [body for _, body in server.requests]
    assert [{"role": "user", "content": "Q: 2 + 2\nA: Let's think step by step."}] in [body["messages"] for body in bodies]
    assert {(body["max_tokens"], body["temperature"], "stop" in body) for body in bodies} == {(64, 0.0, False)}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("local_graded", "metric quality gives 0.5; only right-or-wrong metrics are measured"),
        ("local_choice", "local_choice is scored by multiple_choice; only tasks that generate a reply are measured"),
        ("local_gone", "local_gone: cannot be loaded: FileNotFoundError"),
        ("no_such_task", "no_such_task: cannot be loaded: KeyError"),
    ],
)
def test_what_cannot_be_measured_says_why(tmp_path: Path, task_folder: Path, name: str, reason: str) -> None:
    task = LmEvalTask(kind="lm_eval", name="x", tasks=(name,), max_tokens=64, include_path=str(task_folder))
    with FakeServer() as server, session_with(server, tmp_path) as session:
        result = run_lm_eval(session, task)
    assert (result.accuracy, result.num_items, result.items) == (None, 0, ())
    assert result.note is not None
    assert reason in result.note


def test_arithmetic_is_scored_truncation_failure_and_script_are_told_apart(tmp_path: Path) -> None:
    """Six items: right, cut off, wrong, refused by the server, in the wrong script, right but without an end."""
    items = list(arithmetic_items(ARITHMETIC, "eval-test"))
    assert [i.language for i in items] == ["en"] * 3 + ["zh"] * 3
    assert items[1] == arithmetic_item("eval-test", 1, "en", 4)
    replies = {
        items[0].prompt: Scripted(f"Let us think.\n#### {items[0].answer}"),
        items[1].prompt: Scripted("Let us think and think", finish_reason="length", output_tokens=64),
        items[2].prompt: Scripted(f"#### 1{items[2].answer}", speculation=(2, 4, 3)),
        items[3].prompt: Scripted("busy", status=503),
        items[4].prompt: Scripted(f"И снова думаем. #### {items[4].answer}", speculation=(1, 2, 0)),
        items[5].prompt: Scripted(f"想一想。#### {items[5].answer}", output_tokens=64),
    }
    with FakeServer(lambda body: replies[body["messages"][0]["content"]]) as server, session_with(server, tmp_path) as session:
        result = run_generated(session, ARITHMETIC, items)
    assert [i.item for i in result.items] == [i.id for i in items]
    assert [i.correct for i in result.items] == [True, False, False, None, True, True]
    assert [i.truncated for i in result.items] == [False, True, False, False, False, True]
    assert [i.wrong_script for i in result.items] == [False, False, False, False, True, False]
    assert [i.answer for i in result.items] == [
        items[0].answer,
        None,
        f"1{items[2].answer}",
        None,
        *(i.answer for i in items[4:]),
    ]
    assert result.items[3].error == "HTTP 503: busy"
    assert (result.num_items, result.num_failed, result.num_truncated) == (6, 1, 2)
    assert result.accuracy is not None
    assert (result.accuracy.value, result.accuracy.n) == (3 / 5, 5)
    assert dict(session.tally.totals) == {"num_drafts": 3, "num_draft_tokens": 6, "num_accepted_tokens": 3}
    reported = acceptance(session.tally, {})
    assert reported is not None and (reported.num_replies, reported.rate) == (2, 0.5)
    # linearised: deviations accepted - rate x drafted of 3 - 2 and 0 - 1, over 6 drafted tokens of 2 replies
    assert reported.rate_standard_error == pytest.approx(np.sqrt(2 * (1 + 1)) / 6)
    in_total = acceptance(AcceptanceTally(), {"num_drafts": 3, "num_draft_tokens": 6, "num_accepted_tokens": 3})
    assert in_total == reported.model_copy(update={"num_replies": None, "rate_standard_error": None})


@pytest.mark.parametrize(
    ("listed", "name", "part"),
    [
        (("mgsm_native_cot_bn", "mgsm_native_cot_zh"), "mgsm_native_cot_zh", ""),
        (("mmlu_prox_lite_ar", "mmlu_prox_lite_zh"), "mmlu_prox_lite_zh_computer_science", "computer_science"),
        (("mmlu_prox_lite", "mmlu_prox_lite_ar"), "mmlu_prox_lite_ar_math", "math"),
    ],
)
def test_translations_are_told_by_what_their_names_have_beyond_the_language(
    listed: tuple[str, ...], name: str, part: str
) -> None:
    task = LmEvalTask(kind="lm_eval", name="x", tasks=listed, max_tokens=64, translations=True)
    assert _part_of_translation(task, name) == part
    with pytest.raises(NotMeasured, match=r"other_task does not begin with any of .*leave out `translations: true`"):
        _part_of_translation(task, "other_task")


@pytest.mark.slow
def test_questions_of_one_number_are_a_cluster_in_translations(tmp_path: Path, task_folder: Path) -> None:
    one = (task_folder / "local.yaml").read_text()
    (folder := tmp_path / "tasks").mkdir()
    for name in ("local_gsm8k", "other_gsm8k"):
        (folder / f"{name}.yaml").write_text(one.replace("task: local_gsm8k", f"task: {name}"))
    fields: dict[str, Any] = {"kind": "lm_eval", "name": "maths", "tasks": ("local_gsm8k", "other_gsm8k"), "max_tokens": 64}
    result = {}
    for translations in (False, True):
        task = LmEvalTask(**fields, include_path=str(folder), translations=translations)
        with FakeServer(reply_from_file) as server, session_with(server, tmp_path) as session:
            result[translations] = [(item.item, item.cluster) for item in run_lm_eval(session, task).items]
    names = [item for item, _ in result[True]]
    assert len(names) == len(set(names)) == 2 * len(ANSWERS)
    assert result[True] == [(name, name.split("/")[1]) for name in names]
    assert result[False] == [(name, None) for name in names]


def test_how_a_task_is_judged_is_recorded_and_no_part_of_the_suites_hash(tmp_path: Path) -> None:
    fields: dict[str, Any] = {"kind": "lm_eval", "name": "maths", "tasks": ("a", "b"), "max_tokens": 64}
    plain = LmEvalTask(**fields, chance=0.25, translations=True).model_dump()
    assert plain == LmEvalTask(**fields).model_dump()
    suite = load_recipe(SuiteRecipe, "quick")
    chances = {}
    for chance in (0.0, 0.25):
        task = ARITHMETIC.model_copy(update={"chance": chance})
        with FakeServer(lambda body: Scripted("#### 1")) as server, session_with(server, tmp_path) as session:
            chances[chance] = _measure_task(session, suite, task, WHO, None).chance
    assert chances == {0.0: 0.0, 0.25: 0.25}
    result = {task.name: task.chance for name in ("full", "languages") for task in load_recipe(SuiteRecipe, name).tasks}
    listed = [task for task in load_recipe(SuiteRecipe, "languages").tasks if isinstance(task, LmEvalTask)]
    assert {task.name: task.translations for task in listed} == {"mgsm": True, "mmlu-languages": True}
    assert {name: chance for name, chance in result.items() if chance} == {
        "gpqa-diamond": 0.25, "mmlu-pro": 0.1, "mmlu-languages": 0.1,
    }  # fmt: skip
    with pytest.raises(ValueError, match="needs several tasks, one for each language"):
        LmEvalTask(**{**fields, "tasks": ("a",)}, translations=True)


def test_budget_is_capped_at_what_the_server_allows_and_prompts_are_never_cut(tmp_path: Path) -> None:
    """lm-eval's own API model cuts the prompt to nothing at a budget of 16,384."""
    items = list(arithmetic_items(ARITHMETIC, "eval-test"))
    task = ARITHMETIC.model_copy(update={"max_tokens": 16384})
    with FakeServer(max_model_len=500) as server, session_with(server, tmp_path) as session:
        run_generated(session, task, items)
    assert {body["max_tokens"] for _, body in server.requests} == {500}
    assert sorted(body["messages"][0]["content"] for _, body in server.requests) == sorted(i.prompt for i in items)


def test_several_samples_of_every_document(tmp_path: Path, task_folder: Path) -> None:
    """Three replies to each of six documents, each scored by lm-eval as if it were the only one; avg@3, pass@3, by item."""
    task = LmEvalTask(
        kind="lm_eval", name="maths", tasks=("local_gsm8k",), max_tokens=64, include_path=str(task_folder), num_samples=3,
        temperature=0.7,
    )  # fmt: skip
    times: dict[str, int] = {}

    def reply(body: dict[str, Any]) -> Scripted:
        question = body["messages"][-1]["content"].removeprefix("Q: ").split("\n")[0]
        times[question] = times.get(question, 0) + 1
        is_right = {"2 + 2": [1, 1, 1], "10 - 3": [0, 1, 0]}.get(question, [0, 0, 0])[times[question] - 1]
        return Scripted(f"The answer is {ANSWERS[question] if is_right else 77}.")

    with FakeServer(reply) as server, session_with(server, tmp_path) as session:
        one_at_a_time = dataclasses.replace(session, client=Client(server, session.client.journal, WHO, concurrency=1))
        with one_at_a_time.client:
            result = run_lm_eval(one_at_a_time, task)
        again = run_lm_eval(session, task)
    assert len(server.requests) == 18
    assert len({body["seed"] for _, body in server.requests}) == 18
    rights = {item: [one.correct for one in result.items if one.item == f"local_gsm8k/{item}"] for item in range(len(ANSWERS))}
    assert rights == {0: [True] * 3, 1: [False, True, False], **{item: [False] * 3 for item in range(2, 6)}}
    assert [one.sample for one in result.items if one.item == "local_gsm8k/0"] == [0, 1, 2]
    assert (result.num_samples, result.num_items) == (3, 18)
    assert result.accuracy is not None and result.pass_at_k is not None
    assert (result.accuracy.value, result.accuracy.n) == (pytest.approx((1 + 1 / 3) / 6), 6)
    assert (result.pass_at_k.value, result.pass_at_k.n) == (2 / 6, 6)
    assert again == result


@pytest.mark.slow
def test_a_range_of_items_grows_by_new_ones(tmp_path: Path, task_folder: Path) -> None:
    """Two documents, then two more, then the other two, in an order drawn by the seed; none is asked twice, each is scored as
    ever, and each look can be taken out of the last result again."""
    task = LmEvalTask(
        kind="lm_eval", name="maths", tasks=("local_gsm8k",), max_tokens=64, include_path=str(task_folder), temperature=0.7,
        limit=Range(min=2, max=6),
    )  # fmt: skip
    looks = planned_looks(task, Stopping())
    assert looks == (Look(2, 1, 2), Look(2, 1, 4), Look(2, 1, 6))
    found, asked = [], []
    with FakeServer(reply_from_file) as server, session_with(server, tmp_path) as session:
        for look in looks:
            found.append(run_lm_eval(session, task_at_look(task, look.reference_samples, look.limit)))
            asked.append(len(server.requests))
        by_limit = run_lm_eval(session, task.model_copy(update={"limit": None}))
        second = run_lm_eval(dataclasses.replace(session, takes_second_replies=True, sample=1), task_at_look(task, 1, 2))
        drawn = in_drawn_order(session.seed, "local_gsm8k", range(6))
    assert asked == [4, 8, 12]
    assert len(server.requests) == 12
    assert drawn != list(range(6))
    for look, result in zip(looks, found, strict=True):
        assert look.limit is not None
        assert {one.item for one in result.items} == {f"local_gsm8k/{number}" for number in drawn[: look.limit]}
        assert sorted(items_at(task, found[-1].items, 2, look.limit, session.seed), key=str) == sorted(result.items, key=str)
    first = {one.item: one for one in found[-1].items if one.sample == 0}
    assert {one.item: one for one in by_limit.items} == first
    again = {one.item: one for one in found[0].items if one.sample == 1}
    assert {one.item: dataclasses.replace(one, sample=1) for one in second.items} == again


def test_greedy_samples_are_refused() -> None:
    with pytest.raises(ValueError, match="greedy replies to one question are all alike"):
        ArithmeticTask(kind="arithmetic", name="a", num_items=1, max_tokens=9, num_samples=2)


def test_noise_floor_pass_asks_again(tmp_path: Path) -> None:
    items = list(arithmetic_items(ARITHMETIC, "eval-test"))
    with FakeServer() as server:
        for sample in (0, 1, 0, 1):
            with session_with(server, tmp_path, sample) as session:
                run_generated(session, ARITHMETIC, items)
    assert len(server.requests) == 12
    assert server.requests[0][1]["seed"] in {body["seed"] for _, body in server.requests[6:]}


@pytest.mark.parametrize(
    ("reply", "expected", "wrong"),
    [
        ("3 + 4 = 7 #### 7", ("How many apples?", "7"), False),
        ("先算 3 + 4 = 7", ("How many apples?", "7"), True),
        ("先算 3 + 4 = 7，用 x 表示", ("有几个苹果？", "7"), False),
        ("First add three and four", ("有几个苹果？", "7"), True),
        ("The angle is α + β = 90", ("What is the angle?", "90"), False),
        ("สวัสดี", ("Hello?", ""), True),
        ("fine" * 100 + "ж", ("Hello?", ""), False),
        ("fine" * 10 + "ж", ("Hello?", ""), True),
        ("", ("Hello?", ""), False),
    ],
)
def test_wrong_script(reply: str, expected: tuple[str, str], wrong: bool) -> None:
    assert is_wrong_script(reply, *expected) is wrong


def test_scripts_are_counted() -> None:
    assert count_scripts("ab 12 漢字, кот! カナ 한글 Ꭰ") == {
        "Latin": 2,
        "Han": 2,
        "Cyrillic": 3,
        "Kana": 2,
        "Hangul": 2,
        "Other": 1,
    }


def test_scripts_of_ascii_and_of_one_letter_at_a_time_add_up() -> None:
    """ASCII is counted as bytes, the rest by distinct letter: the same as every letter by itself."""
    text = "x1 = 2y; [é] Ω_3, \ud800 \u00aa \u200b 漢漢 @`{ AZ az\n" * 3
    assert count_scripts(text) == sum((count_scripts(letter) for letter in text), Counter())
    assert count_scripts(text)["Latin"] == 3 * 8 and count_scripts("@[`{09") == {}


def test_seeds_are_sent_only_where_vllm_survives_and_honours_them(tmp_path: Path) -> None:
    """vLLM 0.32 on a CPU dies of a seeded request that is read in several steps; with MTP it ignores the seed."""

    def fingerprint(hardware: dict[str, str], speculation: dict[str, Any] | None) -> Fingerprint:
        return blank_fingerprint(server="vllm 0.32.0", hardware=hardware, speculation=speculation)

    cpu, gpu, drafts = {"cpu": "x"}, {"gpus": "8x H200 (141 GB)"}, {"method": "mtp", "num_speculative_tokens": 1}
    observed = [takes_seeds(fingerprint(*one)) for one in ((gpu, None), (gpu, drafts), (cpu, None), (cpu, drafts))]
    assert observed == [True, False, False, False]
    with FakeServer() as server, session_with(server, tmp_path) as session:
        run_generated(dataclasses.replace(session, sends_seeds=False), ARITHMETIC, arithmetic_items(ARITHMETIC, "eval-test"))
    assert all("seed" not in body for _, body in server.requests)
