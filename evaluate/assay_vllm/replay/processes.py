"""Cells side by side: processes that are copies of one which has imported vLLM, because importing it takes 10 s of a core."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

from assay_vllm.replay.cells import replay_cell
from assay_vllm.replay.request import Cell
from assay_vllm.replay.sources import modules_used


def replay_cells(cells: Sequence[Cell], num_processes: int) -> tuple[list[dict[str, Any]], list[str]]:
    """(the answer about each cell, sources of vLLM that took part). BrokenProcessPool: a process was killed."""
    gc.collect()
    gc.freeze()  # what is there stays; a collection need not look at it, nor copy it into a process of its own
    if num_processes == 1:
        return [replay_cell(cell) for cell in cells], modules_used()
    with ProcessPoolExecutor(num_processes, mp_context=get_context("fork")) as pool:
        answers = list(pool.map(_replay_one, cells))
    return [answer for answer, _ in answers], sorted({*modules_used()}.union(*(used for _, used in answers)))


def _replay_one(cell: Cell) -> tuple[dict[str, Any], list[str]]:
    return replay_cell(cell), modules_used()
