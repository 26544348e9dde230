"""Names of the files in a checkpoint folder, ours and other tools'."""

from __future__ import annotations

CONFIG = "config.json"
JOURNAL = "assay_journal.jsonl"
"""Of a checkpoint that is being made; gone when it is whole."""

WEIGHT_SUFFIXES = frozenset(
    {".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".h5", ".msgpack", ".onnx", ".npz", ".pkl", ".tar"}
)
