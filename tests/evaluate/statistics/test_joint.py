"""Chances of verdicts by simulation: against closed forms, enumeration, and the verdicts of the gates on drawn replies."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator

import numpy as np
import pytest
from blank_records import item_result
from scipy import stats
from statsmodels.stats.power import NormalIndPower
from synthetic_run import make_measurement

from assay.recipes.gate import GateRecipe, Stopping
from assay.recipes.suite import SuiteRecipe
from assay.records.measurement import Measurement, Round, TaskResult
from assay_evaluate.asking.session import task_result
from assay_evaluate.preflight.power_designs import Assumptions, gated_tasks, rules_of
from assay_evaluate.statistics.clustered import clustered_difference
from assay_evaluate.statistics.decisions import PairedEvidence, decide, holm, paired_evidence, widen_by_clusters
from assay_evaluate.statistics.graded import POWERS
from assay_evaluate.statistics.item_pairs import Pairs
from assay_evaluate.statistics.joint.chances import NUM_DRAWS, Path, Rules, chances_of, resolve
from assay_evaluate.statistics.joint.drawn import Assumption, Evidence, LookDesign, ScoreDesign
from assay_evaluate.statistics.power import noninferiority_power
from assay_evaluate.statistics.proportions import weighted_sum
from assay_evaluate.statistics.sequential import nominal_levels
from assay_evaluate.tasks.looks import Look, planned_looks
from assay_evaluate.verdicts.gates import judge
from assay_evaluate.verdicts.scores import judge_scores
from assay_evaluate.verdicts.whole import tasks_to_ask_further

FOUR_SIGMA = 4 * 0.5 / np.sqrt(NUM_DRAWS)
RULES = Rules()


def once(task: str, num_items: int, margin: float, discordance: float, **changes: object) -> ScoreDesign:
    """A task asked once, one reply to each item."""
    made = ScoreDesign(task, margin, Assumption(discordance), (LookDesign(1, 1, num_items),))
    return dataclasses.replace(made, **changes)  # type: ignore[arg-type]


def asked(task: str, num_items: int, margin: float, assumed: Assumption, *replies: tuple[int, int]) -> ScoreDesign:
    """A task asked again and again about the same items."""
    most = replies[-1][0] * replies[-1][1] / sum(replies[-1])
    looks = tuple(
        LookDesign(reference, candidate, num_items, reference * candidate / (reference + candidate) / most)
        for reference, candidate in replies
    )
    return ScoreDesign(task, margin, assumed, looks)


GPQA = once("gpqa", 198, 0.05, 0.12)


# ------------------------------------------------------------------------------------------------ one gate
@pytest.mark.parametrize(
    ("num_items", "margin", "discordance", "loss"),
    [
        (198, 0.05, 0.12, 0.0), (1319, 0.01, 0.03, 0.0), (60, 0.15, 0.15, 0.05), (500, 0.03, 0.04, 0.03), (400, 0.03, 0.0, 0.0),
        (100, 0.1, 0.05, 0.2), (198, 0.05, 0.12, -0.05), (198, 0.05, 0.02, -0.05),
    ],
)  # fmt: skip
@pytest.mark.parametrize("noise", [1.0, 0.3])
def test_one_gate_has_the_exact_power(num_items: int, margin: float, discordance: float, loss: float, noise: float) -> None:
    """Whatever part of the discordance is noise: of one reply to each item nobody can tell."""
    design = once("t", num_items, margin, discordance, assumed=Assumption(discordance, noise))
    chances = chances_of([design], [loss], RULES)
    exact = noninferiority_power(margin, max(discordance, abs(loss)), num_items, loss=loss)
    assert chances.passes_alone == (chances.passes,)
    assert chances.passes == pytest.approx(exact, abs=FOUR_SIGMA)


@pytest.mark.parametrize(("replies", "noise"), [(1, 1.0), (4, 1.0), (4, 0.5)])
def test_many_items_have_the_power_of_the_normal_test(replies: int, noise: float) -> None:
    """A mean of differences whose variance is the lasting part of the discordance and a k-th of its noise."""
    discordance, margin, n = 0.12, 0.01, 2400
    design = asked("t", n, margin, Assumption(discordance, noise), (replies, replies))
    variance = discordance * (1 - noise) + discordance * noise / replies
    # statsmodels: one sample (ratio 0), the effect in standard deviations.
    exact = NormalIndPower(ddof=0).power(margin / variance**0.5, n, alpha=0.025, ratio=0, alternative="larger")
    assert chances_of([design], [0.0], RULES).passes == pytest.approx(exact, abs=FOUR_SIGMA + 0.01)


def test_looks_have_the_power_of_correlated_normals() -> None:
    """Two looks at new items, the second at four times as many: the chance that one of two normals with correlation one half
    lies below its bound."""
    n, margin, discordance = (600, 2400), 0.012, 0.1
    looks = (LookDesign(1, 1, n[0], 0.25), LookDesign(1, 1, n[1], 1.0))
    design = ScoreDesign("t", margin, Assumption(discordance), looks)
    levels = nominal_levels([0.25, 1.0], n, 0.025)
    drift = [margin / np.sqrt(discordance / items) for items in n]
    bounds = [stats.norm.isf(level) for level in levels]
    open_still = stats.multivariate_normal([0, 0], [[1, 0.5], [0.5, 1]]).cdf(
        [b - d for b, d in zip(bounds, drift, strict=True)]
    )
    chances = chances_of([design], [0.0], RULES)
    assert chances.passes == pytest.approx(1 - open_still, abs=FOUR_SIGMA + 0.01)
    assert chances.stops[0] == pytest.approx(
        [stats.norm.sf(bounds[0] - drift[0])] * 1 + [1 - stats.norm.sf(bounds[0] - drift[0])], abs=FOUR_SIGMA + 0.01
    )


def test_a_lost_margin_passes_and_fails_by_the_level_however_often_it_is_looked_at() -> None:
    design = asked("t", 198, 0.05, Assumption(0.12), (2, 1), (2, 2), (3, 3), (5, 5))
    chances = chances_of([design], [0.05], RULES, num_draws=20_000)
    assert 0.015 < chances.passes < 0.03
    assert 0.015 < chances.fails < 0.03


def test_fewer_items_than_the_least_never_pass() -> None:
    assert chances_of([once("few", 29, 0.5, 0.0)], [0.0], RULES).passes == 0
    assert chances_of([once("few", 30, 0.5, 0.0)], [0.0], RULES).passes == 1


def test_an_equivalence_claim_passes_less_often_and_fails_on_a_gain() -> None:
    claim = once("t", 400, 0.05, 0.12, claim="equivalent")
    assert chances_of([claim], [0.0], RULES).passes < chances_of([once("t", 400, 0.05, 0.12)], [0.0], RULES).passes
    assert chances_of([claim], [-0.2], RULES).fails > 0.99


@pytest.mark.parametrize(
    ("losses", "designs"), [([0.0], []), ([1.0], [GPQA]), ([-1.0], [GPQA]), ([0.0, 0.0], [GPQA])]
)  # fmt: skip
def test_what_cannot_be_drawn_is_an_error(losses: list[float], designs: list[ScoreDesign]) -> None:
    with pytest.raises(ValueError, match=r"design|loss|zip"):
        chances_of(designs, losses, RULES)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"assumed": Assumption(0.51)}, "t: discordance 0.51 must lie between 0 and 0.5"),
        ({"assumed": Assumption(0.1, 1.1)}, "t: noise 1.1 must lie between 0 and 1"),
        ({"cluster_sizes": (50, 49)}, "t: clusters of 99 items"),
    ],
)
def test_what_cannot_be_assumed_is_an_error(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        once("t", 100, 0.1, 0.1, **changes)


# ------------------------------------------------------------------------------------------------ several gates
def test_together_is_the_product_for_a_lossless_candidate_and_the_seed_decides() -> None:
    designs = [GPQA, once("gsm8k", 1319, 0.01, 0.03), once("ruler", 1300, 0.02, 0.05)]
    chances = chances_of(designs, [0.0] * 3, RULES)
    assert chances.passes == pytest.approx(float(np.prod(chances.passes_alone)), abs=FOUR_SIGMA)
    assert chances == chances_of(designs, [0.0] * 3, RULES)
    assert chances != chances_of(designs, [0.0] * 3, RULES, seed=2)


SMALL = (once("a", 12, 0.3, 0.2), once("b", 10, 0.4, 0.3))


@pytest.mark.slow
@pytest.mark.parametrize("whole", [None, (0.5, 2.0)])
@pytest.mark.parametrize("losses", [(0.0, 0.0), (0.7, 0.2)])
def test_two_small_gates_are_as_enumerated(losses: tuple[float, ...], whole: tuple[float, float] | None) -> None:
    """Every table of every task with its exact probability, judged by the functions of the verdicts, Holm and the whole too."""
    rules = Rules(min_items=5, whole=whole)
    tables = [list(_tables(design, loss)) for design, loss in zip(SMALL, losses, strict=True)]
    passes = fails = 0.0
    for (chance_a, entry), (chance_b, other) in itertools.product(*tables):
        word = _word([entry, other], whole)
        passes, fails = passes + chance_a * chance_b * (word == "PASS"), fails + chance_a * chance_b * (word == "FAIL")
    chances = chances_of(SMALL, losses, rules, num_draws=20_000)
    assert (chances.passes, chances.fails) == (pytest.approx(passes, abs=0.015), pytest.approx(fails, abs=0.015))


def _word(evidence: list[PairedEvidence], whole: tuple[float, float] | None) -> str:
    """The overall verdict on tables of several tasks."""
    adjusted = holm([entry.p_fail for entry in evidence])
    words = [decide(entry, min_items=5, p_fail_adjusted=p) for entry, p in zip(evidence, adjusted, strict=True)]
    if "FAIL" in words or whole is None:
        return "FAIL" if "FAIL" in words else "PASS" if set(words) == {"PASS"} else "UNDERPOWERED"
    ends = ("value", "low", "high")
    uses = [entry.drop.model_copy(update={end: getattr(entry.drop, end) / entry.margin for end in ends}) for entry in evidence]
    mean = weighted_sum(uses, [1 / len(uses)] * len(uses))
    if mean.low > whole[0]:
        return "FAIL"
    return "PASS" if mean.high < whole[0] and all(use.high < whole[1] for use in uses) else "UNDERPOWERED"


def _tables(design: ScoreDesign, loss: float) -> Iterator[tuple[float, PairedEvidence]]:
    """(probability, evidence) of every table of one reply to each item that is at all likely."""
    n, rate = design.num_items, max(design.assumed.discordance, loss)
    for b in range(n + 1):
        for c in range(n + 1 - b):
            chance = stats.multinomial.pmf([b, c, n - b - c], n, [(rate + loss) / 2, (rate - loss) / 2, 1 - rate])
            if chance > 1e-4:
                yield chance, paired_evidence(b, c, n, design.margin)


@pytest.mark.slow
def test_repositories_pass_as_often_as_the_wider_interval_lets_them() -> None:
    sizes = (12, 6, 6, 6, 6, 6, 6, 6, 6, 6) * 3 + (9, 9, 9, 9) * 2
    design = once("swe", 270, 0.10, 0.17, cluster_sizes=sizes)
    rng, passed, num_draws = np.random.default_rng(5), 0, 1000
    for _ in range(num_draws):
        moves = rng.choice([1, -1, 0], p=[0.085, 0.085, 0.83], size=270)
        clustered = clustered_difference(moves, np.repeat(np.arange(len(sizes)), sizes))
        evidence = widen_by_clusters(paired_evidence(int((moves > 0).sum()), int((moves < 0).sum()), 270, 0.10), clustered)
        passed += decide(evidence, min_items=30) == "PASS"
    assert chances_of([design], [0.0], RULES).passes == pytest.approx(passed / num_draws, abs=4 * 0.5 / np.sqrt(num_draws))


# ------------------------------------------------------------------------------------------------ the verdicts themselves
SUITE = SuiteRecipe.model_validate(
    {
        "schema": 1, "name": "drawn", "seed": "eval-drawn",
        "tasks": [
            {"kind": "arithmetic", "name": "plain", "languages": ["en"], "num_items": 120, "max_tokens": 9},
            {"kind": "arithmetic", "name": "again", "languages": ["en"], "num_items": 90, "max_tokens": 9, "temperature": 1.0,
             "num_samples": {"min": 1, "max": 5}},
            {"kind": "arithmetic", "name": "twice", "languages": ["en"], "num_items": 60, "max_tokens": 9, "temperature": 1.0,
             "num_samples": 2},
        ],
    }
)  # fmt: skip
MARGINS = {"plain": 0.1, "again": 0.1, "twice": 0.15}
GATES = {
    "schema": 1, "name": "drawn",
    "gates": [{"kind": "score", "task": task, "max_drop": margin} for task, margin in MARGINS.items()],
}  # fmt: skip
CLAIM = {"max_mean_use": 0.5, "max_task": 2.0}
RATES = {"plain": 0.08, "again": 0.2, "twice": 0.16}


def replies(rng: np.random.Generator, n: int, rate: float, loss: float) -> tuple[np.ndarray, np.ndarray]:
    """Five replies of either side to each item: 2 x rate of the items are open, of which the candidate loses."""
    is_open = rng.random((n, 1)) < 2 * rate
    sides = (np.where(is_open, rng.random((n, 5)) < chance, True) for chance in (0.5, (1 - loss / rate) / 2))
    reference, candidate = sides
    return reference, candidate


def result(name: str, right: np.ndarray, num_samples: int) -> TaskResult:
    items = [
        item_result(str(at), bool(entry), sample=sample)
        for at, row in enumerate(right)
        for sample, entry in enumerate(row[:num_samples])
    ]
    made = task_result(name, "arithmetic", items, 9)
    return made.model_copy(update={"rounds": (Round(started="", num_samples=num_samples, limit=None, why=""),)})


def sides(drawn: dict[str, tuple[np.ndarray, np.ndarray]], at: dict[str, Look]) -> tuple[Measurement, Measurement]:
    results = []
    for side, label in enumerate(("fp8", "w4a16")):
        tasks = [result(name, pair[side], at[name][side]) for name, pair in drawn.items()]
        results.append(make_measurement(label, SUITE).model_copy(update={"tasks": tuple(tasks)}))
    return results[0], results[1]


def evidence_of(reference: np.ndarray, candidate: np.ndarray, look: Look) -> Evidence:
    """Of one run."""
    difference = reference[:, : look[0]].mean(axis=1) - candidate[:, : look[1]].mean(axis=1)
    sums = tuple(np.array([(difference**power).sum()]) for power in POWERS)
    return Evidence(len(reference), look[:2] != (1, 1), sums, None, np.array([0.0]))


def path_of(design: ScoreDesign, reference: np.ndarray, candidate: np.ndarray, planned: tuple[Look, ...], rules: Rules) -> Path:
    """Of one run that may take every look."""
    return Path(design, rules, len(RATES), [evidence_of(reference, candidate, look) for look in planned])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("margins", "whole", "expected"),
    [(0.0, None, "PASS"), (1.0, None, "UNDERPOWERED"), (2.0, None, "FAIL"), (0.0, CLAIM, "PASS"), (1.0, CLAIM, "FAIL")],
)
def test_every_drawn_run_gets_the_verdict_of_the_gates(
    margins: float, whole: dict[str, float] | None, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Replies of three tasks, one of them asked in rounds as a run does: judged by the gates, and by the rules over arrays."""
    for beside in ("detectable", "needed"):  # nine tenths of the time; no status depends on them
        monkeypatch.setattr(Pairs, beside, lambda *args: 1)
    gates = GateRecipe.model_validate(GATES | ({} if whole is None else {"whole": whole}))
    gated, _ = gated_tasks(SUITE, gates, Assumptions(RATES))
    planned = {task.name: planned_looks(task, Stopping()) for task in SUITE.tasks}
    rng, words = np.random.default_rng(int(margins)), []
    for _ in range(4):
        drawn = {
            entry.gate.task: replies(rng, entry.design.num_items, RATES[entry.gate.task], margins * entry.design.margin)
            for entry in gated
        }
        at = dict.fromkeys(drawn, 0)
        while True:
            reference, candidate = sides(drawn, {name: planned[name][number] for name, number in at.items()})
            verdicts = judge_scores([entry.gate for entry in gated], reference, candidate, gates)
            further = [name for name in tasks_to_ask_further(gates, verdicts, "w4a16") if at[name] + 1 < len(planned[name])]
            if not further:
                break
            at |= {name: at[name] + 1 for name in further}
        report = judge([reference, candidate], gates, model="tiny-glm")
        rules = dataclasses.replace(rules_of(gates), level_step=1e-6)
        paths = [path_of(entry.design, *drawn[entry.gate.task], planned[entry.gate.task], rules) for entry in gated]
        own = resolve(paths, rules)
        status = {(1.0, 0.0): "PASS", (0.0, 1.0): "FAIL", (0.0, 0.0): "UNDERPOWERED"}
        alone = [status[pair] for pair in zip(own.passes_alone, own.fails_alone, strict=True)]
        assert alone == [verdicts[entry.gate.task].status for entry in gated]
        assert [stops.index(1.0) for stops in own.stops] == [at[entry.gate.task] for entry in gated]
        overall = "PASS" if own.passes else "FAIL" if own.fails else "UNDERPOWERED"
        assert report.overall == {"w4a16": overall}
        words.append(overall)
    assert expected in words
