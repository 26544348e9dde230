"""Report and card: the same bytes from the same records, no number from elsewhere, limits that go with their cause."""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from deployments import make_deployment, seen
from huggingface_hub import ModelCard
from pages import Page
from probe_reports import ALARM, CLEAN, probed
from synthetic_run import MODEL, make_acceptance, make_divergence, make_drift, make_run, task_of, write_checkpoint

from assay.errors import AssayError
from assay.records.base import Interval, sha256_of
from assay.records.manifest import Manifest
from assay.records.measurement import ImportedFrom, Measurement
from assay.records.plan import Plan
from assay.records.preflight.gpu_check import FormatCheck, GpuCheck
from assay.records.probe import ProbeResult
from assay.records.run import RunRecord
from assay.records.speed import Origin, SpeedRecord, SpeedRepeat, SpeedRow
from assay.records.verdict import ServingFinding
from assay.records.verification import Verification
from assay_reports import text
from assay_reports.card import render_card, write_card
from assay_reports.cards.serving import serve_command
from assay_reports.find_limits import LIMITS, find_limits
from assay_reports.limits.scores import best_of
from assay_reports.numbers import build_report
from assay_reports.page.first_screen import first_screen
from assay_reports.report import write_report
from assay_reports.run import Run, load_run
from assay_reports.schema import Report

FILES = ("report.json", "report.md", "index.html")


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_run(tmp_path_factory.mktemp("run"))
    write_report(folder)
    return folder


def report_of(run_dir: Path) -> Report:
    return Report.load(run_dir / "report" / "report.json")


# ------------------------------------------------------------------------------------------------ report
@pytest.mark.slow
def test_report_is_regenerated_byte_for_byte(run_dir: Path) -> None:
    before = {name: (run_dir / "report" / name).read_bytes() for name in FILES}
    for name in FILES:
        (run_dir / "report" / name).unlink()
    assert write_report(run_dir) == run_dir / "report" / "index.html"
    assert {name: (run_dir / "report" / name).read_bytes() for name in FILES} == before


def test_report_does_not_depend_on_where_the_run_lies(run_dir: Path, tmp_path: Path) -> None:
    elsewhere = make_run(tmp_path / "another" / "place")
    write_report(elsewhere)
    for name in FILES:
        assert (elsewhere / "report" / name).read_bytes() == (run_dir / "report" / name).read_bytes()


def test_report_json_holds_what_the_records_say(run_dir: Path) -> None:
    report = report_of(run_dir)
    assert [(row.label, row.kind, row.status) for row in report.rows] == [
        ("fp8", "reference", None),
        ("fp8-repeat", "noise floor", "PASS"),
        ("bf16", "candidate", "PASS"),
        ("nvfp4a16", "candidate", "UNDERPOWERED"),
        ("w4a16", "candidate", "PASS"),
    ]
    for row in report.rows:
        record = Measurement.load(run_dir / "measurements" / f"{row.label}.json")
        assert [task.accuracy for task in row.tasks] == [task.accuracy for task in record.tasks]
        assert (row.divergence, row.acceptance) == (record.divergence, record.acceptance)
        for verdict in (v for v in report.verdicts if v.candidate == row.label and v.gate.startswith("score ")):
            task = next((task for task in row.tasks if f"score {task.task}" == verdict.gate), None)
            if task is None:
                assert (verdict.status, verdict.has_say) == ("NOT MEASURED", False)  # optional, and the suite did not ask
                continue
            assert (task.margin, task.p_value_holm, task.items_needed) == (
                verdict.limit, verdict.p_value_holm, verdict.items_needed,
            )  # fmt: skip
            assert (task.drop, task.discordant) == (verdict.observed, verdict.discordant)
            assert task.minimum_detectable_effect == verdict.minimum_detectable_effect
    w4a16 = next(row for row in report.rows if row.label == "w4a16")
    assert w4a16.kl_times_floor == pytest.approx(0.021 / 0.00041)
    assert w4a16.checkpoint == "w4a16/checkpoint"  # no folder of the machine
    assert w4a16.folder == "tiny-glm/w4a16/checkpoint" and report.run == "tiny-glm"
    assert "/data/" not in (run_dir / "report" / "index.html").read_text().split("<script>")[0]


def leaves(data: Any) -> Iterator[Any]:
    if isinstance(data, dict):
        for key, value in data.items():
            yield key
            yield from leaves(value)
    elif isinstance(data, list):
        for value in data:
            yield from leaves(value)
    else:
        yield data


NUMBER = re.compile(r"\d[\d,]*(?:\.\d+)?(?:e[+-]?\d+)?")


def printed_forms(data: Any) -> set[str]:
    """Every number that a value of report.json may be printed as."""
    formats: list[Callable[[Any], str]] = [
        text.percent, text.points, text.nats, text.size, text.ratio, text.one_digit, text.tokens, text.pvalue, text.error,
        str,
    ]  # fmt: skip
    forms: set[str] = set()
    for leaf in leaves(data):
        if isinstance(leaf, str):
            forms |= set(NUMBER.findall(leaf))
        elif isinstance(leaf, int | float) and not isinstance(leaf, bool):
            printed = [function(leaf) for function in formats]
            if isinstance(leaf, int):
                printed.append(text.count(leaf))
            forms |= {number for form in printed for number in NUMBER.findall(form)}
    return forms


def test_every_number_in_the_markdown_is_one_of_report_json(run_dir: Path) -> None:
    data = json.loads((run_dir / "report" / "report.json").read_text())
    lines = (run_dir / "report" / "report.md").read_text().splitlines()
    rows = [line for line in lines if line.startswith(("| ", "- "))]
    hashes = {leaf[:12] for leaf in leaves(data) if isinstance(leaf, str) and re.fullmatch(r"[0-9a-f]{64}", leaf)}
    for known in hashes:
        rows = [row.replace(known, "") for row in rows]
    # Headings are ours: p90, p99, top-1, 80 %
    values = [row for row in rows if not row.startswith(("| checkpoint", "| precision", "| task"))]
    numbers = [number for row in values for number in NUMBER.findall(row)]
    assert len(numbers) > 250
    known_numbers = printed_forms(data)
    assert [number for number in numbers if number not in known_numbers] == []
    assert "12345" not in known_numbers


def test_the_markdown_and_the_page_show_the_same_numbers(run_dir: Path) -> None:
    page = (run_dir / "report" / "index.html").read_text()
    shown = re.sub(r"<script.*?</script>|<style.*?</style>|<[^>]+>", " ", page, flags=re.S)
    shown = " ".join(shown.split())
    report = report_of(run_dir)
    for limit in report.limits:
        assert limit.text.replace("'", "&#39;") in shown
    for row in report.rows:
        for task in row.tasks:
            assert text.percent_interval(task.accuracy) in shown
            if task.drop is not None:
                assert text.change_interval(task.drop) in shown
    for verdict in report.verdicts:
        assert verdict.detail.replace("'", "&#39;").replace("<", "&lt;") in shown


class Loads(HTMLParser):
    """Collects what a browser would fetch, and checks that every element that must be closed is."""

    def __init__(self) -> None:
        super().__init__()
        self.addresses: list[str] = []
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name in {"src", "srcset", "poster", "data", "action"} or (name == "href" and tag != "a"):
                self.addresses.append(value or "")
        if tag in {"section", "article", "table", "div", "figure", "details", "script", "style", "main"}:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag in {"section", "article", "table", "div", "figure", "details", "script", "style", "main"}:
            assert self.open.pop() == tag


def test_the_page_loads_nothing_and_is_small_enough_to_mail(run_dir: Path) -> None:
    page = (run_dir / "report" / "index.html").read_text()
    parser = Loads()
    parser.feed(page)
    assert parser.open == []
    assert [address for address in parser.addresses if not address.startswith("data:")] == []
    style = re.search(r"<style>(.*?)</style>", page, re.S)
    assert style is not None and "url(" not in style.group(1) and "@import" not in style.group(1)
    assert len(page.encode()) < 300_000


def test_missing_is_written_as_not_measured(tmp_path: Path) -> None:
    """A candidate without anything, an unjudged run: words, neither blanks nor zeros."""

    def strip(measurement: Measurement) -> Measurement:
        if measurement.label != "w4a16":
            return measurement
        empty = tuple(task_of(t.task, t.kind, [], note="server died") for t in measurement.tasks)
        return measurement.model_copy(
            update={"tasks": empty, "divergence": None, "acceptance": None, "not_measured": {"divergence": "server died"}}
        )

    run_dir = make_run(tmp_path, change=strip)
    (run_dir / "gates.json").unlink()
    write_report(run_dir)
    lines = (run_dir / "report" / "report.md").read_text().splitlines()
    rows = [line for line in lines if line.startswith("| w4a16")]
    assert rows == [
        "| w4a16 | NOT MEASURED | 6.3 MB | 69.2 % | Not judged yet. |",
        "| w4a16 |" + " NOT MEASURED |" * 6,
        "| w4a16 |" + " NOT MEASURED |" * 5,
    ]
    assert [line for line in lines if line.startswith("|  | w4a16")] == [
        "|  | w4a16 | NOT MEASURED | NOT MEASURED | – | not judged | 0 | NOT MEASURED |"
    ] * 2
    found = Page((run_dir / "report" / "index.html").read_text())
    missing = ["w4a16", "NOT MEASURED server died", *["NOT MEASURED"] * 2, "–", "–", *["NOT MEASURED"] * 2, "0"]
    assert found.table("Statistics of needle").row("w4a16")[:9] == missing
    assert found.table("Divergence from the reference").row("w4a16") == ["w4a16", "NOT MEASURED: server died"]
    page = (run_dir / "report" / "index.html").read_text()
    assert "server died" in page


def test_hostile_text_in_a_record_stays_text(tmp_path: Path) -> None:
    def poison(measurement: Measurement) -> Measurement:
        return measurement.model_copy(update={"not_measured": {"acceptance": "</script><script>alert(1)</script>|x"}})

    run_dir = make_run(tmp_path, change=poison)
    write_report(run_dir)
    assert "<script>alert" not in (run_dir / "report" / "index.html").read_text()


def test_no_reference_no_report(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path)
    (run_dir / "measurements" / "fp8.json").unlink()
    with pytest.raises(AssayError, match="exactly one reference measurement, found: none"):
        write_report(run_dir)
    with pytest.raises(AssayError, match="no plan and no measurement there"):
        load_run(tmp_path)


# ------------------------------------------------------------------------------------------------ limits
def each(run: Run, change: Callable[[Measurement], Measurement]) -> Run:
    return replaced(run, measurements=tuple(change(m) for m in run.measurements))


def replaced(run: Run, **changes: Any) -> Run:
    return Run(**{**run.__dict__, **changes})


def gates(**changes: Any) -> Callable[[Run], Run]:
    def change(run: Run) -> Run:
        assert run.gates is not None
        return replaced(run, gates=run.gates.model_copy(update=changes))

    return change


def fingerprint(**changes: Any) -> Callable[[Run], Run]:
    def change(m: Measurement) -> Measurement:
        return m.model_copy(update={"fingerprint": m.fingerprint.model_copy(update=changes)})

    return lambda run: each(run, change)


def probes(results: tuple[ProbeResult, ...]) -> Callable[[Run], Run]:
    """Every measured checkpoint was probed."""
    return lambda run: replaced(
        run, probes=tuple(probed(m.label, *results, sha256=m.checkpoint_sha256) for m in run.measurements)
    )


def tasks(**changes: Any) -> Callable[[Run], Run]:
    def change(m: Measurement) -> Measurement:
        return m.model_copy(update={"tasks": tuple(task.model_copy(update=changes) for task in m.tasks)})

    return lambda run: each(run, change)


def items(**changes: Any) -> Callable[[Run], Run]:
    def change(m: Measurement) -> Measurement:
        made = [t.model_copy(update={"items": tuple(replace(i, **changes) for i in t.items)}) for t in m.tasks]
        return m.model_copy(update={"tasks": tuple(made)})

    return lambda run: each(run, change)


def divergences(**changes: Any) -> Callable[[Run], Run]:
    def change(m: Measurement) -> Measurement:
        return m.model_copy(update={"divergence": m.divergence.model_copy(update=changes) if m.divergence else None})

    return lambda run: each(run, change)


def measurements(**changes: Any) -> Callable[[Run], Run]:
    return lambda run: each(run, lambda m: m.model_copy(update=changes))


def only(label: str, **changes: Any) -> Callable[[Run], Run]:
    return lambda run: each(run, lambda m: m.model_copy(update=changes) if m.label == label else m)


def registered(sha256: str | None) -> Callable[[Run], Run]:
    """Judged by other limits than those that were registered; None: none were."""

    def change(run: Run) -> Run:
        assert run.gates is not None
        return replaced(run, gates=run.gates.model_copy(update={"registered_sha256": sha256}))

    return change


def without(label: str) -> Callable[[Run], Run]:
    return lambda run: replaced(run, measurements=tuple(m for m in run.measurements if m.label != label))


def relabelled(old: str, new: str) -> Callable[[Run], Run]:
    return lambda run: each(run, lambda m: m.model_copy(update={"label": new}) if m.label == old else m)


def verifications(**changes: Any) -> Callable[[Run], Run]:
    return lambda run: replaced(run, verifications={k: v.model_copy(update=changes) for k, v in run.verifications.items()})


def plans(**config: Any) -> Callable[[Run], Run]:
    return lambda run: replaced(run, plans={k: p.model_copy(update={"config": config}) for k, p in run.plans.items()})


def suite(**changes: Any) -> Callable[[Run], Run]:
    return lambda run: each(run, lambda m: m.model_copy(update={"suite_recipe": {**m.suite_recipe, **changes}}))


def renamed_tasks(run: Run) -> Run:
    names = ["ruler-32k", "swe-bench-verified with tools"]

    def change(m: Measurement) -> Measurement:
        made = [t.model_copy(update={"task": name, "kind": "lm_eval"}) for t, name in zip(m.tasks, names, strict=True)]
        return m.model_copy(update={"tasks": tuple(made)})

    return each(run, change)


def checked_on(gpu: str | None, gpus: str) -> Callable[[Run], Run]:
    """A run with native kernels on `gpus`, and the record of a check on `gpu` (None: a self-test)."""
    formats = tuple(
        FormatCheck.model_validate({"precision": name, "outcome": outcome, "reasons": ()})
        for name, outcome in (("w4a16", "PASS"), ("fp8", "PASS"), ("nvfp4a16", "FAIL"))
    )
    check = GpuCheck(
        started="2026-12-01T10:00:00+00:00", seconds=500.0, hardware={}, gpu=gpu, self_test=gpu is None, model="m",
        formats=formats,
    )  # fmt: skip
    native = fingerprint(emulated=False, hardware={"gpus": gpus})
    return lambda run: replaced(native(run), gpu_check=check)


def speeds(*labels: str, origin: Origin = "measured") -> Callable[[Run], Run]:
    """One row each."""
    rows = tuple(
        SpeedRow(
            checkpoint=label, origin=origin, source="s", hardware="8xH200", num_gpus=8, speculation=0, prompts="chat",
            concurrency=1, repeats=(SpeedRepeat(output_tokens_s=50.0),),
        )
        for label in labels
    )  # fmt: skip
    return lambda run: replaced(run, speed=SpeedRecord(rows=rows))


ZERO = Interval(value=0.0, low=0.0, high=0.0, n=9216)


@pytest.mark.parametrize(
    ("key", "is_there", "flip"),
    [
        ("unmeasured", False, lambda run: replaced(run, measurements=())),
        ("not_measured", False, measurements(not_measured={"acceptance": "server died"})),
        ("not_measured", False, tasks(accuracy=None, note="too long")),
        ("gates_not_before", False, registered(None)),
        ("gates_not_before", False, registered("f" * 64)),
        ("emulated", True, fingerprint(emulated=False)),
        ("quantized_reference", True, relabelled("fp8", "fp32")),
        ("quantized_reference", True, only("fp8", weight_bits=16)),
        ("quantized_reference", True, lambda run: replaced(run, foreign_reference="it is GGUF")),
        ("foreign_reference", False, lambda run: replaced(run, foreign_reference="it is GGUF")),
        ("screened_out", False, lambda run: replaced(run, screened_out={"w4a16-channel": "a screening fails it"})),
        ("second_rounding", False, fingerprint(emulated=False, hardware={"gpus": "8x NVIDIA B200 (192 GB)"})),
        ("native_kernels", False, checked_on("NVIDIA B200", "8x NVIDIA B200 (192 GB)")),
        ("sample_sizes", True, tasks(items=())),
        ("selection", True, lambda run: replaced(run, gates=None)),
        ("which_items", True, lambda run: replaced(run, gates=None)),
        ("selection", True, lambda run: replaced(run, gates=None)),
        ("one_seed", True, lambda run: replaced(run, measurements=())),
        ("one_seed", True, tasks(num_samples=4)),
        ("measurement_notes", False, measurements(notes=("no chat template: asked as plain completions",))),
        ("truncation", False, tasks(num_truncated=3)),
        ("failures", False, tasks(num_failed=2)),
        ("generated_questions", True, tasks(kind="lm_eval")),
        ("kinds_of_work", True, renamed_tasks),
        ("languages", True, tasks(items=())),
        ("context_length", True, plans(max_position_embeddings=1024)),
        ("context_length", True, items(prompt_tokens=4090)),
        ("no_load", True, suite(load={"requests": 7500})),
        ("no_load", True, probes(CLEAN)),
        ("probes_not_judged", False, probes(ALARM)),
        ("probes_not_run", False, probes(CLEAN)),
        ("rare_faults", False, probes(CLEAN)),
        ("nothing_scored_there", False, lambda run: replaced(run, deployments=(make_deployment(),))),
        ("deployments_left_out", False, lambda run: replaced(run, old_deployments=(make_deployment(),))),
        ("divergence_direction", True, measurements(divergence=None)),
        ("few_texts", False, divergences(drift=(make_drift("all", 0.1, 0.9).model_copy(update={"num_documents": 19}),))),
        ("kl_lower_bound", True, divergences(tail_mass_mean=0.0)),
        ("no_noise_floor", False, without("fp8-repeat")),
        ("no_noise_floor", False, only("fp8-repeat", divergence=None)),
        ("zero_noise_floor", False, divergences(kl_mean=ZERO)),
        ("not_sampled", False, divergences(sampling_gap=Interval(value=4.1, low=3.5, high=4.6, n=48))),
        ("non_finite", False, divergences(num_non_finite=4)),
        ("acceptance_interval", True, measurements(acceptance=None)),
        ("acceptance_interval", True, measurements(acceptance=make_acceptance("fp8").model_copy(
            update={"num_replies": 300, "rate_standard_error": 0.01}))),
        ("speculation_off", False, fingerprint(speculation=None)),
        ("unknown_kernels", False, fingerprint(emulated=False, kernels=())),
        ("external_server", False, fingerprint(server="external")),
        ("imported", False, measurements(imported=ImportedFrom(harnesses=("lm-eval 0.4.13",), files={}, model=None,
            not_known=("engine and version",)))),
        ("serving_faults", False, gates(serving=(
            ServingFinding(candidate="w4a16", task="needle", rule="capped", at_fault=("fp8",), clause="x", num=1, of=2),))),
        ("serving_not_looked_at", True, gates(not_looked_at={})),
        ("unclean_versions", False, fingerprint(versions={"vllm": "0.33.0.dev12+dirty"})),
        ("verification_gaps", False, verifications(not_checked=("weight error: no source given",))),
        ("verification_gaps", False, lambda run: replaced(run, verifications={})),
        ("verification_stale", False, verifications(checkpoint_sha256="0" * 64)),
        ("precisions_by_shape", False, lambda run: replaced(run, choices=("w4a16-g64 in place of w4a16",))),
        ("speed_unmeasured", True, speeds("fp8", "bf16", "w4a16", "nvfp4a16")),
        ("speed_conditions", False, speeds("fp8")),
        ("speed_from_elsewhere", False, speeds("fp8", origin="predicted")),
        ("speed_outdated", False, lambda run: replaced(run, old_speeds=("w4a16",))),
        ("choice_outdated", False, lambda run: replaced(run, choice_outdated="it is of glm-5")),
    ],
)  # fmt: skip
def test_a_limit_is_there_only_while_its_condition_holds(
    run_dir: Path, key: str, is_there: bool, flip: Callable[[Run], Run]
) -> None:
    run = load_run(run_dir)
    assert (key in {limit.key for limit in find_limits(run)}) is is_there
    assert (key in {limit.key for limit in find_limits(flip(run))}) is not is_there


def test_weights_as_they_are_stored_are_rounded_once(run_dir: Path) -> None:
    on_h200 = fingerprint(
        emulated=False, hardware={"gpus": "8x NVIDIA H200 (151 GB)"}, environment={"VLLM_USE_DEEP_GEMM_E8M0": "0"}
    )
    assert "second_rounding" not in {limit.key for limit in find_limits(on_h200(load_run(run_dir)))}


def test_the_gpu_check_is_cited_for_its_own_gpu(run_dir: Path) -> None:
    def said(gpu: str | None, gpus: str) -> str | None:
        limits = find_limits(checked_on(gpu, gpus)(load_run(run_dir)))
        return next((limit.text for limit in limits if limit.key == "native_kernels"), None)

    assert said("NVIDIA H200", "8x NVIDIA H200 (151 GB)") == (
        "Native kernels were checked against emulation on one NVIDIA H200, with a small model only "
        "(2026-12-01; PASS: w4a16 and fp8; FAIL: nvfp4a16)."
    )
    assert said("NVIDIA H200", "8x NVIDIA B200 (192 GB)") == (
        "Native kernels were checked against emulation on NVIDIA H200, not on the GPU used here."
    )
    assert said(None, "8x NVIDIA H200 (151 GB)") is None, "a self-test shows nothing about a GPU"


def test_the_gpu_check_of_a_run_is_loaded(run_dir: Path, tmp_path: Path) -> None:
    assert load_run(run_dir).gpu_check is None
    whole = shutil.copytree(run_dir, tmp_path / run_dir.name)
    check = checked_on("NVIDIA H200", "x")(load_run(run_dir)).gpu_check
    assert check is not None
    check.save(whole / "gpu-check.json")
    assert load_run(whole).gpu_check == check


# ------------------------------------------------------------------------------------------------ deployment
@pytest.mark.slow
def test_deployments_stand_in_report_and_card_while_they_are_about_this_run(run_dir: Path, tmp_path: Path) -> None:
    whole = shutil.copytree(run_dir, tmp_path / run_dir.name)
    plain = {name: (whole / "report" / name).read_text() for name in ("index.html", "report.md")}
    assert not any("Deployment" in page or "deployment" in page for page in plain.values())
    travels = make_deployment()
    travels.save(whole / "deployment" / "4xh200" / "w4a16.json")
    unknown = make_deployment(seen(profile="4xb200", probes=None))
    unknown.save(whole / "deployment" / "4xb200" / "w4a16.json")
    old = make_deployment(seen(profile="8xb200")).model_copy(update={"checkpoint_sha256": "0" * 64})
    old.save(whole / "deployment" / "8xb200" / "w4a16.json")
    write_report(whole)
    assert report_of(whole).deployments == (unknown, travels)
    html, markdown = (whole / "report" / "index.html").read_text(), (whole / "report" / "report.md").read_text()
    assert "<h3>w4a16 on 4xh200 <span" in html and 'href="#deployment"' in html
    assert "### w4a16 on 4xh200: PASS" in markdown and "### w4a16 on 4xb200: NOT MEASURED" in markdown
    assert "the verdict PASS also holds on 4xh200: 5 checks passed (" in markdown
    for check in travels.checks:
        assert f"| {check.gate} | {check.status} | {check.limit or 0:.4g} |".replace(" 0 |", " – |") in markdown
    served = "Served differently: flags.tensor-parallel-size (None, 4xh200 4); profile (cpu-emulated, 4xh200 4xh200)."
    assert f"emulated where it was judged (cpu-emulated), emulated here. {served}" in markdown
    assert "Left out: w4a16 on 8xb200, because" in markdown
    card = render_card(load_run(whole), "w4a16", whole / "w4a16" / "checkpoint")
    said = [line for line in card.splitlines() if line.startswith("Served on ")]
    assert said == [f"Served on 4xh200 and compared with itself on cpu-emulated, without scoring a task: {travels.sentence}."]
    assert "Served on" not in render_card(load_run(whole), "nvfp4a16", whole / "nvfp4a16" / "checkpoint")


def test_a_quantized_copy_as_reference_is_called_so_on_every_page(run_dir: Path, tmp_path: Path) -> None:
    """In the record, in limits, on the first screen of page and Markdown, and in the card of a candidate; not in the others."""
    shutil.copytree(run_dir, tmp_path / "tiny-glm")
    run_dir, how = tmp_path / "tiny-glm", "config.json says quant_method 'gptq'"
    plain = first_screen(build_report(load_run(run_dir))).answer
    RunRecord(model="tiny-glm", foreign_reference=how).save(run_dir / "run.json")
    run = load_run(run_dir)
    said = {limit.key: limit.text for limit in find_limits(run)}
    assert said["foreign_reference"] == (
        f"The reference, fp8, is itself a quantized copy of its model ({how}): what it lost is in no verdict, and PASS "
        "means no worse than this copy."
    )
    screen = first_screen(build_report(run))
    assert screen.answer == f"{plain}; the reference is itself a quantized copy"
    assert said["foreign_reference"].rstrip(".") in screen.unknown
    page, text = write_report(run_dir).read_text(), (run_dir / "report" / "report.md").read_text()
    assert "; the reference is itself a quantized copy" in page and text.startswith(f"# {screen.answer}\n")
    card = write_card(run_dir, "w4a16").read_text()
    assert " The reference is itself a quantized copy of the model: what it lost is in no verdict." in card
    assert said["foreign_reference"] in card
    assert "copy" not in write_card(run_dir, "fp8").read_text().partition("## ")[0]


def test_every_limit_is_flipped_by_a_test() -> None:
    marks = test_a_limit_is_there_only_while_its_condition_holds.pytestmark  # type: ignore[attr-defined]
    assert {case[0] for case in marks[0].args[1]} == set(LIMITS)


def test_a_repeat_without_a_divergence_that_nobody_asked_for_is_no_limit(run_dir: Path) -> None:
    run = measurements(divergence=None)(load_run(run_dir))
    assert "no_noise_floor" not in {limit.key for limit in find_limits(run)}


def test_limits_name_numbers_of_the_records(run_dir: Path) -> None:
    run = load_run(run_dir)
    said = {limit.key: limit.text for limit in find_limits(truncated(run))}
    assert said["truncation"] == (
        "Replies cut off by the token budget are scored as they stand: 7 of 200 for w4a16 in arithmetic (budget 512 tokens)."
    )
    assert said["quantized_reference"] == (
        "The reference, fp8, is itself quantized: every loss is relative to it; the rows of bf16 show how far it is from the "
        "unquantized model."
    )
    alone = {limit.key: limit.text for limit in find_limits(without("bf16")(run))}
    assert alone["quantized_reference"].endswith("how far it is from the unquantized model was not measured.")


def truncated(run: Run) -> Run:
    def change(m: Measurement) -> Measurement:
        if m.label != "w4a16":
            return m
        return m.model_copy(update={"tasks": (m.tasks[0].model_copy(update={"num_truncated": 7}), m.tasks[1])})

    return each(run, change)


# ------------------------------------------------------------------------------------------------ card
def test_card_is_read_back_by_the_hub_with_its_results(run_dir: Path) -> None:
    path = write_card(run_dir, "w4a16")
    assert path == run_dir / "w4a16" / "checkpoint" / "README.md"
    data = ModelCard.load(path).data
    assert data.to_dict() | {"model-index": None} == {
        "base_model": "zai-org/tiny-glm",
        "base_model_relation": "quantized",
        "library_name": "vllm",
        "pipeline_tag": "text-generation",
        "tags": ["assay", "compressed-tensors", "quantized", "w4a16"],
        "model-index": None,
    }
    assert data.model_name == "tiny-glm-w4a16"
    measurement = Measurement.load(run_dir / "measurements" / "w4a16.json")
    found = {result.dataset_type: (result.metric_type, result.metric_value, result.metric_args) for result in data.eval_results}
    expected = {}
    for task in measurement.tasks:
        assert task.accuracy is not None
        interval = [round(task.accuracy.low, 4), round(task.accuracy.high, 4)]
        expected[f"assay-quick-{task.task}"] = (
            "accuracy", round(task.accuracy.value, 4), {"items": task.accuracy.n, "interval": interval, "level": 0.95}
        )  # fmt: skip
    assert found == expected


def test_card_says_what_the_verdict_and_the_limits_say(run_dir: Path) -> None:
    report = report_of(run_dir)
    card = write_card(run_dir, "nvfp4a16").read_text()
    assert "**UNDERPOWERED** against fp8: loses 5.0 points on needle; 5 allowed: there is a real loss, but the data" in card
    assert "against fp8. Use w4a16 (6.3 MB), the smallest that passed, or the reference, fp8.\n" in card
    assert "| | bf16 | fp8 (reference) | **nvfp4a16** |\n|---|---|---|---|\n" in card
    assert "| size of the weights | 14.6 MB | 9.1 MB | 6.7 MB |\n" in card
    assert "| verdict | PASS | reference | UNDERPOWERED |\n" in card
    assert "| memory while served | not measured | not measured | not measured |\n" in card
    assert (
        " UTC. Sampling: greedy (temperature 0): arithmetic, needle, codes-en, codes-zh, ruler, needle-grid, tools.\n" in card
    )
    for verdict in (v for v in report.verdicts if v.candidate == "nvfp4a16"):
        assert verdict.detail in card
    listed = [line.removeprefix("- ") for line in card.partition("## Limits\n")[2].splitlines() if line.startswith("- ")]
    assert len(listed) == 5
    texts = {limit.key: limit.text for limit in report.limits}
    for key, line in zip(("quantized_reference", "context_length", "languages"), [listed[1], *listed[3:]], strict=True):
        assert line == texts[key]
    assert "The scores are **emulated**" in card
    assert "| routed_expert | quantized to nvfp4a16 | 1 | 6.72 MB | 1.89 MB |" in card
    assert "| router_bias | kept in F32 | 1 | 2.56 kB | 2.56 kB |" in card
    assert Manifest.load(run_dir / "nvfp4a16" / "checkpoint" / "assay_manifest.json").checkpoint_sha256 in card
    again = write_card(run_dir, "nvfp4a16").read_text()
    assert again == card


def test_a_card_speaks_of_its_own_checkpoint(run_dir: Path) -> None:
    """Truncated replies of w4a16 stand in its card and in the report, not in the card of nvfp4a16."""
    run = truncated(load_run(run_dir))
    said = "7 of 200 for w4a16 in arithmetic"
    assert said in render_card(run, "w4a16", run_dir)
    assert said not in render_card(run, "nvfp4a16", run_dir)
    assert "w4a16 ran emulated" not in render_card(run, "nvfp4a16", run_dir).replace("nvfp4a16 ran", "")


@pytest.mark.parametrize(("label", "task"), [("w4a16", "needle"), ("fp8", "needle")])
def test_what_is_not_measured_is_no_result_of_the_hub(run_dir: Path, label: str, task: str) -> None:
    """A score that its gate calls NOT MEASURED is no entry of model-index; of the reference, if so for every candidate."""
    run = load_run(run_dir)
    assert run.gates is not None
    verdicts = tuple(
        v.model_copy(update={"status": "NOT MEASURED"}) if v.gate == f"score {task}" else v for v in run.gates.verdicts
    )
    gated = replaced(run, gates=run.gates.model_copy(update={"verdicts": verdicts}))
    found = ModelCard(render_card(gated, label, run_dir)).data.eval_results
    assert [one.dataset_type for one in found] == ["assay-quick-arithmetic"]
    assert len(ModelCard(render_card(run, label, run_dir)).data.eval_results) == 2


def test_a_score_that_the_reference_does_not_repeat_is_no_result_of_the_hub(run_dir: Path) -> None:
    run = load_run(run_dir)
    assert run.gates is not None
    verdicts = tuple(
        v.model_copy(update={"status": "FAIL"}) if (v.gate, v.candidate) == ("score needle", "fp8-repeat") else v
        for v in run.gates.verdicts
    )
    gated = replaced(run, gates=run.gates.model_copy(update={"verdicts": verdicts}))
    for label in ("w4a16", "fp8"):
        found = ModelCard(render_card(gated, label, run_dir)).data.eval_results
        assert [one.dataset_type for one in found] == ["assay-quick-arithmetic"]


def test_limits_do_not_speak_of_what_nobody_answered(run_dir: Path) -> None:
    """A source that was asked and never answered shows nothing; no reply has no language, and no request bounds no rate."""
    run = load_run(run_dir)

    def nothing(m: Measurement) -> Measurement:
        failed = [[replace(item, correct=None, error="HTTP 500") for item in task.items] for task in m.tasks]
        made = [task_of(t.task, t.kind, one, note="all requests failed") for t, one in zip(m.tasks, failed, strict=True)]
        return m.model_copy(update={"tasks": tuple(made), "divergence": None})

    said = {limit.key: limit.text for limit in find_limits(each(run, nothing))}
    assert said["quantized_reference"].endswith("how far it is from the unquantized model was not measured.")
    assert not {"one_seed", "languages", "context_length", "sample_sizes"} & set(said)
    assert said["no_load"] == ("No load test and no probes: faults that need concurrency or long uptime would not show.")
    one_text = make_drift("all", 0.1, 0.9).model_copy(update={"num_documents": 1})
    [few] = [limit.text for limit in find_limits(divergences(drift=(one_text,))(run)) if limit.key == "few_texts"]
    assert few.startswith("Divergence over 1 sampled text has no interval and is not judged")


def test_intervals_are_said_to_cover_what_they_cover(run_dir: Path) -> None:
    [said] = [limit.text for limit in find_limits(load_run(run_dir)) if limit.key == "one_seed"]
    assert said == (
        "Each checkpoint answered each item once (seed eval-quick-1). The intervals cover other items and other replies, but "
        "not what all replies of a run share, such as a server fault."
    )


def test_which_items_the_intervals_are_for(run_dir: Path) -> None:
    run = load_run(run_dir)
    assert run.gates is not None

    def said(*these: str) -> str:
        verdicts = tuple(
            one.model_copy(update={"estimand": "these_items" if one.gate in these else one.estimand})
            for one in run.gates.verdicts  # type: ignore[union-attr]
        )
        gated = replaced(run, gates=run.gates.model_copy(update={"verdicts": verdicts}))  # type: ignore[union-attr]
        [text] = [limit.text for limit in find_limits(gated) if limit.key == "which_items"]
        return text

    assert said() == "Intervals of score changes hold for similar questions and for other replies."
    scores = list(dict.fromkeys(one.gate for one in run.gates.verdicts if one.gate.startswith("score ")))
    assert said(*scores).startswith("Intervals of score changes on ")
    assert said(*scores).endswith(" hold for these questions only, with other replies.")
    names = [one.title or one.gate.removeprefix("score ") for one in run.gates.verdicts if one.gate == scores[0]]
    mixed = said(scores[0])
    assert mixed.startswith(f"Intervals of score changes on {names[0]} hold for these questions only, with other replies; ")
    assert mixed.endswith(" hold for similar questions.")


def test_card_of_the_reference_is_not_judged(run_dir: Path) -> None:
    card = write_card(run_dir, "fp8").read_text()
    assert "This is the **reference** of its run" in card
    assert "divergence from" not in card


def test_a_relative_folder_is_no_model_of_the_hub(tmp_path: Path) -> None:
    """`a/checkpoint-1000` looks like an id; the card is read where no such folder lies."""
    write_checkpoint(tmp_path / MODEL, "w4a16", source="a/checkpoint-1000")
    card = ModelCard.load(write_card(tmp_path / MODEL, "w4a16"))
    assert card.data.base_model is None and "huggingface.co/a/" not in card.text


def test_card_right_after_quantizing_says_not_measured(tmp_path: Path) -> None:
    run_dir = tmp_path / MODEL
    write_checkpoint(run_dir, "w4a16", source="/data/models/tiny-glm")
    path = write_card(run_dir, "w4a16")
    card = ModelCard.load(path)
    assert "**NOT MEASURED.** This checkpoint has not been evaluated" in card.text
    assert "## Scores" not in card.text
    assert card.data.eval_results is None
    assert card.data.base_model is None  # a local folder is no hub id
    assert "/data/" not in path.read_text()
    assert "--speculative-config" in card.text  # from the model's recipe


def test_card_of_a_newer_checkpoint_does_not_inherit_old_scores(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path)
    path = run_dir / "w4a16" / "checkpoint" / "assay_manifest.json"
    old = Manifest.load(path)
    old.model_copy(update={"files": {**old.files, "config.json": sha256_of("other")}}).save(path)
    card = write_card(run_dir, "w4a16").read_text()
    assert "**NOT MEASURED.**" in card
    assert "Verification of these files: NOT MEASURED." in card


def test_card_needs_a_finished_checkpoint(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path)
    (run_dir / "w4a16" / "checkpoint" / "assay_manifest.json").unlink()
    with pytest.raises(AssayError, match=r"no finished checkpoint there.*assay quantize tiny-glm --precision w4a16"):
        write_card(run_dir, "w4a16")
    assert not (run_dir / "w4a16" / "checkpoint" / "README.md").exists()


def test_card_states_a_licence_only_if_there_is_one(run_dir: Path, tmp_path: Path) -> None:
    run = load_run(run_dir)
    assert "license:" not in render_card(run, "w4a16", tmp_path)
    (tmp_path / "LICENSE").write_text("MIT")
    card = ModelCard(render_card(run, "w4a16", tmp_path))
    assert (card.data.license, card.data.license_name, card.data.license_link) == ("other", "see-license-file", "LICENSE")


def test_serve_command_is_the_fingerprints(run_dir: Path) -> None:
    found = Measurement.load(run_dir / "measurements" / "w4a16.json").fingerprint
    assert serve_command(found, None, has_mtp=True) == (
        "vllm serve PATH_OF_THIS_FOLDER \\\n  --reasoning-parser glm45 \\\n"
        '  --speculative-config \'{"method": "mtp", "num_speculative_tokens": 1}\''
    )
    native = found.model_copy(update={"emulated": False, "checkpoint_flags": {}, "speculation": None})
    assert serve_command(native, None, has_mtp=True) == (
        "vllm serve PATH_OF_THIS_FOLDER \\\n  --dtype float32 \\\n  --enforce-eager \\\n  --max-model-len 4096 \\\n"
        "  --reasoning-parser glm45"
    )


def test_zero_noise_floor_gives_no_multiple(tmp_path: Path) -> None:
    def silence(measurement: Measurement) -> Measurement:
        if not measurement.is_noise_floor:
            return measurement
        return measurement.model_copy(update={"divergence": make_divergence("fp8-repeat", scale=0.0)})

    run_dir = make_run(tmp_path, change=silence)
    write_report(run_dir)
    report = report_of(run_dir)
    assert {row.kl_times_floor for row in report.rows} == {None}
    assert "not defined: the floor is 0" in (run_dir / "report" / "report.md").read_text()
    assert "the noise floor, which is below 1e-9 nats and has no place" in (run_dir / "report" / "index.html").read_text()


def test_records_of_the_synthetic_run_are_valid(run_dir: Path) -> None:
    for precision in ("fp8", "w4a16", "nvfp4a16"):
        assert Plan.load(run_dir / precision / "plan.json").precision == precision
        assert Verification.load(run_dir / precision / "verify.json").passed


def test_long_context_is_drawn_by_length_and_depth_with_its_numbers(tmp_path: Path) -> None:
    """Only where there is something to show: the samples have one length."""
    from assay.records.long_context import CellLoss, EffectiveLength, LongContext
    from assay.records.verdict import GateReport

    run_dir = make_run(tmp_path)
    assert (2, "Long context Long context was not measured") in Page(write_report(run_dir).read_text()).headings
    lost = {(32768, 0.5): 0.25}
    cells = tuple(
        CellLoss(
            subtask=None, length_tokens=length, depth=depth, num_pairs=20, reference=1.0, candidate=1 - drop,
            drop=Interval(value=drop, low=drop - 0.1, high=drop + 0.1, n=20, level=0.95),
        )
        for length in (16384, 32768)
        for depth in (0.0, 0.5)
        for drop in (lost.get((length, depth), 0.0),)
    )  # fmt: skip
    one = LongContext(candidate="w4a16", task="needle", by_subtask=(), by_length=(), by_depth=cells)
    reach = EffectiveLength(
        candidate="w4a16", tasks=("needle",), max_drop=0.05, at_least_tokens=None, lengths=(), effective_tokens=16384,
        reference_tokens=32768,
    )  # fmt: skip
    gates = GateReport.load(run_dir / "gates.json")
    gates.model_copy(update={"long_context": (one,), "effective_lengths": (reach,)}).save(run_dir / "gates.json")
    text = write_report(run_dir).read_text()
    assert "w4a16, needle: within 5.0 points of fp8 up to 16,384 tokens." in text
    page = Page(text)
    assert (2, "Long context By length: the largest loss is 25 points, needle at 32,768 tokens (w4a16)") in page.headings
    drawn, on_a_phone = (said for said in page.pictures if said.startswith("Points lost"))
    assert drawn == on_a_phone
    assert drawn == (
        "Points lost, w4a16, needle by depth: depth 0, 16,384 tokens: shows no change (10.0 gained to 10.0 lost), 20 items; "
        "depth 0.5, 16,384 tokens: shows no change (10.0 gained to 10.0 lost), 20 items; depth 0, 32,768 tokens: shows no "
        "change (10.0 gained to 10.0 lost), 20 items; depth 0.5, 32,768 tokens: loses 25.0 points (15.0 to 35.0 lost), 20 items"
    )
    shades = re.findall(r'<text [^>]*class="cell (\w+)"[^>]*>([^<]+)</text>', text)
    assert shades == ([("heat0", "0.0")] * 3 + [("lost4", "25.0")]) * 2
    assert page.table("Cells of long context").rows[-1] == [
        "w4a16, needle", "all", "32,768", "0.5", "20", "100.0 %", "75.0 %", "+25.0 [+15.0, +35.0]"
    ]  # fmt: skip


def test_what_comparing_candidates_does_is_said(run_dir: Path) -> None:
    """The largest of two normal values is 1 / sqrt(pi) on average; candidates share the reference's replies, half of the
    variance."""
    assert [best_of(number) for number in (1, 2, 8)] == pytest.approx([0, 1 / math.sqrt(math.pi), 1.4236], abs=0.005)
    run = load_run(run_dir)
    [said] = [limit.text for limit in find_limits(run) if limit.key == "selection"]
    labels = {one.label for one in run.candidates}
    assert run.gates is not None
    drops = [
        v.observed
        for v in run.gates.verdicts
        if v.gate.startswith("score ") and v.candidate in labels and v.observed and v.status != "NOT MEASURED"
    ]
    errors = sorted((drop.high - drop.low) / 2 / 1.959964 for drop in drops)
    effect = 100 * best_of(len(labels)) * errors[len(errors) // 2] / math.sqrt(2)
    assert said == (
        f"{len(labels)} candidates were compared. If all were equally good, the best-looking one would look {effect:.1f} "
        "points too good on a task (median over tasks and candidates), and one of "
        f"{len(labels)} that each lost exactly the margin would pass in up to {2.5 * len(labels):g} % of runs."
    )
    alone = replaced(run, measurements=tuple(m for m in run.measurements if m.label not in sorted(labels)[1:]))
    assert not [limit for limit in find_limits(alone) if limit.key == "selection"]
