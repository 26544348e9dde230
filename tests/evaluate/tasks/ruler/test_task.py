"""RULER in suites: what is asked, in which style, what fits, how it is scored, and that every checkpoint gets the same text."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, get_args

import pytest
from fake_server import FakeServer, Scripted

from assay.recipes.suite import RULER_TASKS, RulerTask, RulerTaskName
from assay_evaluate.asking.dialect import Dialect
from assay_evaluate.asking.session import Session
from assay_evaluate.client.client import Client
from assay_evaluate.client.journal import Identity, Journal
from assay_evaluate.statistics.item_pairs import pair_items
from assay_evaluate.tasks.ruler.languages import LANGUAGES
from assay_evaluate.tasks.ruler.tasks import TASKS
from assay_evaluate.tasks.ruler_task import run_ruler

REFERENCE = Identity("reference", "f")
TINY = Path(__file__).resolve().parents[4] / "examples" / "tiny_glm" / "checkpoint"


@contextmanager
def session_with(server: FakeServer, path: Path, who: str = "reference", is_chat: bool = True) -> Iterator[Session]:
    with Journal(path / "journal.db") as journal, Client(server, journal, Identity(who, "f"), max_attempts=1) as client:
        yield Session(client, Dialect(is_chat, True, {}), "eval-test", 0, has_reasoning_parser=False)


def task_of(**more: Any) -> RulerTask:
    fields = {"name": "ruler", "num_items": 2, "lengths_tokens": (1500,), "max_tokens": 300, **more}
    return RulerTask(kind="ruler", **fields)


def prompt_of(body: dict[str, Any]) -> str:
    return str(body["prompt"]) if "prompt" in body else "".join(message["content"] for message in body["messages"])


def find_numbers(body: dict[str, Any]) -> Scripted:
    """Every number of seven digits that the prompt holds, and thus every needle of niah_multivalue."""
    return Scripted(" ".join(re.findall(r"\b\d{7}\b", prompt_of(body))))


def test_names_are_those_of_the_generator() -> None:
    assert RULER_TASKS == TASKS
    assert get_args(RulerTaskName) == (*TASKS, "needle_grid")
    assert RulerTask.model_fields["languages"].annotation == tuple[type_of(LANGUAGES), ...]  # type: ignore[misc]


def type_of(names: tuple[str, ...]) -> Any:
    from typing import Literal

    return Literal[names]


def test_all_thirteen_tasks_are_asked_and_scored(tmp_path: Path) -> None:
    with FakeServer(lambda body: Scripted("I do not know.")) as server, session_with(server, tmp_path) as session:
        result = run_ruler(session, task_of(lengths_tokens=(3000,), num_items=1), tmp_path, REFERENCE)
    assert [item.item for item in result.items] == [f"{name}/3000/0" for name in TASKS]
    assert {(item.correct, item.score, item.truncated) for item in result.items} == {(False, 0.0, False)}
    assert result.mean_score is not None
    assert (result.kind, result.num_items, result.mean_score.value) == ("ruler", 13, 0)
    asked = [body for path, body in server.requests if path == "/v1/chat/completions"]
    assert {body["max_tokens"] for body in asked} == {300}
    sizes = [item.prompt_tokens or 0 for item in result.items]
    assert all(0.95 * (3000 - 128) <= size <= 3000 for size in sizes)


def test_a_question_that_is_asked_at_several_lengths_is_a_cluster(tmp_path: Path) -> None:
    asked = task_of(tasks=("qa_1", "niah_single_1"), lengths_tokens=(1500, 2000))
    with FakeServer(lambda body: Scripted("I do not know.")) as server, session_with(server, tmp_path) as session:
        items = run_ruler(session, asked, tmp_path, REFERENCE).items
    clusters = {item.item: item.cluster for item in items}
    assert len(items) == 8 and {clusters[f"niah_single_1/{length}/{i}"] for length in (1500, 2000) for i in (0, 1)} == {None}
    first, second = (clusters[f"qa_1/1500/{i}"] for i in (0, 1))
    assert first is not None and first.startswith("qa_1: ") and first != second
    assert (clusters["qa_1/2000/0"], clusters["qa_1/2000/1"]) == (first, second)


def test_partial_credit_is_kept_and_correct_means_all(tmp_path: Path) -> None:
    """Four values; three of them are worth 0.75, and that is wrong."""

    def three(body: dict[str, Any]) -> Scripted:
        numbers = re.findall(r"\b\d{7}\b", prompt_of(body))
        return Scripted(" ".join(numbers[:3]))

    with FakeServer(find_numbers) as server, session_with(server, tmp_path) as session:
        reference = run_ruler(session, task_of(tasks=("niah_multivalue",)), tmp_path, REFERENCE)
    with FakeServer(three) as server, session_with(server, tmp_path, "candidate") as session:
        candidate = run_ruler(session, task_of(tasks=("niah_multivalue",)), tmp_path, REFERENCE)
        assert server.count("/tokenize") == 0  # items came from the journal
    assert [(item.correct, item.score) for item in reference.items] == [(True, 1.0)] * 2
    assert [(item.correct, item.score) for item in candidate.items] == [(False, 0.75)] * 2
    for item, of_reference in zip(candidate.items, reference.items, strict=True):  # one string a line
        assert item.expected == of_reference.expected and item.expected is not None
        assert set((of_reference.answer or "").split()) >= set(item.expected.split("\n")) and item.expected.count("\n") == 3
    assert candidate.mean_score is not None
    assert (candidate.mean_score.value, candidate.accuracy.value if candidate.accuracy else None) == (0.75, 0)
    assert pair_items(reference, candidate).flips.right_to_wrong == 2


def test_the_reference_decides_what_every_checkpoint_is_asked(tmp_path: Path) -> None:
    """The candidate's server would count other tokens; it gets the reference's text all the same."""
    asked = []
    for who, is_sized_by in (("reference", "reference"), ("candidate", "reference"), ("candidate", "candidate")):
        with FakeServer(find_numbers) as server, session_with(server, tmp_path, who) as session:
            if who == "candidate":
                server.chat_template = True
                server._prompt_ids = lambda body: [1] * (len(prompt_of(body)) // 2)  # type: ignore[method-assign]
            run_ruler(session, task_of(tasks=("niah_single_2",)), tmp_path, Identity(is_sized_by, "f"))
            asked.append([prompt_of(body) for path, body in server.requests if path == "/v1/chat/completions"])
    assert sorted(asked[0]) == sorted(asked[1])
    assert min(map(len, asked[2])) > 1.5 * max(map(len, asked[0]))


def test_what_does_not_fit_or_cannot_be_made_is_named_and_the_rest_is_asked(tmp_path: Path) -> None:
    task = task_of(tasks=("niah_single_1",), lengths_tokens=(200, 1500, 5000))
    with FakeServer(find_numbers) as server, session_with(server, tmp_path) as session:
        result = run_ruler(session, task, tmp_path, REFERENCE)
    assert [item.item for item in result.items] == ["niah_single_1/1500/0", "niah_single_1/1500/1"]
    assert result.note is not None
    too_short, too_long = result.note.split("; not measured: ")
    assert too_short.startswith("not measured: niah_single_1 at 200 tokens")
    assert too_long == "niah_single_1 at 5000 tokens: prompt and reply need up to 5172, max_model_len is 4096"
    within = task.model_copy(update={"reply_within_length": True, "lengths_tokens": (4096,)})
    with FakeServer(find_numbers) as server, session_with(server, tmp_path) as session:
        result = run_ruler(session, within, tmp_path, REFERENCE)
    assert all(0.95 * 3796 <= (item.prompt_tokens or 0) <= 3796 for item in result.items)


@pytest.mark.parametrize("style", ["base", "chat", "prefill"])
def test_styles(tmp_path: Path, style: Any) -> None:
    """base: a completion that ends with the answer's first words, cut at the published tokens by design."""
    task = task_of(tasks=("vt",), style=style, num_items=1)

    def reply(body: dict[str, Any]) -> Scripted:
        return Scripted("x" * body["max_tokens"], finish_reason="length")

    with FakeServer(reply) as server, session_with(server, tmp_path) as session:
        (item,) = run_ruler(session, task, tmp_path, REFERENCE).items
    path, body = server.requests[-1]
    if style == "base":
        assert path == "/v1/completions"
        assert body["prompt"].endswith("they are:")
        assert (body["max_tokens"], item.truncated, "messages" in body) == (30, False, False)
        return
    assert path == "/v1/chat/completions"
    assert (body["max_tokens"], item.truncated_by) == (300, "budget")
    assert [message["role"] for message in body["messages"]] == ["user", "assistant"][: 1 + (style == "prefill")]
    assert body.get("continue_final_message") is (True if style == "prefill" else None)


def test_without_a_chat_template(tmp_path: Path) -> None:
    with FakeServer(find_numbers) as server, session_with(server, tmp_path, is_chat=False) as session:
        plain = run_ruler(session, task_of(tasks=("niah_single_1",)), tmp_path, REFERENCE)
        refused = run_ruler(session, task_of(tasks=("niah_single_1",), style="chat"), tmp_path, REFERENCE)
    assert [item.correct for item in plain.items] == [True, True]
    assert {path for path, _ in server.requests} == {"/tokenize", "/v1/completions"}
    assert (refused.num_items, refused.note) == (
        0, "style chat needs a chat template, and the checkpoint has none; say `style: auto`",
    )  # fmt: skip


def test_needle_grid_and_sources_of_ones_own(tmp_path: Path) -> None:
    (tmp_path / "essays").mkdir()
    (tmp_path / "essays" / "a.txt").write_text("The harbour was quiet at dawn. " * 10 + "Boats came in with the tide. ")
    task = task_of(tasks=("needle_grid",), depths=(0.0, 1.0), languages=("en", "zh"), num_items=1)
    with FakeServer(find_numbers) as server, session_with(server, tmp_path) as session:
        result = run_ruler(session, task.model_copy(update={"essays": str(tmp_path / "essays")}), tmp_path, REFERENCE)
        other = run_ruler(session, task, tmp_path, REFERENCE)
    assert [item.item for item in result.items] == [
        "needle_grid/en/0/1500/0", "needle_grid/zh/0/1500/0", "needle_grid/en/1/1500/0", "needle_grid/zh/1/1500/0",
    ]  # fmt: skip
    assert [item.language for item in result.items] == ["en", "zh", "en", "zh"]
    assert [item.correct for item in result.items] == [True] * 4
    prompts = [prompt_of(body) for path, body in server.requests if path != "/tokenize"]
    assert sum("The harbour was quiet" in prompt for prompt in prompts) == 2  # of 8: English, with one's own essays
    assert other.note == "not comparable with published scores: the haystack is text generated by assay"


@pytest.mark.parametrize("extra_tokens", [0, 1])
def test_the_checkpoints_own_tokenizer_counts_where_it_agrees_with_the_server(tmp_path: Path, extra_tokens: int) -> None:
    """One probe goes to the server; a server that counts otherwise is asked for every count."""
    from assay_evaluate.tasks.ruler.tokens import TokenCounter

    here = TokenCounter(TINY)
    with FakeServer(find_numbers, max_model_len=None) as server, session_with(server, tmp_path) as session:
        server._prompt_ids = lambda body: [1] * (here(body["messages"]) + extra_tokens)  # type: ignore[method-assign]
        result = run_ruler(session, task_of(tasks=("niah_single_1",), lengths_tokens=(1024,)), TINY, REFERENCE)
    assert all(0.95 * 896 <= (item.prompt_tokens or 0) <= 896 for item in result.items)
    assert (server.count("/tokenize") == 1) is (extra_tokens == 0)


def test_items_survive_in_the_journal(tmp_path: Path) -> None:
    with FakeServer(find_numbers) as server, session_with(server, tmp_path) as session:
        first = run_ruler(session, task_of(tasks=("niah_single_3", "qa_1")), tmp_path, REFERENCE)
        num_asked = len(server.requests)
        again = run_ruler(session, task_of(tasks=("niah_single_3", "qa_1")), tmp_path, REFERENCE)
        assert len(server.requests) == num_asked
    assert json.loads(again.model_dump_json()) == json.loads(first.model_dump_json())
