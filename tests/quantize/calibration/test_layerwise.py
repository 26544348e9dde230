"""Layers calibrated one by one are the same, whoever was killed meanwhile, and end in a checkpoint that is verified."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from calibrating import LENGTH, SEQUENCES, load_all, made_and_verified, plan_of
from command_line import Run
from tiny_checkpoints import decompressed_int4, dequantized, make_tiny_glm4_moe, store_as_fp8, store_as_int4
from tiny_families import deepseek_v3, glm4_moe, glm_moe_dsa, make_tiny, qwen3_moe

from assay.errors import QuantizeError
from assay.recipes.load import load_recipe
from assay.recipes.precision import PrecisionRecipe
from assay.records.plan import Plan
from assay_quantize.calibration import layerwise, memory
from assay_quantize.calibration.layerwise import calibrate_layers
from assay_quantize.calibration.memory import SPARE_BYTES, check_gpu_memory, layer_bytes
from assay_quantize.calibration.text import Text
from assay_quantize.checkpoint.checkpoint import open_checkpoint
from assay_quantize.plan.calibrated import calibrated_tensors
from assay_quantize.verify.verify import verify

pytestmark = pytest.mark.slow


# ------------------------------------------------------------------------------------------------ models
@pytest.mark.parametrize(
    "config", [glm4_moe(), qwen3_moe(), deepseek_v3(), glm_moe_dsa()], ids=lambda config: str(config["model_type"])
)
def test_states_between_layers_are_those_of_the_whole_model(tmp_path: Path, config: dict[str, Any]) -> None:
    """Filled one by one from the files of the source, layers give what transformers gives that loads all of it."""
    from transformers import AutoModelForCausalLM

    from assay_quantize.calibration.methods import plain_forward
    from assay_quantize.calibration.skeleton import Skeleton
    from assay_quantize.checkpoint.source_reader import SourceReader

    folder = make_tiny(tmp_path / "model", config)
    plan, tokens = plan_of(folder, "w4a16"), torch.randint(7, 800, (2, LENGTH), generator=torch.Generator().manual_seed(0))
    whole = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    layers, states = whole.base_model.layers, []
    for layer in layers:
        layer.register_forward_hook(lambda _module, _args, output: states.append(output))
    with torch.no_grad():
        whole(input_ids=tokens, use_cache=False)
    skeleton, state = Skeleton(folder, plan, torch.float32), None
    assert skeleton.num_layers == len(layers) == 3
    with SourceReader(open_checkpoint(folder)) as reader:
        skeleton.use_embedding(reader, tokens)
        for layer in range(3):
            with skeleton.filled(layer, reader), plain_forward(skeleton.model):
                state = skeleton.run(layer, tokens, state)
            expected_state = states[layer] if isinstance(states[layer], tuple) else (states[layer],)
            torch.testing.assert_close(state, expected_state, rtol=1e-5, atol=1e-5)
            assert len(state) == (2 if "index_topk" in config else 1)


# ------------------------------------------------------------------------------------------------ kills
KILLED = """
import gc, json, os, signal, sys
from pathlib import Path
import numpy
from assay.records.plan import Plan
from assay_quantize.calibration.quiet import quiet
with quiet():
    from assay_quantize.calibration import layerwise, skeleton
    from assay_quantize.calibration import methods
from assay_quantize.calibration.memory import SPARE_BYTES, check_gpu_memory, layer_bytes
from assay_quantize.calibration.text import Text

plan, source, words = Plan.load(Path(sys.argv[1])), Path(sys.argv[2]), Path(sys.argv[3])
gc.freeze()  # a child need not look through all of torch for garbage


def one(work, count):
    child = os.fork()
    if not child:
        steps, run, replace, add = 0, skeleton.Skeleton.run, os.replace, layerwise.WorkFolder.add

        def step():
            nonlocal steps
            steps += 1
            if steps == count:
                os.kill(os.getpid(), signal.SIGKILL)

        def running(*args):
            step()
            return run(*args)

        def replacing(*args):
            step()
            replace(*args)
            step()

        def adding(*args):
            step()
            add(*args)
            step()

        skeleton.Skeleton.run, os.replace, layerwise.WorkFolder.add = running, replacing, adding
        layerwise.calibrate_layers(plan, source, Path(work), Text((words,)), workers=1, batch_tokens=64)
        print("steps", steps, flush=True)
        os._exit(0)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


for line in sys.stdin:
    for job in json.loads(line):
        one(*job)
    print(flush=True)
"""
"""Forks for every job of a line of jobs, and answers with what they print and how each ended; an empty line is the end."""


@contextmanager
def in_processes(plan: Plan, source: Path, words: Path, folder: Path) -> Iterator[Callable[[list[tuple[str, int]]], list[str]]]:
    """Runs jobs, each in a process of its own: (work folder, the step before which it is killed; -1: none) -> what was said."""
    plan.save(folder / "plan.json")
    with (folder / "errors").open("w+") as errors, subprocess.Popen(
        [sys.executable, "-c", KILLED, str(folder / "plan.json"), str(source), str(words)],
        env={**os.environ, "PYTHONSAFEPATH": "1", "OMP_NUM_THREADS": "1"}, cwd=folder, text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors,
    ) as process:  # fmt: skip
        assert process.stdin is not None and process.stdout is not None
        asked, answers = process.stdin, process.stdout

        def run(jobs: list[tuple[str, int]]) -> list[str]:
            asked.write(json.dumps(jobs) + "\n")
            asked.flush()
            lines = []
            while (line := answers.readline()) != "\n":
                assert line, (folder / "errors").read_text()  # it has ended
                lines.append(line.rstrip("\n"))
            return lines

        yield run
        asked.close()
        assert process.wait(60) == 0
        errors.seek(0)
        assert "Traceback" not in (text := errors.read()), text


def files_of(work: Path) -> dict[str, bytes]:
    """All but the times in the journal."""
    files = {path.name: path.read_bytes() for path in sorted(work.iterdir())}
    lines = [json.loads(line) for line in files.pop("calibration.jsonl").decode().splitlines()]
    files["lines"] = json.dumps([{k: v for k, v in line.items() if k != "seconds"} for line in lines]).encode()
    return files


WITH_MTP = """schema: 1
name: mtp
extends: w4a16
mtp: quantize
calibration: {method: awq, grid: 3, mtp: true}
"""


TUNED = """schema: 1
name: tuned
extends: w4a16
mtp: quantize
calibration: {method: autoround, iterations: 2, batch: 2, mtp: true}
"""


@pytest.mark.parametrize(("precision", "layers", "kills"), [("w4a16-gptq", 3, 10), ("mtp.yaml", 1, 3), ("tuned.yaml", 1, 4)])
def test_killed_at_random_moments_the_bytes_are_the_same(
    tmp_path: Path, words: Path, precision: str, layers: int, kills: int
) -> None:
    source = make_tiny_glm4_moe(
        tmp_path / "model", num_layers=layers, hidden=128, dense_intermediate=128, num_heads=2, num_kv_heads=1, num_experts=2
    )
    (tmp_path / "mtp.yaml").write_text(WITH_MTP)
    (tmp_path / "tuned.yaml").write_text(TUNED)
    plan = plan_of(source, str(tmp_path / precision) if precision.endswith(".yaml") else precision)
    with in_processes(plan, source, words, tmp_path) as run_all:
        stderr = run_all([(str(tmp_path / "whole"), -1)])
        steps = int(next(line for line in stderr if line.startswith("steps")).split()[1])
        moments = sorted(random.Random(18).sample(range(1, steps + 1), kills))
        jobs = [(str(tmp_path / f"killed-{count}"), count) for count in moments]
        assert run_all(jobs) == [str(-signal.SIGKILL)] * kills
        layers_done = [len(list((tmp_path / f"killed-{count}").glob("layer-*"))) for count in moments]
        assert len(set(layers_done)) >= min(3, layers + 1)  # killed in several layers
        assert run_all([(work, -1) for work, _ in jobs]).count("0") == kills
    whole = files_of(tmp_path / "whole")
    for work, _ in jobs:
        assert files_of(Path(work)) == whole, work


def test_a_finished_layer_is_not_done_again(
    tmp_path: Path, source: Path, words: Path, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    from assay_quantize.calibration import skeleton

    filled: list[int] = []
    fill = skeleton.Skeleton.filled

    def counted(self: Any, layer: int, reader: Any) -> Any:
        filled.append(layer)
        if layer == 2 and filled.count(2) == 1:
            raise KeyboardInterrupt
        return fill(self, layer, reader)

    monkeypatch.setattr(skeleton.Skeleton, "filled", counted)
    plan, work = plan_of(source), tmp_path / "work"
    with pytest.raises(KeyboardInterrupt):
        calibrate_layers(plan, source, work, Text((words,)))
    calibrate_layers(plan, source, work, Text((words,)))
    assert filled == [0, 1, 2, 2]


def test_what_is_damaged_of_a_killed_one_is_made_again(
    tmp_path: Path, words: Path, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    """Tokens, layers, states and lines of the journal that are cut off, of another shape, or have a bit flipped."""
    from assay_quantize.calibration import skeleton

    source = make_tiny_glm4_moe(
        tmp_path / "model", num_layers=2, hidden=128, dense_intermediate=128, num_heads=2, num_kv_heads=1, num_experts=2
    )
    plan, fill = plan_of(source), skeleton.Skeleton.filled

    def made(work: Path) -> Any:
        return calibrate_layers(plan, source, work, Text((words,))).model_copy(update={"seconds": 0.0})

    def stopped(self: Any, layer: int, reader: Any) -> Any:
        if layer == 1:
            raise KeyboardInterrupt
        return fill(self, layer, reader)

    whole = made(expected := tmp_path / "whole")
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(skeleton.Skeleton, "filled", stopped)
        made(tmp_path / "killed")

    def changed(name: str, change: Callable[[bytes], bytes]) -> Path:
        work = tmp_path / "work"
        shutil.rmtree(work, ignore_errors=True)
        shutil.copytree(tmp_path / "killed", work)
        before = (work / name).read_bytes() if (work / name).is_file() else b""
        (work / name).write_bytes(change(before))
        return work

    def flipped(data: bytes) -> bytes:
        return data[:-3] + bytes([data[-3] ^ 1]) + data[-2:]

    def halved(data: bytes) -> bytes:
        return data[: len(data) // 2]

    state, journal = "state-00001-0.npy", "calibration.jsonl"
    for name, change in (
        ("tokens.npy", flipped), ("tokens.npy", halved), ("layer-00000.safetensors", halved), (state, flipped),
        ("state-00001-1.npy", lambda _: b"another model's"), ("state-x.npy", lambda _: b""),
        (journal, lambda text: text.replace(b'"digest"', b'"other"') + b"[" * 100_000 + b"\n"),
    ):  # fmt: skip
        work = changed(name, change)
        assert made(work) == whole, name
        has_gpu, expected_state = (
            {p.name: p.read_bytes() for p in each.iterdir() if p.name != journal} for each in (work, expected)
        )
        assert has_gpu == expected_state, name
    work = changed(journal, lambda text: text.replace(b'{"asked', b'{"later": 1, "asked', 1))
    with pytest.raises(QuantizeError, match=r"begun with later 1, now it is None; delete the folder to begin anew"):
        made(work)


def test_text_that_changes_while_it_is_read_is_refused(
    tmp_path: Path, source: Path, words: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the layers would be taken for those of the text that was there before."""
    path, stream = tmp_path / "text.txt", Text.stream
    path.write_text(words.read_text())

    def edited(self: Text, *args: Any, **named: Any) -> Any:
        path.write_text(words.read_text()[::-1])
        return stream(self, *args, **named)

    monkeypatch.setattr(Text, "stream", edited)
    with pytest.raises(QuantizeError, match=r"text\.txt: changed while it was read; run again"):
        calibrate_layers(plan_of(source), source, tmp_path / "work", Text((path,)))


# ------------------------------------------------------------------------------------------------ a whole checkpoint
@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory, source: Path, words: Path) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("made")
    _, result = made_and_verified(source, words, folder)
    assert result.damages == () and result.checks["calibrated"] == 3
    yield folder / "made"


def test_what_transformers_drops_or_casts_is_the_sources(made: Path, source: Path) -> None:
    """The MTP block, the router with its FP32 bias, embedding, head and norms: bit for bit."""
    stored = load_all(made)
    original = load_all(source)
    kept = {name for name in original if name in stored}
    assert {name for name in original if ".layers.3." in name} <= kept
    assert all(stored[name].dtype == original[name].dtype and torch.equal(stored[name], original[name]) for name in kept)
    biases = [name for name in kept if name.endswith("e_score_correction_bias")]
    assert len(biases) == 3 and all(stored[name].dtype == torch.float32 for name in biases)
    index = json.loads((made / "model.safetensors.index.json").read_text())["weight_map"]
    assert index.keys() == stored.keys()
    config = json.loads((made / "config.json").read_text())["quantization_config"]
    assert any(re.match(pattern.removeprefix("re:"), "model.layers.3.mlp.experts.0.up_proj") for pattern in config["ignore"])


@pytest.mark.parametrize("part, check", [("weight_packed", "calibrated"), ("weight_scale", "weights")])
def test_another_code_or_scale_is_a_damage(made: Path, source: Path, tmp_path: Path, part: str, check: str) -> None:
    from assay.records.base import sha256_of_file
    from assay.records.manifest import MANIFEST
    from assay_quantize.checkpoint.headers import read_shard_header

    shutil.copytree(made, tmp_path / "bad")
    shard, header = next(
        (path, header)
        for path in sorted((tmp_path / "bad").glob("*.safetensors"))
        for name, header in read_shard_header(path.parent, path.name).items()
        if name.endswith(f"layers.1.mlp.experts.0.down_proj.{part}")
    )
    with shard.open("r+b") as file:
        file.seek(header.begin)
        old = file.read(1)
        file.seek(header.begin)
        file.write(bytes([old[0] ^ 1]))
    manifest = json.loads((tmp_path / "bad" / MANIFEST).read_text())
    for entry in manifest["shards"]:  # so that no hash of a file gives it away
        entry["sha256"] = sha256_of_file(tmp_path / "bad" / entry["name"])
    (tmp_path / "bad" / MANIFEST).write_text(json.dumps(manifest))
    files = verify(tmp_path / "bad", source=source)
    assert check in {damage.check for damage in files.damages}


@pytest.mark.parametrize(("store", "plainly"), [(store_as_fp8, dequantized), (store_as_int4, decompressed_int4)])
def test_a_source_in_fp8_or_int4_is_calibrated_as_its_values_in_bf16(
    tmp_path: Path, source: Path, words: Path, store: Any, plainly: Any
) -> None:
    released = store(source, tmp_path / "released")
    plain = plainly(released, tmp_path / "bf16")
    digests = []
    for folder in (released, plain):
        plan = plan_of(folder)
        digests.append(calibrate_layers(plan, folder, tmp_path / f"work-{folder.name}", Text((words,))).layers)
    assert digests[0] == digests[1]


def test_too_little_memory_is_said_before_anything_is_read(tmp_path: Path, source: Path, words: Path) -> None:
    with pytest.raises(QuantizeError, match=r"calibrating its largest layer takes .* at least .* are needed in all"):
        calibrate_layers(plan_of(source), source, tmp_path / "work", Text((words,)), memory_bytes=64 << 20)


def test_a_layer_its_inputs_and_its_hessians_are_on_the_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On torch's `meta` device, where a tensor left on the CPU is an error; experts choose by value, so dense layers."""
    from assay_quantize.calibration.quiet import quiet

    with quiet():
        from assay_quantize.calibration.methods import Method
        from assay_quantize.calibration.skeleton import Skeleton
    from assay_quantize.checkpoint.source_reader import SourceReader

    # the mask is made by looking at positions, which have no values there
    monkeypatch.setattr("transformers.models.glm4_moe.modeling_glm4_moe.create_causal_mask", lambda *args, **named: None)
    folder = make_tiny(tmp_path / "model", glm4_moe(first_k_dense_replace=3, num_nextn_predict_layers=0))
    plan, tokens = plan_of(folder), torch.randint(7, 800, (2, LENGTH), generator=torch.Generator().manual_seed(0))
    skeleton, state = Skeleton(folder, plan, torch.float32, "meta"), None
    options = load_recipe(PrecisionRecipe, "w4a16-gptq").calibration
    assert options != "none"
    with quiet(), torch.no_grad(), SourceReader(open_checkpoint(folder)) as reader:
        skeleton.use_embedding(reader, tokens)
        for layer, tensors in calibrated_tensors(plan).items():
            with skeleton.filled(layer, reader) as whole:
                assert {parameter.device.type for parameter in whole.parameters()} == {"meta"}
                method = Method(options, "minmax", tensors)
                for watch in method.watches(skeleton.model):
                    with watch:
                        made = skeleton.run(layer, tokens, state)
                hessians = method._rounding._hessians
                assert len(hessians) == len(tensors) == 7
                assert {hessian.device.type for hessian in hessians.values()} == {"meta"}
            assert [(part.device.type, part.shape) for part in made] == [("meta", (2, LENGTH, 256))]
            state = tuple(torch.zeros(part.shape) for part in made)  # as it comes from the disk


def test_a_gpu_that_is_not_there_or_too_small_is_refused(tmp_path: Path, source: Path, words: Path) -> None:
    if not torch.cuda.is_available():
        with pytest.raises(QuantizeError, match="--device cuda: PyTorch sees no CUDA device here; say --device cpu"):
            calibrate_layers(plan_of(source), source, tmp_path / "work", Text((words,)), device="cuda")
        assert not (tmp_path / "work").exists()
    plan = plan_of(source)
    layers, shape = calibrated_tensors(plan), (SEQUENCES, LENGTH)
    needed = layer_bytes(plan, layers, shape, 1) + SPARE_BYTES
    check_gpu_memory(plan, layers, shape, 1, needed, source)
    with pytest.raises(QuantizeError, match=r"of the GPU's memory, .* are free; say --device cpu"):
        check_gpu_memory(plan, layers, shape, 1, needed - 1, source)


def test_layers_begun_on_another_device_are_refused(
    tmp_path: Path, source: Path, words: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A GPU's sums have other last bits. `auto` may find one where there was none before, or lose it."""
    monkeypatch.setattr("assay_quantize.calibration.layerwise._calibrate_missing", lambda *_: None)  # no layer is finished
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (10**12, 10**12))
    plan, text = plan_of(source), Text((words,))
    for began, has_gpu in (("cpu", False), ("cuda", True)):
        monkeypatch.setattr(torch.cuda, "is_available", lambda has_gpu=has_gpu: has_gpu)
        with pytest.raises(KeyError):  # the first layer's line
            calibrate_layers(plan, source, work := tmp_path / began, text, device="auto")
        monkeypatch.setattr(torch.cuda, "is_available", lambda has_gpu=has_gpu: not has_gpu)
        now = {"cpu": "cuda", "cuda": "cpu"}[began]
        with pytest.raises(QuantizeError) as refused:
            calibrate_layers(plan, source, work, text, device="auto")
        assert str(refused.value) == (
            f"{work}: begun with device {began}, now it is {now}; say --device {began} to go on, or delete the folder to begin "
            "anew"
        )
    with pytest.raises(QuantizeError, match=r"now it is .*; delete the folder to begin anew"):  # --device cuda would not do
        calibrate_layers(plan, source, work, text, device="cpu", workers=torch.get_num_threads() + 1)


def test_another_text_is_refused_in_the_same_folder(tmp_path: Path, source: Path, words: Path) -> None:
    calibrate_layers(plan_of(source), source, tmp_path / "work", Text((words,)))
    other = tmp_path / "other.txt"
    other.write_text(words.read_text()[::-1])
    with pytest.raises(QuantizeError, match=r"begun with another recipe or text \(asked_sha256 "):
        calibrate_layers(plan_of(source), source, tmp_path / "work", Text((other,)))


# ------------------------------------------------------------------------------------------------ the command
RECIPE = "schema: 1\nname: short\nextends: w4a16-gptq\ncalibration: {method: gptq, tokens: 192, length: 32}\n"


def test_quantize_calibrates_verifies_and_knows_that_it_is_done(
    tmp_path: Path, source: Path, words: Path, run: Run
) -> None:  # fmt: skip
    (tmp_path / "short.yaml").write_text(RECIPE)
    asked = ("quantize", source, "-p", tmp_path / "short.yaml", "--text", words, "--out", tmp_path / "made")
    code, out, stderr = run(*asked)
    assert code == 0 and "verified: " in out and "gptq: layer 2 of 3" in stderr, stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["made", "short.yaml"]  # nothing is left beside it
    manifest = json.loads((tmp_path / "made" / "assay_manifest.json").read_text())
    assert (manifest["calibrated"]["method"], manifest["calibrated"]["num_tokens"]) == ("gptq", 192)
    code, out, stderr = run(*asked)
    assert code == 0 and "done before and verified" in out, stderr
    other = tmp_path / "other.txt"
    other.write_text(words.read_text()[::-1])
    code, _, stderr = run("quantize", source, "-p", tmp_path / "short.yaml", "--text", other, "--out", tmp_path / "made")
    assert code == 2 and "holds a finished checkpoint of another plan" in stderr
    code, out, stderr = run("verify", tmp_path / "made", "--source", source)
    assert code == 0, stderr


def test_what_cannot_be_calibrated_is_said_in_a_line(tmp_path: Path, source: Path, words: Path, run: Run) -> None:
    out = ("--out", tmp_path / "made")
    code, _, stderr = run("quantize", source, "-p", "w4a16", "--text", words, *out)
    assert code == 2 and "--text: precision w4a16 is not calibrated; take one that is, such as w4a16-gptq" in stderr
    code, _, stderr = run("quantize", source, "-p", "w4a16-gptq", "--text", words, "--runner", "ray", *out)
    assert code == 2 and "each on what the one before it gives, so a cluster has nothing to share" in stderr
    code, _, stderr = run("quantize", source, "-p", "w4a16-gptq", "--text", words, "--stream-from", "hub", *out)
    assert code == 2 and "would be downloaded twice: leave out --stream-from, then it is downloaded once" in stderr
    code, _, stderr = run("quantize", source, "-p", "w4a16-gptq", "--text", tmp_path / "no.txt", *out)
    assert code == 2 and "no.txt" in stderr and "Traceback" not in stderr
    (tmp_path / "fp8.yaml").write_text("schema: 1\nname: fp8\nextends: w4a16\nscheme: fp8_block\ncalibration: {method: gptq}\n")
    code, _, stderr = run("quantize", source, "-p", tmp_path / "fp8.yaml", *out)
    assert code == 2 and "calibration by gptq is for schemes w4a16, w4a16_g64" in stderr
    (tmp_path / "odd.yaml").write_text("schema: 1\nname: odd\nextends: w4a16\ncalibration: {method: gptk, tokens: 0}\n")
    code, _, stderr = run("quantize", source, "-p", tmp_path / "odd.yaml", *out)
    assert code == 2 and "method must be one of gptq, awq, awq+gptq, smoothquant, autoround (got 'gptk')" in stderr


@pytest.mark.parametrize("free", ["memory", "disk"])
def test_room_is_asked_for_before_text_is_sampled(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free: str
) -> None:
    """Before, the model had been loaded and had written its text for hours by then; for a full disk nobody asked at all."""
    monkeypatch.setattr(layerwise, "_sequences", None)  # whoever gets there fails
    if free == "disk":
        monkeypatch.setattr(memory.shutil, "disk_usage", lambda path: SimpleNamespace(free=10**8))
    bound = 64 << 20 if free == "memory" else None
    with pytest.raises(QuantizeError) as raised:
        calibrate_layers(plan_of(source, tokens=65_536), source, tmp_path / "work", Text(), memory_bytes=bound)
    stderr = {
        "memory": r".*: calibrating its largest layer takes [\d.]+ MB, of --memory 67.1 MB 0 B are left; at least "
        r"[\d.]+ [MG]B .*",
        "disk": r".*/work: calibrating keeps 134 MB of states between layers there and [\d.]+ [kM]B of layers, and 100 MB are "
        r"free; free [\d.]+ MB, put the checkpoint on another disk \(--out, --runs\), or take fewer `tokens` in the "
        r"precision's `calibration`",
    }[free]
    assert re.fullmatch(stderr, str(raised.value)), raised.value


def test_room_on_the_disk_is_asked_for_what_is_left(
    source: Path, words: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With text in a file: how much there is, only reading it tells."""
    plan = plan_of(source, tokens=64)
    calibrate_layers(plan, source, tmp_path / "work", Text((words,)))
    monkeypatch.setattr(memory.shutil, "disk_usage", lambda path: SimpleNamespace(free=1000))
    calibrate_layers(plan, source, tmp_path / "work", Text((words,)))  # all is done: nothing is needed
    with pytest.raises(QuantizeError, match="calibrating keeps "):
        calibrate_layers(plan, source, tmp_path / "other", Text((words,)))
