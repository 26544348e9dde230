"""Chain-of-thought tasks, through lm-eval: our generated arithmetic, and any task lm-eval knows by name.

Both go through `JournaledLM`. lm-eval builds prompts, filters replies and scores; which replies were cut off or never came is
known only to us, and kept beside its scores. lm-eval is imported inside functions: that takes seconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from assay.recipes import ArithmeticTask, LmEvalTask
from assay.records import ItemResult, TaskResult
from assay_evaluate.client import NotMeasured
from assay_evaluate.items import Item, arithmetic_item, extract_answer, score
from assay_evaluate.journal import Reply
from assay_evaluate.lm_eval_tasks import code_execution, load_tasks, quiet_lm_eval
from assay_evaluate.session import Session, task_result

if TYPE_CHECKING:
    from assay_evaluate.lm_eval_model import JournaledLM, Question


def run_arithmetic(session: Session, task: ArithmeticTask, items: Sequence[Item]) -> TaskResult:
    """Our generated word problems as an lm-eval task, scored by our own `score`."""
    with quiet_lm_eval():
        from lm_eval.evaluator import evaluate

        lm_task = _task_of_items(task.name, items)
        model = _model(session, task, {i: item.id for i, item in enumerate(items)})
        samples = evaluate(
            model, {"tasks": {task.name: lm_task}}, apply_chat_template=True, log_samples=True, bootstrap_iters=0
        )["samples"][task.name]
    results = []
    for sample in samples:
        doc = sample["doc"]
        reply = model.replies[task.name, sample["doc_id"]][0]
        results.append(
            session.result(
                reply,
                item=doc["id"],
                language=doc["language"],
                prompt=doc["prompt"],
                expected=doc["answer"] or "",
                correct=bool(sample["correct"]),
                answer=extract_answer(reply.text),
                max_tokens=task.max_tokens,
            )
        )
    return task_result(task.name, "arithmetic", results, task.max_tokens, None, session.thinking_budget_tokens(task))


def arithmetic_items(task: ArithmeticTask, seed: str) -> list[Item]:
    """The task's questions: `num_items` per language, with the numbers of steps taken in turn."""
    return [
        arithmetic_item(seed, i, language, task.num_steps[i % len(task.num_steps)])
        for language in task.languages
        for i in range(task.num_items)
    ]


def _task_of_items(name: str, items: Sequence[Item]) -> Any:
    """An lm-eval ConfigurableTask over items in memory: prompt in, `score` out."""
    from datasets import Dataset  # type: ignore[import-untyped]
    from lm_eval.api.task import ConfigurableTask

    rows = [{"id": i.id, "language": i.language, "prompt": i.prompt, "answer": i.answer} for i in items]
    by_id = {item.id: item for item in items}
    task = ConfigurableTask(
        config={
            "task": name,
            "output_type": "generate_until",
            "custom_dataset": lambda **_: {"test": Dataset.from_list(rows)},
            "test_split": "test",
            "doc_to_text": lambda doc: doc["prompt"],
            "doc_to_target": lambda doc: doc["answer"],
            "process_results": lambda doc, replies: {"correct": float(bool(score(by_id[doc["id"]], replies[0])))},
            "metric_list": [{"metric": "correct", "aggregation": "mean", "higher_is_better": True}],
            "num_fewshot": 0,
        }
    )
    task.set_fewshot_seed(seed=0)
    return task


def run_lm_eval(session: Session, task: LmEvalTask) -> TaskResult:
    """Any task (or group, or tag) of lm-eval by name. What cannot be loaded or scored is not measured: the note says why."""
    budget = session.thinking_budget_tokens(task)
    with quiet_lm_eval():
        try:
            loaded = load_tasks(task)
            results, how = _ask_and_score(session, task, loaded)
        except NotMeasured as error:
            return task_result(task.name, "lm_eval", [], task.max_tokens, str(error), budget)
    return task_result(task.name, "lm_eval", results, task.max_tokens, how, budget)


def _ask_and_score(session: Session, task: LmEvalTask, loaded: Any) -> tuple[list[ItemResult], str]:
    """Results of all documents, and how they were scored."""
    from lm_eval.evaluator import evaluate

    model = _model(session, task, None)
    with code_execution(task.allow_code_execution):
        samples = evaluate(
            model,
            loaded,
            limit=task.limit,
            apply_chat_template=True,
            fewshot_as_multiturn=True,
            log_samples=True,
            bootstrap_iters=0,
            confirm_run_unsafe_code=task.allow_code_execution,
        )["samples"]
    scored = [_score_named(session, task, name, loaded, rows, model) for name, rows in samples.items()]
    how = [how for _, how in scored]
    if model.num_cut_at_stops:
        how.append(f"{model.num_cut_at_stops} finished replies were cut at the task's stop strings")
    return [result for items, _ in scored for result in items], "; ".join(how)


def _score_named(
    session: Session, task: LmEvalTask, name: str, loaded: Any, rows: Sequence[dict[str, Any]], model: JournaledLM
) -> tuple[list[ItemResult], str]:
    """(results, how it was scored). NotMeasured if the task has no such metric or filter, or the metric is a grade."""
    chosen, metric = _filter_and_metric(task, name, loaded, rows)
    language = _language(loaded["tasks"][name].config.dataset_name)
    results = []
    for row in rows:
        if row["filter"] != chosen:
            continue
        value = row.get(metric)
        if value not in (0, 1):  # True and False are among them
            raise NotMeasured(f"{name}: metric {metric} gives {value!r}; only right-or-wrong metrics are measured")
        doc = name, row["doc_id"]
        results.append(
            session.result(
                model.replies[doc][0],
                item=f"{name}/{row['doc_id']}",
                language=str(row["doc"].get("language") or language),
                prompt=model.prompts[doc],
                expected=str(row["target"]),
                correct=bool(value),
                answer=str(row["filtered_resps"][0])[:200],
                max_tokens=task.max_tokens,
            )
        )
    return results, f"{name} scored by {metric} after {chosen}"


def _language(dataset_name: str | None) -> str:
    """Multilingual data sets name their parts by language (`zh`, `pt`); `und` where that is not so."""
    name = dataset_name or ""
    return name if len(name) == 2 and name.isalpha() and name.islower() else "und"


def _filter_and_metric(task: LmEvalTask, name: str, loaded: Any, rows: Sequence[dict[str, Any]]) -> tuple[str, str]:
    """What the suite asks for; else `flexible-extract` if the task has that, or its first filter, and its first metric."""
    filters = list(dict.fromkeys(row["filter"] for row in rows))
    metrics = list(dict.fromkeys(metric for row in rows for metric in row["metrics"]))
    for what, wanted, known in (("filter", task.filter, filters), ("metric", task.metric, metrics)):
        if wanted is not None and wanted not in known:
            raise NotMeasured(f"{name} has no {what} {wanted!r}; it has {', '.join(known)}")
    config = loaded["tasks"][name].config
    listed = [one["metric"] for one in config.metric_list or () if one["metric"] in metrics]  # the others are functions
    chosen = "flexible-extract" if "flexible-extract" in filters else filters[0]
    return task.filter or chosen, task.metric or [*listed, *metrics][0]


def _model(session: Session, task: ArithmeticTask | LmEvalTask, item_ids: dict[int, str] | None) -> JournaledLM:
    """lm-eval's model for one task. item_ids: names of its documents; default: lm-eval's task name and number."""
    from assay_evaluate.lm_eval_model import JournaledLM

    def ask(questions: Sequence[Question]) -> list[Reply]:
        requests = [
            session.request(
                task.name,
                f"{q.task}/{q.doc_id}" if item_ids is None else item_ids[q.doc_id],
                q.messages,
                max_tokens=task.max_tokens,
                temperature=task.temperature,
                repeat=q.repeat,
                more=session.parameters(task),
            )
            for q in questions
        ]
        return session.ask(requests)

    cuts = isinstance(task, LmEvalTask) and (
        task.stop_strings == "always" or (task.stop_strings == "auto" and not session.dialect.is_chat)
    )
    return JournaledLM(ask, cuts_at_stops=cuts)
