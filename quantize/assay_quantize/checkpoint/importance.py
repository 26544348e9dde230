"""Channel weights for the scale search (`assay quantize --importance FILE`): how much each input channel of a weight matters.

The file is one safetensors file. Under the name of a weight (`model.layers.3.mlp.experts.0.down_proj.weight`) it has an FP32
vector of one number for each input channel, as many as the weight has columns: the mean over calibration tokens of the squared
activation, which is what llama.cpp calls an importance matrix. Numbers are finite and >= 0; only their ratios within a weight
matter. Weights the file does not name are searched unweighted (experts that no calibration token reached, say).

Beside them lie largest magnitudes, FP32 [1], from which scales are made that do not change while a checkpoint is served
(`plan/calibrated.py`): of what entered a module, `MODULE.input_amax`, and of the keys and values of attention with heads,
`MODULE.k_amax` and `MODULE.v_amax`.

Its metadata may say of which weights it is (`assay_weights`, from `identity.py`): it is then refused for others.

Values are read when they are asked for: for a model of 744 B parameters they are a gigabyte.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from assay.errors import CheckpointError, PlanError
from assay.quantities import and_more
from assay.records.base import sha256_of_file
from assay_quantize.checkpoint.checkpoint import Checkpoint
from assay_quantize.checkpoint.headers import TensorHeader, read_shard_header
from assay_quantize.checkpoint.identity import weights_sha256

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

INPUT_AMAX, K_AMAX, V_AMAX = "input_amax", "k_amax", "v_amax"
WEIGHTS = "assay_weights"
"""In the metadata."""


@dataclass(frozen=True)
class Importance:
    """An open calibration file. Safe to use from several threads."""

    path: Path
    headers: dict[str, TensorHeader]
    weights_sha256: str | None = None
    """Of the checkpoint that it was made from. None: it does not say."""

    @functools.cached_property
    def sha256(self) -> str:
        """Of the file: part of a plan's identity, since the bytes that are written depend on it."""
        return sha256_of_file(self.path)

    def for_weight(self, name: str, columns: int) -> NDArray[np.float32] | None:
        """FP32 [columns] for the weight called `name`, None if the file does not name it. Raises PlanError."""
        header = self.headers.get(name)
        if header is None:
            return None
        if tuple(header.shape) != (columns,):
            raise PlanError(
                f"{self.path}: {name} has shape {list(header.shape)}, the weight has {columns} columns: one number for each is "
                "needed; make the file from this model"
            )
        return self._read(name)

    def largest(self, name: str) -> float | None:
        """The largest magnitude called `name` (`MODULE.input_amax`, ...); None: the file has none. Raises PlanError."""
        if name not in self.headers:
            return None
        return float(self._read(name)[0])

    def _read(self, name: str) -> NDArray[np.float32]:
        import numpy as np

        header = self.headers[name]
        try:
            with self.path.open("rb") as file:
                file.seek(header.begin)
                data = file.read(header.num_bytes)
        except OSError as error:
            raise PlanError(f"{self.path}: cannot be read: {error.strerror}") from None
        values = np.frombuffer(data, "<f4")
        if values.shape != header.shape:
            raise PlanError(f"{self.path}: {name} is cut off; the file changed while it was read")
        if not (np.isfinite(values) & (values >= 0)).all():
            raise PlanError(
                f"{self.path}: {name} has values that are negative or not finite; mean squares and magnitudes are neither"
            )
        return values

    def coverage(self, names: Iterable[str]) -> str:
        """One line: how many of the weights `names` the file names. Raises PlanError when it names none of them."""
        weights = sorted(set(names))
        unnamed = [name for name in weights if name not in self.headers]
        if weights and len(unnamed) == len(weights):
            raise PlanError(
                f"{self.path}: it names none of the {len(weights)} quantized weights (the first is {weights[0]}, its own first "
                f"{min(self.headers, default='nothing')}); tensors must have the weights' names"
            )
        line = f"{self.path.name}: channel weights for {len(weights) - len(unnamed)} of {len(weights)} quantized weights"
        return f"{line}; searched unweighted: {and_more(unnamed)}" if unnamed else line


def load_importance(path: Path) -> Importance:
    """Open a calibration file; reads its header only.

    Raises PlanError: no such file, a damaged one, tensors that are not FP32 vectors.
    """
    from safetensors import SafetensorError, safe_open

    if not path.is_file():
        raise PlanError(f"{path}: there is no such file; --importance takes a safetensors file of FP32 vectors, one per weight")
    try:
        headers = read_shard_header(path.resolve().parent, path.resolve().name)
    except CheckpointError as error:
        raise PlanError(f"{error}; --importance takes a safetensors file of FP32 vectors, one per weight") from None
    for header in headers.values():
        if header.dtype != "F32" or len(header.shape) != 1:
            raise PlanError(
                f"{path}: {header.name} is {header.dtype} {list(header.shape)}; every tensor must be an F32 vector, one number "
                "for each input channel of the weight of that name"
            )
    try:
        with safe_open(path, framework="numpy") as file:
            metadata = file.metadata() or {}
    except (SafetensorError, OSError) as error:
        raise PlanError(f"{path}: refused by the safetensors library: {error}") from None
    return Importance(path, headers, metadata.get(WEIGHTS))


def check_weights(importance: Importance, checkpoint: Checkpoint) -> bool:
    """Whether it is known that the file is of a checkpoint's weights. PlanError: it is of others."""
    if importance.weights_sha256 is None or (sha256 := weights_sha256(checkpoint)) is None:
        return False
    if sha256 != importance.weights_sha256:
        raise PlanError(
            f"{importance.path}: was made from other weights than those of {checkpoint.location}, and says what enters their "
            f"channels, not these: make one with `assay calibrate {checkpoint.location} --out FILE`"
        )
    return True
