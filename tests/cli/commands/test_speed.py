"""`assay speed`: imports, what is printed, what is refused; and what would be measured, with a stand-in for the measuring."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml
from command_errors import one_error
from command_line import Run
from synthetic_run import make_run

from assay.recipes.load import load_recipe
from assay.recipes.profile import ProfileRecipe
from assay.records.measurement import Measurement
from assay.records.run import RunRecord
from assay.records.speed import NotMeasured, SpeedRecord, SpeedRepeat, SpeedRow
from assay.records.verdict import GateReport
from assay_cli.shown.speed import print_speed
from assay_cli.terminal import console
from assay_evaluate.speed import measure
from assay_pipeline.evaluating import Judged
from assay_pipeline.speed_ladder import measure_judged
from assay_pipeline.targets import resolve_target
from assay_reports.report import write_report

ROOT = Path(__file__).parents[3]
PUBLISHED = ROOT / "examples" / "glm-5.2-speed" / "published.yaml"
BENCH = ROOT / "tests" / "evaluate" / "speed" / "data" / "vllm-bench-c4.json"


def test_the_published_table_makes_a_run(run: Run) -> None:
    code, out, err = run("speed", "glm-5.2", "--import", PUBLISHED)
    lines = out.splitlines()
    assert code == 0 and err.splitlines() == ["21 imported rows", "record: runs/glm-5.2/speed.json"]
    assert lines[0].split() == [
        "checkpoint", "drafts", "prompts", "in", "flight", "failed", "tokens/s", "TTFT", "TPOT", "accepted",
    ]  # fmt: skip
    assert lines[7].split("  ")[0] == "w4a16 (imported)" and lines[7].split()[2:] == [
        "5", "random", "1024/512", "1", "-", "125.7", "215", "ms", "-", "2.40",
    ]  # fmt: skip
    assert "w4a16 against fp8 (5, random 1024/512, 1 in flight): 1.33 times the tokens/s" in lines
    assert "w4a16 against fp8 (5, random 1024/512, 32 in flight): 0.90 times the tokens/s" in lines
    assert not any("against" in line and ("(off" in line or "(?" in line) for line in lines), "unlike rows have no ratio"
    assert RunRecord.load(Path("runs/glm-5.2/run.json")).model == "glm-5.2"
    code, out, _ = run("speed", "glm-5.2", "--import", PUBLISHED, "--json")
    assert code == 0 and SpeedRecord.model_validate_json(out) == SpeedRecord.load(Path("runs/glm-5.2/speed.json"))
    assert len(json.loads(out)["rows"]) == 21, "the same rows, not twice"


TABLE = """
tables:
  - every_row: {source: a page, hardware: 8xH200, speculation: 0, prompts: chat, concurrency: 8}
    rows:
      - {checkpoint: fp8, parallelism: {tensor: 8}, output_tokens_s: 400}
      - {checkpoint: fp8, parallelism: {tensor: 4, data: 2}, output_tokens_s: 500}
      - {checkpoint: w4a16, parallelism: {tensor: 8}, output_tokens_s: 600}
      - {checkpoint: w4a16, parallelism: {tensor: 8}, concurrency: 1, output_tokens_s: 90, settings: {backend: marlin}}
      - {checkpoint: w4a16, parallelism: {tensor: 8}, concurrency: 1, output_tokens_s: 70, settings: {backend: machete}}
"""


def test_rows_of_equal_names_show_in_what_they_differ(run: Run) -> None:
    Path("mine.yaml").write_text(TABLE)
    code, out, _ = run("speed", "glm-5.2", "--import", "mine.yaml")
    columns = ("checkpoint", "parallelism", "settings", "drafts", "prompts", "in flight", "failed", "tokens/s")
    heads, *lines = out.splitlines()
    assert code == 0 and [part.strip() for part in heads.split("  ") if part][:8] == list(columns)
    cells = [[part.strip() for part in line.split("  ") if part.strip()] for line in lines[:5]]
    assert [(row[0], row[1], row[2], row[5], row[7]) for row in cells] == [
        ("fp8 (imported)", "tensor 8", "not stated", "8", "400.0"),
        ("fp8 (imported)", "data 2, tensor 4", "not stated", "8", "500.0"),
        ("w4a16 (imported)", "tensor 8", "backend marlin", "1", "90.0"),
        ("w4a16 (imported)", "tensor 8", "backend machete", "1", "70.0"),
        ("w4a16 (imported)", "tensor 8", "not stated", "8", "600.0"),
    ]
    assert lines[5:] == ["w4a16 against fp8 (off, chat, 8 in flight, tensor 8): 1.50 times the tokens/s"]


def test_rows_that_differ_in_their_source_alone_show_it(run: Run) -> None:
    row = "{checkpoint: fp8, hardware: 8xH200, speculation: 0, prompts: chat, concurrency: 8, output_tokens_s: 400}"
    Path("first.yaml").write_text(f"tables: [{{rows: [{row}]}}]\n")
    Path("second.yaml").write_text(f"tables: [{{rows: [{row.replace('400', '410')}]}}]\n")
    run("speed", "glm-5.2", "--import", "first.yaml")
    _, out, _ = run("speed", "glm-5.2", "--import", "second.yaml")
    lines = [[part.strip() for part in line.split("  ") if part.strip()] for line in out.splitlines()]
    assert lines[0][:2] == ["checkpoint", "source"]
    assert [(row[1], row[6]) for row in lines[1:3]] == [("first.yaml", "400.0"), ("second.yaml", "410.0")]


def test_a_file_of_vllm(run: Run) -> None:
    run_dir = make_run(Path("runs"))
    assert one_error(run("speed", "tiny-glm", "--import", BENCH)) == (
        "vllm-bench-c4.json: does not state the hardware; say --hardware 8xH200"
    )
    words = ("--hardware", "a CPU", "--label", "bf16", "--prompt-kind", "chat")
    assert one_error(run("speed", run_dir, "--import", BENCH, *words, "--speculation", "off")) == (
        "vllm-bench-c4.json: says that it drafted 1 token a step, and --speculation says off; leave the option out"
    )
    assert run("speed", run_dir, "--import", BENCH, *words)[0] == 0
    (row,) = SpeedRecord.load(run_dir / "speed.json").rows
    assert (row.checkpoint, row.hardware, row.prompts, row.speculation) == ("bf16", "a CPU", "chat", 1)


def test_names_of_a_file_are_mapped_by_the_user_only(run: Run) -> None:
    """The published `nvfp4` is the run's `nvfp4a16` if --label says so, and the row says what it was called."""
    run_dir = make_run(Path("runs"))
    code, _, err = run("speed", run_dir, "--import", PUBLISHED)
    notes = [line for line in err.splitlines() if line.startswith("note: ")]
    known = "(bf16, fp8, nvfp4a16, w4a16)"
    assert code == 0 and notes == [
        f"note: no checkpoint of the run is called {name} {known}: its rows have no verdict; if it is one of them, say --label "
        f"{name}=LABEL"
        for name in ("nvfp4", "awq-int4")
    ]
    (run_dir / "speed.json").unlink()
    code, _, err = run("speed", run_dir, "--import", PUBLISHED, "--label", "nvfp4=nvfp4a16,awq-int4=awq")
    assert code == 0 and [line.split()[8] for line in err.splitlines() if line.startswith("note: ")] == ["awq"]
    rows = SpeedRecord.load(run_dir / "speed.json").rows
    mapped = [row for row in rows if row.checkpoint == "nvfp4a16"]
    assert len(mapped) == 6 and not [row for row in rows if row.checkpoint == "nvfp4"]
    assert {row.assumptions[-1] for row in mapped} == {"the file calls this checkpoint nvfp4"}
    assert not [row for row in rows if row.checkpoint == "fp8" and any("calls" in one for one in row.assumptions)]


WRONG_LABELS = {
    "nvfp5=nvfp4a16": "--label nvfp5=...: did you mean nvfp4? published.yaml has w4a16, nvfp4, fp8, awq-int4",
    "nvfp4=": "--label nvfp4=: a name or a label is empty; write nvfp4=nvfp4a16",
    "nvfp4=a,b": "--label: takes one label, or NAME=LABEL for each name that the file uses, with commas between them",
    "nvfp4=a,nvfp4=b": "--label: takes one label, or NAME=LABEL for each name that the file uses, with commas between them",
    "nvfp4=fp8": "--label: nvfp4 and fp8 of published.yaml would both be fp8; give each its own",
    "nvfp4=../x": None,
}
"""None: refused by what follows; the words are another's."""


@pytest.mark.parametrize("label", WRONG_LABELS)
def test_wrong_labels_are_one_line(run: Run, label: str) -> None:
    said = one_error(run("speed", "glm-5.2", "--import", PUBLISHED, "--label", label))
    assert WRONG_LABELS[label] in (None, said) and not Path("runs/glm-5.2/speed.json").exists()


REFUSED: dict[str, tuple[tuple[object, ...], str]] = {
    "concurrency": (("--concurrency", "1,0"), "--concurrency 0: takes whole numbers from 1 to 4,096, with commas between them"),
    "speculation": (
        ("--speculation", "on"), "--speculation on: takes `off` or whole numbers from 1 to 4,096, with commas between them",
    ),
    "form": (("--as", "csv"), "--as csv: it takes one of: vllm-bench, inferencex, guidellm, table"),
    "label": (("--label", "a"), "--label is not used without --import; leave it out"),
    "requests": (("--import", PUBLISHED, "--requests", "3"), "--requests is not used with --import; leave it out"),
    "no file": (("--import", "none.json"), "none.json: cannot be read: No such file or directory"),
    "two": (
        ("--import", BENCH, "--hardware", "a", "--speculation", "off,1"),
        "--speculation: with --import it is one number, of all rows of the file, or `off`",
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSED)
def test_what_is_refused(run: Run, what: str) -> None:
    words, why = REFUSED[what]
    make_run(Path("runs"))
    assert one_error(run("speed", "tiny-glm", *words)) == why


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What would be measured: (labels, schemes, ladder) of each call. The record has a row and what `left_out` says."""
    calls: list[Any] = []

    def run(self: Any) -> SpeedRecord:
        calls.append(([one.label for one in self.subjects], [one.scheme for one in self.subjects], self.ladder))
        row = SpeedRow(
            checkpoint="bf16", origin="measured", source="vllm bench serve 0.32.0", hardware="a CPU", num_gpus=0, speculation=0,
            prompts="chat", concurrency=1, repeats=tuple(SpeedRepeat(output_tokens_s=rate) for rate in (10.0, 11.0, 12.0)),
        )  # fmt: skip
        record = SpeedRecord(rows=(row,), not_measured=(NotMeasured(checkpoint="fp8", reason="emulated: as profile says"),))
        if self.ladder.repeats == 7:
            failed = NotMeasured(checkpoint="bf16", speculation=1, concurrency=4, prompts="chat", reason="its server died")
            record = record.model_copy(update={"not_measured": (failed,)})
        record.save(self.run_dir / "speed.json")
        return record

    monkeypatch.setattr(measure.LadderRun, "run", run)
    monkeypatch.setattr("assay_evaluate.run.identity.checkpoint_sha256", lambda folder, hash_file: "0" * 64)
    return calls


def test_what_would_be_measured(run: Run, measured: list[Any]) -> None:
    run_dir = make_run(Path("runs"))
    code, out, err = run("speed", "tiny-glm", "--concurrency", "8,1", "--speculation", "off,2", "--objective", "ttft<2s")
    assert code == 0, err
    (labels, schemes, ladder), *_ = measured
    assert (labels, schemes) == (["fp8", "bf16", "nvfp4a16", "w4a16"], ["fp8", "bf16", "nvfp4a16", "w4a16"])
    assert (ladder.concurrency, ladder.speculation, ladder.repeats) == ((1, 8), (0, 2), 3)
    assert (ladder.prompts, ladder.output_tokens, ladder.objective) == (("chat",), 64, {"ttft_s": 2.0})
    assert out.splitlines()[1].split("  ")[0] == "bf16" and "11.0 [9.5, 12.6]" in out
    assert out.splitlines()[-1] == "not measured: fp8: emulated: as profile says"
    assert err.splitlines()[-1] == f"record: {run_dir / 'speed.json'}"
    assert run("speed", "tiny-glm", "--checkpoints", "bf16,w4a16")[0] == 0
    assert measured[-1][0] == ["bf16", "w4a16"] and measured[-1][2].speculation == (0, 1), "drafts of the model's recipe"
    code, out, _ = run("speed", "tiny-glm", "--repeats", "7")
    assert code == 1 and out.splitlines()[-1] == "not measured: bf16 (1 drafted, chat, 4 in flight): its server died"
    assert one_error(run("speed", "tiny-glm", "--checkpoints", "w4a61")) == (
        f"--checkpoints w4a61: did you mean w4a16? {run_dir} has fp8, bf16, nvfp4a16, w4a16; name one of them, or make it "
        "first with `assay quantize`"
    )
    assert one_error(run("speed", "tiny-glm", "--prompts", "poems")) == "--prompts poems: there are chat, long"
    assert one_error(run("speed", "tiny-glm", "--concurrency", "64")) == (
        "--concurrency 64: profile cpu-emulated serves at most 32 at once (max-num-seqs); others would wait in its queue; ask "
        "for less, or raise it there"
    )


def test_a_phase_of_a_run(run: Run, measured: list[Any], capsys: pytest.CaptureFixture[str]) -> None:
    """`assay run --speed`: the default ladder of the run that was judged, printed beside the progress."""
    run_dir = make_run(Path("runs"))
    measurements = [Measurement.load(path) for path in sorted((run_dir / "measurements").glob("*.json"))]
    lines: list[str] = []
    record, reference = measure_judged(
        run_dir, measurements, resolve_target("tiny-glm"), load_recipe(ProfileRecipe, "cpu-emulated"), lines.append
    )
    print_speed(record, reference, console)
    out = capsys.readouterr()
    assert record == SpeedRecord.load(run_dir / "speed.json") and measured[0][2].speculation == (0, 1)
    assert out.out == "" and "11.0 [9.5, 12.6]" in out.err
    assert "--speed" in run("run", "--help")[1]


def test_a_whole_run_with_speed(run: Run, measured: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """`assay run --speed`: the recipe's ladder is measured, and the report that is left has its speeds. No server starts."""
    run_dir = make_run(Path("runs"))
    measurements = [Measurement.load(path) for path in sorted((run_dir / "measurements").glob("*.json"))]
    gates = GateReport.load(run_dir / "gates.json")

    def judged(*_: object, **__: object) -> Judged:
        write_report(run_dir)
        return Judged(run_dir, measurements, gates)

    recipe = yaml.safe_load((ROOT / "recipes" / "models" / "tiny-glm.yaml").read_text())
    recipe["source"]["path"] = str(ROOT / recipe["source"]["path"])
    Path("tiny-glm.yaml").write_text(
        yaml.safe_dump(recipe | {"speed": {"concurrency": [4, 1], "speculation": [0], "repeats": 5}})
    )
    monkeypatch.setattr("assay_pipeline.running.quantize_in_run", lambda *_, **__: [])
    monkeypatch.setattr("assay_pipeline.running.evaluate", judged)
    monkeypatch.setattr("assay_pipeline.running.of_target", lambda *_, **__: None)
    code, _, err = run("run", "tiny-glm.yaml", "--speed", "--no-preflight", "--suite", "quick")
    assert code in (0, 1), err
    ((_, _, ladder),) = measured
    assert (ladder.concurrency, ladder.speculation, ladder.repeats) == ((1, 4), (0,), 5)
    assert "bf16 is fastest at 1 stream (11.0 tokens/s)" in (run_dir / "report" / "index.html").read_text()


def test_a_checkpoint_without_a_run(run: Run, measured: list[Any]) -> None:
    shutil.copytree(ROOT / "examples" / "tiny_glm" / "checkpoint", "mine")
    assert one_error(run("speed", "mine", "--checkpoints", "w4a16")) == (
        "--checkpoints w4a16: runs/mine has bf16; name one of them, or make it first with `assay quantize`"
    )
    assert one_error(run("speed", "mine", "--prompts", "poems")) == "--prompts poems: there are chat, long"
    assert not Path("runs").exists(), "what cannot be measured leaves no run"
    assert run("speed", "mine")[0] == 0
    assert measured[0][0] == ["bf16"] and Path("runs/mine/speed.json").is_file()
