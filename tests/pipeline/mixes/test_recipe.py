"""`assay recipe`: files that are written, what hardware forbids, what vLLM's loaders say, and wrong input in one line."""

from __future__ import annotations

import json
import xml.etree.ElementTree
from pathlib import Path
from typing import Any

import pytest
from command_line import Run
from sensitivities import by_bits, sensitivity
from synthetic_run import make_measurements
from tiny_checkpoints import make_tiny_glm4_moe

from assay.recipes.load import parse_recipe, recipe_file
from assay.recipes.precision import PrecisionRecipe
from assay.records.base import Interval, sha256_of, write_text_atomically
from assay.records.choice.mix import Mix
from assay.records.diagnosis.sensitivity import Sensitivity, UniformDamage, WholeDamage
from assay_pipeline.mixes import written_recipe
from assay_pipeline.mixes.proposal import machine_for
from assay_pipeline.targets import resolve_target
from assay_quantize.checkpoint.checkpoint import open_checkpoint
from assay_quantize.plan.planner import make_plan

WIDE = ("w4a16", "w4a16_g32", "nvfp4", "fp8_channel")


def weak(layer: int, role: str, scheme: str) -> float:
    """Experts of layer 2 lose ten times as much."""
    return by_bits(layer, role, scheme) * (10 if (layer, role) == (2, "routed_expert") else 1)


@pytest.fixture(scope="module")
def record(tiny_glm: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The record's own uniform measurement loses more than the sum."""
    path = tmp_path_factory.mktemp("sensitivity") / "sensitivity.json"
    made = sensitivity(open_checkpoint(tiny_glm), weak, WIDE)
    ends = Interval(value=0.11, low=0.1, high=0.12, n=24)
    uniform = UniformDamage(scheme="w4a16", bytes=1, damage_nats=0.11, interval=ends, sum_of_parts_nats=0.1)
    made.model_copy(update={"uniform": (uniform,)}).save(path)
    return path


def test_recipe_record_and_picture(run: Run, tiny_glm: Path, record: Path, tmp_path: Path) -> None:
    out = tmp_path / "small.yaml"
    code, printed, said = run("recipe", tiny_glm, "--budget", "4.4bpw", "--sensitivity", record, "--no-replay", "--out", out)
    assert code == 0, said
    recipe, mix = parse_recipe(PrecisionRecipe, out), Mix.load(tmp_path / "small.json")
    plan = make_plan(open_checkpoint(tiny_glm), recipe, model="tiny", family=None)
    assert (recipe.name, mix.name, mix.point.bytes) == ("small", "small", plan.bytes_out)
    assert mix.point.bytes <= (mix.budget_bytes or 0) and mix.point.bits_per_weight <= 4.4
    assert {tensor.scheme for tensor in plan.tensors if ".layers.2.mlp.experts." in tensor.name} == {"w4a16_g32"}
    picture = xml.etree.ElementTree.parse(tmp_path / "small.svg").getroot()
    assert picture.tag == "{http://www.w3.org/2000/svg}svg"
    words = "".join(picture.itertext())
    assert all(one.name in words for one in (mix.point, *mix.controls)) and "4.4bpw" in words
    assert printed.splitlines()[1] == mix.reason
    assert "sum against measured: uniform w4a16 (sensitivity): 0.1 expected, 0.11 (0.1 to 0.12) measured" in printed
    assert "Chosen on 24 replies (sha256 cccccccccccccccc): judge it on others." in printed
    assert sorted(path.name for path in tmp_path.iterdir()) == ["small.json", "small.svg", "small.yaml"]


def test_without_out_the_recipe_is_printed_and_nothing_written(run: Run, tiny_glm: Path, record: Path, tmp_path: Path) -> None:
    code, printed, _ = run("recipe", tiny_glm, "--budget", "4.4bpw", "--sensitivity", record, "--no-replay")
    assert code == 0 and "\nschema: 1\nname: tiny-glm4-moe-4.4bpw\n" in printed
    assert list(tmp_path.iterdir()) == []


def test_json_is_the_record(run: Run, tiny_glm: Path, record: Path) -> None:
    code, printed, _ = run(
        "recipe",
        tiny_glm,
        "--budget",
        "3.7MB",
        "--sensitivity",
        record,
        "--schemes",
        "w4a16,w4a16_g32",
        "--json",
        "--no-replay",
    )
    mix = Mix.model_validate_json(printed)
    assert code == 0 and (mix.budget, mix.budget_bytes) == ("3.7MB", 3_700_000)
    assert {part.scheme for part in mix.parts} <= {"w4a16", "w4a16_g32", "bf16"}


def test_hardware_takes_what_it_computes_and_can_share(run: Run, tiny_glm: Path, record: Path) -> None:
    """Four H200: experts of 128 have 32 columns on each, NVFP4 is computed as W4A16."""
    asked = ("recipe", tiny_glm, "--profile", "4xh200", "--users", 2, "--context", "4k", "--no-replay", "--sensitivity", record)
    code, printed, said = run(*asked, "--budget", "4.6bpw", "--json")
    assert code == 0, said
    mix = Mix.model_validate_json(printed)
    left = {(one.role, one.layers, one.scheme): one.why for one in mix.not_taken}
    assert left["routed_expert", "1-2", "nvfp4"] == "H200 computes it as W4A16, which was not what was measured"
    assert left["routed_expert", "1-2", "w4a16"].startswith("routed_expert down_proj: 32 inputs on each of 4 ranks")
    assert {part.scheme for part in mix.parts if part.role == "routed_expert"} == {"w4a16_g32"}
    assert (mix.hardware, mix.users, mix.context, mix.replayed) == ("4xh200", 2, 4096, "not asked: --no-replay")
    code, printed, _ = run(*asked, "--json")  # what fits: all of it in 8 bits or 16
    assert code == 2 or Mix.model_validate_json(printed).budget_bytes is None


def test_what_a_gpu_computes_is_asked_of_experts_and_linear_layers(tiny_glm: Path) -> None:
    """RTX PRO 6000: vLLM computes MXFP8 in linear layers, and unpacks it for experts."""
    said = machine_for(resolve_target(str(tiny_glm)), "4xrtx-pro-6000", ["mxfp8", "nvfp4"], 2, 4096)
    assert said is not None and list(said.refused) == [("mxfp8", True)]


@pytest.mark.slow
def test_vllms_loaders_take_the_mix(run: Run, tiny_glm: Path, record: Path, tmp_path: Path) -> None:
    out = tmp_path / "served.yaml"
    asked = ("--budget", "4.6bpw", "--hardware", "4xh200", "--users", 2, "--context", "4k")
    code, printed, said = run("recipe", tiny_glm, *asked, "--sensitivity", record, "--out", out)
    assert code == 0, said
    assert "vLLM's loaders: PASS: vLLM 0.32.0 loads target and draft on 4 ranks" in printed
    assert "experts w4a16_g32 MARLIN (MarlinExperts) (2)" in printed
    assert Mix.load(tmp_path / "served.json").replayed.startswith("PASS: ")


@pytest.mark.slow
def test_without_hardware_vllms_loaders_for_one_gpu_are_asked(run: Run, tiny_glm: Path, record: Path, tmp_path: Path) -> None:
    """Also of a recipe whose MTP block is quantized, with schemes of its own."""
    out = tmp_path / "mtp.yaml"
    asked = ("--budget", "3.5MB", "--base", "w4a16-mtp", "--sensitivity", record, "--out", out)
    code, _, said = run("recipe", tiny_glm, *asked)
    assert code == 0, said
    replayed, mix = Mix.load(tmp_path / "mtp.json").replayed, parse_recipe(PrecisionRecipe, out)
    assert replayed.startswith("PASS: vLLM 0.32.0 loads target and draft on 1 rank")
    assert replayed.endswith("(asked for one B200, as no --profile is said)")
    assert mix.mtp == "quantize" and mix.layers and set(mix.quantize.values()) == {"w4a16"}  # type: ignore[union-attr]


def test_what_a_run_measured_stands_beside_the_sum_and_decides(run: Run, tiny_glm: Path, record: Path, tmp_path: Path) -> None:
    """The mix and w4a16-g32 as a run measured them: first with w4a16-g32 behind, then ahead."""
    schemes = ("--schemes", "w4a16,w4a16_g32,fp8_channel")
    asked = ("recipe", tiny_glm, "--budget", "5bpw", *schemes, "--sensitivity", record, "--no-replay")
    assert run(*asked, "--out", tmp_path / "mix.yaml")[0] == 0
    first, folder = Mix.load(tmp_path / "mix.json"), tmp_path / "run"
    assert first.proposes == "mix" and first.advantage is not None and first.advantage.uniform == "w4a16-g32"
    checkpoint = open_checkpoint(tiny_glm)
    made = {"w4a16": tmp_path / "mix.yaml", "nvfp4a16": recipe_file(PrecisionRecipe, "w4a16-g32")}  # label -> what it is of
    for label, path in made.items():
        plan = make_plan(checkpoint, parse_recipe(PrecisionRecipe, path), model="tiny", family=None)
        (folder / label).mkdir(parents=True)
        plan.save(folder / label / "plan.json")
    for uniform_nats, proposes in ((0.03, "mix"), (0.02, "uniform")):
        (folder / "measurements").mkdir(exist_ok=True)
        for measurement in make_measurements():
            divergence = measurement.divergence
            if measurement.label in made and divergence is not None:
                nats = 0.025 if measurement.label == "w4a16" else uniform_nats
                kl = Interval(value=nats, low=nats - 0.001, high=nats + 0.001, n=24)
                measurement = measurement.model_copy(
                    update={"divergence": divergence.model_copy(update={"kl_corrected_mean": kl})}
                )
            measurement.save(folder / "measurements" / f"{measurement.label}.json")
        code, printed, said = run(*asked, "--run", folder, "--json")
        assert code == 0, said
        mix = Mix.model_validate_json(printed)
        assert mix.proposes == proposes, mix.reason
        checks = {one.name: one for one in mix.checks if one.source == f"{folder}, against fp8"}
        sums = sum(part.measured_nats or 0.0 for part in first.parts)
        assert checks["w4a16"].predicted_nats == pytest.approx(sums) and checks["w4a16"].measured_nats == 0.025
        assert checks["nvfp4a16"].interval is not None and checks["nvfp4a16"].interval.value == uniform_nats
    assert mix.reason.startswith(
        f"w4a16-g32 is proposed: measured in {folder}, against fp8, it loses 0.02 nats a token, and the mix 0.025"
    )


def test_what_was_measured_as_a_whole_decides(run: Run, tiny_glm: Path, tmp_path: Path) -> None:
    """As docs/mixed-precision.md has it: the uniform recipe is proposed, the mix is asked for, measured and proposed."""
    unsure = sensitivity(open_checkpoint(tiny_glm), weak, WIDE, error=3.0)
    of_schemes = {"w4a16": 0.06, "w4a16_g32": 0.05, "nvfp4": 0.055}
    lost = [
        UniformDamage(scheme=scheme, bytes=1, damage_nats=nats, sum_of_parts_nats=0.1) for scheme, nats in of_schemes.items()
    ]
    file = tmp_path / "sensitivity.json"
    unsure.model_copy(update={"uniform": tuple(lost)}).save(file)
    asked = ("recipe", tiny_glm, "--budget", "5bpw", "--sensitivity", file, "--no-replay")
    code, _, said = run(*asked, "--out", tmp_path / "first.yaml")
    first = Mix.load(tmp_path / "first.json")
    assert code == 0 and first.proposes == "uniform", said
    assert "measures it as a whole, and this command then goes by that" in said
    code, printed, said = run(*asked, "--mix", "--out", tmp_path / "mix.yaml")
    mix = Mix.load(tmp_path / "mix.json")
    assert (code, mix.proposes, printed.splitlines()[1]) == (0, "mix", f"Written as a mix was asked for. {first.reason}")
    chosen = tuple((part.layer, part.role, part.scheme) for part in mix.parts if part.scheme != "bf16")
    for nats, proposes in ((0.04, "mix"), (0.051, "uniform")):
        whole = WholeDamage(schemes=chosen, damage_nats=nats, sum_of_parts_nats=0.1)
        unsure.model_copy(update={"uniform": tuple(lost), "wholes": (whole,)}).save(file)
        code, printed, said = run(*asked, "--json")
        again = Mix.model_validate_json(printed)
        assert (code, again.proposes) == (0, proposes) and "the sums cannot tell" not in said, again.reason
        assert f"{nats:.4g}" in again.reason and "0.05" in again.reason
        assert (again.parts == mix.parts) == (proposes == "mix")


# ------------------------------------------------------------------------------------------------ wrong input
WRONG: list[tuple[list[Any], str]] = [
    ([], "say --budget SIZE, such as 405GB or 4.5bpw, or --profile NAME for what fits there"),
    (["--budget", "much"], "--budget much: not a valid size; write 405GB or 377GiB for the whole checkpoint, or 4.5bpw"),
    (["--budget", "0GB"], "--budget 0GB: not a valid size"),
    (["--budget", "45bpw"], "--budget 45bpw: bits per weight lie between 4 and 16"),
    (["--budget", "1kB"], "--budget 1kB: is 1 kB, the smallest choice takes 3.62 MB (4.13 bits per weight)"),
    (["--budget", "9GB"], "--budget 9GB: holds the whole checkpoint in 16 bits"),
    (["--budget", "4.5bpw", "--users", "3"], "--users is not used without --profile; leave it out"),
    (["--budget", "4.5bpw", "--hardware", "cpu-emulated"], "--profile cpu-emulated: says of no GPU how much memory it has"),
    (["--budget", "4.5bpw", "--schemes", "w8a8"], "--schemes w8a8: the sensitivity record has fp8_channel, nvfp4, w4a16, w4a1"),
    (["--budget", "4.5bpw", "--base", "w4a16-mse"], "has `observer: mse`, the sensitivities were measured with minmax"),
    (
        ["--budget", "4.5bpw", "--base", "w4a16-gptq"],
        "--base w4a16-gptq: has `calibration: gptq`, the sensitivities were measured with none; take w4a16 or another base",
    ),
    *(
        (
            ["--budget", "4.5bpw", "--base", name],
            f"--base {name}: has scales that come from a file of `assay calibrate`, with which nothing was measured; take "
            "w4a16 or another base without",
        )
        for name in ("nvfp4-calibrated", "fp8-static", "fp8-kv")
    ),
    (["--budget", "4.5bpw", "--out", "x.json"], "--out x.json: is no .yaml file; a recipe is one"),
    (["--budget", "4.5bpw", "--out", "no/x.yaml"], "--out no/x.yaml: there is no folder no; make it, or give another name"),
    (["--budget", "4.5bpw", "--out", "bf16.yaml"], "--out bf16.yaml: bf16 already means something in a run's folder"),
]  # fmt: skip


@pytest.mark.parametrize(("arguments", "expected"), WRONG, ids=[line[1][:45] for line in WRONG])
def test_wrong_input_is_one_line(
    run: Run, tiny_glm: Path, record: Path, tmp_path: Path, arguments: list[Any], expected: str
) -> None:
    code, printed, said = run("recipe", tiny_glm, "--sensitivity", record, *arguments)
    assert (code, printed) == (2, "")
    errors = [line for line in said.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1 and expected in errors[0], said
    assert list(tmp_path.iterdir()) == []


def test_a_record_of_another_checkpoint_is_refused(run: Run, record: Path, tmp_path: Path) -> None:
    other = make_tiny_glm4_moe(tmp_path / "other", moe_intermediate=256)
    code, _, said = run("recipe", other, "--budget", "4.5bpw", "--sensitivity", record)
    assert code == 2 and "whose tensors are not those of" in said and "run `assay sensitivity` on this checkpoint" in said


def test_a_record_whose_bytes_are_others_is_refused(run: Run, tiny_glm: Path, record: Path, tmp_path: Path) -> None:
    data = json.loads(record.read_text())
    part = next(part for part in data["parts"] if part["scheme"] == "w4a16")
    part["bytes"] += 2
    (tmp_path / "changed.json").write_text(json.dumps(data))
    code, _, said = run("recipe", tiny_glm, "--budget", "4.5bpw", "--sensitivity", tmp_path / "changed.json")
    assert (
        code == 2
        and f"layer 0 {part['role']} takes {part['bytes']:,} bytes in w4a16 there, and {part['bytes'] - 2:,} in" in said
    )


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("scheme", "w4a61", "layer 0 attention: w4a61 is no scheme; did you mean w4a16? run `assay sensitivity` again"),
        ("damage_nats", 1e308, "layer 0 attention: loses 1e+308 nats a token in w4a16, which no divergence does"),
        (None, {"tokens": 5}, "not a Sensitivity record of schema 1: Value error, calibration: names no method"),
    ],
)
def test_a_record_that_was_edited_is_refused_in_a_line(
    run: Run, tiny_glm: Path, record: Path, tmp_path: Path, key: str | None, value: Any, expected: str
) -> None:
    data = json.loads(record.read_text())
    part = next(part for part in data["parts"] if part["scheme"] == "w4a16")
    data, part[key or "scheme"] = (data, value) if key else (data | {"calibration": value}, "w4a16")
    (tmp_path / "edited.json").write_text(json.dumps(data))
    code, _, said = run("recipe", tiny_glm, "--budget", "4.5bpw", "--sensitivity", tmp_path / "edited.json")
    assert code == 2 and said.startswith("error: ") and expected in said and said.count("\n") == 1


@pytest.mark.parametrize(("kind", "nats"), [("uniform", -0.01), ("wholes", -0.01), ("wholes", 1e308)])
def test_what_no_mix_loses_is_refused(run: Run, tiny_glm: Path, record: Path, tmp_path: Path, kind: str, nats: float) -> None:
    """A whole that loses less than nothing would always be proposed."""
    data = json.loads(record.read_text())
    data["wholes"] = [{"schemes": [[0, "attention", "w4a16"]], "damage_nats": 0.1, "sum_of_parts_nats": 0.1}]
    data[kind][0]["damage_nats"] = nats
    (tmp_path / "edited.json").write_text(json.dumps(data))
    code, _, said = run("recipe", tiny_glm, "--budget", "4.5bpw", "--sensitivity", tmp_path / "edited.json")
    name = "a mix" if kind == "wholes" else f"uniform {data[kind][0]['scheme']}"
    assert (code, said.count("\n")) == (2, 1)
    assert f"edited.json: {name} loses {nats:g} nats a token as a whole, which no divergence does; run `assay s" in said


def test_a_record_of_other_files_is_noted(run: Run, tiny_glm: Path, record: Path, tmp_path: Path) -> None:
    """They may be a copy; or the same names and shapes, trained on since."""
    command = ("recipe", tiny_glm, "--budget", "4.5bpw", "--no-replay", "--sensitivity")
    assert "was made of other files than those of" in run(*command, record)[2]
    same = Sensitivity.load(record).model_copy(update={"data_sha256": sha256_of(dict(open_checkpoint(tiny_glm).data))})
    same.save(tmp_path / "same.json")
    code, _, said = run(*command, tmp_path / "same.json")
    assert code == 0 and "other files" not in said


def test_scores_that_are_no_nats_are_refused(run: Run, tiny_glm: Path, record: Path, tmp_path: Path) -> None:
    made = Sensitivity.load(record).model_copy(update={"in_nats": False, "method": "proxy:weights"})
    made.save(tmp_path / "weights.json")
    code, _, said = run("recipe", tiny_glm, "--budget", "4.5bpw", "--sensitivity", tmp_path / "weights.json")
    assert code == 2 and "weights.json: its damages are no nats (proxy:weights): they order parts, and do not add up" in said


def test_no_record_says_how_to_get_one(run: Run, tiny_glm: Path) -> None:
    code, _, said = run("recipe", tiny_glm, "--budget", "4.5bpw")
    assert code == 2 and "runs/tiny-glm4-moe/sensitivity.json: no such file; `assay sensitivity" in said


def test_what_is_there_is_not_overwritten(run: Run, tiny_glm: Path, record: Path, tmp_path: Path) -> None:
    (tmp_path / "mine.svg").write_text("mine")
    code, _, said = run("recipe", tiny_glm, "--budget", "4.5bpw", "--sensitivity", record, "--out", tmp_path / "mine.yaml")
    assert code == 2 and "mine.svg exists already" in said and (tmp_path / "mine.svg").read_text() == "mine"


def test_a_command_that_was_killed_between_its_files_goes_on(
    run: Run, tiny_glm: Path, record: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before, it was refused for its own files."""
    command = ("recipe", tiny_glm, "--budget", "4.4bpw", "--sensitivity", record, "--no-replay", "--out", tmp_path / "a.yaml")
    written: list[str] = []

    def interrupted(path: Path, text: str, *, only_new: bool = False) -> None:
        written.append(path.name)
        if len(written) == 3:
            raise KeyboardInterrupt
        write_text_atomically(path, text, only_new=only_new)

    with monkeypatch.context() as patched:
        patched.setattr(written_recipe, "write_text_atomically", interrupted)
        assert run(*command)[0] == 130
    # the recipe is the last: where it is, the others are
    assert (written, sorted(path.name for path in tmp_path.iterdir())) == (["a.json", "a.svg", "a.yaml"], ["a.json", "a.svg"])
    (tmp_path / ".a.svg.0123abcd.partial").write_text("half of it")
    assert run(*command)[0] == 0
    whole = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert sorted(whole) == ["a.json", "a.svg", "a.yaml"]
    assert run(*command)[0] == 0 and {path.name: path.read_bytes() for path in tmp_path.iterdir()} == whole
    (tmp_path / "a.json").write_text("{}")
    assert run(*command)[0] == 2 and (tmp_path / "a.json").read_text() == "{}"
