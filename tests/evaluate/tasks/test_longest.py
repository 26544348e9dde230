"""`longest` as a length of RULER: which number it is, where it falls away, and that both sides are asked the same."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from fake_server import FakeServer, Scripted
from given_servers import scaled_logits

from assay.errors import RecipeError
from assay.recipes.load import load_recipe
from assay.recipes.model import Serving
from assay.recipes.profile import GivenServer, Hardware, ProfileRecipe, context_tokens
from assay.recipes.suite import LONGEST, RulerTask, SuiteRecipe
from assay_evaluate.asking.dialect import Dialect
from assay_evaluate.asking.session import Session
from assay_evaluate.client.client import Client
from assay_evaluate.client.journal import Identity, Journal
from assay_evaluate.run.candidate import Candidate
from assay_evaluate.run.evaluate import evaluate
from assay_evaluate.tasks.cells import settle_longest, settle_suite
from assay_evaluate.tasks.ruler_task import run_ruler

REFERENCE = Identity("reference", "f")


def task_of(**more: Any) -> RulerTask:
    fields = {"name": "ruler", "num_items": 1, "lengths_tokens": (1500, LONGEST), "tasks": ("niah_single_1",),
              "max_tokens": 300, **more}  # fmt: skip
    return RulerTask(kind="ruler", **fields)


def find(body: dict[str, Any]) -> Scripted:
    if "messages" not in body:
        return Scripted("x")  # a signature
    return Scripted(" ".join(re.findall(r"\b\d{7}\b", body["messages"][-1]["content"])))


@contextmanager
def session_with(path: Path, who: str, max_model_len: int | None) -> Iterator[tuple[Session, FakeServer]]:
    with (
        FakeServer(find, max_model_len=max_model_len) as server,
        Journal(path / "journal.db") as journal,
        Client(server, journal, Identity(who, "f"), max_attempts=1) as client,
    ):
        yield Session(client, Dialect(True, True, {}), "eval-test", 0, has_reasoning_parser=False), server


# ------------------------------------------------------------------------------------------------ which number
FULL = (16384, 32768, 65536, 131072, LONGEST)


@pytest.mark.parametrize(
    ("context", "more", "lengths", "said"),
    [
        (202752, {}, (16384, 32768, 65536, 131072, 186368),
         "longest is 186,368 tokens (202,752 of context less 16,384 of reply)"),
        (1048576, {}, (16384, 32768, 65536, 131072, 1032192),
         "longest is 1,032,192 tokens (1,048,576 of context less 16,384 of reply)"),
        # 131,072 does not fit; what does is asked
        (131072, {}, (16384, 32768, 65536, 131072, 114688),
         "longest is 114,688 tokens (131,072 of context less 16,384 of reply)"),
        (147456, {}, (16384, 32768, 65536, 131072),
         "longest is 131,072 tokens (147,456 of context less 16,384 of reply): not asked, since 131,072 are"),
        (147440, {}, (16384, 32768, 65536, 131072),  # RULER's own 128 tokens of reply lie within 131,072
         "longest is 131,056 tokens (147,440 of context less 16,384 of reply): not asked, since 131,072 are"),
        (131072, {"reply_within_length": True}, (16384, 32768, 65536, 131072),
         "longest is 131,072 tokens: not asked, since 131,072 are"),
        (262144, {"style": "base"}, (16384, 32768, 65536, 131072, 262144), "longest is 262,144 tokens"),
        (16384, {}, (16384, 32768, 65536, 131072),
         "not measured: longest: 0 tokens (16,384 of context less 16,384 of reply): no room for a prompt"),
        (None, {}, (16384, 32768, 65536, 131072),
         "not measured: longest: the server does not say how long its context is; write a number"),
    ],
)  # fmt: skip
def test_what_longest_stands_for(context: int | None, more: dict[str, Any], lengths: tuple[int, ...], said: str) -> None:
    task = task_of(lengths_tokens=FULL, max_tokens=16384, **more)
    result, reason = settle_longest(task, task.style if task.style != "auto" else "chat", context)
    assert (result.lengths_tokens, reason) == (lengths, said)
    assert result == task.model_copy(update={"lengths_tokens": lengths})


def test_a_task_without_it_is_as_it_was() -> None:
    task = task_of(lengths_tokens=(1500,))
    assert settle_longest(task, "chat", 4096) == (task, None)


def test_the_longest_of_a_model_is_that_of_its_config_unless_the_profile_serves_less() -> None:
    """1,048,576 in config.json: a cell near 1M."""
    suite = SuiteRecipe.model_validate(
        {"schema": 1, "name": "s", "seed": "eval-s", "tasks": [
            {"kind": "ruler", "name": "ruler", "num_items": 1, "lengths_tokens": [*FULL], "max_tokens": 16384},
            {"kind": "arithmetic", "name": "sums", "num_items": 1, "max_tokens": 9},
        ]}
    )  # fmt: skip
    profile = ProfileRecipe(schema=1, name="p", hardware=Hardware(device="cuda"))
    less = profile.model_copy(update={"vllm": {"max-model-len": 262144}})
    for one, longest in ((profile, 1032192), (less, 245760)):
        context = context_tokens({"max_position_embeddings": 1048576}, one, Serving())
        ruler, sums = settle_suite(suite, context, is_chat=True).tasks
        assert isinstance(ruler, RulerTask)
        assert (ruler.lengths_tokens, sums) == ((*FULL[:-1], longest), suite.tasks[1])
    assert settle_suite(suite, None, is_chat=True) == suite


def test_a_length_is_a_number_or_longest_and_named_once(tmp_path: Path) -> None:
    def load(lengths: str) -> SuiteRecipe:
        ruler = f"{{kind: ruler, name: ruler, num_items: 1, max_tokens: 9, lengths_tokens: {lengths}}}"
        path = tmp_path / "mine.yaml"
        path.write_text(f"schema: 1\nname: mine\nseed: eval-mine\ntasks:\n  - {ruler}\n")
        return load_recipe(SuiteRecipe, str(path))

    assert load("[4096, longest]").tasks[0].lengths_tokens == (4096, "longest")  # type: ignore[union-attr]
    with pytest.raises(RecipeError, match="lengths_tokens names longest twice"):
        load("[longest, 4096, longest]")
    for wrong in ("[shortest]", "[0]"):
        with pytest.raises(RecipeError) as caught:
            load(wrong)
        assert "lengths_tokens" in str(caught.value) and "longest" in str(caught.value)


# ------------------------------------------------------------------------------------------------ asked
def test_both_sides_are_asked_at_what_the_reference_has_room_for(tmp_path: Path) -> None:
    """The candidate's server says another context; the number is the reference's, from the journal."""
    found = {}
    for who, context in (("reference", 4096), ("candidate", 5000)):
        with session_with(tmp_path, who, context) as (session, _):
            found[who] = run_ruler(session, task_of(), None, REFERENCE)
    for result in found.values():
        assert [(item.item, item.length_tokens) for item in result.items] == [
            ("niah_single_1/1500/0", 1500), ("niah_single_1/3796/0", 3796),
        ]  # fmt: skip
        assert result.note == "longest is 3,796 tokens (4,096 of context less 300 of reply)"
    assert found["reference"].items[1].prompt_tokens == found["candidate"].items[1].prompt_tokens
    assert 0.95 * (3796 - 128) <= (found["reference"].items[1].prompt_tokens or 0) <= 3796 - 128


def test_more_samples_are_asked_at_the_same_length_and_another_context_is_another_number(tmp_path: Path) -> None:
    more = task_of(num_samples={"min": 1, "max": 2}, temperature=1.0)
    with session_with(tmp_path, "reference", 4096) as (session, _):
        first = run_ruler(session, more, None, REFERENCE)
    with session_with(tmp_path, "reference", 5000) as (session, _):
        again = run_ruler(session, more.model_copy(update={"num_samples": 2}), None, REFERENCE)
        longer = run_ruler(session, more, None, Identity("reference", "served with more context"))
    assert [item.length_tokens for item in first.items] == [1500, 3796]
    assert [(item.length_tokens, item.sample) for item in again.items] == [(1500, 0), (1500, 1), (3796, 0), (3796, 1)]
    assert [item.length_tokens for item in longer.items] == [1500, 4700]


def test_new_items_are_asked_at_the_same_length(tmp_path: Path) -> None:
    with session_with(tmp_path, "reference", 4096) as (session, _):
        run_ruler(session, task_of(num_items={"min": 1, "max": 1}), None, REFERENCE)
    with session_with(tmp_path, "candidate", 5000) as (session, _):
        more = run_ruler(session, task_of(num_items={"min": 1, "max": 2}), None, REFERENCE)
    assert {item.length_tokens for item in more.items} == {1500, 3796} and more.num_items == 4


def test_it_falls_away_where_another_length_is_as_long(tmp_path: Path) -> None:
    with session_with(tmp_path, "reference", 1800) as (session, server):
        result = run_ruler(session, task_of(), None, REFERENCE)
        assert server.count("/v1/chat/completions") == 1
    assert [item.length_tokens for item in result.items] == [1500]
    assert result.note == "longest is 1,500 tokens (1,800 of context less 300 of reply): not asked, since 1,500 are"


@pytest.mark.slow
def test_servers_that_run_already_say_themselves_how_long_their_context_is(tmp_path: Path) -> None:
    suite = SuiteRecipe.model_validate(
        {"schema": 1, "name": "long", "seed": "eval-long", "acceptance": False,
         "tasks": [{"kind": "ruler", "name": "ruler", "tasks": ["niah_single_1"], "lengths_tokens": [1024, LONGEST],
                    "num_items": 2, "max_tokens": 64}]}
    )  # fmt: skip
    profile = ProfileRecipe(schema=1, name="given", hardware=Hardware(device="cpu"))
    with (
        FakeServer(find, max_model_len=3000) as one,
        FakeServer(find, logits=lambda last: scaled_logits(1.5, last), max_model_len=3000) as other,
    ):
        sides = [
            Candidate(label, None, is_reference=label == "fp8", endpoint=GivenServer(url=server.base_url))
            for label, server in (("fp8", one), ("w4a16", other))
        ]
        measured = evaluate("tiny", sides, suite=suite, profile=profile, serving=Serving(), run_dir=tmp_path / "run")
    assert [measurement.label for measurement in measured] == ["fp8", "fp8-repeat", "w4a16"]
    for measurement in measured:
        (result,) = measurement.tasks
        assert [item.length_tokens for item in result.items] == [1024, 1024, 2936, 2936]
        assert "ruler: longest is 2,936 tokens (3,000 of context less 64 of reply)" in measurement.notes
    assert measured[0].suite_recipe["tasks"][0]["lengths_tokens"] == [1024, "longest"]
