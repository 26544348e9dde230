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

from assay.errors import AssayError
from assay.foreign_text import one_line
from assay.records.measurement import ItemResult, Measurement
from assay.secret_text import hide_secrets
from assay_reports.page import trajectories
from assay_reports.page.trajectories import clipped
from assay_reports.run import Run

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
    theirs = _by_key(reference)
    pairs = [(m, key, ours, theirs[key]) for m in run.candidates for key, ours in _by_key(m).items() if key in theirs]
    if not pairs:
        return None
    labels = [m.label for m in run.candidates]
    tasks = list(dict.fromkeys(key[0] for _, key, _, _ in pairs))
    languages = sorted({item.language for _, _, item, _ in pairs})
    questions: dict[Key, int] = {}
    urgent: set[Key] = set()
    rows = Columns()
    for measurement, key, item, other in pairs:
        flags = _flags(item, other)
        if is_flipped(flags) or flags & (CUT | REFERENCE_CUT):
            urgent.add(key)
        rows.candidate.append(labels.index(measurement.label))
        rows.task.append(tasks.index(key[0]))
        rows.language.append(languages.index(item.language))
        rows.item.append(hide_secrets(item.item))
        rows.sample.append(item.sample)
        rows.flags.append(flags)
        rows.question.append(questions.setdefault(key, len(questions)))
    agents = {task.task for m in run.measurements for task in m.tasks if task.kind == "swe"}
    chosen = _chosen(run, questions, urgent, agents, most_text)
    texts, why = _all_texts(run, run_dir, chosen, agents)
    chunks, starts = _chunks(questions, texts, [reference.label, *labels])
    titles = {task.task: task.title or task.task for m in run.measurements for task in m.tasks}
    index = {
        "reference": reference.label, "candidates": labels, "tasks": tasks, "titles": [titles[name] for name in tasks],
        "languages": languages, "rows": rows.__dict__, "starts": starts, "num_questions": len(questions),
    }  # fmt: skip
    return Browser(
        num_rows=len(rows.flags),
        num_flipped=sum(is_flipped(flags) for flags in rows.flags),
        num_cut=sum(bool(flags & CUT) for flags in rows.flags),
        index=packed(index),
        chunks=tuple(chunks),
        why_no_texts=why,
        num_left_out=len(questions) - len(chosen) if texts else 0,
    )


def is_flipped(flags: int) -> bool:
    """Both replies came, and one of them is right."""
    both = flags & (REFERENCE_KNOWN | KNOWN) == REFERENCE_KNOWN | KNOWN
    return both and bool(flags & RIGHT) != bool(flags & REFERENCE_RIGHT)


def _by_key(measurement: Measurement) -> dict[Key, ItemResult]:
    return {(task.task, item.item, item.sample): item for task in measurement.tasks for item in task.items}


def _flags(item: ItemResult, other: ItemResult) -> int:
    return (
        REFERENCE_RIGHT * bool(other.correct)
        | REFERENCE_KNOWN * (other.correct is not None)
        | RIGHT * bool(item.correct)
        | KNOWN * (item.correct is not None)
        | REFERENCE_CUT * other.truncated
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
"""Question -> `""` for the prompt, labels for replies -> text; of a trajectory what `told_side_by_side` makes of it."""


def _all_texts(run: Run, run_dir: Path, chosen: set[Key], agents: set[str]) -> tuple[Texts, str | None]:
    """Texts of these questions, and of what kind there are none, and why."""
    found: Texts = {}
    reasons = []
    if asked := {key for key in chosen if key[0] not in agents}:
        found, why = _texts(run, run_dir / JOURNAL, asked)
        reasons += [why] if why else []
    if worked_on := {key for key in chosen if key[0] in agents}:
        steps = _trajectories(run, run_dir, worked_on)
        found = found | steps
        why = f"{trajectories.FOLDER}/ of the run's folder holds no trajectory of SWE-bench that was graded"
        reasons += [] if steps else [f"{why}, so of it there are outcomes only"]
    return found, "; ".join(reasons) or None


def _trajectories(run: Run, run_dir: Path, chosen: set[Key]) -> Texts:
    """The problem statement and what the page shows of each side. One question is read at a time: files may be large."""
    measured = [measurement for measurement in (run.reference, *run.candidates) if measurement is not None]
    finders = {measurement.label: trajectories.Finder(run_dir, measurement) for measurement in measured}
    told: Texts = {}
    for key in sorted(chosen):
        sides = {label: steps for label, finder in finders.items() if (steps := finder.find(key)) is not None}
        if sides:
            prompt = clipped(next(iter(sides.values())).prompt, MOST_CHARACTERS)
            told[key] = {"": prompt} | trajectories.told_side_by_side(sides, measured[0].label)
    return told


def _texts(run: Run, journal: Path, chosen: set[Key]) -> tuple[Texts, str | None]:
    """Texts of these questions, and why there are none."""
    if not journal.is_file():
        return {}, f"{JOURNAL} is not in the run's folder, so there are outcomes only"
    found: Texts = defaultdict(dict)
    try:
        with contextlib.closing(sqlite3.connect(f"{journal.absolute().as_uri()}?mode=ro", uri=True, timeout=30)) as db:
            for measurement in (run.reference, *run.candidates):
                if measurement is not None:
                    _add_replies(found, db, measurement, chosen)
    except (sqlite3.Error, ValueError, KeyError, TypeError, zlib.error) as error:
        return {}, f"{JOURNAL} cannot be read ({one_line(str(error))}), so there are outcomes only"
    return found, None if found else f"{JOURNAL} holds no reply to these items, so there are outcomes only"


def _add_replies(found: Texts, db: sqlite3.Connection, measurement: Measurement, chosen: set[Key]) -> None:
    """Of several replies to one item (served otherwise before) the one with the tokens that were counted, else the last."""
    items = {_journal_item(key): (key, item) for key, item in _by_key(measurement).items() if key in chosen}
    matched: set[Key] = set()
    query = (
        "SELECT task, item, body, reply, output_tokens FROM requests WHERE checkpoint_sha256 = ? AND sample = 0"
        " AND status = 'answered' AND suite IN (?, '') ORDER BY asked_at"
    )
    for task, name, body, reply, num_tokens in db.execute(query, (measurement.checkpoint_sha256, measurement.suite)):
        asked = items.get((task, name))
        if asked is None or asked[0] in matched:
            continue
        key, item = asked
        if num_tokens == item.output_tokens:
            matched.add(key)
        found[key].setdefault("", clipped(prompt_of(_unpacked(body)), MOST_CHARACTERS))
        found[key][measurement.label] = clipped(reply_of(_unpacked(reply)), MOST_CHARACTERS)


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
    said = [(str(one.get("role", "")), _content(one)) for one in messages]
    text = said[0][1] if len(said) == 1 else "\n\n".join(f"[{role}]\n{content}" for role, content in said)
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
def _chunks(questions: dict[Key, int], texts: Texts, labels: list[str]) -> tuple[list[str], list[int]]:
    """Chunks of [prompt, reply of each label or null] in order of questions, and the first question of each chunk."""
    if not texts:
        return [], []
    chunks: list[str] = []
    starts: list[int] = []
    for first, entries in _groups(questions, texts, labels):
        starts.append(first)
        chunks.append(packed(entries))
    return chunks, starts


def _groups(questions: dict[Key, int], texts: Texts, labels: list[str]) -> Iterator[tuple[int, list[list[Any]]]]:
    first, size = 0, 0
    entries: list[list[Any]] = []
    for key, number in questions.items():
        said = texts.get(key, {})
        entry = [said.get(name) for name in ("", *labels)]
        more = sum(len(one) if isinstance(one, str) else trajectories.num_characters(one) for one in entry if one)
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


def check_readable(path: Path) -> None:
    """AssayError: the folder of a page that is to be written does not exist."""
    if not path.parent.is_dir():
        raise AssayError(f"{path}: its folder does not exist; make it or name another")
