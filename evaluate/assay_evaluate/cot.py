"""Chain-of-thought tasks, through lm-eval: our generated arithmetic, and any task lm-eval knows by name.

Both go through `JournaledLM`. lm-eval builds prompts, filters replies and scores; which replies were cut off or never came is
known only to us, and kept beside its scores. lm-eval is imported inside functions: that takes seconds.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import httpx

from assay.recipes import ArithmeticTask, LmEvalTask
from assay.records import ItemResult, TaskResult
from assay_evaluate.client import NotMeasured
from assay_evaluate.items import Item, arithmetic_item, extract_answer, score
from assay_evaluate.journal import Reply
from assay_evaluate.session import Session, task_result

if TYPE_CHECKING:
    from assay_evaluate.lm_eval_model import JournaledLM, Question


def run_arithmetic(session: Session, task: ArithmeticTask, items: Sequence[Item]) -> TaskResult:
    """Our generated word problems as an lm-eval task, scored by our own `score`."""
    with _quiet_lm_eval():
        from lm_eval.evaluator import evaluate

        lm_task = _task_of_items(task.name, items)
        model = _model(session, task.name, task.max_tokens, task.temperature, {i: item.id for i, item in enumerate(items)})
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
    return task_result(task.name, "arithmetic", results, task.max_tokens)


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
    """Any task (or group, or tag) of lm-eval by name. What cannot be loaded is not measured, with the reason as note."""
    with _quiet_lm_eval():
        try:
            loaded = _load(task)
        except (OSError, ValueError, LookupError, RuntimeError, ImportError, httpx.HTTPError) as error:
            why = " ".join(str(error).split())[:300]
            note = f"{', '.join(task.tasks)}: cannot be loaded: {type(error).__name__}: {why}"
            return task_result(task.name, "lm_eval", [], task.max_tokens, note)
        for name, lm_task in loaded["tasks"].items():
            if lm_task.OUTPUT_TYPE != "generate_until":
                note = f"{name} is scored by {lm_task.OUTPUT_TYPE}; only tasks that generate a reply are measured"
                return task_result(task.name, "lm_eval", [], task.max_tokens, note)
        from lm_eval.evaluator import evaluate

        model = _model(session, task.name, task.max_tokens, task.temperature, None)
        try:
            samples = evaluate(
                model,
                loaded,
                limit=task.limit,
                apply_chat_template=True,
                fewshot_as_multiturn=True,
                log_samples=True,
                bootstrap_iters=0,
            )["samples"]
            scored = [_score_named(session, task, name, loaded, rows, model) for name, rows in samples.items()]
        except NotMeasured as error:
            return task_result(task.name, "lm_eval", [], task.max_tokens, str(error))
    results = [result for items, _ in scored for result in items]
    return task_result(task.name, "lm_eval", results, task.max_tokens, "; ".join(how for _, how in scored))


def _load(task: LmEvalTask) -> Any:
    """lm-eval's task dictionary, with the fewshot settings its command line would make."""
    loaded = _task_manager(task.include_path).load(list(task.tasks))
    for lm_task in loaded["tasks"].values():
        default = lm_task.get_config("num_fewshot")
        if task.num_fewshot is not None and default != 0:  # lm-eval: a task that says 0 means it
            lm_task.set_config(key="num_fewshot", value=task.num_fewshot)
        elif default is None:
            lm_task.set_config(key="num_fewshot", value=0)
        lm_task.set_fewshot_seed(seed=1234)  # lm-eval's own default
    return loaded


@functools.cache
def _task_manager(include_path: str | None) -> Any:
    """Indexing lm-eval's thousands of YAML files takes seconds: once per process and path."""
    from lm_eval.tasks import TaskManager

    return TaskManager(include_path=include_path)


def _score_named(
    session: Session, task: LmEvalTask, name: str, loaded: Any, rows: Sequence[dict[str, Any]], model: JournaledLM
) -> tuple[list[ItemResult], str]:
    """(results, how it was scored): the task's first metric, after `flexible-extract` if it has that, else its first filter."""
    filters = list(dict.fromkeys(row["filter"] for row in rows))
    chosen = "flexible-extract" if "flexible-extract" in filters else filters[0]
    config = loaded["tasks"][name].config
    metric = config.metric_list[0]["metric"] if config.metric_list else rows[0]["metrics"][0]
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
                language=str(row["doc"].get("language", "und")),
                prompt=model.prompts[doc],
                expected=str(row["target"]),
                correct=bool(value),
                answer=str(row["filtered_resps"][0])[:200],
                max_tokens=task.max_tokens,
            )
        )
    return results, f"{name} scored by {metric} after {chosen}"


def _model(session: Session, task: str, max_tokens: int, temperature: float, item_ids: dict[int, str] | None) -> JournaledLM:
    """lm-eval's model for one task. item_ids: names of its documents; default: lm-eval's task name and number."""
    from assay_evaluate.lm_eval_model import JournaledLM

    def ask(questions: Sequence[Question]) -> list[Reply]:
        requests = [
            session.request(
                task,
                f"{q.task}/{q.doc_id}" if item_ids is None else item_ids[q.doc_id],
                q.messages,
                max_tokens=max_tokens,
                temperature=temperature,
                repeat=q.repeat,
            )
            for q in questions
        ]
        return session.ask(requests)

    return JournaledLM(ask)


@contextmanager
def _quiet_lm_eval() -> Iterator[None]:
    """lm-eval and datasets log advice for a command line and draw bars of their own; errors still show."""
    import datasets
    import lm_eval.api.task as task_module

    logger, bars = logging.getLogger("lm_eval"), task_module.tqdm
    level = logger.level
    logger.setLevel(logging.ERROR)
    datasets.disable_progress_bars()
    task_module.tqdm = functools.partial(bars, disable=True)
    try:
        yield
    finally:
        logger.setLevel(level)
        datasets.enable_progress_bars()
        task_module.tqdm = bars
