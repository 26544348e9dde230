"""The engine: bytes, resume after kill -9, refusals, what is copied, other dtypes, MTP kept, quantized and dropped."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from kernel_cases import relative_error
from killed_runs import killed_at
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tiny_checkpoints import make_tiny_glm4_moe
from transformers import AutoConfig

from assay.errors import QuantizeError
from assay.recipes.load import load_recipe
from assay.recipes.precision import PrecisionRecipe
from assay.records.manifest import Manifest, ShardRecord
from assay.records.plan import Plan
from assay_quantize.checkpoint.checkpoint import open_checkpoint
from assay_quantize.checkpoint.file_names import JOURNAL
from assay_quantize.engine.local_runner import run_local
from assay_quantize.engine.quantize import is_complete, quantize
from assay_quantize.kernels.reference import dequantize_weight
from assay_quantize.plan.planner import make_plan
from assay_quantize.verify.verify import verify

TINY: dict[str, Any] = {"num_layers": 2, "num_experts": 2, "hidden": 128, "dense_intermediate": 128}
COPIED = {"generation_config.json", "tokenizer.json", "tokenizer_config.json"}
SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")


def plan_for(source: Path, precision: str, **changes: Any) -> Plan:
    recipe = load_recipe(PrecisionRecipe, precision).model_copy(update=changes)
    return make_plan(open_checkpoint(source), recipe, model="tiny", family=None)


def contents(folder: Path) -> dict[str, str]:
    """File -> SHA-256, but of the manifest only what is not a time."""
    found = {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in sorted(folder.iterdir()) if p.suffix != ".partial"}
    if "assay_manifest.json" in found:
        manifest = Manifest.load(folder / "assay_manifest.json")
        found["assay_manifest.json"] = json.dumps([s.model_dump(exclude={"seconds"}) for s in manifest.shards])
    return found


class Made(NamedTuple):
    source: Path
    plans: dict[str, Plan]
    folders: dict[str, Path]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """A source and one undisturbed checkpoint of each precision."""
    folder = tmp_path_factory.mktemp("quantize")
    source = make_tiny_glm4_moe(folder / "source", **TINY)
    plans = {name: plan_for(source, name) for name in ("w4a16", "fp8", "nvfp4a16")}
    for name, plan in plans.items():
        quantize(plan, source, folder / name)
    return Made(source, plans, {name: folder / name for name in plans})


# ------------------------------------------------------------------------------------------------ what comes out
@pytest.mark.parametrize("precision", ["w4a16", "fp8", "nvfp4a16"])
def test_the_folder_is_what_was_planned(made: Made, precision: str) -> None:
    plan, folder = made.plans[precision], made.folders[precision]
    assert {p.name for p in folder.iterdir()} == {
        *SHARDS, *COPIED, "config.json", "model.safetensors.index.json", "assay_manifest.json"
    }  # fmt: skip
    stored = {}
    for shard in SHARDS:
        with safe_open(folder / shard, framework="pt") as file:  # the library's own reader
            assert file.metadata() == {"format": "pt"}
            for name in file.keys():  # noqa: SIM118
                stored[name] = (file.get_slice(name).get_dtype(), tuple(file.get_slice(name).get_shape()), shard)
    assert stored == {o.name: (o.dtype, tuple(o.shape), t.shard_out) for t in plan.tensors for o in t.outputs}
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert index == {
        "metadata": {"total_size": plan.bytes_out},
        "weight_map": {name: stored[name][2] for name in sorted(stored)},
    }
    config = json.loads((folder / "config.json").read_text())
    quantization = config.pop("quantization_config")
    assert config == json.loads((made.source / "config.json").read_text())
    assert (quantization["quant_method"], quantization["quantization_status"]) == ("compressed-tensors", "compressed")
    assert quantization["ignore"] == list(plan.ignore)
    manifest = Manifest.load(folder / "assay_manifest.json")
    assert {s.name: s.sha256 for s in manifest.shards} | manifest.files == {
        p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in folder.iterdir() if p.name != "assay_manifest.json"
    }
    assert (manifest.bytes_in, manifest.bytes_out) == (plan.bytes_in, plan.bytes_out)


@pytest.mark.parametrize("precision", ["w4a16", "fp8", "nvfp4a16"])
def test_recorded_errors_are_those_of_the_stored_weights(made: Made, precision: str) -> None:
    folder, plan = made.folders[precision], made.plans[precision]
    source = {n: t for f in made.source.glob("*.safetensors") for n, t in load_file(f).items()}
    stored = {n: t for f in folder.glob("*.safetensors") for n, t in load_file(f).items()}
    recorded = {n: e for s in Manifest.load(folder / "assay_manifest.json").shards for n, e in s.relative_error.items()}
    assert sorted(recorded) == sorted(t.name for t in plan.tensors if t.action == "quantize")
    for tensor in plan.tensors:
        if tensor.action == "quantize":
            assert tensor.scheme is not None
            parts = {o.name.rpartition(".")[2]: stored[o.name] for o in tensor.outputs}
            back = dequantize_weight(parts, tensor.scheme, torch.bfloat16)
            assert recorded[tensor.name] == pytest.approx(relative_error(back, source[tensor.name]), rel=1e-4)
        else:
            assert torch.equal(stored[tensor.name], source[tensor.name])


def test_a_second_call_returns_at_once(made: Made) -> None:
    folder = made.folders["fp8"]
    before = {p.name: p.stat().st_mtime_ns for p in folder.iterdir()}
    assert is_complete(made.plans["fp8"], folder) and not is_complete(made.plans["w4a16"], folder)
    seen: list[tuple[str, int]] = []
    manifest = quantize(made.plans["fp8"], made.source, folder, on_progress=lambda name, size: seen.append((name, size)))
    assert manifest == Manifest.load(folder / "assay_manifest.json")
    assert seen == [] and {p.name: p.stat().st_mtime_ns for p in folder.iterdir()} == before


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["fp16", "fp32"])
@pytest.mark.parametrize("precision", ["w4a16", "fp8", "nvfp4a16"])
def test_other_source_dtypes(tmp_path: Path, dtype: str, precision: str) -> None:
    source = make_tiny_glm4_moe(tmp_path / "source", dtype=dtype, mtp=False, **TINY)
    plan = plan_for(source, precision)
    quantize(plan, source, tmp_path / "out")
    result = verify(tmp_path / "out", source=source)
    assert result.damages == () and result.passed
    casts = {t.name for t in plan.tensors if t.action == "cast"}
    assert "model.embed_tokens.weight" in casts and "lm_head.weight" in casts
    stored = {n: t for f in (tmp_path / "out").glob("*.safetensors") for n, t in load_file(f).items()}
    original = {n: t for f in source.glob("*.safetensors") for n, t in load_file(f).items()}
    assert torch.equal(stored["lm_head.weight"], original["lm_head.weight"].bfloat16())
    assert stored["model.layers.1.mlp.gate.e_score_correction_bias"].dtype == torch.float32


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["w4a16_asym", "fp8_channel", "mxfp4", "mxfp8", "w8a8"])
def test_the_other_schemes_go_through_and_verify(made: Made, tmp_path: Path, scheme: str) -> None:
    quantize(plan_for(made.source, "w4a16", scheme=scheme), made.source, tmp_path / "out")
    assert verify(tmp_path / "out", source=made.source).damages == ()
    assert verify(tmp_path / "out").damages == ()


# ------------------------------------------------------------------------------------------------ MTP
def test_mtp_quantized_but_for_eh_proj(made: Made, tmp_path: Path) -> None:
    plan = plan_for(made.source, "nvfp4a16", mtp="quantize")
    quantize(plan, made.source, tmp_path / "out")
    assert verify(tmp_path / "out", source=made.source).damages == ()
    assert verify(tmp_path / "out").damages == ()
    stored = {n: t for f in (tmp_path / "out").glob("*.safetensors") for n, t in load_file(f).items()}
    assert stored["model.layers.2.eh_proj.weight"].dtype == torch.bfloat16
    assert stored["model.layers.2.mlp.experts.1.up_proj.weight_packed"].dtype == torch.uint8


def test_mtp_dropped_and_the_config_says_so(made: Made, tmp_path: Path) -> None:
    plan = plan_for(made.source, "w4a16", mtp="drop")
    quantize(plan, made.source, tmp_path / "out")
    assert verify(tmp_path / "out", source=made.source).damages == ()
    assert verify(tmp_path / "out").damages == ()
    assert json.loads((tmp_path / "out" / "config.json").read_text())["num_nextn_predict_layers"] == 0
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert [name for name in index["weight_map"] if name.startswith("model.layers.2.")] == []


def test_mtp_in_a_file_of_its_own_goes_into_the_index(tmp_path: Path) -> None:
    source = make_tiny_glm4_moe(tmp_path / "source", mtp_file=True, **TINY)
    plan = plan_for(source, "fp8")
    quantize(plan, source, tmp_path / "out")
    assert verify(tmp_path / "out", source=source).damages == ()
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())["weight_map"]
    assert {shard for name, shard in index.items() if name.startswith("model.layers.2.")} == {
        "model-00003-of-00003.safetensors"
    }


# ------------------------------------------------------------------------------------------------ killed
MOMENTS = {
    "in the first shard": ("tensor", 20, 0),
    "before the second shard's rename": ("rename", 2, 1),
    "in the second shard": ("tensor", 60, 0),
    "before the index": ("rename", 6, 2),
    "before the manifest": ("rename", 8, 2),
}
"""When -> (what is counted, which one kills, shards surely finished by then: one may be waiting for its fsync)."""


@pytest.fixture(scope="module")
def killed(made: Made, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Moment -> the folder of a process killed (-9) at it."""
    moments = {moment: (kind, count) for moment, (kind, count, _) in MOMENTS.items()}
    return killed_at(moments, made.plans["nvfp4a16"], made.source, tmp_path_factory.mktemp("killed"))


@pytest.mark.slow
@pytest.mark.parametrize("moment", MOMENTS)
def test_killed_and_run_again_is_bit_identical(made: Made, killed: dict[str, Path], moment: str) -> None:
    """kill -9, then the same call: nothing finished is made again, and the folder is that of an undisturbed run."""
    plan, out, finished = made.plans["nvfp4a16"], killed[moment], MOMENTS[moment][2]
    whole = sorted(p.name for p in out.glob("*.safetensors"))
    assert finished <= len(whole) <= finished + (moment == "in the second shard")
    assert not (out / "assay_manifest.json").exists()
    if moment != "before the manifest":  # there, all that a loader reads is in place and whole
        assert not (out / "config.json").exists() and not (out / "model.safetensors.index.json").exists()
        with pytest.raises((OSError, ValueError), match=r"config\.json"):  # what vLLM and transformers ask for first
            AutoConfig.from_pretrained(out)
    entries = [json.loads(line) for line in (out / JOURNAL).read_text().splitlines()]
    journaled = sorted(entry["name"] for entry in entries if "name" in entry)
    assert journaled == whole or moment == "in the second shard"  # there, the kill may come between rename and journal
    before = {name: (out / name).stat().st_ino for name in journaled}
    seen: list[tuple[str, int]] = []
    quantize(plan, made.source, out, on_progress=lambda name, size: seen.append((name, size)))
    assert {name: (out / name).stat().st_ino for name in journaled} == before, "a finished shard was made again"
    checked = sorted(name for name, _ in seen if name.endswith("(done before)"))
    assert checked == [f"{name} (done before)" for name in journaled]
    assert sum(size for _, size in seen) == plan.bytes_in
    assert contents(out) == contents(made.folders["nvfp4a16"])
    assert sorted(p.name for p in out.iterdir()) == sorted(p.name for p in made.folders["nvfp4a16"].iterdir())


def interrupted(made: Made, out: Path, precision: str = "w4a16") -> None:
    """A run that stopped after its first shard."""

    def first_only(plan: Plan, names: Sequence[str], *rest: Any) -> Generator[ShardRecord, None, None]:
        yield from run_local(plan, names[:1], *rest)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        quantize(made.plans[precision], made.source, out, runner=first_only)
    assert (out / JOURNAL).exists()


def test_a_torn_journal_line_and_a_spoilt_shard_are_made_again(made: Made, tmp_path: Path) -> None:
    out = tmp_path / "out"
    interrupted(made, out)
    with (out / JOURNAL).open("ab") as journal:
        journal.write('{"name": "modèle'.encode()[:-3])  # inside a character
    data = bytearray((out / SHARDS[0]).read_bytes())
    data[-1] ^= 1
    (out / SHARDS[0]).write_bytes(data)
    quantize(made.plans["w4a16"], made.source, out)
    assert contents(out) == contents(made.folders["w4a16"])


def test_resume_with_another_recipe_or_source_names_both(made: Made, tmp_path: Path) -> None:
    out = tmp_path / "out"
    interrupted(made, out)
    ours, other = made.plans["w4a16"].recipe_sha256[:12], made.plans["fp8"].recipe_sha256[:12]
    with pytest.raises(
        QuantizeError, match=rf"begun with recipe w4a16 {ours}, now asked for fp8 {other}; go on with the first"
    ):
        quantize(made.plans["fp8"], made.source, out)
    source = make_tiny_glm4_moe(tmp_path / "other", **TINY, moe_intermediate=256)
    plan = plan_for(source, "w4a16")
    one, two = made.plans["w4a16"].source_sha256[:12], plan.source_sha256[:12]
    with pytest.raises(QuantizeError, match=rf"begun with source {made.source} {one}, now asked for {source} {two}"):
        quantize(plan, source, out)
    assert (out / SHARDS[0]).exists()


@pytest.mark.parametrize("kind", ["link", "pipe", "folder", "noise"])
def test_what_stands_in_place_of_the_journal(made: Made, tmp_path: Path, kind: str) -> None:
    """A folder from elsewhere must not make us write through a link, or wait for a pipe."""
    out, journal, victim = tmp_path / "out", tmp_path / "out" / JOURNAL, tmp_path / "victim"
    out.mkdir()
    victim.write_text("precious")
    if kind == "link":
        journal.symlink_to(victim)
    elif kind == "pipe":
        os.mkfifo(journal)
    elif kind == "folder":
        journal.mkdir()
    else:
        journal.write_bytes(b"[" * 100_000 + b"\n\xff\x00{]\n")
    if kind == "noise":  # no line of it is ours: a run that was killed before its first
        quantize(made.plans["w4a16"], made.source, out)
        assert contents(out) == contents(made.folders["w4a16"])
    else:
        expected = {
            "link": "is a link, not a journal that assay wrote",
            "pipe": "is not a regular file",
            "folder": "Is a directory",
        }[kind]
        with pytest.raises((QuantizeError, IsADirectoryError), match=expected):
            quantize(made.plans["w4a16"], made.source, out)
    assert victim.read_text() == "precious"


def test_two_processes_in_one_folder(made: Made, tmp_path: Path) -> None:
    out = tmp_path / "out"
    interrupted(made, out)
    with (out / JOURNAL).open("a") as journal:
        fcntl.flock(journal, fcntl.LOCK_EX)
        with pytest.raises(QuantizeError, match="another process is quantizing into it"):
            quantize(made.plans["w4a16"], made.source, out)


# ------------------------------------------------------------------------------------------------ refused
def test_a_folder_with_something_else_is_left_alone(made: Made, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(QuantizeError, match=r"not empty \(it holds notes\.txt\) and not begun by assay; give an empty folder"):
        quantize(made.plans["w4a16"], made.source, tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["notes.txt"] and (tmp_path / "notes.txt").read_text() == "mine"
    with pytest.raises(QuantizeError, match=r"notes\.txt: is a file"):
        quantize(made.plans["w4a16"], made.source, tmp_path / "notes.txt")
    with pytest.raises(QuantizeError, match=r"holds a finished checkpoint of another plan \(recipe fp8 .* asked for w4a16"):
        quantize(made.plans["w4a16"], made.source, made.folders["fp8"])


def test_a_finished_folder_that_lost_a_shard(made: Made, tmp_path: Path) -> None:
    shutil.copytree(made.folders["fp8"], tmp_path / "out")
    (tmp_path / "out" / SHARDS[1]).unlink()
    with pytest.raises(QuantizeError, match=rf"{SHARDS[1]} is missing or has another size; delete the folder"):
        quantize(made.plans["fp8"], made.source, tmp_path / "out")


def test_a_full_disk_is_found_before_the_first_byte(made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Usage(NamedTuple):
        free: int

    plan = made.plans["w4a16"]
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage((64 << 20) + plan.bytes_out - 1))
    with pytest.raises(
        QuantizeError,
        match=r"out: [\d.]+ [kM]B are still to be written, 67\.1 MB must stay free, and 6[78]\.\d MB are free on its disk",
    ):
        quantize(plan, made.source, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage((64 << 20) + 2 * plan.bytes_out))
    quantize(plan, made.source, tmp_path / "out")


def test_a_disk_that_fills_up_while_writing(made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out, fsync = tmp_path / "out", os.fsync

    def full(handle: int) -> None:
        if SHARDS[1] in os.readlink(f"/proc/self/fd/{handle}"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        fsync(handle)

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(QuantizeError, match=rf"{SHARDS[1]}: cannot be written: No space left on device; finished shards stay"):
        quantize(made.plans["fp8"], made.source, out)
    assert sorted(p.name for p in out.iterdir()) == sorted([JOURNAL, SHARDS[0]])
    monkeypatch.undo()
    quantize(made.plans["fp8"], made.source, out)
    assert contents(out) == contents(made.folders["fp8"])


def edited(source: Path, out: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> Path:
    shutil.copytree(source, out)
    for path in sorted(out.glob("*.safetensors")):
        tensors = load_file(path)
        change(tensors)
        save_file(tensors, path, metadata={"format": "pt"})
    return out


def test_a_source_that_is_not_finite_or_not_the_planned_one(made: Made, tmp_path: Path) -> None:
    name = "model.layers.0.self_attn.o_proj.weight"

    def spoil(tensors: dict[str, torch.Tensor]) -> None:
        if name in tensors:
            tensors[name][1, 2] = float("nan")

    spoilt = edited(made.source, tmp_path / "spoilt", spoil)
    with pytest.raises(QuantizeError, match=rf"{name}: 1 of 32768 weights are NaN or infinite; the source is damaged"):
        quantize(plan_for(spoilt, "w4a16"), spoilt, tmp_path / "out")
    other = make_tiny_glm4_moe(tmp_path / "other", **TINY, moe_intermediate=256)
    with pytest.raises(QuantizeError, match="its data is not what the plan was made of"):
        quantize(made.plans["w4a16"], other, tmp_path / "out2")


# ------------------------------------------------------------------------------------------------ copied files
def test_code_and_links_that_lead_out_are_not_copied(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    source = make_tiny_glm4_moe(tmp_path / "source", **TINY)
    (tmp_path / "secret.txt").write_text("outside")
    (source / "modeling_tiny.py").write_text("raise SystemExit")
    (source / "README.md").write_text("the source's card")
    (source / "LICENSE").write_text("licence")
    (source / "inside.txt").symlink_to("LICENSE")
    (source / "outside.txt").symlink_to(tmp_path / "secret.txt")
    (source / "pytorch_model.bin").write_bytes(b"pickle")
    for name in ("params.json", "hf_quant_config.json"):  # vLLM would take the first one for the model's config
        (source / name).write_text("{}")
    quantize(plan_for(source, "fp8"), source, tmp_path / "out")
    assert set(Manifest.load(tmp_path / "out" / "assay_manifest.json").files) == {
        *COPIED, "LICENSE", "inside.txt", "config.json", "model.safetensors.index.json"
    }  # fmt: skip
    assert not (tmp_path / "out" / "inside.txt").is_symlink()
    for name in ("modeling_tiny.py is not copied: it is code", "outside.txt is not copied: it is a link that leads out"):
        assert name in caplog.text
    assert verify(tmp_path / "out", source=source).damages == ()


def test_a_hugging_face_cache_entry_may_link_to_its_blobs(tmp_path: Path) -> None:
    snapshot = tmp_path / "models--x--y" / "snapshots" / "abc"
    make_tiny_glm4_moe(snapshot, **TINY)
    blobs = tmp_path / "models--x--y" / "blobs"
    blobs.mkdir()
    for path in list(snapshot.iterdir()):
        path.rename(blobs / path.name)
        path.symlink_to(Path("../../blobs") / path.name)
    quantize(plan_for(snapshot, "fp8"), snapshot, tmp_path / "out")
    assert set(Manifest.load(tmp_path / "out" / "assay_manifest.json").files) >= COPIED
