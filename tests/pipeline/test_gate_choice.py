"""Gates and suites of one's own: which limits hold, that they are registered first, and what is said of them afterwards."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from command_errors import one_error
from command_line import Run
from given_servers import GivenServers, given_servers

from assay.errors import AssayError, RecipeError
from assay.recipes.gate import (
    AcceptanceGate,
    DivergenceGate,
    GateRecipe,
    ScoreGate,
    SubgroupsGate,
    TruncationGate,
    VerbosityGate,
    gates_on,
)
from assay.recipes.load import load_recipe
from assay.recipes.model import ModelRecipe
from assay.recipes.profile import ProfileRecipe
from assay.recipes.suite import SuiteRecipe
from assay.records.base import sha256_of
from assay.records.verdict import GateReport, RegisteredGates
from assay_pipeline.gate_choice import (
    ChosenGates,
    describe_gates,
    gates_named,
    load_gates,
    register_gates,
    registered_gates,
    suite_for,
)  # fmt: skip
from assay_pipeline.targets import Target

TASK = "{kind: arithmetic, name: sums, num_items: 2, num_steps: [2], max_tokens: 32}"
OTHER = "{kind: arithmetic, name: products, num_items: 2, num_steps: [3], max_tokens: 32}"


def write_suite(name: str, *tasks: str, more: str = "") -> Path:
    path = Path(f"{name}.yaml")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(
        f"schema: 1\nname: {path.stem}\nseed: eval-{path.stem}\nacceptance: false\n{more}tasks: [{', '.join(tasks)}]\n"
    )
    return path


def write_gates(name: str, *gates: str, more: str = "") -> Path:
    path = Path(f"{name}.yaml")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"schema: 1\nname: {path.stem}\n{more}gates: [{', '.join(gates)}]\n")
    return path


def score(task: str, max_drop: float) -> str:
    return f"{{kind: score, task: {task}, max_drop: {max_drop}}}"


@pytest.fixture
def server(run: Run, tiny_glm: Path) -> Iterator[GivenServers]:
    """Answer for two checkpoints, whose weights nobody reads."""
    with given_servers("fp8", "w4a16") as server:
        Path("here.yaml").write_text(server.profile())
        for label in ("fp8", "w4a16"):
            folder = Path("A", label)
            folder.mkdir(parents=True)
            shutil.copy(tiny_glm / "config.json", folder)
            (folder / "model.safetensors").write_bytes(b"\x02\0\0\0\0\0\0\0{}")
        yield server


def evaluate(run: Run, *arguments: object) -> tuple[int, str, str]:
    pair = ("--reference", "A/fp8", "--candidate", "A/w4a16", "--profile", "here.yaml")
    return run("evaluate", *pair, *arguments)


def evaluated(run: Run, *arguments: object) -> str:
    code, _, err = evaluate(run, *arguments)
    assert code == 0, err
    return err


def judged() -> dict[str, str]:
    return {v.gate: v.status for v in GateReport.load(Path("runs/fp8/gates.json")).verdicts if v.candidate == "w4a16"}


# ------------------------------------------------------------------------------------------------ on a suite
def suite_of(*names: str, more: str = "") -> SuiteRecipe:
    tasks = [TASK.replace("sums", name) for name in names]
    return load_recipe(SuiteRecipe, str(write_suite("own", *tasks, more=more)))


def test_every_task_gets_the_default_margin_and_only_what_is_measured_a_gate(tmp_path: Path, run: Run) -> None:
    default = load_recipe(GateRecipe, "default")
    fitted = gates_on(default, suite_of("sums", "products"))
    assert fitted.gates == (
        ScoreGate(kind="score", task="sums", max_drop=0.05),
        ScoreGate(kind="score", task="products", max_drop=0.05),
        SubgroupsGate(kind="subgroups"),
        TruncationGate(kind="truncation", max_share=0.05),
        VerbosityGate(kind="verbosity", max_increase=0.05, decides="nothing"),
    )
    more = "divergence: {num_documents: 2, max_tokens: 8}\n"
    whole = suite_of("sums", more=more).model_copy(update={"acceptance": True})
    assert [type(gate) for gate in gates_on(default, whole).gates] == [
        ScoreGate, SubgroupsGate, DivergenceGate, DivergenceGate, DivergenceGate, AcceptanceGate, TruncationGate,
        VerbosityGate,
    ]  # fmt: skip
    own = write_gates("own-gates", score("sums", 0.1), more="default_max_drop: 0.2\n")
    mixed = gates_on(load_recipe(GateRecipe, str(own)), suite_of("sums", "products"))
    assert {gate.task: gate.max_drop for gate in mixed.gates if isinstance(gate, ScoreGate)} == {"sums": 0.1, "products": 0.2}


REMEDY = "remove it from the gates, or ask for it in the suite"


@pytest.mark.parametrize(
    ("gates", "more", "message"),
    [
        ((score("smus", 0.1),), "", "there is no task 'smus'; did you mean sums? tasks: sums, products"),
        (("{kind: acceptance, max_drop: 0.1}",), "",
         f"a gate on acceptance, which the suite does not measure (`acceptance: false`); {REMEDY}"),
        (("{kind: divergence, metric: kl_mean, max: 0.1}", "{kind: divergence, metric: kl_mean, over: spans, max: 0.1}"), "",
         f"a gate on divergence kl_mean, which the suite does not measure (no `divergence:`); {REMEDY}"),
        (("{kind: divergence, metric: kl_exact_mean, max: 0.1}", score("gsm8k", 0.1)),
         "divergence: {num_documents: 2, max_tokens: 8}\n",
         "2 problems:\n  there is no task 'gsm8k'; tasks: sums, products\n  a gate on divergence kl_exact_mean, which needs "
         "`divergence: {exact: true}` in the suite; " + REMEDY),
        (("{kind: divergence, metric: kl_mean, texts: held_out, max: 0.1}",), "divergence: {num_documents: 2, max_tokens: 8}\n",
         f"a gate on divergence kl_mean of held-out texts, which the suite does not have (`held_out_documents: 0`); {REMEDY}"),
    ],
)  # fmt: skip
def test_a_gate_on_what_the_suite_does_not_ask_is_an_error(run: Run, gates: tuple[str, ...], more: str, message: str) -> None:
    with pytest.raises(RecipeError) as caught:
        load_gates(str(write_gates("mine", *gates)), suite_of("sums", "products", more=more))
    assert str(caught.value) == f"gates mine do not go with suite own: {message}"


def test_a_misspelt_task_is_found_before_anything_is_asked(run: Run, server: GivenServers) -> None:
    gates = write_gates("mine", score("smus", 0.1))
    assert one_error(evaluate(run, "--suite", write_suite("own", TASK), "--gates", gates)) == (
        "gates mine do not go with suite own: there is no task 'smus'; did you mean sums? tasks: sums"
    )
    assert not Path("runs").exists()


# ------------------------------------------------------------------------------------------------ which gates
def target(**fields: object) -> Target:
    recipe = load_recipe(ModelRecipe, "tiny-glm").model_copy(update=fields)
    return Target(recipe, recipe.source)


CPU = load_recipe(ProfileRecipe, "cpu-emulated")
GPU = load_recipe(ProfileRecipe, "8xh200")


def test_the_line_says_why_a_cpu_asks_another_suite(run: Run) -> None:
    suite, why = suite_for(target(suite="full", gates="full"), None, CPU)
    assert (suite.name, why) == (
        "quick",
        "suite quick, judged by gates quick, instead of full: profile cpu-emulated is a CPU, and full lets a reply have up to "
        "65,536 tokens; --suite full insists",
    )
    own = str(write_suite("mine/own", TASK))
    for suite_named, wanted, profile, name in (
        ("full", "full", CPU, "full"), ("full", None, GPU, "full"), (own, None, CPU, "own"),
        ("languages", None, CPU, "languages"),
    ):  # fmt: skip
        suite, why = suite_for(target(suite=suite_named), wanted, profile)
        assert (suite.name, why) == (name, None)


def test_which_gates_go_with_a_suite(run: Run) -> None:
    own = str(write_suite("mine/own", TASK, more="gates: strict.yaml\n"))
    plain, named = suite_of("sums"), load_recipe(SuiteRecipe, own)
    same_name = load_recipe(SuiteRecipe, str(write_suite("quick", TASK)))
    shipped = load_recipe(SuiteRecipe, "full")
    assert gates_named(target(), plain) == "default"
    assert gates_named(target(), named) == "mine/strict.yaml"  # relative to the suite's file
    assert gates_named(target(suite=own, gates="my-model.yaml"), named) == "my-model.yaml"
    assert gates_named(target(suite=own, gates="my-model.yaml"), shipped) == "full"
    assert gates_named(target(), shipped, "other.yaml") == "other.yaml"
    assert gates_named(target(suite="full"), same_name) == "default"  # the shipped quick asks other tasks


def test_a_model_names_files_beside_its_own(run: Run) -> None:
    Path("models").mkdir()
    data = Path(__file__).resolve().parents[2].joinpath("recipes/models/tiny-glm.yaml").read_text()
    data = data.replace("suite: demo", "suite: ../suites/own.yaml\ngates: strict.yaml").replace("name: tiny-glm", "name: mine")
    Path("models/mine.yaml").write_text(data.replace("precisions: [fp8, w4a16,", "precisions: [fp8, my-w4.yaml,"))
    recipe = load_recipe(ModelRecipe, "models/mine.yaml")
    assert (recipe.suite, recipe.gates) == ("models/../suites/own.yaml", "models/strict.yaml")
    assert recipe.precisions == ("fp8", "models/my-w4.yaml", "w4a16-channel", "w4a16-gptq", "nvfp4a16", "auto-4.5bpw")
    assert recipe.reference.precision == "fp8"


def test_other_gates_are_not_another_suite(run: Run) -> None:
    assert suite_of("sums").sha256 == suite_of("sums", more="gates: strict.yaml\n").sha256


# ------------------------------------------------------------------------------------------------ registered
def test_limits_are_registered_once_and_never_after_measuring(tmp_path: Path, run: Run) -> None:
    suite = suite_of("sums")
    first, second = (
        ChosenGates(load_gates(str(write_gates(name, score("sums", margin))), suite), f"{name}.yaml")
        for name, margin in (("first", 0.1), ("second", 0.2))
    )
    run_dir = tmp_path / "run"
    assert register_gates(first, run_dir) == first.recipe
    assert register_gates(second, run_dir) == second.recipe  # nothing was measured yet
    note = registered_gates(run_dir)
    copy = second.recipe.model_dump(mode="json", by_alias=True)
    assert note == RegisteredGates(named="second.yaml", recipe=copy, sha256=sha256_of(copy))
    (run_dir / "measurements").mkdir()
    (run_dir / "measurements/fp8.json").write_text("{}")
    assert register_gates(first, run_dir) == second.recipe
    assert register_gates(replace(second, insisted=True), run_dir) == second.recipe
    with pytest.raises(AssayError, match=r"--gates first\.yaml: .* was measured under gates second, registered before; `assay"):
        register_gates(replace(first, insisted=True), run_dir)
    assert registered_gates(run_dir) == note
    path = run_dir / "gates.registered.json"
    path.write_text(path.read_text().replace("0.2", "0.3"))
    with pytest.raises(
        AssayError, match=r"gates\.registered\.json: was changed after the gates were registered; put the file back"
    ):
        registered_gates(run_dir)
    path.unlink()
    assert register_gates(first, run_dir) == first.recipe and registered_gates(run_dir) is None


def test_a_suite_of_ones_own_is_gated_on_what_it_asks(run: Run, server: GivenServers) -> None:
    err = evaluated(run, "--suite", write_suite("own", TASK, OTHER))
    assert "gates default: 5 points on sums, products; subgroups; truncation; verbosity" in err.splitlines()
    assert judged() == {
        "score sums": "NOT MEASURED",
        "score products": "NOT MEASURED",
        "truncation": "PASS",
        "verbosity": "NOT MEASURED",
    }
    assert "fp8 against fp8" not in err


@pytest.mark.slow
def test_registered_limits_outlive_their_file(run: Run, server: GivenServers) -> None:
    gates, suite = write_gates("mine", score("sums", 0.123)), write_suite("own", TASK, OTHER)
    err = evaluated(run, "--suite", suite, "--gates", gates)
    assert "gates mine: 12.3 points on sums; no gate on products" in err.splitlines()
    before = GateReport.load(Path("runs/fp8/gates.json"))
    assert (before.chosen, before.registered_name) == ("before the run", "mine")
    report = Path("runs/fp8/report/report.md")
    assert "\n## Gates, written before the run\n" in report.read_text()

    write_gates("mine", score("sums", 0.5))
    code, _, err = run("gate", "runs/fp8")
    assert code == 1 and "gates mine.yaml have changed since they were registered; the registered limits are used" in err
    gates.unlink()
    code, _, err = run("gate", "runs/fp8")
    assert code == 1 and "gates mine.yaml cannot be read any more; the registered limits are used" in err
    assert GateReport.load(Path("runs/fp8/gates.json")) == before
    assert run("report", "runs/fp8")[0] == 0 and "\n## Gates, written before the run\n" in report.read_text()

    err = evaluated(run, "--suite", suite)  # the default now would be others: what was registered holds
    assert "gates default are not those registered before runs/fp8 was measured; the registered ones are used" in err
    assert GateReport.load(Path("runs/fp8/gates.json")) == before


@pytest.mark.slow
def test_other_gates_after_the_run_are_called_so_everywhere(run: Run, server: GivenServers) -> None:
    suite, late = write_suite("own", TASK), write_gates("late", score("sums", 0.9))
    evaluated(run, "--suite", suite)
    code, out, err = evaluate(run, "--suite", suite, "--gates", late)
    *notes, error = err.splitlines()
    assert (code, out, error) == (
        2,
        "",
        "error: --gates late.yaml: runs/fp8 was measured under gates default, registered before; `assay gate runs/fp8 --gates "
        "late.yaml` judges by the others, and says that they were chosen after the run",
    )
    assert [note.partition(" tensors_missing")[0] for note in notes] == [
        f"note: {label}: `assay inspect A/{label}` finds it damaged:" for label in ("fp8", "w4a16")
    ]
    code, out, _ = run("gate", "runs/fp8", "--gates", late)
    said = "gates late were chosen after the run; gates default were registered before it"
    assert code == 1 and said in out.splitlines()
    assert GateReport.load(Path("runs/fp8/gates.json")).chosen == "after the run"
    page, text = (Path("runs/fp8/report", name).read_text() for name in ("index.html", "report.md"))
    assert "\n## Gates chosen after the run\n" in text and "<summary>Gates chosen after the run. " in page
    limit = f"{said[0].upper()}{said[1:]}."
    assert limit in text and limit in page
    for shown in (page, text):
        assert "written before the run" not in shown
    assert (
        run("report", "runs/fp8")[0] == 0
        and "\n## Gates chosen after the run\n" in Path("runs/fp8/report/report.md").read_text()
    )


def test_empty_parts_of_a_report_are_one_sentence(run: Run, server: GivenServers) -> None:
    evaluated(run, "--suite", write_suite("own", TASK))
    text = Path("runs/fp8/report/report.md").read_text()
    assert "\n## Divergence was not measured\n\nNot part of suite own.\n" in text
    assert "\n## Acceptance of drafts (MTP) was not measured\n\nNot part of suite own.\n" in text
    assert "own repeat" not in text  # it was compared with it, only not by a divergence that nobody asked for


def test_the_line_of_the_gates(run: Run) -> None:
    quick = load_recipe(SuiteRecipe, "quick")
    assert describe_gates(load_gates("quick", quick), quick) == (
        "gates quick: 5 points on arithmetic, needle; 10 points on codes-en, codes-zh, ruler, needle-grid, tools; divergence; "
        "acceptance; truncation; verbosity"
    )
