"""The source as verification needs it: its bytes, and what its weights were rounded with."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np
from numpy.typing import NDArray

from assay.records.plan import Plan, TensorPlan
from assay_quantize.checkpoint.checkpoint import Checkpoint
from assay_quantize.checkpoint.headers import TensorHeader
from assay_quantize.checkpoint.importance import Importance, load_importance
from assay_quantize.checkpoint.source_reader import SourceReader
from assay_quantize.formats.schemes import SOURCE_DTYPES
from assay_quantize.plan.calibrated import calibrated_tensors, scales_inputs
from assay_quantize.plan.slabs import observer_of
from assay_quantize.verify.amax import GroupAmax
from assay_quantize.verify.files import StoredReader


@dataclass(frozen=True)
class Original:
    """A context manager. plain: the same files by the safetensors library's headers. importance: channel weights of the scale
    search. recomputes: False where the plan used channel weights and nobody gave them: then only errors are bounded.
    calibrated: weights whose codes depend on the text that they were calibrated with; has_own_scales: so
    do their scales; is_smoothed: and they were scaled before they were rounded."""

    reader: SourceReader
    plain: StoredReader
    headers: dict[str, TensorHeader]
    amax: GroupAmax
    observer: str
    importance: Importance | None
    recomputes: bool
    calibrated: frozenset[str] = frozenset()
    has_own_scales: bool = False
    is_smoothed: bool = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        with ExitStack() as both:
            both.callback(self.reader.close)
            both.callback(self.plain.close)

    def can_make(self, tensor: TensorPlan) -> bool:
        """Whether the source alone says what every byte of a quantized weight must be."""
        return self.recomputes and tensor.name not in self.calibrated

    def importance_of(self, tensor: TensorPlan) -> NDArray[np.float32] | None:
        """Channel weights of a quantized weight; None: it has none, or its scales are not searched."""
        return (
            None
            if self.importance is None or self.observer != "mse"
            else self.importance.for_weight(tensor.name, tensor.shape[1])
        )

    def is_plain(self, tensor: TensorPlan) -> bool:
        """Whether a file of the source holds the weight under its own name, in a dtype that needs no scales."""
        header = self.headers.get(tensor.name)
        return header is not None and header.dtype in SOURCE_DTYPES and header.shape == tuple(tensor.shape)


def open_original(source: Checkpoint, headers: dict[str, TensorHeader], plan: Plan, importance: Path | None) -> Original:
    """headers: of all shards, by the safetensors library. CheckpointError: `importance` is no such file."""
    assert source.folder is not None, "opened as a folder"
    loaded = None if importance is None else load_importance(importance)
    reader = SourceReader(source)
    return Original(
        reader=reader,
        plain=StoredReader(source.folder, headers),
        headers=headers,
        amax=GroupAmax(plan, reader),
        observer=observer_of(plan),
        importance=loaded,
        # scales of activations come from the file as well, and no byte of a weight with them
        recomputes=observer_of(plan) != "mse" or plan.importance_sha256 == (None if loaded is None else loaded.sha256),
        calibrated=frozenset(tensor.name for found in calibrated_tensors(plan).values() for tensor in found),
        is_smoothed=scales_inputs(plan),
        has_own_scales=plan.calibrated is not None and (plan.calibrated.method != "gptq" or observer_of(plan) != "minmax"),
    )
