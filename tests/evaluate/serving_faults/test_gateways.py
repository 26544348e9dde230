"""What a gateway changes is named before anything is judged: scripted gateways, asked by the command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from command_line import Run
from gateways import given

from assay.records.verdict import GateReport

pytestmark = pytest.mark.slow

SUITE = """\
schema: 1
name: short
seed: eval-gateways
acceptance: false
gates: gates.yaml
tasks:
  - {kind: arithmetic, name: sums, languages: [en], num_items: 48, num_steps: [3], max_tokens: 400TEMPERATURE}
"""
LOOKUP = (
    "  - {kind: needle, name: lookup, languages: [en], num_items: 12, num_needles: 3, lengths_tokens: [400], max_tokens: 400}\n"
)
GATES = "schema: 1\nname: gates\ndefault_max_drop: 0.4\nmin_items: 10\ngates: []\n"
SAMPLED = ", temperature: 0.7, num_samples: 3"


def judged(run: Run, modes: str) -> tuple[GateReport, str]:
    """The verdicts on two servers, the first of which is the reference, and what is printed. modes: of each, and how it is
    asked: `healthy swapped`, `cached cached sampled`, `trimmed trimmed lookup`."""
    fp8, w4a16, *how = modes.split()
    suite = SUITE.replace("TEMPERATURE", SAMPLED if "sampled" in how else "")
    Path("short.yaml").write_text(suite + (LOOKUP if "lookup" in how else ""))
    Path("gates.yaml").write_text(GATES + ("estimand: these_items\n" if "these_items" in how else ""))
    with given(fp8=fp8, w4a16=w4a16) as servers:
        first, second = (f"{label}={one.base_url}" for label, one in servers.by_label.items())
        code, out, err = run("evaluate", "--reference", first, "--candidate", second, "--suite", "short.yaml")
    assert code in {0, 1}, err
    return GateReport.load(Path("runs/model/gates.json")), out


def faults(report: GateReport, candidate: str) -> list[str]:
    """Sentences of its scores that are not measured."""
    verdicts = [one for one in report.verdicts if one.candidate == candidate and one.gate.startswith("score ")]
    return [one.detail for one in verdicts if one.status == "NOT MEASURED"]


@pytest.mark.parametrize("how", ["lookup", "sampled"])
def test_healthy_servers_raise_nothing(run: Run, how: str) -> None:
    report, out = judged(run, f"healthy healthy {how}")
    assert (report.serving, report.not_looked_at) == ((), {})
    assert report.overall == {"fp8-repeat": "PASS", "w4a16": "PASS"}, out


CASES = {
    "healthy fallback": [
        "sums: all 48 replies of w4a16 say that they are of the-reference, asked was model: another model answers for it.",
    ],
    "healthy split": [
        "sums: 9 of 48 replies of w4a16 say that they are of the-reference, asked was model: another model answers for it.",
    ],
    "healthy configuration": [
        "sums: all 48 replies of w4a16 are of server configuration fp_b, its signature of fp_a: another server "
        "answers its questions than the one whose weights were looked at.",
    ],
    "cached cached sampled": [
        "sums: 96 of 144 replies of fp8 are other ones over again, with the same id: a cache answers, and samples are"
        " not independent; 96 of 144 replies of w4a16 are other ones over again, with the same id: a cache answers, "
        "and samples are not independent.",
    ],
    "cached cached sampled these_items": [
        "sums: 96 of 144 replies of fp8 are other ones over again, with the same id: a cache answers, and samples are"
        " not independent; 96 of 144 replies of w4a16 are other ones over again, with the same id: a cache answers, "
        "and samples are not independent.",
    ],
    "healthy cached": [
        "sums: asked twice, 24 of 24 questions came back from w4a16 with the id of the first reply: a cache answers, "
        "and nothing shows whose replies it has.",
    ],
    "healthy forced sampled": [
        "sums: asked twice above temperature 0, w4a16 gives the same reply to all 24 questions, fp8 to 2 of 24: "
        "temperature is not obeyed, or a cache answers.",
    ],
    "healthy falsy": [
        "sums: asked twice at temperature 0, w4a16 gives another reply to 46 of 48 questions, fp8 to none of 24: "
        "temperature 0 is not obeyed there.",
    ],
    "healthy trimmed lookup": [
        "lookup: the same question had 400 prompt tokens at fp8 and 300 at w4a16 (all 12 questions differ): something"
        " between shortens prompts; a prompt of 400 tokens is billed as 300 by w4a16 (all 6 that were counted are "
        "short): something between shortens prompts.",
    ],
    "trimmed trimmed lookup": [
        "lookup: a prompt of 400 tokens is billed as 300 by fp8 (all 6 that were counted are short): something "
        "between shortens prompts; a prompt of 400 tokens is billed as 300 by w4a16 (all 6 that were counted are "
        "short): something between shortens prompts.",
    ],
    "healthy template": [
        "sums: prompts have 3 more tokens at w4a16 than at fp8 on all 48 questions: another chat template or system "
        "prompt, thinking switched on or off, or a first token put twice.",
    ],
    "healthy swapped": [
        "sums: the same question had 199 prompt tokens at fp8 and 79 at w4a16 (10 of 48 questions differ, not the "
        "longest alone): replies are swapped, or belong to other prompts.",
    ],
    "healthy swallowed": [
        "sums: 15 of 48 replies of w4a16 have thinking and no answer (fp8: none), and in 15 of them the answer stands"
        " at its end: the reasoning parser, not the weights.",
    ],
    "capped capped": [
        "sums: 24 of 48 replies of fp8 end at exactly 110 tokens without an answer, and say that they ended by "
        "themselves: something caps replies; 24 of 48 replies of w4a16 end at exactly 110 tokens without an answer, "
        "and say that they ended by themselves: something caps replies.",
    ],
    "healthy lowered": [
        "sums: 12 of 48 replies of w4a16 are cut off at 40 tokens, 400 were allowed: something lowers max_tokens.",
    ],
    "healthy stopped": [
        "sums: 3 of 48 replies of w4a16 were ended by a stop string that was not sent ('Question:'): something adds one.",
    ],
    "healthy miscounted": [
        "sums: the usage of all 48 replies of w4a16 contradicts itself (prompt_tokens 199 and completion_tokens 478 "
        "are more than total_tokens 478), so it cannot be seen which replies were cut off.",
    ],
    "thoughtless healthy": [
        "sums: all 48 replies of w4a16 have thinking, none of fp8: it is switched off, or not parsed, on one side.",
    ],
    "healthy page": [
        "sums: w4a16 gives one and the same text to 14 of 48 questions ('The service is under maintenance. Please "
        "come back in an hou…'), right for hardly any: a page of a gateway, not a reply.",
    ],
    "healthy lost": [
        "sums: the text of 4 of 46 replies of w4a16 is the beginning of fp8's to the same question and no more, though as many "
        "tokens were billed: something loses text; the usage of 2 of 48 replies of w4a16 contradicts itself (completion_tokens "
        "228 for a text of 114 bytes: as many as prompt and reply), so it cannot be seen which replies were cut off.",
    ],
    "healthy emptied": [
        "sums: the text of 3 of 47 replies of w4a16 is the beginning of fp8's to the same question and no more, though as many "
        "tokens were billed: something loses text; the usage of 1 of 48 replies of w4a16 contradicts itself (completion_tokens "
        "228 for a text of 57 bytes: as many as prompt and reply), so it cannot be seen which replies were cut off.",
    ],
    "lost healthy": [
        "sums: the text of 4 of 48 replies of fp8 is the beginning of w4a16's to the same question and no more, though as many "
        "tokens were billed: something loses text; the usage of 2 of 48 replies of fp8 contradicts itself (completion_tokens "
        "228 for a text of 114 bytes: as many as prompt and reply), so it cannot be seen which replies were cut off.",
    ],
}  # fmt: skip


@pytest.mark.parametrize("modes", CASES)
def test_what_a_gateway_changes_is_named(run: Run, modes: str) -> None:
    """Of modes `reference candidate`, the whole sentence of every task that has no score."""
    report, out = judged(run, modes)
    assert report.overall["w4a16"] == "NOT MEASURED"
    assert faults(report, "w4a16") == [f"Serving fault on {sentence}" for sentence in CASES[modes]]
    assert f"serving fault on {CASES[modes][0].removesuffix('.')}"[:60] in " ".join(out.split())
    page = json.loads(Path("runs/model/report/report.json").read_text())
    [row] = [row for row in page["rows"] if row["label"] == "w4a16"]
    faulty = {sentence.partition(":")[0] for sentence in CASES[modes]}
    assert {task["task"] for task in row["tasks"] if (task["accuracy"], task["drop"]) == (None, None)} == faulty
    is_reference_at_fault = any("fp8" in one.at_fault and len(one.at_fault) == 1 for one in report.serving)
    assert (report.overall["fp8-repeat"] == "NOT MEASURED") == is_reference_at_fault
