"""What calibrating takes, counted again by hand for GLM-5 as it ships, and said line by line."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import get_args

import pytest
from command_line import Run
from rich.console import Console

from assay.recipes.calibrated.methods import AutoRoundCalibration, AwqCalibration
from assay.recipes.load import load_recipe
from assay.recipes.precision import PrecisionRecipe
from assay.records.plan import Plan
from assay_quantize.calibration.memory import IMPORTED_NUMBERS, SPARE_BYTES
from assay_quantize.estimate.calibration_time import (
    MEASURED_CALIBRATION,
    PROCESS_BYTES,
    CalibrationWork,
    Line,
    TorchRates,
    calibration_work,
    core_rates,
    estimate_calibration,
    gpu_rates,
)
from assay_quantize.estimate.hardware_time import MACHINES, MEASURED, CoreRates, Gpu, Machine
from assay_quantize.estimate.sensitivity_time import COMPARED_S, Proxy, estimate_sensitivity
from assay_quantize.estimate.show import print_calibration
from assay_quantize.plan.planner import make_plan
from assay_quantize.plan.shipped import shipped_model

pytestmark = pytest.mark.slow

T, LENGTH = 65_536, 512
HIDDEN, EXPERT, EXPERTS, MOE, DENSE = 6144, 2048, 256, 75, 3
Q_A, Q_B, KV_A, KV_B, OUT = 2048 * HIDDEN, 16384 * 2048, 576 * HIDDEN, 28672 * 512, HIDDEN * 16384
INDEXER = 4096 * 2048 + 128 * HIDDEN + 32 * HIDDEN
ATTENTION = Q_A + Q_B + KV_A + KV_B + OUT
ONE_EXPERT, ONE_MLP = 3 * HIDDEN * EXPERT, 3 * HIDDEN * 12288
SCORES = 2 * LENGTH * 64 * (256 + 256) * 78 * T
COPIES = CoreRates(quantize=1.0, amax=1.0, dequantize=1.0, copy_in=10.0, copy_out=1.0, sha256=2.0, source="made up")


@pytest.fixture(scope="module")
def glm5() -> Plan:
    shipped = shipped_model("glm-5", every_expert=True)
    return make_plan(shipped.checkpoint, load_recipe(PrecisionRecipe, "w4a16-gptq"), model="glm-5", family=None)


def test_the_work_of_glm_5_is_that_of_its_shapes(glm5: Plan) -> None:
    norms = 2 * HIDDEN + 2048 + 512 + 2 * 128
    numbers = 78 * (ATTENTION + INDEXER + norms) + DENSE * ONE_MLP + MOE * ((EXPERTS + 1) * ONE_EXPERT + EXPERTS * HIDDEN)
    every = numbers - 78 * norms
    routed = MOE * EXPERTS * ONE_EXPERT
    # q_a and kv_a share a Hessian, as gate and up of an MLP, and gate and up of all experts do
    hessians = 78 * (HIDDEN**2 + 2048**2 + 512**2 + 16384**2) + DENSE * (HIDDEN**2 + 12288**2)
    hessians += MOE * (HIDDEN**2 + EXPERTS * EXPERT**2 + HIDDEN**2 + EXPERT**2)
    columns = {HIDDEN: 78 * 2 + DENSE * 2 + MOE * (2 * EXPERTS + 2), EXPERT: 78 + MOE * (EXPERTS + 1)}
    columns |= {512: 78, 16384: 78, 12288: DENSE}
    rounded = every - 78 * INDEXER - MOE * EXPERTS * HIDDEN
    biases = MOE * EXPERTS
    updates = 78 * (Q_A * HIDDEN + KV_A * HIDDEN + Q_B * 2048 + KV_B * 512 + OUT * 16384)
    updates += DENSE * (2 * HIDDEN + 12288) * HIDDEN * 12288 + MOE * (EXPERTS + 1) * (2 * HIDDEN + EXPERT) * HIDDEN * EXPERT
    layer = ATTENTION + INDEXER + norms + (EXPERTS + 1) * ONE_EXPERT + EXPERTS * HIDDEN + EXPERTS
    hessian_numbers = HIDDEN**2 * 3 + 2048**2 + 512**2 + 16384**2 + EXPERTS * EXPERT**2 + EXPERT**2
    packed_layer = (ATTENTION + (EXPERTS + 1) * ONE_EXPERT) * 33 // 64 + 16 * (5 + 3 * (EXPERTS + 1))
    assert calibration_work(glm5) == CalibrationWork(
        method="gptq",
        tokens=T,
        length=LENGTH,
        layers=78,
        read=2 * numbers + 4 * biases,
        prepared=4 * (numbers + biases),
        watched=2.0 * T * every + SCORES,
        passed_on=2.0 * T * (every - routed * (1 - 8 / EXPERTS)) + SCORES,
        hessians=2.0 * T * hessians,
        factorized=pytest.approx(sum(count * 4 / 3 * c**3 for c, count in columns.items())),
        weights=sum(columns.values()),
        columns=sum(count * c for c, count in columns.items()),
        column_numbers=float(rounded),
        updates=float(updates),
        searched=0.0,
        searched_numbers=0.0,
        steps=0,
        tuned=0.0,
        tuned_numbers=0.0,
        tuned_weights=0,
        state_bytes=T * (4 * HIDDEN + 8 * LENGTH),
        written=rounded * 33 // 64,
        layer_bytes=4 * (layer + hessian_numbers + 6 * OUT + 4 * 16384**2) + packed_layer,
        gpu_layer_bytes=4 * (layer + hessian_numbers + 6 * OUT + 4 * 16384**2) + packed_layer,
        beside_bytes=0,
        embedding_bytes=4 * T * HIDDEN,
    )


def test_every_line_is_work_over_a_rate(glm5: Plan) -> None:
    gpu = Gpu("test", 80_000_000_000, fp32=50.0, memory=4.0, bus=40.0, source="made up")
    machine = Machine("test", 4, read=2.0, write=0.5, network=None, source="made up", gpu=gpu)
    work, rates = calibration_work(glm5), gpu_rates(gpu)
    assert rates == TorchRates(
        36.5e12, 8.5e12, 2.7e-6, 440 / 4e12, 100 / 4e12, 160 / 4e12, 5.2, rates.source, weight_s=7.9e-3, tuned_weight_s=2.8e-3
    )
    made = estimate_calibration(glm5, machine, COPIES, MEASURED_CALIBRATION, gpu=True)
    seconds = {
        "tokens": None, "source": work.read / 2e9, "weights": work.prepared / 10e9, "to the GPU": work.prepared / 2 / 5.2e9,
        "watch": work.watched / 36.5e12, "Hessians": work.hessians / 36.5e12, "factorize": work.factorized / 8.5e12,
        "round": work.columns * 2.7e-6 + work.column_numbers * 440 / 4e12, "update": work.updates / 36.5e12,
        "dispatch": work.weights * 7.9e-3, "pass on": work.passed_on / 36.5e12,
        "states": 78 * work.state_bytes * (2 / 2 + 1 / 0.5 + 1 / 2) / 1e9,
        "layers": work.written * (1 / 0.5 + 1 / 2) / 1e9,
    }  # fmt: skip
    assert {line.name: line.seconds for line in made.lines} == {
        name: None if value is None else pytest.approx(value) for name, value in seconds.items()
    }
    assert made.total_s == pytest.approx(sum(value for value in seconds.values() if value))
    assert made.disk_bytes == work.written + 2 * work.state_bytes + 4 * T
    assert (made.device, made.device_bytes) == ("one test", work.layer_bytes + SPARE_BYTES)
    assert made.host_bytes == PROCESS_BYTES + work.embedding_bytes + work.written // 78
    assert made.problem is None
    small = replace(machine, gpu=replace(gpu, memory_bytes=40_000_000_000))
    problem = "a layer takes 57.4 GB, the GPU has 40 GB: fewer tokens, or on the CPU"
    assert estimate_calibration(glm5, small, COPIES, MEASURED_CALIBRATION, gpu=True).problem == problem
    here = estimate_calibration(glm5, machine, COPIES, MEASURED_CALIBRATION, gpu=False)
    four = core_rates(MEASURED_CALIBRATION, 4)
    assert four.product == MEASURED_CALIBRATION.product * 3.6 and four.column_s == MEASURED_CALIBRATION.column_s
    assert (here.device, here.device_bytes, here.rates) == ("4 cores", None, four)
    assert "to the GPU" not in {line.name for line in here.lines}
    assert here.host_bytes == PROCESS_BYTES + work.embedding_bytes + work.layer_bytes + SPARE_BYTES


def test_awq_runs_what_reads_the_scaled_inputs_again_for_each_candidate(glm5: Plan) -> None:
    recipe = {**glm5.precision_recipe, "calibration": AwqCalibration(method="awq").model_dump()}
    work, tokens = calibration_work(glm5.model_copy(update={"precision_recipe": recipe})), 16_384
    # attention has an indexer, which reads the norm as well: it is left alone
    down = DENSE * HIDDEN * 12288 + MOE * (EXPERTS + 1) * HIDDEN * EXPERT
    mlps = DENSE * ONE_MLP + MOE * (9 * ONE_EXPERT + EXPERTS * HIDDEN)
    assert work.searched == pytest.approx(21 * 2 * tokens * (down + mlps))
    gates = DENSE * 2 * HIDDEN * 12288 + MOE * ((EXPERTS + 1) * 2 * HIDDEN * EXPERT + EXPERTS * HIDDEN)
    assert work.searched_numbers == 20 * (down + gates)
    assert (work.hessians, work.factorized, work.columns) == (0.0, 0, 0)


def test_autoround_goes_through_every_weight_in_each_step(glm5: Plan) -> None:
    recipe = {**glm5.precision_recipe, "calibration": AutoRoundCalibration(method="autoround").model_dump()}
    plan, gptq = glm5.model_copy(update={"precision_recipe": recipe}), calibration_work(glm5)
    work = calibration_work(plan)
    assert work.watched == gptq.passed_on and work.passed_on == 2 * gptq.passed_on and work.state_bytes == 2 * gptq.state_bytes
    assert (work.steps, work.tuned_weights) == (200, 200 * gptq.weights)
    assert work.tuned == pytest.approx(3 * 200 * 8 / 128 * gptq.passed_on)
    assert work.tuned_numbers == 200 * gptq.column_numbers
    assert (work.hessians, work.columns, work.searched) == (0.0, 0, 0.0)
    layer = ATTENTION + (EXPERTS + 1) * ONE_EXPERT
    kept = 4 * T * HIDDEN + 2 * 128 * LENGTH**2 + IMPORTED_NUMBERS
    assert work.beside_bytes == 4 * (2 * layer + kept)
    assert work.layer_bytes - work.gpu_layer_bytes == 4 * (11 * layer + 18 * 8 * LENGTH * 28672 * 9 + kept)
    made = estimate_calibration(plan, MACHINES["1xh200"], COPIES, MEASURED_CALIBRATION, gpu=True)
    (tune,) = (line for line in made.lines if line.name == "tune")
    rates = made.rates
    numbers_s = work.tuned_numbers * rates.tuned_number_s + work.tuned_weights * rates.tuned_weight_s
    assert tune.seconds == pytest.approx(work.tuned / rates.product + numbers_s)
    assert made.problem == "a layer takes 269 GB, the GPU has 141 GB: fewer tokens, or on the CPU"
    assert made.host_bytes == PROCESS_BYTES + work.embedding_bytes + work.written // 78 + work.beside_bytes
    assert "one at a time" in made.lines[0].text


def test_sensitivity_is_passes_through_layers_and_the_rounding_of_parts(glm5: Plan) -> None:
    """Two parts of one scheme: attention of layer 3, experts of layer 77."""
    machine = Machine("test", 4, read=2.0, write=0.5, network=None, source="made up")
    attention, experts, tokens = ATTENTION, EXPERTS * ONE_EXPERT, 1024
    parts = [(3, "w4a16", attention), (77, "w4a16", experts)]
    made = {}
    for proxy in get_args(Proxy):
        made[proxy] = estimate_sensitivity(
            {"w4a16": glm5}, parts, machine, COPIES, MEASURED_CALIBRATION, proxy=proxy,
            tokens=tokens, length=256, memory_bytes=5, disk_bytes=7,
        )  # fmt: skip
    product = 3.6 * MEASURED_CALIBRATION.product
    weights, rate = attention + experts, MEASURED["w4a16"][0] * 1e9
    norms = 2 * HIDDEN + 2048 + 512 + 2 * 128
    dense = 78 * (ATTENTION + INDEXER) + DENSE * ONE_MLP + MOE * (ONE_EXPERT + EXPERTS * HIDDEN)
    stored = 2 * (dense + MOE * EXPERTS * ONE_EXPERT + 78 * norms) + 4 * MOE * EXPERTS
    entry = tokens * (2 * (dense + MOE * 8 * ONE_EXPERT) / 78 + 2 * 256 * 64 * 512)
    state = tokens * (4 * HIDDEN + 8 * 256)
    through = {"kl": 78 + 78 + (78 - 3) + (78 - 77), "hidden": 78 + 2}
    expected = {
        proxy: {
            "tokens": None,
            "source": times * 2 * weights / 2e9,
            "round": times * 2 * weights / rate + weights * COMPARED_S,
            "layers": stored / 2e9,
            "passes": through[proxy] * entry / product,
            "states": through[proxy] * state * (1 / 2e9 + 1 / 0.5e9),
        }
        for proxy, times in (("kl", 2), ("hidden", 1))
    }
    expected["kl"]["head"] = 2 * (2 + 1) * 2 * tokens * HIDDEN * 154_880 / product
    expected["weights"] = {name: expected["hidden"][name] for name in ("source", "round")}
    for proxy, lines in expected.items():
        estimated = {line.name: line.seconds for line in made[proxy].lines}
        assert estimated == {name: None if value is None else pytest.approx(value) for name, value in lines.items()}
        assert made[proxy].total_s == pytest.approx(sum(value for value in lines.values() if value))
        assert (made[proxy].memory_bytes, made[proxy].disk_bytes) == (PROCESS_BYTES + 5, 7)
    with_mix = estimate_sensitivity(
        {"w4a16": glm5}, parts, machine, COPIES, MEASURED_CALIBRATION, proxy="kl",
        tokens=tokens, length=256, memory_bytes=5, disk_bytes=7, mixes=[[("w4a16", attention)]],
    )  # fmt: skip
    more = {line.name: (line.seconds or 0) - (expected["kl"].get(line.name) or 0) for line in with_mix.lines}
    assert more == {
        "tokens": 0, "layers": 0,
        "source": pytest.approx(2 * attention / 2e9), "round": pytest.approx(2 * attention / rate),
        "passes": pytest.approx(78 * entry / product), "states": pytest.approx(78 * state * (1 / 2e9 + 1 / 0.5e9)),
        "head": pytest.approx(2 * 2 * tokens * HIDDEN * 154_880 / product),
    }  # fmt: skip


def test_it_is_printed_line_by_line(glm5: Plan) -> None:
    console = Console(width=100, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    made = estimate_calibration(glm5, MACHINES["1xh200"], COPIES, MEASURED_CALIBRATION, gpu=True)
    print_calibration(replace(made, lines=(Line("tokens", None, "said"), Line("watch", 4000.0, "counted"))), console)
    assert console.export_text().splitlines() == [
        "calibration before that, extrapolated, not measured, on one NVIDIA H200 of 1xh200:",
        "  tokens                said",
        "  watch        67 min   counted",
        f"  together    {made.total_s / 3600:>5.1f} h   one step after the other; the start is not in it",
        "  disk        385.9 GB   layers and states, beside source and result, until it is done",
        "  GPU memory  57.4 GB   the largest layer in FP32, its statistics, a batch",
        "  memory      7.24 GB   without the layer, which is on the GPU",
        f"  rates: {made.rates.source}",
        "  one GPU computes, others of the machine wait; shares of its rates as measured on one H200",
    ]


def test_the_command_needs_no_hub(monkeypatch: pytest.MonkeyPatch, run: Run) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    code, out, err = run("plan", "qwen3-30b-a3b", "-p", "w4a16-gptq", "--hardware", "1xh200", "--json")
    assert code == 0, err
    assert "planned from the shapes that ship with assay" in err
    seconds = json.loads(out)
    assert seconds["plan"]["source"] == "Qwen/Qwen3-30B-A3B (shapes as shipped)"
    assert [entry["device"] for entry in seconds["calibration"]] == ["one NVIDIA H200", "14 cores"]
    assert [entry["problem"] for entry in seconds["calibration"]] == [None, None]
    gpu, cores = seconds["calibration"]
    assert 0 < gpu["total_s"] < cores["total_s"]
    assert len({line["name"] for line in gpu["lines"]}) == len(gpu["lines"]) == 13
