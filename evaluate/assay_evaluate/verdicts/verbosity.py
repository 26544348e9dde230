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
from assay.records.measurement import ItemResult, Measurement, TaskResult
from assay.records.verdict import Status, Verdict
from assay_evaluate.statistics import holm
from assay_evaluate.statistics.item_pairs import find_task


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
    return [
        Lengths(
            f"{reference.task}/{item.cluster or item.item}", ours.output_tokens, item.output_tokens, _thinking(ours, item)
        )
        for item in candidate.items
        if item.correct and (ours := before.get((item.item, item.sample))) is not None and ours.correct
        if ours.output_tokens and item.output_tokens
    ]  # fmt: skip


def _thinking(ours: ItemResult, theirs: ItemResult) -> tuple[int, int] | None:
    known = ours.thinking_tokens is not None and theirs.thinking_tokens is not None
    return (ours.thinking_tokens or 0, theirs.thinking_tokens or 0) if known else None


def length_ratio(lengths: Sequence[Lengths], max_increase: float, level: float = 0.95) -> LengthRatio:
    """ValueError below two clusters. n of the interval counts pairs of replies."""
    _, index = np.unique([length.cluster for length in lengths], return_inverse=True)
    if index.max() < 1:
        raise ValueError("an interval of lengths needs two items")
    ours, theirs = (
        np.array(side, dtype=np.float64) for side in zip(*((o.reference, o.candidate) for o in lengths), strict=True)
    )
    before, after = (np.bincount(index, weights=side / side.sum()) for side in (ours, theirs))
    weights = (before + after) / 2  # of each cluster in the ratio: a few long replies are most of it
    error = float(np.sqrt(((after - before) ** 2 / (1 - weights)).sum()))
    log_ratio, degrees = math.log(theirs.sum() / ours.sum()), float((weights**2).sum() ** 2 / (weights**4).sum())
    half = float(stats.t.ppf(0.5 + level / 2, degrees)) * error
    beyond = log_ratio - math.log1p(max_increase)
    p_fail = float(stats.t.sf(beyond / error, degrees)) if error > 0 else float(beyond <= 0)
    low, value, high = (math.expm1(log_ratio + shift) for shift in (-half, 0, half))
    return LengthRatio(Interval(value=value, low=low, high=high, n=len(lengths), level=level), p_fail)


# ------------------------------------------------------------------------------------------------ the gate
def judge_verbosity(gate: VerbosityGate, reference: Measurement, candidate: Measurement, recipe: GateRecipe) -> Verdict:
    """FAIL: surely longer by more than the limit, over all tasks or in one (Holm). PASS: over all tasks surely not."""
    by_task = {
        ours.title or ours.task: paired_lengths(ours, theirs)
        for ours in reference.tasks
        if (theirs := find_task(candidate, ours.task)) is not None
    }
    every = [length for lengths in by_task.values() for length in lengths]

    def verdict(status: Status, detail: str, observed: Interval | None = None) -> Verdict:
        counts = gate.decides == "pass_and_fail" or (gate.decides == "fail" and status == "FAIL")
        return Verdict(
            gate="verbosity", candidate=candidate.label, status=status, observed=observed, limit=gate.max_increase,
            detail=detail, has_say=counts,
        )  # fmt: skip

    if (clusters := len({one.cluster for one in every})) < max(recipe.min_items, 2):
        return verdict(
            "NOT MEASURED",
            f"Both sides are right, and tell their tokens, in {clusters} items; judged from {recipe.min_items} on.",
        )
    overall = length_ratio(every, gate.max_increase, recipe.level)
    single = {
        name: length_ratio(lengths, gate.max_increase, recipe.level)
        for name, lengths in by_task.items()
        if len(by_task) > 1 and len({length.cluster for length in lengths}) >= recipe.min_items
    }
    names, found = [None, *single], [overall, *single.values()]
    adjusted = holm([one.p_fail for one in found]) if recipe.adjust == "holm" else [one.p_fail for one in found]
    failed = [at for at, p in enumerate(adjusted) if p < (1 - recipe.level) / 2]
    status: Status = "FAIL" if failed else "PASS" if overall.increase.high < gate.max_increase else "UNDERPOWERED"
    at = 0 if not failed or 0 in failed else max(failed, key=lambda one: found[one].increase.value)
    lengths = every if (name := names[at]) is None else by_task[name]
    seen = found[at].increase
    what = f"{_change(seen)} for replies{f' to {name}' if name else ''} that both sides get right"
    limit = f"{percent_plain(gate.max_increase)} more allowed"
    detail = f"{capital(what)} ({_ends(seen)}); {limit}. {_means(lengths, reference)}."
    if at == 0 and single:
        most = max(single, key=lambda task: single[task].increase.value)
        detail += f" Most on {most}: {_signed(single[most].increase.value)}."
    unsure = ": more is not excluded" if status == "UNDERPOWERED" else ""
    return verdict(status, detail, seen).model_copy(update={"clause": f"{what}; {limit}{unsure}"})


def _change(increase: Interval) -> str:
    size = percent_short(abs(increase.value))
    return "needs as many tokens" if size == "0 %" else f"needs {size} {'more' if increase.value > 0 else 'fewer'} tokens"


def _ends(increase: Interval) -> str:
    return f"{interval_name(increase.level, increase.coverage)}: {_signed(increase.low)} to {_signed(increase.high)}"


def _signed(share: float) -> str:
    text = f"{100 * share:+.1f} %"
    return "0.0 %" if text in {"+0.0 %", "-0.0 %"} else text


def _means(lengths: Sequence[Lengths], reference: Measurement) -> str:
    n = len(lengths)
    ours, theirs = sum(length.reference for length in lengths), sum(length.candidate for length in lengths)
    text = f"{theirs / n:,.1f} tokens a reply, {ours / n:,.1f} in {reference.label}, over {n:,} pairs"
    told = [length for length in lengths if length.thinking is not None]
    before, after = (sum(one.thinking[side] for one in told if one.thinking is not None) for side in (0, 1))
    if len(told) < n or not before:
        return text
    answers = ours - before
    rest = f", answers {_signed((theirs - after) / answers - 1)}" if answers else ""
    return f"{text}; thinking {_signed(after / before - 1)}{rest}"
