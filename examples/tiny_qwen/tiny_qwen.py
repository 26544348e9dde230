"""tiny-qwen: the Qwen3-MoE architecture, trained, exported and scored by what examples/tiny_glm has for it.

python tiny_qwen.py train --out state --phases ...   # as tiny_glm/train.py
python tiny_qwen.py export --state state --out checkpoint
python tiny_qwen.py score --state state

Same maths as `Qwen3MoeForCausalLM` in transformers and vLLM: no dense layer, no shared expert, no MTP block; the router's
softmax is over all experts, and the weights of the chosen ones add up to one; q/k norm per head, no bias, whole heads rotated.
"""

from __future__ import annotations

import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor

TINY_GLM = Path(__file__).resolve().parent.parent / "tiny_glm"
sys.path.insert(0, str(TINY_GLM))
import export  # noqa: E402
import score  # noqa: E402
import train  # noqa: E402
from model import Decoder, Experts, Layer  # noqa: E402

BALANCE_LOSS_WEIGHT = 0.01


@dataclass(frozen=True)
class TinyQwenConfig:
    vocab_size: int
    hidden_size: int = 256
    num_hidden_layers: int = 4
    num_experts: int = 8
    num_experts_per_tok: int = 2
    moe_intermediate_size: int = 128
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 64
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-6
    max_position_embeddings: int = 4096

    def to_hf(self) -> dict[str, Any]:
        """config.json of the exported checkpoint."""
        return {
            "architectures": ["Qwen3MoeForCausalLM"],
            "model_type": "qwen3_moe",
            **asdict(self),
            "intermediate_size": 512,  # of dense layers, of which there are none
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
            "norm_topk_prob": True,
            "hidden_act": "silu",
            "attention_bias": False,
            "attention_dropout": 0.0,
            "use_sliding_window": False,
            "tie_word_embeddings": False,
            "router_aux_loss_coef": BALANCE_LOSS_WEIGHT,
            "initializer_range": 0.02,
            "use_cache": True,
            "dtype": "bfloat16",
        }


class QwenMoe(Experts):
    """balance: loss that is least, and 1, where all experts get the same load (Fedus et al., 2021); of the last forward."""

    def __init__(self, c: TinyQwenConfig) -> None:
        super().__init__(c.num_experts, c.hidden_size, c.moe_intermediate_size)
        self.top_k = c.num_experts_per_tok
        self.balance = torch.ones(())

    def forward(self, x_BTD: Tensor) -> Tensor:
        x_ND = x_BTD.reshape(-1, x_BTD.shape[-1])
        scores_NE = self.scores(x_ND).softmax(-1)
        chosen_NK = scores_NE.topk(self.top_k, -1).indices
        share_E = F.one_hot(chosen_NK, scores_NE.shape[1]).float().mean((0, 1))
        self.balance = scores_NE.shape[1] * (share_E * scores_NE.mean(0)).sum()
        return self.mix(x_ND, scores_NE, chosen_NK).view(x_BTD.shape)


class TinyQwen(Decoder):
    def __init__(self, c: TinyQwenConfig) -> None:
        super().__init__(c, lambda i: Layer(c, lambda: QwenMoe(c), bias=False))
        self.start()

    def more_losses(self, hidden_BTD: Tensor, ids_BT: Tensor, weights_BT: Tensor) -> dict[str, tuple[float, Tensor]]:
        balance = torch.stack([layer.mlp.balance for layer in self.layers]).mean()
        return {"balance_loss": (BALANCE_LOSS_WEIGHT, balance)}


def tiny_qwen(vocab_size: int) -> TinyQwen:
    return TinyQwen(TinyQwenConfig(vocab_size))


def tokenizer_of_tiny_glm() -> Tokenizer:
    return Tokenizer.from_file(str(TINY_GLM / "checkpoint" / "tokenizer.json"))


COMMANDS = {
    "train": lambda: train.main(tiny_qwen, "tiny-qwen", tokenizer_of_tiny_glm),
    "export": lambda: export.main(tiny_qwen),
    "score": lambda: score.main(tiny_qwen),
}


if __name__ == "__main__":
    if len(sys.argv) < 2 or sys.argv[1] not in COMMANDS:
        raise SystemExit(f"usage: tiny_qwen.py {{{','.join(COMMANDS)}}} ...")
    command = COMMANDS[sys.argv.pop(1)]
    command()
