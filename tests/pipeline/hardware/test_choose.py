"""`assay choose`: the published table alone, a run with verdicts and rows, predictions; wrong input is one line."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from command_errors import one_error
from command_line import Run
from synthetic_run import make_run
from tiny_checkpoints import make_tiny_glm4_moe

from assay.records.choice.record import Choice
from assay.records.measurement import Measurement
from assay.records.speed import NotMeasured, SpeedRecord, SpeedRepeat, SpeedRow

PUBLISHED = Path(__file__).resolve().parents[3] / "examples" / "glm-5.2-speed" / "published.yaml"


@pytest.fixture
def table(run: Run) -> str:
    """The published table, in the working directory."""
    return str(shutil.copy(PUBLISHED, "published.yaml"))


def ladder(checkpoint: str, speeds: dict[int, tuple[float, ...]], *, emulated: bool = False) -> list[SpeedRow]:
    return [
        SpeedRow(
            checkpoint=checkpoint, origin="measured", source="assay speed", hardware="a CPU", num_gpus=0, speculation=0,
            prompts="chat", concurrency=at, emulated=emulated,
            repeats=tuple(SpeedRepeat(output_tokens_s=one) for one in values),
        )
        for at, values in speeds.items()
    ]  # fmt: skip


@pytest.fixture
def with_speeds(run: Run) -> Path:
    """The synthetic run: fp8 is the reference; bf16 measured natively, w4a16 emulated, nvfp4a16 not at all."""
    folder = make_run(Path("runs"))
    rows = [
        *ladder("fp8", {1: (20.0, 20.2, 20.1), 4: (50.0, 50.5, 50.2)}),
        *ladder("bf16", {1: (18.0, 18.1, 18.2), 4: (60.0, 60.5, 60.2)}),
        *ladder("w4a16", {1: (99.0,), 4: (99.0,)}, emulated=True),
    ]
    left = NotMeasured(checkpoint="nvfp4a16", reason="no native kernel for nvfp4a16 here")
    SpeedRecord(rows=tuple(rows), not_measured=(left,)).save(folder / "speed.json")
    return folder


def test_speeds_of_other_bytes_are_not_chosen_by(run: Run, with_speeds: Path) -> None:
    """speed.json of another run, or from before bf16 was made again: its rows would make bf16 the choice at 4 streams."""
    path = with_speeds / "speed.json"
    record = SpeedRecord.load(path)
    fp8 = Measurement.load(with_speeds / "measurements" / "fp8.json").checkpoint_sha256
    hashes = {"fp8": fp8, "bf16": "0" * 64}
    rows = [row.model_copy(update={"checkpoint_sha256": hashes.get(row.checkpoint)}) for row in record.rows]
    record.model_copy(update={"rows": tuple(rows)}).save(path)
    code, out, _ = run("choose", with_speeds)
    assert code == 0 and out.splitlines()[0] == "fp8 from 1 to 4 streams"
    why = "measured of other bytes than the run's checkpoint has now; `assay speed` measures these"
    assert f"bf16 at 1, 4: missing: {why}" in out
    assert Choice.load(with_speeds / "choice.json").checkpoint_sha256 == {"fp8": fp8}
    copy = shutil.copy(path, "of-another-run.json")
    path.unlink()
    assert run("choose", with_speeds, "--speed", copy)[1] == out, "given as a file it is no different"


def test_wide_noise_is_written_in_digits(run: Run, with_speeds: Path) -> None:
    SpeedRecord(rows=tuple(ladder("fp8", {8: (700.0, 900.0, 800.0)})), not_measured=()).save(with_speeds / "speed.json")
    _, out, _ = run("choose", with_speeds)
    assert "795.8 ± 138" in out and "e+" not in out


REMOVED: dict[str, tuple[int, str]] = {
    "speed.json": (2, "error: no speeds to choose by: there are no rows; measure with `assay speed`"),
    "gates.json": (2, "error: runs/tiny-glm: nothing was judged yet; run `assay gate runs/tiny-glm` first"),
    **{
        f"measurements/{label}.json": (
            2, f"error: runs/tiny-glm: its verdicts are about {label} as well, whose measurement is gone; run `assay gate "
            "runs/tiny-glm` again, or say --quality assumed",
        )
        for label in ("bf16", "fp8", "fp8-repeat", "nvfp4a16", "w4a16")
    },
}  # fmt: skip
"""Record -> how `assay choose` ends without it, and its only or first line."""


def test_every_record_of_a_run_is_taken_away_once(run: Run, with_speeds: Path) -> None:
    """Verdicts and speeds are what a choice rests on; without any other record it is the same."""
    whole = run("choose", with_speeds)
    assert whole[0] == 0
    (with_speeds / "choice.json").unlink()
    records = {path.relative_to(with_speeds).as_posix() for path in with_speeds.rglob("*.json")}
    assert records - REMOVED.keys() == {"gates.registered.json"} | {
        f"{label}/{name}" for label in ("fp8", "w4a16", "nvfp4a16")
        for name in ("plan.json", "verify.json", "checkpoint/assay_manifest.json")
    }  # fmt: skip
    for record in sorted(records):
        path, kept = with_speeds / record, (with_speeds / record).read_bytes()
        path.unlink()
        if record in REMOVED:
            code, out, err = run("choose", with_speeds)
            assert (code, out, err.splitlines()[-1][: len(REMOVED[record][1])]) == (REMOVED[record][0], "", REMOVED[record][1])
            assert not (with_speeds / "choice.json").exists()
        else:
            assert run("choose", with_speeds) == whole, record
            (with_speeds / "choice.json").unlink()
        path.write_bytes(kept)


def test_the_published_table_alone(run: Run, table: str) -> None:
    code, out, err = run("choose", "--speed", table, "--quality", "assumed", "--model", "glm-5.2", "--price", "3.5")
    assert (code, err) == (0, "")
    assert out.splitlines() == [
        "quality was not measured (--quality assumed): w4a16 with MTP up to about 15 streams (2 to 28), then nvfp4 with MTP; "
        "at 1 and 8 streams nvfp4 with MTP may be as fast as w4a16 with MTP; at 32 streams fp8 with MTP may be as fast as "
        "nvfp4 with MTP",
        "8xH200; prompts random 1024/512; vllm 0.23.0; imported speeds",
        "streams  choice          tokens/s  expected          per user  TTFT      TPOT       $ per M tokens  next best",
        "1        w4a16 with MTP  125.7     123 (113 to 134)  125.7     215.0 ms  7.6 ms *   61.88           "
        "nvfp4 with MTP: 116.3 (the choice +8.1 %, best in 78 % of draws, one run each)",
        "8        w4a16 with MTP  495.7     484 (442 to 530)  62.0      319.0 ms  15.5 ms *  15.69           "
        "nvfp4 with MTP: 455.5 (the choice +8.8 %, best in 80 % of draws, one run each)",
        "32       nvfp4 with MTP  925.2     907 (838 to 978)  28.9      403.0 ms  33.9 ms *  8.41            "
        "fp8 with MTP: 921.4 (the choice +0.4 %, best in 47 % of draws, one run each)",
        "flip: w4a16 with MTP to nvfp4 with MTP at about 14.6 streams, between speeds at 8 and 32 (95 % of draws: 2.3 to 28.0; "
        "68 % of draws have it)",
        "one for all: nvfp4 with MTP, at most 40.2 tokens/s (8.1 %) less than the best, 1.38 $ per M tokens dearer, "
        "at 8 streams",
        "noise: no setup was measured in two starts of its server: that starts differ by 3 % is assumed, and repeats by 2 %",
        "imported: 9 of 12 cells",
        "awq-int4 at 1, 8, 32: missing: only rows that may not be compared with the others",
        "no ratio of w4a16 (132 tokens/s, drafting not stated) to awq-int4 (78, nothing drafted) and nvfp4 (74, nothing "
        "drafted) at 1 stream: a ratio would be of drafting and checkpoint together",
        "set aside: 6 rows of awq-int4, nvfp4: under other conditions (prompts not stated, engine not stated)",
        "set aside: 6 rows of fp8, w4a16: nobody states whether they drafted",
        "* from tokens/s, the length of replies and TTFT",
    ]


def test_floors_stand_beside_the_published_rows(run: Run, table: str) -> None:
    """Shares of the roofline as `roofline/rows.py` quotes them; nothing is flagged."""
    code, out, _ = run("choose", "--speed", table, "--quality", "assumed", "--model", "glm-5.2", "--json")
    found = Choice.model_validate_json(out)
    shares = [one.roofline_share for one in found.cells if one.roofline_share is not None]
    assert code == 0 and len(shares) == 9 and 0.1 < min(shares) < max(shares) < 0.4
    assert [one.flag for one in found.cells] == [None] * 12


def test_an_objective_that_is_missed(run: Run, table: str) -> None:
    words = ("--slo", "ttft<2s tpot<25ms", "--concurrency", "32", "--hardware", "8xh200")
    code, out, _ = run("choose", "--speed", table, "--quality", "assumed", *words)
    assert code == 1
    assert out.splitlines()[3:5] == [
        "32       none",
        "none at 32: none meets the objective; nvfp4 with MTP, the fastest, misses it: TPOT 33.9 ms",
    ]
    assert out.splitlines()[0] == (
        "quality was not measured (--quality assumed): nothing can be recommended: none meets the objective; nvfp4 with MTP, "
        "the fastest, misses it: TPOT 33.9 ms"
    )


def test_concurrency_given_twice_is_both(run: Run, table: str) -> None:
    """As with every option that takes several values; it was the last one alone."""
    words = ("--speed", table, "--quality", "assumed", "--json")
    once = run("choose", *words, "--concurrency", "1,32")
    twice = run("choose", *words, "--concurrency", "32,1", "--concurrency", "1")
    assert once[0] == 0 and Choice.model_validate_json(once[1]).concurrency == (1, 32) and twice[1] == once[1]


def test_one_for_all_that_misses_the_objective_is_not_called_the_best(run: Run) -> None:
    """`a` is the faster one everywhere, and misses at 32 streams what `b` meets there; `b` misses it at 1."""
    every = "{hardware: 1xH100, num_gpus: 1, engine: vllm 0.32.0, prompts: chat, speculation: 0, source: notes}"
    rows = [("a", 1, 100, 0.1), ("a", 32, 1000, 5.0), ("b", 1, 90, 3.0), ("b", 32, 800, 0.1)]
    lines = "".join(
        f"      - {{checkpoint: {name}, concurrency: {at}, output_tokens_s: {speed}, ttft_s: {ttft}}}\n"
        for name, at, speed, ttft in rows
    )
    Path("table.yaml").write_text(f"tables:\n  - every_row: {every}\n    rows:\n{lines}")
    code, out, _ = run("choose", "--speed", "table.yaml", "--quality", "assumed", "--slo", "ttft<2s")
    (line,) = [line for line in out.splitlines() if line.startswith("one for all")]
    assert (code, line) == (0, "one for all: a, nowhere slower than the choice; misses the objective at 32")


def test_a_run_joins_speed_and_verdicts(run: Run, with_speeds: Path) -> None:
    """Emulated and unmeasured checkpoints are missing with the reason; the record is in the run."""
    code, out, err = run("choose", "tiny-glm", "--hardware", "cpu", "--price", "1")
    found = Choice.load(with_speeds / "choice.json")
    assert code == 0 and err.splitlines() == ["record: runs/tiny-glm/choice.json"]
    assert out.splitlines()[0] == found.recommendation
    assert [one.setup for one in found.picks] == ["fp8", "bf16"]
    assert found.recommendation.startswith("fp8 up to about 2")
    missing = {(one.setup, one.why) for one in found.cells if one.state == "missing"}
    assert missing == {
        ("w4a16", "emulated here, which says nothing about speed"), ("nvfp4a16", "no native kernel for nvfp4a16 here"),
    }  # fmt: skip
    assert found.cells[0].usd_per_million_tokens == pytest.approx(1 / (3.6e-3 * 20.1), rel=1e-4)
    code, out, err = run("choose", "tiny-glm", "--json")
    assert (code, Choice.model_validate_json(out).picks) == (0, found.picks)


def test_speeds_on_other_hardware_are_not_left_out_in_silence(run: Run, with_speeds: Path, table: str) -> None:
    """What was measured here goes before what was imported, which is of other machines."""
    code, out, err = run("choose", "tiny-glm", "--speed", table)
    assert (code, out.splitlines()[1].split(";")[0]) == (0, "a CPU")
    assert "note: speeds on 8xH200 are left out; --hardware chooses by them" in err.splitlines()
    assert "left out" not in run("choose", "tiny-glm", "--speed", table, "--hardware", "cpu")[2]


def test_hardware_without_speeds_is_predicted(run: Run, with_speeds: Path) -> None:
    """Plans and the roofline of a profile; the first words say so."""
    folder = make_tiny_glm4_moe(Path("source"))
    for precision in ("fp8", "nvfp4a16", "w4a16"):
        (with_speeds / precision / "plan.json").write_text(run("plan", folder, "-p", precision, "--json")[1])
    code, out, _ = run("choose", "tiny-glm", "--hardware", "8xh200", "--concurrency", "1,8", "--json")
    found = Choice.model_validate_json(out)
    assert (code, found.origin, found.hardware) == (0, "predicted", "8xH200")
    assert found.recommendation.startswith("predicted, not measured: ")
    assert all(one.source == "assay roofline" for one in found.cells if one.state == "predicted")


TABLE = ("--speed", "published.yaml", "--quality", "assumed")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), "say RUN, whose speeds and verdicts are joined; or --speed FILE --quality assumed, where speeds are known alone"),
        (("--speed", "published.yaml"), "say RUN, whose speeds and verdicts are joined; or --speed FILE --quality assumed"),
        (("--speed", "none.yaml", "--quality", "assumed"), "--speed none.yaml: no such file; give a speed record, a table"),
        (("nowhere",), "nowhere: no run of that name"),
        (("--speed", "published.yaml", "--quality", "good"), "--quality good: it takes one of: gates, assumed"),
        ((*TABLE, "--slo", "fast"), "--slo 'fast': 'fast' is no limit; write `ttft<2s"),
        ((*TABLE, "--concurrency", "1,x"), "--concurrency 1,x: is no list of numbers of streams; write 1,8,32"),
        ((*TABLE, "--hardware", "8xh20"), "--hardware 8xh20: did you mean 8xH200? there are speeds on 8xH200"),
        ((*TABLE, "--prompts", "chat"), "--prompts chat: there are speeds for not stated, random 1024/512"),
        ((*TABLE, "--price", "-1"), "assay choose: invalid value for '--price'"),
        ((*TABLE, "--price", "inf"), "assay choose: invalid value for '--price'"),
        ((*TABLE, "--price", "1e308"), "assay choose: invalid value for '--price'"),
        ((*TABLE, "--slo", f"ttft<{'9' * 400}s"), "--slo 'ttft<9999"),
        ((*TABLE, "--slo", f"tpot<0.{'0' * 400}1ms"), "--slo 'tpot<0.000"),
        ((*TABLE, "--concurrency", "\N{ARABIC-INDIC DIGIT THREE}"), "--concurrency \N{ARABIC-INDIC DIGIT THREE}: is no list"),
        (("x" * 10_000,), "xxxxxxxxxx"),
        ((*TABLE, "--model", "x" * 10_000), "xxxxxxxxxx"),
        ((*TABLE, "--model", "glm-5.9"), "glm-5.9: no such folder, and no model recipe of that name"),
    ],
)
def test_wrong_input_is_one_line(run: Run, table: str, words: tuple[str, ...], said: str) -> None:
    line = one_error(run("choose", *words))
    assert line.startswith(said) and len(line) < 700, "a name of 10,000 letters is not repeated"


@pytest.mark.parametrize(
    ("name", "text", "what"),
    [
        ("v.json", '{"max_concurrency": 8, "completed": 9, "output_throughput": 9.0, "mean_ttft_ms": 9, "model_id": "m"}',
         "does not state the hardware"),
        ("f.json", '{"a": 1}', "is of none of the formats vllm-bench, inferencex, guidellm, table, as far as can be seen"),
    ],
)  # fmt: skip
def test_what_a_file_of_speeds_lacks_is_asked_for_where_it_can_be_said(run: Run, name: str, text: str, what: str) -> None:
    """`assay choose` has no --as and no --label, and its --hardware is no statement about a file."""
    Path(name).write_text(text)
    line = one_error(run("choose", "--speed", name, "--quality", "assumed", "--hardware", "8xH200"))
    assert line == (
        f"{name}: {what}; write a table (docs/speed.md, `A table`), or say it to `assay speed RUN --import {name}` with --as, "
        "--label and --hardware"
    )


def test_a_run_without_verdicts_or_speeds(run: Run) -> None:
    folder = make_run(Path("runs"))
    code, out, err = run("choose", "tiny-glm")
    assert (code, out) == (2, "")
    assert err.splitlines()[-1].startswith("error: no speeds to choose by: there are no rows; measure with `assay speed`")
    (folder / "gates.json").unlink()
    said = "runs/tiny-glm: nothing was judged yet; run `assay gate runs/tiny-glm` first"
    assert one_error(run("choose", "tiny-glm")).startswith(said)
