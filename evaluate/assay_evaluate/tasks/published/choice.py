"""Which texts a run asks RULER about: decided once, before the first server is started, and kept in the journal.

A run that is resumed, on this machine or another, goes on with the texts that it began with, or stops.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from assay.callbacks import Say
from assay.errors import MeasureError
from assay.recipes.suite import RulerTask, SuiteRecipe
from assay_evaluate.client.journal import Journal
from assay_evaluate.tasks.published.pins import PINS, SOURCES, TITLES, SourceName
from assay_evaluate.tasks.published.store import get, place_of, remedy, source_sha256
from assay_evaluate.tasks.ruler import Sources, read_hotpotqa, read_squad, read_text_folder
from assay_evaluate.tasks.ruler.grid import GRID_TASK
from assay_evaluate.tasks.ruler.tasks import NEEDLE_TASKS

PUBLISHED_AT = "published"
"""In `TaskResult.sources`."""
GENERATED = "generated"


class Choice(NamedTuple):
    """is_published: its files are used. why_not: of `auto`, why they could not be had when the run began."""

    is_published: bool
    why_not: str | None = None


def needed_sources(task: RulerTask) -> tuple[SourceName, ...]:
    """Those that a task's texts are of; generated, published or files of one's own."""
    has_essays = {name for name, spec in NEEDLE_TASKS.items() if spec.haystack == "essay"}
    needed = {
        "essays": any(name in has_essays or (name == GRID_TASK and "en" in task.languages) for name in task.tasks),
        "squad": "qa_1" in task.tasks,
        "hotpotqa": "qa_2" in task.tasks,
    }
    return tuple(source for source in SOURCES if needed[source])


def wanted_sources(task: RulerTask) -> tuple[SourceName, ...]:
    """Those of which a task wants the published files."""
    if task.sources == "generated":
        return ()
    return tuple(source for source in needed_sources(task) if getattr(task, source) is None)


def settle_sources(suite: SuiteRecipe, journal: Journal, on_progress: Say) -> None:
    """Decide, and download, for all tasks of a suite, while no server waits. MeasureError as for `choose`."""
    for task in suite.tasks:
        if isinstance(task, RulerTask):
            for source, choice in choose(task, journal).items():
                if choice.why_not is not None:
                    on_progress(f"{task.name}: generated text instead of {TITLES[source]}: {choice.why_not}")


def choose(task: RulerTask, journal: Journal) -> Mapping[SourceName, Choice]:
    """What a task uses of each source that it wants.

    MeasureError: with `sources: published`, one cannot be had.
    """
    return {source: _choose(task, source, journal) for source in wanted_sources(task)}


def _choose(task: RulerTask, source: SourceName, journal: Journal) -> Choice:
    key = {"source": source, "sources": task.sources}
    kept = journal.find_items("ruler sources", key)
    if kept is not None:
        return Choice(*kept[0])
    why_not = get(source)
    if why_not is not None and task.sources == "published":
        raise MeasureError(
            f"task {task.name}: sources: published: {TITLES[source]}: {why_not}; {remedy(source)}, or say `sources: auto`"
        )
    choice = Choice(why_not is None, why_not)
    journal.keep_items("ruler sources", key, [list(choice)])
    return choice


def described(task: RulerTask, chosen: Mapping[SourceName, Choice]) -> tuple[dict[str, str], str | None]:
    """(source -> `published`, `generated` or a path, of all that the task needs; a sentence where published are wanted)."""
    found: dict[str, str] = {}
    for source in needed_sources(task):
        own = getattr(task, source)
        published = source in chosen and chosen[source].is_published
        found[source] = own if own is not None else PUBLISHED_AT if published else GENERATED
    if not chosen:
        return found, None
    said = [
        f"{TITLES[source]} as published" if one.is_published else f"generated text instead of {TITLES[source]}"
        for source, one in chosen.items()
    ]
    return found, f"texts: {', '.join(said)}"


def hashes(chosen: Mapping[SourceName, Choice]) -> dict[str, str]:
    """Of the published files that are used; known whether they are here or not."""
    return {f"published {source}": source_sha256(source) for source, one in chosen.items() if one.is_published}


def read_published(chosen: Mapping[SourceName, Choice]) -> Sources:
    """The texts. MeasureError: the run began with files that this machine has not and cannot get."""
    used = {source for source, one in chosen.items() if one.is_published}
    for source in sorted(used):
        if (why := get(source)) is not None:
            raise MeasureError(f"this run began with {TITLES[source]} as published and goes on with nothing else: {why}; "
                               f"{remedy(source)}")  # fmt: skip
    return Sources(
        essays=read_text_folder(place_of("essays"), _names("essays")) if "essays" in used else None,
        squad=read_squad(place_of("squad") / _names("squad")[0]) if "squad" in used else None,
        hotpotqa=read_hotpotqa(place_of("hotpotqa") / _names("hotpotqa")[0]) if "hotpotqa" in used else None,
    )


def _names(source: SourceName) -> list[str]:
    return [file.name for file in PINS[source]]
