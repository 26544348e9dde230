"""How words of the command line are read: several values, choices, targets, and options that a form does not use."""

from __future__ import annotations

import re
from pathlib import Path
from typing import get_args

import pytest
import typer
from command_errors import one_error
from command_line import Run

from assay.recipes.load import load_recipe, recipe_names
from assay.recipes.profile import ProfileRecipe
from assay.records.diagnosis.lever import LeverName
from assay.records.probe import ProbeName
from assay_cli.options import several
from assay_cli.root import app
from assay_cli.typer_commands import EARLIER_NAMES, SINGLE_LINE_END
from assay_evaluate.diagnosis.levers.settings import LEVERS
from assay_evaluate.diagnosis.probes.run_probes import PROBES
from assay_pipeline.targets import url_in


# ------------------------------------------------------------------------------------------------ several values
@pytest.mark.parametrize(
    ("given", "values"),
    [
        (None, None),
        ([], None),
        (["a,b"], ["a", "b"]),
        (["a", "b"], ["a", "b"]),
        (["a , b", "c", "b,a"], ["a", "b", "c"]),
        (["a b", "c  d,e"], ["a", "b", "c", "d", "e"]),
        (["a" * 300 + "," + "b" * 300], ["a" * 300, "b" * 300]),  # longer than a name on a disk may be
    ],
)
def test_commas_blanks_and_repetition_are_one_rule(given: list[str] | None, values: list[str] | None) -> None:
    assert several(given) == values


@pytest.mark.parametrize("given", [" ,", ","])
def test_commas_alone_do_not_mean_the_default(run: Run, given: str) -> None:
    assert one_error(run("quantize", "x", "--precisions", given)) == (
        f"{given!r}: names nothing; give a value, or leave the option out"
    )


@pytest.mark.parametrize(
    ("words", "after"),
    [
        (("quantize", ""), "quantize"),
        (("quantize", "tiny-glm", "--precisions", ""), "--precisions"),
        (("quantize", "tiny-glm", "-p", "w4a16", "--out", ""), "--out"),
        (("quantize", "tiny-glm", "--runs="), "--runs="),
        (("verify", "", "--json"), "verify"),
        (("evaluate", "--reference", "", "--candidate", "b"), "--reference"),
        (("probe", "http://127.0.0.1:1", "--probes", ""), "--probes"),
        (("",), "assay"),
    ],
)
def test_an_empty_word_is_neither_the_working_directory_nor_the_default(run: Run, words: tuple[str, ...], after: str) -> None:
    said = one_error(run(*words))
    assert said == f"nothing stands after {after}: give a value, or leave it out (is a shell variable empty?)"


@pytest.mark.parametrize("words", [("status",), ("gate", "x"), ("quantize", "tiny-glm", "-p", "w4a16")])
def test_runs_is_a_folder(run: Run, words: tuple[str, ...], tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert one_error(run(*words, "--runs", str(tmp_path / "file"))) == f"--runs {tmp_path / 'file'}: is a file; give a folder"


def test_a_path_with_a_comma_is_one_value(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a,b").mkdir()
    assert several(["a,b", "c,d"]) == ["a,b", "c", "d"]


def test_a_path_with_blanks_is_one_value_with_its_weight(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("my text.jsonl").touch()
    assert several(["my text.jsonl", "my text.jsonl@0.7,own@0.3"]) == ["my text.jsonl", "my text.jsonl@0.7", "own@0.3"]


# ------------------------------------------------------------------------------------------------ options of every command
def test_quiet_leaves_results_and_errors(run: Run, tiny_glm: Path) -> None:
    """Before the command's name and behind it."""
    _, result, notes = run("init", tiny_glm)
    assert notes.splitlines()[-1].startswith("next: ")
    for words in (("-q", "init", tiny_glm, "--force"), ("init", tiny_glm, "--force", "--quiet")):
        assert run(*words) == (0, result, "")
    assert one_error(run("init", tiny_glm, "-q")).startswith(f"{result.strip()}: exists already; ")
    assert run("init", tiny_glm, "--force")[2] == notes  # nothing is kept for the next command


def test_verbose_shows_where_an_error_came_from(run: Run) -> None:
    code, out, err = run("-v", "init", "nowhere")
    assert (code, out) == (2, "") and err.startswith("Traceback (most recent call last):")
    assert err.splitlines()[-1].startswith("error: nowhere: no such folder")
    assert one_error(run("init", "nowhere")).startswith("nowhere: no such folder")
    assert one_error(run("-q", "init", "nowhere", "-v")) == "--quiet and --verbose contradict each other; give one of them"


@pytest.mark.parametrize(
    ("command", "earlier", "now"),
    [(command, *names) for command, renamed in EARLIER_NAMES.items() for names in renamed.items()],
)
def test_earlier_names_of_options_still_work_and_are_not_shown(run: Run, command: str, earlier: str, now: str) -> None:
    group = typer.main.get_command(app)
    word = {"--hardware": "4xh200"}.get(earlier, "3")
    for words in ([earlier, word], [f"{earlier}={word}"]):
        made = group.get_command(None, command).make_context(command, ["x", *words])
        assert word in map(str, made.params.values())
    shown = run(command, "--help")[1]
    assert now in shown and not re.search(rf"{earlier}\s", shown)


def test_tensor_parallel_size_takes_the_place_of_the_profiles(run: Run) -> None:
    profile = load_recipe(ProfileRecipe, "4xh200")
    changed = profile.with_tensor_parallel(2)
    assert (changed.flags, changed.hardware.num_gpus) == (profile.flags | {"tensor-parallel-size": 2}, 2)
    assert changed.model_copy(update={"vllm": profile.vllm, "hardware": profile.hardware}) == profile
    assert profile.with_tensor_parallel(None) is profile
    on_cpu = load_recipe(ProfileRecipe, "cpu-emulated").with_tensor_parallel(2)
    assert (on_cpu.flags["tensor-parallel-size"], on_cpu.hardware.num_gpus) == (2, 0)
    assert one_error(run("judge", "http://127.0.0.1:1", "http://127.0.0.1:2", "--tensor-parallel-size", "2")) == (
        "--tensor-parallel-size: is for servers that assay starts, and these run already; leave it out"
    )


# ------------------------------------------------------------------------------------------------ choices
LISTED = "`assay recipes precisions` lists all 30"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("quantize", "x", "--precisions", "fp8,w4a61"), "no precision recipe called 'w4a61'; did you mean w4a16? " + LISTED),
        (("plan", "x", "-p", "INT4"), "no precision recipe called 'INT4'; did you mean w4a16? " + LISTED),
        (("plan", "x", "-p", "gptq"), "no precision recipe called 'gptq'; did you mean w4a16-gptq? " + LISTED),
        (("plan", "x", "-p", "4-bit"), "no precision recipe called '4-bit'; did you mean w4a16? " + LISTED),
        (
            ("quantize", "x", "--precision", "nvfp4a61"),
            "no precision recipe called 'nvfp4a61'; did you mean nvfp4a16? " + LISTED,
        ),
        (("plan", "x", "-p", "fp9"), "no precision recipe called 'fp9'; did you mean fp8? " + LISTED),
        (("evaluate", "x", "--suite", "quik"), "no suite recipe called 'quik'; did you mean quick? known: "),
        (("evaluate", "x", "--precisions", "w4a17"), "no precision recipe called 'w4a17'; did you mean w4a16? " + LISTED),
        (("serve", "x", "--profile", "cpu"), "no profile recipe called 'cpu'; known: "),
        (("probe", "x", "--profile", "8xh100"), "no profile recipe called '8xh100'; did you mean 8xh200? known: "),
        (("gate", "x", "--gates", "defualt"), "no gate recipe called 'defualt'; did you mean default? known: "),
        (("quantize", "x", "--runner", "rya"), "--runner rya: did you mean ray? it takes one of: local, ray"),
        (("quantize", "x", "--stream-from", "disk"), "--stream-from disk: it takes one of: hub"),
        (
            ("probe", "x", "--probes", "argmax,garbel"),
            "--probes garbel: did you mean garble? it takes one of: argmax, recompute, consensus, routing, determinism, "
            "speculation, acceptance, temperature, tools, garble, text, nonfinite, swapped",
        ),
    ],
)
def test_names_are_checked_by_the_parser(run: Run, words: tuple[str, ...], said: str) -> None:
    """`x` is nothing at all: it is not looked at before."""
    message = one_error(run(*words))
    assert message == said + (", ".join(recipe_names(f"{said.split()[1]}s")) if said.endswith("known: ") else "")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["frob"], "assay: no such command 'frob'. Did you mean 'probe'? `assay --help` lists what it takes"),
        (["--frob"], "assay: no such option: --frob; `assay --help` lists what it takes"),
        (["compare"], "assay compare: missing argument 'RUN'; `assay compare --help` lists what it takes"),
        (["family"], "assay family: missing argument 'CONFIG|TARGET'; `assay family --help` lists what it takes"),
        (
            ["plan", "tiny-glm", "--precisions", "w4a16"],
            "assay plan: no such option: --precisions; did you mean --precision? `assay plan --help` lists what it takes",
        ),
        (
            ["choose", "--price", "x"],
            "assay choose: invalid value for '--price': 'x' is not a number; `assay choose --help` lists what it takes",
        ),
        (
            ["judge", "a", "--limit", "ten\x1b[31m"],
            "assay judge: invalid value for '--limit': 'ten\\u001b[31m' is not a whole number; `assay judge --help` lists what "
            "it takes",
        ),
        (
            ["judge", "a", "--limit", "0"],
            "assay judge: invalid value for '--limit': '0' is below 1; `assay judge --help` lists what it takes",
        ),
        (
            ["verify", "a", "--sample", "2"],
            "assay verify: invalid value for '--sample': '2' is above 1; `assay verify --help` lists what it takes",
        ),
        (
            ["run", "a", "--again", "fp8"],
            "assay run: no such option: --again, which is an option of judge, evaluate and setup; `assay run --help` lists "
            "what it takes",
        ),
        (
            ["probe", "http://a", "--reuqests", "5"],
            "assay probe: no such option: --reuqests; did you mean --requests? `assay probe --help` lists what it takes",
        ),
        (
            ["plan", "a", "-p", "w4a16", "[b]\x1b[31m"],
            "assay plan: got unexpected extra argument(s) ([b]\\x1b[31m); `assay plan --help` lists what it takes",
        ),
        (
            ["calibrate", "tiny-glm", "--out", "x", "--seed", str(2**70)],
            "--seed 1180591620717411303424: beyond 64 bits; give a smaller number",
        ),
        (
            ["calibrate", "tiny-glm", "--out", "x", "--tokens", "9" * 400],
            f"--tokens {24 * '9'}…: beyond 64 bits; give a smaller number",
        ),
        (["gpu-check", "--minutes", "inf"], "--minutes inf: is no number; give a finite one"),
    ],
)
def test_wrong_usage_is_one_line(run: Run, words: list[str], said: str) -> None:
    assert one_error(run(*words)) == said


@pytest.mark.parametrize("key", ["seed", "tokens"])
def test_numbers_of_a_recipe_that_no_machine_counts(run: Run, tiny_glm: Path, tmp_path: Path, key: str) -> None:
    (tmp_path / "own.yaml").write_text(
        f"schema: 1\nname: own\ndescription: d\nextends: w4a16\ncalibration: {{method: gptq, {key}: {2**70}}}\n"
    )
    said = one_error(run("quantize", tiny_glm, "-p", "own.yaml", "--out", tmp_path / "made"))
    assert said == f"own.yaml: not plain YAML: line 5 has the whole number {2**70}, beyond 64 bits; write a smaller one"
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize(
    ("command", "option", "kind"),
    [
        ("quantize", "--precisions", "precisions"),
        ("evaluate", "--suite", "suites"),
        ("serve", "--profile", "profiles"),
        ("gate", "--gates", "gates"),
    ],
)
def test_help_shows_the_choices(run: Run, command: str, option: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "4000")
    code, out, _ = run(command, "--help")
    line = next(line for line in out.splitlines() if option in line)
    assert code == 0 and ", ".join(recipe_names(kind)) in line


@pytest.mark.parametrize("command", list(typer.main.get_command(app).commands))
def test_help_has_no_signs_of_the_parser(run: Run, command: str) -> None:
    """`TARGET`, not `{TARGET}`; a flag takes no value; a paragraph has no line break of the source."""
    code, out, _ = run(command, "--help")
    usage = next(line for line in out.splitlines() if "Usage:" in line)
    assert code == 0 and not set("{}") & set(usage) and "[[" not in usage
    assert not re.search(r"--\S+ .*<(bool|str|int|float|path|list)", out)
    assert not SINGLE_LINE_END.search(typer.main.get_command(app).commands[command].help or "")


def test_names_on_the_command_line_are_those_of_the_tables() -> None:
    assert get_args(ProbeName) == tuple(PROBES)
    assert get_args(LeverName) == tuple(LEVERS)


# ------------------------------------------------------------------------------------------------ targets
def test_a_misspelt_recipe(run: Run) -> None:
    message, said = one_error(run("plan", "tiny-gml", "-p", "w4a16")), "no such folder, and no model recipe of that name"
    assert message.startswith(f"tiny-gml: {said}; did you mean tiny-glm? known recipes: ")
    assert one_error(run("plan", "tiny-gml")) == message  # before it asks for a precision


def test_a_mistyped_path_is_not_asked_of_the_hub(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "assay_quantize.checkpoint.hub.open_hub_checkpoint",
        lambda *asked, **_: pytest.fail(f"the hub was asked for {asked[0]}"),
    )
    Path("models/glm-tiny").mkdir(parents=True)
    give = "; give a checkpoint's folder (with config.json and *.safetensors)"
    not_an_id = "; a Hugging Face id cannot begin with the name of a folder that is here"
    here = Path.cwd()
    for text, said in {
        "models/glm-tyni": "no such folder: models has no 'glm-tyni'; did you mean models/glm-tiny?" + not_an_id,
        "models/other": "no such folder: models has no 'other'" + give + not_an_id,
        "models/glm-tyni/fp8/checkpoint": "no such folder: models has no 'glm-tyni'; did you mean models/glm-tiny?",
        "./model/glm-tiny": f"no such folder: {here} has no 'model'; did you mean models?",
        "./x": f"no such folder: {here} has no 'x'{give}",
    }.items():
        assert one_error(run("plan", text, "-p", "w4a16")) == f"{text}: {said}"


def test_an_id_is_asked_of_the_hub(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr("assay_quantize.checkpoint.hub.open_hub_checkpoint", lambda hub_id, *_, **__: asked.append(hub_id))
    with pytest.raises(AttributeError):
        run("plan", "org/model", "-p", "w4a16")
    assert asked == ["org/model"]


@pytest.mark.parametrize(
    ("text", "url"),
    [
        ("http://host", "http://host"),
        ("HTTPS://host:1/v1", "HTTPS://host:1/v1"),
        ("localhost:8123", "http://localhost:8123"),
        ("10.0.0.7:8000/v1", "http://10.0.0.7:8000/v1"),
        ("[::1]:8000", "http://[::1]:8000"),
        ("localhost", None),
        ("tiny-glm", None),
        ("org/model", None),
        ("a:b", None),
        ("host:800000", None),
    ],
)
def test_what_is_a_servers_address(text: str, url: str | None) -> None:
    assert url_in(text) == url


def test_a_folder_of_that_name_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("glm:4").mkdir()
    assert url_in("glm:4") is None


def test_an_address_where_a_checkpoint_is_wanted(run: Run) -> None:
    for text in ("localhost:8123", "http://localhost:8123/v1"):
        assert one_error(run("plan", text, "-p", "w4a16")) == (
            f"{text}: is a server's address; give a model recipe's name, a checkpoint folder or a Hugging Face id"
        )


# ------------------------------------------------------------------------------------------------ what a form does not use
def test_nothing_is_ignored(run: Run, tiny_glm: Path) -> None:
    for words, said in {
        ("quantize", tiny_glm, "-p", "fp8", "--out", "made", "--runs", "r"):
            "--runs is not used with --out, which is the folder of the checkpoint itself; leave it out",
        ("quantize", tiny_glm, "-p", "fp8", "--out", "made", "--runs", "runs", "--name", "n"):
            "--runs and --name are not used with --out, which is the folder of the checkpoint itself; leave them out",
        ("quantize", tiny_glm, "-p", "fp8", "--out", "made", "--memory", "10"):
            "--memory 10: say the unit as well: 10GiB, 10MB, ...",
        ("quantize", tiny_glm, "-p", "fp8", "--out", "made", "--runner", "ray", "--workers", "5"):
            "--workers 5: with --runner ray it is the number of threads that make one shard, 4 at most; the number of shards "
            "at once follows from the cluster's cores",
        ("evaluate", "glm", "--budget-check", "--precisions", "w4a16", "--repeats", "2"):
            "--precisions and --repeats are not used with --budget-check, which asks the reference single questions only; "
            "leave them out",
        ("evaluate", "--reference", "a", "--candidate", "b", "--budget-check"):
            "--candidate is not used with --budget-check, which asks the reference single questions only; leave it out",
        ("evaluate", "--reference", "a", "--candidate", "b", "--precisions", "w4a16"):
            "--precisions is not used with --reference, whose candidates are named by --candidate; leave it out",
        ("calibrate", "glm", "--out", "made", "--text", "a.txt", "--seed", "1"):
            "--seed is not used with --text, as nothing is sampled then; leave it out",
    }.items():  # fmt: skip
        assert one_error(run(*words)) == said
        assert list(Path().iterdir()) == []
