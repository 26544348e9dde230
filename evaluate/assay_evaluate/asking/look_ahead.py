"""Keeps the servers busy between tasks: while one task waits for its last replies, the next ones put their requests in line.

A task to come is begun for that, in the same thread, and left at its first question, whose requests are on their way then. When
its turn comes it starts from the beginning and finds them answered or under way. Doing the preparation twice costs CPU time
while the servers work; threads per task would not do, since some of lm-eval's scorers set alarms, which only the main thread
may, and take the error for a wrong answer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

T = TypeVar("T")


class InLine(Exception):
    """Raised at the first question of a task that was begun early: its requests are in line."""


class LookAhead:
    """Runs tasks in order and begins those to come when asked to."""

    def __init__(self) -> None:
        self.is_looking = False
        """A task is being begun early: its first question must raise `InLine` instead of waiting for replies."""
        self._tasks: Sequence[Callable[[], object]] = ()
        self._next = 0

    def run(self, tasks: Sequence[Callable[[], T]]) -> list[T]:
        """What each task returns, in order."""
        self._tasks, results = tasks, []
        for number, task in enumerate(tasks):
            self._next = max(self._next, number + 1)
            results.append(task())
        return results

    def begin_next(self) -> bool:
        """Put the first requests of the next task in line; False if none is left."""
        if self._next >= len(self._tasks):
            return False
        task = self._tasks[self._next]
        self._next += 1
        self.is_looking = True
        try:
            task()
        except InLine:
            pass
        finally:
            self.is_looking = False
        return True
