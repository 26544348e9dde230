"""What a journal holds, for anybody who only reads: counts, conversations, replies, texts. Others may be writing it."""

from __future__ import annotations

import contextlib
import json
import sqlite3
import zlib
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

from assay.errors import MeasureError
from assay.foreign_text import one_line
from assay_evaluate.client.journal import Identity, Reply, read_reply, unpacked


def count_replies(path: Path) -> dict[str, int]:
    """Hash of a checkpoint -> replies to its requests, of a journal that others may be writing; empty if there is none.

    MeasureError: the file is no journal.
    """
    if not path.is_file():
        return {}
    return dict(_rows(path, "SELECT checkpoint_sha256, count(*) FROM requests WHERE status = 'answered' GROUP BY 1"))


def conversations(
    path: Path, checkpoint_sha256: str, left_out: Collection[str] = ()
) -> Iterator[dict[str, Any]]:  # fmt: skip
    """Every finished first reply of a checkpoint behind its question, as `{"messages", "tools"}`, thinking as
    `reasoning_content`; `{"text"}` where no chat template was used. In order of tasks and items. MeasureError: no journal.

    A reply that was cut off would be shown by a chat template as if it ended there. left_out: `fingerprint_sha256` of replies
    that are not taken: those of other ways of serving it.
    """
    rows = _rows(
        path,
        "SELECT body, reply, fingerprint_sha256 FROM requests WHERE status = 'answered' AND sample = 0"
        " AND checkpoint_sha256 = ? ORDER BY task, item, key",
        checkpoint_sha256,
    )
    for stored_body, stored_reply, fingerprint_sha256 in rows:
        if fingerprint_sha256 in left_out:
            continue
        body, reply = _object(stored_body), _object(stored_reply)
        if reply.get("finish_reason") not in {"stop", "tool_calls"}:
            continue
        if isinstance(messages := body.get("messages"), list):
            answer: dict[str, Any] = {"role": "assistant", "content": str(reply.get("text", ""))}
            if reply.get("reasoning"):
                answer["reasoning_content"] = str(reply["reasoning"])
            if reply.get("tool_calls"):
                answer["tool_calls"] = list(reply["tool_calls"])
            yield {"messages": [*messages, answer], "tools": body.get("tools") or []}
        elif isinstance(prompt := body.get("prompt"), str):
            yield {"text": prompt + str(reply.get("text", ""))}


def stored_replies(path: Path, who: Identity, sample: int, task: str, items: Collection[str]) -> Iterator[tuple[str, Reply]]:
    """Item and reply of every request of these items of a task in one pass, oldest first, one in memory at a time.

    who: its `fingerprint_sha256` may be empty, where it was not recorded: replies under any are then given. MeasureError: no
    journal, or a damaged reply.
    """
    rows = _rows(
        path,
        "SELECT key, item FROM requests WHERE status = 'answered' AND sample = ? AND task = ? AND checkpoint_sha256 = ?"
        " AND suite IN (?, '') AND ? IN (fingerprint_sha256, '') ORDER BY asked_at, key",
        sample, task, who.checkpoint_sha256, who.suite, who.fingerprint_sha256,
    )  # fmt: skip
    for key, item in [row for row in rows if row[1] in items]:
        for kind, stored in _rows(path, "SELECT typeof(reply), CAST(reply AS BLOB) FROM requests WHERE key = ?", key):
            try:
                reply = read_reply(kind, stored, None)
            except (ValueError, TypeError, zlib.error) as error:
                raise MeasureError(f"{path}: the reply to {item} of {task} is damaged: {one_line(str(error))}") from None
            yield item, reply


def asked_texts(path: Path) -> dict[str, list[str]]:
    """Task -> what the user said in each different question, whoever was asked; token ids, which are scored, have no text."""
    by_task: dict[str, dict[str, None]] = {}
    for task, stored in _rows(path, "SELECT DISTINCT task, body FROM requests ORDER BY task, item, key"):
        body = _object(stored)
        messages, prompt = body.get("messages"), body.get("prompt")
        texts = [prompt] if isinstance(prompt, str) else []
        if isinstance(messages, list):
            texts = [_content(message) for message in messages if isinstance(message, dict) and message.get("role") == "user"]
        by_task.setdefault(str(task), {}).update(dict.fromkeys(filter(None, texts)))
    return {task: list(texts) for task, texts in by_task.items() if texts}


def _content(message: dict[str, Any]) -> str:
    content = message.get("content")
    if isinstance(content, list):
        return "\n".join(str(part.get("text", "")) for part in content if isinstance(part, dict))
    return content if isinstance(content, str) else ""


def _rows(path: Path, statement: str, *values: str | int) -> Iterator[Any]:
    if not path.is_file():
        raise MeasureError(f"{path}: no such file; a run that was evaluated has one")
    try:
        with contextlib.closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True, timeout=30)) as db:
            yield from db.execute(statement, values)
    except sqlite3.DatabaseError as error:
        raise MeasureError(f"{path}: cannot be read as a journal: {one_line(str(error))}") from None


def _object(stored: str | bytes) -> dict[str, Any]:
    """MeasureError: it is not as a journal writes it."""
    try:
        return dict(json.loads(unpacked(stored)))
    except (ValueError, TypeError, zlib.error) as error:
        raise MeasureError(f"a journal's request or reply is damaged: {one_line(str(error))}") from None
