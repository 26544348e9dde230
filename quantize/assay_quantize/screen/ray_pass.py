"""A pass whose texts are shared out to Ray tasks over a shared file system: the files of `run_pass`, bit for bit.

A share is some of the texts through all layers, so each worker reads each layer once. Every attempt at a share writes into a
folder of its own, which begins with hard links to the layers that the attempt before it finished: a lost worker costs the layer
it was at, and one that was only thought lost writes where nobody looks. How texts are shared out is written down first, so that
a pass whose driver was killed goes on with the same shares, on as many nodes as there are then.
"""

from __future__ import annotations

import heapq
import json
import os
import shutil
import uuid
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from assay.atomic_files import replacing
from assay.callbacks import Say
from assay.errors import PlanError
from assay.recipes.families import family_of
from assay.recipes.family_names import recorded_family
from assay.records.base import sha256_of, write_text_atomically
from assay_quantize.checkpoint.checkpoint import open_checkpoint
from assay_quantize.engine.budget import DEFAULT_MEMORY_BYTES
from assay_quantize.remote.ray_cluster import Cluster, TaskNeeds, Tasks
from assay_quantize.remote.ray_worker import wait_for
from assay_quantize.screen.forward import (
    PASS_RECORD,
    ScreenPass,
    begin_pass,
    experts_file,
    num_layers_done,
    state_file,
    states_folder,
    whole_folder,
)
from assay_quantize.screen.layer_model import LayerModel
from assay_quantize.screen.ray_share import ShareJob, numerics_here, run_share
from assay_quantize.sensitivity.texts import ScoredText

SHARES = "shares"
"""Folder inside that of the pass, until it is finished."""
_SHARED_OUT = "shares.json"


@dataclass(frozen=True)
class PassTasks:
    """The tasks of a pass. needs: of each, memory for a layer apart."""

    cluster: Cluster
    needs: TaskNeeds

    def for_model(self, model: LayerModel) -> PassTasks:
        """With memory for its largest layer, or for as much of it as may be held, where that is not the GPU's."""
        if self.needs.gpus:
            return self
        layers_bytes = model.budget.limit_bytes
        if layers_bytes is None:
            layers_bytes = max(model.parts(layer).whole_bytes for layer in range(model.num_layers))
        return replace(self, needs=replace(self.needs, memory_bytes=self.needs.memory_bytes + layers_bytes))

    def num_shares(self, num_texts: int) -> int:
        """One for each task that the cluster runs at once, and for each text at most."""
        return max(1, min(num_texts, self.cluster.num_tasks(self.needs)))


def needs_of(device: str, num_threads: int | None) -> TaskNeeds:
    """What a task takes whatever the model is. num_threads: None: those of torch here, or with a GPU its share of them."""
    num_gpus = 0 if device == "cpu" else 1
    shared_between = max(1, torch.cuda.device_count()) if num_gpus else 1
    cpus = num_threads or max(1, torch.get_num_threads() // shared_between)
    return TaskNeeds(cpus, DEFAULT_MEMORY_BYTES, num_gpus, maker="a share of the texts", lowered_by="--workers")


def shared_out(texts: Sequence[ScoredText], num_doubled: int, count: int) -> list[list[int]]:
    """Numbers of the texts of each share, ascending: the longest text that is left goes to the share with the fewest tokens.

    num_doubled: as of `run_pass`; the copies of a text go with it.
    """
    tokens = [len(text.ids) * (3 if number < num_doubled else 1) for number, text in enumerate(texts)]
    shares: list[list[int]] = [[] for _ in range(min(count, len(texts)))]
    loads = [(0, index) for index in range(len(shares))]
    for number in sorted(range(len(texts)), key=lambda number: (-tokens[number], number)):
        load, index = heapq.heappop(loads)
        shares[index].append(number)
        heapq.heappush(loads, (load + tokens[number], index))
    return [sorted(numbers) for numbers in shares]


def run_ray_pass(
    model: LayerModel,
    texts: Sequence[ScoredText],
    folder: Path,
    identity: str,
    say: Say,
    *,
    checkpoint: Path,
    tasks: PassTasks,
    num_doubled: int = 0,
) -> ScreenPass:
    """As `run_pass`: each takes up a pass that the other finished, and begins anew one that the other did not.

    checkpoint: folder of the model; it and `folder` must be the same on every node.
    QuantizeError: no node is large enough, one does not see the folders or computes otherwise than this process, a share loses
    every worker, and as of `run_pass`.
    """
    begin_pass(folder, identity)
    last = model.num_layers - 1
    if states_folder(folder, last).is_dir():
        shutil.rmtree(folder / SHARES, ignore_errors=True)
        return ScreenPass(folder, model.num_layers)
    for path in (*folder.glob("behind-*"), *folder.glob(".behind-*")):  # of a local pass that was not finished
        shutil.rmtree(path)
    tasks = tasks.for_model(model)
    ray, needs = tasks.cluster.ray, tasks.needs
    tasks.cluster.check_fits(needs)
    if needs.gpus:
        torch.cuda.empty_cache()  # what this process no longer uses of a GPU that a task is given
    shares = _Shares(folder.resolve(), texts, num_doubled, tasks.num_shares(len(texts)), model.num_layers, say)
    job = _job(model, checkpoint.resolve(), needs.cpus)
    remote = ray.remote(
        num_cpus=needs.cpus, num_gpus=needs.gpus, memory=needs.memory_bytes,
        max_retries=0,  # a retry by Ray would not know that it is one
        scheduling_strategy="SPREAD",
    )(run_share)  # fmt: skip

    def begin(share: _Share, attempt: int) -> Any:
        place = shares.begin(share.index, identity)
        numbers = shares.numbers[share.index]
        own = [texts[number] for number in numbers]
        doubled = sum(number < num_doubled for number in numbers)
        return remote.remote(job, own, doubled, place, _identity(identity, numbers), (place / PASS_RECORD).stat().st_size)

    running: Tasks[_Share, dict[str, int]] = Tasks(
        ray, begin, on_lost=lambda _share, _attempt: None,
        remedy="finished layers stay: look into Ray's log of that node, and run again",
    )  # fmt: skip
    left = [_Share(model.stored.location, index) for index in range(len(shares.numbers)) if not shares.is_done(index)]
    try:
        for share, sizes in running.run(left, len(left), shares.tell):
            for name, num_bytes in sizes.items():
                wait_for(shares.newest(share.index) / name, num_bytes)
            shares.tell()
    finally:
        running.cancel()
    shares.tell()
    shares.join()
    return ScreenPass(folder, model.num_layers)


def _job(model: LayerModel, checkpoint: Path, num_threads: int) -> ShareJob:
    own_family = None
    with suppress(PlanError):
        own_family = recorded_family(family_of(model.stored.config))
    data = open_checkpoint(checkpoint, allow_quantized=True).data
    return ShareJob(
        checkpoint, model.stored.location, data, own_family, model.dtype, model.device, model.fp8_kv_cache,
        model.budget.limit_bytes, num_threads, numerics_here(model.device),
    )  # fmt: skip


def _identity(identity: str, numbers: Sequence[int]) -> str:
    """Of a share: the pass, and which of its texts."""
    return sha256_of([identity, list(numbers)])


@dataclass(frozen=True)
class _Share:
    location: str
    index: int

    def __str__(self) -> str:
        return f"{self.location}: share {self.index + 1} of its texts"


class _Shares:
    """The shares of one pass on the disk. numbers: of each share, those of its texts."""

    def __init__(
        self, folder: Path, texts: Sequence[ScoredText], num_doubled: int, count: int, num_layers: int, say: Say
    ) -> None:
        self._folder, self._num_layers, self._say = folder, num_layers, say
        self._num_texts, self._num_doubled = len(texts), num_doubled
        self._place = folder / SHARES
        self._place.mkdir(exist_ok=True)
        record = self._place / _SHARED_OUT
        if not record.is_file():
            write_text_atomically(record, json.dumps(shared_out(texts, num_doubled, count)))
        self.numbers: list[list[int]] = json.loads(record.read_text(encoding="utf-8"))
        self._newest: dict[int, Path] = {}
        self._num_told = min(self._num_done(index) for index in range(len(self.numbers)))

    def newest(self, index: int) -> Path:
        """Folder of the attempt at a share that is under way, or that got furthest."""
        return self._newest[index]

    def is_done(self, index: int) -> bool:
        return self._num_done(index) == self._num_layers

    def begin(self, index: int, identity: str) -> Path:
        """Folder of a new attempt, with the layers that those before it finished; these are forgotten."""
        before = sorted(self._attempts(index), key=num_layers_done)
        place = self._place / f"{index:05d}.{uuid.uuid4().hex[:12]}"
        place.mkdir()
        if before:
            _link_layers(before[-1], place, len(list(self._sequences(index))))
        # last: an attempt without it is not one
        write_text_atomically(place / PASS_RECORD, json.dumps({"identity": _identity(identity, self.numbers[index])}))
        for path in before:
            shutil.rmtree(path, ignore_errors=True)
        self._newest[index] = place
        return place

    def tell(self) -> None:
        """How many layers all texts are through."""
        num_done = min(self._num_done(index) for index in range(len(self.numbers)))
        for number in range(self._num_told + 1, num_done + 1):
            self._say(f"layer {number} of {self._num_layers}, {len(self.numbers)} shares")
        self._num_told = max(self._num_told, num_done)

    def join(self) -> None:
        """The files that a local pass would have left; the shares go."""
        from safetensors import safe_open
        from safetensors.torch import save_file

        for layer in range(self._num_layers):
            experts: dict[str, Tensor] = {}
            for index in range(len(self.numbers)):
                if (path := experts_file(self._newest[index], layer)).is_file():
                    with safe_open(path, "pt") as file:
                        experts |= {str(number): file.get_tensor(str(own)) for own, number in self._sequences(index)}
            if experts:
                with replacing(experts_file(self._folder, layer)) as partial:
                    save_file(experts, partial)
        with whole_folder(states_folder(self._folder, self._num_layers - 1)) as behind:
            for index in range(len(self.numbers)):
                of_share = states_folder(self._newest[index], self._num_layers - 1)
                for own, number in self._sequences(index):
                    os.link(state_file(of_share, own), state_file(behind, number))
        shutil.rmtree(self._place)

    def _sequences(self, index: int) -> Iterator[tuple[int, int]]:
        """(number in the share, number in the pass) of its sequences: texts, then the copies of those that are doubled."""
        numbers = self.numbers[index]
        copies = [self._num_texts + number for number in numbers if number < self._num_doubled]
        return enumerate([*numbers, *copies])

    def _attempts(self, index: int) -> list[Path]:
        return [path for path in self._place.glob(f"{index:05d}.*") if (path / PASS_RECORD).is_file()]

    def _num_done(self, index: int) -> int:
        if index not in self._newest:
            attempts = self._attempts(index)
            if not attempts:
                return 0
            self._newest[index] = max(attempts, key=num_layers_done)
        return num_layers_done(self._newest[index])


def _link_layers(source: Path, folder: Path, num_sequences: int) -> None:
    """What is gone on from. source: of an attempt, whose worker may only have been thought lost and still go on there."""
    while num_layers := num_layers_done(source):
        with suppress(FileNotFoundError):
            for layer in range(num_layers):
                link = experts_file(folder, layer)
                if not link.exists() and (path := experts_file(source, layer)).is_file():
                    os.link(path, link)
            with whole_folder(states_folder(folder, num_layers - 1)) as behind:
                for sequence in range(num_sequences):
                    os.link(state_file(states_folder(source, num_layers - 1), sequence), state_file(behind, sequence))
            return
