"""Any task lm-eval knows by name.

They go through `JournaledLM`. It builds prompts, filters replies and scores; which replies were cut off or never came is
known only to us, and kept beside its scores. lm-eval is imported inside functions: that takes seconds.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from assay.recipes.suite import LmEvalTask, Range
from assay.records.measurement import ItemResult, TaskResult
from assay_evaluate.asking.language import count_scripts, is_foreign
from assay_evaluate.asking.session import Session, end_of_answer, task_result
from assay_evaluate.client.client import NotMeasured
from assay_evaluate.client.journal import Request
from assay_evaluate.tasks.lm_eval.load import (
    FEWSHOT_SEED,
    code_execution,
    load_tasks,
    quiet_lm_eval,
    secrets_out_of_reach,
    seeded,
    unforeseen_replies,
)
from assay_evaluate.tasks.looks import growing_limits, in_drawn_order

if TYPE_CHECKING:
    from assay_evaluate.tasks.lm_eval.model import JournaledLM, LmEvalQuestion


def run_lm_eval(session: Session, task: LmEvalTask) -> TaskResult:
    """Any task (or group, or tag) of lm-eval by name. What cannot be loaded or scored is not measured: the note says why."""
    budget = session.thinking_budget_tokens(task)
    with quiet_lm_eval():
        try:
            loaded = load_tasks(task)
            results, note = _ask_and_score(session, task, loaded)
        except NotMeasured as error:
            results, note = [], str(error)
        except (LookupError, ImportError) as error:  # a scorer that wants data it has not got: nltk's, say
            results, note = [], f"{', '.join(task.tasks)}: cannot be scored: {_describe(error)}"
    return task_result(task.name, "lm_eval", results, task.max_tokens, note, budget)


def _describe(error: Exception | None) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


@dataclass(frozen=True)
class _Kept:
    """What stays of a reply until lm-eval has scored its text. result: all but whether it is right, in which language."""

    result: ItemResult
    asked_in: frozenset[str]
    """Scripts of the prompt."""
    written_in: Counter[str]
    """Letters of the reply by script."""


def _ask_and_score(session: Session, task: LmEvalTask, loaded: Any) -> tuple[list[ItemResult], str]:
    """Results of all documents, and how they were scored. lm-eval scores each sample by itself, as if it were the only one:
    its tasks' own ways of choosing among samples (majority, first) would hide how often each is right."""
    results, notes, num_cut = [], dict[str, None](), 0
    for documents in _passes(task, session.seed, loaded):
        for sample in range(task.fewest_samples):
            model, scored = _score_sample(session, task, loaded, sample, documents)
            results += [result for items, _ in scored for result in items]
            notes |= dict.fromkeys(note for _, note in scored)
            num_cut += model.num_cut_at_stops
    if num_cut:
        notes[f"{num_cut} finished replies were cut at the task's stop strings"] = None
    return results, "; ".join(notes)


Documents = Mapping[str, Sequence[int]]
"""Task of lm-eval -> documents of it that are asked, ascending."""


def _passes(task: LmEvalTask, seed: str, loaded: Any) -> Iterator[Documents | None]:
    """What is asked in one pass of lm-eval: all at once (None), or of a range of items those that each look adds.

    A pass each, so that an item has the same prompt however many looks follow: examples in prompts are drawn in passing.
    Documents are drawn by the suite's seed.
    """
    if not isinstance(task.limit, Range):
        yield None
        return
    order = {name: in_drawn_order(seed, name, range(len(lm_task.eval_docs))) for name, lm_task in loaded["tasks"].items()}
    for before, limit in pairwise([0, *growing_limits(task.limit)]):
        added = {name: sorted(documents[before:limit]) for name, documents in order.items()}
        if added := {name: documents for name, documents in added.items() if documents}:
            yield added


def _score_sample(
    session: Session, task: LmEvalTask, loaded: Any, sample: int, documents: Documents | None
) -> tuple[JournaledLM[_Kept], list[tuple[list[ItemResult], str]]]:
    """One reply to every document: lm-eval's model, and of each task the results and how they were scored."""
    from lm_eval.evaluator import evaluate

    model = _model(session, task, sample, documents)
    for lm_task in loaded["tasks"].values():  # every sample of an item has the same examples
        lm_task.set_fewshot_seed(seed=FEWSHOT_SEED)
    chosen = {name: loaded["tasks"][name] for name in documents or ()}
    code = task.allow_code_execution
    with secrets_out_of_reach(code), code_execution(code), seeded(), unforeseen_replies(loaded["tasks"]) as errors:
        rows_of = evaluate(
            model,
            loaded if documents is None else {"tasks": chosen, "groups": {}, "group_map": {}},
            limit=task.limit if documents is None else None,
            samples=None if documents is None else {name: list(numbers) for name, numbers in documents.items()},
            apply_chat_template=True,
            fewshot_as_multiturn=True,
            log_samples=True,
            bootstrap_iters=0,
            confirm_run_unsafe_code=task.allow_code_execution,
        )["samples"]
    if documents is not None:  # lm-eval numbers the chosen ones anew in requests, and not in what it returns
        model.kept = {(name, documents[name][place]): kept for (name, place), kept in model.kept.items()}
    return model, [_read_scores(task, name, loaded, rows, model, errors.get(name)) for name, rows in rows_of.items()]


def _read_scores(
    task: LmEvalTask,
    name: str,
    loaded: Any,
    rows: Sequence[dict[str, Any]],
    model: JournaledLM[_Kept],
    error: Exception | None,
) -> tuple[list[ItemResult], str]:
    """(results, how it was scored). error: what the scorer raised first; the replies that it raised at are wrong.

    NotMeasured if the task has no such metric or filter, the metric is a grade, or the scorer raised at every reply.
    """
    if not any(row["metrics"] for row in rows):
        raise NotMeasured(f"{', '.join(task.tasks)}: cannot be scored: {_describe(error)}")
    chosen, metric = _filter_and_metric(task, name, loaded, rows)
    language = _language(loaded["tasks"][name].config.dataset_name)
    part = _part_of_translation(task, name) if task.translations else None
    results = []
    for row in rows:
        if row["filter"] != chosen:
            continue
        value = row.get(metric) if row["metrics"] else 0
        if value not in (0, 1):  # True and False are among them
            raise NotMeasured(f"{name}: metric {metric} gives {value!r}; only right-or-wrong metrics are measured")
        kept = model.kept[name, row["doc_id"]]
        scored: dict[str, Any] = {
            "language": str(row["doc"].get("language") or language),
            "cluster": None if part is None else f"{part}/{row['doc_id']}".lstrip("/"),
        }
        if kept.result.correct is not None:
            allowed = kept.asked_in | set(count_scripts(str(row["target"])))
            scored |= {
                "correct": bool(value),
                "answer": str(row["filtered_resps"][0])[:200],
                "expected": end_of_answer(str(row["target"])) if isinstance(row["target"], str | int | float) else None,
                "wrong_script": is_foreign(kept.written_in, allowed),
            }
        results.append(replace(kept.result, **scored))
    how = f"{name} scored by {metric} after {chosen}"
    num_unread = sum(not row["metrics"] for row in rows if row["filter"] == chosen)
    if num_unread:
        how += f"; the scorer of {name} failed on {num_unread} replies, which count as wrong ({_describe(error)})"
    return results, how


def _part_of_translation(task: LmEvalTask, name: str) -> str:
    """What a task's name says beyond its language: `economics` of mmlu_prox_lite_ar_economics, which mmlu_prox_lite_ar brought
    in; nothing of a task that is listed itself. NotMeasured if no listed name begins the task's."""
    listed = [prefix for prefix in task.tasks if name == prefix or name.startswith(f"{prefix}_")]
    if not listed:
        raise NotMeasured(
            f"{name} does not begin with any of {', '.join(task.tasks)}, so it is not known which of its questions are "
            "translations of which; leave out `translations: true`"
        )
    return name[len(max(listed, key=len)) :].lstrip("_")


def _language(dataset_name: str | None) -> str:
    """Multilingual data sets name their parts by language (`zh`, `pt`); `und` where that is not so."""
    name = dataset_name or ""
    return name if len(name) == 2 and name.isalpha() and name.islower() else "und"


def _filter_and_metric(task: LmEvalTask, name: str, loaded: Any, rows: Sequence[dict[str, Any]]) -> tuple[str, str]:
    """What the suite asks for; else `flexible-extract` if the task has that, or its first filter, and its first metric."""
    filters = list(dict.fromkeys(row["filter"] for row in rows))
    metrics = list(dict.fromkeys(metric for row in rows for metric in row["metrics"]))
    for what, requested, known in (("filter", task.filter, filters), ("metric", task.metric, metrics)):
        if requested is not None and requested not in known:
            raise NotMeasured(f"{name} has no {what} {requested!r}; it has {', '.join(known)}")
    config = loaded["tasks"][name].config
    listed = [row["metric"] for row in config.metric_list or () if row["metric"] in metrics]  # the others are functions
    chosen = "flexible-extract" if "flexible-extract" in filters else filters[0]
    return task.filter or chosen, task.metric or [*listed, *metrics][0]


def _model(session: Session, task: LmEvalTask, sample: int, documents: Documents | None) -> JournaledLM[_Kept]:
    """lm-eval's model for one reply to every document of a task."""
    from assay_evaluate.tasks.lm_eval.model import JournaledLM

    def item(question: LmEvalQuestion) -> str:
        number = question.doc_id if documents is None else documents[question.task][question.doc_id]
        return f"{question.task}/{number}"

    def request(question: LmEvalQuestion) -> Request:
        return session.question(task, item(question), question.messages, sample)

    def ask(questions: Iterable[LmEvalQuestion]) -> Iterator[tuple[str, _Kept]]:
        for question, reply in session.ask_pairs(questions, request):
            result = session.result(
                task,
                reply,
                item=item(question),
                sample=sample,
                language="und",
                prompt=question.text,
                expected="",
                correct=False,
                answer=None,
            )
            written_in = count_scripts((reply.reasoning or "") + reply.text)
            yield reply.text, _Kept(result, frozenset(count_scripts(question.text)), written_in)

    cuts = task.stop_strings == "always" or (task.stop_strings == "auto" and not session.dialect.is_chat)
    return JournaledLM(ask, cuts_at_stops=cuts)
