"""Items for the browser in the page: outcomes in columns, prompts and replies in chunks, each compressed by itself.

The page holds them as base64 of zlib in script elements that no browser runs, and unpacks one when it is looked at. Prompts and
replies come from `journal.db`, opened read-only, trajectories of SWE-bench from `swe/`; without them the page has the outcomes
and says so.
"""

from __future__ import annotations

import base64
import contextlib
import json
import sqlite3
import zlib
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from assay.foreign_text import one_line
from assay.records.measurement import ItemResult, Measurement
from assay.secret_text import hide_secrets
from assay_reports.page import trajectories
from assay_reports.page.trajectories import clipped
from assay_reports.run import Run
from assay_reports.sentences import page as english

JOURNAL = "journal.db"
MOST_CHARACTERS = 12_000
"""Of one prompt or reply; of a longer one the middle is left out, and how much."""
MOST_TEXT = 120_000_000
"""Characters of all texts of a page, as estimated from tokens: flipped and cut-off items come first."""
CHARACTERS_A_TOKEN = 4
CHUNK_CHARACTERS = 150_000
"""Before compression: unpacked in some milliseconds when an item of it is looked at."""
LEVEL = 6

Key = tuple[str, str, int]
"""Task, item, sample."""


@dataclass(frozen=True)
class Browser:
    """What the page gets. `index`, `chunks`: base64 of zlib of JSON."""

    num_rows: int
    num_flipped: int
    num_cut: int
    index: str
    chunks: tuple[str, ...]
    why_no_texts: str | None
    """None: they are there."""
    num_left_out: int
    """Items whose texts are not in the page because it would be too large."""


@dataclass
class Columns:
    """One entry for each candidate and item; numbers are places in the lists of names."""

    candidate: list[int] = field(default_factory=list)
    task: list[int] = field(default_factory=list)
    language: list[int] = field(default_factory=list)
    item: list[str] = field(default_factory=list)
    sample: list[int] = field(default_factory=list)
    flags: list[int] = field(default_factory=list)
    question: list[int] = field(default_factory=list)


REFERENCE_RIGHT, REFERENCE_KNOWN, RIGHT, KNOWN, REFERENCE_CUT, CUT = 1, 2, 4, 8, 16, 32
"""Bits of a row's flags, as the script reads them. Known: a reply came."""


def browser(run: Run, run_dir: Path, *, most_text: int = MOST_TEXT) -> Browser | None:
    """None: the run has no candidate with an item that its reference was asked as well."""
    reference = run.reference
    if reference is None:
        return None
    of_reference = _by_key(reference)
    pairs = [
        (m.label, key, item, of_reference[key])
        for m in run.candidates for key, item in _by_key(m).items() if key in of_reference
    ]  # fmt: skip
    if not pairs:
        return None
    labels = [m.label for m in run.candidates]
    tasks = list(dict.fromkeys(key[0] for _, key, _, _ in pairs))
    languages = sorted({item.language for _, _, item, _ in pairs})
    questions: dict[Key, int] = {}
    urgent: set[Key] = set()
    rows = Columns()
    for label, key, item, reference_item in pairs:
        flags = _flags(item, reference_item)
        if is_flipped(flags) or flags & (CUT | REFERENCE_CUT):
            urgent.add(key)
        rows.candidate.append(labels.index(label))
        rows.task.append(tasks.index(key[0]))
        rows.language.append(languages.index(item.language))
        rows.item.append(hide_secrets(item.item))
        rows.sample.append(item.sample)
        rows.flags.append(flags)
        rows.question.append(questions.setdefault(key, len(questions)))
    agents = {task.task for m in run.measurements for task in m.tasks if task.kind == "swe"}
    chosen = _chosen(run, questions, urgent, agents, most_text)
    texts, reason = _all_texts(run, run_dir, chosen, agents)
    groups = list(_groups(questions, texts, [reference.label, *labels])) if texts else []
    titles = {task.task: task.title or task.task for m in run.measurements for task in m.tasks}
    index = {
        "reference": reference.label, "candidates": labels, "tasks": tasks, "titles": [titles[name] for name in tasks],
        "languages": languages, "rows": rows.__dict__, "starts": [first for first, _ in groups],
        "num_questions": len(questions),
    }  # fmt: skip
    return Browser(
        num_rows=len(rows.flags),
        num_flipped=sum(is_flipped(flags) for flags in rows.flags),
        num_cut=sum(bool(flags & CUT) for flags in rows.flags),
        index=packed(index),
        chunks=tuple(packed(entries) for _, entries in groups),
        why_no_texts=reason,
        num_left_out=len(questions) - len(chosen) if texts else 0,
    )


def is_flipped(flags: int) -> bool:
    """Both replies came, and one of them is right."""
    is_answered = flags & (REFERENCE_KNOWN | KNOWN) == REFERENCE_KNOWN | KNOWN
    return is_answered and bool(flags & RIGHT) != bool(flags & REFERENCE_RIGHT)


def _by_key(measurement: Measurement) -> dict[Key, ItemResult]:
    return {(task.task, item.item, item.sample): item for task in measurement.tasks for item in task.items}


def _flags(item: ItemResult, reference: ItemResult) -> int:
    return (
        REFERENCE_RIGHT * bool(reference.correct)
        | REFERENCE_KNOWN * (reference.correct is not None)
        | RIGHT * bool(item.correct)
        | KNOWN * (item.correct is not None)
        | REFERENCE_CUT * reference.truncated
        | CUT * item.truncated
    )


# ------------------------------------------------------------------------------------------------ what fits
def _chosen(run: Run, questions: dict[Key, int], urgent: set[Key], agents: set[str], most_text: int) -> set[Key]:
    """Questions whose texts fit: those that flipped or were cut off first, then the others in their order."""
    sizes: dict[Key, int] = defaultdict(int)
    for measurement in (run.reference, *run.candidates):
        for key, item in _by_key(measurement).items() if measurement is not None else ():
            prompt = 0 if key in sizes else CHARACTERS_A_TOKEN * (item.prompt_tokens or 0)
            reply = min(MOST_CHARACTERS, CHARACTERS_A_TOKEN * (item.output_tokens or 0))
            sizes[key] += min(MOST_CHARACTERS, prompt) + (trajectories.MOST_CHARACTERS if key[0] in agents else reply)
    chosen, room = set(), most_text
    for key in [*(key for key in questions if key in urgent), *(key for key in questions if key not in urgent)]:
        room -= sizes[key]
        if room < 0:
            break
        chosen.add(key)
    return chosen


# ------------------------------------------------------------------------------------------------ texts
Texts = dict[Key, dict[str, Any]]
"""Question -> `""` for the prompt, labels for replies -> text; of a trajectory what `side_by_side` makes of it."""


def _all_texts(run: Run, run_dir: Path, chosen: set[Key], agents: set[str]) -> tuple[Texts, str | None]:
    """Texts of these questions, and of what kind there are none, and why."""
    texts: Texts = {}
    reasons = []
    if asked := {key for key in chosen if key[0] not in agents}:
        texts, reason = _texts(run, run_dir / JOURNAL, asked)
        reasons += [reason] if reason else []
    if worked_on := {key for key in chosen if key[0] in agents}:
        steps = _trajectories(run, run_dir, worked_on)
        texts = texts | steps
        reasons += [] if steps else [english.NO_TRAJECTORIES.format(folder=trajectories.FOLDER)]
    return texts, "; ".join(reasons) or None


def _trajectories(run: Run, run_dir: Path, chosen: set[Key]) -> Texts:
    """The problem statement and what the page shows of each side. One question is read at a time: files may be large."""
    measured = [measurement for measurement in (run.reference, *run.candidates) if measurement is not None]
    finders = {measurement.label: trajectories.Finder(run_dir, measurement) for measurement in measured}
    texts: Texts = {}
    for key in sorted(chosen):
        sides = {label: steps for label, finder in finders.items() if (steps := finder.find(key)) is not None}
        if sides:
            prompt = clipped(next(iter(sides.values())).prompt, MOST_CHARACTERS)
            texts[key] = {"": prompt} | trajectories.side_by_side(sides, measured[0].label)
    return texts


def _texts(run: Run, journal: Path, chosen: set[Key]) -> tuple[Texts, str | None]:
    """Texts of these questions, and why there are none."""
    if not journal.is_file():
        return {}, english.NO_JOURNAL
    texts: Texts = defaultdict(dict)
    try:
        with contextlib.closing(sqlite3.connect(f"{journal.absolute().as_uri()}?mode=ro", uri=True, timeout=30)) as db:
            for measurement in (run.reference, *run.candidates):
                if measurement is not None:
                    _add_replies(texts, db, measurement, chosen)
    except (sqlite3.Error, ValueError, KeyError, TypeError, zlib.error) as error:
        return {}, english.UNREADABLE_JOURNAL.format(error=one_line(str(error)))
    return texts, None if texts else english.NO_REPLIES


def _add_replies(texts: Texts, db: sqlite3.Connection, measurement: Measurement, chosen: set[Key]) -> None:
    """Of several replies to one item (served otherwise before) the one with the tokens that were counted, else the last; those
    of the measurement itself before others of its checkpoint."""
    items = {_journal_item(key): (key, item) for key, item in _by_key(measurement).items() if key in chosen}
    matched: set[Key] = set()
    query = (
        "SELECT task, item, body, reply, output_tokens FROM requests WHERE checkpoint_sha256 = ? AND sample = 0"
        " AND status = 'answered' AND suite IN (?, '') ORDER BY fingerprint_sha256 = ? DESC, asked_at"
    )
    of_it = (measurement.checkpoint_sha256, measurement.suite, measurement.replies_sha256 or "")
    for task, name, body, reply, num_tokens in db.execute(query, of_it):
        asked = items.get((task, name))
        if asked is None or asked[0] in matched:
            continue
        key, item = asked
        if num_tokens == item.output_tokens:
            matched.add(key)
        texts[key].setdefault("", clipped(prompt_of(_unpacked(body)), MOST_CHARACTERS))
        texts[key][measurement.label] = clipped(reply_of(_unpacked(reply)), MOST_CHARACTERS)


def _journal_item(key: Key) -> tuple[str, str]:
    """As the journal names it: `ITEM#2` is the third reply to ITEM."""
    task, item, sample = key
    return task, item if sample == 0 else f"{item}#{sample}"


def _unpacked(stored: Any) -> dict[str, Any]:
    return dict(json.loads(stored if isinstance(stored, str) else zlib.decompress(stored)))


def prompt_of(body: dict[str, Any]) -> str:
    """What was asked: the only message, or all of them with who said them; of the other API its text."""
    messages = body.get("messages")
    if not isinstance(messages, list):
        return str(body.get("prompt", ""))
    contents = [(str(message.get("role", "")), _content(message)) for message in messages]
    text = contents[0][1] if len(contents) == 1 else "\n\n".join(f"[{role}]\n{content}" for role, content in contents)
    tools = [str(tool.get("function", {}).get("name")) for tool in body.get("tools") or ()]
    return f"{text}\n\n[tools offered: {', '.join(tools)}]" if tools else text


def _content(message: dict[str, Any]) -> str:
    content = message.get("content")
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        return "\n".join(str(part.get("text", "")) for part in content if isinstance(part, dict))
    return json.dumps(message.get("tool_calls"), ensure_ascii=False) if message.get("tool_calls") else ""


def reply_of(reply: dict[str, Any]) -> str:
    """Thinking, answer and calls, each under its name where there is more than the answer."""
    thinking, text, calls = reply.get("reasoning"), str(reply.get("text", "")), reply.get("tool_calls")
    parts = [f"[thinking]\n{thinking}"] if thinking else []
    if text.strip():
        parts.append(f"[answer]\n{text.strip()}" if thinking else text)
    if calls:
        parts.append("[calls]\n" + "\n".join(json.dumps(call.get("function", call), ensure_ascii=False) for call in calls))
    return "\n\n".join(parts)


# ------------------------------------------------------------------------------------------------ packing
def _groups(questions: dict[Key, int], texts: Texts, labels: list[str]) -> Iterator[tuple[int, list[list[Any]]]]:
    """Groups of [prompt, reply of each label or null] in order of questions, each with its first question."""
    first, size = 0, 0
    entries: list[list[Any]] = []
    for key, number in questions.items():
        of_question = texts.get(key, {})
        entry = [of_question.get(name) for name in ("", *labels)]
        more = sum(len(text) if isinstance(text, str) else trajectories.num_characters(text) for text in entry if text)
        if entries and size + more > CHUNK_CHARACTERS:
            yield first, entries
            first, size, entries = number, 0, []
        entries.append(entry)
        size += more
    if entries:
        yield first, entries


def packed(data: Any) -> str:
    """JSON, compressed, as text that may stand anywhere in a page: letters, digits, `+`, `/`, `=`."""
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":"))
    return base64.b64encode(zlib.compress(text.encode(errors="replace"), LEVEL)).decode()


def unpacked(text: str) -> Any:
    """What `packed` was given; for tests."""
    return json.loads(zlib.decompress(base64.b64decode(text)))
