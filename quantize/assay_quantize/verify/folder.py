"""Files of a checkpoint as a whole: what the manifest lists is there, nothing else is, and copies are the source's.

Shared with the engine: which files of a source are copied (`copied_files.py`).
"""

from __future__ import annotations

from pathlib import Path

from assay.errors import CheckpointError
from assay.records.manifest import Manifest
from assay.records.run import WRITTEN_ABOUT
from assay.safetensors_index import INDEX_NAME
from assay_quantize.checkpoint.checkpoint import Checkpoint
from assay_quantize.checkpoint.copied_files import copied_of, is_copied
from assay_quantize.checkpoint.file_names import CONFIG, JOURNAL, WEIGHT_SUFFIXES
from assay_quantize.storage.hash_files import hash_file
from assay_quantize.verify.findings import Findings

MADE_ANEW = frozenset({CONFIG, INDEX_NAME})


def check_files(folder: Path, manifest: Manifest, hashes: bool, findings: Findings) -> None:
    """The folder holds what the manifest lists, and nothing that a loader could take beside it.

    Hashes of shards are `contents`'. Hidden files are let be: loaders read none, and clients of the hub leave some.
    """
    for shard in manifest.shards:
        findings.look("files")
        path = folder / shard.name
        if not path.is_file():
            findings.damage("files", shard.name, "is in the manifest, but not on disk")
        elif path.stat().st_size != shard.num_bytes:
            findings.damage("files", shard.name, f"has {path.stat().st_size} bytes; the manifest says {shard.num_bytes}")
    for name, sha256 in manifest.files.items():
        findings.look("files")
        if not (folder / name).is_file():
            findings.damage("files", name, "is in the manifest, but not on disk")
        elif hashes:
            findings.look("hashes")
            _check_hash(folder, name, sha256, "the manifest says", findings, check="hashes")
    if not hashes:
        findings.not_checked.append("hashes: not asked for")
    known = {shard.name for shard in manifest.shards} | manifest.files.keys() | WRITTEN_ABOUT | {JOURNAL}
    for path in sorted(folder.iterdir()):
        if path.name not in known and not path.name.startswith("."):
            what = "holds weights, but" if path.suffix in WEIGHT_SUFFIXES else "lies in the folder, but"
            findings.damage("files", path.name, f"{what} the manifest does not know it")
        elif path.name in manifest.files.keys() - MADE_ANEW and not is_copied(path.name, path.stat().st_size):
            findings.damage("files", path.name, "is in the manifest, but quantizing makes and copies no such file")


def check_copies(folder: Path, manifest: Manifest, source: Checkpoint, findings: Findings) -> None:
    """Every file beside the weights is the source's, byte for byte, or one that is made anew; and none is left out."""
    copied = copied_of(source.data)
    for name in copied:
        findings.look("copies")
        if name not in manifest.files:
            findings.damage("copies", name, f"is in {source.location}, but was not copied")
        elif (folder / name).is_file() and not findings.is_damaged(name):
            expected = source.data[name].removeprefix("sha256:")
            _check_hash(folder, name, expected, f"that in {source.location} has", findings, check="copies")
    for name in sorted(manifest.files.keys() - MADE_ANEW - set(copied)):
        if not findings.is_damaged(name):
            findings.damage("copies", name, f"is no file that is copied from {source.location}")


def _check_hash(folder: Path, name: str, expected: str, who: str, findings: Findings, *, check: str) -> None:
    """who: says that the hash should be `expected`."""
    try:
        got = hash_file(folder, name)
    except CheckpointError as problem:
        findings.damage(check, name, str(problem).removeprefix(f"{folder / name}: "))
        return
    if got != expected:
        findings.damage(check, name, f"has SHA-256 {got[:12]}...; {who} {expected[:12]}...")
