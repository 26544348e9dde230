"""Sentences of a card: what it is and how far it may be trusted, why parts were kept, which limits concern it most."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from assay.records.plan import Plan
from assay_reports.schema import Limit, PlanNumbers, Report, RoleNumbers, Row
from assay_reports.text import size

NUM_LIMITS = 5
FIRST_LIMITS = (
    "unmeasured", "serving_faults", "gates_not_before", "not_measured", "truncation", "failures", "emulated",
    "quantized_reference", "second_rounding", "speculation_off", "not_sampled", "non_finite", "verification_stale",
    "external_server", "sample_sizes", "context_length", "languages", "no_load", "kinds_of_work", "generated_questions",
    "nothing_scored_there",
)  # fmt: skip
"""Keys of `LIMITS` in the order in which they can change what somebody who deploys this checkpoint decides; others follow."""

WHY_KEPT: dict[str, str] = {
    "mtp": "drafts tokens for speculation: what it loses, every drafted token loses",
    "router": "chooses the experts: a small error sends a token to others",
    "router_bias": "chooses the experts: a small error sends a token to others",
    "indexer": "chooses which earlier tokens attention reads: a small error makes it miss them",
    "embedding": "is looked up, not multiplied: quantized it is no faster",
    "lm_head": "its error goes into every logit",
    "norm": "vectors: nothing to save",
}
"""Role -> why recipes keep it. Of other roles single tensors are kept because no kernel takes them quantized."""


class Treated(NamedTuple):
    """A role of a plan, and why it was kept if it was."""

    role: RoleNumbers
    why: str


def what_was_kept(plan: Plan, numbers: PlanNumbers) -> tuple[Treated, ...]:
    """Roles in the plan's order of size. Why: empty for what was quantized."""
    quantized = {tensor.role for tensor in plan.tensors if tensor.action == "quantize"}
    return tuple(Treated(role, _why(role, quantized)) for role in numbers.roles)


def _why(role: RoleNumbers, quantized: set[str]) -> str:
    if role.what.startswith("quantized") or role.what.startswith("scales"):
        return ""
    if role.what == "dropped":
        return "the recipe leaves it out"
    if role.role in quantized:
        return "vectors, or weights that vLLM cannot hold quantized"
    return WHY_KEPT.get(role.role, "the recipe keeps it")


# ------------------------------------------------------------------------------------------------ first sentence
def plain_sentence(
    plan: Plan, base_model: str | None, row: Row | None, report: Report | None, instead: str | None, emulated: bool
) -> str:
    """What this is and how far it may be trusted, in one sentence without a number that needs a definition."""
    what = (
        f"{base_model or plan.model} quantized to {plan.precision} ({size(plan.bytes_in)} before, {size(plan.bytes_out)} after)"
    )
    return f"{what}: {_trust(row, report, instead, emulated)}."


def _trust(row: Row | None, report: Report | None, instead: str | None, emulated: bool) -> str:
    if row is None or report is None:
        return "nobody has measured yet what it lost, so use it to try things out and for nothing else"
    if row.kind == "reference":
        return "the reference of its run, which the others were compared with; what it lost itself was not judged"
    otherwise = f"; instead use {instead}" if instead else ""
    if row.status == "PASS":
        limits = "limits that were written down before" if report.gates_chosen == "before the run" else "limits"
        far = "as far as emulated arithmetic shows" if emulated else "as it was served here"
        return f"it lost no more against {report.reference} than the {limits} allow, on suite {report.suite} and {far}"
    if row.status == "FAIL":
        return f"it lost more against {report.reference} than the limits allow{otherwise}"
    if row.status == "UNDERPOWERED":
        return f"whether it lost more against {report.reference} than the limits allow is undecided{otherwise}"
    return f"it was measured, and what decides was not, so it has no verdict against {report.reference}{otherwise}"


def what_instead(report: Report, row: Row) -> str | None:
    """What to use where this checkpoint did not pass: the smallest that did, and the reference. None: it passed."""
    if row.kind != "candidate" or row.status == "PASS":
        return None
    passed = [
        one for one in report.rows if one.kind == "candidate" and one.status == "PASS" and one.checkpoint_bytes is not None
    ]
    smallest = min(passed, key=lambda one: one.checkpoint_bytes or 0, default=None)
    if smallest is None:
        return f"{report.reference}, the reference; no candidate of this run passed"
    return (
        f"{smallest.label} ({size(smallest.checkpoint_bytes)}), the smallest that passed, or {report.reference}, the reference"
    )


# ------------------------------------------------------------------------------------------------ limits
def first_limits(limits: Sequence[Limit]) -> tuple[Limit, ...]:
    """Those that matter most to who deploys it, at most `NUM_LIMITS`; the run's report has all."""
    place = {key: number for number, key in enumerate(FIRST_LIMITS)}
    return tuple(sorted(limits, key=lambda limit: place.get(limit.key, len(place)))[:NUM_LIMITS])


def sampling_of(report: Report) -> tuple[str, ...]:
    """`temperature 1, top_p 0.95: gsm8k, aime`: how the suite asked, tasks of one kind together."""
    found: dict[str, list[str]] = {}
    for task in report.suite_recipe.get("tasks", ()):
        temperature = task.get("temperature", 0.0)
        how = f"temperature {temperature:g}, top_p {task.get('top_p', 1.0):g}" if temperature else "greedy (temperature 0)"
        if temperature and task.get("top_k", -1) != -1:
            how += f", top_k {task['top_k']}"
        found.setdefault(how, []).append(task["name"])
    return tuple(f"{how}: {', '.join(names)}" for how, names in found.items())
