"""Who was measured: a checkpoint's hash, and whether two of them were served alike."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator, Mapping
from fnmatch import fnmatch
from pathlib import Path
from types import MappingProxyType
from typing import Any

from assay.errors import AssayError, CheckpointError, MeasureError
from assay.records.base import sha256_of
from assay.records.declared import difference_words, is_variant, undeclared, untrue
from assay.records.manifest import MANIFEST, load_manifest
from assay.records.measurement import Measurement
from assay.records.run import WRITTEN_ABOUT, verification_of
from assay.records.serving import Fingerprint
from assay.records.verification import Verification, is_as_verified
from assay_evaluate.client.journal import Identity

WEIGHTS = ("*.safetensors",)
FILES = ("*.json", "*.jinja", "*.model", "*.txt", "*.py")
"""Besides the weights, what changes how a checkpoint answers: config, tokenizer, chat template, generation defaults."""


def identity(
    checkpoint: str,
    fingerprint: Fingerprint,
    suite: str,
    attempt: int = 0,
    label_key: Mapping[str, Any] | None = None,
) -> Identity:
    """Key of replies. Stricter than comparability: how this format was computed (emulated or not) is part of it too.

    Of a server that was not started here, what it says of its configuration stands for the flags that nobody knows. attempt:
    how often it is measured anew; earlier replies are then not found again. label_key: label and addresses, of a checkpoint
    that another label has too: neither may answer for the other.
    """
    served = [fingerprint.comparable_sha256, fingerprint.checkpoint_flags, fingerprint.emulated]
    if fingerprint.server == "external":
        served.append(fingerprint.system_fingerprint)
    if attempt:
        served.append({"attempt": attempt})
    if label_key is not None:
        served.append(dict(label_key))
    return Identity(checkpoint, sha256_of(served), suite)


def identity_of(measured: Measurement) -> Identity:
    """Key of the replies that a measurement was made from."""
    if measured.replies_sha256 is None:  # recorded before it was
        return identity(measured.checkpoint_sha256, measured.fingerprint, measured.suite)
    return Identity(measured.checkpoint_sha256, measured.replies_sha256, measured.suite)


def checkpoint_sha256(folder: Path, hash_file: Callable[[Path], str]) -> str:
    """Identity of a checkpoint folder.

    Its manifest's, if nothing was touched since it was verified, or if its files hash to what the manifest says; else a hash of
    all its files, each by `hash_file` (`Journal.file_sha256` remembers them). CheckpointError if there is no checkpoint.
    """
    files = hashed_files(folder)
    try:
        manifest, record = load_manifest(folder), Verification.load_if_there(verification_of(folder))
        if record is not None and record.passed and is_as_verified(folder, record):
            return record.checkpoint_sha256
    except AssayError:
        manifest = None
    hashes = {path.name: hash_file(path) for path in files}
    if manifest is not None:
        listed = {name: sha256 for name, sha256 in manifest.files.items() if any(fnmatch(name, pattern) for pattern in FILES)}
        if hashes == listed | {shard.name: shard.sha256 for shard in manifest.shards}:
            return manifest.checkpoint_sha256
    return sha256_of(hashes)


def not_as_made(folder: Path, sha256: str) -> str | None:
    """A sentence, if assay made the checkpoint and its files are others now. sha256: its `checkpoint_sha256`."""
    try:
        manifest = load_manifest(folder)
    except AssayError as error:
        return f"nothing shows whether it is as assay made it: {error}"
    if manifest is None or manifest.checkpoint_sha256 == sha256:
        return None
    return (
        f"files of {folder} are not those that assay made, by their SHA-256 in {MANIFEST}; "
        f"`assay verify {shlex.quote(str(folder))}` names what differs"
    )


def hashed_files(folder: Path) -> list[Path]:
    """Weights, then what else changes how a checkpoint answers; CheckpointError if there is no checkpoint."""
    weights = sorted(_matching(folder, WEIGHTS))
    if not weights or not (folder / "config.json").is_file():
        raise CheckpointError(f"{folder}: no checkpoint there (config.json and *.safetensors); name a folder that has one")
    return [*weights, *sorted(path for path in _matching(folder, FILES) if path.name not in WRITTEN_ABOUT)]


def checkpoint_bytes(folder: Path) -> int:
    """Bytes of all weight files."""
    return sum(path.stat().st_size for path in _matching(folder, WEIGHTS))


def _matching(folder: Path, patterns: tuple[str, ...]) -> Iterator[Path]:
    return (path for pattern in patterns for path in folder.glob(pattern) if path.is_file())


def require_same_serving(
    reference: Fingerprint,
    candidate: Fingerprint,
    reference_label: str,
    candidate_label: str,
    declared: Mapping[str, Any] = MappingProxyType({}),
) -> None:
    """MeasureError naming the differing fields unless both are served alike but for the checkpoint's own format.

    declared: what the candidate is to differ in, a variant of the reference; then that must be so, and nothing else.
    """
    leaves = undeclared(reference, candidate, declared, is_one_checkpoint=is_variant(declared))
    if leaves:
        fields = "; ".join(f"{path}: {before!r} against {value!r}" for path, before, value in leaves)
        beyond = f" in more than is declared ({difference_words(declared)})" if is_variant(declared) else ""
        remedy = "declare that too, or " if beyond else ""
        raise MeasureError(
            f"{candidate_label} would not be served like {reference_label}{beyond}: {fields}. "
            f"Scores compare only under one fingerprint: {remedy}use the same profile, versions and machine for both"
        )
    if (clause := untrue(reference, candidate, declared)) is not None:
        raise MeasureError(f"{candidate_label} would not be served as declared: {clause}; declare what is so")
