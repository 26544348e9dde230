"""What a Ray task does on its node: one shard, into a hidden folder of this attempt, renamed out of it when it is whole.

A worker process makes many shards: the plan and the source's headers, seconds of work at 59,585 tensors, are read once in it.
"""

from __future__ import annotations

import functools
import os
import shutil
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import assay
from assay.errors import QuantizeError
from assay.hub_errors import hub_address
from assay.recipes.family_names import take_up_family
from assay.records.manifest import ShardRecord
from assay.records.plan import Plan
from assay_quantize.checkpoint.checkpoint import Checkpoint, open_checkpoint
from assay_quantize.checkpoint.shard_files import fsync_folder
from assay_quantize.checkpoint.source_reader import SourceReader
from assay_quantize.engine.shards import ShardOptions, quantize_shard
from assay_quantize.remote.hub_stream import Need, stage_shard

VISIBLE_WITHIN_S = 60.0
"""How long a node may take to see a file another one made: network file systems cache what is not there."""


@dataclass(frozen=True)
class RayJob:
    """What is the same for all tasks of a run.

    source: the checkpoint's folder; with `hub`, one that looks like it and holds no data. scratch: where attempts write.
    endpoint: of the hub from which each task downloads what it reads, without user and password; None: nothing is downloaded.
    version: assay's, of the driver.
    """

    source: Path
    out_folder: Path
    scratch: Path
    options: ShardOptions
    endpoint: str | None = None
    version: str = assay.__version__


def attempt_folder(scratch: Path, shard_name: str, attempt: int) -> Path:
    """Where one attempt at a shard writes."""
    return scratch / f"{shard_name}.{attempt}"


def make_in_scratch(plan_ref: list[Any], shard_name: str, attempt: int, job: RayJob, need: Need | None) -> ShardRecord:
    """One task. plan_ref: the plan's reference in Ray's object store, in a list, so that Ray does not fetch it each time.

    need: with `job.endpoint`, what of the source the shard is made of. Raises QuantizeError and CheckpointError.
    """
    if job.version != assay.__version__:
        raise QuantizeError(
            f"node {os.uname().nodename} has assay {assay.__version__}, the driver {job.version}; install the same on all"
        )
    check_endpoint(job.endpoint)
    for folder in (job.scratch, job.source):
        wait_for(folder, None)
    plan, checkpoint = _plan_and_headers(plan_ref[0], job.source)
    folder = attempt_folder(job.scratch, shard_name, attempt)
    folder.mkdir()
    source = job.source
    if job.endpoint is not None:
        assert need is not None
        source = folder / "source"
        source.mkdir()
        stage_shard(plan, checkpoint, need, source)
        checkpoint = replace(checkpoint, folder=source)
    with SourceReader(checkpoint) as reader:
        record = quantize_shard(plan, shard_name, source, folder, job.options, reader=reader)
    if job.endpoint is not None:
        shutil.rmtree(source)
    try:
        os.replace(folder / shard_name, job.out_folder / shard_name)
        fsync_folder(job.out_folder)
        folder.rmdir()
    except OSError as problem:
        raise QuantizeError(
            f"{job.out_folder / shard_name}: cannot be renamed into place: {problem.strerror}; finished shards stay, run again"
        ) from None
    return record


@functools.lru_cache(maxsize=1)
def _plan_and_headers(plan_ref: Any, source: Path) -> tuple[Plan, Checkpoint]:
    """Of the run this worker belongs to. That the source is still the same is checked for every shard, by its files' times."""
    import ray

    plan: Plan = ray.get(plan_ref)
    if plan.own_family is not None:
        take_up_family(plan.own_family)
    return plan, open_checkpoint(source)


def check_endpoint(endpoint: str | None) -> None:
    """QuantizeError when this node would ask another hub than the driver, because its address could not be handed on."""
    if endpoint is not None and hub_address() != endpoint:
        raise QuantizeError(
            f"node {os.uname().nodename} asks the hub at {hub_address()}, the driver at {endpoint}: an HF_ENDPOINT with a "
            "password is not handed to Ray, whose records and logs would keep it; set it on every node before `ray start`"
        )


def wait_for(path: Path, num_bytes: int | None) -> None:
    """Wait until this node sees `path`, a folder or a file of `num_bytes`; QuantizeError when it does not."""
    deadline = time.monotonic() + VISIBLE_WITHIN_S
    while not (path.is_dir() if num_bytes is None else path.is_file() and path.stat().st_size == num_bytes):
        if time.monotonic() > deadline:
            raise QuantizeError(
                f"node {os.uname().nodename} does not see {path}; with --runner ray, source and output must be folders of a "
                "file system that all nodes share"
            )
        time.sleep(0.2)
