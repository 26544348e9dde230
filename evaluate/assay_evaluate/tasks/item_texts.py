"""What the items of a suite say, without asking anybody: so that no text a model is calibrated on holds one of them.

Items of lm-eval and SWE-bench are read from data sets that this machine has already, or are downloaded where that is asked for.
Haystacks and RULER's items are made for the tokenizer that is asked, and not here: a run's journal has those that it asked.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from huggingface_hub import constants
from huggingface_hub.file_download import repo_folder_name

from assay.errors import AssayError
from assay.recipes.suite import ArithmeticTask, LmEvalTask, NeedleTask, RulerTask, SuiteRecipe, SweTask, TaskBase, ToolsTask
from assay.recipes.swe import NAMED_DATASETS
from assay_evaluate.client.client import NotMeasured
from assay_evaluate.tasks.generated import arithmetic_items
from assay_evaluate.tasks.lm_eval.load import configs_of, load_tasks, quiet_lm_eval
from assay_evaluate.tasks.swebench.dataset import load_instances
from assay_evaluate.tasks.tools.questions import tool_question

_LOCAL = frozenset({"json", "csv", "parquet", "text", "arrow", "pandas", "webdataset"})


class ItemTexts(NamedTuple):
    """texts: of each item of a task; None: they are not known, and `reason` says why."""

    task: str
    texts: list[str] | None
    reason: str | None = None


def item_texts(suite: SuiteRecipe, *, may_download: bool) -> Iterator[ItemTexts]:
    """For every task of the suite what its items say."""
    for task in suite.tasks:
        try:
            yield ItemTexts(task.name, list(_texts(task, suite.seed, may_download)))
        except (AssayError, NotMeasured) as problem:
            yield ItemTexts(task.name, None, str(problem))


def _texts(task: TaskBase, seed: str, may_download: bool) -> Iterator[str]:
    match task:
        case ArithmeticTask():
            yield from (item.prompt for item in arithmetic_items(task, seed))
        case ToolsTask():
            for num_tools in task.num_tools:
                for length in task.prompt_tokens:
                    for language in task.languages:
                        for index in range(task.num_made):
                            share = task.share_without_tool
                            yield tool_question(seed, index, num_tools, length or None, share, language).question
        case LmEvalTask():
            yield from _of_lm_eval(task, may_download)
        case SweTask():
            dataset = NAMED_DATASETS.get(task.dataset, task.dataset)
            if not (may_download or task.local_paths or Path(dataset).exists() or is_cached(dataset)):
                raise NotMeasured(f"{dataset} is not on this machine")
            yield from (str(row.get("problem_statement", "")) for row in load_instances(task))
        case NeedleTask() | RulerTask():
            raise NotMeasured("made for the tokenizer that is asked; a run knows those that it asked")
        case _:
            raise TypeError(f"{type(task).__name__}: no kind of task that a suite has")


def _of_lm_eval(task: LmEvalTask, may_download: bool) -> Iterator[str]:
    if not may_download:
        if not _has_data_sets() and task.include_path is None:
            raise NotMeasured("its data set is not on this machine")
        paths = {str(config.get("dataset_path")) for config in configs_of(task).values()} - _LOCAL
        if missing := sorted(path for path in paths if not Path(path).exists() and not is_cached(path)):
            raise NotMeasured(f"{missing[0]} is not on this machine")
    with quiet_lm_eval():
        for lm_task in load_tasks(task)["tasks"].values():
            for document in lm_task.eval_docs:
                text = lm_task.doc_to_text(document)
                yield text if isinstance(text, str) else str(document)


def _has_data_sets() -> bool:
    """Whether anything of any data set is here: asking lm-eval which one it needs takes seconds."""
    from datasets import config  # type: ignore[import-untyped]

    caches = (Path(constants.HF_HUB_CACHE).glob("datasets--*"), Path(config.HF_DATASETS_CACHE).glob("*"))
    return any(any(True for _ in folders) for folders in caches)


def is_cached(name: str) -> Path | None:
    """Where `huggingface_hub` has files of a data set, or `datasets` a prepared copy. Not whether it is all of it."""
    from datasets import config

    snapshots = Path(constants.HF_HUB_CACHE) / repo_folder_name(repo_id=name, repo_type="dataset") / "snapshots"
    prepared = Path(config.HF_DATASETS_CACHE) / name.replace("/", "___")
    return next((folder for folder in (snapshots, prepared) if folder.is_dir() and any(folder.iterdir())), None)
