"""Items of an evaluation, which no calibration text may hold: they are found by hashes of their words.

An item is in a text when half of its own runs of 13 words are, as `PaLM` judged by 8 and 70 % (arXiv 2204.02311, section 8) and
GPT-3 by one run of 13 (arXiv 2005.14165, appendix C): half, so that a question without its choices or its instructions is still
found; its own, so that the instructions that all items of a task have in common are no evidence. Letters and digits count,
after NFKC and without case; where a script writes no spaces, each character is a word. Of an item with many runs the 32 of
the least hashes stand for all (a bottom-k sketch), so that memory is 32 numbers per item, whatever its length.
"""

from __future__ import annotations

import re
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

from assay.records.calibration import WithheldItems

RUN_WORDS = 13
LEAST_WORDS = 8
"""An item of fewer is found only where it is a whole text or message."""
SKETCH = 32
SHARE = 0.5
COMMON_SHARE, COMMON_ITEMS = 0.1, 20
"""A run that more than this share of a task's items have belongs to the task, in tasks of at least so many items."""

Hashes = NDArray[np.uint64]

_NO_SPACES = "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff"
_WORD = re.compile(rf"[{_NO_SPACES}]|(?:(?![{_NO_SPACES}])[^\W_])+")
_FACTOR = 0x9E3779B97F4A7C15


def words_of(text: str) -> list[str]:
    """What is compared of a text."""
    return _WORD.findall(unicodedata.normalize("NFKC", text).casefold())


def hashes_of(words: Sequence[str]) -> Hashes:
    """One number for each word, the same in every process."""
    known = {word: int.from_bytes(blake2b(word.encode(errors="replace"), digest_size=8).digest()) for word in set(words)}
    return np.fromiter((known[word] for word in words), np.uint64, len(words))


def runs_of(words_W: Hashes, length: int) -> Hashes:
    """The different runs of `length` words, sorted; none where there are fewer words."""
    count = len(words_W) - length + 1
    if count < 1:
        return np.empty(0, np.uint64)
    runs = np.zeros(count, np.uint64)
    for at in range(length):  # a polynomial in 2^64, whose products wrap
        runs = runs * np.uint64(_FACTOR) + words_W[at : at + count]
    runs ^= runs >> np.uint64(31)
    return np.unique(runs * np.uint64(_FACTOR))


@dataclass
class _Task:
    suite: str
    name: str
    num_items: int | None = None
    reason: str | None = None
    dropped: int = 0


@dataclass
class Withheld:
    """Items that texts are compared with. `add` all of them before the first text is looked at."""

    tasks: list[_Task] = field(default_factory=list)
    _sketches: dict[int, list[tuple[int, Hashes]]] = field(default_factory=lambda: defaultdict(list))
    """Words of a run -> (task, sketch) of each item."""
    _whole: dict[int, int] = field(default_factory=dict)
    """Hash of all words of an item -> its task."""
    _index: dict[int, tuple[Hashes, NDArray[np.int32], NDArray[np.int32]]] | None = None
    """Words of a run -> hashes, sorted; the item of each; size of each item's sketch."""

    def add(self, suite: str, task: str, texts: Iterable[str]) -> None:
        """All items of a task, as their prompts say them."""
        assert self._index is None, "texts were looked at already"
        number = len(self.tasks)
        items: dict[int, Hashes] = {}
        for text in texts:
            words = hashes_of(words_of(text))
            if len(words):
                items.setdefault(_hash_of_all(words), words)
        self.tasks.append(_Task(suite, task, len(items)))
        runs = {whole: runs_of(words, min(RUN_WORDS, len(words))) for whole, words in items.items()}
        common: set[int] = set()
        if len(items) >= COMMON_ITEMS:
            counts = Counter(run for of_item in runs.values() for run in of_item.tolist())
            common = {run for run, count in counts.items() if count > COMMON_SHARE * len(items)}
        for whole, words in items.items():
            self._whole.setdefault(whole, number)
            own = [run for run in runs[whole].tolist() if run not in common]
            if own and len(words) >= LEAST_WORDS:
                sketch = np.array(sorted(own)[:SKETCH], np.uint64)
                self._sketches[min(RUN_WORDS, len(words))].append((number, sketch))

    def leave_out(self, suite: str, task: str, reason: str) -> None:
        """A task whose items are not known here; the record says so."""
        self.tasks.append(_Task(suite, task, reason=reason))

    def find(self, pieces: Sequence[str]) -> str | None:
        """`suite/task` of an item that lies in one of these texts, or messages of one conversation; counted as dropped."""
        if self._index is None:
            self._index = {length: _indexed(items) for length, items in self._sketches.items()}
        for piece in pieces:
            words = hashes_of(words_of(piece))
            if not len(words):
                continue
            number = self._whole.get(_hash_of_all(words))
            if number is None:
                number = self._by_runs(words)
            if number is not None:
                self.tasks[number].dropped += 1
                return f"{self.tasks[number].suite}/{self.tasks[number].name}"
        return None

    def touches(self, text: str) -> bool:
        """Whether a text has a single run of any item; nothing is counted."""
        return self._by_runs(hashes_of(words_of(text)), share=0.0) is not None

    def _by_runs(self, words: Hashes, share: float = SHARE) -> int | None:
        assert self._index is not None, "`find` comes first"
        for length, (hashes, items, sizes) in self._index.items():
            runs = runs_of(words, length)
            if not len(runs):
                continue
            first, last = np.searchsorted(hashes, runs), np.searchsorted(hashes, runs, "right")
            counts = last - first  # of several items with the same run, all are hit
            begins = np.repeat(first - np.concatenate([[0], np.cumsum(counts)[:-1]]), counts)
            hits = np.bincount(items[begins + np.arange(counts.sum())], minlength=len(sizes))
            if len(enough := np.flatnonzero(hits >= np.maximum(1, share * sizes))):
                return self._sketches[length][int(enough[0])][0]
        return None

    def record(self) -> tuple[WithheldItems, ...]:
        """What was compared with, what was not, and how many texts were dropped."""
        return tuple(
            WithheldItems(suite=task.suite, task=task.name, num_items=task.num_items, why=task.reason, dropped=task.dropped)
            for task in self.tasks
        )


def _hash_of_all(words: Hashes) -> int:
    return int.from_bytes(blake2b(words.tobytes(), digest_size=8).digest())


def _indexed(items: Sequence[tuple[int, Hashes]]) -> tuple[Hashes, NDArray[np.int32], NDArray[np.int32]]:
    hashes = np.concatenate([sketch for _, sketch in items])
    owners = np.repeat(np.arange(len(items), dtype=np.int32), [len(sketch) for _, sketch in items])
    order = np.argsort(hashes, kind="stable")
    return hashes[order], owners[order], np.array([len(sketch) for _, sketch in items], np.int32)
