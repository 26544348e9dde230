"""`assay inspect`: what it prints, and its exit codes."""

from __future__ import annotations

import io
import json
from pathlib import Path

import numpy as np
import pytest
from command_line import Run
from published import compressed, is_expert, of_model, publish, put
from rich.console import Console

from assay.records.inspection import Finding, Place
from assay_cli.shown.inspection import _print_finding


def test_damaged_scales_are_named(run: Run, tmp_path: Path) -> None:
    ignore = ["lm_head", r"re:.*mlp\.gate$", "re:.*self_attn.*"]
    folder = publish(tmp_path / "w4a16", compressed(*of_model("qwen3-30b-a3b"), is_expert, ignore, "int4"))
    code, out, _ = run("inspect", folder)
    assert code == 0 and "no defect found" in out and "qwen3_moe, 4 layers, 4 experts" in out and "int_packed" in out
    names = [f"model.layers.1.mlp.experts.{expert}.up_proj.weight_scale" for expert in range(2)]
    for name in names:
        put(folder, name, np.full(768 * 16, 0x7FC0, np.uint16))
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
