"""`assay judge` of one checkpoint: what it is, what is wrong with it, how far it is from its base, what would tell more."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
from command_errors import one_error
from command_line import Run
from gguf_models import small_keys, small_shapes, write
from safetensors.torch import load_file, save_file
from tiny_families import glm4_moe, make_tiny

from assay.records.link import LinkAnswer


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """source, made (its FP8, with a card), damaged: zero scales in one weight of it."""
    from assay_pipeline.quantizing import quantize

    folder = tmp_path_factory.mktemp("link")
    make_tiny(folder / "source", glm4_moe())
    quantize(str(folder / "source"), precision="fp8", out=folder / "made")
    manifest = json.loads((folder / "made" / "assay_manifest.json").read_text())
    (folder / "made" / "assay_manifest.json").write_text(json.dumps(manifest | {"source": "nobody/Tiny-GLM"}))
    (folder / "made" / "README.md").write_text("---\nbase_model: nobody/Tiny-GLM\nlicense: mit\n---\n\n# Tiny\n")
    shutil.copytree(folder / "made", folder / "damaged")
    path = next((folder / "damaged").glob("*.safetensors"))
    tensors = load_file(path)
    name = next(name for name in tensors if name.endswith("weight_scale"))
    save_file({**tensors, name: tensors[name] * 0}, path, {"format": "pt"})
    return folder


@pytest.fixture(autouse=True)
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))


def answered(run: Run, *words: str | Path) -> tuple[int, LinkAnswer]:
    code, out, err = run("judge", *map(str, words), "--json")
    assert code in (0, 1), err
    return code, LinkAnswer.model_validate_json(out)


def test_with_its_base(run: Run, folder: Path, tmp_path: Path) -> None:
    words = ("--base", folder / "source", "--tokens", "4000", "--out", tmp_path / "out")
    code, answer = answered(run, folder / "made", *words)
    assert answer.screening is not None and answer.not_screened is None and answer.inspection.is_clean
    (candidate,) = answer.screening.candidates
    assert (code, candidate.label, candidate.word) == (0, "made", "not failed")
    assert answer.screening.panel.stated.licence == "Apache-2.0"
    assert [step.command for step in answer.steps] == [f"assay judge {folder}/source {folder}/made"]


def test_memory_is_held_or_refused(run: Run, folder: Path, tmp_path: Path) -> None:
    words = (
        "judge",
        str(folder / "made"),
        "--base",
        str(folder / "source"),
        "--tokens",
        "2000",
        "--out",
        str(tmp_path / "out"),
    )
    code, out, err = run(*words, "--memory", "10MB")
    refused = err.splitlines()[-1]
    assert (code, out) == (2, "")
    assert re.fullmatch(r"error: --memory 10 MB: the process takes [\d.]+ [MG]B without any weight; give more", refused)
    assert one_error(run(*words, "--memory", "much")) == "--memory much: not a size; write it like 2GiB, 1.5GiB or 800MB"
    code, _, err = run(*words, "--memory", "64GiB")
    assert code == 0 and "layers of up to " in err


def test_a_damaged_one(run: Run, folder: Path, tmp_path: Path) -> None:
    words = ("--base", folder / "source", "--tokens", "2000", "--out", tmp_path / "out")
    code, answer = answered(run, folder / "damaged", *words)
    assert code == 1 and [finding.defect for finding in answer.inspection.findings if finding.severity != "note"] == [
        "scale_zero"
    ]
    assert answer.screening is not None and answer.screening.candidates[0].drift.kl_mean.value > 0
    code, out, _ = run("judge", str(folder / "damaged"), *map(str, words))
    lines = out.splitlines()
    assert code == 1 and f"1 defect in {folder}/damaged" in lines
    assert lines[-1] == (
        "next: ask both questions, served: whether tasks are lost is not known yet: "
        f"`assay judge {folder}/source {folder}/damaged`"
    )


def test_files_beside_the_weights_are_held_against_the_base(run: Run, folder: Path, tmp_path: Path) -> None:
    """Another chat template and other end tokens, of which no token of a text knows; and norms that hold a scale of AWQ."""
    base, made = (shutil.copytree(folder / name, tmp_path / name) for name in ("source", "made"))
    (base / "generation_config.json").write_text(json.dumps({"eos_token_id": [0, 4, 6]}))
    (made / "generation_config.json").write_text(json.dumps({"eos_token_id": 0}))
    (made / "chat_template.jinja").write_text("{% for message in messages %}{{ message.content }}{% endfor %}")
    path = next(made.glob("*.safetensors"))
    tensors = load_file(path)
    scaled = {name: value * 1.01 if name.endswith("input_layernorm.weight") else value for name, value in tensors.items()}
    save_file(scaled, path, {"format": "pt"})
    code, answer = answered(run, made, "--base", base, "--tokens", "2000", "--out", tmp_path / "out")
    assert code == 1 and answer.is_refused and answer.screening is not None and answer.screening.refused == ()
    assert [
        (finding.defect, finding.places[0].what) for finding in answer.inspection.findings if finding.severity != "note"
    ] == [
        ("chat_template_unlike_base", "the chat template is not the base's"),
        ("generation_config_unlike_base", "is 0; the base has [0, 4, 6]"),
    ]


def test_base_that_it_names(run: Run, folder: Path, tmp_path: Path) -> None:
    code, answer = answered(run, folder / "made")
    assert (code, answer.base, answer.screening) == (0, "nobody/Tiny-GLM", None)
    assert answer.not_screened == "its base, nobody/Tiny-GLM, is not on this machine; give its folder or pack with --base"
    assert answer.steps[0].command == f"assay judge {folder}/made --base nobody/Tiny-GLM"
    repository = tmp_path / "cache" / "models--nobody--Tiny-GLM"
    shutil.copytree(folder / "source", repository / "snapshots" / "abc")
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("abc")
    code, answer = answered(run, folder / "made", "--tokens", "2000", "--out", tmp_path / "out")
    assert answer.screening is not None and answer.base == str(repository / "snapshots" / "abc")


def test_packs_and_bases_that_are_none(run: Run, folder: Path, tmp_path: Path) -> None:
    text = tmp_path / "text.jsonl"
    text.write_text(
        "".join(json.dumps({"text": f"Number {number} follows {number - 1}, always."}) + "\n" for number in range(30))
    )
    assert run("pack", str(folder / "source"), "--text", str(text), "--out", str(tmp_path / "pack"))[0] == 0
    answer = answered(run, folder / "made", "--base", tmp_path / "pack", "--out", tmp_path / "out")[1]
    assert answer.screening is not None and answer.screening.pack_seal is not None
    assert answer.steps[-1].command == f"assay judge BASE {folder}/made"
    assert one_error(run("judge", str(folder / "made"), "--base", str(tmp_path / "nothing"))).startswith(
        f"{tmp_path}/nothing: no such folder"
    )
    answer = answered(run, folder / "source")[1]
    assert answer.not_screened == "nothing in it is quantized and it names no base: it may be one itself"
    assert [step.command for step in answer.steps] == [f"assay judge {folder}/source CANDIDATE"]
    answer = answered(run, "tiny-glm")[1]  # of a recipe the folder
    assert answer.not_screened == "nothing in it is quantized and it names no base: it may be one itself"


def test_gguf_is_inspected_and_served(run: Run, folder: Path, tmp_path: Path) -> None:
    """By its file or its folder, with a base or without."""
    file = write(tmp_path / "gguf" / "glm-Q8_0.gguf", "glm4moe", small_keys(), small_shapes())
    for words in ([file], [file.parent], [file, "--base", folder / "source"], [file.parent, "--base", folder / "source"]):
        code, answer = answered(run, *words)
        assert (code, answer.inspection.facts.method, answer.screening) == (0, "GGUF, Q8_0", None)
        assert answer.not_screened == "GGUF is inspected and not screened; a model in GGUF is compared as a server"
        assert [step.command for step in answer.steps] == ["assay judge REFERENCE_URL URL"]
    without_router = {name: told for name, told in small_shapes().items() if name != "blk.2.ffn_gate_inp.weight"}
    write(file, "glm4moe", small_keys(), without_router)
    code, out, _ = run("judge", str(file.parent))
    lines = out.splitlines()
    assert code == 1 and "does not load: tensors_missing" in lines and f"1 defect in {file.parent}" in lines
    assert lines[-1] == (
        "next: serve it with llama-server, and the model that it was made of, and judge it by their URLs: "
        "`assay judge REFERENCE_URL URL`"
    )
    assert one_error(run("judge", str(folder / "source"), str(file.parent))) == (
        f"{file.parent}: its weights are GGUF, glm-Q8_0.gguf, which vLLM 0.32 does not serve; serve it with llama-server, and "
        "give the URLs of both: `assay judge REFERENCE_URL URL`"
    )


def test_a_method_that_vllm_does_not_have(run: Run, folder: Path, tmp_path: Path) -> None:
    """No command is named that would ask vLLM, or try again what was tried."""
    shutil.copytree(folder / "made", tmp_path / "hqq")
    config = json.loads((tmp_path / "hqq" / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "hqq"}
    (tmp_path / "hqq" / "config.json").write_text(json.dumps(config))
    for words in ((), ("--base", folder / "source")):
        code, answer = answered(run, tmp_path / "hqq", *words)
        assert code == 1 and "method_not_served" in {finding.defect for finding in answer.inspection.findings}
        assert [step.command for step in answer.steps] == ["assay judge REFERENCE_URL URL"]


def test_one_that_was_made_here(run: Run, folder: Path, tmp_path: Path) -> None:
    from assay_pipeline.quantizing import quantize

    quantize(str(folder / "source"), precision="fp8", out=tmp_path / "own")
    answer = answered(run, tmp_path / "own", "--tokens", "2000", "--out", tmp_path / "out")[1]
    assert answer.screening is not None and answer.base == str(folder / "source")


def test_a_server_alone(run: Run) -> None:
    assert one_error(run("judge", "localhost:8000")) == (
        "http://localhost:8000: is a server, and what to compare it with is missing; write `assay judge REFERENCE "
        "http://localhost:8000`"
    )
    assert one_error(run("judge", "localhost:8000", "localhost:8001", "--base", "x")) == (
        "--base: is for one checkpoint alone, and 2 were given; leave it out"
    )
    assert one_error(run("judge", "/no/such/folder")).startswith("/no/such/folder: no such folder")
