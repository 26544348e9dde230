"""The data of a checkpoint against those of its base: kept tensors byte for byte, quantized ones by their error."""

from __future__ import annotations

from assay.callbacks import Track
from assay_quantize.checkpoint.headers import TensorHeader
from assay_quantize.inspection.subject import Subject
from assay_quantize.inspection.values import hollow_shards, pieces


def compare_with_base(subject: Subject, base: Subject, *, decode: bool, track: Track) -> None:
    """Fill `subject.values.differing` and, with `decode`, `errors`."""
    kept = [
        (header, other)
        for name, header in subject.tensors.items()
        if (other := base.tensors.get(name)) is not None and _is_comparable(subject, base, header, other)
    ]
    if not (subject.files.is_local and base.files.is_local) and not decode:
        subject.values.not_looked_at.append("kept tensors byte for byte: not both are folders (--deep reads them all the same)")
        return
    with track("comparing kept tensors", sum(header.num_bytes for header, _ in kept)) as progress:
        for header, other in kept:
            differing = _differing_bytes(subject, base, header, other)
            if differing:
                what = f"{differing:,} of {header.num_bytes:,} bytes differ from the base's"
                subject.values.differing[header.name] = what
            progress(header.name, header.num_bytes)


def _is_comparable(subject: Subject, base: Subject, header: TensorHeader, other: TensorHeader) -> bool:
    """Stored alike in both, and not as codes: what belongs to a weight that is quantized in only one is no kept tensor."""
    own, theirs = (side.stored.weights.get(header.name.rpartition(".")[0]) for side in (subject, base))
    if (header.dtype, header.shape) != (other.dtype, other.shape) or (own is None) != (theirs is None):
        return False
    if own is not None and theirs is not None and own.form != theirs.form:
        return False
    return header.shard not in hollow_shards(subject) and other.shard not in hollow_shards(base)


def _differing_bytes(subject: Subject, base: Subject, header: TensorHeader, other: TensorHeader) -> int:
    import numpy as np

    count = 0
    for own, theirs in zip(pieces(subject, header), pieces(base, other), strict=True):
        if own != theirs:
            count += int(np.count_nonzero(np.frombuffer(own, np.uint8) != np.frombuffer(theirs, np.uint8)))
    return count
