"""Makes the folders `autoround-*` beside it with AutoRound's own exporters.

Run it as `.venv/bin/python tests/support/exported/make_autoround.py`, in an empty folder: AutoRound leaves work behind.

`expected.safetensors` holds what AutoRound itself takes some of the weights for: its export of rounded weights (`fake`).
"""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

FOLDER = Path(__file__).parent
TOKENIZER = FOLDER.parents[2] / "examples" / "tiny_glm" / "checkpoint"
EXPORTS = {
    "autoround-auto_round": ("auto_round", "W4A16", {"group_size": 32}),
    "autoround-auto_gptq": ("auto_gptq", "W4A16", {"group_size": 32}),
    "autoround-auto_awq": ("auto_awq", "W4A16", {"group_size": 32}),
}
"""Folder -> format, scheme and settings of AutoRound."""
KEPT = ("self_attn.k_proj", "mlp.experts.1.down_proj")


def write_source(folder: Path) -> None:
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        num_hidden_layers=1, hidden_size=64, vocab_size=64, num_attention_heads=2, num_key_value_heads=2, head_dim=32,
        intermediate_size=64, moe_intermediate_size=64, num_experts=2, num_experts_per_tok=1, max_position_embeddings=512,
        tie_word_embeddings=True,
    )  # fmt: skip
    Qwen3MoeForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TOKENIZER / name, folder / name)


def exported(source: Path, out: Path, form: str, scheme: str, settings: dict[str, int]) -> Path:
    from auto_round import AutoRound

    rounder = AutoRound(
        str(source), scheme=scheme, iters=0, disable_opt_rtn=True, nsamples=1, seqlen=16, device_map="cpu", **settings
    )
    rounder.quantize_and_save(output_dir=str(out), format=form)
    return next(out.rglob("config.json")).parent


def main() -> None:
    with tempfile.TemporaryDirectory() as temporary:
        work = Path(temporary)
        write_source(work / "source")
        for name, (form, scheme, settings) in EXPORTS.items():
            try:
                made = exported(work / "source", work / name, form, scheme, settings)
                rounded = exported(work / "source", work / f"{name}-fake", "fake", scheme, settings)
            except Exception as error:  # noqa: BLE001  # said, and the others are made
                print(f"{name}: {type(error).__name__}: {error}", flush=True)
                continue
            values = {key: value for path in rounded.glob("*.safetensors") for key, value in load_file(path).items()}
            folder = FOLDER / name
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
            for path in (*made.glob("*.safetensors"), made / "config.json"):
                shutil.copy(path, folder / path.name)
            chosen = {f"model.layers.0.{part}.weight": values[f"model.layers.0.{part}.weight"].contiguous() for part in KEPT}
            save_file(chosen, folder / "expected.safetensors")
            print(name, json.loads((folder / "config.json").read_text())["quantization_config"], flush=True)


if __name__ == "__main__":
    main()
