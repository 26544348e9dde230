"""A quantized copy of a model as TARGET: every command refuses it in the same line, which names the command that judges it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from command_errors import one_error
from command_line import Run
from local_hub import Hub
from safetensors.torch import load_file, save_file
from tiny_checkpoints import make_tiny_glm4_moe, store_as_fp8

from assay.records.plan import Plan
from assay.records.run import RunRecord
from assay_pipeline.evaluating import prepare

COMMANDS = {
    "plan": ("plan", "{target}", "--precision", "w4a16"),
    "plan-on-gpus": ("plan", "{target}", "--profile", "8xh200"),
    "preflight": ("preflight", "{target}", "--profile", "cpu-emulated", "--suite", "demo"),
    "quantize": ("quantize", "{target}", "--precision", "fp8", "--out", "made"),
    "quantize-in-run": ("quantize", "{target}"),
    "run": ("run", "{target}"),
    "init": ("init", "{target}"),
    "sensitivity": ("sensitivity", "{target}"),
    "calibrate": ("calibrate", "{target}", "--out", "made.safetensors"),
    "recipe": ("recipe", "{target}", "--budget", "4.5bpw"),
    "evaluate": ("evaluate", "{target}"),
    "speed": ("speed", "{target}"),
}
HOW = "config.json says quant_method 'compressed-tensors', format 'pack-quantized'"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """source, and w4a16 that was made of it."""
    from assay_pipeline.quantizing import quantize

    folder = tmp_path_factory.mktemp("made")
    make_tiny_glm4_moe(folder / "source")
    quantize(str(folder / "source"), precision="w4a16", out=folder / "w4a16")
    return folder


@pytest.fixture
def damaged(made: Path, tmp_path: Path) -> Path:
    """As somebody published it, without what assay wrote about it; half of its scales are zero, half have the wrong sign."""
    folder = shutil.copytree(made / "w4a16", tmp_path / "damaged")
    for path in (*folder.glob("assay_*"), folder / "README.md"):
        path.unlink()
    for path in folder.glob("*.safetensors"):
        tensors = load_file(path)
        scales = sorted(name for name in tensors if name.endswith("weight_scale"))
        tensors |= {name: torch.zeros_like(tensors[name]) for name in scales[::2]} | {n: -tensors[n] for n in scales[1::2]}
        save_file(tensors, path, metadata={"format": "pt"})
    return folder


def refusal(folder: Path) -> str:
    return (
        f"{folder}: is quantized already, a candidate and no source ({HOW}, which is not native to family glm4_moe); judge it: "
        f"`assay judge REFERENCE {folder}`, REFERENCE being the model that it was made of; what is wrong with it: "
        f"`assay inspect {folder}`"
    )


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_gives_one_answer(run: Run, damaged: Path, command: str) -> None:
    words = [word.format(target=damaged) for word in COMMANDS[command]]
    assert one_error(run(*words)) == refusal(damaged)
    assert not Path("runs").exists() and not list(Path().glob("made*")) and not Path("damaged.yaml").exists()


@pytest.mark.parametrize("command", COMMANDS)
def test_a_recipe_is_no_way_round(run: Run, damaged: Path, command: str) -> None:
    Path("mine.yaml").write_text(
        f"schema: 1\nname: mine\nsource: {{path: {damaged}}}\nfamily: glm4_moe\nreference: {{precision: fp8}}\n"
        "precisions: [w4a16]\nprofiles: [cpu-emulated]\n"
    )
    words = [word.format(target="mine.yaml") for word in COMMANDS[command]]
    expected = refusal(damaged)
    assert one_error(run(*words)) == expected
    assert not Path("runs").exists() and not list(Path().glob("made*"))


@pytest.mark.parametrize("command", ["plan", "quantize", "preflight", "run", "init"])
def test_a_repository_is_no_way_round(
    run: Run, damaged: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    hub = Hub(damaged)
    hub.use(monkeypatch, tmp_path / "home")
    try:
        message = one_error(run(*[word.format(target="org/model") for word in COMMANDS[command]]))
    finally:
        hub.close()
    assert message == (
        f"org/model: is quantized already, a candidate and no source ({HOW}, which is not native to family glm4_moe); "
        "serve it, and judge it by its URL: `assay judge REFERENCE URL`, REFERENCE being the model that it was made of; what "
        "is wrong with it: `assay inspect org/model`"
    )


def test_the_other_command_says_what_is_wrong(run: Run, damaged: Path) -> None:
    code, out, _ = run("inspect", damaged)
    assert code == 1
    assert [line for line in out.splitlines() if line.startswith("served wrong")] == [
        "served wrong: scale_zero", "served wrong: scale_negative",
    ]  # fmt: skip


def test_inspect_names_what_compares_files_with_what_was_made(run: Run, made: Path, damaged: Path) -> None:
    """Scales of other values are as plausible as before: only the hashes of what was made tell them."""
    line = f"not checked: files against assay_manifest.json: `assay verify {made / 'w4a16'}` does"
    assert line in run("inspect", made / "w4a16")[1].splitlines()
    assert "assay_manifest.json" not in run("inspect", damaged)[1]


def test_what_assay_made_is_judged_against_its_source(run: Run, made: Path) -> None:
    source, w4a16 = made / "source", made / "w4a16"
    assert one_error(run("run", w4a16)) == (
        f"{w4a16}: is quantized already, a candidate and no source (assay made it from {source.name}, as w4a16); judge it: "
        f"`assay judge {source} {w4a16}`; what is wrong with it: `assay inspect {w4a16}`"
    )


def test_the_command_that_is_named_takes_it(made: Path, damaged: Path) -> None:
    """Nothing is wrong with the words: the next thing would be to start a server."""
    compared = prepare(reference=str(made / "source"), candidates=[str(damaged)], suite="demo", profile="cpu-emulated").compared
    assert [candidate.checkpoint for candidate in compared.candidates] == [made / "source", damaged]
    assert compared.about.foreign_reference is None


def test_it_says_first_what_is_damaged(made: Path, damaged: Path) -> None:
    said: list[str] = []
    prepare(
        reference=str(made / "source"), candidates=[str(damaged), str(made / "w4a16")], suite="demo", profile="cpu-emulated",
        say=said.append,
    )  # fmt: skip
    assert said == [
        f"note: damaged: `assay inspect {damaged}` finds it damaged: scale_zero in 23 places "
        "(model.layers.0.mlp.down_proj.weight_scale: 512 of 512 scales are zero); scale_negative in 22 places "
        "(model.layers.0.mlp.gate_proj.weight_scale: 512 of 512 scales are negative)"
    ]


@pytest.mark.parametrize("name", ["model.gguf", "glm"])
def test_gguf(run: Run, tmp_path: Path, name: str) -> None:
    file = tmp_path / name if name.endswith(".gguf") else tmp_path / name / "model-Q4_K_M.gguf"
    file.parent.mkdir(exist_ok=True)
    file.write_bytes(b"GGUF")
    for command in ("plan", "quantize", "run", "init"):
        words = [word.format(target=tmp_path / name) for word in COMMANDS[command]]
        assert one_error(run(*words)) == (
            f"{tmp_path / name}: is quantized already, a candidate and no source (its weights are GGUF, {file.name}); "
            "serve it, and judge it by its URL: `assay judge REFERENCE URL`, REFERENCE being the model that it was made of"
        )


# ------------------------------------------------------------------------------------------------ named in words
def test_a_copy_that_is_named_as_the_reference_is_called_a_copy(damaged: Path, made: Path) -> None:
    said: list[str] = []
    evaluation = prepare(
        reference=str(damaged), candidates=[str(made / "w4a16")], suite="demo", profile="cpu-emulated", say=said.append
    )
    assert evaluation.about.foreign_reference == HOW
    assert (
        f"note: damaged is a quantized copy ({HOW}) and is compared with as it is: what it lost itself is in no verdict" in said
    )


def test_a_copy_is_a_source_if_it_is_named_as_its_own_reference(run: Run, made: Path, tmp_path: Path) -> None:
    """FP8 of a family that is released in BF16: all there is on this machine. Plan, run.json and card say what it is."""
    fp8 = store_as_fp8(made / "source", tmp_path / "copy")
    how = "config.json says quant_method 'fp8'"
    assert one_error(run("plan", fp8, "-p", "w4a16")).startswith(
        f"{fp8}: is quantized already, a candidate and no source ({how}"
    )
    assert one_error(run("plan", fp8, "-p", "w4a16", "--reference", made / "source")).startswith(f"{fp8}: is quantized already")
    code, out, err = run("plan", fp8, "-p", "w4a16", "--reference", fp8, "--json")
    note = f"note: {fp8} is a quantized copy ({how}) and is compared with as it is: what it lost itself is in no verdict"
    assert (code, Plan.model_validate_json(out).foreign_source, note in err) == (0, how, True)
    code, _, err = run("quantize", fp8, "--precision", "w4a16", "--reference", fp8)
    assert (code, note in err) == (0, True)
    assert RunRecord.load(Path("runs/copy/run.json")).foreign_reference == how
    card = Path("runs/copy/w4a16/checkpoint/README.md").read_text()
    assert f"Made of a quantized copy of the model ({how}): what that copy lost is in no figure here." in card
    assert json.loads(Path("runs/copy/w4a16/plan.json").read_text())["foreign_source"] == how


def test_another_reference_than_the_recipes(run: Run, made: Path, tmp_path: Path) -> None:
    """Of a source that is the model itself: nothing is said of copies."""
    fp8 = store_as_fp8(made / "source", tmp_path / "copy")
    code, out, _ = run("plan", made / "source", "-p", "w4a16", "--reference", fp8, "--json")
    assert (code, Plan.model_validate_json(out).foreign_source) == (0, None)
    assert one_error(run("plan", made / "source", "-p", "w4a16", "--reference", "nowhere/here/at-all")) == (
        "--reference nowhere/here/at-all: no such folder; give a checkpoint's folder or a Hugging Face id"
    )
