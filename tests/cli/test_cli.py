"""The command line as a newcomer meets it: exit codes, one line per error, nothing half-written that looks whole."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import hollow
import pytest
import torch
import yaml
from command_errors import one_error, perturbed
from tiny_checkpoints import make_tiny_glm4_moe

import assay_cli as cli
from assay.errors import QuantizeError
from assay.recipes.load import load_recipe, recipes_dir
from assay.recipes.profile import ProfileRecipe
from assay.records.manifest import Manifest
from assay.records.plan import Plan
from assay.records.verification import Verification
from assay_evaluate.serving.hardware import Gpu
from assay_pipeline.targets import resolve_target

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A copy that a test may damage."""
    return make_tiny_glm4_moe(tmp_path / "source")


def edit_config(folder: Path, **changes: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


# ------------------------------------------------------------------------------------------------ what works
@pytest.mark.slow
def test_quantize_then_again_then_verify(run: Run, source: Path) -> None:
    code, _, err = run("quantize", source, "--precisions", "w4a16", "--runs", "runs")
    assert code == 0, err
    assert [path.name for path in sorted(Path("runs/source").iterdir())] == ["fp8", "run.json", "w4a16"], "the reference too"
    for precision in ("fp8", "w4a16"):
        folder = Path("runs/source") / precision
        assert Verification.load(folder / "verify.json").passed
        assert Plan.load(folder / "plan.json").precision == precision
        assert "NOT MEASURED" in (folder / "checkpoint/README.md").read_text(), "a card without scores says so"
    before = Manifest.load(Path("runs/source/w4a16/checkpoint/assay_manifest.json"))

    code, out, _ = run("quantize", source, "--precisions", "w4a16", "--runs", "runs")
    assert (code, out.count("done before and verified")) == (0, 2)
    assert Manifest.load(Path("runs/source/w4a16/checkpoint/assay_manifest.json")) == before

    code, out, _ = run("verify", "runs/source/w4a16/checkpoint", "--source", source)
    assert code == 0 and "checks passed" in out


@pytest.mark.slow
def test_out_takes_one_checkpoint_anywhere(run: Run, source: Path) -> None:
    code, out, _ = run("quantize", source, "--precision", "nvfp4a16", "--out", "made", "--json")
    assert code == 0 and json.loads(out)[0]["passed"] is True
    assert (Path("made") / "assay_manifest.json").is_file()
    code, out, _ = run("verify", "made", "--source", source, "--json")
    assert code == 0 and Verification.model_validate_json(out).passed


def test_verify_fails_with_exit_1_and_names_the_tensor(run: Run, source: Path) -> None:
    run("quantize", source, "--precision", "w4a16", "--out", "made")
    (Path("made") / "model-00002-of-00002.safetensors").unlink()
    code, out, _ = run("verify", "made", "--source", source)
    assert code == 1 and "model-00002-of-00002.safetensors" in out and "verification failed" in out


def test_python_m_assay_is_the_command_and_a_pipe_folds_no_line(source: Path) -> None:
    words = [sys.executable, "-m", "assay", "plan", str(source), "--precision", "w4a16"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=100, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    ignored, explained = (line for line in done.stdout.splitlines() if line.startswith(("ignore: ", "Estimated, ")))
    assert ignored.endswith(r"re:.*layers\.3\..*$") and explained.endswith("(--profile NAME says which).")


@pytest.mark.slow
def test_a_reader_that_goes_away_is_no_error(source: Path) -> None:
    """`assay plan ... | head -1`: what is printed is more than a pipe holds."""
    words = [sys.executable, "-m", "assay", "plan", str(source), "--precision", "w4a16", "--json"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None and child.stderr is not None
        child.stdout.close()
        assert (child.stderr.read(), child.wait(100)) == ("", 0)
    words = words[:-1]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None and child.stderr is not None
        child.stdout.close()
        assert (child.stderr.read(), child.wait(100)) == ("", 0)


def test_plan_prints_a_table_or_the_record(run: Run, source: Path) -> None:
    code, out, _ = run("plan", source, "--precision", "w4a16")
    assert code == 0 and "routed_expert" in out and "MTP" in out
    code, out, _ = run("plan", source, "--precision", "w4a16", "--json")
    assert code == 0 and Plan.model_validate_json(out).precision == "w4a16"


def test_a_checkpoint_in_no_run_has_a_card_that_names_its_base_model(run: Run, source: Path) -> None:
    words = ("quantize", source, "-p", "w4a16", "--out", "made")
    assert run(*words)[0] == 0
    card = Path("made/README.md")
    unnamed = card.read_text()
    assert "base_model:" not in unnamed and "`assay quantize ... --base-model OWNER/NAME` names it." in unnamed
    before = {path.name: path.stat().st_mtime_ns for path in Path("made").iterdir()}
    assert run(*words, "--base-model", "me/source")[0] == 0  # the weights are there
    after = {path.name: path.stat().st_mtime_ns for path in Path("made").iterdir()}
    assert {name for name in after if after[name] != before[name]} == {"README.md", "assay_plan.json"}
    named = card.read_text()
    assert "base_model: me/source" in named and "Made from [me/source](https://huggingface.co/me/source)." in named
    card.unlink()
    assert run("card", "made") == (0, "made/README.md\n", "") and card.read_text() == named
    Path("made/assay_manifest.json").unlink()
    assert one_error(run("card", "made")) == (
        "made: has no assay_manifest.json: no finished checkpoint of `assay quantize` is there, and no card is written"
    )


def test_every_command_has_help(run: Run) -> None:
    commands = [command.name or command.callback.__name__ for command in cli.app.registered_commands if command.callback]
    assert sorted(commands) == [
        "blame", "calibrate", "card", "choose", "compare", "deployment", "doctor", "evaluate", "family", "gate", "gpu-check",
        "init", "inspect", "judge", "lever", "locate", "pack", "plan", "power", "preflight", "probe", "publish", "quantize",
        "recipe", "recipes", "report", "run", "screen", "sensitivity", "serve", "setup", "speed", "status", "upgrade-check",
        "verify",
    ]  # fmt: skip
    for command in commands:
        code, out, _ = run(command, "--help")
        assert code == 0 and "Usage" in out


def test_readme_names_no_command_that_does_not_exist() -> None:
    readme = (Path(__file__).resolve().parents[2] / "README.md").read_text()
    known = {command.name or command.callback.__name__ for command in cli.app.registered_commands if command.callback}
    words = "preflight|power|plan|quantize|verify|serve|evaluate|doctor|gate|report|card|probe|speed|choose"
    assert set(re.findall(rf"assay ({words})\b", readme)) <= known


# ------------------------------------------------------------------------------------------------ what does not
def test_no_such_folder(run: Run) -> None:
    assert one_error(run("quantize", "/no/such/folder")) == (
        "/no/such/folder: no such folder: / has no 'no'; give a checkpoint's folder (with config.json and *.safetensors)"
    )


def test_misspelt_precision(run: Run, source: Path) -> None:
    message = one_error(run("quantize", source, "--precisions", "w4a61"))
    assert message.startswith("no precision recipe called 'w4a61'; did you mean w4a16?")
    assert not Path("runs").exists()


def test_no_index(run: Run, source: Path) -> None:
    (source / "model.safetensors.index.json").unlink()
    assert "index" in one_error(run("quantize", source)) and not Path("runs").exists()


def test_dense_model(run: Run, source: Path) -> None:
    no_experts = dict.fromkeys(("n_routed_experts", "num_experts_per_tok", "moe_intermediate_size", "n_shared_experts"))
    edit_config(source, architectures=["LlamaForCausalLM"], model_type="llama", **no_experts)
    assert (
        f"{source}/config.json: LlamaForCausalLM is a dense model" in one_error(run("quantize", source))
        and not Path("runs").exists()
    )


def test_unknown_architecture(run: Run, source: Path) -> None:
    edit_config(source, architectures=["MammothForCausalLM"], model_type="mammoth")
    assert one_error(run("quantize", source)) == (
        f"{source}/config.json: architecture MammothForCausalLM is not known; `assay family` drafts a family of what vLLM "
        "serves (docs/families.md has the supported ones)"
    )


def test_source_that_is_quantized_already(run: Run, source: Path) -> None:
    edit_config(source, quantization_config={"quant_method": "gptq", "bits": 4})
    assert "gptq" in one_error(run("quantize", source)) and not Path("runs").exists()


def test_precision_that_is_not_there(run: Run, source: Path) -> None:
    message = one_error(run("quantize", source, "--precision", "nvfp4a61", "--out", "made"))
    assert message.startswith("no precision recipe called 'nvfp4a61'; did you mean nvfp4a16? `assay recipes ")
    assert not Path("made").exists()


GPTQ = ("quantize", "-p", "w4a16-gptq", "--out", "made")


@pytest.mark.parametrize("command", [GPTQ, ("calibrate", "--out", "made")])
def test_a_gpu_that_is_asked_for_must_be_there(
    run: Run, source: Path, monkeypatch: pytest.MonkeyPatch, command: tuple[str, ...]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    asked = (command[0], source, *command[1:], "--device")
    assert one_error(run(*asked, "cuda")) == "--device cuda: PyTorch sees no CUDA device here; say --device cpu"
    assert one_error(run(*asked, "cuda-untested")) == "--device cuda-untested: it takes one of: auto, cpu, cuda"
    assert one_error(run(*asked, "gpu")) == "--device gpu: did you mean cuda? it takes one of: auto, cpu, cuda"
    assert not Path("made").exists()


@pytest.mark.parametrize("command", ["quantize", "run", "calibrate"])
def test_help_says_what_the_device_is_for(run: Run, monkeypatch: pytest.MonkeyPatch, command: str) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    code, out, _ = run(command, "--help")
    told = " ".join(out.replace("│", " ").split())
    assert code == 0 and "--device auto|cpu|cuda Where a calibration runs. auto: on a GPU, if PyTorch sees one." in told


@pytest.mark.parametrize("command", [("quantize", "-p", "w4a16", "--out", "made"), ("quantize", "--precisions", "w4a16")])
def test_a_gpu_is_refused_where_nothing_is_calibrated(
    run: Run, source: Path, monkeypatch: pytest.MonkeyPatch, command: tuple[str, ...]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    which = "precision w4a16 is not" if "--out" in command else "none of fp8, w4a16 is"
    assert one_error(run(command[0], source, *command[1:], "--device", "cuda")) == (
        f"--device cuda: {which} calibrated; take one that is, such as w4a16-gptq"
    )
    assert not Path("made").exists() and not Path("runs").exists()


@pytest.mark.slow
def test_nobody_looks_for_a_gpu_where_nothing_is_calibrated(run: Run, source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would import torch, and nothing would be done on it: checkpoints are written by CPUs."""
    looked: list[str] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: bool(looked.append("for a GPU")))
    code, _, err = run("quantize", source, "-p", "w4a16", "--out", "made")
    assert (code, looked) == (0, []), err


@pytest.mark.slow
@pytest.mark.parametrize(
    ("asked", "is_there", "device"),
    [("auto", True, "cuda"), ("auto", False, "cpu"), ("cpu", True, "cpu"), ("cuda", True, "cuda")],
)
def test_where_a_calibration_runs(
    run: Run, source: Path, monkeypatch: pytest.MonkeyPatch, asked: str, is_there: bool, device: str
) -> None:
    """Of layers, and of what enters weights; no GPU is here, so what loads the model and what goes through layers stand in."""

    def layers(*_: object) -> None:
        raise QuantizeError(f"layers are on {_[-1]}")

    def whole(_checkpoint: object, _folder: Path, where: str) -> None:
        raise QuantizeError(f"the model is on {where}")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: is_there)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (10**12, 10**12))
    monkeypatch.setattr("assay_quantize.calibration.layerwise._calibrate_missing", layers)
    monkeypatch.setattr("assay_quantize.calibration.calibrate.load_model", whole)
    words = source / "words.txt"
    words.write_text(" ".join(f"t{number % 500}" for number in range(40_000)))
    Path("short.yaml").write_text(
        "schema: 1\nname: short\nextends: w4a16-gptq\ncalibration: {method: gptq, tokens: 64, length: 32}\n"
    )
    options = () if asked == "auto" else ("--device", asked)
    code, _, err = run("quantize", source, "-p", "short.yaml", "--text", words, "--out", "made", *options)
    assert (code, err.splitlines()[-1], "gptq: on the GPU" in err) == (2, f"error: layers are on {device}", device == "cuda")
    code, _, err = run("calibrate", source, "--text", words, "--out", "w.safetensors", *options)
    assert (code, err.splitlines()[-1]) == (2, f"error: the model is on {device}")
    assert ("calibrating on the GPU" in err) == (device == "cuda")


def test_disk_that_is_too_small(run: Run, source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(".")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1000))
    code, _, err = run("quantize", source, "--precision", "w4a16", "--out", "made")
    assert code == 2 and "free" in err.splitlines()[-1] and "Traceback" not in err
    assert not (Path("made") / "config.json").exists() and not (Path("made") / "assay_manifest.json").exists()


def test_evaluate_before_quantize(run: Run, source: Path) -> None:
    assert "no finished checkpoint there; make it first: assay quantize" in one_error(
        run("evaluate", source, "--suite", "quick")
    )


def test_the_hint_works_as_typed(run: Run, source: Path) -> None:
    shutil.move(source, "my model")
    options = ("--runs", "my runs", "--name", "first", "--suite", "quick")
    message = one_error(run("evaluate", "my model", *options))
    assert message.startswith("my runs/") and "no finished checkpoint there; make it first: " in message
    hint = shlex.split(message.partition("make it first: ")[2])
    assert hint == [
        "assay", "quantize", "my model", "--precision", "fp8", "--runs", "my runs", "--name", "first"
    ]  # fmt: skip
    assert run(*hint[1:])[0] == 0
    assert " --precision w4a16 " in one_error(run("evaluate", "my model", *options)), "the first was found"


def test_evaluate_without_a_target(run: Run) -> None:
    assert "say what to measure" in one_error(run("evaluate"))


def test_profile_that_this_machine_does_not_fit(run: Run, source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("assay_evaluate.serving.hardware.find_gpus", lambda: ())
    run("quantize", source, "--precisions", "w4a16")
    message = one_error(run("evaluate", source, "--precisions", "w4a16", "--profile", "8xh200", "--suite", "quick"))
    assert message.startswith("profile 8xh200 needs 8x H200, this machine has no GPU")


EIGHT_H200 = (Gpu("NVIDIA H200", 143771 << 20, "570.1"),) * 8


def test_run_refuses_what_the_gpus_cannot_share(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("assay_evaluate.serving.hardware.find_gpus", lambda: EIGHT_H200)
    folder = hollow.hollow_model(tmp_path / "glm", "glm-4.7")
    asked = ("--precisions", "w4a16", "--profile", "8xh200", "--suite", "quick", "--no-preflight")
    message = one_error(run("run", folder, *asked))
    assert message == (
        "precision fp8 cannot be served on profile 8xh200: shared_expert down_proj: 192 inputs on each of 8 ranks are not a "
        "multiple of 128, the block that shares a scale (model.layers.3.mlp.shared_experts.down_proj.weight); not "
        "divisible either: shared_expert gate_proj, shared_expert up_proj, routed_expert down_proj and 2 more; what "
        "fits: one scale per row (fp8-channel), or a profile with tensor-parallel-size 4"
    )
    assert not Path("runs").exists()


def test_quantize_for_a_profile(run: Run, tmp_path: Path) -> None:
    """The precisions that the recipe has for it, whatever this machine is; a bad one is refused before anything is written."""
    hollow.hollow_model(tmp_path / "glm", "glm-4.7")
    recipe = yaml.safe_load((recipes_dir() / "models" / "glm-4.7.yaml").read_text())
    recipe |= {"name": "mine", "source": {"path": str(tmp_path / "glm")}, "precisions": ["w4a16"]}
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(recipe))
    message = one_error(run("quantize", tmp_path / "mine.yaml", "--profile", "8xh200"))
    assert message.startswith("precision w4a16 cannot be served on profile 8xh200: ")
    recipe |= {"precisions_on": {"8xrtx-pro-6000": ["w4a16-channel"]}}
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(recipe))
    target = resolve_target(str(tmp_path / "mine.yaml"))
    assert target.on_profile(load_recipe(ProfileRecipe, "8xrtx-pro-6000")).recipe.precisions == ("w4a16-channel",)
    assert target.on_profile(load_recipe(ProfileRecipe, "4xh200")).recipe.precisions == ("w4a16",)
    assert not Path("runs").exists()


@pytest.mark.slow
def test_evaluate_refuses_what_the_gpus_cannot_share(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before a server starts: the candidate is judged by its headers."""
    monkeypatch.setattr("assay_evaluate.serving.hardware.find_gpus", lambda: EIGHT_H200)
    config = hollow.QWEN3_NEXT_CONFIG | {"num_hidden_layers": 4, "num_experts": 2}
    reference = hollow.write_hollow(tmp_path / "bf16", config, hollow.qwen3_next_shapes(config), shards=1)
    shapes, dtypes = hollow.fp8_blocks(hollow.qwen3_next_shapes(config))
    config |= {"quantization_config": hollow.FP8_BLOCKS}
    fp8 = hollow.write_hollow(tmp_path / "fp8", config, shapes, shards=1, dtypes=dtypes)
    ask = ("evaluate", "--reference", reference, "--candidate", fp8, "--suite", "quick", "--profile")
    message = one_error(run(*ask, "8xh200"))
    assert message.startswith("fp8 cannot be served on profile 8xh200: shared_expert down_proj: 64 inputs on each of 8 ranks")


def test_no_such_run(run: Run) -> None:
    assert one_error(run("gate", "nothing")).startswith("nothing: no run of that name")
    Path("alone").mkdir()
    Path("alone/config.json").write_text("{}")
    assert one_error(run("gate", "alone")).startswith(
        "alone: is a checkpoint, and no run here is about it; the folder runs has "
    )


def test_contract_needs_neither_torch_nor_vllm() -> None:
    code = "import sys, assay_cli, assay.recipes.load, assay.records.measurement, assay.recipes.families, assay_pipeline.targets; print(sorted({'torch', 'vllm', 'transformers', 'lm_eval'} & set(sys.modules)))"  # noqa: E501
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


def test_a_source_retrained_in_place_is_not_done_before(run: Run, source: Path) -> None:
    run("quantize", source, "--precision", "w4a16", "--out", "made")
    other = perturbed(source, Path("other"), 1)
    for path in other.glob("*.safetensors"):
        shutil.copyfile(path, source / path.name)
    message = one_error(run("quantize", source, "--precision", "w4a16", "--out", "made"))
    assert re.match(
        r"made: holds a finished checkpoint made from other data \(.*source: model-00001-of-00002.safetensors was ", message
    )


def test_a_checkpoint_that_was_touched_is_verified_again(run: Run, source: Path) -> None:
    run("quantize", source, "--precisions", "w4a16")
    shard = next(Path("runs/source/w4a16/checkpoint").glob("*.safetensors"))
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    code, out, _ = run("quantize", source, "--precisions", "w4a16")
    assert code == 1 and "verification failed" in out and shard.name in out
    assert "fp8        done before and verified" in out


def test_errors_are_one_line_and_name_a_place(tmp_path: Path) -> None:
    """Line breaks of a path or of a library's words are no lines of ours; U+2028 and ESC are written out."""
    command = [sys.executable, "-m", "assay"]
    for name in ("a\nb", "a\n\nb", "a\u2028b\u2029", "\x1b[31mred", "a\r\nerror: b"):
        done = subprocess.run(
            [*command, "verify", str(tmp_path / name)], capture_output=True, text=True, cwd=tmp_path, check=False, timeout=60
        )
        assert done.returncode == 2 and done.stderr.count("\n") == 1 and done.stderr[:-1].isprintable(), done.stderr
    for unbuffered in ("", "1"):
        done = subprocess.run(
            ["sh", "-c", f"PYTHONUNBUFFERED={unbuffered} {shlex.join(command)} recipes > /dev/full"],
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )
        assert (done.returncode, done.stderr) == (2, "error: standard output: No space left on device\n")
