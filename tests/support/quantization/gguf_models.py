"""Models in GGUF files, written by the package `gguf`: with data, or hollow."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFWriter, quants

from assay_quantize.decoding.gguf_header import read_header

Keys = dict[str, Any]
Shapes = dict[str, tuple[str, tuple[int, ...]]]
"""Name -> type and shape, as torch has it."""

BLOCKS, DENSE, HIDDEN, INNER, EXPERTS, TOKENS = 5, 1, 64, 32, 4, 16
"""Of the small model: four blocks, the first one dense, and an MTP block."""


def small_keys(architecture: str = "glm4moe") -> Keys:
    """Metadata of the small model, as llama.cpp's converter writes those of GLM-4.5-Air."""
    of_model = {
        "block_count": BLOCKS, "context_length": 131072, "embedding_length": HIDDEN, "feed_forward_length": 2 * INNER,
        "attention.head_count": 4, "attention.head_count_kv": 2, "expert_count": EXPERTS, "expert_used_count": 2,
        "expert_feed_forward_length": INNER, "expert_shared_count": 1, "leading_dense_block_count": DENSE,
        "nextn_predict_layers": 1,
    }  # fmt: skip
    return {
        "general.file_type": 7, "general.quantized_by": "Somebody", "general.license": "mit",
        "general.base_model.count": 1, "general.base_model.0.name": "GLM 4.5 Air",
        "general.base_model.0.repo_url": "https://huggingface.co/zai-org/GLM-4.5-Air",
        **{f"{architecture}.{key}": value for key, value in of_model.items()},
        **tokenizer(TOKENS),
    }  # fmt: skip


def tokenizer(tokens: int) -> Keys:
    return {
        "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "glm4", "tokenizer.ggml.tokens": [f"t{n}" for n in range(tokens)],
        "tokenizer.ggml.token_type": [1] * tokens, "tokenizer.ggml.eos_token_id": tokens - 1,
        "tokenizer.chat_template": "{{ messages }}",
    }  # fmt: skip


def small_shapes() -> Shapes:
    shapes: Shapes = {
        "token_embd.weight": ("Q8_0", (TOKENS, HIDDEN)), "output_norm.weight": ("F32", (HIDDEN,)),
        "output.weight": ("Q8_0", (TOKENS, HIDDEN)),
    }  # fmt: skip
    for number in range(BLOCKS):
        block = f"blk.{number}."
        shapes |= {f"{block}{name}.weight": ("F32", (HIDDEN,)) for name in ("attn_norm", "post_attention_norm")}
        shapes |= {f"{block}attn_{part}.weight": ("Q8_0", (HIDDEN, HIDDEN)) for part in ("q", "k", "v", "output")}
        if number < DENSE:
            shapes |= {f"{block}ffn_{part}.weight": ("Q8_0", (2 * INNER, HIDDEN)) for part in ("gate", "up")}
            shapes[f"{block}ffn_down.weight"] = ("Q8_0", (HIDDEN, 2 * INNER))
            continue
        shapes[f"{block}ffn_gate_inp.weight"] = ("F32", (EXPERTS, HIDDEN))
        shapes[f"{block}exp_probs_b.bias"] = ("F32", (EXPERTS,))
        for end, stack in (("exps", (EXPERTS,)), ("shexp", ())):
            shapes |= {f"{block}ffn_{part}_{end}.weight": ("Q8_0", (*stack, INNER, HIDDEN)) for part in ("gate", "up")}
            shapes[f"{block}ffn_down_{end}.weight"] = ("Q8_0", (*stack, HIDDEN, INNER))
    block = f"blk.{BLOCKS - 1}.nextn."
    shapes[f"{block}eh_proj.weight"] = ("Q8_0", (HIDDEN, 2 * HIDDEN))
    return shapes | {f"{block}{name}.weight": ("F32", (HIDDEN,)) for name in ("enorm", "hnorm", "shared_head_norm")}


def write(path: Path, architecture: str, keys: Keys, shapes: Shapes, *, split: int = 0, hollow: bool = False) -> Path:
    """path: of the file. split: most tensors of a part; parts have names of their own. hollow: headers without data."""
    path.parent.mkdir(parents=True, exist_ok=True)
    writer = GGUFWriter(path, architecture, split_max_tensors=split)
    for key, value in keys.items():
        _add(writer, key, value)
    for seed, (name, (kind, shape)) in enumerate(shapes.items()):
        type_ = GGMLQuantizationType[kind]
        if hollow:
            per_block, block_bytes = GGML_QUANT_SIZES[type_]
            num_bytes = int(np.prod(shape)) // per_block * block_bytes
            writer.add_tensor_info(name, shape, np.dtype(np.float32), num_bytes, raw_dtype=type_)
        else:
            values = np.random.default_rng(seed).standard_normal(shape).astype(np.float32)
            writer.add_tensor(name, quants.quantize(values, type_), raw_dtype=type_)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file() if hollow else writer.write_tensors_to_file()
    writer.close()
    for part in path.parent.glob("*.gguf") if hollow else ():
        header = read_header(part)
        with part.open("r+b") as file:
            file.truncate(max((tensor.end for tensor in header.tensors), default=header.data_begin))
    return path


def _add(writer: GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, list):
        writer.add_array(key, value)
    elif isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    else:
        writer.add_string(key, value)


def put(path: Path, name: str, values: np.ndarray[Any, Any], *, at: int = 0) -> None:
    """Write bytes into the data of a tensor, `at` bytes behind its begin."""
    tensor = next(tensor for tensor in read_header(path).tensors if tensor.name == name)
    assert at + values.nbytes <= tensor.num_bytes
    with path.open("r+b") as file:
        file.seek(tensor.begin + at)
        file.write(values.tobytes())
