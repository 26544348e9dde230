"""`assay plan MODEL --profile P`: every precision on one machine, from shipped shapes and from a folder."""

from __future__ import annotations

from pathlib import Path

import pytest
from command_errors import one_error
from command_line import Run
from tiny_checkpoints import make_tiny_glm4_moe

from assay.records.choice.hardware import HardwarePlan


def planned(run: Run, *words: str) -> HardwarePlan:
    code, out, err = run("plan", *words, "--json")
    assert (code, err) == (0, "")
    return HardwarePlan.model_validate_json(out)


def test_glm52_on_four_h200(run: Run) -> None:
    """W4A16 has 102.7 GB of weights a GPU and room for 13 users of 32K tokens; FP8 does not fit at all. No network."""
    found = planned(run, "glm-5.2", "--profile", "4xh200", "--users", "8", "--context", "32k")
    rows = {row.precision: row for row in found.rows}
    assert list(rows) == ["bf16", "fp8", "nvfp4-fp8-attention", "nvfp4a16", "w4a16-fp8-attention", "w4a16"]
    assert (found.num_gpus, found.users, found.context, found.kv_dtype) == (4, 8, 32_768, "fp8")
    assert found.source == "zai-org/GLM-5.2 (shapes as shipped)"
    assert [row.fits for row in found.rows] == [False, False, False, True, True, True]
    w4a16 = rows["w4a16"]
    assert w4a16.weight_bytes == pytest.approx(102.7e9, rel=1e-3)
    assert w4a16.kv_bytes == 8 * 32_768 * 54_728  # a token: 79 layers of 656 bytes, 22 indexers of 132
    assert (w4a16.users_that_fit, w4a16.native, w4a16.kernels) == (13, True, ("MARLIN",))
    assert (rows["nvfp4-fp8-attention"].native, rows["nvfp4-fp8-attention"].runs_as) == (False, "W4A16")
    assert rows["fp8"].problem == "its weights do not fit: 180 GiB of 126 usable on each GPU"
    assert rows["nvfp4-fp8-attention"].problem == "12 GiB are left for KV cache on each GPU, 8 users need 13; 7 fit"
    off, on = w4a16.steps
    assert (off.drafted, off.tokens, on.drafted, on.tokens, on.acceptance_length) == (0, 8, 5, 48, pytest.approx(3.6))
    assert on.experts_touched == pytest.approx(256 * (1 - (1 - 8 / 256) ** 48))
    reads = [one.target_bytes + one.draft_bytes + one.kv_bytes for one in (off, on)]
    assert [one.floor_tpot_s for one in (off, on)] == pytest.approx([reads[0] / 19.2e12, reads[1] / 19.2e12 / 3.6])
    assert off.draft_bytes == 0 < on.draft_bytes


def test_the_table_says_what_fits(run: Run) -> None:
    code, out, err = run("plan", "glm-5.2", "--profile", "4xh200", "--users", "8")
    lines = out.splitlines()
    assert (code, err) == (0, "")
    assert lines[0] == "glm-5.2: nvfp4a16, w4a16-fp8-attention, w4a16 fit 8 users at 32K tokens on 4 x H200"
    assert lines[1].split("  ")[0] == "precision"
    assert next(line for line in lines if line.startswith("w4a16 ")).split() == [
        "w4a16", "102.7", "14.3", "13", "native", "(MARLIN)", "101", "/", "344", "5.27", "/", "4.97",
    ]  # fmt: skip
    assert "Shapes: zai-org/GLM-5.2 (shapes as shipped)." in lines[-1]


def test_one_precision_and_what_cannot_be_planned(run: Run) -> None:
    (row,) = planned(run, "glm-5.2", "--profile", "8xb200", "-p", "w8a8").rows
    assert (row.fits, row.problem) == (False, "vLLM's compiled kernels for w8a8 refuse this GPU")
    (row,) = planned(run, "glm-4.5-air", "--profile", "8xh200", "-p", "w4a16").rows
    assert row.weight_bytes is None and row.problem is not None and "10944 columns are not a multiple" in row.problem


def test_a_folder_is_read_by_its_headers(run: Run, tmp_path: Path) -> None:
    folder = make_tiny_glm4_moe(tmp_path / "source")
    found = planned(run, str(folder), "--profile", "4xh200", "-p", "w4a16", "--users", "2", "--context", "512")
    assert found.source == str(folder) and [row.precision for row in found.rows] == ["w4a16"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("glm-5.2",), "say --precision NAME, such as w4a16, nvfp4a16 or fp8 (`assay recipes precisions` lists all), "),
        (("glm-5.2", "-p", "w4a16", "--users", "3"), "--users is not used without --profile; leave it out"),
        (("glm-5.2", "--profile", "4xh200", "--hardware", "this"), "--hardware is not used with --profile; leave it out"),
        (("glm-5.2", "--profile", "4xh200", "--context", "many"), "--context many: is no number of tokens; write 32768"),
        (("glm-5.2", "--profile", "4xh200", "--context", "0"), "--context 0: is no number of tokens; write"),
        (("glm-5.2", "--profile", "cpu-emulated"), "--profile cpu-emulated: says of no GPU what it is"),
        (("glm-5.2", "--profile", "4xh20"), "no profile recipe called '4xh20'; did you mean 4xh200? known: "),
        (("glm-5.2", "--profile", "4xh200", "--users", "0"), "assay plan: invalid value for '--users'"),
    ],
)  # fmt: skip
def test_wrong_input_is_one_line(run: Run, words: tuple[str, ...], said: str) -> None:
    assert one_error(run("plan", *words)).startswith(said)
