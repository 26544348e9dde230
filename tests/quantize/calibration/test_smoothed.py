"""Norms and routers that AWQ changes: nothing else is, and verification undoes the scales."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from calibrating import load_all, made_and_verified, plan_of
from command_errors import one_error
from command_line import Run
from tiny_checkpoints import make_tiny_glm4_moe
from tiny_families import deepseek_v3, glm4_moe, glm_moe_dsa, make_tiny, qwen3_moe, qwen3_next

from assay.errors import PlanError
from assay_quantize.plan.calibrated import OFFSET_NORMS, calibrated_tensors
from assay_quantize.verify.verify import verify

pytestmark = pytest.mark.slow

EXPERTS = """quantize: [routed_expert]
keep:
  source: [norm]
  bf16: [mtp, lm_head, embedding, router, indexer, attention, dense_mlp, shared_expert]
  fp32: [router_bias]
"""


@pytest.fixture(scope="module")
def smoothed(tmp_path_factory: pytest.TempPathFactory, source: Path, words: Path) -> Path:
    folder = tmp_path_factory.mktemp("smoothed")
    plan, result = made_and_verified(source, words, folder, "w4a16-awq", grid=3)
    assert result.damages == () and result.checks["calibrated"] == 3
    # in every layer two norms; where there are experts, the router as well
    names = [f"model.layers.{layer}.{norm}_layernorm.weight" for layer in range(3) for norm in ("input", "post_attention")]
    names += [f"model.layers.{layer}.mlp.gate.weight" for layer in (1, 2)]
    assert plan.calibrated is not None and sorted(plan.calibrated.smoothed) == sorted(names)
    # 6 norms and 2 routers
    assert (result.checks["rows"], result.checks["smoothed"]) == (45, 6 + 2)
    return folder / "made"


def test_awq_changes_norms_and_routers_and_nothing_else_that_is_kept(smoothed: Path, source: Path) -> None:
    stored, original = load_all(smoothed), load_all(source)
    assert {name for name in original if ".layers.3." in name} <= stored.keys()  # the MTP block
    assert {stored[n].dtype for n in original if n.endswith("e_score_correction_bias")} == {torch.float32}
    assert all(stored[name].dtype == original[name].dtype for name in stored.keys() & original.keys())
    changed = {name for name in stored.keys() & original.keys() if not torch.equal(stored[name], original[name])}
    assert {re.sub(r"\d+", "N", name) for name in changed} == {
        "model.layers.N.input_layernorm.weight", "model.layers.N.post_attention_layernorm.weight",
        "model.layers.N.mlp.gate.weight",
    }  # fmt: skip
    scale_I = (
        original["model.layers.1.post_attention_layernorm.weight"] / stored["model.layers.1.post_attention_layernorm.weight"]
    )
    router = original["model.layers.1.mlp.gate.weight"].float() * scale_I.float()
    torch.testing.assert_close(stored["model.layers.1.mlp.gate.weight"].float(), router, rtol=0.02, atol=1e-4)


@pytest.mark.parametrize(
    "name, check",
    [
        ("model.layers.1.post_attention_layernorm.weight", "smoothed"),
        ("model.layers.1.mlp.gate.weight", "smoothed"),
        ("model.layers.1.mlp.experts.0.up_proj.weight_packed", "error"),
        ("model.layers.1.mlp.experts.1.down_proj.weight_packed", "error"),
    ],
)
def test_another_layers_tensor_is_a_damage_under_awq(
    smoothed: Path, source: Path, tmp_path: Path, name: str, check: str
) -> None:  # fmt: skip
    """Even where the manifest is made to fit: hashes of files and digests of layers."""
    import shutil

    from assay.records.base import sha256_of_file
    from assay.records.manifest import MANIFEST
    from assay_quantize.checkpoint.headers import read_shard_header

    folder = tmp_path / "bad"
    shutil.copytree(smoothed, folder)
    headers = {n: h for path in sorted(folder.glob("*.safetensors")) for n, h in read_shard_header(folder, path.name).items()}
    here, other = headers[name], headers[name.replace(".layers.1.", ".layers.2.")]
    with (folder / other.shard).open("rb") as file:
        file.seek(other.begin)
        data = file.read(other.num_bytes)
    with (folder / here.shard).open("r+b") as file:
        file.seek(here.begin)
        file.write(data)
    manifest = json.loads((folder / MANIFEST).read_text())
    for entry in manifest["shards"]:
        entry["sha256"] = sha256_of_file(folder / entry["name"])
    (folder / MANIFEST).write_text(json.dumps(manifest))
    verification = {damage.check for damage in verify(folder, source=source).damages}
    assert {check, "calibrated"} <= verification


@pytest.mark.parametrize(
    ("extends", "quantize", "calibration", "changed"),
    [
        ("w4a16", "", "{method: awq+gptq, grid: 3}", {"input_layernorm", "post_attention_layernorm", "gate"}),
        ("w8a8", "", "{method: smoothquant}", {"input_layernorm", "post_attention_layernorm", "gate"}),
        # the shared experts read the norm and are not quantized: only up and down projections are scaled
        ("w4a16", EXPERTS, "{method: awq, grid: 3}", set()),
    ],
    ids=["awq+gptq", "smoothquant", "experts"],
)
def test_whatever_is_scaled_is_verified(
    tmp_path: Path, words: Path, extends: str, quantize: str, calibration: str, changed: set[str]
) -> None:
    source = make_tiny_glm4_moe(tmp_path / "model", num_layers=2, hidden=128, num_heads=2, num_kv_heads=1, num_experts=2)
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(f"schema: 1\nname: recipe\nextends: {extends}\n{quantize}calibration: {calibration}\n")
    _, result = made_and_verified(source, words, tmp_path, str(recipe))
    assert result.damages == () and result.checks["rows"] >= 6
    stored, original = load_all(tmp_path / "made"), load_all(source)
    kept = {name for name in stored.keys() & original.keys() if stored[name].dtype == original[name].dtype}
    others = {name for name in kept if not torch.equal(stored[name], original[name])}
    kinds = {name.split(".")[-2] for name in others}
    assert kinds <= changed and bool(kinds) is bool(changed)  # the best scales of a norm may be ones
    assert not any(".layers.2." in name for name in others)  # the MTP block


def test_a_norm_that_adds_one_is_not_scaled(tmp_path: Path) -> None:
    """Qwen3-Next multiplies by 1 + weight: of attention that reads the weight over s, nothing was left (an error of 1.4)."""
    source = make_tiny(tmp_path / "model", qwen3_next())
    scaled = [tensor for verification in calibrated_tensors(plan_of(source, "w4a16-awq")).values() for tensor in verification]
    assert {tensor.role for tensor in scaled if tensor.action != "quantize"} == set()
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("schema: 1\nname: recipe\nextends: w8a8\ncalibration: {method: smoothquant}\n")
    with pytest.raises(PlanError, match="smoothquant has nothing to scale"):
        calibrated_tensors(plan_of(source, str(recipe)))


@pytest.mark.parametrize("config", [glm4_moe(), qwen3_moe(), deepseek_v3(), glm_moe_dsa(), qwen3_next()])
def test_norms_that_add_one_are_known(config: dict[str, Any]) -> None:
    """Against what llm-compressor's `oneshot` exchanges while it calibrates."""
    from llmcompressor.modeling.offset_norm import NormCalibrationModule, _is_registered
    from transformers import AutoConfig, AutoModelForCausalLM

    model_type = config["model_type"]
    with torch.device("meta"):
        by_config: Any = AutoModelForCausalLM
        model = by_config.from_config(AutoConfig.for_model(**config))
    (kind,) = {type(module).__name__ for name, module in model.named_modules() if name.endswith(".input_layernorm")}
    assert (model_type in OFFSET_NORMS) is _is_registered(kind, NormCalibrationModule)


def test_scales_that_were_searched_are_along_the_source(tmp_path: Path, words: Path) -> None:
    """Under GPTQ with `observer: mse` they do not follow from the source; 15 % too large they are a damage still."""
    from safetensors.torch import load_file, save_file

    source = make_tiny_glm4_moe(tmp_path / "model", num_layers=1, hidden=128, num_heads=2, num_kv_heads=1)
    recipe, scale = tmp_path / "recipe.yaml", "model.layers.0.self_attn.q_proj.weight_scale"
    recipe.write_text("schema: 1\nname: recipe\nextends: w4a16\nobserver: mse\ncalibration: {method: gptq}\n")
    _, result = made_and_verified(source, words, tmp_path, str(recipe))
    assert result.damages == () and result.checks["rows"] == 7
    (path,) = (path for path in (tmp_path / "made").glob("*.safetensors") if scale in load_file(path))
    tensors = load_file(path)
    save_file(tensors | {scale: (tensors[scale].float() * 1.15).to(torch.bfloat16)}, path, {"format": "pt"})
    verification = verify(tmp_path / "made", source=source)
    assert ("scales", "model.layers.0.self_attn.q_proj.weight") in {
        (shard.check, shard.where) for shard in verification.damages
    }


def test_awq_of_two_schemes_behind_one_norm_is_refused(tmp_path: Path, words: Path, source: Path, run: Run) -> None:
    """llm-compressor's search would round one as the other, or end with an error."""
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        "schema: 1\nname: recipe\nextends: w4a16\nscheme: null\ncalibration: {method: awq}\n"
        "quantize: {attention: w4a16, dense_mlp: w4a16, shared_expert: w4a16_g32, routed_expert: w4a16_g64}\n"
    )
    error = one_error(run("quantize", source, "-p", recipe, "--text", words, "--out", tmp_path / "made"))
    assert error.startswith("precision recipe: AWQ scales model.layers.1.mlp.experts.0.gate_proj (w4a16_g64) and ")
    assert error.endswith(
        "together, as both read model.layers.1.post_attention_layernorm: give them one scheme, or say `method: gptq`"
    )
    assert not (tmp_path / "made").exists()
