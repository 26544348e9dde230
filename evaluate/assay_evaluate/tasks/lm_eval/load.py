"""Finding and loading tasks of lm-eval by name: its own, and a user's from a folder with task files.

What a task is (how it is scored, whether it runs code) is read from lm-eval's index before the task is loaded: loading a task
that scores code already runs code.
"""

from __future__ import annotations

import functools
import logging
import os
import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

import httpx

from assay.hub_session import guard_hub
from assay.recipes.suite import LmEvalTask, SuiteRecipe
from assay.secret_text import without_secrets
from assay_evaluate.client.client import NotMeasured

CODE_EVAL = "HF_ALLOW_CODE_EVAL"
"""Environment variable without which Hugging Face's `code_eval` metric refuses to run code."""

FEWSHOT_SEED = 1234
"""lm-eval's own default."""


def load_tasks(task: LmEvalTask) -> Any:
    """lm-eval's task dictionary, with the fewshot settings its command line would make.

    NotMeasured in one line if a task is unknown, is not scored on a generated reply, runs code without leave, or cannot be
    loaded (no data set, no such file, a package missing).
    """
    guard_hub()
    manager = _manager_for(task)
    for name, config in _configs(manager, task.tasks).items():
        if config.get("output_type") not in {None, "generate_until"}:
            raise NotMeasured(f"{name} is scored by {config['output_type']}; only tasks that generate a reply are measured")
        if config.get("unsafe_code") and not task.allow_code_execution:
            raise NotMeasured(
                f"{name} runs the code that the model wrote, on this machine and without a sandbox; "
                "say `allow_code_execution: true` in the suite file if that is what you want"
            )
    try:
        with code_execution(task.allow_code_execution), seeded():
            loaded = manager.load(list(task.tasks))
    except (OSError, ValueError, LookupError, RuntimeError, ImportError, httpx.HTTPError) as error:
        reason = " ".join(str(error).split())[:300]
        raise NotMeasured(f"{', '.join(task.tasks)}: cannot be loaded: {type(error).__name__}: {reason}") from None
    for name, lm_task in loaded["tasks"].items():
        if lm_task.OUTPUT_TYPE != "generate_until":
            raise NotMeasured(f"{name} is scored by {lm_task.OUTPUT_TYPE}; only tasks that generate a reply are measured")
        if (lm_task.get_config("repeats") or 1) > 1:
            raise NotMeasured(
                f"{name} asks every question {lm_task.get_config('repeats')} times and chooses among the replies; take its "
                "single-reply variant and say `num_samples`, which tells how often each reply is right"
            )
        default = lm_task.get_config("num_fewshot")
        if task.num_fewshot is not None and default != 0:  # lm-eval: a task that says 0 means it
            lm_task.set_config(key="num_fewshot", value=task.num_fewshot)
        elif default is None:
            lm_task.set_config(key="num_fewshot", value=0)
        lm_task.set_fewshot_seed(seed=FEWSHOT_SEED)
    return loaded


def require_lm_eval(suite: SuiteRecipe) -> None:
    """ModuleNotFoundError if a task needs lm-eval and it is not installed: before the first request, not at that task."""
    if any(isinstance(task, LmEvalTask) for task in suite.tasks) and find_spec("lm_eval") is None:
        raise ModuleNotFoundError("No module named 'lm_eval'", name="lm_eval")


def configs_of(task: LmEvalTask) -> dict[str, dict[str, Any]]:
    """Name -> what the index says of it, for every task behind the names, groups and tags opened. Nothing is loaded."""
    return _configs(_manager_for(task), task.tasks)


def _manager_for(task: LmEvalTask) -> Any:
    """A folder of one's own alone is indexed at once; lm-eval's thousands of files take seconds, once per process."""
    if task.include_path is not None:
        alone = _manager(task.include_path, False)
        if all(name in alone.task_index for name in task.tasks):
            return alone
    return _manager(task.include_path, True)


@functools.cache
def _manager(include_path: str | None, include_defaults: bool) -> Any:
    from lm_eval.tasks import TaskManager

    if include_path is None or not include_defaults:
        return TaskManager(include_path=include_path, include_defaults=include_defaults)
    manager = TaskManager(include_path=include_path, include_defaults=False)
    # as lm-eval joins the indexes of several folders, the later before the earlier; its own is made once for all of them
    manager._index = {**_manager(None, True).task_index, **manager.task_index}
    return manager


def _configs(manager: Any, names: Iterable[str]) -> dict[str, dict[str, Any]]:
    """What the index says of every task behind `names`, with groups and tags opened. Unknown names are left to the loader."""
    configs: dict[str, dict[str, Any]] = {}
    for name in names:
        entry = manager.task_index.get(name)
        config = {} if entry is None or entry.cfg is None else dict(entry.cfg)
        if entry is not None and entry.kind.name == "TAG":
            configs |= _configs(manager, sorted(entry.tags))
        elif isinstance(config.get("task"), list):
            configs |= _configs(manager, [part for part in config["task"] if isinstance(part, str) and part != name])
        elif config:
            configs[name] = config
    return configs


@contextmanager
def seeded() -> Iterator[None]:
    """Python's and NumPy's own generators as lm-eval's command line seeds them, inside the block.

    gpqa shuffles its choices with them while it is loaded: unseeded, reference and candidate would get different questions.
    """
    import numpy as np

    python, numpy = random.getstate(), np.random.get_state()
    random.seed(0)
    np.random.seed(1234)
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)


@contextmanager
def code_execution(allowed: bool) -> Iterator[None]:
    """Whether Hugging Face's `code_eval` may run code inside the block; what the environment says outside is no leave."""
    before = os.environ.get(CODE_EVAL)
    os.environ[CODE_EVAL] = "1" if allowed else "0"
    try:
        yield
    finally:
        if before is None:
            del os.environ[CODE_EVAL]
        else:
            os.environ[CODE_EVAL] = before


@contextmanager
def secrets_out_of_reach(of_code: bool) -> Iterator[None]:
    """While code that a model wrote may run as children of this process, our environment has no secrets in it."""
    kept = without_secrets(os.environ)
    secrets = {name: value for name, value in os.environ.items() if of_code and name not in kept}
    for name in secrets:
        del os.environ[name]
    try:
        yield
    finally:
        os.environ.update(secrets)


@contextmanager
def quiet_lm_eval() -> Iterator[None]:
    """lm-eval and datasets log advice for a command line and draw bars of their own; errors still show."""
    import datasets  # type: ignore[import-untyped]
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


@contextmanager
def unforeseen_replies(tasks: Mapping[str, Any]) -> Iterator[dict[str, Exception]]:
    """Inside the block a task's scorer that raises gives a row without metrics, and the others are scored.

    Scorers are somebody else's code, and replies are kept: what one of them raises, it would raise on every rerun. What is
    yielded holds, by task, the first error.
    """
    errors: dict[str, Exception] = {}

    def guarded(name: str, score: Callable[..., dict[str, Any]], *arguments: Any) -> dict[str, Any]:
        try:
            return score(*arguments)
        except ImportError:  # of no reply's making
            raise
        except Exception as error:  # noqa: BLE001
            errors.setdefault(name, error)
            return {}

    before = {name: task.process_results for name, task in tasks.items()}
    for name, task in tasks.items():
        task.process_results = functools.partial(guarded, name, before[name])
    try:
        yield errors
    finally:
        for name, task in tasks.items():
            task.process_results = before[name]
