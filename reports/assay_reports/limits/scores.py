"""How sure the scores are, and what was not asked."""

import math
from collections.abc import Collection
from statistics import NormalDist

from assay.quantities import percent_short, points
from assay.records.measurement import ItemResult, TaskResult
from assay_evaluate.statistics.item_pairs import find_task, pair_items
from assay_reports.limits.entries import with_entries
from assay_reports.run import Run
from assay_reports.sentences import limits as english
from assay_reports.text import and_list

GENERATED_KINDS = ("arithmetic", "needle", "tools")


def sample_sizes(run: Run) -> str | None:
    reference = run.reference
    if reference is None:
        return None
    entries = []
    for task in reference.tasks:
        pairs = [pair_items(task, other) for m in run.candidates if (other := find_task(m, task.task)) is not None]
        effects = [(len(set(pair.items)), pair.detectable()) for pair in pairs if pair.n]
        if effects:
            num_items, effect = max(effects, key=lambda entry: entry[1])
            missed = _missed(task, reference.label, effect)
            entries.append(english.SAMPLE_SIZE.format(task=task.task, num_items=num_items, missed=missed))
    return with_entries(english.SAMPLE_SIZES, entries)


def _missed(task: TaskResult, reference: str, effect: float) -> str:
    """Which loss goes unnoticed; any, where the reference has less than that to lose."""
    score = None if task.accuracy is None else task.accuracy.value
    if score is not None and score - (task.chance or 0.0) < effect:
        return english.NO_LOSS_SEEN.format(reference=reference, score=percent_short(score))
    return english.LOSS_MISSED.format(points=points(effect))


def selection(run: Run) -> str | None:
    """What comparing several candidates does to the one that looks best. None: there is one, or none was scored."""
    labels, reference = [m.label for m in run.candidates], run.reference
    if len(labels) < 2 or reference is None or run.gates is None:
        return None
    drops = [
        v.observed
        for v in run.gates.verdicts
        if v.gate.startswith("score ") and v.candidate in labels and v.observed is not None and v.status != "NOT MEASURED"
    ]
    if not drops:
        return None
    errors = sorted((drop.high - drop.low) / 2 / NormalDist().inv_cdf(0.5 + drop.level / 2) for drop in drops)
    middle, number = errors[len(errors) // 2] / math.sqrt(2), len(labels)  # they share the reference's replies: half of it
    alpha = (1 - drops[0].level) / 2
    return english.SELECTION.format(
        number=number, points=points(best_of(number) * middle), share=percent_short(min(1.0, number * alpha))
    )


def best_of(number: int) -> float:
    """Expected maximum of so many standard normal values, by the mean of its quantiles."""
    steps = 2000
    return sum(NormalDist().inv_cdf(((step + 0.5) / steps) ** (1 / number)) for step in range(steps)) / steps


def one_seed(run: Run) -> str | None:
    scored = [task for m in run.measurements for task in m.tasks if task.accuracy is not None]
    once = list(dict.fromkeys(task.task for task in scored if task.num_samples == 1))
    if not once:
        return None
    is_all = all(task.num_samples == 1 for task in scored)
    seeds = sorted({str(seed) for m in run.measurements if (seed := m.suite_recipe.get("seed")) is not None})
    items = english.EACH_ITEM if is_all else english.EACH_ITEM_OF.format(tasks=and_list(once))
    return english.ONE_SEED.format(items=items, seeds=english.SEED.format(seeds=", ".join(seeds)) if seeds else "")


def which_items(run: Run) -> str | None:
    """None: no score was judged, or before verdicts recorded it."""
    scores = [] if run.gates is None else [v for v in run.gates.verdicts if v.estimand is not None]
    names = {v.gate: v.title or v.gate.removeprefix("score ") for v in scores}
    these = list(dict.fromkeys(names[v.gate] for v in scores if v.estimand == "these_items"))
    of_clusters = list(dict.fromkeys(names[v.gate] for v in scores if v.estimand == "these_clusters"))
    such = list(dict.fromkeys(name for name in names.values() if name not in {*these, *of_clusters}))
    if not (these or of_clusters):
        return english.SUCH_ITEMS_ONLY if such else None
    claims = [(these, english.THESE_ITEMS), (of_clusters, english.THESE_CLUSTERS), (such, english.SUCH_ITEMS)]
    parts = [english.WHICH_ITEMS_PART.format(tasks=and_list(tasks), claim=claim) for tasks, claim in claims if tasks]
    return english.WHICH_ITEMS.format(parts=english.WHICH_ITEMS_BETWEEN.join(parts))


def truncation(run: Run) -> str | None:
    return with_entries(
        english.TRUNCATION,
        (
            english.TRUNCATED.format(
                number=task.num_truncated,
                total=task.num_items,
                label=m.label,
                task=task.task,
                budget=english.NO_BUDGET if task.max_tokens is None else english.BUDGET.format(tokens=task.max_tokens),
                reasons=reasons_of_cuts(task),
            )
            for m in run.measurements
            for task in m.tasks
            if task.num_truncated
        ),
    )


def reasons_of_cuts(task: TaskResult) -> str:
    """Cuts that a greater budget would not mend, or that the server did not admit."""
    counts = {reason: number for reason, number in task.truncated_by.items() if reason in english.TRUNCATED_BY}
    return "".join(f", {counts[reason]} {words}" for reason, words in english.TRUNCATED_BY.items() if reason in counts)


def failures(run: Run) -> str | None:
    return with_entries(
        english.FAILURES,
        (
            english.FAILED.format(number=task.num_failed, total=task.num_items, label=m.label, task=task.task)
            + (english.USUAL_ERROR.format(error=task.usual_error) if task.usual_error else "")
            for m in run.measurements
            for task in m.tasks
            if task.num_failed
        ),
    )


def generated_questions(run: Run) -> str | None:
    names = sorted({task.task for m in run.measurements for task in m.tasks if task.kind in GENERATED_KINDS})
    return english.GENERATED_QUESTIONS.format(tasks=and_list(names)) if names else None


def languages(run: Run) -> str | None:
    spoken = sorted({item.language for item in _answered(run, but=("imported",))})
    return english.LANGUAGES.format(languages=", ".join(spoken)) if spoken else None


def _answered(run: Run, but: Collection[str] = ()) -> list[ItemResult]:
    """but: kinds of tasks that are left out."""
    tasks = (task for m in run.measurements for task in m.tasks if task.kind not in but)
    return [item for task in tasks for item in task.items if item.correct is not None]


def context_length(run: Run) -> str | None:
    longest = max(((item.prompt_tokens or 0) + (item.output_tokens or 0) for item in _answered(run)), default=0)
    positions = [plan.config.get("max_position_embeddings") for plan in run.plans.values()]
    allowed = max((value for value in positions if isinstance(value, int)), default=0)
    return english.CONTEXT_LENGTH.format(longest=longest, allowed=allowed) if 0 < longest < allowed else None


def kinds_of_work(run: Run) -> str | None:
    if not run.measurements:
        return None
    names = " ".join(task.task.lower() for m in run.measurements for task in m.tasks)
    is_public = any(task.kind in {"lm_eval", "imported"} for m in run.measurements for task in m.tasks)
    missing = [] if is_public else [english.PUBLIC_BENCHMARKS]
    missing += [kind for word, kind in english.OTHER_KINDS.items() if word not in names]
    return english.KINDS_OF_WORK.format(kinds=", ".join(missing)) if missing else None
