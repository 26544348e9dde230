"""The benchmark: what it generates, measures, compares and writes, at sizes of a few MB. No timing is judged here."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

from chart import bars
from compare import Comparison, compare
from generated import TINY, config_of, make_checkpoint, small, to_bf16
from measured import Job, Result, Results
from report import BEGIN, END, markdown, write_section
from targets import judge, targets

pytestmark = pytest.mark.slow

BENCHMARKS = Path(sys.path[0])


def tables(text: str) -> dict[str, list[list[str]]]:
    """First cell of the head, or the heading above -> rows, of every Markdown table; all rows as long as their head."""
    found: dict[str, list[list[str]]] = {}
    heading = ""
    for block in text.split("\n\n"):
        if block.startswith("#"):
            heading = block.lstrip("# ")
        if block.startswith("|"):
            rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in block.splitlines()]
            assert len({len(row) for row in rows}) == 1, block
            found[heading] = [rows[0], *rows[2:]]
    return found


# ------------------------------------------------------------------------------------------------ generated
def test_the_generated_checkpoint_is_one(tmp_path: Path) -> None:
    shape = small(30_000_000, 10_000_000)
    source = make_checkpoint(tmp_path / "one", shape)
    index = json.loads((source / "model.safetensors.index.json").read_text())
    stored = {path.name: load_file(path) for path in sorted(source.glob("*.safetensors"))}
    assert index["weight_map"] == {name: file for file, tensors in stored.items() for name in tensors}
    tensors = {name: tensor for part in stored.values() for name, tensor in part.items()}
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in tensors.values())
    assert len(stored) == 3 and abs(index["metadata"]["total_size"] - 30e6) < 2e6  # to half an expert
    experts = [name for name in tensors if re.fullmatch(r"model\.layers\.1\.mlp\.experts\.\d+\.up_proj\.weight", name)]
    assert len(experts) == shape.num_experts == config_of(shape)["n_routed_experts"]
    weight = tensors["model.layers.1.mlp.experts.0.down_proj.weight"]
    assert weight.shape == (1024, 512) and weight.dtype == torch.bfloat16
    assert abs(weight.float().std().item() - 0.02) < 2e-4 and abs(weight.float().mean().item()) < 2e-4
    assert tensors["model.layers.1.mlp.gate.e_score_correction_bias"].dtype == torch.float32
    again = make_checkpoint(tmp_path / "two", shape)
    assert all((source / name).read_bytes() == (again / name).read_bytes() for name in stored)


def test_rounding_to_bf16_is_that_of_torch() -> None:
    values = torch.randn(100_000, generator=torch.Generator().manual_seed(0)) * torch.logspace(-38, 38, 100_000)
    values[:4] = torch.tensor([1 + 2**-8, 1 + 3 * 2**-8, -0.0, 1e-40])  # two ties, a zero, a denormal
    expected = values.bfloat16().view(torch.int16).numpy().view("uint16")
    assert (to_bf16(values.numpy()) == expected).all()


# ------------------------------------------------------------------------------------------------ compared
def stored(folder: Path, tensors: dict[str, torch.Tensor]) -> Path:
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    return folder


def test_what_differs_is_named_and_only_shared_scales_are_excused(tmp_path: Path) -> None:
    def module(name: str, scale: float) -> dict[str, torch.Tensor]:
        packed = torch.full((4, 8), int(scale), dtype=torch.uint8)
        return {f"{name}.weight_packed": packed, f"{name}.weight_global_scale": torch.tensor([scale])}

    left = {**module("a.up_proj", 1), **module("a.q_proj", 1), "norm.weight": torch.ones(3)}
    ours = stored(tmp_path / "ours", left)
    assert compare("x", ours, stored(tmp_path / "same", left)) == Comparison("x", (2, 2), 5, 5, 0, ())
    up = stored(tmp_path / "up", left | module("a.up_proj", 2))
    assert compare("x", ours, up) == Comparison("x", (2, 2), 5, 3, 2, ()) and compare("x", ours, up).passed
    q = compare("x", ours, stored(tmp_path / "q", left | module("a.q_proj", 2)))
    assert sorted(q.different) == ["a.q_proj.weight_global_scale: other bytes", "a.q_proj.weight_packed: other bytes"]
    packed = {"a.up_proj.weight_packed": torch.zeros(4, 8, dtype=torch.uint8)}
    assert compare("x", ours, stored(tmp_path / "packed", left | packed)).different == ("a.up_proj.weight_packed: other bytes",)
    fewer = {name: tensor for name, tensor in left.items() if name != "norm.weight"} | {"b.bias": torch.ones(1)}
    expected = Comparison("x", (2, 2), 5, 4, 0, ("b.bias: only in llm-compressor's", "norm.weight: only in ours"))
    assert compare("x", ours, stored(tmp_path / "fewer", fewer)) == expected and not expected.passed
    assert not compare("x", up, stored(tmp_path / "none", {"norm.weight": torch.ones(3)})).passed


# ------------------------------------------------------------------------------------------------ measured
def test_processes_are_measured_in_rounds_and_failures_are_results(tmp_path: Path) -> None:
    source = make_checkpoint(tmp_path / "source", TINY)
    lines: list[str] = []
    results = Results(tmp_path / "results.json", lines.append)
    jobs = [
        Job("cp", "cp", {"source": str(source), "out": str(tmp_path / "copy")}, 10**6, "g", keep=True),
        Job("lost", "cp", {"source": str(tmp_path / "nowhere"), "out": str(tmp_path / "out")}, 10**6, "g"),
        Job("read", "read", {"source": str(source)}, 10**6, "g", cold=True, rounds=1),
        Job("slow", "read", {"source": str(source)}, 10**6, "g", timeout_s=0.001),
    ]
    results.interleave(jobs, rounds=2, until=time.monotonic() + 60)
    assert [line.split()[0] for line in lines] == ["cp", "lost", "read", "slow", "cp"]  # what failed is not tried again
    copied = {path.name: path.read_bytes() for path in (tmp_path / "copy").iterdir()}
    assert copied == {path.name: path.read_bytes() for path in source.iterdir()}
    assert {name: len(result.seconds) for name, result in results.by_name.items()} == {"cp": 2, "lost": 0, "read": 1, "slow": 0}
    assert results.by_name["cp"].out_bytes == sum(map(len, copied.values()))
    assert results.by_name["slow"].error == "did not end in 0 s" and results.by_name["slow"].gb_per_s is None
    assert results.by_name["lost"].error.startswith("exit 1: ") and str(tmp_path) not in results.by_name["lost"].error
    assert 5e6 < results.by_name["read"].peak_bytes < 2e8
    kept = json.loads((tmp_path / "results.json").read_text())["results"]
    assert [one["name"] for one in kept] == ["cp", "lost", "read", "slow"] and kept[0]["seconds"] == results.by_name[
        "cp"
    ].seconds


# ------------------------------------------------------------------------------------------------ written
def some_results(tmp_path: Path) -> Results:
    results = Results(tmp_path / "results.json", lambda line: None)

    def add(name: str, group: str, seconds: list[float], mib: int = 100, error: str | None = None) -> None:
        count = len(seconds)
        made = Result(name, group, 10**9, seconds, [2.0] * count, [1.0] * count, [mib << 20] * count, error=error)
        results.by_name[name] = made

    add("part: assay w4a16", "part", [0.5, 1.0])
    add("part: llm-compressor w4a16", "part", [20.0, 17.0], mib=700)
    add("part: assay fp8_block", "part", [], error="exit 1: a | b")
    add("part: llm-compressor fp8_block", "part", [10.0])
    add("cp", "whole", [1.0])
    add("assay w4a16", "whole", [3.5])
    add("assay w4a16, 1 worker", "whole", [7.0])
    add("memory: assay w4a16, 5 GB shard", "memory", [9.0], mib=1024)
    add("memory: assay w4a16, 10 GB shard", "memory", [9.0], mib=1100)
    return results


def test_limits_are_judged_from_results(tmp_path: Path) -> None:
    seen = [judge(target, some_results(tmp_path)) for target in targets([5.0, 10.0], ("w4a16",), "")]
    found = {one.target.what: (None if one.value is None else round(one.value, 3), one.status) for one in seen}
    assert found == {
        "w4a16 against llm-compressor": (34.0, "ok"),
        "fp8_block against llm-compressor": (None, "failed"),
        "fp8_channel against llm-compressor": (None, "not measured"),
        "nvfp4a16 against llm-compressor": (None, "not measured"),
        "mxfp4 against llm-compressor": (None, "not measured"),
        "w4a16 with scale search against llm-compressor without": (None, "not measured"),
        "w4a16, time against cp, source in the page cache": (3.5, "short"),
        "w4a16, time against cp, source not in the page cache": (None, "not measured"),
        "w4a16, peak RSS, 5 GB shard": (1.0, "ok"),
        "w4a16, peak RSS, 10 GB shard against 5 GB": (1.074, "short"),
        "w4a16, 2 workers against 1": (2.0, "ok"),
        "fp8_block, 2 workers against 1": (None, "not measured"),
        "nvfp4a16, 2 workers against 1": (None, "not measured"),
        "verify with errors, 1 worker, BF16 of the source": (None, "not measured"),
        "verify with hashes only against reading, both from the disk": (None, "not measured"),
    }


def test_tables_are_well_formed_and_failures_are_in_them(tmp_path: Path) -> None:
    section = markdown(
        some_results(tmp_path),
        machine={"CPU": "two"},
        how=["how"],
        groups={"part": "Side by side\nWhat it is.", "whole": "Whole", "verify": "Not run"},
        targets=targets([5.0, 10.0], ("w4a16",), ""),
        schemes=["w4a16", "fp8_block"],
        comparisons=[Comparison("w4a16", (3, 3), 9, 9, 0, ()), Comparison("fp8_block", (3, 2), 9, 8, 0, ("a: other bytes",))],
        chart="quantize.svg",
    )
    found = tables(section)
    assert list(found) == [
        "Quantizing and verifying", "Limits", "By scheme", "Bit by bit against llm-compressor", "Side by side", "Whole"
    ]  # fmt: skip
    assert found["By scheme"][1:] == [
        ["w4a16", "2.000", "0.059", "34.00x", "100", "700", "2.00", "2.00", "0.286", "100", "3.50x"],
        ["fp8_block", "failed", "0.100", "-", "-", "100", "-", "2.00", "not measured", "-", "-"],
    ]
    assert ["part: assay w4a16", "2.000", "100", "2.00", "-", "1.0", "0.50, 1.00"] in found["Side by side"]
    assert ["part: assay fp8_block", "**failed**", "-", "-", "-", "-", "exit 1: a / b"] in found["Side by side"]
    assert ["fp8_block against llm-compressor", "at least 10x", "-", "**failed**"] in found["Limits"]
    assert [row[-1] for row in found["Bit by bit against llm-compressor"][1:]] == ["same", "**different**: a: other bytes"]
    assert bars([("w4a16", 2.0, 0.06), ("<fp8>", None, 0.1)], 1.0).count("<rect") == 1 + 2 + 3


def test_other_sections_of_the_file_stay(tmp_path: Path) -> None:
    path = tmp_path / "RESULTS.md"
    write_section(path, "first\n")
    path.write_text(path.read_text() + "\n<!-- scale-search -->\ntheirs\n<!-- /scale-search -->\n")
    write_section(path, "second\n")
    text = path.read_text()
    assert text.endswith(f"\n{BEGIN}\n\nsecond\n\n{END}\n\n<!-- scale-search -->\ntheirs\n<!-- /scale-search -->\n")
    assert "first" not in text and text.startswith("# Benchmarks\n")


# ------------------------------------------------------------------------------------------------ the whole
@pytest.mark.timeout(300)
def test_it_runs_and_both_tools_agree_bit_by_bit(tmp_path: Path) -> None:
    sizes = ["--gigabytes", "0.004", "--part", "0.003", "--giant", "--rounds", "1", "--schemes", "fp8_block"]
    command = [sys.executable, str(BENCHMARKS / "run.py"), *sizes, "--only", "part"]
    environment = {**os.environ, "PYTHONSAFEPATH": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, "--folder", str(tmp_path), "--results", str(tmp_path / "RESULTS.md")],
        capture_output=True, text=True, env=environment, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    found = tables((tmp_path / "RESULTS.md").read_text())
    assert [row[0] for row in found["Side by side with llm-compressor"][1:]] == [
        "part: assay fp8_block", "part: llm-compressor fp8_block"
    ]  # fmt: skip
    (compared,) = found["Bit by bit against llm-compressor"][1:]
    assert compared[0] == "fp8_block" and compared[1] == compared[2] and compared[-1] == "same"
    assert float(found["By scheme"][1][1]) > 0 and float(found["By scheme"][1][2]) > 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["RESULTS.md", "quantize.json", "quantize.svg"]
    assert str(tmp_path) not in (tmp_path / "RESULTS.md").read_text()
