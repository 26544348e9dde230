"""Every row of the table is found where it is planted, and only there; facts; the page that is written from the table."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hollow_moe
import numpy as np
import pytest
import torch
from inspect_page import PAGE, with_table
from published import (
    Published,
    Tensors,
    change_json,
    compressed,
    defects_of,
    fp8_blocks,
    gptq,
    is_expert,
    is_linear,
    modelopt_nvfp4,
    of_model,
    plain,
    publish,
    put,
)
from tiny_checkpoints import make_tiny_glm4_moe, read_shards, write_shards

from assay.errors import CheckpointError
from assay.recipes.load import load_recipe
from assay.recipes.precision import PrecisionRecipe
from assay.records.inspection import MtpFacts, StoredForm
from assay_quantize.checkpoint.checkpoint import open_checkpoint
from assay_quantize.engine.quantize import quantize
from assay_quantize.inspection.defects import DEFECTS
from assay_quantize.inspection.errors import Distance
from assay_quantize.inspection.files import FolderFiles
from assay_quantize.inspection.inspect import inspect
from assay_quantize.plan.planner import make_plan

INDEX = "model.safetensors.index.json"
EXCLUDE = ["lm_head", "*.mlp.gate", "*.self_attn.*"]
IGNORE = ["lm_head", r"re:.*mlp\.gate$", "re:.*self_attn.*"]


def qwen3(**changes: Any) -> tuple[dict[str, Any], Any]:
    config, tensors = of_model("qwen3-30b-a3b")
    return {**config, **changes}, tensors


def reshaped(tensors: Any, name: str, shape: tuple[int, ...], dtype: str = "BF16") -> Any:
    assert name in tensors
    return {**tensors, name: (dtype, shape)}


# ------------------------------------------------------------------------------------------------ planted in headers and config
def vocabulary() -> Published:
    config, tensors = qwen3()
    return plain(config, reshaped(tensors, "lm_head.weight", (config["vocab_size"] + 64, config["hidden_size"])))


def width() -> Published:
    config, tensors = qwen3()
    name = "model.layers.1.mlp.experts.2.up_proj.weight"
    return plain(config, reshaped(tensors, name, (config["moe_intermediate_size"], config["hidden_size"] + 128)))


def dense() -> Published:
    config, tensors = of_model("glm-4.5-air", dense=1)
    return plain({**config, "first_k_dense_replace": 3}, tensors)


def without(*parts: str) -> Published:
    config, tensors = qwen3()
    return plain(config, {name: told for name, told in tensors.items() if not any(part in name for part in parts)})


def with_more(**more: tuple[str, tuple[int, ...]]) -> Published:
    config, tensors = qwen3()
    return plain(config, {**tensors, **{name.replace("__", "."): told for name, told in more.items()}})


def undeclared_mtp() -> Published:
    config, tensors = of_model("glm-4.5-air", dense=1)
    return plain({**config, "num_nextn_predict_layers": 0}, tensors)


def mtp_without_experts() -> Published:
    config, tensors = of_model("glm-4.5-air", dense=1)
    return plain(config, {name: told for name, told in tensors.items() if ".layers.4.mlp.experts.2." not in name})


def mtp_without_projection() -> Published:
    config, tensors = of_model("glm-4.5-air", dense=1)
    return plain(config, {name: told for name, told in tensors.items() if "eh_proj" not in name})


def claimed_only() -> Published:
    config, tensors = qwen3()
    claim = compressed(config, tensors, is_expert, IGNORE, "int4").config
    return plain(claim, tensors)


def pattern() -> Published:
    return compressed(*qwen3(), is_expert, [*IGNORE, "re:(unclosed"], "int4")


def other_form() -> Published:
    published = compressed(*qwen3(), is_expert, IGNORE, "nvfp4")
    published.config["quantization_config"] = compressed(*qwen3(), is_expert, IGNORE, "int4").config["quantization_config"]
    return published


def packed_projection() -> Published:
    config, tensors = of_model("glm-4.5-air", dense=1)
    return fp8_blocks(config, tensors, lambda name: name.endswith("_proj.weight"))


def some_members() -> Published:
    config, tensors = qwen3()
    return gptq(config, tensors, lambda name: is_linear(name) and name != "model.layers.2.self_attn.k_proj.weight")


def misshapen_scale() -> Published:
    published = modelopt_nvfp4(*qwen3(), is_expert, EXCLUDE)
    name = "model.layers.0.mlp.experts.0.up_proj.weight_scale"
    return published._replace(tensors=reshaped(published.tensors, name, (768, 64), "F8_E4M3"))


def half_precision() -> Published:
    return plain(*qwen3(dtype="float16", torch_dtype="float16"))


PLANTED: dict[str, tuple[Callable[[], Published], dict[str, list[str]]]] = {
    "vocabulary_rows": (vocabulary, {"vocabulary_rows": ["lm_head"]}),
    "width_unlike_config": (width, {
        "width_unlike_config": ["model.layers.1.mlp.experts.2.up_proj"],
        "expert_shapes_differ": ["model.layers.1.mlp.experts.*.up_proj"],
    }),
    "dense_layers": (dense, {"dense_layers": ["layer 1", "layer 2"]}),
    "layers_missing": (lambda: without(".layers.2."), {"layers_missing": ["layers 2"]}),
    "experts_missing": (lambda: without("layers.1.mlp.experts.3.", "layers.2.mlp.experts.0.down_proj"), {
        "experts_missing": ["model.layers.1.mlp.experts", "model.layers.2.mlp.experts"],
    }),
    "tensors_missing": (lambda: without("layers.3.self_attn.q_norm", "model.norm.weight"), {
        "tensors_missing": ["self_attn.q_norm.weight", "model.norm.weight"],
    }),
    "unknown_tensor": (lambda: with_more(model__layers__0__mlp__router__weight=("BF16", (4, 2048))), {
        "unknown_tensor": ["model.layers.0.mlp.router.weight"],
    }),
    "dtype_disagrees": (half_precision, {"dtype_disagrees": ["config.json: dtype"]}),
    "mtp_undeclared": (undeclared_mtp, {"mtp_undeclared": ["model.layers.4.eh_proj.weight"]}),
    "mtp_experts_missing": (mtp_without_experts, {"mtp_experts_missing": ["model.layers.4.mlp.experts"]}),
    "mtp_incomplete": (mtp_without_projection, {"mtp_incomplete": ["model.layers.4.eh_proj.weight"]}),
    "declared_not_stored": (claimed_only, {"declared_not_stored": ["config.json: quantization_config"]}),
    "pattern_invalid": (pattern, {"pattern_invalid": ["config.json: quantization_config"]}),
    "other_form": (other_form, {"other_form": [f"model.layers.{layer}.mlp.experts" for layer in range(4)]}),
    "unquantizable_quantized": (packed_projection, {"unquantizable_quantized": ["model.layers.4.eh_proj"]}),
    "fused_members_differ": (some_members, {
        "fused_members_differ": ["model.layers.2.self_attn.qkv_proj"],
        "fused_partly_listed": ["model.layers.2.self_attn.qkv_proj"],
    }),
    "scale_shape": (misshapen_scale, {"scale_shape": ["model.layers.0.mlp.experts.0.up_proj"]}),
}  # fmt: skip
"""Defect -> what has it, and everything that is found."""


@pytest.mark.parametrize("defect", PLANTED)
def test_what_headers_and_config_show(tmp_path: Path, defect: str) -> None:
    make, expected = PLANTED[defect]
    assert defects_of(publish(tmp_path / "planted", make())) == expected


def test_experts_stacked_under_names_of_their_family_are_known(tmp_path: Path) -> None:
    """Granite stores `block_sparse_moe.input_linear.weight` [experts, 2I, H]."""
    config = hollow_moe.small("granitemoe")
    shapes = hollow_moe.MODELS["granitemoe"].shapes(config)
    stacked: Tensors = {name: ("BF16", shape) for name, shape in shapes if ".experts." not in name}
    experts, inner, hidden = config["num_local_experts"], config["intermediate_size"], config["hidden_size"]
    num_layers = config["num_hidden_layers"]
    for layer in range(num_layers):
        stacked[f"model.layers.{layer}.block_sparse_moe.input_linear.weight"] = ("BF16", (experts, 2 * inner, hidden))
        stacked[f"model.layers.{layer}.block_sparse_moe.output_linear.weight"] = ("BF16", (experts, hidden, inner))
    folder = publish(tmp_path / "granite", plain(config, stacked))
    assert defects_of(folder) == {}
    forms = {form.role: (form.num_weights, form.layers) for form in inspect(FolderFiles(folder)).facts.forms}
    assert forms["routed_expert"] == (2 * num_layers, f"0-{num_layers - 1}")


def test_of_a_wrapper_its_own_word_ties_the_head(tmp_path: Path) -> None:
    config, whole_tensors = of_model("qwen3.5-35b-a3b")
    rows = {
        name: ("BF16", (64, shape[1]))
        for name, (_, shape) in whole_tensors.items()
        if name.endswith(("lm_head.weight", "embed_tokens.weight"))
    }
    tensors = whole_tensors | rows
    for outer, inner, expected in ((False, True, {}), (True, False, {"tied_head_stored": ["lm_head"]})):
        text = {**config["text_config"], "tie_word_embeddings": inner, "vocab_size": 64}
        folder = publish(tmp_path / str(outer), plain({**config, "text_config": text, "tie_word_embeddings": outer}, tensors))
        put(folder, "lm_head.weight", np.ones(math.prod(tensors["lm_head.weight"][1]), np.uint16))
        assert defects_of(folder) == expected


def whole(folder: Path) -> Path:
    return publish(folder, compressed(*qwen3(), is_expert, IGNORE, "int4"))


def test_shards_and_index(tmp_path: Path) -> None:
    shard = "model-00002-of-00002.safetensors"
    for number, (expected, change) in enumerate((
        ({"shard_unreadable": [shard], "layers_missing": ["layers 2-3"]}, lambda path: (path / shard).write_bytes(b"\0" * 64)),
        ({"index_unreadable": [INDEX]}, lambda path: (path / INDEX).write_text("{")),
        ({"index_absent": [INDEX]}, lambda path: (path / INDEX).unlink()),
        ({"file_unreadable": ["generation_config.json"]}, lambda path: (path / "generation_config.json").write_text("[]")),
        ({"extra_weights": ["pytorch_model.bin"]}, lambda path: (path / "pytorch_model.bin").write_bytes(b"")),
        ({"total_size": [INDEX]}, lambda path: change_json(path / INDEX, metadata={"total_size": 8_900_000_000_000})),
    )):  # fmt: skip
        folder = whole(tmp_path / str(number))
        change(folder)
        assert defects_of(folder) == expected
    folder = whole(tmp_path / "unindexed")
    index = json.loads((folder / INDEX).read_text())
    del index["weight_map"]["model.norm.weight"]
    (folder / INDEX).write_text(json.dumps(index))
    assert defects_of(folder) == {"unindexed_tensor": ["model.norm.weight"]}


def test_notes_alone_are_no_defect(tmp_path: Path) -> None:
    folder = whole(tmp_path / "whole")
    (folder / "additional_chat_templates").mkdir()
    (folder / "README.md").write_text("# nothing")
    (folder / "chat_template.jinja").unlink()
    size = json.loads((folder / INDEX).read_text())["metadata"]["total_size"]
    change_json(folder / INDEX, metadata={"total_size": size + 1})
    result = inspect(FolderFiles(folder))
    notes = {finding.defect for finding in result.findings}
    assert notes == {"total_size_off", "chat_template_absent", "chat_templates_folder", "licence_absent", "base_model_absent"}
    assert result.is_clean
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).unlink()
    assert {"tokenizer_absent"} == {finding.defect for finding in inspect(FolderFiles(folder)).findings} - notes


# ------------------------------------------------------------------------------------------------ planted in the data
def test_scales_that_cannot_be_scales(tmp_path: Path) -> None:
    folder = whole(tmp_path / "whole")
    name = "model.layers.1.mlp.experts.0.gate_proj.weight_scale"
    ones = np.full(768 * 16, 0x3F80, np.uint16)
    for defect, bits in {"scale_not_finite": 0x7FC0, "scale_zero": 0, "scale_negative": 0xBF80}.items():
        put(folder, name, np.where(np.arange(768 * 16) == 77, np.uint16(bits), ones))
        assert defects_of(folder) == {defect: [name]}


def test_what_describes_codes(tmp_path: Path) -> None:
    folder = whole(tmp_path / "packed")
    put(folder, "model.layers.1.mlp.experts.0.gate_proj.weight_shape", np.array([768, 1024], np.int64))
    assert defects_of(folder) == {"packed_shape_wrong": ["model.layers.1.mlp.experts.0.gate_proj.weight_shape"]}
    folder = publish(tmp_path / "gptq", gptq(*qwen3(), is_linear))
    name = "model.layers.1.mlp.experts.0.gate_proj"
    put(folder, f"{name}.qzeros", np.full(16 * 96, 0x8888_8888, np.uint32))
    put(folder, f"{name}.g_idx", np.full(2048, 16, np.int32))
    assert defects_of(folder) == {"zero_points_wrong": [f"{name}.qzeros"], "column_order_wrong": [f"{name}.g_idx"]}


def test_a_shard_without_data_is_not_taken_for_zeros(tmp_path: Path) -> None:
    folder = publish(tmp_path / "hollow", compressed(*qwen3(), is_expert, IGNORE, "int4"), scales=False)
    result = inspect(FolderFiles(folder))
    assert result.findings == ()
    assert "values: 2 shards have headers and no data (nothing was ever written to them)" in result.not_checked


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """(base, its W4A16)."""
    folder = tmp_path_factory.mktemp("w4a16")
    base = make_tiny_glm4_moe(folder / "base", num_layers=2, num_experts=2, hidden=128, dense_intermediate=128)
    plan = make_plan(open_checkpoint(base), load_recipe(PrecisionRecipe, "w4a16"), model="tiny", family=None)
    quantize(plan, base, folder / "made")
    return base, folder / "made"


def changed(made: Path, folder: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> Path:
    """A copy of a checkpoint with other data."""
    tensors = {name: tensor for of_shard in read_shards(made).values() for name, tensor in of_shard.items()}
    change(tensors)
    folder.mkdir()
    for path in made.iterdir():
        if path.suffix != ".safetensors" and path.name != INDEX:
            (folder / path.name).write_bytes(path.read_bytes())
    write_shards(folder, {"model.safetensors": tensors})
    return folder


EXPERT = "model.layers.1.mlp.experts.{}.up_proj.{}"


def test_weights_and_the_base(made: tuple[Path, Path], tmp_path: Path) -> None:
    base, quantized = made
    router, norm, bias = (
        "model.layers.1.mlp.gate.weight",
        "model.norm.weight",
        "model.layers.1.mlp.gate.e_score_correction_bias",
    )
    eh_proj = "model.layers.2.eh_proj.weight"
    assert defects_of(quantized, source=base, weights=True) == {}

    def swap(tensors: dict[str, torch.Tensor]) -> None:
        for part in ("weight_packed", "weight_scale"):
            tensors[EXPERT.format(0, part)] = tensors[EXPERT.format(1, part)].clone()

    def scale_row(tensors: dict[str, torch.Tensor]) -> None:
        tensors[EXPERT.format(1, "weight_scale")][5] *= 3

    def zero_router(tensors: dict[str, torch.Tensor]) -> None:
        tensors[router].zero_()

    def nan_norm(tensors: dict[str, torch.Tensor]) -> None:
        tensors[norm][3] = torch.nan

    def lose(tensors: dict[str, torch.Tensor]) -> None:
        del tensors["model.layers.1.self_attn.q_norm.weight"]

    def narrow(tensors: dict[str, torch.Tensor]) -> None:
        tensors[bias] = tensors[bias].bfloat16()

    def cut(tensors: dict[str, torch.Tensor]) -> None:
        tensors[eh_proj] = tensors[eh_proj][:, :128].half().contiguous()

    for number, (change, expected) in enumerate((
        (swap, {"error_beyond_format": ["model.layers.1.mlp.experts.0.up_proj.weight"]}),
        (scale_row, {"error_beyond_format": ["model.layers.1.mlp.experts.1.up_proj.weight"]}),
        (zero_router, {"weight_all_zero": [router], "kept_tensor_differs": [router]}),
        (nan_norm, {"weight_not_finite": [norm], "kept_tensor_differs": [norm]}),
        (lose, {"tensor_lost": ["model.layers.1.self_attn.q_norm.weight"]}),
        (narrow, {"router_bias_in_16_bits": [bias]}),
        (cut, {"shape_unlike_base": ["model.layers.2.eh_proj"]}),
    )):  # fmt: skip
        folder = changed(quantized, tmp_path / str(number), change)
        found = defects_of(folder, source=base, weights=True)
        assert found == expected


def test_a_base_in_32_bits(tmp_path: Path) -> None:
    tiny = {"num_layers": 2, "num_experts": 2, "hidden": 128, "dense_intermediate": 128, "mtp": False}
    base = make_tiny_glm4_moe(tmp_path / "base", dtype="fp32", **tiny)  # type: ignore[arg-type]
    folder = changed(base, tmp_path / "own", lambda t: t.update({"model.norm.weight": t["model.norm.weight"].bfloat16()}))
    assert defects_of(folder, source=base) == {"narrowed": ["model.norm.weight"]}


def test_a_tied_head_with_values_of_its_own(tmp_path: Path) -> None:
    """https://github.com/Blaizzy/mlx-vlm/issues/459"""
    tiny = {"num_layers": 2, "num_experts": 2, "hidden": 128, "dense_intermediate": 128, "mtp": False}
    folder = make_tiny_glm4_moe(tmp_path / "tied", **tiny)  # type: ignore[arg-type]
    change_json(folder / "config.json", tie_word_embeddings=True)
    assert defects_of(folder) == {"tied_head_stored": ["lm_head"]}
    same = changed(folder, tmp_path / "same", lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}))
    assert defects_of(same) == {}


def test_files_that_are_not_the_base_s(made: tuple[Path, Path], tmp_path: Path) -> None:
    base, quantized = made
    folder = changed(quantized, tmp_path / "other", lambda tensors: None)
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer, indent=3))  # another text of the same tokenizer
    assert defects_of(folder, source=base) == {}
    tokenizer["added_tokens"] = tokenizer["added_tokens"][:-1]
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    change_json(folder / "config.json", rope_theta=1e6)
    assert defects_of(folder, source=base) == {
        "tokenizer_unlike_base": ["tokenizer.json"], "chat_template_unlike_base": ["chat_template.jinja"],
        "config_unlike_base": ["config.json: rope_theta"],
    }  # fmt: skip


def test_scaled_columns_are_no_error() -> None:
    """AWQ and SmoothQuant multiply columns, and rows, by factors of their own."""
    torch.manual_seed(0)
    base = torch.randn(64, 256)
    factors = 0.5 + torch.rand(256)
    for own in (base * factors, base * (0.5 + torch.rand(64))[:, None]):
        distance = Distance(4, False, 128)
        distance.add(own + 0.02 * torch.randn(64, 256), base)
        assert distance.problem() is None
    distance = Distance(4, False, 128)
    distance.add(base[torch.randperm(64)], base)
    assert distance.problem() is not None and "weights of another are 1.41" in str(distance.problem())


# ------------------------------------------------------------------------------------------------ facts, table, page
def test_what_it_is(tmp_path: Path) -> None:
    config, tensors = of_model("glm-4.5-air", dense=1)
    mlps = [name for name in tensors if is_expert(name) and ".layers.4." not in name]
    exclude = ["lm_head", "*.self_attn.*", "*.mlp.gate", "model.layers.4*", "*shared_experts*", "model.layers.0.mlp*"]
    facts = inspect(
        FolderFiles(publish(tmp_path / "made", modelopt_nvfp4(config, tensors, lambda n: n in mlps, exclude)))
    ).facts
    assert (facts.family, facts.num_layers, facts.num_experts) == ("glm4_moe", 4, 4)
    assert (facts.method, facts.producer) == ("modelopt, NVFP4", "modelopt 0.39.0")
    assert facts.mtp == MtpFacts(declared=1, stored=1, form="bf16")
    assert (facts.base_model, facts.licence, facts.kv_cache) == ("someone/model", "mit", None)
    (experts,) = [form for form in facts.forms if form.role == "routed_expert"]
    elements = 36 * 1408 * 4096
    num_bytes = elements // 2 + elements // 16 + 36 * 8
    assert experts == StoredForm(
        role="routed_expert", form="nvfp4", layers="1-3", num_weights=36, num_elements=elements, num_bytes=num_bytes
    )
    assert facts.num_elements == sum(int(np.prod(shape)) for _, shape in tensors.values())


def test_every_defect_is_planted_somewhere() -> None:
    """A row of the table without a test that finds it is no row."""
    text = "".join(path.read_text() for path in Path(__file__).parent.glob("test_*.py"))
    keys = [defect.key for defect in DEFECTS]
    assert len(set(keys)) == len(keys)
    assert [key for key in keys if f'"{key}"' not in text] == []


def test_the_page_has_the_table() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert page == with_table(page), "run python tests/support/pages/inspect_page.py"


def test_what_cannot_be_inspected(tmp_path: Path) -> None:
    for name, content in (("empty", {}), ("old", {"config.json": "{}", "pytorch_model.bin": ""})):
        folder = tmp_path / name
        folder.mkdir()
        for file, text in content.items():
            (folder / file).write_text(text)
        with pytest.raises(CheckpointError, match=r"has no config\.json|only pytorch_model.bin"):
            inspect(FolderFiles(folder))
