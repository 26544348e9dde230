"""After the last shard: everything else a loader needs, config.json last of it, then the manifest.

Nothing of the source is executed or followed out of its folder: Python files (remote code) are not copied, nor are
symbolic links that lead elsewhere, other weight formats, or the source's model card.
"""

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
from assay.records.base import sha256_of_file
from assay.records.manifest import MANIFEST, Manifest, ShardRecord
from assay.records.plan import Plan
from assay.records.run import PLAN_INSIDE, VERIFICATION_INSIDE
from assay.safe_files import stays_inside
from assay.safetensors_index import INDEX_NAME
from assay_quantize.checkpoint.file_names import CONFIG, JOURNAL, WEIGHT_SUFFIXES
from assay_quantize.checkpoint.shard_files import fsync_folder, planned_shards
from assay_quantize.formats.config_groups import config_json

MAX_COPIED_BYTES = 256 << 20
"""A file beside the weights that is larger than this is not a tokenizer."""
MADE_HERE = frozenset({CONFIG, INDEX_NAME, JOURNAL, MANIFEST, PLAN_INSIDE, VERIFICATION_INSIDE, "README.md"})
OF_THE_SOURCE = frozenset({"quantize_config.json", "quant_config.json", "hf_quant_config.json", "params.json"})
"""Not copied: they describe the source's own weights, and vLLM takes the last one for a model's config."""

log = logging.getLogger(__name__)


def files_to_copy(source: Path) -> list[Path]:
    """Tokenizer, chat template, generation config, licence...: the small plain files beside the weights, sorted.

    Every other file is named in the log at level WARNING with the reason, weights and this tool's own files excepted.
    """
    chosen = []
    for path in sorted(source.iterdir()):
        if path.name.startswith(".") or path.name in MADE_HERE | OF_THE_SOURCE or not path.is_file():
            continue
        if path.suffix in WEIGHT_SUFFIXES or path.name.endswith(".index.json"):
            continue
        if path.suffix == ".py":
            log.warning("%s is not copied: it is code; a model that needs it gets it from its own repository", path)
        elif not stays_inside(path, source):
            log.warning("%s is not copied: it is a link that leads out of the folder", path)
        elif path.stat().st_size > MAX_COPIED_BYTES:
            log.warning("%s is not copied: larger than %d MiB", path, MAX_COPIED_BYTES >> 20)
        else:
            chosen.append(path)
    return chosen


def index_json(plan: Plan) -> dict[str, Any]:
    """`model.safetensors.index.json`: which shard holds which tensor."""
    weight_map = {
        output.name: shard for shard, tensors in planned_shards(plan).items() for t in tensors for output in t.outputs
    }
    return {"metadata": {"total_size": plan.bytes_out}, "weight_map": dict(sorted(weight_map.items()))}


def publish(
    plan: Plan, source: Path, folder: Path, *, shards: tuple[ShardRecord, ...], plan_sha256: str, seconds: float
) -> Manifest:
    """Write what is missing beside the finished `shards`, each file by rename, the manifest last."""
    files: dict[str, str] = {}
    for path in files_to_copy(source):
        files[path.name] = _copy(path, folder / path.name)
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


def _copy(path: Path, target: Path) -> str:
    with replacing(target) as partial:
        shutil.copyfile(path, partial)
    return sha256_of_file(target)


def _json_text(data: Any) -> str:
    return json.dumps(data, indent=2, ensure_ascii=False) + "\n"
