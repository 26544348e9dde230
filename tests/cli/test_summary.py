"""The table at the end of `run`, `evaluate` and `gate`."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from command_line import Run
from rich.console import Console
from synthetic_run import make_run

from assay import quantities
from assay.records.base import Interval
from assay.records.measurement import Measurement
from assay.records.verdict import GateReport
from assay_cli.shown.verdicts import print_summary


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("run"))


def test_a_line_for_each_checkpoint(run: Run, run_dir: Path) -> None:
    code, out, _ = run("gate", run_dir)
    assert code == 1
    gates = GateReport.load(run_dir / "gates.json")
    assert out.splitlines() == [
        "tiny-glm: reference fp8, 9.1 MB; suite quick",
        "verdict       checkpoint  size             why",
        f"PASS          fp8-repeat  9.1 MB (100 %)   {gates.reasons['fp8-repeat']}",
        f"PASS          bf16        14.6 MB (160 %)  {gates.reasons['bf16']}",
        f"UNDERPOWERED  nvfp4a16    6.7 MB (74 %)    {gates.reasons['nvfp4a16']}",
        f"PASS          w4a16       6.3 MB (69 %)    {gates.reasons['w4a16']}",
    ]
    assert gates.reasons["nvfp4a16"] == (
        "loses 5.0 points on needle; 5 allowed: there is a real loss, but the data cannot tell whether it exceeds 5 points; 7 "
        "gates passed, 1 underpowered, 5 not measured: codes-en, codes-zh, ruler, needle-grid, tools"
    )


def test_a_source_that_is_better_than_the_reference_is_named(run_dir: Path) -> None:
    """The reference is quantized too; where its source scores significantly higher, every verdict is about what was left."""
    gates = GateReport.load(run_dir / "gates.json")
    measurements = [Measurement.load(path) for path in (run_dir / "measurements").glob("*.json")]

    def printed(**drops: Interval) -> list[str]:
        verdicts = tuple(
            verdict.model_copy(update={"observed": drops.get(verdict.candidate), "title": "code lookup"})
            if verdict.gate == "score needle" else verdict.model_copy(update={"observed": None})
            for verdict in gates.verdicts
        )  # fmt: skip
        file = io.StringIO()
        print_summary(gates.model_copy(update={"verdicts": verdicts}), measurements, Console(file=file, width=200))
        return file.getvalue().splitlines()

    better = Interval(value=-0.167, low=-0.315, high=-0.07, n=60)
    said = "Compared with bf16, fp8 itself has lost: bf16 scores higher on code lookup (+16.7 points)."
    assert printed(bf16=better)[-1] == said
    assert said not in printed(w4a16=better) + printed(bf16=better.model_copy(update={"high": 0.01}))


def test_a_table_on_a_terminal(run_dir: Path) -> None:
    file = io.StringIO()
    gates = GateReport.load(run_dir / "gates.json")
    measurements = [Measurement.load(path) for path in (run_dir / "measurements").glob("*.json")]
    print_summary(gates, measurements, Console(file=file, force_terminal=True, width=200, color_system=None))
    lines = file.getvalue().splitlines()
    assert [cell.strip() for cell in lines[2].split("┃")] == ["", "verdict", "checkpoint", "size", "why", ""]
    assert [cell.strip() for cell in lines[4].split("│")][1:4] == ["PASS", "fp8-repeat", "9.1 MB (100 %)"]


def test_a_narrow_terminal_hides_no_letter(run_dir: Path) -> None:
    file = io.StringIO()
    gates = GateReport.load(run_dir / "gates.json")
    measurements = [Measurement.load(path) for path in (run_dir / "measurements").glob("*.json")]
    print_summary(gates, measurements, Console(file=file, force_terminal=True, width=40, color_system=None))
    cells = [[cell.strip() for cell in line.split("│")] for line in file.getvalue().splitlines() if "│" in line]
    assert "".join(cell[2] for cell in cells) == "".join(gates.overall)
    assert "…" not in file.getvalue()


def test_limits_that_were_changed_are_named(run: Run, run_dir: Path) -> None:
    gates = GateReport.load(run_dir / "gates.json").model_copy(update={"registered_sha256": "0" * 64})
    file = io.StringIO()
    measurements = [Measurement.load(path) for path in (run_dir / "measurements").glob("*.json")]
    print_summary(gates, measurements, Console(file=file, width=200))
    assert "gates quick were changed after the run; others of that name were registered before it" in file.getvalue()


@pytest.mark.parametrize(
    ("num_bytes", "written"),
    [(0, "0 B"), (999, "999 B"), (1000, "1 kB"), (6_310_000, "6.31 MB"), (372e9, "372 GB"), (1.49e12, "1.49 TB")],
)
def test_sizes_are_decimal(num_bytes: float, written: str) -> None:
    assert quantities.size(num_bytes) == written
