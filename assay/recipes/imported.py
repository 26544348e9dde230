"""What stands in a suite's place where another harness asked and scored: which tasks, by what metric, with which settings."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

from assay.recipes.base import Recipe, Section


class ImportedTask(Section):
    """One task, as the reference's results say it was asked."""

    name: str
    kind: Literal["imported"] = "imported"
    harness: str
    """`lm-eval`, `inspect`, `nemo-evaluator`, `swe-bench`, `table`."""
    metric: str
    settings: dict[str, Any]
    """What decides the questions and the sampling, by the harness's own names. Empty: its files do not say."""
    knows_cuts: bool
    """Whether its results tell which replies were cut off."""


class ImportedSuite(Recipe):
    """The tasks of the reference's results; no suite that could be asked."""

    kind: Literal["imported"] = "imported"
    tasks: tuple[ImportedTask, ...]

    def _contradictions(self) -> Iterator[str]:
        names = [task.name for task in self.tasks]
        for twice in sorted({name for name in names if names.count(name) > 1}):
            yield f"two tasks are called {twice}; names are keys of the results"
