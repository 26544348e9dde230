"""Items of the page: what the journal holds is there, what is too large is cut and said, secrets and damaged files are not."""

from __future__ import annotations

import sqlite3
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from journals import write_journal
from synthetic_run import make_run, task_of

from assay.records.measurement import Measurement
from assay_reports.page import items
from assay_reports.page.items import Browser, browser, prompt_of, reply_of, unpacked
from assay_reports.report import write_report
from assay_reports.run import load_run

TOKEN = "hf_" + "abcdEFGH1234" * 3


def cut_first(measurement: Measurement) -> Measurement:
    """w4a16's first reply to arithmetic is cut off."""
    if measurement.label != "w4a16":
        return measurement
    first, second = measurement.tasks
    told = [replace(item, truncated=i == 0) for i, item in enumerate(first.items)]
    return measurement.model_copy(update={"tasks": (task_of(first.task, first.kind, told), second)})


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_run(tmp_path_factory.mktemp("items"), change=cut_first)
    write_journal(folder)
    return folder


def made(run_dir: Path, **more: Any) -> Browser:
    found = browser(load_run(run_dir), run_dir, **more)
    assert found is not None
    return found


def texts(found: Browser, index: dict[str, Any], question: int) -> list[str | None]:
    """As the script finds them: the chunk that begins at or before the question."""
    starts = index["starts"]
    chunk = max(i for i, start in enumerate(starts) if start <= question)
    return list(unpacked(found.chunks[chunk])[question - starts[chunk]])


def test_columns_and_texts_are_those_of_the_records(run_dir: Path) -> None:
    found = made(run_dir)
    index = unpacked(found.index)
    assert (index["reference"], index["candidates"]) == ("fp8", ["bf16", "nvfp4a16", "w4a16"])
    assert (index["tasks"], index["languages"], index["num_questions"]) == (["arithmetic", "needle"], ["en", "zh"], 280)
    reference, candidate = (Measurement.load(run_dir / "measurements" / f"{label}.json") for label in ("fp8", "w4a16"))
    theirs = {(task.task, item.item): item for task in reference.tasks for item in task.items}
    ours = {(task.task, item.item): item for task in candidate.tasks for item in task.items}
    rows, seen = index["rows"], {}
    for i in range(found.num_rows):
        if rows["candidate"][i] == 2:
            seen[index["tasks"][rows["task"][i]], rows["item"][i]] = (rows["flags"][i], rows["question"][i])
    assert seen.keys() == ours.keys()
    for key, (flags, question) in seen.items():
        expected = (theirs[key].correct, ours[key].correct, ours[key].truncated)
        assert (bool(flags & items.REFERENCE_RIGHT), bool(flags & items.RIGHT), bool(flags & items.CUT)) == expected
        prompt, one, _, _, other = texts(found, index, question)
        assert prompt is not None and prompt.startswith(f"Question {key[1]}: ")
        assert one is not None and one.endswith("#### right" if theirs[key].correct else "#### wrong, says fp8")
        assert other is not None and other.endswith("#### right" if ours[key].correct else "#### wrong, says w4a16")
    flipped = sum(bool(theirs[key].correct) != bool(ours[key].correct) for key in ours)
    assert (found.num_rows, found.num_cut, found.why_no_texts, found.num_left_out) == (840, 1, None, 0)
    assert flipped and found.num_flipped >= flipped


def test_what_flipped_or_was_cut_off_is_kept_where_not_all_fits(run_dir: Path) -> None:
    found = made(run_dir, most_text=80_000)
    index = unpacked(found.index)
    rows = index["rows"]
    there = {q for q in range(index["num_questions"]) if any(texts(found, index, q))}
    urgent = {q for q, f in zip(rows["question"], rows["flags"], strict=True) if items.is_flipped(f) or f & items.CUT}
    assert urgent and urgent <= there
    assert found.num_left_out == index["num_questions"] - len(there) > 0


def test_without_a_journal_there_are_outcomes_and_the_page_says_so(tmp_path: Path) -> None:
    folder = make_run(tmp_path)
    found = made(folder)
    assert (found.num_rows, found.chunks) == (840, ())
    assert found.why_no_texts == "journal.db is not in the run's folder, so there are outcomes only"
    assert f"<p>{found.why_no_texts}.</p>".replace("'", "&#39;") in write_report(folder).read_text(encoding="utf-8")
    (folder / "journal.db").write_bytes(b"no journal at all" * 100)
    assert made(folder).why_no_texts == "journal.db cannot be read (file is not a database), so there are outcomes only"
    (folder / "journal.db").unlink()
    with sqlite3.connect(folder / "journal.db") as db:
        db.execute("CREATE TABLE other (x)")
    assert "no such table: requests" in (made(folder).why_no_texts or "")


def test_the_journal_is_only_read(run_dir: Path) -> None:
    before = (run_dir / "journal.db").read_bytes()
    made(run_dir)
    assert (run_dir / "journal.db").read_bytes() == before


def test_secrets_in_a_reply_stay_out_of_the_page(tmp_path: Path) -> None:
    folder = make_run(tmp_path)
    path = write_journal(folder)
    with sqlite3.connect(path) as db:
        db.execute("UPDATE requests SET reply = replace(reply, '#### right', ?)", (f"key {TOKEN} at https://me:word@host/x",))
    found = made(folder)
    whole = "\n".join(text or "" for chunk in found.chunks for entry in unpacked(chunk) for text in entry)
    assert "key [secret] at https://host/x" in whole
    assert TOKEN not in whole and "me:word" not in whole


def test_a_reply_that_was_counted_wins_over_one_of_another_way_of_serving(tmp_path: Path) -> None:
    folder = make_run(tmp_path)
    path = write_journal(folder)
    with sqlite3.connect(path) as db:
        db.execute(
            "INSERT INTO requests SELECT 'x' || key, suite, task, item, sample, checkpoint_sha256, 'another', path,"
            " body, status, num_attempts, asked_at + 1, http_status, latency_s, finish_reason, prompt_tokens,"
            " output_tokens + 1000, error, replace(reply, '####', 'LATER'), logprobs, reply_sha256 FROM requests"
        )
    found = made(folder)
    assert "LATER" not in "\n".join(str(unpacked(chunk)) for chunk in found.chunks)


def test_prompts_and_replies_of_every_kind_are_text() -> None:
    assert prompt_of({"prompt": "2 + 2 ="}) == "2 + 2 ="
    two = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": [{"type": "text", "text": "Hi"}]}]
    tools = [{"type": "function", "function": {"name": "weather"}}]
    assert prompt_of({"messages": two, "tools": tools}) == "[system]\nBe brief.\n\n[user]\nHi\n\n[tools offered: weather]"
    call = {"id": "1", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}
    assert reply_of({"text": "", "tool_calls": [call]}) == (
        '[calls]\n{"name": "weather", "arguments": "{\\"city\\": \\"Rome\\"}"}'
    )
    assert reply_of({"text": "\n4", "reasoning": "2 and 2"}) == "[thinking]\n2 and 2\n\n[answer]\n4"
    assert reply_of({}) == ""


def test_a_long_text_loses_its_middle_and_says_how_much() -> None:
    told = items.clipped("a" * 6_500 + "b" * 6_500, items.MOST_CHARACTERS)
    assert told == "a" * 6_000 + "\n[... 1,000 characters left out ...]\n" + "b" * 6_000
