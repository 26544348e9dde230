"""`assay power`: the whole output of a small suite, the record, an earlier run, and what is refused."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from command_line import Run
from scipy import stats
from synthetic_run import make_measurements, make_run
from tiny_checkpoints import make_tiny_glm4_moe

from assay.records.preflight.power import PowerReport
from assay_evaluate.statistics.item_pairs import find_task, pair_items

SUITE = """schema: 1
name: mine
seed: eval-mine
tasks:
  - {kind: arithmetic, name: sums, languages: [en], num_items: 100, max_tokens: 64}
  - {kind: needle, name: needles, languages: [en], num_items: 29, max_tokens: 64}
acceptance: false
"""
GATES = """schema: 1
name: limits
gates:
  - {kind: score, task: sums, max_drop: 0.1}
  - {kind: score, task: needles, max_drop: 0.1, required: false}
  - {kind: truncation, max_share: 0.05}
"""
SAY = "say TASK=SHARE, with a share from 0 to 0.5, as in gpqa-diamond=0.12"
PRINTED = """power of suite mine under gates limits
gate                           items  replies  differ  copy: PASS  loses the margin: PASS  FAIL   candidate PASS  loses \
twice: FAIL  candidate PASS  replies of a candidate
sums, margin 10                100    1        0 %     100 %       2.2 %                   1.1 %  0 %             73.8 % \
            0 %             100
needles (optional), margin 10  29     1        0.5 %   0 %         0 %                     0.1 %  0 %             10.5 % \
            0 %             29
together: 2 gates                                      0 %         0 %                     1.1 %  0 %             76 %   \
            0 %
required alone: 1 gate                                 100 %       2.2 %                   2.1 %  2.2 %           81.3 % \
            0 %
to pass 4 times in 5  true loss  items  or replies to each  all gates: items  or replies to each
sums                  none       35     no number           35                no number
needles               none       35     no number           35                no number
An identical copy passes with 0 % (100 % if the reference cannot do the tasks whose gates are not required), 0 % \
to 0 % if replies are less or more steady than assumed.
A checkpoint that loses nothing on balance, and changes for good which items are right, passes with 0 % if half and 0 % \
if three quarters of what differs is such change.
With 1 % of the replies cut off on both sides the copy passes with 0 %.
In the row of a gate the candidate loses at that task alone, in that of all together at every task; `candidate PASS` \
is the overall verdict on it. What is neither PASS nor FAIL is UNDERPOWERED. A gate passes, and fails, a loss of just \
its margin with 2.5 % or less by construction; the overall verdict does what its column says.
What is needed is for a PASS of that gate alone, and for one of all gates together, each by itself.
Taken to pass: truncation; and every reply to come.
Assumed of needles: `differ` is the share of replies that differ between two runs of one model; --discordance \
TASK=SHARE or --run RUN says better.
Given: how often replies to sums differ.
All of it is taken for noise of replies, which more replies average out; --reply-noise SHARE says how much is.
4,000 draws, seed 1: a standard error of 0.8 points at most.
Cost of reference: 258 requests, 79 k prompt tokens, 9 k to 30 k output tokens.
Cost of candidate: 129 requests, 40 k prompt tokens, 4.5 k to 15 k output tokens.
No GPU-hours: they need --model: the headers of its weights say what a server reads and computes.
Weakest: needles, 0 %. What would raise it: 2 times the items of needles: it would pass with 99.2 %.
"""


@pytest.fixture
def mine(tmp_path: Path) -> tuple[str, ...]:
    (tmp_path / "mine.yaml").write_text(SUITE)
    (tmp_path / "limits.yaml").write_text(GATES)
    return "power", str(tmp_path / "mine.yaml"), "--gates", str(tmp_path / "limits.yaml")


def test_the_whole_output(run: Run, mine: tuple[str, ...]) -> None:
    code, out, err = run(*mine, "--discordance", "sums=0")
    assert (code, err) == (0, "")
    assert out == PRINTED
    # Of 100 items that differ in nothing else, the lost ones are binomial. By Tango's interval 4 of them pass. By the exact
    # tail, which is binomial here, 17 fail one gate alone and 18 by Holm's adjustment over two.
    cells = [float(cell) for cell in re.findall(r"([\d.]+) %", PRINTED.splitlines()[2])]
    passes, fails, twice = cells[2], cells[3], cells[5]
    assert passes == pytest.approx(100 * stats.binom.cdf(4, 100, 0.1), abs=0.9)
    assert fails == pytest.approx(100 * stats.binom.sf(17, 100, 0.1), abs=0.5)
    assert twice == pytest.approx(100 * stats.binom.sf(17, 100, 0.2), abs=3.2)
    cells = [float(cell) for cell in re.findall(r"([\d.]+) %", PRINTED.splitlines()[5])]
    fails_alone, twice_alone = cells[2], cells[4]
    assert fails_alone == pytest.approx(100 * stats.binom.sf(16, 100, 0.1), abs=0.5)
    assert twice_alone == pytest.approx(100 * stats.binom.sf(16, 100, 0.2), abs=3.2)


def test_the_record_and_the_cost_of_a_model(run: Run, mine: tuple[str, ...], tmp_path: Path) -> None:
    source = make_tiny_glm4_moe(tmp_path / "source")
    code, out, _ = run(*mine, "--model", source, "--profile", "8xh200", "--reply-noise", "0.5", "--json")
    report = PowerReport.model_validate_json(out)
    assert code == 0
    assert (report.suite, report.gate_recipe, report.model, report.profile) == ("mine", "limits", "source", "8xh200")
    assert [(one.task, one.required, one.reply_noise, one.assumed_from) for one in report.gates] == [
        ("sums", True, 0.5, "assumed"), ("needles", False, 0.5, "assumed"),
    ]  # fmt: skip
    assert report.required_only is not None
    assert report.required_only.num_gates == 1
    assert report.no_gpu_hours is None
    assert len(report.costs) > 1
    assert all(one.gpu_hours is not None and 0 < one.gpu_hours[0] < one.gpu_hours[1] for one in report.costs)


def test_a_run_says_what_two_runs_of_a_model_differ_in(run: Run, tmp_path: Path) -> None:
    run_dir = make_run(tmp_path / "runs")
    code, out, _ = run("power", "quick", "--run", run_dir, "--json")
    assert code == 0
    report = PowerReport.model_validate_json(out)
    sources = {one.task: one.assumed_from for one in report.gates}
    assert sources["arithmetic"] == "measured in tiny-glm"
    candidates = [one for one in make_measurements() if one.label not in {"fp8", "fp8-repeat"}]
    drops = [pair_items(find_task(make_measurements()[0], "arithmetic"), find_task(one, "arithmetic")) for one in candidates]
    seen = {one.task: one for one in report.needed if one.loss > 0}
    assert seen["arithmetic"].loss == pytest.approx(max(np.mean(both.differences) for both in drops))
    nothing = next(one for one in report.needed if one.task == "arithmetic" and one.loss == 0)
    assert nothing.items is not None and nothing.items_together is not None
    assert nothing.items < nothing.items_together


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--discordance", "sum=0.1"), "--discordance sum: no task of suite mine; did you mean sums? tasks: sums, needles"),
        (("--discordance", "sums=0.6"), f"--discordance sums=0.6: {SAY}"),
        (("--discordance", "sums"), f"--discordance sums: {SAY}"),
        (("--reply-noise", "1.5"), "--reply-noise 1.5: must be a share from 0 to 1"),
        (("--profile", "8xh200"), "--profile 8xh200: GPU-hours need --model, too; name it, or leave --profile out"),
    ],
)  # fmt: skip
def test_what_is_refused(run: Run, mine: tuple[str, ...], words: tuple[str, ...], message: str) -> None:
    code, out, err = run(*mine, *words)
    assert (code, out) == (2, "")
    assert err.strip().removeprefix("error: ") == message


def test_gates_without_a_score_are_refused(run: Run, mine: tuple[str, ...], tmp_path: Path) -> None:
    (tmp_path / "limits.yaml").write_text("schema: 1\nname: limits\ngates: [{kind: truncation, max_share: 0.05}]\n")
    code, _, err = run(*mine)
    assert (code, err.strip()) == (
        2, "error: gates limits: no limit on a score, so no candidate can pass; write a score gate, or name other --gates"
    )  # fmt: skip
