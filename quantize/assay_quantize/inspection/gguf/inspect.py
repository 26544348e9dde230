"""Inspect a model in GGUF files: read headers, where asked for weights, ask every row of the table."""

from __future__ import annotations

import time
from collections.abc import Iterator

from assay.callbacks import Track, track_nothing
from assay.errors import CheckpointError
from assay.foreign_text import shown
from assay.installation import require_extra
from assay.records.inspection import Inspection
from assay_quantize.inspection.defect import findings_of
from assay_quantize.inspection.files import Files
from assay_quantize.inspection.gguf.checks import architecture_of
from assay_quantize.inspection.gguf.defects import GGUF_DEFECTS
from assay_quantize.inspection.gguf.facts import facts_of
from assay_quantize.inspection.gguf.model import GgufModel, is_plain, open_model
from assay_quantize.inspection.gguf.values import KNOWN_BLOCKS, read_values


def inspect_gguf(files: Files, *, has_source: bool = False, weights: bool = False, track: Track = track_nothing) -> Inspection:
    """What the model is and what is wrong with it.

    has_source: whether a base was given, which is refused. weights: read the scales of blocks and the values of plain tensors.
    CheckpointError: not in a folder, several models, no header that can be read. ModuleNotFoundError: the extra `gguf`.
    """
    started = time.monotonic()
    if has_source:
        raise CheckpointError(f"{files.location}: is GGUF, which is not compared with a base; leave --source out")
    if files.is_local:
        require_extra("gguf")
    model = open_model(files)
    if weights:
        read_values(model, track)
    asked = [defect for defect in GGUF_DEFECTS if weights or defect.needs == "headers"]
    return Inspection(
        checkpoint=files.location,
        revision=files.revision,
        source=None,
        read="weights" if weights else "headers",
        facts=facts_of(model),
        findings=findings_of(asked, model),
        checked=tuple(defect.key for defect in asked),
        not_checked=tuple(_not_checked(model, weights)),
        seconds=time.monotonic() - started,
    )


def _not_checked(model: GgufModel, weights: bool) -> Iterator[str]:
    if model.architecture is not None and architecture_of(model) is None:
        yield f"embedding and last norm: the installed gguf has no architecture {shown(model.architecture, 60)}"
    if not weights:
        yield "values of weights: not read (--deep)"
    if model.hollow:
        yield f"values: {len(model.hollow)} files have headers and no data (nothing was ever written to them)"
    unread = sorted({t.kind for t in model.tensors.values() if not is_plain(t) and t.kind not in KNOWN_BLOCKS})
    if weights and unread:
        yield f"values of weights: where the scales of {', '.join(unread)} lie is not known here"
    for name in model.others:
        yield f"{shown(name)}: is no language model by its name; give the file"
    yield "kept tensors and errors against the base: GGUF is not compared with one"
