"""The trained state as a Hugging Face checkpoint that vLLM serves: two shards, index, config, tokenizer, chat template."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable
from pathlib import Path

import torch
from data import EOS, SPECIAL
from model import Decoder, TinyConfig, TinyGlm
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import Tensor

CHAT_TEMPLATE = """[gMASK]<sop>
{%- for message in messages -%}
{%- if message.role == 'assistant' -%}
<|assistant|>
<think>{{ (message.reasoning_content or message.reasoning or '').strip() }}</think>
{{ message.content or '' }}
{%- else -%}
<|{{ message.role }}|>
{% if message.content is string -%}
{{ message.content }}
{%- else -%}
{%- for part in message.content if part.type == 'text' -%}{{ part.text }}{%- endfor -%}
{%- endif -%}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
<|assistant|>
{% if enable_thinking is defined and not enable_thinking -%}
<think></think>
{% endif -%}
{%- endif -%}
"""


def tensors_of(model: Decoder) -> dict[str, Tensor]:
    """Checkpoint name -> tensor; BF16 but for the router biases, which stay FP32."""
    out: dict[str, Tensor] = {
        "model.embed_tokens.weight": model.embed_tokens.weight,
        "model.norm.weight": model.norm.weight,
        "lm_head.weight": model.lm_head.weight,
    }
    for i, layer in enumerate(model.blocks()):
        prefix = f"model.layers.{i}."
        for name, value in layer.state_dict().items():
            if name.startswith("mlp.w_"):
                part = name.removeprefix("mlp.w_")
                out |= {f"{prefix}mlp.experts.{e}.{part}_proj.weight": w for e, w in enumerate(value)}
            else:
                out[prefix + name.replace("mlp.gate_weight", "mlp.gate.weight").replace("mlp.e_score", "mlp.gate.e_score")] = (
                    value
                )
    out |= model.more_tensors()
    fp32 = "e_score_correction_bias"
    return {
        n: t.detach().to(torch.float32 if n.endswith(fp32) else torch.bfloat16).contiguous().clone() for n, t in out.items()
    }


def export(model: Decoder, tokenizer: Tokenizer, folder: Path) -> None:
    """Write the checkpoint; the index comes last."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = tensors_of(model)
    names = sorted(tensors)
    half, size, cut = sum(t.nbytes for t in tensors.values()) / 2, 0, 0
    while size < half:
        size, cut = size + tensors[names[cut]].nbytes, cut + 1
    weight_map: dict[str, str] = {}
    for number, part in enumerate((names[:cut], names[cut:]), 1):
        file = f"model-{number:05d}-of-00002.safetensors"
        save_file({name: tensors[name] for name in part}, folder / file, metadata={"format": "pt"})
        (folder / file).chmod(0o644)
        weight_map |= dict.fromkeys(part, file)
    eos = [tokenizer.token_to_id(name) for name in EOS]
    config = {**model.c.to_hf(), "eos_token_id": eos, "pad_token_id": eos[0]}
    write(folder / "config.json", config)
    write(
        folder / "generation_config.json", {"eos_token_id": eos, "pad_token_id": eos[0], "do_sample": True, "temperature": 1.0}
    )
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
    write(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": model.c.max_position_embeddings,
            "eos_token": EOS[0],
            "pad_token": EOS[0],
            "extra_special_tokens": [name for name in SPECIAL if name not in ("<think>", "</think>", EOS[0])],
            "clean_up_tokenization_spaces": False,
        },
    )
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    total = sum(t.nbytes for t in tensors.values())
    write(
        folder / "model.safetensors.index.json",
        {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))},
    )


def write(path: Path, data: object) -> None:
    path.write_text(json.dumps(data, indent=2, ensure_ascii=False) + "\n")


def tiny_glm(vocab_size: int) -> Decoder:
    return TinyGlm(TinyConfig(vocab_size))


def load_state(state: Path, build: Callable[[int], Decoder] = tiny_glm) -> tuple[Decoder, Tokenizer]:
    """The model as training left it in `state`; `build` makes it for a vocabulary."""
    tokenizer = Tokenizer.from_file(str(state / "tokenizer.json"))
    model = build(math.ceil(tokenizer.get_vocab_size() / 64) * 64)
    model.load_state_dict(torch.load(state / "state.pt", weights_only=True)["model"])
    return model.eval(), tokenizer


@torch.no_grad()
def round_to_bf16(model: Decoder) -> None:
    """What the exported file holds: every parameter in BF16 (router biases are buffers, and stay FP32)."""
    for parameter in model.parameters():
        parameter.copy_(parameter.bfloat16())


def main(build: Callable[[int], Decoder] = tiny_glm) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--state", type=Path, default=Path("state"))
    parser.add_argument("--out", type=Path, default=Path("checkpoint"))
    args = parser.parse_args()
    export(*load_state(args.state, build), args.out)


if __name__ == "__main__":
    main()
