"""Data sets that a suite's tasks are made of: are they there, may they be read, are they here already?

Asks the hub, or who has RULER's texts, about each one, in parallel and for seconds; nothing is downloaded. A task without its
data is NOT MEASURED hours later, when a reference has been loaded for it.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from huggingface_hub import HfApi, constants, get_token
from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, RepositoryNotFoundError

from assay.foreign_text import shown
from assay.hub_errors import HUB_ERRORS, hub_address
from assay.hub_session import guard_hub
from assay.recipes.suite import LmEvalTask, RulerTask, SuiteRecipe, SweTask
from assay.recipes.swe import NAMED_DATASETS
from assay.records.preflight.replay import Outcome
from assay.records.preflight.report import Check
from assay_evaluate.tasks.item_texts import is_cached
from assay_evaluate.tasks.lm_eval.load import configs_of
from assay_evaluate.tasks.published import store
from assay_evaluate.tasks.published.choice import published_sources
from assay_evaluate.tasks.published.pins import TITLES, SourceName

TIMEOUT_S = 10
_LOCAL = frozenset({"json", "csv", "parquet", "text", "arrow", "pandas", "webdataset"})
"""Builders of `datasets` that read files: they are in the suite's hash, and were read for it."""


def check_data_sets(suite: SuiteRecipe) -> list[Check]:
    """One check for each data set that a task needs, in the order of the tasks, RULER's published texts after those of the hub;
    none, if no task needs one."""
    guard_hub()
    data_sets = needed_data_sets(suite)
    texts: dict[SourceName, list[RulerTask]] = {}
    for task in suite.tasks:
        if isinstance(task, RulerTask):
            for source in published_sources(task):
                texts.setdefault(source, []).append(task)
    with ThreadPoolExecutor(max_workers=max(1, len(data_sets) + len(texts))) as pool:
        checks = pool.map(_look, data_sets, data_sets.values())
        return [*checks, *pool.map(_look_at_text, texts, texts.values())]


def needed_data_sets(suite: SuiteRecipe) -> dict[str, list[str]]:
    """Hub id -> the suite's tasks that are made of it. Generated tasks need none, RULER none of the hub."""
    data_sets: dict[str, list[str]] = {}
    for task in suite.tasks:
        names: list[str] = []
        if isinstance(task, LmEvalTask):
            paths = [config.get("dataset_path") for config in configs_of(task).values()]
            names = [path for path in paths if isinstance(path, str) and path not in _LOCAL and not Path(path).exists()]
        elif isinstance(task, SweTask) and not task.local_paths and not Path(task.dataset).exists():
            names = [NAMED_DATASETS.get(task.dataset, task.dataset)]
        for name in dict.fromkeys(names):
            data_sets.setdefault(name, []).append(task.name)
    return data_sets


# ------------------------------------------------------------------------------------------------ one data set
def _look(name: str, tasks: list[str]) -> Check:
    needed = f"needed by {', '.join(tasks)}"
    cached = is_cached(name)
    if constants.HF_HUB_OFFLINE:
        return _offline(name, needed, "HF_HUB_OFFLINE is set", cached)
    try:
        api = HfApi()
        if not api.dataset_info(name, timeout=TIMEOUT_S).gated:
            return _data_set(name, f"{needed}; public", "PASS")
        api.auth_check(name, repo_type="dataset")
        return _data_set(name, f"{needed}; gated, and open to the token that is set", "PASS")
    except GatedRepoError:
        reason = "no token is set" if get_token() is None else "the token that is set has not been let in"
        remedy = f"accept its terms at {hub_address()}/datasets/{name}, then hf auth login (or set HF_TOKEN)"
        return _data_set(name, f"{needed}, which could not be asked: gated, and {reason}", "FAIL", remedy)
    except RepositoryNotFoundError:
        detail = f"{needed}, which could not be asked: no such data set on {hub_address()}"
        remedy = "if it is private, hf auth login (or set HF_TOKEN); else name another in the suite"
        return _data_set(name, detail, "FAIL", remedy)
    except HfHubHTTPError as error:
        return _offline(name, needed, f"{hub_address()} answered HTTP {error.response.status_code}", cached)
    except HUB_ERRORS as error:
        return _offline(name, needed, f"{hub_address()} does not answer: {shown(error, 100)}", cached)


def _offline(name: str, needed: str, reason: str, cached: Path | None) -> Check:
    if cached is not None:
        return _data_set(name, f"{needed}; {reason}, and something of it is in {cached}", "PASS")
    return _data_set(name, f"{needed}; {reason}, and it is not in the cache", "UNKNOWN", "look again with the hub in reach")


def _data_set(name: str, detail: str, outcome: Outcome, remedy: str | None = None) -> Check:
    return Check(check="data sets", subject=name, outcome=outcome, detail=detail, remedy=remedy)


# ------------------------------------------------------------------------------------------------ RULER's texts
def _look_at_text(source: SourceName, tasks: list[RulerTask]) -> Check:
    """FAIL only for a task that does not do without the published text."""
    needed = f"needed by {', '.join(task.name for task in tasks)}"
    is_available, place = store.look(source)
    if is_available:
        return _data_set(TITLES[source], f"{needed}; {place}", "PASS")
    if any(task.sources == "published" for task in tasks):
        return _data_set(TITLES[source], f"{needed}; {place}", "FAIL", f"{store.remedy(source)}, or say `sources: auto`")
    detail = f"{needed}; {place}: generated text is asked instead, and scores do not stand beside published ones"
    return _data_set(TITLES[source], detail, "PASS", store.remedy(source))
