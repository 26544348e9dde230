"""`assay inspect`: what it prints, and its exit codes."""

from __future__ import annotations

import importlib.util
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from command_errors import one_error
from command_line import Run
from gguf_models import put, small_keys, small_shapes, write
from local_hub import Hub
from published import compressed, is_expert, of_model, publish
from published import put as put_tensor
from rich.console import Console

from assay.installation import install_command
from assay.records.inspection import Finding, Place
from assay_cli.shown.inspection import _print_finding


def test_damaged_scales_are_named(run: Run, tmp_path: Path) -> None:
    ignore = ["lm_head", r"re:.*mlp\.gate$", "re:.*self_attn.*"]
    folder = publish(tmp_path / "w4a16", compressed(*of_model("qwen3-30b-a3b"), is_expert, ignore, "int4"))
    code, out, _ = run("inspect", folder)
    assert code == 0 and "no defect found" in out and "qwen3_moe, 4 layers, 4 experts" in out and "int_packed" in out
    names = [f"model.layers.1.mlp.experts.{expert}.up_proj.weight_scale" for expert in range(2)]
    for name in names:
        put_tensor(folder, name, np.full(768 * 16, 0x7FC0, np.uint16))
    code, out, _ = run("inspect", folder)
    assert code == 1 and "served wrong: scale_not_finite" in out and "1 defect in" in out
    assert all(f"  {name}: 12,288 of 12,288 scales are NaN or infinite" in out for name in names)
    code, out, _ = run("inspect", folder, "--json")
    record = json.loads(out)
    assert code == 1 and record["schema_version"] == 1 and record["kind"] == "inspection"
    assert [(f["defect"], f["severity"], f["num_places"], f["mend_by"]) for f in record["findings"]] == [
        ("scale_not_finite", "wrong", 2, "requantize")
    ]


@pytest.mark.parametrize(("places", "listed"), [(99, "all"), (100, "all"), (101, "the first 100")])
def test_what_json_lists(places: int, listed: str) -> None:
    kept = tuple(Place(where=f"tensor {number}", what="is odd") for number in range(min(places, 100)))
    finding = Finding(
        defect="scale_zero", severity="wrong", places=kept, num_places=places, served="zeros", mend_by="requantize",
        mend="again", source="https://example.org",
    )  # fmt: skip
    out = Console(file=io.StringIO(), width=200)
    _print_finding(finding, out)
    assert isinstance(out.file, io.StringIO)
    assert f"  ... and {places - 5} more; --json lists {listed}\n" in out.file.getvalue()


def test_what_cannot_be_read_is_one_line(run: Run, tmp_path: Path) -> None:
    code, out, err = run("inspect", tmp_path)
    assert (code, out) == (2, "") and err.count("\n") == 1 and "has no config.json" in err


# ------------------------------------------------------------------------------------------------ GGUF
@pytest.fixture
def gguf_file(tmp_path: Path) -> Path:
    return write(tmp_path / "glm" / "GLM-4.5-Air-Q8_0.gguf", "glm4moe", small_keys(), small_shapes())


def test_gguf_files_are_inspected(run: Run, gguf_file: Path) -> None:
    for target in (gguf_file, gguf_file.parent):
        code, out, _ = run("inspect", target)
        assert code == 0 and out.startswith(f"{target}: glm4_moe, 4 layers, 4 experts, ") and "no defect found" in out
    assert "  method       GGUF, Q8_0\n  made by      Somebody\n" in out
    assert "  MTP          1 declared, 1 layers stored as F32, Q8_0\n" in out
    name = "blk.2.ffn_down_exps.weight"
    put(gguf_file, name, np.array([0x7E00], np.uint16))
    assert run("inspect", gguf_file)[0] == 0
    code, out, _ = run("inspect", gguf_file, "--deep")
    assert code == 1 and f"  {name}: 1 of 256 block scales are NaN or infinite (expert 0)\n" in out
    code, out, _ = run("inspect", gguf_file, "--deep", "--json")
    record = json.loads(out)
    assert (code, record["kind"], record["read"], record["facts"]["architecture"]) == (1, "inspection", "weights", "glm4moe")
    assert [(f["defect"], f["severity"], f["num_places"], f["mend_by"]) for f in record["findings"]] == [
        ("weight_not_finite", "wrong", 1, "requantize")
    ]


def test_gguf_that_is_none_or_cut_is_one_line(run: Run, gguf_file: Path) -> None:
    cut = gguf_file.with_name("cut.gguf")
    cut.write_bytes(gguf_file.read_bytes()[:1000])
    assert one_error(run("inspect", cut)) == (
        f"{cut}: is not a whole GGUF file (the file ends inside its header); download it again"
    )
    cut.write_text("# a model card\n")
    assert one_error(run("inspect", cut)) == f"{cut}: is not a whole GGUF file (GGUF magic invalid); download it again"
    assert one_error(run("inspect", gguf_file.parent)) == (
        f"{gguf_file.parent}: holds 2 GGUF models (GLM-4.5-Air-Q8_0.gguf and 1 more); give the file of one"
    )


def test_without_the_extra_one_line_says_how_to_install_it(
    run: Run, gguf_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    find_spec = importlib.util.find_spec

    def without_gguf(name: str, *words: Any) -> Any:
        return None if name == "gguf" else find_spec(name, *words)

    monkeypatch.setattr(importlib.util, "find_spec", without_gguf)
    assert one_error(run("inspect", gguf_file)) == (
        f"`assay inspect` needs gguf, which is not installed; install it with: {install_command('gguf')}"
    )


def test_a_repository_of_gguf_files_is_one_line(
    run: Run, gguf_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub = Hub(gguf_file.parent)
    hub.use(monkeypatch, tmp_path / "home")
    try:
        message = one_error(run("inspect", "org/model"))
    finally:
        hub.close()
    assert message == "org/model: GGUF is inspected in a folder only; download the files and give the folder"
