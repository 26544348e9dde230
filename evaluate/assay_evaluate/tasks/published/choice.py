"""Which texts a run asks RULER about: decided once, before the first server is started, and kept in the journal.

A run that is resumed, on this machine or another, goes on with the texts that it began with, or stops.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from assay.callbacks import Say
from assay.errors import MeasureError
from assay.recipes.suite import RulerTask, SuiteRecipe
from assay_evaluate.client.journal import Journal
from assay_evaluate.tasks.published.pins import PINS, SOURCES, TITLES, SourceName
from assay_evaluate.tasks.published.store import folder_of, get, remedy, source_sha256
from assay_evaluate.tasks.ruler.haystacks import read_text_folder
from assay_evaluate.tasks.ruler.qa import read_hotpotqa, read_squad
from assay_evaluate.tasks.ruler.tasks import GRID_TASK, NEEDLE_TASKS, Sources


class Choice(NamedTuple):
    """is_published: its files are used. reason: of `auto`, why they could not be had when the run began."""

    is_published: bool
    reason: str | None = None


def needed_sources(task: RulerTask) -> tuple[SourceName, ...]:
    """Those that a task's texts are of; generated, published or files of one's own."""
    has_essays = {name for name, spec in NEEDLE_TASKS.items() if spec.haystack == "essay"}
    needed = {
        "essays": any(name in has_essays or (name == GRID_TASK and "en" in task.languages) for name in task.tasks),
        "squad": "qa_1" in task.tasks,
        "hotpotqa": "qa_2" in task.tasks,
    }
    return tuple(source for source in SOURCES if needed[source])


def published_sources(task: RulerTask) -> tuple[SourceName, ...]:
    """Those of which a task asks for the published files."""
    if task.sources == "generated":
        return ()
    return tuple(source for source in needed_sources(task) if getattr(task, source) is None)


def settle_sources(suite: SuiteRecipe, journal: Journal, on_progress: Say) -> None:
    """Decide, and download, for all tasks of a suite, while no server waits. MeasureError as for `choose`."""
    for task in suite.tasks:
        if isinstance(task, RulerTask):
            for source, choice in choose(task, journal).items():
                if choice.reason is not None:
                    on_progress(f"{task.name}: generated text instead of {TITLES[source]}: {choice.reason}")


def choose(task: RulerTask, journal: Journal) -> Mapping[SourceName, Choice]:
    """What a task uses of each source that it wants.

    MeasureError: with `sources: published`, one cannot be had.
    """
    choices = {}
    for source in published_sources(task):
        key = {"source": source, "sources": task.sources}
        kept = journal.find_items("ruler sources", key)
        if kept is None:
            reason = get(source)
            if reason is not None and task.sources == "published":
                raise MeasureError(
                    f"task {task.name}: sources: published: {TITLES[source]}: {reason}; "
                    f"{remedy(source)}, or say `sources: auto`"
                )
            kept = [[reason is None, reason]]
            journal.keep_items("ruler sources", key, kept)
        choices[source] = Choice(*kept[0])
    return choices


def describe(task: RulerTask, chosen: Mapping[SourceName, Choice]) -> tuple[dict[str, str], str | None]:
    """(source -> `published`, `generated` or a path, of all that the task needs; a sentence where published are wanted)."""
    sources: dict[str, str] = {}
    for source in needed_sources(task):
        is_published = source in chosen and chosen[source].is_published
        own = getattr(task, source)
        sources[source] = own if own is not None else "published" if is_published else "generated"
    texts = [
        f"{TITLES[source]} as published" if choice.is_published else f"generated text instead of {TITLES[source]}"
        for source, choice in chosen.items()
    ]
    return sources, f"texts: {', '.join(texts)}" if texts else None


def hashes(chosen: Mapping[SourceName, Choice]) -> dict[str, str]:
    """Of the published files that are used; known whether they are here or not."""
    return {f"published {source}": source_sha256(source) for source, choice in chosen.items() if choice.is_published}


def read_published(chosen: Mapping[SourceName, Choice]) -> Sources:
    """The texts. MeasureError: the run began with files that this machine has not and cannot get."""
    used = sorted(source for source, choice in chosen.items() if choice.is_published)
    for source in used:
        if (reason := get(source)) is not None:
            raise MeasureError(
                f"this run began with {TITLES[source]} as published and goes on with nothing else: {reason}; {remedy(source)}"
            )
    files: dict[SourceName, list[Path]] = {source: [folder_of(source) / file.name for file in PINS[source]] for source in used}
    return Sources(
        essays=read_text_folder(folder_of("essays"), [path.name for path in files["essays"]]) if "essays" in files else None,
        squad=read_squad(files["squad"][0]) if "squad" in files else None,
        hotpotqa=read_hotpotqa(files["hotpotqa"][0]) if "hotpotqa" in files else None,
    )
