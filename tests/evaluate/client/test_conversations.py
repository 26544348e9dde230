"""A journal as text: finished replies behind their questions, and every question that was asked."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from assay.errors import MeasureError
from assay_evaluate.client.journal import Identity, Journal, Reply, Request
from assay_evaluate.client.journal_reading import asked_texts, conversations

REFERENCE, CANDIDATE = Identity("r" * 64, "f" * 64, "s"), Identity("c" * 64, "f" * 64, "s")
TOOLS = [{"type": "function", "function": {"name": "send"}}]
CALLS = ({"id": "1", "type": "function", "function": {"name": "send", "arguments": "{}"}},)


def chat(item: str, content: Any, **more: Any) -> Request:
    return Request("task", item, 0, "/v1/chat/completions", {"messages": [{"role": "user", "content": content}], **more})


@pytest.fixture
def journal(tmp_path: Path) -> Path:
    long = "word " * 2000  # is stored compressed
    asked = [
        (REFERENCE, chat("1", "Question one?"), Reply("answered", "#### 1", "hm", finish_reason="stop")),
        (REFERENCE, chat("2", long, tools=TOOLS),
         Reply("answered", has_tool_calls=True, tool_calls=CALLS, finish_reason="tool_calls")),
        (REFERENCE, chat("3", "Cut off?"), Reply("answered", "#", finish_reason="length")),
        (REFERENCE, Request("task", "4", 0, "/v1/completions", {"prompt": "Once upon"}),
         Reply("answered", " a time", finish_reason="stop")),
        (REFERENCE, Request("divergence.score", "5", 0, "/v1/completions", {"prompt": [1, 2]}), Reply("answered", "x")),
        (REFERENCE, chat("6", [{"type": "text", "text": "In parts?"}]), Reply("failed", error="down")),
        (CANDIDATE, chat("1", "Question one?"), Reply("answered", "#### 2", finish_reason="stop")),
    ]  # fmt: skip
    path = tmp_path / "journal.db"
    with Journal(path) as opened:
        for who, request, reply in asked:
            opened.write_requests([(request.key(who), request)], who)
            opened.write_replies([(request.key(who), reply, 1)])
    return path


def test_finished_replies_of_one_checkpoint_stand_behind_their_questions(journal: Path) -> None:
    assert list(conversations(journal, REFERENCE.checkpoint_sha256)) == [
        {"messages": [{"role": "user", "content": "Question one?"},
                      {"role": "assistant", "content": "#### 1", "reasoning_content": "hm"}], "tools": []},
        {"messages": [{"role": "user", "content": "word " * 2000},
                      {"role": "assistant", "content": "", "tool_calls": list(CALLS)}], "tools": TOOLS},
        {"text": "Once upon a time"},
    ]  # fmt: skip


def test_every_question_is_known_whoever_was_asked_and_whatever_came(journal: Path) -> None:
    assert asked_texts(journal) == {"task": ["Question one?", "word " * 2000, "Cut off?", "Once upon", "In parts?"]}


def test_no_journal_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(MeasureError, match="no such file; a run that was evaluated has one"):
        asked_texts(tmp_path / "journal.db")
    (tmp_path / "journal.db").write_text("no database")
    with pytest.raises(MeasureError, match="cannot be read as a journal"):
        list(conversations(tmp_path / "journal.db", "r"))
