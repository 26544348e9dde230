"""What a model's recipe says of precisions that a run makes something for: budgets of mixes, text and files of calibrations."""

from __future__ import annotations

from pathlib import Path

import pytest

from assay.errors import RecipeError
from assay.quantities import Budget
from assay.recipes.load import load_recipe, parse_recipe
from assay.recipes.model import Automatic, ModelRecipe, automatic_of, is_automatic
from assay.recipes.precision import PrecisionRecipe

MODEL = "schema: 1\nname: mine\nsource: {path: here}\nfamily: glm4_moe\nreference: {precision: fp8}\n"


def model(folder: Path, more: str) -> ModelRecipe:
    (folder / "mine.yaml").write_text(MODEL + more)
    return parse_recipe(ModelRecipe, folder / "mine.yaml")


def problem_of(folder: Path, more: str) -> str:
    with pytest.raises(RecipeError) as caught:
        model(folder, more)
    return str(caught.value).removeprefix(f"{folder / 'mine.yaml'}: ")


def test_a_budget_stands_in_the_name() -> None:
    assert automatic_of("auto-4.5bpw") == Automatic("auto-4.5bpw", Budget("4.5bpw", bits=4.5))
    assert automatic_of("auto-377GiB") == Automatic("auto-377GiB", Budget("377GiB", num_bytes=377 << 30))
    assert [is_automatic(name) for name in ("auto-4.5bpw", "auto-x", "auto-mine.yaml", "w4a16")] == [True, True, False, False]


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ("precisions: [auto-4.5]\n",
         "precisions: precision auto-4.5: not a valid size; write 405GB or 377GiB for the whole checkpoint, or 4.5bpw: "
         "auto-405GB, auto-4.5bpw"),
        ("precisions: [auto-64bpw]\n",
         "precisions: precision auto-64bpw: bits per weight lie between 4 and 16; write 4.5bpw, or a size such as 405GB: "
         "auto-405GB, auto-4.5bpw"),
        ("precisions: [w4a16]\nautomatic: {proxy: weights}\n",
         "automatic.proxy: Input should be 'kl' (got 'weights')"),
        ("precisions: [w4a16]\nautomatic: {schemes: [fp8_static]}\n",
         "automatic: schemes: fp8_static needs a calibration file and has the weights of fp8_channel; name that"),
        ("precisions: [w4a16]\ncalibration: {file: a.safetensors, tokens: 5}\n",
         "calibration: tokens: of a file that is made, and `file` names one that is there; say one of them"),
        ("precisions: [w4a16]\ncalibration: {text: ['']}\n",
         "calibration.text: names nothing; say files, hub:OWNER/NAME, own or MIX.yaml, each with @WEIGHT if it has one"),
    ],
)  # fmt: skip
def test_mistakes_are_one_line(tmp_path: Path, more: str, said: str) -> None:
    assert problem_of(tmp_path, more) == said


def test_the_reference_is_there_before() -> None:
    with pytest.raises(ValueError, match=r"reference: auto-8bpw is chosen in the run; name a precision that is there before"):
        ModelRecipe.model_validate(
            {"schema": 1, "name": "x", "source": {"path": "a"}, "family": "glm4_moe", "precisions": ["w4a16"],
             "reference": {"precision": "auto-8bpw"}}
        )  # fmt: skip


def test_files_are_relative_to_the_recipe_that_names_them(tmp_path: Path) -> None:
    found = model(
        tmp_path,
        "precisions: [auto-5bpw]\nautomatic: {base: b.yaml, hardware: 4xh200, texts: [t.jsonl]}\n"
        "calibration: {file: f.safetensors, text: [a.jsonl@2, own@0.5, 'hub:org/code', mix.yaml], withhold: [quick, s.yaml]}\n",
    )
    assert found.automatic.base == str(tmp_path / "b.yaml") and found.automatic.hardware == "4xh200"
    assert found.automatic.texts == (f"{tmp_path}/t.jsonl",)
    assert found.calibration is not None and found.calibration.file == str(tmp_path / "f.safetensors")
    assert found.calibration.text == (f"{tmp_path}/a.jsonl@2", "own@0.5", "hub:org/code", f"{tmp_path}/mix.yaml")
    assert found.calibration.withhold == ("quick", f"{tmp_path}/s.yaml")


def test_text_of_a_precision(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It belongs to the recipe's identity by its name; one that extends it finds it where the extended one lies."""
    monkeypatch.chdir(tmp_path)
    for folder in ("a", "b"):
        Path(folder).mkdir()
        Path(folder, "mine.yaml").write_text(
            "schema: 1\nname: mine\nextends: w4a16-gptq\ncalibration: {method: gptq, text: [chats.jsonl@2, own]}\n"
        )
    Path("b/more.yaml").write_text("schema: 1\nname: more\nextends: ../a/mine.yaml\nmtp: quantize\n")
    first, other = (load_recipe(PrecisionRecipe, f"{folder}/mine.yaml") for folder in ("a", "b"))
    assert first.calibration != "none" and first.calibration.text == ("a/chats.jsonl@2", "own")
    assert first.sha256 == other.sha256 != load_recipe(PrecisionRecipe, "w4a16-gptq").sha256
    more = load_recipe(PrecisionRecipe, "b/more.yaml")
    assert more.calibration != "none" and more.calibration.text == (f"{tmp_path}/b/../a/chats.jsonl@2", "own")


def test_gptq_has_no_budget_by_expert(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(
        "schema: 1\nname: mine\nextends: w4a16-gptq\ncalibration: {method: gptq, tokens_per_expert: 500}\n"
    )
    with pytest.raises(RecipeError) as caught:
        load_recipe(PrecisionRecipe, str(tmp_path / "mine.yaml"))
    assert str(caught.value) == (
        f"{tmp_path}/mine.yaml: calibration.tokens_per_expert: counted by `assay calibrate` alone: with gptq and awq "
        "each expert sees all `tokens`; leave it out"
    )


def test_keys_of_another_method_are_not_named_as_allowed(tmp_path: Path) -> None:
    for options, said in {
        "{method: gptq, grid: 3}": "unknown key 'grid'; method gptq takes tokens, length, seed, text, mtp, block_size,",
        "{method: awq, toknes: 5}": "unknown key 'toknes'; did you mean tokens? method awq takes tokens, length, seed,",
    }.items():
        (tmp_path / "mine.yaml").write_text(f"schema: 1\nname: mine\nextends: w4a16\ncalibration: {options}\n")
        with pytest.raises(RecipeError) as caught:
            load_recipe(PrecisionRecipe, str(tmp_path / "mine.yaml"))
        assert str(caught.value).startswith(f"{tmp_path}/mine.yaml: calibration: {said}")
