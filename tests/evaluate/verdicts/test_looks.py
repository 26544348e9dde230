"""A task that was asked in rounds, replayed from its records: what is paired, and what the looks say together."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from blank_records import item_result
from scipy import stats

from assay.recipes.gate import GateRecipe, ScoreGate
from assay.recipes.suite import LmEvalTask
from assay.records.measurement import ItemResult, Round, TaskResult
from assay_evaluate.asking.session import task_result
from assay_evaluate.statistics.item_pairs import Pairs, pair_items
from assay_evaluate.statistics.sequential import Spending, nominal_levels, sequential_p
from assay_evaluate.tasks.looks import Look, items_at
from assay_evaluate.verdicts.scores import combine_looks, rounds_sentence

GATE = ScoreGate(kind="score", task="t", max_drop=0.1)
RECIPE = GateRecipe.model_validate({"schema": 1, "name": "g", "gates": [GATE.model_dump()]})
TASK = LmEvalTask(kind="lm_eval", name="t", tasks=("x",), max_tokens=8)
LOOKS = (Look(2, 1), Look(2, 2), Look(3, 3), Look(5, 5))


def item(number: int | str, sample: int, correct: bool | None) -> ItemResult:
    return item_result(str(number), correct, prompt_tokens=1, output_tokens=10 + sample, answer=str(correct), sample=sample)


def result(replies: dict[str, Sequence[bool | None]], limit: int | None = None) -> TaskResult:
    """Item -> whether each reply is right; None where none came."""
    items = [item(name, sample, right) for name, reply in replies.items() for sample, right in enumerate(reply)]
    made = task_result("t", "lm_eval", items, 64)
    num_samples = max(len(reply) for reply in replies.values())
    return made.model_copy(update={"rounds": (Round(started="", num_samples=num_samples, limit=limit, why=""),)})


def drawn(rng: np.random.Generator, n: int, chance: float, loss: float, num_samples: int) -> tuple[TaskResult, TaskResult]:
    """Replies to items that differ in how often they are answered right; the candidate loses `loss` on each, on average."""
    reference = rng.beta(3 * chance, 3 * (1 - chance), n)
    sides = (rng.random((n, num_samples)) < np.stack([reference, reference * (1 - loss / chance)])[:, :, None])  # fmt: skip
    results = [result({str(place): row.tolist() for place, row in enumerate(side)}) for side in sides]
    return results[0], results[1]


def paired_at(reference: TaskResult, candidate: TaskResult, look: Look) -> Pairs:
    sides = ((reference, look.reference_samples), (candidate, look.candidate_samples))
    return pair_items(*(side.model_copy(update={"items": items_at(TASK, side.items, n, None, "eval")}) for side, n in sides))


def test_more_replies_on_one_side_count_in_its_share() -> None:
    """Three replies of the reference, one of the candidate; c lacks the reply that could be paired, d one that could not."""
    ours = result({"a": [True, False, False], "b": [True, True, True], "c": [None, True, True], "d": [False, True, None]})
    theirs = result({"a": [True], "b": [False], "c": [True], "d": [True]})
    pairs = pair_items(ours, theirs)
    assert pairs.items == ["a", "b", "d"]
    assert (pairs.reference, pairs.candidate) == ([True, True, False], [True, False, True])
    assert pairs.shares == ([pytest.approx(1 / 3), 1.0, 0.5], [1.0, 0.0, 1.0])
    assert pairs.num_excluded == 2
    assert pairs.is_sampled
    assert pairs.discordant == (1, 2)
    assert pairs.flips.wrong_to_right == 1
    mirrored = pair_items(theirs, ours)
    assert (mirrored.differences, mirrored.num_excluded) == ([-value for value in pairs.differences], 2)


def test_as_many_replies_on_both_sides_are_paired_as_ever() -> None:
    reference, candidate = drawn(np.random.default_rng(1), 40, 0.7, 0.1, 3)
    pairs = pair_items(reference, candidate)
    assert (pairs.n, pairs.unequal) == (120, None)


def test_second_replies_stand_against_the_first() -> None:
    ours = result({"a": [True, False], "b": [True, True], "c": [False, True]})
    again = result({"a": [False], "b": [True]}).model_copy(update={"is_second_replies": True})
    pairs = pair_items(ours, again.model_copy(update={"items": (*again.items, item("c", 0, True))}))
    assert (pairs.items, pairs.reference, pairs.candidate) == (["a", "b", "c"], [True, True, False], [False, True, True])
    assert not pairs.is_sampled


def test_items_that_were_drawn_for_one_side_only_are_not_missing() -> None:
    reference = result({f"p/{number}": [True] for number in range(8)}, limit=8)
    candidate = result({f"p/{number}": [True] for number in (2, 5, 6, 7)}, limit=4)
    pairs = pair_items(reference, candidate)
    assert (pairs.n, pairs.num_excluded) == (4, 0)
    assert pair_items(result({"a": [True], "b": [True]}), result({"a": [True]})).num_excluded == 1


def test_the_variance_is_that_of_the_mean_with_two_items_more() -> None:
    reference, candidate = drawn(np.random.default_rng(3), 60, 0.7, 0.1, 5)
    pairs = paired_at(reference, candidate, LOOKS[0])
    padded = np.array([*pairs.differences, 0.5**0.5, -(0.5**0.5)])
    assert pairs.variance == pytest.approx(padded.var() / len(padded))
    clean = pair_items(result({"a": [True], "b": [True]}), result({"a": [True], "b": [True]}))
    assert clean.variance == pytest.approx(1 / 16)


def test_looks_together_are_the_sequential_test_of_each() -> None:
    reference, candidate = drawn(np.random.default_rng(4), 80, 0.8, 0.05, 5)
    results = [paired_at(reference, candidate, look) for look in LOOKS[:3]]
    evidence, looks = combine_looks(GATE, RECIPE, LOOKS, list(LOOKS[:3]), results)
    by_look = [pairs.evidence(0.1, level=0.95) for pairs in results]
    shares, informations = [2 / 3 / 2.5, 0.4, 0.6], [1 / pairs.variance for pairs in results]
    early, late = Spending("pocock", part=0.9), Spending("hwang_shih_decani", -2.0)
    levels, fail_levels = (nominal_levels(shares, informations, 0.025, entry) for entry in (early, late))
    assert [look.level for look in looks] == pytest.approx(levels)
    assert [look.fail_level for look in looks] == pytest.approx(fail_levels)
    assert fail_levels[0] < levels[0] / 3
    assert [(look.p_pass, look.p_fail, look.drop) for look in looks] == [
        (entry.p_pass, entry.p_fail, entry.drop.value) for entry in by_look
    ]
    assert [look.num_items for look in looks] == [80, 80, 80]
    assert evidence.p_pass == sequential_p([entry.p_pass for entry in by_look], shares, informations, early)
    assert evidence.p_fail == sequential_p([entry.p_fail for entry in by_look], shares, informations, late)
    low = max(pairs.drop(1 - 2 * level).low for pairs, level in zip(results, fail_levels, strict=True))
    high = min(pairs.drop(1 - 2 * level).high for pairs, level in zip(results, levels, strict=True))
    assert (evidence.drop.low, evidence.drop.high) == (low, high)
    assert (evidence.drop.value, evidence.drop.level) == (results[-1].drop(0.95).value, 0.95)
    # What passes is what the interval shows.
    assert (evidence.p_pass < 0.025) == (evidence.drop.high < 0.1)
    assert (evidence.p_fail < 0.025) == (evidence.drop.low > 0.1)
    told = rounds_sentence(looks)
    assert f"{levels[0]:.2g} and {fail_levels[0]:.2g} decide), then" in told
    assert told.startswith("Looked at 3 times: 2 + 1 replies to 80 items (p ")
    assert told.endswith(f"alpha spent {looks[-1].alpha_spent:.2g}.")


def test_equivalence_spends_alike_in_both_directions() -> None:
    """Its PASS needs both ends of the interval."""
    reference, candidate = drawn(np.random.default_rng(4), 80, 0.8, 0.05, 5)
    results = [paired_at(reference, candidate, look) for look in LOOKS[:3]]
    evidence, looks = combine_looks(GATE.model_copy(update={"claim": "equivalent"}), RECIPE, LOOKS, list(LOOKS[:3]), results)
    assert [look.fail_level for look in looks] == [look.level for look in looks]
    low = max(pairs.drop(1 - 2 * look.level).low for pairs, look in zip(results, looks, strict=True))
    assert evidence.drop.low == low
    assert f"{looks[0].level:.2g} decides), then" in rounds_sentence(looks)


def test_a_single_planned_look_is_the_plain_test_bit_for_bit() -> None:
    reference, candidate = drawn(np.random.default_rng(5), 50, 0.8, 0.05, 2)
    pairs = paired_at(reference, candidate, Look(2, 2))
    evidence, looks = combine_looks(GATE, RECIPE, (Look(2, 2),), [Look(2, 2)], [pairs])
    assert evidence == pairs.evidence(0.1, level=0.95)
    assert [(look.share, look.alpha_spent, look.level) for look in looks] == [(1.0, pytest.approx(0.025), pytest.approx(0.025))]


@pytest.mark.slow
def test_a_loss_of_the_margin_is_seldom_passed_or_failed() -> None:
    """200 tasks of 60 items whose loss is the margin, up to four looks each: 2.5 % of either error is spent (the whole study is
    benchmarks/verdicts/sequential_errors.py)."""
    rng, words = np.random.default_rng(6), []
    for _ in range(200):
        reference, candidate = drawn(rng, 60, 0.8, 0.1, 5)
        results = [paired_at(reference, candidate, look) for look in LOOKS]
        evidence, _ = combine_looks(GATE, RECIPE, LOOKS, list(LOOKS), results)
        words.append((evidence.p_pass < 0.025, evidence.p_fail < 0.025))
    most = stats.binom.ppf(0.999, len(words), 0.025)
    assert sum(passed for passed, _ in words) <= most
    assert sum(failed for _, failed in words) <= most
