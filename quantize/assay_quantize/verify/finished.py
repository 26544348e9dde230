"""Shards are checked as soon as they are finished, while others are made: `verify` then takes what was found.

The processor works on them while the writer waits for the disk. Their hashes are not computed once more: every byte on the
disk, header included, is compared with what the plan and the source give, and the engine hashed what it wrote. Neither are
the errors of weights whose bytes are right: the engine summed them up when it made those bytes. Of a shard in which anything is
wrong nothing is taken: `verify` looks at it again, and says how wrong it is. But where the engine had other bytes of the source
than the file holds, that stands: reading them again by the same code may give the same.

Weights that were judged as they were made (`judged.py`) are read back and not compared with the source again.
"""

from __future__ import annotations

import gc
import os
import queue
import threading
from collections.abc import Mapping
from contextlib import ExitStack
from itertools import chain, takewhile
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Self

import numpy as np

from assay.errors import AssayError
from assay.file_data import data_of_files
from assay.recipes.family_names import names_of
from assay.records.manifest import ShardRecord
from assay.records.plan import Plan
from assay_quantize.checkpoint.checkpoint import open_checkpoint
from assay_quantize.checkpoint.headers import TensorHeader
from assay_quantize.checkpoint.importance import load_importance
from assay_quantize.checkpoint.shard_files import header_bytes, planned_shards
from assay_quantize.formats.config_groups import config_json
from assay_quantize.formats.schemes import module_of
from assay_quantize.plan.planner import plan_sha256
from assay_quantize.verify.config import Groups, groups_of
from assay_quantize.verify.contents import contents_by_shard, jobs_of_judged, jobs_of_shard, judge_jobs, opened_checks
from assay_quantize.verify.files import StoredReader
from assay_quantize.verify.findings import Findings
from assay_quantize.verify.headers import library_headers
from assay_quantize.verify.judged import JudgedSlabs, JudgedWeight
from assay_quantize.verify.original import calibrated_scales, open_original


class CheckedShard(NamedTuple):
    """stamp: of the file before it was read (`Plan.source_files`). sha256: by the engine."""

    stamp: str
    sha256: str
    findings: Findings


class FinishedShards:
    """Checks every shard that it is told of, on threads of its own. A context manager: leaving it stops what is under way.

    Raises nothing for a shard that cannot be read: `verify` looks at it again, and says so.
    """

    def __init__(
        self, plan: Plan, folder: Path, source: Path, *, workers: int, importance: Path | None = None
    ) -> None:  # fmt: skip
        """source: folder of the checkpoint that `plan` was made for. importance: as for `verify`."""
        self._plan, self._folder, self._workers = plan, folder, workers
        self._shards = planned_shards(plan)
        self.groups = groups_of(config_json(plan))
        self._headers: dict[str, TensorHeader] = {}
        self._finished: queue.SimpleQueue[ShardRecord | None] = queue.SimpleQueue()
        self._checked: dict[str, CheckedShard] = {}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._loop, name="assay-verify-finished")
        self._opened = ExitStack()
        checkpoint = open_checkpoint(source)
        headers = {name: header for shard in checkpoint.shards for name, header in library_headers(source, shard).items()}
        loaded = None if importance is None else load_importance(importance)
        original = open_original(checkpoint, headers, plan, loaded)
        self._amax, self._stored = original.amax, StoredReader(folder, self._headers)
        self._opened.callback(self._stored.close)
        self._judged = JudgedSlabs(plan, original)
        self.judge = self._judged.judge
        """To be called with every slab as it is made (`quantize(on_slab=...)`); a weight of which one is missing is looked at
        as if there had been none."""
        self._checks = self._opened.enter_context(
            opened_checks(folder, self._headers, self.groups, original, plan, calibrated_scales(plan, loaded), is_quick=True)
        )

    def __enter__(self) -> Self:
        gc.freeze()  # looking through all of torch and numba for garbage takes 0.3 s, and there is none
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._stop.set()
        self.wait()
        self._opened.close()
        gc.unfreeze()

    def add(self, record: ShardRecord) -> None:
        """A shard lies in the folder under its own name."""
        self._finished.put(record)

    def wait(self) -> None:
        """Until all that were added are checked; no more may be added."""
        self._finished.put(None)
        self._thread.join()

    def valid_findings(
        self, plan: Plan, groups: Groups | None, stamps: Mapping[str, str], hashes: Mapping[str, str]
    ) -> dict[str, Findings]:  # fmt: skip
        """Shard -> what was found in it, when all that were added are checked.

        Only what still holds: plan and config groups are those it was checked with, the file was not touched since
        (`stamps`), and the manifest has the hash that the engine gave (`hashes`).
        """
        self.wait()
        is_same = plan_sha256(plan) == plan_sha256(self._plan) and plan.source_files == self._plan.source_files
        if not is_same or groups != self.groups:
            return {}
        return {
            shard: checked.findings
            for shard, checked in self._checked.items()
            if (checked.stamp, checked.sha256) == (stamps.get(shard), hashes.get(shard))
        }

    def _loop(self) -> None:
        while (record := self._finished.get()) is not None and not self._stop.is_set():
            try:
                checked = self._check(record)
            except (AssayError, OSError):
                continue
            damages = checked.findings.damages
            stands = not damages or any(damage.check == "source" for damage in damages)
            if stands and not self._stop.is_set():
                self._checked[record.name] = checked

    def _check(self, record: ShardRecord) -> CheckedShard:
        stamp = data_of_files(self._folder, [record.name])[record.name]
        headers = library_headers(self._folder, record.name)
        self._headers |= headers
        tensors = contents_by_shard(self._shards[record.name], headers).get(record.name, [])
        findings = Findings()
        planned, _ = header_bytes(self._shards[record.name], packed_as_vllm=names_of(self._plan.family).packed_as_vllm)
        findings.count("headers")
        with (self._folder / record.name).open("rb") as file:
            if file.read(len(planned)) != planned:
                findings.damage("headers", record.name, "its header is not the planned one")
            # with the header came megabytes behind it, which are to be read past the cache, as they were written
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        judged = [JudgedWeight(tensor, slabs) for tensor in tensors if (slabs := self._judged.take(tensor)) is not None]
        names = {weight.tensor.name for weight in judged}
        others = [tensor for tensor in tensors if tensor.name not in names]
        compared = jobs_of_shard(self._folder, record.name, others, self._checks)
        jobs = takewhile(lambda _: not self._stop.is_set(), chain(compared, jobs_of_judged(judged, self._checks)))
        judge_jobs(jobs, self._checks, findings, self._workers, known_errors=record.relative_error)
        # slabs were checked with the global scales that are stored; here those are compared with the weights
        for tensor in tensors:
            name = f"{module_of(tensor.name)}.weight_global_scale"
            if self._stop.is_set() or (amax := self._amax.of(tensor)) is None:
                continue
            scale = self._stored.read(name, 0, 4, np.empty(4, np.uint8)).view(np.float32)
            if scale.tolist() != [amax.global_scale()]:
                findings.damage("scales", name, "is not that of the largest weight")
        return CheckedShard(stamp, record.sha256, findings)
