"""NaN and infinity in what is copied or cast: an error, unless somebody asks for them; what they are, torch says."""

from __future__ import annotations

import json
import math
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from engine_sources import plan_for
from safetensors.torch import load_file, save_file

from assay.errors import QuantizeError
from assay.recipes.load import load_recipe, recipes_dir
from assay.recipes.precision import PrecisionRecipe
from assay_quantize.checkpoint.checkpoint import open_checkpoint
from assay_quantize.engine.quantize import quantize
from assay_quantize.formats.casting import count_not_finite
from assay_quantize.plan.planner import make_plan

SAFETENSORS_NAMES = {
    "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16", "float8_e5m2": "F8_E5M2",
    "float8_e4m3fn": "F8_E4M3", "float8_e8m0fnu": "F8_E8M0",
}  # fmt: skip
KEPT = {
    "model.norm.weight": "BF16",
    "model.embed_tokens.weight": "BF16",
    "model.layers.1.mlp.gate.weight": "BF16",
    "model.layers.1.mlp.gate.e_score_correction_bias": "F32",
    "model.layers.2.eh_proj.weight": "BF16",
}
"""Of every role that is copied one tensor."""


def spoilt(source: Path, folder: Path, name: str, value: float) -> Path:
    """A copy of `source` whose tensor `name` ends with `value`."""
    ours = Path(shutil.copytree(source, folder))
    shard = ours / json.loads((ours / "model.safetensors.index.json").read_text())["weight_map"][name]
    tensors = load_file(shard)
    tensors[name].view(-1)[-1] = value
    save_file(tensors, shard, metadata={"format": "pt"})
    return ours


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", KEPT)
def test_what_is_copied_is_finite_or_refused(source: Path, tmp_path: Path, name: str, value: float) -> None:
    ours, out = spoilt(source, tmp_path / "source", name, value), tmp_path / "out"
    plan = plan_for(ours, "w4a16")
    [kept] = [tensor for tensor in plan.tensors if tensor.name == name]
    assert (kept.action, kept.dtype) == ("keep", KEPT[name])
    with pytest.raises(QuantizeError, match=rf"^{re.escape(name)}: 1 of its values are NaN or infinite; .* --allow-not-finite"):
        quantize(plan, ours, out)
    made = quantize(plan, ours, out, allow_not_finite=True)
    assert [shard.not_finite for shard in made.shards if shard.not_finite] == [{name: 1}]
    shard = out / json.loads((out / "model.safetensors.index.json").read_text())["weight_map"][name]
    assert load_file(shard)[name].view(-1)[-1].isfinite().item() is False


def test_what_is_cast_is_finite_or_refused(source: Path, tmp_path: Path) -> None:
    ours = spoilt(source, tmp_path / "source", "model.layers.1.mlp.gate.weight", math.nan)
    text = (recipes_dir() / "precisions" / "w4a16.yaml").read_text()
    (tmp_path / "w4a16.yaml").write_text(text.replace(" router,", "").replace("[router_bias]", "[router_bias, router]"))
    recipe = load_recipe(PrecisionRecipe, str(tmp_path / "w4a16.yaml"))
    plan = make_plan(open_checkpoint(ours), recipe, model="m", family=None)
    assert {tensor.action for tensor in plan.tensors if tensor.role == "router"} == {"cast"}
    with pytest.raises(QuantizeError, match=r"^model\.layers\.1\.mlp\.gate\.weight: 1 of its values are NaN or infinite"):
        quantize(plan, ours, tmp_path / "out")


@pytest.mark.parametrize("dtype", SAFETENSORS_NAMES)
def test_not_finite_is_what_torch_says(dtype: str) -> None:
    """Every bit pattern of 8 and 16 bits, and of wider dtypes those whose upper 16 bits are each."""
    kind = getattr(torch, dtype)
    num_bytes, name = kind.itemsize, SAFETENSORS_NAMES[dtype]
    patterns = np.arange(1 << min(16, 8 * num_bytes), dtype=np.uint64) << np.uint64(max(0, 8 * num_bytes - 16))
    bits = patterns.astype(f"u{num_bytes}")
    values = torch.from_numpy(bits.view(np.uint8).copy()).view(kind)
    assert count_not_finite(bits, name) == int((~values.to(torch.float64).isfinite()).sum()) > 0
    assert count_not_finite(bits.view(np.uint8), name) == count_not_finite(bits, name)
    assert count_not_finite(np.full(100, 0xFF, np.uint8), "U8") == 0
