"""What a run's journal holds as text: the conversations that a checkpoint had, and all that anybody was asked.

The journal is only read, also while an evaluation writes it.
"""

from __future__ import annotations

import contextlib
import json
import sqlite3
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from assay.errors import MeasureError
from assay.foreign_text import one_line

FINISHED = frozenset({"stop", "tool_calls"})
"""A reply that was cut off would be shown by a chat template as if it ended there."""


def conversations(journal: Path, checkpoint_sha256: str) -> Iterator[dict[str, Any]]:
    """Every finished first reply of a checkpoint behind its question, as `{"messages", "tools"}`, thinking as
    `reasoning_content`; `{"text"}` where no chat template was used. In order of tasks and items. MeasureError: no journal."""
    rows = _rows(
        journal,
        "SELECT body, reply FROM requests WHERE status = 'answered' AND sample = 0 AND checkpoint_sha256 = ?"
        " ORDER BY task, item, key",
        (checkpoint_sha256,),
    )
    for stored_body, stored_reply in rows:
        body, reply = _unpacked(stored_body), _unpacked(stored_reply)
        if reply.get("finish_reason") not in FINISHED:
            continue
        if isinstance(messages := body.get("messages"), list):
            said: dict[str, Any] = {"role": "assistant", "content": str(reply.get("text", ""))}
            if reply.get("reasoning"):
                said["reasoning_content"] = str(reply["reasoning"])
            if reply.get("tool_calls"):
                said["tool_calls"] = list(reply["tool_calls"])
            yield {"messages": [*messages, said], "tools": body.get("tools") or []}
        elif isinstance(prompt := body.get("prompt"), str):
            yield {"text": prompt + str(reply.get("text", ""))}


def asked_texts(journal: Path) -> dict[str, list[str]]:
    """Task -> what the user said in each different question, whoever was asked; token ids, which are scored, have no text."""
    found: dict[str, dict[str, None]] = {}
    for task, stored in _rows(journal, "SELECT DISTINCT task, body FROM requests ORDER BY task, item, key", ()):
        body = _unpacked(stored)
        messages, prompt = body.get("messages"), body.get("prompt")
        said = [prompt] if isinstance(prompt, str) else []
        if isinstance(messages, list):
            said = [_content(one) for one in messages if isinstance(one, dict) and one.get("role") == "user"]
        found.setdefault(str(task), {}).update(dict.fromkeys(text for text in said if text))
    return {task: list(texts) for task, texts in found.items() if texts}


def _content(message: dict[str, Any]) -> str:
    content = message.get("content")
    if isinstance(content, list):
        return "\n".join(str(part.get("text", "")) for part in content if isinstance(part, dict))
    return content if isinstance(content, str) else ""


def _rows(journal: Path, statement: str, values: tuple[str, ...]) -> Iterator[Any]:
    if not journal.is_file():
        raise MeasureError(f"{journal}: no such file; a run that was evaluated has one")
    try:
        with contextlib.closing(sqlite3.connect(f"{journal.absolute().as_uri()}?mode=ro", uri=True, timeout=30)) as db:
            yield from db.execute(statement, values)
    except sqlite3.DatabaseError as error:
        raise MeasureError(f"{journal}: cannot be read as a journal: {one_line(str(error))}") from None


def _unpacked(stored: str | bytes) -> dict[str, Any]:
    """MeasureError: it is not as a journal writes it."""
    try:
        return dict(json.loads(stored if isinstance(stored, str) else zlib.decompress(stored)))
    except (ValueError, TypeError, zlib.error) as error:
        raise MeasureError(f"a journal's request or reply is damaged: {one_line(str(error))}") from None
