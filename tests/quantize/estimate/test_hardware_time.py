"""`assay plan --hardware`: what follows from given rates is exact, and it is said to be extrapolated."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hollow import hollow_model
from rich.console import Console
from tiny_checkpoints import make_tiny_glm4_moe, store_as_fp8

import assay_cli as cli
from assay.errors import PlanError
from assay.recipes.load import load_recipe
from assay.recipes.precision import PrecisionRecipe
from assay.records.plan import Plan
from assay_quantize.checkpoint.checkpoint import open_checkpoint
from assay_quantize.estimate.hardware_time import MACHINES, MEASURED, CoreRates, Machine, estimate, parse_hardware, work_of
from assay_quantize.estimate.measure_machine import measured_machine
from assay_quantize.estimate.show import duration, print_estimate
from assay_quantize.formats.schemes import SCHEMES
from assay_quantize.plan.planner import make_plan

RATES = CoreRates(quantize=2.0, amax=40.0, dequantize=4.0, copy_in=10.0, copy_out=5.0, sha256=1.0, source="made up")
MACHINE = Machine("test", 4, read=2.0, write=0.5, network=0.1, source="made up")


def plan_of(source: Path, precision: str) -> Plan:
    return make_plan(open_checkpoint(source), load_recipe(PrecisionRecipe, precision), model="tiny", family=None)


@pytest.fixture(scope="module")
def hollow(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return hollow_model(tmp_path_factory.mktemp("hardware") / "glm-5", "glm-5")


def test_work_of_bf16_is_every_byte_once(hollow: Path) -> None:
    plan = plan_of(hollow, "w4a16")
    quantized = sum(tensor.num_bytes for tensor in plan.tensors if tensor.action == "quantize")
    work = work_of(plan)
    assert (work.read, work.written, work.quantized) == (plan.bytes_in, plan.bytes_out, quantized)
    assert (work.read_twice, work.amax, work.dequantized) == (0, 0, 0)
    shared = work_of(plan_of(hollow, "nvfp4a16"))
    assert (shared.read_twice, shared.amax) == (quantized, quantized)


def test_work_of_fp8_counts_what_is_stored_and_what_it_stands_for(tmp_path: Path) -> None:
    source = store_as_fp8(make_tiny_glm4_moe(tmp_path / "bf16"), tmp_path / "fp8")
    plan = plan_of(source, "w4a16")
    work = work_of(plan)
    stored = {t.name: t.num_bytes for t in plan.tensors if t.action in ("quantize", "dequantize") and t.scale is not None}
    assert work.read == plan.bytes_in
    assert work.dequantized == 2 * sum(stored.values())
    assert work.quantized == 2 * sum(t.num_bytes for t in plan.tensors if t.action == "quantize")


def test_seconds_follow_from_rates(hollow: Path) -> None:
    plan = plan_of(hollow, "nvfp4a16")
    work = work_of(plan)
    made = estimate(plan, MACHINE, RATES)
    assert made.workers == 4
    assert made.read_s == pytest.approx(work.read / 2e9)
    assert made.write_s == pytest.approx(work.written / 0.5e9)
    one_core_s = (
        work.quantized / 2e9 + work.amax / 40e9 + (work.read + work.read_twice) / 10e9 + work.written / 5e9 + work.written / 1e9
    )
    assert made.compute_s == pytest.approx(one_core_s / (4 * 0.9))
    assert made.total_s == pytest.approx(made.read_s + made.write_s)
    assert made.bound_by == "write"
    assert made.download_s == pytest.approx(work.read / 0.1e9)
    assert made.streamed_s == made.download_s, "the network is the slowest of all"
    assert made.peak_disk_bytes == plan.bytes_in + plan.bytes_out
    by_shard = [sum(t.num_bytes for t in plan.tensors if t.shard_in == s) for s in {t.shard_in for t in plan.tensors}]
    assert made.streamed_disk_bytes == plan.bytes_out + sum(sorted(by_shard)[-2:])
    assert made.memory_bytes == 2 << 30


def test_what_it_is_bound_by(hollow: Path) -> None:
    plan = plan_of(hollow, "w4a16")
    slow_core = replace(RATES, quantize=0.01)
    assert estimate(plan, MACHINE, slow_core).bound_by == "compute"
    assert estimate(plan, replace(MACHINE, read=0.1, write=9.0), RATES).bound_by == "read"
    single = estimate(plan, replace(MACHINE, cores=1), RATES)
    assert single.compute_s == pytest.approx(estimate(plan, MACHINE, RATES).compute_s * 4 * 0.9), "one core scales by itself"
    fast_network = estimate(plan, replace(MACHINE, network=100.0), RATES)
    staged_s = plan.bytes_in / 0.5e9
    assert fast_network.streamed_s == pytest.approx(fast_network.read_s + fast_network.write_s + staged_s)
    assert estimate(plan, replace(MACHINE, network=None), RATES).streamed_s is None


def test_workers_that_do_not_fit_into_the_memory_are_not_counted(hollow: Path) -> None:
    plan = plan_of(hollow, "w4a16")
    many = estimate(plan, replace(MACHINE, cores=1000), RATES)
    assert 10 < many.workers < 200
    assert estimate(plan, replace(MACHINE, cores=1000, memory_bytes=1 << 40), RATES).workers == 1000


def test_every_scheme_has_a_rate_and_every_machine_a_source() -> None:
    assert set(MEASURED) == set(SCHEMES)
    assert all(0 < search <= plain for plain, search in MEASURED.values())
    assert all(machine.name == name and len(machine.source) > 20 for name, machine in MACHINES.items())


# ------------------------------------------------------------------------------------------------ what is said
def test_hardware_in_words() -> None:
    assert parse_hardware("server") == MACHINES["server"]
    slower = parse_hardware("server, network=0.5,cores=8")
    assert slower == replace(
        MACHINES["server"], network=0.5, cores=8, source=MACHINES["server"].source + "; as said: network 0.5, cores 8"
    )
    machine = parse_hardware("cores=64,read=6.5,write=3")
    assert (machine.cores, machine.read, machine.write, machine.network) == (64, 6.5, 3.0, None)
    assert parse_hardware("this,network=2", MACHINE).network == 2.0


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("laptop", "--hardware laptop: say workstation, server, cloud, 8xh200, 8xb200, 1xh200, this, or cores=64,read=6.5,"
         "write=3,network=1.2 (GB/s)"),
        ("cores=64,read=6", "--hardware cores=64,read=6: write is missing; say cores=64,read=6.5,write=3 (rates in GB per "
         "second)"),
        *((f"server,{setting}", f"--hardware {setting}: say cores, read, write or network = a number above 0 (rates in GB per "
           "second)") for setting in ("gpu=8", "read=0", "read=nan", "read=-1", "read=inf", "read")),
        ("server,cores=0.5", "--hardware server,cores=0.5: cores=0.5; say a whole number of cores"),
    ],
)  # fmt: skip
def test_hardware_that_is_not_understood(text: str, message: str) -> None:
    with pytest.raises(PlanError) as caught:
        parse_hardware(text)
    assert str(caught.value) == message


def test_it_reads_as_an_extrapolation(hollow: Path) -> None:
    console = Console(width=100, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    print_estimate(estimate(plan_of(hollow, "nvfp4a16"), replace(MACHINE, cores=1000), RATES), console)
    text = console.export_text()
    assert "extrapolated, not measured, for test (made up):" in text
    assert "of 1000 cores; more do not fit into --memory 2GiB" in text
    assert "bound by write; reading and writing share the disk" in text
    assert "rates of a core: made up" in text


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.04, "0.0 s"), (9.96, "10.0 s"), (42.4, "42 s"), (100, "2 min"), (5399, "90 min"), (8640, "2.4 h")]
)
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text


# ------------------------------------------------------------------------------------------------ this machine
@pytest.mark.parametrize("precision", ["w4a16", "nvfp4a16"])
def test_this_machine_is_measured(hollow: Path, tmp_path: Path, precision: str) -> None:
    machine, rates = measured_machine(plan_of(hollow, precision), tmp_path)
    assert machine.cores >= 1 and machine.network is None and str(tmp_path) in machine.source
    values = [machine.read, machine.write, rates.quantize, rates.amax, rates.dequantize]
    assert all(0 < value < 10_000 for value in [*values, rates.copy_in, rates.copy_out, rates.sha256])
    assert rates.source.startswith("measured just now")
    assert list(tmp_path.iterdir()) == []


def test_the_command(hollow: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    arguments = ["assay", "plan", str(hollow), "-p", "w4a16", "--hardware", "cores=8,read=3,write=2,network=1"]
    monkeypatch.setattr(sys, "argv", [*arguments, "--json"])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert not ended.value.code
    machine = json.loads(capsys.readouterr().out)
    plan = Plan.model_validate(machine["plan"])
    made = estimate(plan, parse_hardware(arguments[-1]), CoreRates(**machine["estimate"]["rates"]))
    assert machine["estimate"]["total_s"] == pytest.approx(made.total_s)
    assert machine["estimate"]["machine"]["source"] == "as said: cores 8, read 3, write 2, network 1"
    assert machine["estimate"]["rates"]["quantize"] == MEASURED["w4a16"][0]
    monkeypatch.setattr(sys, "argv", arguments)
    with pytest.raises(SystemExit):
        cli.main()
    assert "extrapolated, not measured" in capsys.readouterr().out
