"""Published models in GGUF files, hollow and cut to four blocks, four experts and 1,024 tokens: names, types and widths as
public reports have them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import hollow
import hollow_deepseek_v4
from gguf_models import Keys, Shapes, tokenizer, write
from hollow_moe import MIXTRAL

BLOCKS, EXPERTS, TOKENS = 4, 4, 1024


def _keys(architecture: str, config: dict[str, Any], *, blocks: int = BLOCKS, inner: int | None = None, **more: Any) -> Keys:
    told = {
        "block_count": blocks, "context_length": config["max_position_embeddings"], "embedding_length": config["hidden_size"],
        "expert_count": EXPERTS, "expert_used_count": 2, "expert_feed_forward_length": inner, **more,
    }  # fmt: skip
    return {f"{architecture}.{key}": value for key, value in told.items() if value is not None} | tokenizer(TOKENS)


def _outside(hidden: int, embedding: str, head: str) -> Shapes:
    return {
        "token_embd.weight": (embedding, (TOKENS, hidden)), "output_norm.weight": ("F32", (hidden,)),
        "output.weight": (head, (TOKENS, hidden)),
    }  # fmt: skip


def _experts(block: str, kind: str, inner: int, hidden: int, end: str, stack: tuple[int, ...]) -> Shapes:
    return {
        **{f"{block}ffn_{part}_{end}.weight": (kind, (*stack, inner, hidden)) for part in ("gate", "up")},
        f"{block}ffn_down_{end}.weight": (kind, (*stack, hidden, inner)),
    }


def deepseek_r1_q8(folder: Path) -> Path:
    """Three dense blocks, then experts; `kv_b` in two halves; in two parts. Whole, it has 1,086 tensors, 361 of them F32."""
    config, _ = hollow.MODELS["deepseek-v3"]
    hidden, inner, heads = config["hidden_size"], config["moe_intermediate_size"], config["num_attention_heads"]
    rank, nope, value = config["kv_lora_rank"], config["qk_nope_head_dim"], config["v_head_dim"]
    shapes = _outside(hidden, "Q8_0", "Q8_0")
    for number in range(BLOCKS):
        block, query = f"blk.{number}.", config["q_lora_rank"]
        norms = {"attn_norm": hidden, "attn_q_a_norm": query, "attn_kv_a_norm": rank, "ffn_norm": hidden}
        shapes |= {f"{block}{name}.weight": ("F32", (size,)) for name, size in norms.items()}
        weights: dict[str, tuple[int, ...]] = {
            "attn_q_a": (query, hidden), "attn_q_b": (heads * (nope + 64), query), "attn_kv_a_mqa": (rank + 64, hidden),
            "attn_k_b": (heads, rank, nope), "attn_v_b": (heads, value, rank), "attn_output": (hidden, heads * value),
        }  # fmt: skip
        if number < 3:
            wide = config["intermediate_size"]
            weights |= {"ffn_gate": (wide, hidden), "ffn_up": (wide, hidden), "ffn_down": (hidden, wide)}
        else:
            shapes[f"{block}ffn_gate_inp.weight"] = ("F32", (EXPERTS, hidden))
            shapes[f"{block}exp_probs_b.bias"] = ("F32", (EXPERTS,))
            shapes |= _experts(block, "Q8_0", inner, hidden, "exps", (EXPERTS,))
            shapes |= _experts(block, "Q8_0", inner, hidden, "shexp", ())
        shapes |= {f"{block}{name}.weight": ("Q8_0", shape) for name, shape in weights.items()}
    keys = _keys("deepseek2", config, inner=inner, leading_dense_block_count=3, expert_shared_count=1)
    keys["deepseek2.expert_gating_func"] = 2
    write(folder / "DeepSeek-R1-0528-Q8_0.gguf", "deepseek2", keys, shapes, split=40, hollow=True)
    return folder


def qwen36_with_mtp(folder: Path) -> Path:
    """Three blocks of linear attention, one of full attention, and an MTP block behind them. Whole, it has 753 tensors."""
    config = hollow.MODELS["qwen3.5-35b-a3b"][0]["text_config"]
    hidden, inner, kind = config["hidden_size"], config["moe_intermediate_size"], "IQ4_XS"
    shapes = _outside(hidden, "Q5_K", "Q6_K")
    for number in range(BLOCKS + 1):
        block, is_full = f"blk.{number}.", number >= BLOCKS - 1
        plain: dict[str, tuple[int, ...]] = {
            "attn_norm.weight": (hidden,), "post_attention_norm.weight": (hidden,), "ffn_gate_inp.weight": (EXPERTS, hidden),
            "ffn_gate_inp_shexp.weight": (hidden,),
        }  # fmt: skip
        if is_full:
            plain |= {"attn_q_norm.weight": (256,), "attn_k_norm.weight": (256,)}
            weights = {
                "attn_q": (8192, hidden),
                "attn_k": (512, hidden),
                "attn_v": (512, hidden),
                "attn_output": (hidden, 4096),
            }
        else:
            plain |= {"ssm_conv1d.weight": (8192, 4), "ssm_dt.bias": (32,), "ssm_a": (32,), "ssm_norm.weight": (128,)}
            weights = {"attn_qkv": (8192, hidden), "attn_gate": (4096, hidden), "ssm_alpha": (32, hidden),
                       "ssm_beta": (32, hidden), "ssm_out": (hidden, 4096)}  # fmt: skip
        shapes |= {f"{block}{name}": ("F32", shape) for name, shape in plain.items()}
        shapes |= {f"{block}{name}.weight": (kind, shape) for name, shape in weights.items()}
        shapes |= _experts(block, kind, inner, hidden, "exps", (EXPERTS,)) | _experts(block, kind, inner, hidden, "shexp", ())
    block = f"blk.{BLOCKS}.nextn."
    shapes[f"{block}eh_proj.weight"] = ("Q8_0", (hidden, 2 * hidden))
    shapes |= {f"{block}{name}.weight": ("F32", (hidden,)) for name in ("enorm", "hnorm", "shared_head_norm")}
    keys = _keys("qwen35moe", config, blocks=BLOCKS + 1, inner=inner, nextn_predict_layers=1)
    write(folder / "Qwen3.6-35B-A3B-MTP-IQ4_XS-Q8nextn.gguf", "qwen35moe", keys, shapes, hollow=True)
    return folder


def mixtral_of_single_experts(folder: Path) -> Path:
    """Converted in December 2023: each expert is a tensor of its own."""
    hidden, inner = MIXTRAL["hidden_size"], MIXTRAL["intermediate_size"]
    shapes = _outside(hidden, "Q5_K", "Q6_K")
    for number in range(BLOCKS):
        block = f"blk.{number}."
        shapes |= {f"{block}{name}.weight": ("F32", (hidden,)) for name in ("attn_norm", "ffn_norm")}
        shapes |= {f"{block}attn_{part}.weight": ("Q5_K", (hidden, hidden)) for part in ("q", "output")}
        shapes |= {f"{block}attn_{part}.weight": ("Q8_0", (1024, hidden)) for part in ("k", "v")}
        shapes[f"{block}ffn_gate_inp.weight"] = ("F16", (EXPERTS, hidden))
        for expert in range(EXPERTS):
            shapes |= {f"{block}ffn_{part}.{expert}.weight": ("Q5_K", (inner, hidden)) for part in ("gate", "up")}
            shapes[f"{block}ffn_down.{expert}.weight"] = ("Q5_K", (hidden, inner))
    keys = _keys("llama", MIXTRAL, feed_forward_length=inner) | {"tokenizer.ggml.model": "llama"}
    write(folder / "mixtral-8x7b-instruct-v0.1.Q5_K_M.gguf", "llama", keys, shapes, hollow=True)
    return folder


def deepseek_v4_without_mtp(folder: Path) -> Path:
    """`nextn_predict_layers` is 1, `block_count` that of the blocks before: no MTP block is stored."""
    config = hollow_deepseek_v4.DEEPSEEK_V4_FLASH_CONFIG
    hidden, inner = config["hidden_size"], config["moe_intermediate_size"]
    shapes = _outside(hidden, "F16", "Q8_0")
    for number in range(BLOCKS):
        block = f"blk.{number}."
        norms = {"attn_norm": hidden, "attn_q_a_norm": 1024, "attn_kv_a_norm": 512, "ffn_norm": hidden, "attn_sinks": 64}
        shapes |= {f"{block}{name}.weight": ("F32", (size,)) for name, size in norms.items()}
        weights = {"attn_kv": (512, hidden), "attn_q_a": (1024, hidden), "attn_q_b": (32768, 1024),
                   "attn_output_a": (8192, 4096), "attn_output_b": (hidden, 8192)}  # fmt: skip
        shapes |= {f"{block}{name}.weight": ("Q8_0", shape) for name, shape in weights.items()}
        shapes[f"{block}ffn_gate_inp.weight"] = ("F16", (EXPERTS, hidden))
        shapes[f"{block}exp_probs_b.bias"] = ("F32", (EXPERTS,))
        shapes |= _experts(block, "Q4_K", inner, hidden, "exps", (EXPERTS,))
        shapes |= _experts(block, "Q8_0", inner, hidden, "shexp", ())
    keys = _keys("deepseek4", config, inner=inner, nextn_predict_layers=1)
    write(folder / "DeepSeek-V4-Flash-Q4KExperts.gguf", "deepseek4", keys, shapes, hollow=True)
    return folder
