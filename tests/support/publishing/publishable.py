"""A run whose checkpoint w4a16 lies there with real files, as verified: what `assay publish` takes. The scores are made up."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import numpy as np
from synthetic_run import MODEL, make_manifest, make_run, make_verification

from assay.recipes.gate import GateRecipe
from assay.recipes.load import load_recipe
from assay.records.manifest import MANIFEST, Manifest, ShardRecord
from assay.records.measurement import Measurement
from assay.records.verdict import RegisteredGates
from assay.records.verification import stamps_of_files
from assay_evaluate.verdicts.gates import judge
from assay_reports.report import write_report

LABEL = "w4a16"
NUM_SHARDS, SHARD_BYTES = 5, 40_000
TEXTS = {
    "config.json": '{"architectures": ["Glm4MoeForCausalLM"]}\n',
    "tokenizer.json": json.dumps({"model": {"vocab": {f"token-{n}": n for n in range(2000)}}}),
    "model.safetensors.index.json": '{"weight_map": {}}\n',
}


def shard_names() -> list[str]:
    return [f"model-{number + 1:05d}-of-{NUM_SHARDS:05d}.safetensors" for number in range(NUM_SHARDS)]


def make_publishable(folder: Path) -> Path:
    """`folder/tiny-glm`, with report; only the reference and w4a16 were measured, and w4a16 is PASS."""
    contents = {name: np.random.default_rng([7, n]).bytes(SHARD_BYTES + n) for n, name in enumerate(shard_names())}
    contents |= {name: text.encode() for name, text in TEXTS.items()}
    manifest = _manifest(contents)

    def of_these_files(measurement: Measurement) -> Measurement:
        if measurement.label != LABEL:
            return measurement
        return measurement.model_copy(update={"checkpoint_sha256": manifest.checkpoint_sha256})

    run_dir = make_run(folder, change=of_these_files)
    for label in ("fp8-repeat", "bf16", "nvfp4a16"):
        (run_dir / "measurements" / f"{label}.json").unlink()
    measured = [Measurement.load(run_dir / "measurements" / f"{label}.json") for label in ("fp8", LABEL)]
    registered = RegisteredGates.load(run_dir / "gates.registered.json")
    judge(measured, load_recipe(GateRecipe, "quick"), model=MODEL, registered=registered).save(run_dir / "gates.json")
    checkpoint = run_dir / LABEL / "checkpoint"
    for name, content in contents.items():
        (checkpoint / name).write_bytes(content)
    manifest.save(checkpoint / MANIFEST)
    verify(run_dir)
    write_report(run_dir)
    return run_dir


def verify(run_dir: Path) -> None:
    """verify.json about the files as they are now."""
    checkpoint = run_dir / LABEL / "checkpoint"
    sha256 = Manifest.load(checkpoint / MANIFEST).checkpoint_sha256
    record = make_verification(LABEL).model_copy(update={"checkpoint_sha256": sha256, "files": stamps_of_files(checkpoint)})
    record.save(run_dir / LABEL / "verify.json")


def _manifest(contents: dict[str, bytes]) -> Manifest:
    hashes = {name: hashlib.sha256(content).hexdigest() for name, content in contents.items()}
    shards = tuple(
        ShardRecord(name=name, num_bytes=len(contents[name]), sha256=hashes[name], relative_error={}, seconds=1.0)
        for name in shard_names()
    )
    files = {name: sha256 for name, sha256 in hashes.items() if name not in shard_names()}
    return make_manifest(LABEL).model_copy(update={"shards": shards, "files": files})
