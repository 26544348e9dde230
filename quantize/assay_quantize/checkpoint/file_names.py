"""Names of the files in a checkpoint folder, ours and other tools'."""

from __future__ import annotations

CONFIG = "config.json"

WEIGHT_SUFFIXES = frozenset(
    {".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".h5", ".msgpack", ".onnx", ".npz", ".pkl", ".tar"}
)
