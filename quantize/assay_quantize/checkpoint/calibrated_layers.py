"""The layers that a calibration leaves for the engine: one safetensors file each, with the tensors as they are to be stored.

The digest of a layer is that of its tensors, not of its file, so that it can be computed from a checkpoint as well: SHA-256
over `NAME DTYPE SHAPE` and the bytes of each, by name. What the engine makes of constants (`weight_shape`) is not among them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from assay.errors import QuantizeError
from assay.records.plan import OutputTensor, TensorPlan
from assay_quantize.checkpoint.headers import TensorHeader, read_shard_header
from assay_quantize.checkpoint.shard_files import OpenShards
from assay_quantize.checkpoint.source_reader import STORAGE
from assay_quantize.formats.schemes import module_of

CONSTANTS = ("weight_shape", "input_global_scale")
"""Parts of a quantized weight that follow from plan and scheme."""

PIECE_BYTES = 4 << 20


def layer_file(layer: int) -> str:
    return f"layer-{layer:05d}.safetensors"


def parts_of(tensor: TensorPlan) -> list[OutputTensor]:
    """Outputs of a calibrated tensor that a layer's file holds."""
    return [output for output in tensor.outputs if output.name.rpartition(".")[2] not in CONSTANTS]


def layer_digest(outputs: Iterable[OutputTensor], read: Callable[[OutputTensor, Callable[[Any], None]], None]) -> str:
    """SHA-256 of a layer's tensors. read: hands the bytes of one to what it is given, in pieces."""
    digest = hashlib.sha256()
    for output in sorted(outputs, key=lambda output: output.name):
        digest.update(f"{output.name} {output.dtype} {'x'.join(map(str, output.shape))}\n".encode())
        read(output, digest.update)
    return digest.hexdigest()


class CalibratedFiles:
    """Layer files in a folder; safe to use from many threads at once. Files are opened when first read."""

    def __init__(self, folder: Path, layers: Iterable[int], *, is_smoothed: bool = False) -> None:
        """is_smoothed: weights were scaled before they were rounded, so they are not to be compared with the
        source's. Raises CheckpointError: a file that is not there or is damaged."""
        self._folder, self.is_smoothed = folder, is_smoothed
        self._headers: dict[str, TensorHeader] = {}
        for layer in layers:
            self._headers |= read_shard_header(folder, layer_file(layer))
        self._shards = OpenShards(folder)

    def close(self) -> None:
        """No read may be under way."""
        self._shards.close()

    def has(self, tensor: TensorPlan) -> bool:
        """Whether a calibration made the tensor."""
        return bool(tensor.outputs) and any(output.name in self._headers for output in tensor.outputs)

    def rows(self, tensor: TensorPlan, begin: int, end: int) -> dict[str, NDArray[Any]]:
        """Rows [begin, end) of every part of a weight, by local name, in storage form (`kernels.QuantizedRows.parts`).

        begin: a multiple of the rows that share a part's row; a zero point's int32 has those of eight.
        """
        rows = tensor.shape[0]
        parts = {}
        for output in parts_of(tensor):
            per_part = -(-rows // output.shape[0])
            first, last = begin // per_part, -(-end // per_part)
            per_row = output.num_bytes // output.shape[0]
            rows_of_part = self._read(output, first * per_row, last * per_row).view(STORAGE[output.dtype])
            part = output.name.removeprefix(f"{module_of(tensor.name)}.")
            parts[part] = rows_of_part.reshape(last - first, *output.shape[1:])
        return parts

    def whole(self, output: OutputTensor) -> NDArray[np.uint8]:
        """A tensor that is stored as it is."""
        return self._read(output, 0, output.num_bytes)

    def digest(self, tensors: Iterable[TensorPlan]) -> str:
        """Of the calibrated tensors of a layer, as they lie there."""

        def read(output: OutputTensor, take: Callable[[Any], None]) -> None:
            for begin in range(0, output.num_bytes, PIECE_BYTES):
                take(self._read(output, begin, min(begin + PIECE_BYTES, output.num_bytes)).data)

        return layer_digest((output for tensor in tensors for output in parts_of(tensor)), read)

    def _read(self, output: OutputTensor, begin: int, end: int) -> NDArray[np.uint8]:
        header = self._headers.get(output.name)
        if header is None or (header.dtype, tuple(header.shape)) != (output.dtype, tuple(output.shape)):
            raise QuantizeError(
                f"{self._folder}: {output.name} is not there as it was planned; delete the folder and run again"
            )
        flat = np.empty(end - begin, np.uint8)
        self._shards.read_into(flat.data, header.shard, header.begin + begin, "truncated; delete the folder and run again")
        return flat
