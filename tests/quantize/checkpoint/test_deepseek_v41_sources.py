"""Sources as DeepSeek-V4.1 and DeepSeek-V4 with images are published: tables in FP8 by rows, a tower, biases for images."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import hollow
import hollow_deepseek_v4
import hollow_deepseek_v41
import hollow_moe
import pytest
import torch
from deepseek_v4_checkpoints import published_and_plain
from hollow_parts import Config
from stored_checkpoints import opened
from tiny_checkpoints import random_tensors, read_shards, write_json, write_shards

from assay.errors import PlanError
from assay.recipes.load import load_recipe
from assay.recipes.precision import PrecisionRecipe
from assay.recipes.text_config import changing_text
from assay.records.plan import Plan
from assay_quantize.checkpoint.checkpoint import open_checkpoint
from assay_quantize.checkpoint.native import foreign_quantization
from assay_quantize.engine.quantize import quantize
from assay_quantize.inspection.files import FolderFiles
from assay_quantize.inspection.inspect import inspect
from assay_quantize.plan.planner import make_plan
from assay_quantize.plan.stored import stored_by
from assay_quantize.verify.verify import verify

TABLE = "layers.1.engram.embed"


def plan_of(source: Path, precision: str) -> Plan:
    return make_plan(open_checkpoint(source), load_recipe(PrecisionRecipe, precision), model="tiny", family=None)


def stored(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for tensors in read_shards(folder).values() for name, tensor in tensors.items()}


def v41() -> Config:
    config = hollow_moe.small("deepseek_v41")
    narrow = {"num_hidden_layers": 1, "hidden_size": 64, "num_attention_heads": 2, "intermediate_size": 96}
    return {**config, "vision_config": {**config["vision_config"], **narrow}}


def v4_with_images() -> Config:
    return {
        **hollow_deepseek_v4.cut_to(hollow_deepseek_v41.V4_VISION, 3), "hidden_size": 256, "vocab_size": 512,
        "max_position_embeddings": 4096, "moe_intermediate_size": 128, "n_routed_experts": 4, "num_attention_heads": 2,
        "num_experts_per_tok": 2, "o_groups": 2, "o_lora_rank": 128, "q_lora_rank": 128, "vision_n_layers": 1,
        "vision_dim": 64, "vision_n_heads": 2, "vision_inter_dim": 96,
    }  # fmt: skip


SHAPES = {"v4.1": hollow_deepseek_v41.deepseek_v41_shapes, "v4 with images": hollow_deepseek_v41.v4_vision_shapes}
BLOCKS = {"v4.1": 32, "v4 with images": 128}
FAMILIES = {"v4.1": "deepseek_v41", "v4 with images": "deepseek_v4"}


@pytest.fixture(scope="module", params=SHAPES)
def sources(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path, Path]:
    """(which, a small model as it is published, the BF16 checkpoint that it stands for)."""
    which, folder = request.param, tmp_path_factory.mktemp("sources")
    config = v41() if which == "v4.1" else v4_with_images()
    tensors = random_tensors(dict(SHAPES[which](config)), 0, torch.bfloat16)
    published, plain = published_and_plain(tensors, BLOCKS[which])
    quantization = hollow_deepseek_v41.V41_QUANTIZATION if which == "v4.1" else hollow_deepseek_v4.QUANTIZATION
    # of the decoded one the tables alone are left in FP8
    of_plain = {"quantization_config": {**quantization, "weight_block_size": [1, 32]}} if which == "v4.1" else {}
    for place, whole, every in (
        ("published", {**config, "quantization_config": quantization}, published), ("plain", {**config, **of_plain}, plain),
    ):  # fmt: skip
        (folder / place).mkdir()
        write_json(folder / place / "config.json", whole)
        write_shards(folder / place, {"model.safetensors": every})
    return which, folder / "published", folder / "plain"


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["w4a16-g32", "fp8-channel"])
def test_the_release_gives_the_checkpoint_of_the_weights_it_stands_for(
    sources: tuple[str, Path, Path], tmp_path: Path, precision: str
) -> None:
    made: list[dict[str, torch.Tensor]] = []
    for number, source in enumerate(sources[1:]):
        folder = tmp_path / str(number)
        quantize(plan_of(source, precision), source, folder)
        assert verify(folder, source=source).damages == verify(folder).damages == ()
        made.append(stored(folder))
    assert made[0].keys() == made[1].keys()
    assert all(torch.equal(tensor.view(torch.uint8), made[1][name].view(torch.uint8)) for name, tensor in made[0].items())


def test_tables_tower_and_biases_keep_their_bytes(sources: tuple[str, Path, Path], tmp_path: Path) -> None:
    which, published, _ = sources
    plan = plan_of(published, "w4a16-g32")
    quantize(plan, published, tmp_path / "made")
    before, after = stored(published), stored(tmp_path / "made")
    starts, ends = ("vision.", "aligner.", "image_", f"{TABLE}."), (".bias_vl", ".gate.bias", ".tid2eid")
    kept = {name for name in before if name.startswith(starts) or name.endswith(ends)}
    assert Counter(name.rpartition(".")[2] for name in kept if "gate" in name) == (
        {"bias": 7, "bias_vl": 7} if which == "v4.1" else {"bias": 3, "bias_vl": 3, "tid2eid": 1}
    )
    assert (f"{TABLE}.scale" in kept) == (which == "v4.1")
    assert len([name for name in kept if name.startswith(("vision.", "aligner.", "image_"))]) == (18 if which == "v4.1" else 19)
    for name in kept:
        assert after[name].dtype == before[name].dtype
        assert torch.equal(after[name].view(torch.uint8), before[name].view(torch.uint8)), name
    quantized = Counter(tensor.part for tensor in plan.tensors if tensor.scheme is not None)
    layers = 7 if which == "v4.1" else 3
    assert quantized == {"attention": 4 * layers, "shared_expert": 3 * layers, "routed_expert": 12 * layers}
    assert sum(weight.num_bytes for weight in stored_by(plan).weights) == plan.bytes_out


@pytest.mark.slow
def test_experts_in_mxfp4_keep_their_bytes(sources: tuple[str, Path, Path], tmp_path: Path) -> None:
    _, published, _ = sources
    plan = plan_of(published, "mxfp4")
    carried = [tensor for tensor in plan.tensors if tensor.dtype == "FP4"]
    assert {tensor.action for tensor in carried} == {"keep"}
    quantize(plan, published, tmp_path / "made")
    assert verify(tmp_path / "made", source=published).damages == ()
    before, after = stored(published), stored(tmp_path / "made")
    for tensor in carried:
        assert torch.equal(after[f"{tensor.module}.weight_packed"], before[tensor.name].view(torch.uint8))
        assert torch.equal(after[f"{tensor.module}.weight_scale"], before[f"{tensor.module}.scale"].view(torch.uint8))


def test_every_weight_of_the_release_is_read_by_itself(sources: tuple[str, Path, Path]) -> None:
    """As `assay screen` reads it: what the BF16 checkpoint has, and the tables."""
    which, published, plain = sources
    read, as_published = opened(published), stored(published)
    for name, tensor in stored(plain).items():
        if name.startswith(f"{TABLE}."):
            continue
        if name.endswith(".weight") and tensor.dim() == 2:
            assert torch.equal(read.read_weight(name).to(torch.bfloat16), tensor), name
    if which == "v4.1":
        scale = as_published[f"{TABLE}.scale"].float().repeat_interleave(32, 1)
        assert torch.equal(read.read_weight(f"{TABLE}.weight"), as_published[f"{TABLE}.weight"].float() * scale)


def test_the_release_is_a_source_and_healthy(sources: tuple[str, Path, Path], tmp_path: Path) -> None:
    which, published, _ = sources
    assert foreign_quantization(open_checkpoint(published, allow_quantized=True)) is None
    found = inspect(FolderFiles(published), weights=True)
    assert (found.facts.family, [finding.defect for finding in found.findings]) == (FAMILIES[which], ["tokenizer_absent"])
    quantize(plan_of(published, "w4a16-g32"), published, tmp_path / "made")
    found = inspect(FolderFiles(tmp_path / "made"), source=FolderFiles(published), weights=True)
    assert [finding.defect for finding in found.findings] == ["tokenizer_absent"]


def test_damage_to_a_table_is_found(sources: tuple[str, Path, Path], tmp_path: Path) -> None:
    which, published, _ = sources
    if which != "v4.1":
        return
    quantize(plan_of(published, "w4a16-g32"), published, tmp_path / "made")
    for leaf in ("weight", "scale"):
        header = open_checkpoint(tmp_path / "made", allow_quantized=True).tensors[f"{TABLE}.{leaf}"]
        with (tmp_path / "made" / header.shard).open("r+b") as file:
            file.seek(header.begin + 5)
            byte = file.read(1)[0]
            file.seek(header.begin + 5)
            file.write(bytes([byte ^ 1]))
    damages = verify(tmp_path / "made", source=published, hashes=False).damages
    assert {damage.where for damage in damages} == {f"{TABLE}.weight", f"{TABLE}.scale"}


def test_counts_are_those_of_the_published_index() -> None:
    """DeepSeek-V4-Flash-Vision-Exp: 67,658 tensors of the language model, 267 of the tower (without its draft)."""
    config = hollow_deepseek_v41.V4_VISION
    _, shapes, _ = hollow_deepseek_v41.v4_vision_published(config, hollow_deepseek_v41.v4_vision_shapes(config))
    counted = Counter(name.startswith(("vision.", "aligner.", "image_")) for name, _ in shapes)
    assert counted == {False: 67_658, True: 267}


def test_the_draft_of_v41_is_left_out_or_refused(tmp_path: Path) -> None:
    """Three stages with experts in another number, and heads behind the last (DSpark)."""
    cut = hollow_moe.cut("deepseek_v41")
    config = changing_text(cut, lambda text: {**text, "num_nextn_predict_layers": 3, "dspark_n_routed_experts": 3})
    config, shapes, dtypes = hollow_deepseek_v41.deepseek_v41_published(config, hollow_deepseek_v41.deepseek_v41_shapes(config))
    source = hollow.write_hollow(tmp_path / "v41", config, shapes, shards=1, dtypes=dtypes)
    with pytest.raises(PlanError) as caught:
        plan_of(source, "w4a16")
    assert str(caught.value) == (
        f"{source}: mtp.0.main_proj.weight is of a DSpark draft, which is not kept; leave it out with `--mtp drop`"
    )
    plan = plan_of(source, "w4a16-nomtp")
    assert {tensor.action for tensor in plan.tensors if tensor.name.startswith("mtp.")} == {"drop"}
    assert [finding.defect for finding in inspect(FolderFiles(source)).findings] == ["tokenizer_absent"]
