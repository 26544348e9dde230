"""A run makes what its precisions need: a calibration file, calibrated layers of a mix of texts, a mix of schemes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from command_errors import one_error
from command_line import Run
from synthetic_run import make_plan

from assay.errors import AssayError
from assay.quantities import size
from assay.recipes.load import load_recipe
from assay.recipes.model import automatic_of
from assay.recipes.precision import PrecisionRecipe
from assay.records.calibration import Calibration, record_of
from assay.records.choice.mix import Mix
from assay.records.diagnosis.sensitivity import Sensitivity
from assay.records.manifest import Manifest
from assay.records.plan import Plan
from assay_pipeline.comparison.checkpoints import of_target
from assay_pipeline.comparison.planned_run import is_made, planned_run
from assay_pipeline.mixes.automatic import check_texts_of_mix
from assay_pipeline.targets import resolve_target
from assay_reports.numbers import plan_numbers

TRAINED = Path(__file__).resolve().parents[3] / "examples" / "tiny_glm" / "checkpoint"
PLAIN = "The small cat sits in the park and looks at the red ball of the old woman. " * 40


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model's recipe, texts beside it, and a suite of generated sums whose items are withheld."""
    Path("texts").mkdir()
    rows = [{"text": f"{sum_of_the_suite()} {PLAIN}"}, {"text": PLAIN}]
    (tmp_path / "texts/chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "texts/plain.txt").write_text(PLAIN)
    (tmp_path / "sums.yaml").write_text(
        "schema: 1\nname: sums\nseed: eval-sums\nacceptance: false\n"
        "tasks: [{kind: arithmetic, name: sums, num_items: 4, num_steps: [5], max_tokens: 32}]\n"
    )
    (tmp_path / "short.yaml").write_text(
        "schema: 1\nname: short\nextends: w4a16-gptq\n"
        "calibration: {method: gptq, tokens: 256, length: 32, text: [texts/chats.jsonl@3, texts/plain.txt@1]}\n"
    )
    (tmp_path / "mine.yaml").write_text(
        f"schema: 1\nname: mine\nsource: {{path: {TRAINED}}}\nfamily: glm4_moe\nreference: {{precision: fp8}}\n"
        "precisions: [nvfp4-calibrated, short.yaml, auto-4.5bpw]\n"
        "calibration: {text: [texts/plain.txt], tokens: 512, length: 32, min_tokens: 1, withhold: [sums.yaml]}\n"
        "automatic: {texts: own, schemes: [w4a16, fp8_block], tokens: 640, length: 32}\n"
    )
    return tmp_path


def sum_of_the_suite() -> str:
    """The question of one of its items."""
    from assay.recipes.suite import SuiteRecipe
    from assay_evaluate.tasks.item_texts import item_texts

    data = {"kind": "arithmetic", "name": "sums", "num_items": 4, "num_steps": [5], "max_tokens": 32}
    suite = SuiteRecipe.model_validate({"schema": 1, "name": "sums", "seed": "eval-sums", "acceptance": False, "tasks": [data]})
    (task,) = item_texts(suite, may_download=False)
    assert task.texts is not None
    return next(iter(task.texts))


def stamps(*paths: Path) -> dict[str, int]:
    return {str(path): path.stat().st_mtime_ns for path in paths}


@pytest.mark.slow
def test_a_run_calibrates_and_chooses_and_goes_on_where_it_was_stopped(
    run: Run, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    again = ("quantize", "mine.yaml")
    with monkeypatch.context() as patch:
        stop_after(patch, "assay_quantize.calibration.calibrate.write_importance", 0)
        assert run(*again)[0] != 0
    made = Path("runs/mine")
    assert (made / "fp8/verify.json").is_file() and not list((made / "calibration").glob("*.safetensors"))
    with monkeypatch.context() as patch:
        stop_after(patch, "assay_quantize.sensitivity.direct.DivergenceStore.save", 5)
        code, _, said = run(*again)
        assert code != 0 and "the same command goes on from there" in said
    (file,) = (made / "calibration").glob("*.safetensors")
    measured = sorted((made / "automatic/sensitivity").rglob("*.safetensors"))
    assert len(measured) == 5 and not list((made / "automatic").glob("*.yaml"))
    before = stamps(file, made / "short/checkpoint/assay_manifest.json", *measured)
    code, out, said = run(*again)
    assert code == 0, said
    assert stamps(*map(Path, before)) == before, "what was finished is not made again"

    of_file, plan = Calibration.load(record_of(file)), Plan.load(made / "nvfp4-calibrated/plan.json")
    assert plan.importance_sha256 == of_file.file_sha256 and of_file.num_tokens == 512
    assert Calibration.load(made / "nvfp4-calibrated/calibration.json") == of_file
    calibrated = Manifest.load(made / "short/checkpoint/assay_manifest.json").calibrated
    assert calibrated is not None and [one.weight for one in calibrated.sources] == [0.75, 0.25]
    assert [one.num_dropped for one in calibrated.sources] == [1, 0], "the text with an item of the suite"
    assert [(one.suite, one.task, one.num_items, one.dropped) for one in calibrated.withheld] == [("sums", "sums", 8, 1)]

    recipe = load_recipe(PrecisionRecipe, str(made / "automatic/auto-4.5bpw.yaml"))
    mix = Mix.load(made / "automatic/auto-4.5bpw.json")
    (record,) = (made / "automatic").glob("sensitivity-*.json")
    assert {part.scheme for part in Sensitivity.load(record).parts} == {"bf16", "w4a16", "fp8_block"}
    assert Manifest.load(made / "auto-4.5bpw/checkpoint/assay_manifest.json").recipe_sha256 == recipe.sha256
    assert mix.point.bits_per_weight <= 4.5 and mix.reason in said
    of_parts, of_mix = said.split("auto-4.5bpw: the mix is measured as a whole, as the uniform recipes were")
    for line in ("weights: ", " to measure by proxy kl"):
        assert line in of_parts and line not in of_mix, "of parts, which are known"
    wholes = [check for check in mix.checks if check.name == f"mix of {size(mix.point.bytes)}"]
    assert [one.source for one in wholes] == ["sensitivity"] and f"loses {wholes[0].measured_nats:.4g} nats" in mix.reason

    short, chosen = (plan_numbers(Plan.load(made / name / "plan.json")) for name in ("short", "auto-4.5bpw"))
    assert short.calibrated == "gptq on 256 tokens of text, checked against the items of 1 task (1 text left out)"
    assert short.mixed is None and chosen.calibrated is None
    assert (chosen.mixed is None) == (mix.proposes == "uniform")
    code, out, _ = run(*again)
    assert code == 0 and out.count("done before and verified") == 4 and out.count("\n") == 4

    target = resolve_target("mine.yaml")
    labels = ["fp8", "nvfp4-calibrated", "short", "auto-4.5bpw"]
    assert [one.label for one in of_target(target, Path("runs"), None, None).candidates] == labels
    planned = planned_run("mine.yaml", profile="cpu-emulated")
    assert [one.label for one in planned.checkpoints] == labels and planned.checkpoints[-1].is_chosen
    assert all(is_made(plan, made / plan.precision / "checkpoint") for plan in planned.plans)
    assert not planned_run("mine.yaml", profile="cpu-emulated", runs=Path("none")).checkpoints[-1].is_chosen

    limits, chosen_file = folder / "mine.yaml", made / "automatic/auto-4.5bpw.yaml"
    before_text = chosen_file.read_text()
    chosen_file.write_text(before_text.replace("observer: minmax", "observer: mse"))
    code, _, said = run(*again)
    assert code == 2 and "auto-4.5bpw.yaml: is not what was chosen, which auto-4.5bpw.json beside it says" in said
    chosen_file.write_text(before_text)
    other = made / "automatic/auto-5bpw.yaml"
    of_others = json.loads(record.read_text()) | {"texts_sha256": "f" * 64}
    known = record.read_text()
    record.write_text(json.dumps(of_others))
    code, _, said = run("quantize", "mine.yaml", "-p", "auto-5bpw")
    assert code == 0 and other.is_file(), said
    assert f"auto-5bpw: not measured as a whole, as {record} was measured on other texts than there are now (sha256 f" in said
    record.write_text(known)
    for old, new in (("tokens: 640", "slack: 0, tokens: 640"), ("slack: 0, tokens: 640", "tokens: 704")):
        limits.write_text(limits.read_text().replace(old, new))
        code, _, said = run(*again)
        assert code == 2 and "auto-4.5bpw.yaml: was chosen from other sensitivities or within other limits" in said


def stop_after(patch: pytest.MonkeyPatch, name: str, calls: int) -> None:
    """The function works for so many calls; the next one is interrupted."""
    module, _, attribute = name.rpartition(".")
    owner: Any = __import__("pkgutil").resolve_name(module)
    real, left = getattr(owner, attribute), [calls]

    def stopped(*args: Any, **named: Any) -> Any:
        if not left[0]:
            raise KeyboardInterrupt
        left[0] -= 1
        return real(*args, **named)

    patch.setattr(owner, attribute, stopped)


def test_what_nothing_can_be_done_with_is_said_before_anything_is_made(run: Run, folder: Path) -> None:
    for words, said in {
        ("-p", "auto-4.5bpw", "--out", "made"):
            "--out: auto-4.5bpw is chosen in the folder of a run; leave --out out, or choose it by `assay sensitivity` and "
            "`assay recipe --out FILE.yaml`",
        ("-p", "nvfp4-calibrated", "--out", "made"):
            "precision nvfp4-calibrated: its scales of activations or of the KV cache come from a calibration file, and none "
            "was given; make one with `assay calibrate TARGET --out FILE`, then say --importance FILE",
        ("-p", "short.yaml", "--text", "none.jsonl"): "--text none.jsonl: cannot be read: No such file or directory",
        ("-p", "short.yaml", "--withhold", "quik"): "no suite recipe called 'quik'; did you mean quick?",
        ("-p", "auto-4.5", "--out", "made"): "precision auto-4.5: not a valid size",
        ("-p", "w4a16", "--importance", "texts/plain.txt"): "--importance: precision w4a16 searches no scales",
    }.items():  # fmt: skip
        assert one_error(run("quantize", "mine.yaml", *words)).startswith(said)
    assert not Path("runs").exists() and not Path("made").exists()


def test_what_cannot_be_used_or_chosen_is_said_before_anything_is_measured(run: Run, folder: Path) -> None:
    (folder / "plain.yaml").write_text(
        f"schema: 1\nname: plain\nsource: {{path: {TRAINED}}}\nfamily: glm4_moe\nreference: {{precision: fp8}}\n"
        "precisions: [w4a16, auto-5MB]\n"
    )
    assert one_error(run("quantize", "plain.yaml", "--importance", "none.safetensors")) == (
        "--importance: none of fp8, w4a16, auto-5MB searches scales (`observer: mse`) or has static ones, so nothing uses "
        "channel weights; name a precision that does, or leave the option out"
    )
    assert one_error(run("quantize", "plain.yaml", "-p", "auto-5MB")) == (
        "auto-5MB: the smallest choice among w4a16, w4a16_g32, nvfp4a16, fp8_block takes at least 6.27 MB; ask for more, or "
        "name smaller `automatic: {schemes: [...]}` in the model's recipe"
    )
    assert "write 4.5bpw" in one_error(run("quantize", "plain.yaml", "-p", "auto-1bpw"))
    plain = (folder / "plain.yaml").read_text()
    for base, problem in {
        "fp8-kv": "has scales that come from a file of `assay calibrate`, with which no part is measured",
        "w4a16-awq": "parts are measured data-free or by gptq",
    }.items():
        (folder / "plain.yaml").write_text(f"{plain}automatic: {{base: {base}}}\n")
        said = one_error(run("quantize", "plain.yaml", "-p", "auto-6bpw"))
        assert said == f"automatic.base {base}: {problem}; take w4a16 or w4a16-gptq"


@pytest.mark.slow
def test_a_model_larger_than_memory_is_measured_on_files(run: Run, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One layer at a time, and the model cannot write texts meanwhile."""
    monkeypatch.setattr("assay_quantize.sensitivity.layered.whole_bytes", lambda plan: 1 << 50)
    monkeypatch.setattr("assay_quantize.storage.resident.available_bytes", lambda: 1 << 32)
    recipe = folder / "large.yaml"

    def written(texts: str) -> str:
        recipe.write_text(
            f"schema: 1\nname: large\nsource: {{path: {TRAINED}}}\nfamily: glm4_moe\nreference: {{precision: fp8}}\n"
            f"precisions: [auto-4.5bpw]\nautomatic: {{texts: {texts}, schemes: [w4a16, fp8_block], tokens: 256, length: 32}}\n"
        )
        return str(recipe)

    assert one_error(run("quantize", written("[none.txt]"))) == (
        f"automatic.texts {folder}/none.txt: cannot be read: No such file or directory; name a file of plain text or .jsonl"
    )
    assert one_error(run("quantize", written("own"))) == (
        "auto-BUDGET: the model takes 1,126 TB in FP32 and 4.29 GB of memory are free, so it cannot write the texts it is "
        "measured on; name files in the model's recipe, `automatic: {texts: [FILE]}`"
    )
    assert not Path("runs").exists()
    wanted = [make_plan("fp8"), automatic_of("auto-4.5bpw")]
    with pytest.raises(AssayError, match="cannot write the texts"):
        check_texts_of_mix(resolve_target(str(recipe)), wanted, folder)
    chosen_before = folder / "automatic" / "auto-4.5bpw.yaml"
    chosen_before.parent.mkdir()
    chosen_before.touch()  # nothing is measured again, so no memory is needed
    check_texts_of_mix(resolve_target(str(recipe)), wanted, folder)
    code, _, said = run("quantize", written("[texts/plain.txt]"))
    assert code == 0 and "auto-4.5bpw: not measured as a whole, as one layer at a time is held; sums of parts decide" in said
    chosen = Path("runs/large/automatic")
    (record,) = chosen.glob("sensitivity-*.json")
    found = Sensitivity.load(record)
    assert (found.texts, found.num_tokens) == (str(folder / "texts/plain.txt"), 256 - 8)
    assert Mix.load(chosen / "auto-4.5bpw.json").point.bits_per_weight <= 4.5

    (folder / "texts/plain.txt").write_text(PLAIN[::-1])
    code, _, said = run("quantize", str(recipe))
    assert code == 2 and "was chosen from other sensitivities" in said.splitlines()[-1]
