"""Run a plan: shard by shard, journaled, resumable; then publish.

What lies in the folder, and when:

    assay_journal.jsonl     from the start: one line about the run, then one `ShardRecord` for every finished shard
    *.safetensors           each appears by rename when it is whole
    tokenizer, index, ...   after the last shard; config.json as the last of them, so that no loader opens less than all
    assay_manifest.json     at the very end; then the journal goes

Killed at any point, the same call goes on with the first shard that is not in the journal and ends with the same bytes.
"""

from __future__ import annotations

import hashlib
import json
import logging
import platform
import shutil
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import closing
from importlib.metadata import version
from pathlib import Path
from typing import Any

import assay
from assay.atomic_files import replacing
from assay.callbacks import Progress
from assay.errors import AssayError, QuantizeError
from assay.file_data import content_differs, other_data
from assay.quantities import size
from assay.recipes.family_names import names_of
from assay.records.manifest import MANIFEST, Manifest, ShardRecord, load_manifest
from assay.records.plan import Plan
from assay.safe_files import open_inside
from assay.safetensors_index import INDEX_NAME, name_in_file
from assay_quantize.checkpoint.calibrated_layers import CalibratedFiles
from assay_quantize.checkpoint.copied_files import copied_of, list_left_out
from assay_quantize.checkpoint.file_names import CONFIG, JOURNAL
from assay_quantize.checkpoint.identity import check_source, stamps_of
from assay_quantize.checkpoint.shard_files import fsync_folder, header_bytes, held_bytes, planned_shards
from assay_quantize.engine.budget import DEFAULT_MEMORY_BYTES, FRESH_PROCESS_BYTES, RUNTIME_BYTES, plan_budget
from assay_quantize.engine.journal import append, locked_journal, resume, size_of
from assay_quantize.engine.local_runner import run_local
from assay_quantize.engine.shards import ShardOptions
from assay_quantize.engine.slab_work import OnSlab
from assay_quantize.formats.config_groups import config_json
from assay_quantize.kernels.devices import default_workers
from assay_quantize.plan.calibrated import calibrated_tensors, missing_calibration, needs_calibration
from assay_quantize.plan.planner import plan_sha256
from assay_quantize.plan.slabs import least_slab_bytes
from assay_quantize.storage.resident import resident_bytes

Runner = Callable[[Plan, Sequence[str], Path, Path, ShardOptions, Progress | None], Generator[ShardRecord, None, None]]
"""`runner(plan, shard_names, source, out_folder, options, on_progress)`: makes the shards and yields the record of each as soon
as its file is whole under its own name. It neither journals nor publishes. Closing it stops the work."""

SPARE_BYTES = 64 << 20
"""Free disk asked for beyond the planned bytes: index, config, manifest, the file system's own needs."""


def is_complete(plan: Plan, folder: Path, digest: str | None = None) -> bool:
    """Whether `folder` holds the finished checkpoint of this plan, made from this data: its manifest, every file in its size.

    digest: `plan_sha256(plan)`, if it is known already.
    """
    try:
        manifest = load_manifest(folder)
    except AssayError:
        return False
    if manifest is None or manifest.plan_sha256 != (digest or plan_sha256(plan)) or manifest.source_files != plan.source_files:
        return False
    shards = all(size_of(folder / shard.name) == shard.num_bytes for shard in manifest.shards)
    return shards and all((folder / name).is_file() for name in manifest.files)


def quantize(
    plan: Plan,
    source: Path,
    out_folder: Path,
    *,
    workers: int | None = None,
    memory_bytes: int | None = None,
    kernels: str = "fused",
    runner: Runner = run_local,
    runs_elsewhere: bool = False,
    importance: Path | None = None,
    calibrated: Path | None = None,
    allow_not_finite: bool = False,
    on_shard: Callable[[ShardRecord], None] | None = None,
    on_slab: OnSlab | None = None,
    on_progress: Progress | None = None,
) -> Manifest:
    """Make the checkpoint `plan` describes from the folder `source`, in `out_folder`; go on where a killed run stopped.

    workers: threads; default: every core this process may use.
    memory_bytes: bound of this process's memory, whatever the size of shards and tensors; default: 2 GiB.
    kernels: `fused` ones, or the `reference` in torch, for the same bytes, slowly. runner: who makes the shards; this process
    unless another is given. runs_elsewhere: it works in other processes, which do not hold what this one holds in memory.
    importance: file of channel weights for the scale search; `plan.importance_sha256` must say which. calibrated: folder of the
    layers that were calibrated; `plan.calibrated` must say which. allow_not_finite: copy
    NaN and infinity in what is not quantized; the manifest counts them. on_shard: called for every shard that is finished,
    those of a killed run first. on_slab: handed every quantized slab while its rows of the source are in memory, by runners
    that make shards in this process. on_progress: called with (tensor name, bytes read) for every slab, from worker threads.
    A finished checkpoint of the same plan is returned at once.
    Raises QuantizeError: no room on the disk or in memory, a folder with something else in it, a resume with another recipe or
    source, a source that changed, another process at work in the same folder.
    """
    digest = plan_sha256(plan)
    if is_complete(plan, out_folder, digest) and (finished := load_manifest(out_folder)) is not None:
        (out_folder / JOURNAL).unlink(missing_ok=True)  # killed between manifest and clean-up
        return finished
    started = time.monotonic()
    _check_calibrated(plan, calibrated)
    check_source(plan, source)
    _check_importance(plan, importance, source)
    if out_folder.resolve().is_relative_to(source.resolve()):
        raise QuantizeError(f"{out_folder}: lies in the source, {source}, which is only read; give a folder elsewhere")
    shards = planned_shards(plan)
    if kernels not in ("fused", "reference"):
        raise QuantizeError(f"kernels {kernels}: say fused or reference")
    in_memory = FRESH_PROCESS_BYTES if runs_elsewhere else resident_bytes()
    if memory_bytes is None:  # in a process that already holds much (a notebook) half as much beside it
        memory_bytes = max(DEFAULT_MEMORY_BYTES, in_memory + DEFAULT_MEMORY_BYTES // 2)
    budget = plan_budget(
        memory_bytes,
        default_workers() if workers is None else workers,
        base_bytes=in_memory + RUNTIME_BYTES,
        least_slab_bytes=least_slab_bytes(plan),
        held_bytes=max(map(held_bytes, shards.values()), default=0),
        kernels=kernels,
    )
    options = ShardOptions(
        workers=budget.workers,
        slab_bytes=budget.slab_bytes,
        memory_bytes=memory_bytes,
        kernels="fused" if kernels == "fused" else "reference",
        importance=importance,
        source_files=stamps_of(plan, source, sorted({tensor.shard_in for tensor in plan.tensors})),
        allow_not_finite=allow_not_finite,
        on_slab=on_slab,
        calibrated=calibrated,
    )
    check_folder(plan, out_folder, digest)
    is_new = not out_folder.exists()
    out_folder.mkdir(parents=True, exist_ok=True)
    with locked_journal(out_folder) as journal:
        if (finished := load_manifest(out_folder)) is not None:  # by another process, between the check and the lock
            (out_folder / JOURNAL).unlink()
            if is_complete(plan, out_folder, digest):
                return finished
            check_folder(plan, out_folder, digest)
        done = resume(plan, digest, out_folder, journal, workers=options.workers, on_progress=on_progress)
        spent_s = sum(record.seconds for record in done.values())
        try:
            _check_disk(plan, source, out_folder, done)
        except QuantizeError:
            if not done:  # nothing begun: leave the folder as it was, free for another precision
                (out_folder / JOURNAL).unlink()
                if is_new:
                    out_folder.rmdir()
            raise
        missing = [name for name in shards if name not in done]
        report = on_shard or (lambda record: None)
        for record in done.values():
            report(record)
        with closing(runner(plan, missing, source, out_folder, options, on_progress)) as records:
            for record in records:
                append(journal, record.model_dump(mode="json"))
                done[record.name] = record
                report(record)
        try:
            manifest = publish(
                plan,
                source,
                out_folder,
                shards=tuple(done[name] for name in shards),
                plan_sha256=digest,
                seconds=spent_s + time.monotonic() - started,
            )
        except OSError as problem:
            where = problem.filename2 or problem.filename or out_folder
            raise QuantizeError(f"{where}: cannot be written: {problem.strerror}; finished shards stay, run again") from None
        (out_folder / JOURNAL).unlink()
        fsync_folder(out_folder)
    return manifest


def _check_calibrated(plan: Plan, folder: Path | None) -> None:
    """The layers that the plan names are there, and it names all that its precision calibrates."""
    calibrated = calibrated_tensors(plan)
    if not calibrated:
        return
    if plan.calibrated is None or folder is None:
        raise QuantizeError(
            f"precision {plan.precision}: its weights are calibrated first (`calibrate_layers`); the plan has no such layers"
        )
    files = CalibratedFiles(folder, plan.calibrated.layers)
    try:
        for layer, tensors in calibrated.items():
            if layer not in plan.calibrated.layers or files.digest(tensors) != plan.calibrated.layers[layer]:
                raise QuantizeError(
                    f"{folder}: layer {layer} is not the one that was calibrated; delete the folder and run again"
                )
    finally:
        files.close()


def _check_importance(plan: Plan, importance: Path | None, source: Path) -> None:
    sha256 = None
    if importance is None and needs_calibration(plan):
        raise QuantizeError(missing_calibration(plan))
    if importance is not None:
        from assay_quantize.checkpoint.checkpoint import open_checkpoint
        from assay_quantize.checkpoint.importance import check_weights, load_importance

        loaded = load_importance(importance)
        sha256 = loaded.sha256
        if plan.source_revision is None:  # of one that is streamed from the hub not all is there
            check_weights(loaded, open_checkpoint(source))
    if sha256 != plan.importance_sha256:
        raise QuantizeError(
            f"{importance or 'no file of channel weights'}: the plan was made for {plan.importance_sha256 or 'none'}; "
            "make the plan anew with this --importance"
        )


def check_folder(plan: Plan, folder: Path, digest: str | None = None) -> None:
    """Refuse a folder that holds anything but an unfinished run of ours. digest: `plan_sha256(plan)`, if known."""
    if not folder.exists():
        return
    digest = digest or plan_sha256(plan)
    if not folder.is_dir():
        raise QuantizeError(f"{folder}: is a file; give a folder that is empty or does not exist")
    if (manifest := load_manifest(folder)) is not None:
        if (how := other_data(manifest.source_files, plan.source_files)) is not None:
            raise QuantizeError(
                f"{folder}: holds a finished checkpoint made from other data ({manifest.source}: {how}); give another folder, "
                f"or delete this one; whether the data is the same, `assay verify {folder} --source {plan.source}` tells"
            )
        if manifest.plan_sha256 == digest:
            missing = [s.name for s in manifest.shards if size_of(folder / s.name) != s.num_bytes]
            missing += [name for name in manifest.files if not (folder / name).is_file()]
            raise QuantizeError(f"{folder}: its manifest says finished, but {missing[0]} is missing or has another size; "
                                "delete the folder and run again")  # fmt: skip
        raise QuantizeError(f"{folder}: holds a finished checkpoint of another plan ({_differences(manifest, plan, digest)}); "
                            "give another folder, or delete this one")  # fmt: skip
    if (folder / JOURNAL).exists():
        return
    if foreign := sorted(path.name for path in folder.iterdir()):
        raise QuantizeError(f"{folder}: not empty (it holds {foreign[0]}) and not begun by assay; give an empty folder")


def _differences(other: Manifest, plan: Plan, digest: str) -> str:
    if other.recipe_sha256 != plan.recipe_sha256:
        return f"recipe {other.precision} {other.recipe_sha256[:12]}, asked for {plan.precision} {plan.recipe_sha256[:12]}"
    if other.source_sha256 != plan.source_sha256:
        return f"source {other.source} {other.source_sha256[:12]}, asked for {plan.source} {plan.source_sha256[:12]}"
    return f"plan {other.plan_sha256[:12]}, asked for {digest[:12]}"


def _check_disk(plan: Plan, source: Path, folder: Path, done: Mapping[str, ShardRecord]) -> None:
    """Refuse before the first byte when what is still to be written does not fit."""
    needed = sum((source / name).stat().st_size for name in copied_of(plan.source_files))
    for name, tensors in planned_shards(plan).items():
        if name not in done:
            needed += len(header_bytes(tensors)[0]) + sum(o.num_bytes for t in tensors for o in t.outputs)
    free = shutil.disk_usage(folder).free
    if needed + SPARE_BYTES > free:
        raise QuantizeError(
            f"{folder}: {size(needed)} are still to be written, {size(SPARE_BYTES)} must stay free, and {size(free)} are free "
            "on its disk; free some space, or give a folder on another disk"
        )


log = logging.getLogger(__name__)


def index_json(plan: Plan) -> dict[str, Any]:
    """`model.safetensors.index.json`: which shard holds which tensor."""
    as_vllm = names_of(plan.family).packed_as_vllm
    weight_map = {
        name_in_file(output.name, packed_as_vllm=as_vllm): shard
        for shard, tensors in planned_shards(plan).items()
        for tensor in tensors
        for output in tensor.outputs
    }
    return {"metadata": {"total_size": plan.bytes_out}, "weight_map": dict(sorted(weight_map.items()))}


def publish(
    plan: Plan, source: Path, folder: Path, *, shards: tuple[ShardRecord, ...], plan_sha256: str, seconds: float
) -> Manifest:
    """Write what is missing beside the finished `shards`, each file by rename, the manifest last.

    Raises QuantizeError: a file of the source is not the one that was planned with; OSError: it cannot be written.
    """
    files: dict[str, str] = {}
    for line in list_left_out(source):
        log.warning("%s", line)
    for name in copied_of(plan.source_files):
        files[name] = _copy(source, name, folder / name, plan.source_files[name])
    files[INDEX_NAME] = write_file(folder / INDEX_NAME, _json_text(index_json(plan)))
    files[CONFIG] = write_file(folder / CONFIG, _json_text(config_json(plan)))
    manifest = Manifest(
        model=plan.model,
        precision=plan.precision,
        own_family=plan.own_family,
        source=plan.source,
        source_sha256=plan.source_sha256,
        source_revision=plan.source_revision,
        source_files=plan.source_files,
        recipe_sha256=plan.recipe_sha256,
        plan_sha256=plan_sha256,
        importance_sha256=plan.importance_sha256,
        calibrated=plan.calibrated,
        precision_recipe=plan.precision_recipe,
        shards=shards,
        files=dict(sorted(files.items())),
        bytes_in=plan.bytes_in,
        bytes_out=plan.bytes_out,
        versions={
            "assay": assay.__version__,
            **{package: version(package) for package in ("torch", "compressed-tensors")},
            "python": platform.python_version(),
        },
        seconds=seconds,
    )
    for inside in sorted({(folder / name).parent for name in files} - {folder}):
        fsync_folder(inside)
    write_file(folder / MANIFEST, _json_text(manifest.model_dump(mode="json")))
    fsync_folder(folder)
    return manifest


def write_file(path: Path, text: str) -> str:
    """Write by rename from a temporary name that a later run cleans up; returns the SHA-256."""
    data = text.encode()
    with replacing(path) as partial:
        partial.write_bytes(data)
    return hashlib.sha256(data).hexdigest()


def _copy(source: Path, name: str, target: Path, data: str) -> str:
    """Copy a file whose content is `data` (`Plan.source_files`); its SHA-256."""
    with replacing(target) as partial, open_inside(source, name) as file, partial.open("w+b") as copy:
        shutil.copyfileobj(file, copy)
        num_bytes = copy.tell()
        copy.seek(0)
        if what := content_differs(data, num_bytes, copy):
            raise QuantizeError(f"{source / name}: its {what} is not the planned one: it changed meanwhile; run again")
        copy.seek(0)
        return hashlib.file_digest(copy, "sha256").hexdigest()


def _json_text(data: Any) -> str:
    return json.dumps(data, indent=2, ensure_ascii=False) + "\n"
