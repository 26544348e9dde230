"""`verify` on freshly damaged copies. Unless a test is about hashes, the manifest's hashes are mended after the damage, so that
the check of the contents itself has to find it."""

from __future__ import annotations

import itertools
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_checkpoints import make_tiny_glm4_moe

from assay.errors import CheckpointError
from assay.recipes.load import load_recipe
from assay.recipes.precision import PrecisionRecipe
from assay.records.base import sha256_of_file
from assay.records.manifest import Manifest
from assay.records.verification import Verification
from assay_quantize.checkpoint.checkpoint import open_checkpoint
from assay_quantize.checkpoint.file_names import JOURNAL
from assay_quantize.engine.quantize import quantize
from assay_quantize.plan.planner import bytes_by_role, make_plan
from assay_quantize.verify.verify import verify

PRECISIONS = ("w4a16", "fp8", "nvfp4a16")
SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
INDEX, CONFIG, MANIFEST = "model.safetensors.index.json", "config.json", "assay_manifest.json"
Q0, Q1 = "model.layers.0.self_attn.q_proj", "model.layers.1.self_attn.q_proj"
EXPERT = "model.layers.1.mlp.experts.1"
MTP_EXPERT = "model.layers.2.mlp.experts.1.up_proj.weight"
BIAS = "model.layers.1.mlp.gate.e_score_correction_bias"


class Made(NamedTuple):
    source: Path
    folders: dict[str, Path]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    folder = tmp_path_factory.mktemp("verify")
    source = make_tiny_glm4_moe(folder / "source", num_layers=2, num_experts=2, hidden=128, dense_intermediate=128)
    for precision in PRECISIONS:
        plan = make_plan(open_checkpoint(source), load_recipe(PrecisionRecipe, precision), model="tiny", family=None)
        quantize(plan, source, folder / precision)
    return Made(source, {precision: folder / precision for precision in PRECISIONS})


class Copy:
    """A checkpoint to damage. Every change mends index and manifest, so that only the content is wrong."""

    def __init__(self, folder: Path, source: Path) -> None:
        self.folder, self.source = folder, source

    def tensors(self, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
        """Rewrite the shards with `change` applied to all tensors at once; each stays in its shard."""
        shard_of = {name: shard for shard in SHARDS for name in load_file(self.folder / shard)}
        tensors = {name: t.clone() for shard in SHARDS for name, t in load_file(self.folder / shard).items()}
        change(tensors)
        for shard in SHARDS:
            save_file({n: t for n, t in tensors.items() if shard_of[n] == shard}, self.folder / shard, {"format": "pt"})
        self.json(INDEX, lambda index: index["metadata"].update(total_size=sum(t.nbytes for t in tensors.values())))
        self.json(INDEX, lambda index: index.update(weight_map={n: shard_of[n] for n in sorted(tensors)}))

    def json(self, name: str, change: Callable[[dict[str, Any]], object]) -> None:
        data = json.loads((self.folder / name).read_text())
        change(data)
        (self.folder / name).write_text(json.dumps(data))
        self.mend()

    def mend(self) -> None:
        """Make the manifest agree with what lies in the folder."""
        manifest = json.loads((self.folder / MANIFEST).read_text())
        for shard in manifest["shards"]:
            path = self.folder / shard["name"]
            if path.exists():
                shard.update(num_bytes=path.stat().st_size, sha256=sha256_of_file(path))
        manifest["files"] = {name: sha256_of_file(self.folder / name) for name in manifest["files"]}
        (self.folder / MANIFEST).write_text(json.dumps(manifest))

    def verify(self, **options: Any) -> Verification:
        return verify(self.folder, source=self.source, **options)

    def damages(self, **options: Any) -> list[tuple[str, str, str]]:
        result = self.verify(**options)
        assert result.passed == (not result.damages)
        return [(damage.check, damage.where, damage.what) for damage in result.damages]


@pytest.fixture
def copy(made: Made, tmp_path: Path) -> Callable[[str], Copy]:
    def make(precision: str) -> Copy:
        shutil.copytree(made.folders[precision], tmp_path / precision)
        return Copy(tmp_path / precision, made.source)

    return make


# ------------------------------------------------------------------------------------------------ undamaged
@pytest.mark.parametrize("precision", PRECISIONS)
def test_an_undamaged_checkpoint_passes(made: Made, precision: str) -> None:
    result = verify(made.folders[precision], source=made.source)
    assert (result.passed, result.damages, result.not_checked) == (True, (), ())
    plan = make_plan(open_checkpoint(made.source), load_recipe(PrecisionRecipe, precision), model="tiny", family=None)
    quantized = [tensor for tensor in plan.tensors if tensor.action == "quantize"]
    assert result.checks["error"] == result.checks["weights"] == len(quantized)
    assert result.checks["kept"] == len(plan.tensors) - len(quantized)
    assert result.checks["tensors"] + result.checks["router_bias"] == sum(len(t.outputs) for t in plan.tensors)
    # dense gate/up; one expert layer of 2 experts and 1 shared expert; q/k/v of two layers
    assert result.checks.get("fused_scales", 0) == (1 + 3 + 2 if precision == "nvfp4a16" else 0)
    assert result.bytes_by_role == {role: bytes_out for role, (_, _, bytes_out) in bytes_by_role(plan).items()}
    low, high = {"w4a16": (0.10, 0.13), "fp8": (0.025, 0.029), "nvfp4a16": (0.09, 0.11)}[precision]
    assert set(result.mean_relative_error) == {"attention", "dense_mlp", "shared_expert", "routed_expert"}
    assert all(low < error < high for error in result.mean_relative_error.values())
    assert all(result.worst_relative_error[role] >= mean for role, mean in result.mean_relative_error.items())
    assert result.checkpoint_sha256 == Manifest.load(made.folders[precision] / MANIFEST).checkpoint_sha256


@pytest.mark.parametrize("precision", PRECISIONS)
def test_without_the_source_it_says_what_it_could_not_check(made: Made, precision: str) -> None:
    result = verify(made.folders[precision])
    assert (result.passed, result.damages) == (True, ())
    assert [text.partition(":")[0] for text in result.not_checked] == [
        "kept tensors against the source's bytes", "error of quantized weights",
        "tensors that are missing altogether, where no other tensor implies them",
    ]  # fmt: skip
    assert "kept" not in result.checks and "error" not in result.checks and result.mean_relative_error == {}


def test_a_card_beside_the_weights_is_fine_and_hashes_can_be_left_out(copy: Callable[[str], Copy]) -> None:
    damaged = copy("fp8")
    (damaged.folder / "README.md").write_text("card")
    assert damaged.damages() == []
    result = damaged.verify(hashes=False)
    assert "hashes" not in result.checks and result.not_checked == ("hashes: not asked for",)


# ------------------------------------------------------------------------------------------------ the damages of the contract
@pytest.mark.parametrize("with_source", [True, False])
def test_a_missing_mtp_expert(copy: Callable[[str], Copy], with_source: bool) -> None:
    damaged = copy("w4a16")
    damaged.tensors(lambda tensors: tensors.pop(MTP_EXPERT))
    if with_source:
        assert damaged.damages() == [
            ("tensors", MTP_EXPERT, f"is in no shard; planned: BF16 [128, 128] in {SHARDS[1]}"),
            ("mtp", MTP_EXPERT, "is missing from the MTP block: vLLM would load it and draft noise"),
        ]
    else:
        found = verify(damaged.folder).damages
        assert ("mtp", MTP_EXPERT) in [(damage.check, damage.where) for damage in found]


def test_an_mtp_block_that_is_missing_or_not_declared(copy: Callable[[str], Copy]) -> None:
    damaged = copy("fp8")
    damaged.json(CONFIG, lambda config: config.update(num_nextn_predict_layers=0))
    assert ("mtp", "model.layers.2", "holds an MTP block, but config.json declares 0 MTP layers") in damaged.damages()
    damaged.json(CONFIG, lambda config: config.update(num_nextn_predict_layers=1))
    damaged.tensors(lambda tensors: [tensors.pop(n) for n in list(tensors) if n.startswith("model.layers.2.")])
    what = "is declared in config.json (MTP), but no shard holds any tensor of it"
    assert ("mtp", "model.layers.2", what) in damaged.damages()


def test_a_shard_that_is_not_in_the_index(copy: Callable[[str], Copy]) -> None:
    damaged = copy("w4a16")
    damaged.json(INDEX, lambda index: index.update(weight_map={n: s for n, s in index["weight_map"].items() if s == SHARDS[0]}))
    assert damaged.damages() == [
        ("index", SHARDS[1], "is on disk, but the index puts no tensor in it: vLLM never reads it")
    ]  # fmt: skip


def test_an_index_that_disagrees_with_the_shards(copy: Callable[[str], Copy]) -> None:
    damaged = copy("w4a16")
    damaged.json(INDEX, lambda index: index["weight_map"].update({"lm_head.weight": SHARDS[0], "more.weight": SHARDS[0]}))
    damaged.json(INDEX, lambda index: index["weight_map"].pop("model.norm.weight"))
    shard = next(t for t in (SHARDS[1], SHARDS[0]) if "lm_head.weight" in load_file(damaged.folder / t))
    assert damaged.damages() == [
        ("index", "lm_head.weight", f"is in {shard}, the index says {SHARDS[0]}"),
        ("index", "more.weight", f"is in the index, but {SHARDS[0]} does not hold it"),
        ("index", "model.norm.weight", f"is in {SHARDS[1]}, but not in the index: vLLM loads it all the same"),
    ]


def test_a_truncated_shard(copy: Callable[[str], Copy]) -> None:
    damaged = copy("nvfp4a16")
    size = (damaged.folder / SHARDS[1]).stat().st_size
    with (damaged.folder / SHARDS[1]).open("r+b") as file:
        file.truncate(size - 1000)
    damaged.mend()
    assert damaged.damages()[0] == (
        "headers", SHARDS[1], f"truncated: {size} bytes expected, {size - 1000} there; download it again"
    )  # fmt: skip


@pytest.mark.parametrize(
    ("precision", "part"),
    [("w4a16", "weight_scale"), ("fp8", "weight_scale"), ("nvfp4a16", "weight_scale"), ("nvfp4a16", "weight_global_scale")],
)
@pytest.mark.parametrize(("value", "what"), [(float("nan"), "NaN or infinite"), (0.0, "zero"), (-1.0, "negative")])
def test_a_broken_scale(copy: Callable[[str], Copy], precision: str, part: str, value: float, what: str) -> None:
    damaged = copy(precision)
    name = f"{EXPERT}.down_proj.{part}"

    def break_one(tensors: dict[str, torch.Tensor]) -> None:
        scale = tensors[name].float()
        scale.view(-1)[0] = value
        tensors[name] = scale.to(tensors[name].dtype)

    damaged.tensors(break_one)
    (found,) = damaged.damages()
    assert found[:2] == ("scales", name)
    assert found[2].startswith("1 of ") and found[2].endswith(f"scales are {what}")


@pytest.mark.parametrize("with_source", [True, False])
def test_router_bias_in_bf16(copy: Callable[[str], Copy], with_source: bool) -> None:
    damaged = copy("fp8")
    damaged.tensors(lambda tensors: tensors.update({BIAS: tensors[BIAS].bfloat16()}))
    result = damaged.verify() if with_source else verify(damaged.folder)
    assert [tuple(damage.model_dump().values()) for damage in result.damages] == [
        ("router_bias", BIAS, "is BF16 [2]; planned: F32 [2]")
    ]


@pytest.mark.parametrize("name", ["model.norm.weight", "lm_head.weight", MTP_EXPERT, BIAS, "model.layers.1.mlp.gate.weight"])
def test_a_changed_kept_tensor(copy: Callable[[str], Copy], name: str) -> None:
    damaged = copy("w4a16")

    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors[name].view(-1).view(torch.uint8)[5] ^= 1  # the least change there is

    damaged.tensors(change)
    size = load_file(damaged.folder / SHARDS[0]) | load_file(damaged.folder / SHARDS[1])
    assert damaged.damages() == [
        ("kept", name, f"1 of {size[name].nbytes} bytes differ; it must be copied unchanged")
    ]  # fmt: skip


@pytest.mark.parametrize(
    "names",
    [
        (f"{EXPERT}.gate_proj", f"{EXPERT}.up_proj"),
        ("model.layers.1.mlp.shared_experts.gate_proj", "model.layers.1.mlp.shared_experts.up_proj"),
        (Q0, "model.layers.0.self_attn.k_proj"),
    ],
)
def test_global_scales_that_differ_in_a_fused_group(copy: Callable[[str], Copy], names: tuple[str, str]) -> None:
    damaged = copy("nvfp4a16")

    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors[f"{names[1]}.weight_global_scale"] *= 1.01  # within the error bound: only this check can see it

    damaged.tensors(change)
    by_bytes, found = damaged.damages()
    assert by_bytes[:2] == ("recomputed", f"{names[1]}.weight")
    (alone,) = verify(damaged.folder).damages
    assert alone.check == "fused_scales"
    assert found[0] == "fused_scales" and found[1].startswith(names[0].rpartition(".")[0])
    assert f"{names[1].rpartition('.')[2]} " in found[2] and "differ: " in found[2]


def replace_ignore(change: Callable[[list[str]], list[str]]) -> Callable[[dict[str, Any]], None]:
    def edit(config: dict[str, Any]) -> None:
        quantization = config["quantization_config"]
        quantization["ignore"] = change(quantization["ignore"])

    return edit


@pytest.mark.parametrize("with_source", [True, False])
def test_an_ignore_list_that_misses_eh_proj(copy: Callable[[str], Copy], with_source: bool) -> None:
    """The block's one pattern replaced by patterns for everything in it but eh_proj."""
    damaged = copy("w4a16")
    inside = r"re:.*layers\.2\.(self_attn|mlp|embed_tokens|shared_head|head).*$"
    damaged.json(CONFIG, replace_ignore(lambda ignore: [inside if "layers" in p else p for p in ignore]))
    result = damaged.verify() if with_source else verify(damaged.folder)
    assert [(damage.check, damage.where) for damage in result.damages] == [("ignore", "model.layers.2.eh_proj")]
    assert "is stored unquantized, but nothing in the ignore list covers it" in result.damages[0].what


def test_other_wrong_ignore_lists(copy: Callable[[str], Copy]) -> None:
    """Too much, too little, half of a fused module, and no pattern at all."""
    damaged = copy("w4a16")
    original = json.loads((damaged.folder / CONFIG).read_text())["quantization_config"]["ignore"]
    damaged.json(CONFIG, replace_ignore(lambda ignore: [*original, "re:.*mlp.gate"]))  # also hits gate_proj
    found = damaged.damages()
    dense = "model.layers.0.mlp.gate_proj"
    assert ("ignore", dense, "is quantized, but the ignore list covers it: 're:.*mlp.gate'") in found
    expects = "vLLM expects plain weights for it, stored are w4a16 ones"
    assert ("runtime", "model.layers.0.mlp.gate_up_proj", expects) in found
    damaged.json(CONFIG, replace_ignore(lambda ignore: [*original, Q0]))
    refused = "the ignore list covers only q_proj of model.layers.0.self_attn.qkv_proj; vLLM refuses to start"
    assert ("runtime", "model.layers.0.self_attn.qkv_proj", refused) in damaged.damages()
    damaged.json(CONFIG, replace_ignore(lambda ignore: []))
    missed = {where for check, where, _ in damaged.damages() if check == "runtime"}
    names = (
        "mlp.experts",
        "mlp.shared_experts.gate_up_proj",
        "mlp.shared_experts.down_proj",
        "self_attn.qkv_proj",
        "self_attn.o_proj",
    )
    assert missed == {f"model.layers.2.{name}" for name in names}
    damaged.json(CONFIG, replace_ignore(lambda ignore: [*original, "re:(unclosed"]))
    assert any(check == "ignore" and "is no pattern" in what for check, _, what in damaged.damages())


@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_quantized_weight_swapped_with_another_layers(copy: Callable[[str], Copy], precision: str) -> None:
    damaged = copy(precision)

    def swap(tensors: dict[str, torch.Tensor]) -> None:
        for name in [name for name in tensors if name.startswith(f"{Q0}.weight")]:
            other = name.replace(Q0, Q1)
            tensors[name], tensors[other] = tensors[other], tensors[name]

    damaged.tensors(swap)
    errors = [(check, where) for check, where, _ in damaged.damages() if check != "fused_scales"]
    assert errors == [("error", f"{Q0}.weight"), ("error", f"{Q1}.weight")]
    for what in (what for check, _, what in damaged.damages() if check == "error"):
        assert 1.3 < float(what.split()[1]) < 1.5


# ------------------------------------------------------------------------------------------------ more damages
def test_hashes_find_what_nothing_else_would(copy: Callable[[str], Copy]) -> None:
    damaged = copy("fp8")
    (damaged.folder / "tokenizer.json").write_text("{}")
    (found,) = damaged.damages()
    assert found[:2] == ("hashes", "tokenizer.json")
    damaged = copy("w4a16")
    data = bytearray((damaged.folder / SHARDS[0]).read_bytes())
    data[-3] ^= 1
    (damaged.folder / SHARDS[0]).write_bytes(data)
    assert [where for check, where, _ in damaged.damages() if check == "hashes"] == [SHARDS[0]]


def test_a_manifest_that_leads_out_of_the_folder(copy: Callable[[str], Copy], tmp_path: Path) -> None:
    damaged = copy("fp8")
    (damaged.folder.parent / "elsewhere.json").write_text("{}")
    manifest = damaged.folder / "assay_manifest.json"
    edited = json.loads(manifest.read_text())
    edited["files"]["../elsewhere.json"] = "0" * 64
    manifest.write_text(json.dumps(edited))
    assert ("hashes", "../elsewhere.json", "is a link that leads out of its folder; put the file itself there") in (
        damaged.damages()
    )


def test_files_that_are_missing_or_too_many(copy: Callable[[str], Copy]) -> None:
    damaged = copy("fp8")
    (damaged.folder / "pytorch_model.bin").write_bytes(b"pickle")
    assert damaged.damages() == [("files", "pytorch_model.bin", "holds weights, but the manifest does not know it")]
    (damaged.folder / "pytorch_model.bin").unlink()
    (damaged.folder / SHARDS[1]).unlink()
    found = damaged.damages()
    assert found[0] == ("index", SHARDS[1], "is in the index, but not on disk")
    assert ("files", SHARDS[1], "is in the manifest, but not on disk") in found
    assert ("tensors", "model.norm.weight", f"is in no shard; planned: BF16 [128] in {SHARDS[1]}") in found


def test_tensors_that_are_too_many_or_of_another_shape(copy: Callable[[str], Copy]) -> None:
    damaged = copy("fp8")

    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.norm.weight"] = tensors["model.norm.weight"].reshape(2, 64).contiguous()

    damaged.tensors(change)
    assert damaged.damages() == [("tensors", "model.norm.weight", "is BF16 [2, 64]; planned: BF16 [128]")]
    damaged = copy("w4a16")
    save_file({"extra.weight": torch.ones(2)}, damaged.folder / "model-extra.safetensors")
    found = [(check, where) for check, where, _ in damaged.damages()]
    assert found[-1] == ("tensors", "extra.weight") and ("index", "model-extra.safetensors") in found


def test_a_config_that_says_something_else(copy: Callable[[str], Copy]) -> None:
    damaged = copy("w4a16")
    damaged.json(CONFIG, lambda config: config.update(rope_theta=1.0))
    assert damaged.damages() == [("config", "config.json: rope_theta", "is 1.0; expected 10000.0")]
    damaged.json(CONFIG, lambda config: config.update(rope_theta=10000.0))

    def other_group_size(config: dict[str, Any]) -> None:
        config["quantization_config"]["config_groups"]["group_0"]["weights"]["group_size"] = 64

    damaged.json(CONFIG, other_group_size)
    assert [damage[:2] for damage in damaged.damages()] == [
        ("targets", "config.json: quantization_config.config_groups.group_0"),
        ("config", "config.json: quantization_config.config_groups"),
    ]
    damaged.json(CONFIG, lambda config: config.pop("quantization_config"))
    assert ("config", "config.json: quantization_config") in [damage[:2] for damage in damaged.damages()]
    (damaged.folder / CONFIG).write_text("{not json")
    damaged.mend()
    assert damaged.damages()[0][:2] == ("files", CONFIG)


def test_another_source(copy: Callable[[str], Copy], tmp_path: Path) -> None:
    """Same names and shapes, other weights: every tensor is wrong. Other shapes: the plan is."""
    checkpoint = copy("fp8")
    tiny = {"num_layers": 2, "num_experts": 2, "hidden": 128, "dense_intermediate": 128}
    checkpoint.source = make_tiny_glm4_moe(tmp_path / "seed", seed=1, **tiny)
    found = checkpoint.damages()
    assert {check for check, _, _ in found} == {"kept", "error"}
    checkpoint.source = make_tiny_glm4_moe(tmp_path / "shape", **tiny, moe_intermediate=256)
    found = checkpoint.damages()
    assert found[0][:2] == ("plan", MANIFEST) and "was made from another source or by another plan" in found[0][2]


def test_unfinished_and_absent(copy: Callable[[str], Copy], tmp_path: Path) -> None:
    damaged = copy("fp8")
    (damaged.folder / MANIFEST).unlink()
    not_ours = "is missing: nothing says that `assay quantize` made this checkpoint, and only what it made can be verified"
    assert damaged.damages() == [("manifest", MANIFEST, not_ours)]
    (damaged.folder / "config.json").unlink()
    (damaged.folder / JOURNAL).touch()
    unfinished = "is missing: quantization did not finish; run the same `assay quantize` again"
    assert damaged.damages()[0] == ("manifest", MANIFEST, unfinished)
    (tmp_path / "model").touch()
    with pytest.raises(CheckpointError, match="no such folder; give the folder of a quantized checkpoint"):
        verify(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match="model: is a file; give the folder of a quantized checkpoint"):
        verify(tmp_path / "model")
    with pytest.raises(CheckpointError, match="no such folder"):
        verify(damaged.folder, source=tmp_path / "nowhere")


def quantized_to_a_mix(source: Path, tmp_path: Path) -> Path:
    """A checkpoint with three config groups."""
    recipe = tmp_path / "mix.yaml"
    recipe.write_text(
        "schema: 1\nname: mix\n"
        "quantize: {attention: fp8_block, routed_expert: w4a16, shared_expert: w4a16, dense_mlp: nvfp4a16}\n"
        "keep: {bf16: [embedding, lm_head, norm, indexer, router, mtp], fp32: [router_bias]}\n"
    )
    plan = make_plan(open_checkpoint(source), load_recipe(PrecisionRecipe, str(recipe)), model="tiny", family=None)
    quantize(plan, source, folder := tmp_path / "made")
    return folder


def test_targets_that_are_exchanged_name_the_tensor_that_is_not_there(made: Made, tmp_path: Path) -> None:
    folder = quantized_to_a_mix(made.source, tmp_path)
    config = json.loads((folder / CONFIG).read_text())
    groups = config["quantization_config"]["config_groups"]
    names = {group["format"]: name for name, group in groups.items()}
    fp8, int4 = names["float-quantized"], names["pack-quantized"]
    groups[fp8]["targets"], groups[int4]["targets"] = groups[int4]["targets"], groups[fp8]["targets"]
    (folder / CONFIG).write_text(json.dumps(config))
    found = {damage.where: damage.what for damage in verify(folder, source=made.source).damages if damage.check == "definition"}
    up = "model.layers.1.mlp.shared_experts.up_proj"
    shard = json.loads((folder / INDEX).read_text())["weight_map"][f"{up}.weight_packed"]
    assert found[f"{up}.weight"] == (
        f"config.json has it in {fp8} (float-quantized), which reads {up}.weight; {shard} has no such tensor, only "
        "weight_packed, weight_scale; put back the config.json that `assay quantize` wrote, or quantize again into "
        "another folder"
    )


@pytest.mark.parametrize("what", ["targets", "weights", "format"])
def test_config_groups_that_are_exchanged(made: Made, tmp_path: Path, what: str) -> None:
    """Weights are then read by a scheme that they are not stored in: assertions, of ours and of compressed-tensors."""
    source, folder = made.source, quantized_to_a_mix(made.source, tmp_path)
    config = json.loads((folder / "config.json").read_text())
    for first, second in itertools.combinations(config["quantization_config"]["config_groups"], 2):
        changed = json.loads(json.dumps(config))
        groups = changed["quantization_config"]["config_groups"]
        groups[first][what], groups[second][what] = groups[second][what], groups[first][what]
        (folder / "config.json").write_text(json.dumps(changed))
        for with_source in (None, source):
            found = verify(folder, source=with_source)
            assert found.damages and not found.passed
