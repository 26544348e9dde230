"""The card claims what a record says, and nothing else: each record is taken away once. What the hub and vLLM make of it."""

from __future__ import annotations

import json
import logging
import os
import re
import shlex
import shutil
import subprocess
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from deployments import make_deployment
from huggingface_hub import EvalResultEntry, ModelCard, parse_eval_result_entries
from probe_reports import CLEAN, probed
from synthetic_run import MODEL, make_run, task_of
from typer.main import get_command

import assay_cli as cli
from assay.errors import AssayError
from assay.recipes.load import load_recipe
from assay.recipes.model import Licence as RecipeLicence
from assay.recipes.model import ModelRecipe
from assay.recipes.suite import SuiteRecipe
from assay.records.measurement import ItemResult, Measurement
from assay.records.plan import Plan
from assay.records.run import RunRecord
from assay.records.speed import Quantiles, SpeedRecord, SpeedRepeat, SpeedRow
from assay_evaluate.serving.server import find_interpreter
from assay_reports.card import render, render_card, write_card
from assay_reports.cards.licence import Licence, find_licence
from assay_reports.cards.serving import serve_command
from assay_reports.run import Run, load_run

LABEL = "w4a16"
ROOT = Path(__file__).resolve().parents[2]


# ------------------------------------------------------------------------------------------------ a run with every record
def point(label: str, sha256: str, tokens_s: float, concurrency: int = 8, **changes: Any) -> SpeedRow:
    def repeat(factor: float) -> SpeedRepeat:
        return SpeedRepeat(
            output_tokens_s=tokens_s * factor, ttft_s=Quantiles(mean=0.3, p50=0.25), tpot_s=Quantiles(mean=0.02, p50=0.021),
            memory_bytes=int(96e9 * factor),
        )  # fmt: skip

    row: dict[str, Any] = {
        "checkpoint": label, "checkpoint_sha256": sha256, "origin": "measured", "source": "vllm bench serve 0.32.0",
        "hardware": "8xH200", "num_gpus": 8, "speculation": 0, "prompts": "chat", "concurrency": concurrency,
        "engine": "vllm 0.32.0", "emulated": False, "repeats": (repeat(1.1), repeat(1), repeat(0.9)),
    }  # fmt: skip
    return SpeedRow(**row | changes)


def sha256s(run: Run) -> dict[str, str]:
    return {one.label: one.checkpoint_sha256 for one in run.measurements}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = make_run(tmp_path_factory.mktemp("card"))
    of = sha256s(load_run(run_dir))
    rows = [point(LABEL, of[LABEL], 412), point("fp8", of["fp8"], 397), point("bf16", of["bf16"], 251)]
    SpeedRecord(rows=tuple(rows)).save(run_dir / "speed.json")
    make_deployment().save(run_dir / "deployment" / "4xh200" / "w4a16.json")
    probed(LABEL, *CLEAN).save(run_dir / "probes" / "w4a16.json")
    RunRecord(model=MODEL, choices=("groups of 64, for widths that 128 does not divide",)).save(run_dir / "run.json")
    return run_dir


def card_of(run_dir: Path) -> str:
    return render_card(load_run(run_dir), LABEL, run_dir / LABEL / "checkpoint")


CLAIMS: dict[str, tuple[str, ...]] = {
    "measurements/w4a16.json": (
        "**PASS** against fp8", "model-index", "| arithmetic, correct |", "| top-1 agreement |", "MTP acceptance: 69",
        "assay evaluate tiny-glm", "Sampling: greedy", "PASS: it lost no more than allowed against fp8",
        "The scores are **emulated**", "<!-- assay: checkpoint", "Served on 4xh200",
    ),
    "measurements/bf16.json": ("| bf16 |", "250.2 tokens/s", "the rows of bf16 show"),
    "measurements/fp8-repeat.json": ("| lower bound over the noise floor | 50x |",),
    "measurements/nvfp4a16.json": ("**PASS** against fp8",),  # the verdicts that lie there are about another set
    "gates.json": ("**PASS** against fp8", "| score arithmetic | PASS |", "Gates, written before the run", "it lost no more"),
    "w4a16/verify.json": ("Reopened and verified after writing", "Mean relative weight error"),
    "speed.json": ("410.6 tokens/s, first after 0.25 s, then one every 20 ms", "106 GB a GPU (8xH200)"),
    "deployment/4xh200/w4a16.json": ("Served on 4xh200 and compared with itself",),
}  # fmt: skip
"""Record -> what the card says because of it."""
NO_CARD = {
    "w4a16/plan.json": "no finished checkpoint there", "w4a16/checkpoint/assay_manifest.json": "no finished checkpoint there",
    "measurements/fp8.json": "a run needs exactly one reference measurement, found: none",
}  # fmt: skip
"""Record without which no card is written -> what is said instead."""
ELSEWHERE = {
    "gates.registered.json", "run.json", "probes/w4a16.json",
    "fp8/plan.json", "fp8/verify.json", "fp8/checkpoint/assay_manifest.json",
    "nvfp4a16/plan.json", "nvfp4a16/verify.json", "nvfp4a16/checkpoint/assay_manifest.json",
}  # fmt: skip
"""Records that this card claims nothing by: `gates.json` has its own copy of the first; the others are in the report, or about
other checkpoints."""


def test_every_record_of_the_run_is_taken_away_once(whole: Path) -> None:
    there = {path.relative_to(whole).as_posix() for path in whole.rglob("*.json")}
    assert there == CLAIMS.keys() | NO_CARD.keys() | ELSEWHERE


@pytest.mark.slow
@pytest.mark.parametrize("record", CLAIMS)
def test_without_its_record_a_claim_disappears(whole: Path, tmp_path: Path, record: str) -> None:
    there = card_of(whole)
    assert [claim for claim in CLAIMS[record] if claim not in there] == []
    without = shutil.copytree(whole, tmp_path / MODEL)
    (without / record).unlink()
    assert [claim for claim in CLAIMS[record] if claim in card_of(without)] == []


@pytest.mark.slow
@pytest.mark.parametrize("record", sorted(ELSEWHERE))
def test_records_that_this_card_does_not_rest_on(whole: Path, tmp_path: Path, record: str) -> None:
    without = shutil.copytree(whole, tmp_path / MODEL)
    (without / record).unlink()
    kept, there = card_of(without).splitlines(), card_of(whole).splitlines()
    assert [line for line in there if line not in kept and not re.match(r"- |\d+ more (is|are) in", line)] == []


@pytest.mark.parametrize("record", sorted(NO_CARD))
def test_without_what_it_is_about_there_is_no_card(whole: Path, tmp_path: Path, record: str) -> None:
    without = shutil.copytree(whole, tmp_path / MODEL)
    (without / record).unlink()
    with pytest.raises(AssayError, match=NO_CARD[record]):
        write_card(without, LABEL)


# ------------------------------------------------------------------------------------------------ parts of records
def changed(whole: Path, tmp_path: Path, **parts: Any) -> str:
    """The card if the measurement of w4a16 lacks something."""
    without = shutil.copytree(whole, tmp_path / MODEL)
    path = without / "measurements" / "w4a16.json"
    Measurement.load(path).model_copy(update=parts).save(path)
    return card_of(without)


def test_without_divergence_or_acceptance(whole: Path, tmp_path: Path) -> None:
    card = changed(whole, tmp_path, divergence=None, acceptance=None)
    assert "| KL and agreement | NOT MEASURED" in card and "top-1 agreement |" not in card.partition("## Scores")[2]
    assert "MTP acceptance: NOT MEASURED" in card


def test_without_a_task_its_score_is_not_measured(whole: Path, tmp_path: Path) -> None:
    measured = Measurement.load(whole / "measurements" / "w4a16.json")
    card = changed(whole, tmp_path, tasks=measured.tasks[:1])
    assert "| arithmetic, correct |" in card and "| needle, correct |" not in card
    assert [one.dataset_type for one in ModelCard(card).data.eval_results] == ["assay-quick-arithmetic"]


def test_every_part_of_the_plan_is_a_line(whole: Path) -> None:
    run = load_run(whole)
    plan = run.plans[LABEL]
    for role in sorted({tensor.role for tensor in plan.tensors}):
        cut = plan.model_copy(update={"tensors": tuple(one for one in plan.tensors if one.role != role)})
        card = render_card(replace(run, plans={**run.plans, LABEL: cut}, measurements=()), LABEL, whole)
        kept = {one.role for one in cut.tensors}
        lines = re.findall(r"^\| (\w+) \| (?:kept|quantized)", card, re.MULTILINE)
        assert set(lines) == kept and role not in kept


def test_why_something_was_kept(whole: Path) -> None:
    card = card_of(whole)
    assert "| mtp | kept in BF16 | 1 | 2.77 MB | 2.77 MB | drafts tokens for speculation" in card
    assert re.search(r"^\| attention \| quantized to w4a16 \|.*\| – \|$", card, re.MULTILINE)
    run = load_run(whole)
    plan: Plan = run.plans[LABEL]
    vector = next(one for one in plan.tensors if one.role == "attention")._replace(action="keep", scheme=None)
    more = plan.model_copy(update={"tensors": (*plan.tensors, vector)})
    card = render_card(replace(run, plans={**run.plans, LABEL: more}, measurements=()), LABEL, whole)
    assert "| vectors, or weights that vLLM cannot hold quantized |" in card


def test_a_recipes_description_is_text(whole: Path) -> None:
    """Somebody else's precision: no markup, no link, no code that turns text around, and no end of the metadata."""
    run = load_run(whole)
    plan = run.plans[LABEL]
    said = "<img src=x> [x](http://e) \x1b[31m \u202egnp.exe a\u2028b\n---\nlicense: other\n# Heading | cell"
    odd = plan.model_copy(update={"precision_recipe": {**plan.precision_recipe, "description": said + "x" * 10_000}})
    card = render_card(replace(run, plans={**run.plans, LABEL: odd}), LABEL, whole)
    assert "<img" not in card and "](http://e" not in card and not [c for c in card if not c.isprintable() and c != "\n"]
    assert ModelCard(card).data.to_dict() == ModelCard(card_of(whole)).data.to_dict()
    assert [line for line in card.splitlines() if line.startswith("#")] == [
        line for line in card_of(whole).splitlines() if line.startswith("#")
    ]


# ------------------------------------------------------------------------------------------------ memory and speed
def lines_of(card: str) -> dict[str, list[str]]:
    """Title -> cells, of the table at the top."""
    table = card.partition("\n| |")[2].partition("\n\n")[0]
    rows = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in table.splitlines()[2:]]
    return {row[0].strip("| "): row[1:] for row in rows}


def with_speed(whole: Path, *rows: SpeedRow) -> dict[str, list[str]]:
    run = replace(load_run(whole), speed=SpeedRecord(rows=rows))
    return lines_of(render_card(run, LABEL, whole))


def test_bf16_fp8_and_this_stand_side_by_side(whole: Path) -> None:
    lines = lines_of(card_of(whole))
    title = "output, 8 requests at once (chat prompts, no speculation, 8xH200, vllm 0.32.0)"
    rest = ", first after 0.25 s, then one every 20 ms"
    assert list(lines)[:4] == ["size of the weights", "memory while served", title, "verdict"]
    assert lines["size of the weights"] == ["14.6 MB", "9.1 MB", "6.3 MB"]
    assert lines["memory while served"] == ["106 GB a GPU (8xH200)"] * 3
    assert lines[title] == [f"250.2 tokens/s{rest}", f"395.7 tokens/s{rest}", f"410.6 tokens/s{rest}"]
    assert lines["verdict"] == ["PASS", "reference", "PASS"]


@pytest.mark.parametrize(
    "unlike",
    [
        {"speculation": 3}, {"hardware": "4xH200", "num_gpus": 4}, {"prompts": "code"}, {"concurrency": 16},
        {"engine": "vllm 0.31.0"}, {"parallelism": {"tensor": 8}}, {"emulated": True}, {"origin": "imported"},
        {"origin": "predicted"}, {"checkpoint_sha256": "0" * 64}, {"checkpoint_sha256": None}, {"speculation": None},
    ],
)  # fmt: skip
def test_unlike_speeds_do_not_stand_in_one_line(whole: Path, unlike: dict[str, Any]) -> None:
    of = sha256s(load_run(whole))
    lines = with_speed(whole, point(LABEL, of[LABEL], 412), point("fp8", of["fp8"], 397, **unlike))
    [cells] = [cells for title, cells in lines.items() if title.startswith("output, ")]
    assert cells[:2] == ["not measured", "not measured"] and cells[2].startswith("410.6 tokens/s")


@pytest.mark.parametrize(
    "unlike", [{"emulated": True}, {"origin": "imported"}, {"origin": "predicted"}, {"checkpoint_sha256": "0" * 64}]
)
def test_what_was_not_measured_of_these_bytes_is_no_speed(whole: Path, unlike: dict[str, Any]) -> None:
    lines = with_speed(whole, point(LABEL, sha256s(load_run(whole))[LABEL], 412, **unlike))
    assert lines["speed"] == lines["memory while served"] == ["not measured"] * 3


def test_a_run_without_bf16_says_so(whole: Path, tmp_path: Path) -> None:
    without = shutil.copytree(whole, tmp_path / MODEL)
    (without / "measurements" / "bf16.json").unlink()
    (without / "gates.json").unlink()
    card = card_of(without)
    assert "\n| | BF16 | fp8 (reference) | **w4a16** |\n" in card
    assert {cells[0] for cells in lines_of(card).values()} == {"not measured"}


# ------------------------------------------------------------------------------------------------ the first sentence
@pytest.mark.parametrize(
    ("status", "says"),
    [
        ("PASS", "it lost no more than allowed against fp8 on suite quick (limits fixed before the run, emulated arithmetic)."),
        ("FAIL", "it lost more than allowed against fp8 on suite quick. Use bf16 (14.6 MB), the smallest that passed, or the "
         "reference, fp8."),
        ("UNDERPOWERED", "the data cannot tell whether it lost more than allowed against fp8. Use bf16 "),
        ("NOT MEASURED", "evaluated, but the deciding task gave no result, so there is no verdict. Use bf16 "),
    ],
)  # fmt: skip
def test_the_first_sentence_says_what_it_is_and_how_far_to_trust_it(whole: Path, status: str, says: str) -> None:
    run = load_run(whole)
    assert run.gates is not None
    gates = run.gates.model_copy(update={"overall": {**run.gates.overall, LABEL: status}})
    first = render_card(replace(run, gates=gates), LABEL, whole).partition(f"# {MODEL}, {LABEL}\n\n")[2].splitlines()[0]
    assert first.startswith(f"zai-org/tiny-glm quantized to w4a16: 14.5 MB before, 6.38 MB after. {status}: {says}")


def test_the_first_sentence_of_a_reference_and_of_what_nobody_measured(whole: Path) -> None:
    run = load_run(whole)
    said = " The reference of its run: others were compared with it, and its own loss was not measured.\n"
    assert said in render_card(run, "fp8", whole)
    card = render_card(replace(run, measurements=(), gates=None), LABEL, whole)
    assert " after. Not evaluated yet: for experiments only.\n" in card


def test_five_limits_and_where_the_others_are(whole: Path) -> None:
    limits = card_of(whole).partition("## Limits\n")[2].partition("\n## ")[0]
    assert len(re.findall(r"^- ", limits, re.MULTILINE)) == 5
    assert re.search(r"^\d+ more are in the run's report\.$", limits, re.MULTILINE)


# ------------------------------------------------------------------------------------------------ what the hub reads
def test_the_hub_reads_the_card_without_a_warning(whole: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    made = render(load_run(whole), LABEL, whole, repo="me/model")
    (tmp_path / "README.md").write_text(made.text)
    with warnings.catch_warnings(), caplog.at_level(logging.WARNING):
        warnings.simplefilter("error")
        card = ModelCard.load(tmp_path / "README.md", ignore_metadata_errors=False)
    assert caplog.records == []
    assert card.data["quantized_by"] == "me" and card.data.base_model_relation == "quantized"
    assert len(card.data.eval_results) == 2
    assert ModelCard(str(card)).data.to_dict() == card.data.to_dict()


def on_benchmarks(run: Run, num_items: int = 198, num_failed: int = 0) -> Run:
    """The run as if its suite were `full`, and GPQA Diamond and arithmetic had been asked."""
    suite = load_recipe(SuiteRecipe, "full")
    right = [n % 10 < 7 for n in range(num_items)]
    items = [
        ItemResult(
            item=f"gpqa-{n}", language="en", correct=None if n < num_failed else right[n], truncated=False, wrong_script=False,
            finish_reason="stop", prompt_tokens=100, output_tokens=200, answer="A",
            error="HTTP 500" if n < num_failed else None,
        )
        for n in range(num_items)
    ]  # fmt: skip
    gpqa = task_of("gpqa-diamond", "lm_eval", items, max_tokens=65536)

    def change(measurement: Measurement) -> Measurement:
        recipe = suite.model_dump(mode="json", by_alias=True)
        return measurement.model_copy(
            update={
                "tasks": (measurement.tasks[0], gpqa),
                "suite": "full",
                "suite_sha256": suite.sha256,
                "suite_recipe": recipe,
            }
        )

    return replace(run, measurements=tuple(map(change, run.measurements)), gates=None)


def test_scores_on_benchmarks_are_eval_results_of_the_hub(whole: Path) -> None:
    text = render(on_benchmarks(load_run(whole)), LABEL, whole, repo="me/model").eval_results
    assert text is not None
    [entry] = parse_eval_result_entries(yaml.safe_load(text))
    assert entry == EvalResultEntry(
        dataset_id="Idavidrein/gpqa", task_id="gpqa_diamond", value=70.71, date="2026-11-21",
        source_url="https://huggingface.co/me/model", source_name="model card, measured with assay",
        notes="198 items; 95 % interval: 64.0 to 76.6; vllm 0.32.0, suite full, replies of at most 65536 tokens; number format "
        "emulated",
    )  # fmt: skip


@pytest.mark.parametrize("part", [{"num_items": 100}, {"num_failed": 3}])
def test_a_part_of_a_benchmark_is_not_the_benchmark(whole: Path, part: dict[str, int]) -> None:
    made = render(on_benchmarks(load_run(whole), **part), LABEL, whole)
    assert made.eval_results is None
    assert "gpqa-diamond (assay suite full)" in made.text  # as a score of ours it stands


def test_eval_results_lie_beside_the_card_while_they_are_true(whole: Path, tmp_path: Path) -> None:
    run_dir = shutil.copytree(whole, tmp_path / MODEL)
    path = run_dir / LABEL / "checkpoint" / ".eval_results" / "assay.yaml"
    for measurement in on_benchmarks(load_run(whole)).measurements:
        measurement.save(run_dir / "measurements" / f"{measurement.label}.json")
    (run_dir / "gates.json").unlink()
    write_card(run_dir, LABEL)
    [entry] = yaml.safe_load(path.read_text())
    assert entry["value"] == 70.71 and "source" not in entry  # nobody knows yet where it will be published
    (run_dir / "measurements" / "w4a16.json").unlink()
    write_card(run_dir, LABEL)
    assert not path.exists()


# ------------------------------------------------------------------------------------------------ licence
MIT = """MIT License

Copyright (c) 2026 somebody

Permission is hereby granted, free of charge, to any person obtaining a copy of this software and associated documentation files (the
"Software"), to deal in the Software without restriction, including without limitation the rights to use, copy, modify, merge, publish,
distribute, sublicense, and/or sell copies of the Software, and to permit persons to whom the Software is furnished to do so, subject to
the following conditions:

The above copyright notice and this permission notice shall be included in all copies or substantial portions of the Software.

THE SOFTWARE IS PROVIDED "AS IS", WITHOUT WARRANTY OF ANY KIND, EXPRESS OR IMPLIED, INCLUDING BUT NOT LIMITED TO THE WARRANTIES OF
MERCHANTABILITY, FITNESS FOR A PARTICULAR PURPOSE AND NONINFRINGEMENT. IN NO EVENT SHALL THE AUTHORS OR COPYRIGHT HOLDERS BE LIABLE FOR
ANY CLAIM, DAMAGES OR OTHER LIABILITY, WHETHER IN AN ACTION OF CONTRACT, TORT OR OTHERWISE, ARISING FROM, OUT OF OR IN CONNECTION WITH
THE SOFTWARE OR THE USE OR OTHER DEALINGS IN THE SOFTWARE.
"""  # noqa: E501
APACHE = (ROOT / "LICENSE").read_text()


@pytest.mark.parametrize(
    ("name", "text", "licence"),
    [
        ("LICENSE", MIT, Licence("mit")),
        (
            "LICENSE.md",
            MIT + "\nOur only modification: display our name.\n",
            Licence("other", "see-license-file", "LICENSE.md"),
        ),
        ("LICENSE", APACHE, Licence("apache-2.0")),
        ("LICENSE", APACHE + "\nNot for military use. " * 60, Licence("other", "see-license-file", "LICENSE")),
        ("LICENSE", "All rights reserved.", Licence("other", "see-license-file", "LICENSE")),
        ("NOTES", MIT, None),
    ],
)
def test_a_licence_is_told_by_its_whole_text(tmp_path: Path, name: str, text: str, licence: Licence | None) -> None:
    (tmp_path / name).write_text(text)
    assert find_licence(tmp_path, None) == licence


def test_the_recipe_says_what_the_models_page_says(whole: Path, tmp_path: Path) -> None:
    assert find_licence(tmp_path, load_recipe(ModelRecipe, "glm-5")) == Licence("mit")
    own = RecipeLicence(id="other", name="own", link="https://example.com/licence")
    recipe = load_recipe(ModelRecipe, "glm-5").model_copy(update={"licence": own})
    assert find_licence(tmp_path, recipe) == Licence("other", "own", "https://example.com/licence")
    with pytest.raises(ValueError, match="are for `id: other`"):
        RecipeLicence(id="other")


# ------------------------------------------------------------------------------------------------ commands of the card
def command_of(card: str) -> list[str]:
    """What a shell makes of the command that serves it."""
    return shlex.split(card.partition("## How to serve it\n\n```\n")[2].partition("\n```")[0].replace("\\\n", " "))


@pytest.mark.slow
def test_vllms_own_parser_takes_the_command(whole: Path) -> None:
    """As it was measured with native kernels, emulated, and of every model recipe before anything was measured."""
    found = Measurement.load(whole / "measurements" / "w4a16.json").fingerprint
    native = found.model_copy(
        update={
            "emulated": False, "checkpoint_flags": {"load-format": "assay-strict", "kv-cache-dtype": "fp8"},
            "flags": {**found.flags, "tensor-parallel-size": 4, "enable-expert-parallel": True, "enforce-eager": False},
        }
    )  # fmt: skip
    texts = [command_of(card_of(whole)), shlex.split(serve_command(native, None, has_mtp=True).replace("\\\n", " "))]
    models = sorted(path.stem for path in (ROOT / "recipes" / "models").glob("*.yaml"))
    recipes = {name: load_recipe(ModelRecipe, name) for name in models}
    texts += [
        shlex.split(serve_command(None, recipe, has_mtp=True, place="me/model").replace("\\\n", " "))
        for recipe in recipes.values()
    ]
    names = ["model_tag", "speculative_config", "tensor_parallel_size", "kv_cache_dtype", "load_format", "reasoning_parser"]
    interpreter = find_interpreter(None)
    assert interpreter is not None, "no .venv-serve here: run `make setup`"
    wrong = ["vllm", "serve", "me/model", "--reasoning-parsers", "glm45"]
    done = subprocess.run(
        [str(interpreter), str(ROOT / "tests" / "support" / "serving" / "vllm_parses.py")],
        input=json.dumps([(words, names) for words in (*texts, wrong)]), capture_output=True, text=True, check=False,
        env={**os.environ, "PYTHONSAFEPATH": "1", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    emulated, served, *others, refused = json.loads(done.stdout.splitlines()[-1])
    mtp = {"method": "mtp", "num_speculative_tokens": 1}
    assert emulated == {
        "model_tag": "PATH_OF_THIS_FOLDER", "speculative_config": mtp, "tensor_parallel_size": 1, "kv_cache_dtype": "auto",
        "load_format": "auto", "reasoning_parser": "glm45",
    }  # fmt: skip
    assert served == emulated | {"tensor_parallel_size": 4, "kv_cache_dtype": "fp8"}
    for name, other in zip(models, others, strict=True):
        assert isinstance(other, dict), f"{name}: {other}"
        assert (other["model_tag"], other["reasoning_parser"]) == ("me/model", recipes[name].serving.reasoning_parser or "")
    assert isinstance(refused, str) and "--reasoning-parsers" in refused


def test_the_commands_that_make_it_again_are_ours(whole: Path) -> None:
    block = card_of(whole).partition("## How it was made\n\n```\n")[2].partition("\n```")[0]
    assert block.splitlines() == [
        "assay quantize tiny-glm --precision w4a16",
        "assay evaluate tiny-glm --precisions w4a16 --suite quick --profile cpu-emulated",
    ]
    program: Any = get_command(cli.app)
    for line in block.splitlines():
        _, name, *words = shlex.split(line)
        context = program.commands[name].make_context(name, words)
        assert context.params["target"] == "tiny-glm"
