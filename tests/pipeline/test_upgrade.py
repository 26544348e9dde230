"""`upgrade_check`: engines by word, the verdict between two, and where in a chain a loss came in."""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from fake_interpreter import fake_python
from fake_server import FakeServer, Scripted, plain_logits

from assay.errors import AssayError
from assay.recipes.suite import SuiteRecipe
from assay.records.speed import SpeedRecord, SpeedRepeat, SpeedRow
from assay.records.upgrade import UPGRADE_RECORD, Engine, UpgradeCheck, UpgradeSpeed, UpgradeStep
from assay.safe_yaml import parse_yaml
from assay_evaluate.tasks.generated import arithmetic_items
from assay_pipeline.upgrading.engines import engine_at
from assay_pipeline.upgrading.upgrade import Question, bisect, speeds_of, upgrade_check
from assay_reports.schema import Report
from assay_reports.upgrade import changelog_line, shown

SUITE = """\
schema: 1
name: sums
seed: eval-sums
acceptance: false
tasks:
  - {kind: arithmetic, name: sums, num_items: 60, num_steps: [2], max_tokens: 32}
  - {kind: arithmetic, name: more, num_items: 60, num_steps: [3], max_tokens: 32}
"""
GATES = """\
schema: 1
name: gates
level: 0.95
max_excluded: 0.01
min_items: 30
gates: [{kind: score, task: sums, max_drop: 0.10}, {kind: score, task: more, max_drop: 0.10}]
"""


# ------------------------------------------------------------------------------------------------ bisection
def engines(*labels: str) -> list[Engine]:
    return [Engine(label=label, where=f"/{label}/python", version=label) for label in labels]


def tried(chain: list[Engine], first_bad: str, untold: str = "") -> tuple[str, str, list[str]]:
    asked: list[str] = []

    def is_lost(engine: Engine) -> bool | None:
        asked.append(engine.label)
        return None if engine.label in untold else engine.label >= first_bad

    good, bad, num_untold = bisect(chain, is_lost)
    assert num_untold == ord(bad.label) - ord(good.label) - 1
    return good.label, bad.label, asked


@pytest.mark.parametrize("first_bad", "bcdefghi")
def test_the_first_bad_one_is_found_in_as_few_steps_as_halving_takes(first_bad: str) -> None:
    chain = engines(*"abcdefghi")
    good, bad, asked = tried(chain, first_bad)
    assert (good, bad) == (chr(ord(first_bad) - 1), first_bad)
    assert len(asked) <= math.ceil(math.log2(len(chain) - 1)) and len(set(asked)) == len(asked)


def test_neighbours_need_no_step() -> None:
    assert tried(engines("a", "b"), "b") == ("a", "b", [])


def test_what_cannot_be_told_is_stepped_over() -> None:
    assert tried(engines(*"abcde"), "d", untold="c") == ("b", "d", ["c", "b", "d"])
    assert tried(engines(*"abcd"), "c", untold="bc")[:2] == ("a", "d")
    assert tried(engines(*"abcde"), "b", untold="c") == ("a", "b", ["c", "b"])  # c lies behind the two, and is not counted


# ------------------------------------------------------------------------------------------------ engines
def test_a_python_its_folder_or_a_url(tmp_path: Path) -> None:
    (tmp_path / "next" / "bin").mkdir(parents=True)
    python = fake_python(tmp_path / "next" / "bin", "")
    expected = Engine(label="vllm-0.0", where=str(python), version="0.0")
    assert engine_at(str(python), "--to") == engine_at(str(tmp_path / "next"), "--to") == expected
    with FakeServer() as server:
        server.version = "0.33.0+cu130"  # type: ignore[misc]
        assert engine_at(server.base_url, "--to") == Engine(
            label="vllm-0.33.0-cu130", where=server.base_url, version="0.33.0+cu130"
        )


def test_words_that_name_no_engine(tmp_path: Path) -> None:
    bare = tmp_path / "python"
    bare.write_text('#!/bin/sh\necho "{}"\n')
    bare.chmod(0o755)
    for word, message in (
        (str(tmp_path / "none"), "is no Python, no folder of an environment and no URL; name one of them, such as"),
        (str(tmp_path), "is no Python, no folder of an environment"),
        (str(bare), "has no vLLM; name an environment that has it"),
    ):
        with pytest.raises(AssayError, match=f"--from {word}: {message}"):
            engine_at(word, "--from")


def test_engines_that_cannot_be_compared(tmp_path: Path) -> None:
    python = fake_python(tmp_path, "")
    with FakeServer() as server:
        with pytest.raises(AssayError, match="one is a server that runs already, and the other would be started here"):
            upgrade_check(Question(str(tmp_path)), str(python), server.base_url)
        with pytest.raises(AssayError, match="is the other engine as well; name two"):
            upgrade_check(Question(str(tmp_path)), server.base_url, server.base_url)
    (tmp_path / "other").mkdir()
    with pytest.raises(AssayError, match="TARGET is missing: the checkpoint that both engines are to serve"):
        upgrade_check(Question(None), str(python), str(fake_python(tmp_path / "other", "")))
    assert not (tmp_path / "runs").exists()


# ------------------------------------------------------------------------------------------------ the whole of it
@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sums.yaml").write_text(SUITE)
    (tmp_path / "gates.yaml").write_text(GATES)
    return tmp_path


@functools.cache
def answers() -> dict[str, tuple[str, str]]:
    """Prompt -> task and right answer."""
    suite = SuiteRecipe.model_validate(parse_yaml(SUITE))
    items = ((task.name, item) for task in suite.tasks for item in arithmetic_items(task, suite.seed))  # type: ignore[arg-type]
    return {item.prompt: (name, item.answer) for name, item in items}


def reply(body: dict[str, Any], *, is_lossy: bool) -> Scripted:
    """A lossy engine gets the items of task `more` wrong."""
    prompt = body["messages"][-1]["content"] if "messages" in body else body["prompt"]
    if not isinstance(prompt, str) or prompt not in answers():  # prompts of a signature are token ids
        return Scripted("x")
    task, answer = answers()[prompt]
    return Scripted(f"#### {'wrong' if is_lossy and task == 'more' else answer}")


@contextmanager
def versions(*lossy: bool) -> Iterator[list[FakeServer]]:
    """Servers of one checkpoint, vLLM 0.30.0, 0.31.0, ..."""
    with ExitStack() as stack:
        servers = []
        for number, is_lossy in enumerate(lossy):
            server = stack.enter_context(FakeServer(functools.partial(reply, is_lossy=is_lossy), logits=plain_logits))
            server.version = f"0.{30 + number}.0"  # type: ignore[misc]
            servers.append(server)
        yield servers


@pytest.mark.slow
def test_a_loss_is_found_between_two_servers(place: Path) -> None:
    said: list[str] = []
    with versions(False, False, True, True) as servers:
        question = Question(None, suite="sums.yaml", gates="gates.yaml")
        first, second, third, last = (server.base_url for server in servers)
        checked = upgrade_check(question, first, last, between=(second, third), runs=place / "runs", say=said.append)
        asked = [len([body for path, body in server.requests if path.endswith("completions")]) for server in servers]
    record = checked.record
    assert (record.status, record.before.label, record.after.label) == ("FAIL", "vllm-0.30.0", "vllm-0.33.0")
    assert record.tried_on == ("more",)
    assert [(step.engine.label, step.status) for step in record.steps] == [("vllm-0.31.0", "PASS"), ("vllm-0.32.0", "FAIL")]
    assert record.last_good is not None and record.last_good.version == "0.31.0"
    assert record.first_bad is not None and record.first_bad.version == "0.32.0"
    assert record.speeds == () and record.speeds_not_measured is not None
    assert UpgradeCheck.load(checked.run_dir / UPGRADE_RECORD) == record
    assert asked[1] < asked[3], "engines in between answer only what was lost"
    report = Report.load(checked.run_dir / "report" / "report.json")
    assert report.upgrade == record
    page = (checked.run_dir / "report" / "index.html").read_text()
    text = (checked.run_dir / "report" / "report.md").read_text()
    line = changelog_line(record)
    assert "alike, is taken as said" in page and "Nothing else differs" not in page
    assert line.startswith("vLLM 0.33.0 in place of vLLM 0.30.0, model: FAIL on sums: ") and line.endswith(
        "; lost between vLLM 0.31.0 and vLLM 0.32.0"
    )
    assert "FAIL: vLLM 0.33.0 in place of vLLM 0.30.0" in page and '<section id="upgrade">' in page
    assert (
        text.startswith("# FAIL: vLLM 0.33.0 in place of vLLM 0.30.0")
        and "\n## FAIL: vLLM 0.33.0 in place of vLLM 0.30.0; lost between" in text
    )
    assert any(sentence.startswith("bisection: vllm-0.31.0 against vllm-0.30.0 on more") for sentence in said)


@pytest.mark.slow
def test_an_engine_that_answers_alike_passes_and_nothing_in_between_is_tried(place: Path) -> None:
    with versions(False, True, False) as servers:
        first, second, last = (server.base_url for server in servers)
        question = Question(None, suite="sums.yaml", gates="gates.yaml")
        checked = upgrade_check(question, first, last, between=(second,), runs=place / "runs", with_speed=False)
        assert not [path for path, _ in servers[1].requests if path.endswith("completions")]
    record = checked.record
    assert (record.status, record.steps, record.last_good, record.first_bad) == ("PASS", (), None, None)
    assert changelog_line(record).startswith("vLLM 0.32.0 in place of vLLM 0.30.0, model: PASS on sums: ")
    # judged again with another verdict, the record is of the past, and is not shown
    gates = json.loads((checked.run_dir / "gates.json").read_text())
    gates["overall"]["vllm-0.32.0"] = "FAIL"
    (checked.run_dir / "gates.json").write_text(json.dumps(gates))
    from assay_reports.report import write_report

    write_report(checked.run_dir)
    assert Report.load(checked.run_dir / "report" / "report.json").upgrade is None


# ------------------------------------------------------------------------------------------------ speeds and words
def row(label: str, engine: str, *rates: float, concurrency: int = 8) -> SpeedRow:
    return SpeedRow(
        checkpoint=label, origin="measured", source=f"vllm bench serve {engine}", hardware="a CPU", num_gpus=0, speculation=0,
        prompts="chat", concurrency=concurrency, engine=f"vllm {engine}",
        repeats=tuple(SpeedRepeat(output_tokens_s=rate, server_start=number % 2) for number, rate in enumerate(rates)),
    )  # fmt: skip


def test_speeds_are_compared_though_the_engines_differ() -> None:
    rows = (
        row("old", "0.32.0", 100.0, 100.0), row("new", "0.33.0", 120.0, 120.0), row("other", "0.33.0", 1.0, 1.0),
        row("new", "0.33.0", 50.0, concurrency=1),
    )  # fmt: skip
    (speed,) = speeds_of(SpeedRecord(rows=rows), "old", "new")
    assert (speed.concurrency, speed.before_tokens_s, speed.after_tokens_s) == (8, pytest.approx(100), pytest.approx(120))
    assert speed.ratio == pytest.approx(1.2) and speed.interval is not None
    assert speed.interval.low <= 1.2 <= speed.interval.high


OLD, MIDDLE, NEW = (Engine(label=f"vllm-{v}", where=f"/{v}", version=v) for v in ("0.31.0", "0.32.0", "0.33.0"))


def check(**changes: Any) -> UpgradeCheck:
    fields: dict[str, Any] = {
        "model": "m", "suite": "first-look", "before": OLD, "after": NEW, "status": "PASS", "reason": "nothing was lost.",
    }  # fmt: skip
    return UpgradeCheck(**fields | changes)


def test_the_line_for_a_changelog() -> None:
    assert changelog_line(check()) == "vLLM 0.33.0 in place of vLLM 0.31.0, m: PASS on first-look: nothing was lost"
    speeds = (
        UpgradeSpeed(prompts="chat", concurrency=1, speculation=0, before_tokens_s=1, after_tokens_s=1, ratio=1.0),
        UpgradeSpeed(prompts="chat", concurrency=8, speculation=0, before_tokens_s=1, after_tokens_s=1.08, ratio=1.08),
    )
    assert changelog_line(check(speeds=speeds)).endswith("; 1.08 times the tokens/s at 8 in flight")
    patched = NEW.model_copy(update={"version": "0.31.0"})
    assert changelog_line(check(after=patched)).startswith("vLLM 0.31.0 at /0.33.0 in place of vLLM 0.31.0 at /0.31.0, m: ")
    lost = check(status="FAIL", steps=(UpgradeStep(engine=MIDDLE, status=None, reason="it did not start"),),
                 last_good=OLD, first_bad=NEW, num_untold=1, tried_on=("sums",), bisected_in="m-bisect")  # fmt: skip
    assert changelog_line(lost).endswith("; lost between vLLM 0.31.0 and vLLM 0.33.0 (1 in between could not be told)")
    assert shown(lost).steps == (
        "Engines in between were compared with vllm-0.31.0, on sums alone; replies are in run m-bisect."
    )
    assert shown(check()).steps == "" and "`--between`" in shown(check(status="FAIL", last_good=OLD, first_bad=NEW)).steps
