"""Tokens for what both sides get right, candidate / reference: an answer that is as good and longer costs money.

The log of the ratio of the mean lengths, with its linearized standard error over items or their clusters, and Student's t with
Satterthwaite's degrees for errors in proportion to a cluster's share of the tokens: a few long replies are most of a mean.
`benchmarks/verdicts/interval_coverage.py` measures what the interval covers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from scipy import stats

from assay.quantities import capital, interval_name, percent_plain, percent_short
from assay.recipes.gate import GateRecipe, VerbosityGate
from assay.records.base import Interval
from assay.records.measurement import Measurement, TaskResult
from assay.records.verdict import Status, Verdict
from assay_evaluate.statistics.decisions import holm
from assay_evaluate.statistics.item_pairs import common_tasks


class Lengths(NamedTuple):
    """One reply by each side that both got right."""

    cluster: str
    reference: int
    candidate: int
    thinking: tuple[int, int] | None
    """Of each. None: not told."""


class LengthRatio(NamedTuple):
    """increase: candidate / reference - 1, of the mean lengths. p_fail: of H0, an increase of at most the limit."""

    increase: Interval
    p_fail: float


def paired_lengths(reference: TaskResult, candidate: TaskResult) -> list[Lengths]:
    """Replies that both sides got right and whose tokens both sides know, by item and sample."""
    before = {(item.item, item.sample): item for item in reference.items}
    lengths = []
    for after in candidate.items:
        item = before.get((after.item, after.sample))
        if item is None or not (item.correct and after.correct and item.output_tokens and after.output_tokens):
            continue
        thinking = None
        if item.thinking_tokens is not None and after.thinking_tokens is not None:
            thinking = (item.thinking_tokens, after.thinking_tokens)
        cluster = f"{reference.task}/{after.cluster or after.item}"
        lengths.append(Lengths(cluster, item.output_tokens, after.output_tokens, thinking))
    return lengths


def length_ratio(lengths: Sequence[Lengths], max_increase: float, level: float = 0.95) -> LengthRatio:
    """ValueError below two clusters. n of the interval counts pairs of replies."""
    _, index = np.unique([length.cluster for length in lengths], return_inverse=True)
    if index.max() < 1:
        raise ValueError("an interval of lengths needs two items")
    tokens = np.array([(length.reference, length.candidate) for length in lengths], dtype=np.float64).T
    before, after = (np.bincount(index, weights=side / side.sum()) for side in tokens)
    weights = (before + after) / 2  # of each cluster in the ratio: a few long replies are most of it
    error = float(np.sqrt(((after - before) ** 2 / (1 - weights)).sum()))
    log_ratio = math.log(tokens[1].sum() / tokens[0].sum())
    degrees = float((weights**2).sum() ** 2 / (weights**4).sum())
    half = float(stats.t.ppf(0.5 + level / 2, degrees)) * error
    beyond = log_ratio - math.log1p(max_increase)
    p_fail = float(stats.t.sf(beyond / error, degrees)) if error > 0 else float(beyond <= 0)
    low, value, high = (math.expm1(log_ratio + shift) for shift in (-half, 0, half))
    return LengthRatio(Interval(value=value, low=low, high=high, n=len(lengths), level=level), p_fail)


# ------------------------------------------------------------------------------------------------ the gate
def judge_verbosity(gate: VerbosityGate, reference: Measurement, candidate: Measurement, recipe: GateRecipe) -> Verdict:
    """FAIL: surely longer by more than the limit, over all tasks or in one (Holm). PASS: over all tasks surely not."""
    by_task = {task.title or task.task: paired_lengths(task, other) for task, other in common_tasks(reference, candidate)}
    every = [length for lengths in by_task.values() for length in lengths]

    def verdict(status: Status, detail: str, observed: Interval | None = None, clause: str | None = None) -> Verdict:
        return Verdict(
            gate="verbosity", candidate=candidate.label, status=status, observed=observed, limit=gate.max_increase,
            detail=detail, clause=clause,
            has_say=gate.decides == "pass_and_fail" or (gate.decides == "fail" and status == "FAIL"),
        )  # fmt: skip

    num_clusters = {name: len({length.cluster for length in lengths}) for name, lengths in by_task.items()}
    if (num_items := len({length.cluster for length in every})) < max(recipe.min_items, 2):
        return verdict(
            "NOT MEASURED",
            f"Both sides are right, and tell their tokens, in {num_items} items; judged from {recipe.min_items} on.",
        )
    single = {name: lengths for name, lengths in by_task.items() if num_clusters[name] >= recipe.min_items}
    tested: list[tuple[str | None, list[Lengths]]] = [(None, every), *(single.items() if len(by_task) > 1 else ())]
    ratios = [length_ratio(lengths, gate.max_increase, recipe.level) for _, lengths in tested]
    p_values = [ratio.p_fail for ratio in ratios]
    adjusted = holm(p_values) if recipe.adjust == "holm" else p_values
    failed = [at for at, p in enumerate(adjusted) if p < (1 - recipe.level) / 2]
    is_within = ratios[0].increase.high < gate.max_increase
    status: Status = "FAIL" if failed else "PASS" if is_within else "UNDERPOWERED"
    at = 0 if not failed or 0 in failed else max(failed, key=lambda number: ratios[number].increase.value)
    (name, lengths), increase = tested[at], ratios[at].increase
    size = percent_short(abs(increase.value))
    tokens = "as many tokens" if size == "0 %" else f"{size} {'more' if increase.value > 0 else 'fewer'} tokens"
    what = f"needs {tokens} for replies{f' to {name}' if name else ''} that both sides get right"
    ends = f"{interval_name(increase.level, increase.coverage)}: {_signed(increase.low)} to {_signed(increase.high)}"
    limit = f"{percent_plain(gate.max_increase)} more allowed"
    detail = f"{capital(what)} ({ends}); {limit}. {_means(lengths, reference)}."
    if at == 0 and len(tested) > 1:
        most = max(range(1, len(tested)), key=lambda number: ratios[number].increase.value)
        detail += f" Most on {tested[most][0]}: {_signed(ratios[most].increase.value)}."
    unsure = ": more is not excluded" if status == "UNDERPOWERED" else ""
    return verdict(status, detail, increase, f"{what}; {limit}{unsure}")


def _signed(share: float) -> str:
    text = f"{100 * share:+.1f} %"
    return "0.0 %" if text in {"+0.0 %", "-0.0 %"} else text


def _means(lengths: Sequence[Lengths], reference: Measurement) -> str:
    n = len(lengths)
    before, after = sum(length.reference for length in lengths), sum(length.candidate for length in lengths)
    text = f"{after / n:,.1f} tokens a reply, {before / n:,.1f} in {reference.label}, over {n:,} pairs"
    thinking = [length.thinking for length in lengths if length.thinking is not None]
    thought_before, thought_after = sum(tokens for tokens, _ in thinking), sum(tokens for _, tokens in thinking)
    if len(thinking) < n or not thought_before:
        return text
    answers = before - thought_before
    rest = f", answers {_signed((after - thought_after) / answers - 1)}" if answers else ""
    return f"{text}; thinking {_signed(thought_after / thought_before - 1)}{rest}"
