"""Checkpoints made of what other tools left: without a lost MTP block, with all chat templates, of ModelOpt's FP8."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from engine_sources import TINY, bytes_of, plan_for
from tiny_checkpoints import make_tiny_glm4_moe, read_shards, store_as_fp8, write_shards

from assay.records.manifest import Manifest
from assay.records.verification import Verification
from assay_quantize.checkpoint.checkpoint import open_checkpoint
from assay_quantize.engine.quantize import quantize
from assay_quantize.verify.verify import verify

TEMPLATE = "additional_chat_templates/tool_use.jinja"


def made(source: Path, out: Path, precision: str, **changes: str) -> tuple[Manifest, Verification]:
    return quantize(plan_for(source, precision, **changes), source, out), verify(out, source=source)


def damages(result: Verification) -> list[tuple[str, str]]:
    return [(damage.check, damage.where) for damage in result.damages]


def test_a_block_that_was_lost_is_declared_no_more_and_every_template_is_copied(tmp_path: Path) -> None:
    """https://github.com/modelscope/ms-swift/issues/9802; templates as transformers stores several:
    https://github.com/huggingface/transformers/pull/36588."""
    source = make_tiny_glm4_moe(tmp_path / "source", **TINY)
    kept = {name: tensor for file in read_shards(source).values() for name, tensor in file.items() if ".layers.2." not in name}
    for path in source.glob("*.safetensors*"):
        path.unlink()
    write_shards(source, {"model.safetensors": kept})
    (source / TEMPLATE).parent.mkdir()
    (source / TEMPLATE).write_text("{{ tools }}")
    (source / "additional_chat_templates" / "notes.txt").write_text("not a template")
    (source / "additional_chat_templates" / "away.jinja").symlink_to("/etc/hostname")
    (source / "other").mkdir()
    (source / "other" / "x.jinja").write_text("elsewhere")
    manifest, result = made(source, tmp_path / "out", "w4a16", mtp="drop")
    assert (result.passed, damages(result)) == (True, [])
    assert json.loads((tmp_path / "out" / "config.json").read_text())["num_nextn_predict_layers"] == 0
    assert sorted(manifest.files) == [
        TEMPLATE, "config.json", "generation_config.json", "model.safetensors.index.json", "tokenizer.json",
        "tokenizer_config.json",
    ]  # fmt: skip
    assert (tmp_path / "out" / TEMPLATE).read_text() == "{{ tools }}"
    (tmp_path / "out" / TEMPLATE).write_text("{{ other }}")
    (tmp_path / "out" / "additional_chat_templates" / "rag.jinja").write_text("{{ documents }}")
    shutil.copytree(tmp_path / "out" / "additional_chat_templates", tmp_path / "out" / "templates")
    assert damages(verify(tmp_path / "out")) == [
        ("hashes", TEMPLATE), ("files", "additional_chat_templates/rag.jinja"), ("files", "templates"),
    ]  # fmt: skip


def test_modelopts_block_scales_and_scales_of_the_kv_cache(tmp_path: Path) -> None:
    """FP8_PB_WO has scales [rows, 1, columns, 1] (https://github.com/vllm-project/vllm/issues/50617) and k_scale beside k_proj
    (https://github.com/vllm-project/vllm/issues/35656): every byte that is made is that of the same weights stored plainly."""
    source = make_tiny_glm4_moe(tmp_path / "source", **TINY)
    plain = store_as_fp8(source, tmp_path / "plain", leaf="weight_scale")
    modelopt = shutil.copytree(plain, tmp_path / "modelopt")
    files = read_shards(plain)
    for tensors in files.values():
        for name in list(tensors):
            if name.endswith(".weight_scale"):
                tensors[name] = tensors[name][:, None, :, None].contiguous()
            if name.endswith((".k_proj.weight", ".v_proj.weight")):
                module, kind = name.removesuffix(".weight"), name.split(".")[-2][0]
                tensors[f"{module}.{kind}_scale"] = torch.tensor(0.5)
    write_shards(modelopt, files)
    assert open_checkpoint(modelopt).notes == (
        "33 scales of blocks are [rows, 1, columns, 1], as ModelOpt's FP8_PB_WO writes them; they are read as 2-D",
        "6 scales of the KV cache (model.layers.0.self_attn.k_proj.k_scale, ...) are left out: they were measured for the "
        "checkpoint as it is; `kv_cache: fp8_calibrated` of a precision measures new ones",
    )
    for precision in ("w4a16", "fp8"):  # rounded anew; kept with its scales
        expected, out = tmp_path / f"plain-{precision}", tmp_path / f"modelopt-{precision}"
        made(plain, expected, precision)
        _, result = made(modelopt, out, precision)
        assert (result.passed, damages(result)) == (True, [])
        assert bytes_of(out) == bytes_of(expected)
