"""What lm-eval itself does wrong with long thinking, shown on the installed version, and that we do not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from fake_server import FakeServer, Scripted
from lm_eval_questions import REPLIES, reply_from_file, reply_to, session_with

from assay.recipes.suite import LmEvalTask
from assay_evaluate.asking.dialect import Dialect
from assay_evaluate.asking.session import Session
from assay_evaluate.client.client import Client
from assay_evaluate.client.journal import Identity, Journal
from assay_evaluate.tasks.lm_eval.task import run_lm_eval

TINY = Path(__file__).resolve().parents[4] / "examples" / "tiny_glm" / "checkpoint"
QUESTION = "Q: 2 + 2\nA: Let's think step by step."


def task_in(folder: Path, **more: Any) -> LmEvalTask:
    fields = {"max_tokens": 16384, "include_path": str(folder), **more}
    return LmEvalTask(kind="lm_eval", name="maths", tasks=("local_gsm8k",), **fields)


def instance(generation: dict[str, Any]) -> Any:
    from lm_eval.api.instance import Instance

    return Instance(
        request_type="generate_until", doc={}, arguments=(QUESTION, generation), idx=0, metadata=("local_gsm8k", 0, 1)
    )


@pytest.mark.slow
def test_default_length_cuts_the_prompt_to_nothing(tmp_path: Path, task_folder: Path) -> None:
    """lm-eval: 2,048 tokens for prompt and reply unless told otherwise; a budget of 16,384 leaves less than no prompt."""
    from lm_eval.models.openai_completions import LocalCompletionsAPI

    with FakeServer() as server:
        candidate = LocalCompletionsAPI(base_url=f"{server.base_url}/v1/completions", model="m", tokenizer=str(TINY))
        candidate.generate_until([instance({"until": [], "max_gen_toks": 16384})], disable_tqdm=True)
        ((_, body),) = server.requests
    assert candidate.max_length == 2047
    assert body["prompt"] == [[]]

    with FakeServer(reply_from_file, max_model_len=32768) as server, session_with(server, tmp_path) as session:
        run_lm_eval(session, task_in(task_folder))
    asked = {body["messages"][-1]["content"] for _, body in server.requests}
    assert asked == {f"Q: {question}\nA: Let's think step by step." for question in REPLIES}
    assert {body["max_tokens"] for _, body in server.requests} == {16384}


def test_finish_reason_is_ignored(tmp_path: Path, task_folder: Path) -> None:
    """lm-eval: a reply that was cut off is a reply like any other, and its last number an answer."""
    from lm_eval.models.openai_completions import LocalChatCompletion

    cut = {"choices": [{"index": 0, "message": {"content": "2 + 2 is 4, no, wait"}, "finish_reason": "length"}]}
    assert LocalChatCompletion(base_url="http://127.0.0.1:9", model="m").parse_generations(cut) == ["2 + 2 is 4, no, wait"]

    def reply(body: dict[str, Any]) -> Scripted:
        result = reply_from_file(body)
        return Scripted(result.text, finish_reason="length") if "2 + 2" in body["messages"][-1]["content"] else result

    with FakeServer(reply) as server, session_with(server, tmp_path) as session:
        result = run_lm_eval(session, task_in(task_folder))
    assert [item.truncated_by for item in result.items] == ["length", None, None, None, None, None]
    assert (result.num_truncated, result.truncated_by, result.items[0].correct) == (1, {"length": 1}, True)


def test_cache_does_not_know_whose_replies_it_holds(tmp_path: Path, task_folder: Path) -> None:
    """lm-eval: the second model gets the first one's replies. Ours: each checkpoint, and each way of serving it, is asked."""
    from lm_eval.api.model import LM, CachingLM

    class Saying(LM):
        def __init__(self, text: str) -> None:
            super().__init__()
            self.text = text

        def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
            return [self.text for _ in requests]

        def loglikelihood(self, requests: list[Any], disable_tqdm: bool = False) -> list[Any]:
            raise NotImplementedError

        loglikelihood_rolling = loglikelihood

    greedy = {"until": [], "do_sample": False}
    said = [
        CachingLM(Saying(text), str(tmp_path / "cache.db")).generate_until([instance(greedy)]) for text in ("old", "new model")
    ]
    assert said == [["old"], ["old"]]

    num_asked = []
    for checkpoint, fingerprint in (("a", "f"), ("b", "f"), ("b", "g"), ("a", "f")):
        with FakeServer(reply_from_file) as server, Journal(tmp_path / "journal.db") as journal:
            with Client(server, journal, Identity(checkpoint, fingerprint)) as client:
                session = Session(client, Dialect(True, True, {}), "eval-test", 0, has_reasoning_parser=False)
                run_lm_eval(session, task_in(task_folder))
            num_asked.append(len(server.requests))
    assert num_asked == [6, 6, 6, 0]


# ------------------------------------------------------------------------------------------------ stop strings
@pytest.mark.parametrize(
    ("stop_strings", "is_chat", "num_right", "note"),
    [
        ("auto", True, 0, None),
        ("auto", False, 4, "6 finished replies were cut at the task's stop strings"),
        ("never", False, 0, None),
        ("always", True, 4, "6 finished replies were cut at the task's stop strings"),
    ],
)
def test_stop_strings_are_never_sent_and_cut_only_finished_replies(
    tmp_path: Path, task_folder: Path, stop_strings: Any, is_chat: bool, num_right: int, note: str | None
) -> None:  # fmt: skip
    """Replies that run on to a next question, as a model without chat template writes them: `Q: ... 99`."""

    def reply(body: dict[str, Any]) -> Scripted:
        prompt = body["messages"][-1]["content"] if "messages" in body else body["prompt"]
        return Scripted(reply_to(prompt) + "\nQ: What is 98 + 1?\nA: 99")

    with FakeServer(reply) as server, session_with(server, tmp_path) as session:
        session = Session(session.client, Dialect(is_chat, True, {}), "eval-test", 0, has_reasoning_parser=False)
        result = run_lm_eval(session, task_in(task_folder, stop_strings=stop_strings))
    assert all("stop" not in body for _, body in server.requests)
    assert result.accuracy is not None
    assert round(result.accuracy.value * 6) == num_right
    assert (result.note or "").partition("; ")[2] == (note or "")
    kept = {json.loads(row[0])["text"] for row in _journal_replies(tmp_path)}
    assert all(text.endswith("99") for text in kept)


def _journal_replies(folder: Path) -> list[tuple[str]]:
    import sqlite3

    with sqlite3.connect(folder / "journal.db") as database:
        return database.execute("SELECT reply FROM requests").fetchall()


@pytest.mark.slow
def test_a_scorer_that_raises(task_folder: Path, tmp_path: Path) -> None:
    """The reply that it cannot read is wrong, and the note says so; the others are scored."""
    (task_folder / "brittle.yaml").write_text(
        (task_folder / "graded.yaml")
        .read_text()
        .replace("local_graded", "local_brittle")
        .replace("graded.half", "brittle.read")
    )
    (task_folder / "brittle.py").write_text(
        "import json\n\n\ndef read(doc, results):\n"
        "    return {'quality': int(json.loads(results[0]) == int(doc['answer'][-1]))}\n"
    )
    task = LmEvalTask(kind="lm_eval", name="b", tasks=("local_brittle",), include_path=str(task_folder), max_tokens=9)
    replies = {"2 + 2": "4", "10 - 3": "[" * 100_000, "6 * 7": "no", "1000 + 234": "9" * 5000, "5 + 5": "0", "9 - 9": "1"}
    with (
        FakeServer(lambda body: Scripted(replies[body["messages"][-1]["content"]])) as server,
        session_with(server, tmp_path) as session,
    ):
        result = run_lm_eval(session, task)
    assert [item.correct for item in result.items] == [True, False, False, False, True, False]
    assert "the scorer of local_brittle failed on 3 replies, which count as wrong (RecursionError" in str(result.note)
