"""What the page says, as whole values on the sample run of this repository and on synthetic ones."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import re
import shlex
import subprocess
import sys
from html import unescape
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from command_line import Run
from pages import Page
from synthetic_run import make_run
from typer.main import get_command

import assay_cli as cli
from assay.errors import AssayError
from assay.records.choice.record import Cell, Choice, Pick, Quality, Setup
from assay.records.measurement import Measurement
from assay.records.speed import NotMeasured, SpeedRecord, SpeedRepeat, SpeedRow
from assay.records.verdict import GateReport, Verdict
from assay_reports.choice import choice_words
from assay_reports.json_schema import report_schema
from assay_reports.numbers import build_report
from assay_reports.page.findings import kept_roles
from assay_reports.page.first_screen import first_screen
from assay_reports.report import context, document_parts, environment, render_html, render_markdown, write_report
from assay_reports.run import load_run
from assay_reports.schema import Limit, PlanNumbers, Report, RoleNumbers

REPOSITORY = Path(__file__).parents[3]
SAMPLE = REPOSITORY / "reports" / "samples" / "tiny-glm"
TABLES = 8
"""Columns that a table of the first level may have."""


@pytest.fixture(scope="module")
def sample() -> Report:
    """Rows, verdicts and limits were measured; without speeds and a choice, as `make quantize eval` leaves it."""
    return Report.load(SAMPLE / "report.json").model_copy(update={"speed": None, "choice": None})


def small_changes(report: Report, **changes: Any) -> Report:
    return report.model_copy(update=changes)


# ------------------------------------------------------------------------------------------------ first screen
def two_losses(report: Report) -> Report:
    """The sample with what it must not depend on fixed: INT4 undecided, nvfp4a16 failed, on Chinese code lookup."""
    int4 = dict.fromkeys(("w4a16", "w4a16-gptq", "auto-4.5bpw"), "UNDERPOWERED")
    statuses = {**int4, "nvfp4a16": "FAIL", "bf16": "PASS"}
    said = {
        "w4a16": "loses 10.0 points on it; 10 allowed; 9 gates passed, 1 underpowered.",
        "nvfp4a16": "loses 25.0 points; 9 gates passed, 1 failed.",
    }
    rows = [
        row.model_copy(update={"status": statuses[row.label], "sentence": said.get(row.label, row.sentence)})
        if row.label in statuses else row
        for row in report.rows
    ]  # fmt: skip
    return small_changes(report, rows=tuple(rows))


def test_it_answers_which_why_and_what_next(sample: Report) -> None:
    first = first_screen(two_losses(sample))
    assert first.answer == (
        "Keep fp8: no smaller checkpoint passes (nvfp4a16 fails; auto-4.5bpw, w4a16 and w4a16-gptq are undecided)"
    )
    why = [(row.label, row.status, clause) for row, clause in first.clauses]
    assert why[0] == ("w4a16", "UNDERPOWERED", "loses 10.0 points on it; 10 allowed.")
    assert [label for label, _, _ in why] == ["w4a16", "w4a16-gptq", "auto-4.5bpw", "nvfp4a16", "bf16"]
    assert why[3] == ("nvfp4a16", "FAIL", "loses 25.0 points.")
    assert [(step.sentence, step.command) for step in first.steps][-3:] == [
        ("To decide w4a16-gptq on English code lookup, evaluate with about 871 items; 120 were asked", None),
        (
            "Find where nvfp4a16 goes wrong against fp8",
            "assay diagnose locate tiny-glm/fp8/checkpoint tiny-glm/nvfp4a16/checkpoint",
        ),
        ("Measure speed on the hardware that will serve it", "assay speed tiny-glm"),
    ]
    assert "Speed: not measured, so nothing tells which checkpoint is faster or cheaper" in first.unknown
    assert (
        "Kernels: nvfp4a16, auto-4.5bpw, w4a16 and w4a16-gptq ran emulated; the scores are the number format's" in first.unknown
    )


def commands_of(run_dir: Path) -> list[str]:
    write_report(run_dir)
    steps = first_screen(build_report(load_run(run_dir))).steps
    return [step.command for step in steps if step.command is not None]


def test_every_command_of_the_page_works_in_the_folder_of_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run: Run
) -> None:
    run_dir = make_run(tmp_path)
    monkeypatch.chdir(tmp_path)
    program: Any = get_command(cli.app)
    (run_dir / "gates.json").rename(tmp_path / "gates.json")
    assert commands_of(run_dir) == ["assay gate tiny-glm", "assay speed tiny-glm"]
    assert run("gate", "tiny-glm")[0] in (0, 1) and (run_dir / "gates.json").is_file()
    gates = GateReport.load(run_dir / "gates.json")
    gates.model_copy(update={"overall": {**gates.overall, "w4a16": "FAIL"}}).save(run_dir / "gates.json")
    locate, speed = commands_of(run_dir)
    assert locate == "assay diagnose locate tiny-glm/fp8/checkpoint tiny-glm/w4a16/checkpoint"
    assert speed == "assay speed tiny-glm"
    for proposed in (locate, speed):
        command, words = program, shlex.split(proposed)[1:]
        while hasattr(command, "commands"):
            command = command.commands[words.pop(0)]
        command.make_context(command.name, words)
        assert all(Path(word).is_dir() for word in words)
    SpeedRecord(rows=(speed_row("w4a16", 1, 80.0),)).save(run_dir / "speed.json")
    assert commands_of(run_dir) == [locate, "assay choose tiny-glm"]
    assert run("choose", "tiny-glm")[0] in (0, 1) and (run_dir / "choice.json").is_file()


@pytest.mark.parametrize(
    ("gate", "more"), [("acceptance", "items"), ("divergence kl_mean", "texts"), ("divergence kl_mean of spans", "texts")]
)
def test_what_would_decide_a_gate_is_what_it_counts(sample: Report, gate: str, more: str) -> None:
    """Divergence is over texts: more items of a task may add none."""
    verdict = Verdict(gate=gate, candidate="w4a16", status="UNDERPOWERED", observed=None, limit=0.1, detail="d")
    first = first_screen(small_changes(sample, verdicts=(verdict,)))
    assert first.steps[0].sentence == f"To decide w4a16 on {gate}, evaluate with more {more}"
    assert f"w4a16, {gate}: undecided" in first.unknown


def test_no_command_is_proposed_for_what_is_not_there(sample: Report) -> None:
    """Of servers alone no folder is known: neither `locate` nor `speed` could read one."""
    unknown = {"share_of_reference": None, "checkpoint_bytes": None, "folder": None}
    rows = tuple(row.model_copy(update=unknown) for row in two_losses(sample).rows)
    assert {step.command for step in first_screen(small_changes(sample, rows=rows)).steps} == {None}


def test_a_serving_that_is_at_fault_is_to_be_mended_first(sample: Report) -> None:
    fault = Limit(key="serving_faults", text="Not scored, for the serving is at fault: needle (a cap).")
    steps = first_screen(small_changes(sample, limits=(*sample.limits, fault))).steps
    assert steps[0].sentence == (
        "Fix the serving, then evaluate again with `--again LABEL` for each label that was measured through it"
    )


def test_a_smaller_checkpoint_that_passes_is_the_answer(sample: Report) -> None:
    rows = [row.model_copy(update={"status": "PASS"}) if row.kind == "candidate" else row for row in sample.rows]
    said = first_screen(small_changes(sample, rows=tuple(rows))).answer
    assert said == "Use w4a16: it passes at 6.31 MB, 77.4 % of fp8; the smallest of 4 that pass"


def test_what_passed_is_said_where_sizes_are_not_known(sample: Report) -> None:
    """Of servers alone no size is known: that no smaller one passes would be made up."""
    unknown = {"share_of_reference": None, "checkpoint_bytes": None}
    rows = [row.model_copy(update={**unknown, "status": "PASS"}) if row.kind == "candidate" else row for row in sample.rows]
    said = first_screen(small_changes(sample, rows=tuple(rows))).answer
    five = "bf16, nvfp4a16, auto-4.5bpw, w4a16 and w4a16-gptq"
    assert said == f"{five} pass, compared with fp8; whether {five} are smaller is unknown"
    one = [row.model_copy(update=unknown) if row.label == "bf16" else row for row in two_losses(sample).rows]
    assert first_screen(small_changes(sample, rows=tuple(one))).answer == (
        "bf16 passes, nvfp4a16 fails and auto-4.5bpw, w4a16 and w4a16-gptq are undecided, compared with fp8; whether bf16 "
        "is smaller is unknown"
    )


def test_headings_say_what_was_found(sample: Report) -> None:
    """The largest loss is named first; what has no verdict is named too."""
    page = Page(render_html(sample))
    assert [level for level, _ in page.headings].count(1) == 1
    steps = [b - a for (a, _), (b, _) in zip(page.headings, page.headings[1:], strict=False)]
    assert max(steps) == 1, "no level is skipped"
    found = context(sample)["findings"]
    losses = {
        (row.label, task.title): task.drop.value
        for row in sample.rows if row.kind == "candidate" for task in row.tasks
        if task.drop is not None and task.drop.low > 0
    }  # fmt: skip
    assert set(losses) == {
        ("nvfp4a16", "Chinese code lookup"), ("w4a16", "Chinese code lookup"), ("w4a16-gptq", "English code lookup"),
    }  # fmt: skip
    assert found["tasks"] == (
        "Chinese code lookup lost 25 points (nvfp4a16) and 10 (w4a16); English code lookup lost 6.7 points (w4a16-gptq); "
        "no other significant loss; not measured: RULER, needle retrieval by depth and tool calls"
    )
    assert found["verification"].startswith("auto-4.5bpw, fp8, nvfp4a16, w4a16 and w4a16-gptq: ") and found[
        "verification"
    ].endswith("all passed")
    assert found["speed"] == "Speed was not measured" and found["fidelity"] == "Serving was not probed for faults under load"
    heads = [text for _, text in page.headings]
    for name in ("tasks", "long_context", "drift", "fidelity", "speed", "tensors", "verification", "serving", "limits"):
        assert any(text.endswith(found[name]) for text in heads), name


def test_no_task_lost_is_not_said_of_what_was_not_measured(sample: Report) -> None:
    rows = [row.model_copy(update={"tasks": ()}) if row.kind == "candidate" else row for row in sample.rows]
    bare = small_changes(sample, rows=tuple(rows), long_context=())
    found = context(bare)["findings"]
    assert (found["tasks"], found["long_context"]) == ("No task was scored on a candidate", "Long context was not measured")


def test_a_role_that_is_kept_in_two_ways_is_named_once(sample: Report) -> None:
    """Of the sample MTP's weights are BF16 and the bias of its router is F32."""
    names, share = kept_roles(next(plan for plan in sample.plans if plan.precision == "fp8"))
    assert names == ["mtp", "embedding", "lm head", "router", "norm", "attention", "router bias"]
    assert share == 4_289_920 / 8_124_244
    sizes = (("router", "kept in BF16", 100), ("norm", "kept in BF16", 60), ("norm", "cast to F32", 50), ("mtp", "dropped", 0))
    roles = tuple(RoleNumbers(role=role, what=what, num_tensors=1, bytes_in=100, bytes_out=size) for role, what, size in sizes)
    plan = PlanNumbers(precision="x", scheme="", bytes_in=400, bytes_out=420, roles=roles)
    assert kept_roles(plan) == (["norm", "router"], 0.5), "by the bytes of both"


# ------------------------------------------------------------------------------------------------ structure
def test_tables_of_the_first_level_are_narrow_and_statistics_are_on_demand(sample: Report) -> None:
    page = Page(render_html(sample))
    first = [table for table in page.tables if table.details == 0]
    assert {table.label for table in first} >= {
        "Scores by task",
        "Divergence from the reference",
        "Verification",
        "Served checkpoints",
    }
    assert {table.label: table.columns for table in first if table.columns > TABLES} == {}
    assert any(table.columns > TABLES for table in page.tables if table.details)
    assert len(page.ids) == len(set(page.ids)), "an id stands once"


def test_every_word_that_is_explained_has_its_definition(sample: Report) -> None:
    text = render_html(sample)
    named = set(re.findall(r'href="#(word-[\w-]+)"', text))
    assert named and named == set(re.findall(r'<dd id="(word-[\w-]+)">', text))
    assert set(re.findall(r'aria-describedby="([\w-]+)"', text)) == named
    assert set(re.findall(r'href="#([\w-]+)"', text)) <= set(Page(text).ids)


def test_the_page_is_small_and_lets_nothing_else_in(sample: Report) -> None:
    text = render_html(sample)
    assert len(text.encode()) < 1_500_000
    policy = re.search(r'http-equiv="Content-Security-Policy" content="([^"]+)"', text)
    assert policy is not None and document_parts(environment(html=True))["policy"] == policy.group(1).replace("&#39;", "'")
    assert "default-src 'none'" in policy.group(1).replace("&#39;", "'") and "unsafe" not in policy.group(1)
    assert " style=" not in re.sub(r"<(script|style).*?</\1>", "", text, flags=re.S), "the policy would drop it"
    assert "plotly" not in text


def test_markdown_has_the_order_of_the_page(sample: Report) -> None:
    lines = render_markdown(sample).splitlines()
    found = context(sample)
    assert lines[0] == f"# {found['first'].answer}"
    heads = [line.removeprefix("## ") for line in lines if line.startswith("## ")]
    order = (
        "tasks",
        "long_context",
        "drift",
        "fidelity",
        "speed",
        "acceptance",
        "tensors",
        "verification",
        "serving",
        "limits",
    )
    gates = heads.pop(1)
    assert gates == "Gates, written before the run" and heads == [found["findings"][name] for name in order]
    assert max(line.count("|") for line in lines if line.startswith("|")) <= TABLES + 1
    assert len(lines) < 250


def test_markdown_joins_no_paragraphs(sample: Report) -> None:
    """Only rows of a table and items of a list follow each other without a blank line."""
    lines = render_markdown(sample).splitlines()
    joined = [
        pair for pair in itertools.pairwise(lines) if all(pair) and {line.lstrip()[0] for line in pair} not in ({"|"}, {"-"})
    ]
    assert joined == []


# ------------------------------------------------------------------------------------------------ speed and choice
def speed_row(checkpoint: str, concurrency: int, tokens_s: float, **more: Any) -> SpeedRow:
    given: dict[str, Any] = {
        "checkpoint": checkpoint, "origin": "measured", "source": "vllm bench serve", "hardware": "8xH200", "num_gpus": 8,
        "speculation": 0, "prompts": "chat", "concurrency": concurrency, "emulated": False,
        "repeats": tuple(SpeedRepeat(output_tokens_s=tokens_s * factor) for factor in (0.98, 1.0, 1 / 0.98)),
    }  # fmt: skip
    return SpeedRow(**given | more)


def test_speed_has_a_picture_for_each_set_of_rows_that_are_alike(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path)
    rows = (
        speed_row("fp8", 1, 60.0), speed_row("fp8", 32, 900.0), speed_row("w4a16", 1, 80.0), speed_row("w4a16", 32, 700.0),
        speed_row("w4a16", 1, 130.0, speculation=3), speed_row("nvfp4a16", 1, 999.0, emulated=True),
    )  # fmt: skip
    SpeedRecord(rows=rows).save(run_dir / "speed.json")
    page = Page(write_report(run_dir).read_text(encoding="utf-8"))
    said = "w4a16 is fastest at 1 stream (80.0 tokens/s), fp8 is fastest at 32 (900.0); 8xH200, chat, speculation off"
    assert (2, f"Speed {said}") in page.headings
    drawn = [one for one in page.pictures if one.startswith("Tokens a second")]
    assert len(drawn) == 6 and len(set(drawn)) == 2, "each for a screen and a phone; the first on the first screen as well"
    assert "fp8, 32 in flight: 900.0 tokens/s (3 repeats)" in page.titles
    assert not any("999" in one for one in page.titles), "an emulated format has no speed"
    table = next(table for table in page.tables if table.label.startswith("Speed, ") and "speculation off" in table.label)
    assert [row[:3] for row in table.rows[1:]] == [
        ["fp8", "1", "60.0"], ["fp8", "32", "900.0"], ["w4a16", "1", "80.0"], ["w4a16", "32", "700.0"],
    ]  # fmt: skip


def a_choice(**changes: Any) -> Choice:
    """Of the synthetic run: fp8 and w4a16 have imported speeds; bf16, which passes, and nvfp4a16, undecided, have none."""
    why = {"state": "missing", "why": "emulated here"}
    given: dict[str, Any] = {
        "model": "tiny-glm", "recommendation": "w4a16 with MTP up to about 20 streams, then fp8", "quality_assumed": False,
        "hardware": "8xH200", "num_gpus": 8, "origin": "imported", "prompts": "chat", "engine": None, "concurrency": (8, 64),
        "setups": (
            Setup(checkpoint="w4a16", speculation=1, name="w4a16 with MTP"), Setup(checkpoint="fp8", speculation=0, name="fp8"),
        ),
        "cells": (
            Cell(setup="w4a16 with MTP", concurrency=8, state="imported", output_tokens_s=495.72),
            Cell(setup="w4a16 with MTP", concurrency=64, state="missing", why="not measured"),
            Cell(setup="bf16", concurrency=8, **why), Cell(setup="bf16", concurrency=64, **why),
            Cell(setup="nvfp4a16", concurrency=8, **why), Cell(setup="nvfp4a16", concurrency=64, **why),
            Cell(setup="awq", concurrency=8, state="predicted", output_tokens_s=99.0, source="assay roofline"),
        ),
        "quality": (
            Quality(checkpoint="w4a16", word="PASS", may_be_chosen=True, detail="d"),
            Quality(checkpoint="fp8", word="REFERENCE", may_be_chosen=True, detail="d"),
            Quality(checkpoint="bf16", word="PASS", may_be_chosen=True, detail="d"),
            Quality(checkpoint="nvfp4", word="NOT MEASURED", may_be_chosen=False, detail="d", to_run=("GSM8K: 1,819 items",)),
        ),
        "picks": (
            Pick(concurrency=8, setup="w4a16 with MTP", chance_best=0.93),
            Pick(concurrency=64, setup=None, why_none="all miss ttft<2s"),
        ),
        "if_passed": ("nvfp4a16 is UNDERPOWERED, so its quality is unknown; if it passed: nvfp4a16 at 8",),
        "seed": 1, "num_draws": 2,
    }  # fmt: skip
    return Choice(**given | changes)


@pytest.fixture
def judged(tmp_path: Path) -> Path:
    """The synthetic run, whose gates call w4a16 what the choice does."""
    return make_run(tmp_path)


def items_of(page: str) -> list[str]:
    items = re.findall(r"<li>(.*?)</li>", page)
    return [unescape(re.sub(r"</?code>", "`", item)) for item in items]


def test_a_choice_is_the_answer(judged: Path) -> None:
    a_choice().save(judged / "choice.json")
    page = write_report(judged).read_text(encoding="utf-8")
    assert (1, "Deploy w4a16 with MTP up to about 20 streams, then fp8") in Page(page).headings
    assert items_of(page)[:3] == [
        "At 8 streams: w4a16 with MTP, 495.7 tokens/s (best with a chance of 93 %)",
        "At 64 streams: none, all miss ttft<2s",
        "Speeds are known for fp8 and w4a16 only; bf16 (PASS) could be deployed too",
    ]
    for line in (
        "Speeds are imported, not measured here", "Speed of bf16 and nvfp4a16: emulated here",
        "Speed of w4a16 with MTP at 64 streams: not measured",
        "Speed of awq at 8 streams: only predicted, by assay roofline",
        "nvfp4a16 is UNDERPOWERED, so its quality is unknown; if it passed: nvfp4a16 at 8",
        "To decide whether nvfp4 may be chosen, run GSM8K: 1,819 items",
    ):  # fmt: skip
        assert line in items_of(page), line


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"quality_assumed": True, "recommendation": "quality was not measured (--quality assumed): fp8 at 8 streams"},
         "Quality was not measured (--quality assumed): fp8 at 8 streams"),
        ({"origin": "predicted", "recommendation": "predicted, not measured: fp8 at 8 streams"},
         "Predicted, not measured: fp8 at 8 streams"),
        ({"picks": (Pick(concurrency=8, setup=None, why_none="w"),), "recommendation": "nothing can be recommended: w"},
         "Nothing can be recommended: w"),
        ({"recommendation": "nothing that meets the objective up to about 4 streams, then fp8"},
         "Nothing that meets the objective up to about 4 streams, then fp8"),
    ],
)  # fmt: skip
def test_nobody_is_told_to_deploy_what_was_assumed_or_predicted(changes: dict[str, Any], sentence: str) -> None:
    assert choice_words(a_choice(**changes)).sentence == sentence


def test_what_was_never_measured_is_to_be_measured() -> None:
    """As `assay choose` says of a checkpoint that is no candidate of the run; it was `run measure int4`."""
    run = ("measure int4: `assay evaluate`",)
    one = Quality(checkpoint="int4", word="NOT MEASURED", may_be_chosen=False, detail="d", to_run=run)
    said = "To decide whether int4 may be chosen, measure int4: `assay evaluate`"
    assert choice_words(a_choice(quality=(one,))).next_steps == (said,)


OUTDATED = "The recommendation of `assay choose` is out of date and left out: {}; run it again"


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"model": "glm-5"}, "it is of glm-5"),
        ({"checkpoint_sha256": {"w4a16": "0" * 64}}, "w4a16 was made again since"),
        ({"quality": (Quality(checkpoint="bf16", word="FAIL", may_be_chosen=False, detail="d"),)},
         "bf16 was FAIL then and is PASS now"),
        ({"quality": (Quality(checkpoint="int4", word="PASS", may_be_chosen=True, detail="d"),)},
         "int4 was PASS then and is not judged now"),
    ],
)  # fmt: skip
def test_a_choice_of_other_checkpoints_or_verdicts_is_left_out(judged: Path, changes: dict[str, Any], why: str) -> None:
    a_choice(**changes).save(judged / "choice.json")
    page = write_report(judged).read_text(encoding="utf-8")
    assert not any(text.startswith("Deploy") for _, text in Page(page).headings)
    assert OUTDATED.format(why) in items_of(page)


HOSTILE = ("<img src=x onerror=alert(1)>", "**b** [x](http://e) | c", "\x1b[31mred", "a\u2028b", "\u202egnp.exe", "[/red]")


def test_names_in_records_are_text(judged: Path) -> None:
    """Of speeds and a choice that others wrote: no markup, no link, nothing that is not seen, on the page and in Markdown."""
    rows = [
        speed_row(name, at, 10.0 * at, hardware=f"8x{name}", prompts=name, engine=name) for name in HOSTILE for at in (1, 8)
    ]
    SpeedRecord(rows=tuple(rows)).save(judged / "speed.json")
    cells = tuple(Cell(setup=name, concurrency=8, state="missing", why=name) for name in HOSTILE)
    picks = tuple(Pick(concurrency=8, setup=None, why_none=name) for name in HOSTILE)
    a_choice(recommendation=" ".join(HOSTILE), cells=cells, picks=picks, refused=HOSTILE).save(judged / "choice.json")
    page = write_report(judged).read_text(encoding="utf-8")
    markdown = (judged / "report" / "report.md").read_text(encoding="utf-8")
    for text in (page, markdown):
        assert "<img" not in text and not [c for c in text if not c.isprintable() and c != "\n"]
        assert "\\u202egnp.exe" in text and "\\u001b[31mred" in text
    assert "a\\u2028b" in page
    assert "](http" not in markdown and "&lt;img src=x onerror=alert(1)&gt;" in page


def test_a_choice_that_is_no_record_is_one_line(judged: Path) -> None:
    for text in ("[1]", '{"recommendation": "fp8"}', "{", a_choice().as_text().replace('"imported"', '"guessed"', 1)):
        (judged / "choice.json").write_text(text)
        with pytest.raises(AssayError, match=r"choice\.json: not a Choice record of schema 1: "):
            write_report(judged)


def test_speeds_that_cannot_be_told_apart_are_not_ranked(tmp_path: Path) -> None:
    """A lead of 3 % of repeats of one start, which may differ by as much from the next start."""
    run_dir = make_run(tmp_path)
    rows = (speed_row("fp8", 1, 60.0), speed_row("w4a16", 1, 80.0), speed_row("fp8", 32, 900.0), speed_row("w4a16", 32, 930.0))
    lost = SpeedRepeat(output_tokens_s=2000.0, num_completed=900, num_failed=100)
    SpeedRecord(rows=(*rows, speed_row("bf16", 32, 1.0, repeats=(lost,)))).save(run_dir / "speed.json")
    text = write_report(run_dir).read_text(encoding="utf-8")
    said = "w4a16 is fastest at 1 stream (80.0 tokens/s), w4a16 and fp8 cannot be told apart at 32 (930.0)"
    assert (2, f"Speed {said}; 8xH200, chat, speculation off") in Page(text).headings
    assert (
        "bf16, 32 in flight: 2,000.0 tokens/s, never chosen: it is not believed: 100 of 1,000 requests failed (10 %)." in text
    )


def test_speeds_of_other_bytes_are_left_out(judged: Path) -> None:
    """speed.json of another run, or from before the checkpoint was made again."""
    sha256 = Measurement.load(judged / "measurements" / "w4a16.json").checkpoint_sha256
    SpeedRecord(rows=(
        speed_row("w4a16", 1, 999.0, checkpoint_sha256="0" * 64), speed_row("bf16", 1, 50.0, checkpoint_sha256="1" * 64),
        speed_row("w4a16", 8, 400.0, checkpoint_sha256=sha256),
    )).save(judged / "speed.json")  # fmt: skip
    page = write_report(judged).read_text(encoding="utf-8")
    titles = Page(page).titles
    assert "w4a16, 8 in flight: 400.0 tokens/s (3 repeats)" in titles and not any("999" in one for one in titles)
    line = "Speeds of w4a16 and bf16 are of other bytes than these and left out; `assay speed` measures again"
    assert line in items_of(page)


def test_limits_name_what_the_speeds_are_of(judged: Path) -> None:
    def limits() -> dict[str, str]:
        return {one.key: one.text for one in build_report(load_run(judged)).limits if one.key.startswith("speed")}

    assert limits() == {"speed_unmeasured": "Speed was not measured: nothing here tells which checkpoint is faster or cheaper."}
    rows = (
        speed_row("fp8", 1, 60.0, prompt_tokens=200.0, output_tokens=64.0), speed_row("fp8", 32, 900.0, output_tokens=60.0),
        speed_row("w4a16", 1, 80.0, origin="imported", source="a page"), speed_row("nvfp4a16", 1, 9.0, emulated=True),
    )  # fmt: skip
    SpeedRecord(rows=rows, not_measured=(NotMeasured(checkpoint="nvfp4a16", reason="emulated"),)).save(judged / "speed.json")
    assert limits() == {
        "speed_unmeasured": "Speed was not measured for bf16 (not requested); nvfp4a16 (emulated).",
        "speed_conditions": "Speed holds for 8xH200, chat prompts, about 200 prompt tokens, about 60 to 64 reply tokens, 1 to "
        "32 in flight. Other hardware, lengths and loads are unknown. Each point has 3 repeats of one start of the server: how "
        "much starts differ is assumed (3 %).",
        "speed_from_elsewhere": "Speeds not measured here: w4a16: imported (a page).",
    }


# ------------------------------------------------------------------------------------------------ schema
def test_the_published_schema_is_current_and_takes_the_sample() -> None:
    published = REPOSITORY / "docs" / "report.schema.json"
    assert published.read_text(encoding="utf-8") == report_schema(), (
        "python -m assay_reports.json_schema docs/report.schema.json writes it again"
    )
    schema = json.loads(report_schema())
    jsonschema.Draft202012Validator.check_schema(schema)
    told = json.loads((SAMPLE / "report.json").read_text(encoding="utf-8"))
    jsonschema.validate(told, schema)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(told | {"rows": [{"label": 3}]}, schema)


def test_the_schema_is_written_by_its_command(tmp_path: Path) -> None:
    place = tmp_path / "made.json"
    subprocess.run([sys.executable, "-m", "assay_reports.json_schema", str(place)], check=True)
    assert place.read_text(encoding="utf-8") == report_schema()


def test_the_sample_as_it_is_recommends_from_its_speeds() -> None:
    """Its answer is the choice, whose words are the record's; and the same bytes in every process."""
    told = Report.load(SAMPLE / "report.json")
    assert told.choice is not None and told.speed is not None
    assert first_screen(told).answer == told.choice.sentence
    command = [sys.executable, "-c", f"""
import hashlib
from pathlib import Path
from assay_reports.report import render_html
from assay_reports.run import load_run
from assay_reports.schema import Limit, Report
print(hashlib.sha256(render_html(Report.load(Path({str(SAMPLE / "report.json")!r}))).encode()).hexdigest())
"""]  # fmt: skip
    made = {
        subprocess.run(
            command, env=os.environ | {"PYTHONHASHSEED": seed}, capture_output=True, text=True, check=True
        ).stdout.strip()
        for seed in ("1", "2", "3")
    }
    assert made == {hashlib.sha256((SAMPLE / "index.html").read_bytes()).hexdigest()}
