"""After the last shard: everything else a loader needs, config.json last of it, then the manifest."""

from __future__ import annotations

import hashlib
import json
import logging
import platform
import shutil
from importlib.metadata import version
from pathlib import Path
from typing import Any

from assay.atomic_files import replacing
from assay.errors import QuantizeError
from assay.file_data import content_differs
from assay.records.manifest import MANIFEST, Manifest, ShardRecord
from assay.records.plan import Plan
from assay.safe_files import open_inside
from assay.safetensors_index import INDEX_NAME
from assay_quantize.checkpoint.copied_files import copied_of, list_left_out
from assay_quantize.checkpoint.file_names import CONFIG
from assay_quantize.checkpoint.shard_files import fsync_folder, planned_shards
from assay_quantize.formats.config_groups import config_json

log = logging.getLogger(__name__)


def index_json(plan: Plan) -> dict[str, Any]:
    """`model.safetensors.index.json`: which shard holds which tensor."""
    weight_map = {
        output.name: shard for shard, tensors in planned_shards(plan).items() for t in tensors for output in t.outputs
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
        versions=versions(),
        seconds=seconds,
    )
    write_file(folder / MANIFEST, _json_text(manifest.model_dump(mode="json")))
    fsync_folder(folder)
    return manifest


def versions() -> dict[str, str]:
    """What made the checkpoint."""
    packages = ("assay", "torch", "compressed-tensors")
    return {**{package: version(package) for package in packages}, "python": platform.python_version()}


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
