"""Files that somebody else wrote, as an evaluation reads them: an error of one line, or what is there is left out."""

from __future__ import annotations

import json
import sqlite3
from pathlib import Path
from typing import Any

import pytest

from assay.errors import AssayError, CheckpointError, MeasureError, ServeError
from assay_evaluate.client.journal import Identity, Journal, Reply, Request
from assay_evaluate.client.journal_reading import conversations
from assay_evaluate.divergence.structural import structural_ids
from assay_evaluate.run.suite import template_sha256
from assay_evaluate.serving.external import sum_metrics
from assay_evaluate.serving.vllm_command import read_config
from assay_evaluate.tasks.ruler.draft import RulerError
from assay_evaluate.tasks.ruler.tokens import TokenCounter
from assay_evaluate.tasks.swebench import dataset

DEEP = "[" * 100_000
CHAT = [{"role": "user", "content": "1 + 1"}]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (f'{{"a": {DEEP}', "cannot be read (nested too deeply); a model's config has a few levels"),
        (f'{{"num_hidden_layers": {450 * "["}1{450 * "]"}}}', "cannot be read (nested too deeply); a model's config has a few"),
        ("[]", "holds a list, a model's config is an object"),
        ("9" * 5000, "cannot be read (Exceeds the limit"),
        ("\ud800", "cannot be read ('utf-8' codec"),
    ],
)
def test_a_config(text: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(text.encode(errors="surrogatepass"))
    with pytest.raises(ServeError) as error:
        read_config(tmp_path)
    assert str(error.value).startswith(f"{tmp_path / 'config.json'}: {said}")


@pytest.mark.parametrize("added", [[{"id": [1], "content": "<think>"}], [{"id": 1, "content": 7}], ["x"], [{"id": 1}], [None]])
def test_added_tokens_of_another_shape_are_left_out(added: Any, tmp_path: Path) -> None:
    good = {"id": 5, "content": "</think>"}
    (tmp_path / "tokenizer.json").write_text(json.dumps({"added_tokens": [*added, good]}))
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 2}))
    assert structural_ids(tmp_path) == {2: "end", 5: "thinking"}
    (tmp_path / "tokenizer.json").unlink()
    decoder = {"x": {"content": "<think>"}, "6": {"content": [1]}, "7": 3, "5": {"content": "</think>"}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": decoder}))
    assert structural_ids(tmp_path) == {2: "end", 5: "thinking"}


def test_a_chat_template(tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text("[]")
    with pytest.raises(CheckpointError, match="tokenizer_config"):
        template_sha256(tmp_path)
    with pytest.raises(RulerError, match="tokenizer_config"):
        TokenCounter(tmp_path)(CHAT)
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff{{ messages }}")
    assert template_sha256(tmp_path) is not None
    (tmp_path / "tokenizer_config.json").unlink()
    for template, why in (
        ("{% for %}", "TemplateSyntaxError"),
        ("{{ messages[0].nothing.more }}", "UndefinedError"),
        ("{{ 1 // 0 }}", "ZeroDivisionError"),
        ("{{ messages + 1 }}", "TypeError"),
    ):
        (tmp_path / "chat_template.jinja").write_text(template)
        with pytest.raises(RulerError, match=f"the chat template fails .{why}: "):
            TokenCounter(tmp_path)(CHAT)
    (tmp_path / "tokenizer.json").write_text('{"model": 7}')
    with pytest.raises(RulerError, match="cannot be read as a tokenizer"):
        TokenCounter(tmp_path)("1 + 1")


@pytest.mark.parametrize("told", ["not JSON", '"t1"', "7", DEEP, None, 7])
def test_tests_of_an_instance(told: Any) -> None:
    with pytest.raises(MeasureError, match=r"^i1: FAIL_TO_PASS is no list of tests, nor one as JSON text: "):
        dataset.tests_of({"instance_id": "i1", "FAIL_TO_PASS": told}, "FAIL_TO_PASS")
    assert (
        dataset.tests_of({"FAIL_TO_PASS": '["t1"]'}, "FAIL_TO_PASS")
        == ["t1"]
        == dataset.tests_of({"FAIL_TO_PASS": ("t1",)}, "FAIL_TO_PASS")
    )


def test_metrics_that_are_no_numbers() -> None:
    text = "a_total 1\na_total NaN\nb_total +Inf\nc_total 1e400\nd_total many\n<html>\n"
    assert sum_metrics(text) == {"a_total": 1.0}


# ------------------------------------------------------------------------------------------------ journals
WHO = Identity("checkpoint", "fingerprint", "suite")
ASKED = Request("t", "1", 0, "/v1/completions", {"prompt": "1 + 1"})


def test_a_damaged_journal_is_named(tmp_path: Path) -> None:
    path = tmp_path / "journal.db"
    with Journal(path) as journal:
        journal.keep_items("haystacks", {"seed": 1}, ["x" * 5000])
        journal.add_counters("k", {"a": 1.0})
        journal.write_requests([(ASKED.key(WHO), ASKED)], WHO)
        journal.write_replies([(ASKED.key(WHO), Reply("answered", "2", finish_reason="stop"), 1)])
    with sqlite3.connect(path) as db:
        db.execute("UPDATE items SET items = ?", (b"no zlib",))
        db.execute("UPDATE counters SET counters = '{'")
        db.execute("UPDATE requests SET body = ?", (b"no zlib",))
    db.close()
    with Journal(path) as journal:
        for what, ask in (
            ("haystacks", lambda: journal.find_items("haystacks", {"seed": 1})),
            ("counters", lambda: journal.counters("k")),
            ("a request", lambda: journal.request_of(ASKED.key(WHO))),
        ):
            with pytest.raises(MeasureError) as error:
                ask()
            assert str(error.value).startswith(f"{path}: damaged ({what}: ")
            assert str(error.value).endswith("); move the file away to start a new one")
    with pytest.raises(AssayError, match="a journal's request or reply is damaged"):
        list(conversations(path, "checkpoint"))


def test_a_reply_that_a_later_version_wrote(tmp_path: Path) -> None:
    """With a field that this one does not know."""
    from assay_evaluate.client import journal as module

    with Journal(tmp_path / "journal.db") as journal:
        stored = module._reply_json(Reply("answered", "2"))
        assert module.read_reply("text", stored.replace("{", '{"mood":"fine",', 1).encode(), None).text == "2"
        assert journal.find("none") is None
