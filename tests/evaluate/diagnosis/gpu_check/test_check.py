"""Waves of servers, what is said of a server that does not start, and what is left out when time is up. Servers are stubs."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from replayed import HOPPER, replayed
from synthetic_run import make_fingerprint

from assay.callbacks import Say
from assay.errors import ServeError
from assay.records.preflight.gpu_check import FormatCheck
from assay_evaluate.diagnosis.gpu_check import check as module
from assay_evaluate.diagnosis.gpu_check.check import check_formats
from assay_evaluate.diagnosis.gpu_check.sides import (
    activation_bits,
    quantizes_activations,
    reason_without_kernel,
    self_test_sides,
    sides_on,
    with_plain_activations,
)
from assay_evaluate.serving.hardware import Gpu
from assay_evaluate.serving.server import ServerSpec

H200 = Gpu("NVIDIA H200", 150_000_000_000, "580.1")
FP4 = ("Using MarlinNvFp4LinearKernel for NVFP4 GEMM", "Using 'MARLIN' NvFp4 MoE backend")


def checkpoint(folder: Path, activations: dict[str, Any] | None = None) -> Path:
    folder.mkdir()
    groups = {"group_0": {"weights": {"num_bits": 4}, "input_activations": activations}}
    (folder / "config.json").write_text(
        json.dumps({"quantization_config": {"quant_method": "compressed-tensors", "config_groups": groups}})
    )
    (folder / "model.safetensors").write_bytes(b"weights")
    return folder


class Machine:
    """Starts stubs; keeps what was asked for, in order, and how many run at a time."""

    def __init__(self, lines: tuple[str, ...] = HOPPER, refuses: Callable[[ServerSpec], bool] = lambda spec: False) -> None:
        self.lines, self.refuses = lines, refuses
        self.started: list[tuple[str, str]] = []
        self.running = self.most = 0

    @contextmanager
    def __call__(self, spec: ServerSpec, report: Say) -> Iterator[Any]:
        self.started.append((spec.profile.name, spec.checkpoint.name))
        if self.refuses(spec):
            raise ServeError("vLLM stopped before it was ready (exit status 1): ValueError: no kernel\n  last lines of its log")
        self.running += 1
        self.most = max(self.most, self.running)
        yield SimpleNamespace(
            fingerprint=make_fingerprint(quantized=True).model_copy(update={"kernels": self.lines}), name=spec.checkpoint.name
        )
        self.running -= 1


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, bool | None, bool]]:
    """(precision, whether activations are quantized, whether it has an emulated twin) of every pair that was asked."""
    result: list[tuple[str, bool | None, bool]] = []

    def ask(pair: Any, check: FormatCheck, length: Any) -> tuple[FormatCheck, list[str]]:
        result.append((pair.precision, pair.quantizes, pair.emulated is not None))
        return check, []

    monkeypatch.setattr(module, "_ask_pair", ask)
    return result


def run(
    tmp_path: Path, machine: Machine, names: tuple[str, ...] = ("a", "b", "c"), *, seconds: float = 1000.0,
    foreseen: dict[str, Any] | None = None, activations: dict[str, Any] | None = None, at_once: int = 2,
) -> tuple[FormatCheck, ...]:  # fmt: skip
    folders = {name: checkpoint(tmp_path / name, activations) for name in names}
    return check_formats(
        folders, sides_on(H200), tmp_path / "logs", foresee=lambda: foreseen or {}, deadline=time.monotonic() + seconds,
        at_once=at_once, start_server=machine,
    )  # fmt: skip


def test_waves(tmp_path: Path, asked: list[Any]) -> None:
    machine = Machine()
    checks = run(tmp_path, machine)
    assert [(check.precision, check.outcome) for check in checks] == [("a", "PASS"), ("b", "PASS"), ("c", "PASS")]
    assert sorted(machine.started[:2]) == [("gpu-check", "a"), ("gpu-check", "b")]
    assert sorted(machine.started[2:4]) == [("gpu-check-emulated", "a"), ("gpu-check-emulated", "b")]
    assert machine.started[4:] == [("gpu-check", "c"), ("gpu-check-emulated", "c")]
    assert asked == [("a", False, True), ("b", False, True), ("c", False, True)]
    assert (machine.most, machine.running) == (4, 0)


def test_no_wave_begins_that_cannot_end(tmp_path: Path, asked: list[Any]) -> None:
    checks = run(tmp_path, Machine(), seconds=module.WAVE_S - 1)
    assert [check.outcome for check in checks] == ["NOT MEASURED"] * 3 and not asked
    assert checks[0].reasons == (
        "no time was left for it: a wave takes about 170 s; name it with --formats, or give --minutes",
    )


def test_a_format_that_is_not_served_fails_unless_that_was_foreseen(tmp_path: Path, asked: list[Any]) -> None:
    machine = Machine(refuses=lambda spec: spec.checkpoint.name in "ab")
    foreseen = {"a": replayed(finding=("kernel", "no kernel for it")), "c": replayed(("linear", "w", "MacheteLinearKernel"))}
    a, b, c = run(tmp_path, machine, foreseen=foreseen)
    text = "vLLM stopped before it was ready (exit status 1): ValueError: no kernel"
    assert (a.outcome, a.reasons) == ("NOT SERVED", ("as foreseen: no kernel for it", text))
    assert (b.outcome, b.reasons) == ("FAIL", (f"not served: {text}",))
    assert c.outcome == "PASS" and c.kernels is not None and c.kernels.foreseen is not None
    assert ("gpu-check-emulated", "a") not in machine.started and machine.running == 0


def test_emulation_that_does_not_start_is_no_pass(tmp_path: Path, asked: list[Any]) -> None:
    machine = Machine(refuses=lambda spec: spec.profile.emulate)
    (a,) = run(tmp_path, machine, ("a",))
    assert a.outcome == "NOT MEASURED" and a.reasons[0].startswith("emulation could not be served: vLLM stopped")
    assert asked == [("a", False, False)]


# ------------------------------------------------------------------------------------------------ activations
FLOAT4 = {"type": "float", "num_bits": 4}


def test_where_marlin_keeps_activations_emulation_does(tmp_path: Path, asked: list[Any]) -> None:
    machine = Machine(FP4)
    run(tmp_path, machine, ("nvfp4",), activations=FLOAT4)
    assert machine.started == [("gpu-check", "nvfp4"), ("gpu-check-emulated", "nvfp4-16-bit-activations")]
    twin = tmp_path / "logs" / "nvfp4-16-bit-activations"
    groups = json.loads((twin / "config.json").read_text())["quantization_config"]["config_groups"]
    assert groups["group_0"] == {"weights": {"num_bits": 4}, "input_activations": None}
    assert (twin / "model.safetensors").read_bytes() == b"weights"


def test_activations_of_a_server(tmp_path: Path) -> None:
    plain, quantized = checkpoint(tmp_path / "plain"), checkpoint(tmp_path / "quantized", FLOAT4)
    assert quantizes_activations(plain, FP4) is False and quantizes_activations(plain, ()) is False
    assert quantizes_activations(quantized, FP4) is False
    assert quantizes_activations(quantized, ("Using XLinearKernel for NVFP4 GEMM", "Using 'Y' NvFp4 MoE backend")) is True
    assert quantizes_activations(quantized, (FP4[0], "Using 'FLASHINFER_TRTLLM' NvFp4 MoE backend")) is None
    assert quantizes_activations(quantized, ("assay-emulate: Glm: 3 modules dequantized",)) is True
    assert (activation_bits(plain), activation_bits(quantized)) == (16, 4)
    assert with_plain_activations(quantized, tmp_path / "twin") == with_plain_activations(quantized, tmp_path / "twin")


def test_int8_on_blackwell(tmp_path: Path) -> None:
    """The replay says that it loads; vLLM has no kernel for it."""
    int8, fp8 = (
        checkpoint(tmp_path / "i", {"type": "int", "num_bits": 8}), checkpoint(tmp_path / "f", {"type": "float"})
    )  # fmt: skip
    assert reason_without_kernel(int8, "NVIDIA B200") == "vLLM has no INT8 kernel for Blackwell"
    assert reason_without_kernel(int8, "NVIDIA H200") is None and reason_without_kernel(fp8, "NVIDIA B200") is None
    assert reason_without_kernel(int8, "NVIDIA L4") is None and reason_without_kernel(int8, None) is None


# ------------------------------------------------------------------------------------------------ how they are served
def test_sides_of_a_gpu() -> None:
    sides = sides_on(H200)
    assert sides.native.environment == {"VLLM_USE_DEEP_GEMM_E8M0": "0"}, "as the shipped profiles of an H200"
    assert sides.native.hardware.gpu == "H200" and sides.gpu == "NVIDIA H200" and sides.native.hardware.num_gpus == 1
    assert (sides.native.emulate, sides.emulated.emulate) == (False, True)
    assert "enforce-eager" not in sides.native.vllm and sides.emulated.vllm["enforce-eager"] is True
    other = sides_on(Gpu("NVIDIA L4", 24 << 30, "580.1"))
    assert other.native.hardware.gpu == "NVIDIA L4" and other.native.environment == {}


def test_a_self_test_emulates_on_both_sides() -> None:
    sides = self_test_sides()
    assert sides.native == sides.emulated and sides.native.emulate and sides.gpu is None
