"""Inspect a checkpoint: read it as far as is asked for, ask every row of the table, write down what was found."""

from __future__ import annotations

import shlex
import time
from collections.abc import Iterator

from assay.callbacks import Track, track_nothing
from assay.foreign_text import shown
from assay.records.inspection import Inspection, Needs
from assay.records.manifest import MANIFEST
from assay_quantize.inspection.compare import compare_with_base
from assay_quantize.inspection.declared import check_patterns, slow_pattern
from assay_quantize.inspection.defect import findings_of
from assay_quantize.inspection.defects import DEFECTS
from assay_quantize.inspection.facts import facts_of
from assay_quantize.inspection.files import Files
from assay_quantize.inspection.gguf.inspect import inspect_gguf
from assay_quantize.inspection.gguf.model import is_gguf
from assay_quantize.inspection.layer_checks import stored_not_declared
from assay_quantize.inspection.subject import Subject, open_subject
from assay_quantize.inspection.values import num_bytes_of, read_scales, read_weights


def inspect(
    files: Files, *, source: Files | None = None, scales: bool = True, weights: bool = False, kept: bool = True,
    track: Track = track_nothing,
) -> Inspection:  # fmt: skip
    """What the checkpoint is and what is wrong with it.

    source: the base that it was made from; then kept tensors are compared byte for byte, unless `kept` is False, and with
    `weights` quantized ones decoded and compared. scales: read the values of every scale. weights: and of every other tensor.
    GGUF files are inspected by `gguf.inspect`, without a base. CheckpointError: no config.json, no weights, a repository that
    is not there.
    """
    if is_gguf(files):
        return inspect_gguf(files, has_source=source is not None, weights=weights, track=track)
    started = time.monotonic()
    base = None if source is None else open_subject(source)
    subject = open_subject(files, base)
    read: set[Needs] = {"headers"}
    if scales or weights:
        with track("reading scales", num_bytes_of(subject, weights=False)) as progress:
            read_scales(subject, progress)
        read.add("scales")
    if weights:
        with track("reading weights", num_bytes_of(subject, weights=True)) as progress:
            read_weights(subject, progress)
        read.add("weights")
    if base is not None:
        read.add("source")
        if kept:
            compare_with_base(subject, base, decode=weights, track=track)
        else:
            subject.values.not_looked_at.append("kept tensors and errors against the base: not compared (--source)")
    of_data = () if kept else ("kept_tensor_differs", "error_beyond_format")
    asked = [defect for defect in DEFECTS if defect.needs in read and defect.key not in of_data]
    return Inspection(
        checkpoint=files.location,
        revision=files.revision,
        source=None if source is None else source.location,
        read="weights" if weights else "scales" if scales else "headers",
        facts=facts_of(subject),
        findings=findings_of(asked, subject),
        checked=tuple(defect.key for defect in asked),
        not_checked=tuple(_not_checked(subject, read)),
        seconds=time.monotonic() - started,
    )


def _not_checked(subject: Subject, read: set[Needs]) -> Iterator[str]:
    if subject.family is None:
        yield f"names and modules against a family: {subject.family_problem}"
    if subject.declared.method is not None and (subject.declared.expects is None or check_patterns(subject.declared)):
        yield f"the list of plain modules: what vLLM makes of method {subject.declared.method} for each is not known here"
    if (pattern := slow_pattern(subject.declared)) is not None:
        yield f"the list of plain modules: pattern {shown(pattern, 60)} may take too long to match"
    if any(stored_not_declared(subject)):
        yield "modules against a claim of quantization: there is none"
    if not subject.files.lists_all:
        yield "files that the index does not name: the server lists none"
    if "scales" not in read:
        yield "values of scales: not read (a folder's are; of a hub id or URL with --deep)"
    if "weights" not in read:
        yield "values of weights: not read (--deep)"
    if subject.source is None:
        yield "kept tensors, errors, tokenizer and templates against the base: no --source"
    if MANIFEST in subject.files.names and subject.files.is_local:
        yield f"files against {MANIFEST}: `assay verify {shlex.quote(subject.files.location)}` does"
    yield from subject.values.not_looked_at
