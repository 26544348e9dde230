"""tiny-glm: the GLM-4-MoE architecture with one MTP block, in plain PyTorch, small enough to train on two CPU cores.

Same maths as `Glm4MoeForCausalLM` in transformers and vLLM (parameter names are those of the checkpoint, experts stacked):
sigmoid router whose bias takes part in the choice only, normalised top-k weights, q/k norm per head, rotary embedding on half
of each head.

Shapes: B batch, T tokens, D hidden, H heads, K key-value heads, C head width, E experts, F expert width, V vocabulary.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class TinyConfig:
    vocab_size: int
    hidden_size: int = 256
    num_hidden_layers: int = 4
    first_k_dense_replace: int = 1
    intermediate_size: int = 512
    n_routed_experts: int = 8
    num_experts_per_tok: int = 2
    moe_intermediate_size: int = 128
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 64
    rope_theta: float = 10000.0
    partial_rotary_factor: float = 0.5
    rms_norm_eps: float = 1e-5
    max_position_embeddings: int = 4096

    def to_hf(self) -> dict[str, Any]:
        """config.json of the exported checkpoint."""
        return {
            "architectures": ["Glm4MoeForCausalLM"],
            "model_type": "glm4_moe",
            **asdict(self),
            "hidden_act": "silu",
            "attention_bias": True,
            "attention_dropout": 0.0,
            "use_qk_norm": True,
            "n_shared_experts": 1,
            "norm_topk_prob": True,
            "routed_scaling_factor": 1.0,
            "n_group": 1,
            "topk_group": 1,
            "num_nextn_predict_layers": 1,
            "tie_word_embeddings": False,
            "initializer_range": 0.02,
            "use_cache": True,
            "dtype": "bfloat16",
        }


class RMSNorm(nn.Module):
    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(width)), eps

    def forward(self, x: Tensor) -> Tensor:
        x = x.float()
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps) * self.weight


class Attention(nn.Module):
    def __init__(self, c: TinyConfig) -> None:
        super().__init__()
        self.c = c
        self.q_proj = nn.Linear(c.hidden_size, c.num_attention_heads * c.head_dim)
        self.k_proj = nn.Linear(c.hidden_size, c.num_key_value_heads * c.head_dim)
        self.v_proj = nn.Linear(c.hidden_size, c.num_key_value_heads * c.head_dim)
        self.o_proj = nn.Linear(c.num_attention_heads * c.head_dim, c.hidden_size, bias=False)
        self.q_norm, self.k_norm = RMSNorm(c.head_dim, c.rms_norm_eps), RMSNorm(c.head_dim, c.rms_norm_eps)

    def forward(self, x_BTD: Tensor, rope: tuple[Tensor, Tensor], past: list[Tensor] | None) -> Tensor:
        B, T, _ = x_BTD.shape
        c = self.c
        q = rotate(self.q_norm(self.q_proj(x_BTD).view(B, T, -1, c.head_dim)), rope).transpose(1, 2)
        k = rotate(self.k_norm(self.k_proj(x_BTD).view(B, T, -1, c.head_dim)), rope).transpose(1, 2)
        v = self.v_proj(x_BTD).view(B, T, -1, c.head_dim).transpose(1, 2)
        q, k = q.to(v.dtype), k.to(v.dtype)
        if past is not None:
            if past:
                k, v = torch.cat([past[0], k], 2), torch.cat([past[1], v], 2)
            past[:] = [k, v]
        repeat = c.num_attention_heads // c.num_key_value_heads
        k, v = k.repeat_interleave(repeat, 1), v.repeat_interleave(repeat, 1)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=T > 1)
        return self.o_proj(out.transpose(1, 2).reshape(B, T, -1))


def rotate(x_BTHC: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
    """Rotary embedding on the first `partial_rotary_factor` of each head, halves paired (neox style)."""
    cos, sin = rope
    width = cos.shape[-1]
    turned, rest = x_BTHC[..., :width], x_BTHC[..., width:]
    first, second = turned.chunk(2, -1)
    return torch.cat([turned * cos + torch.cat([-second, first], -1) * sin, rest], -1)


class Mlp(nn.Module):
    def __init__(self, hidden: int, width: int) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(hidden, width, bias=False), nn.Linear(hidden, width, bias=False)
        self.down_proj = nn.Linear(width, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Moe(nn.Module):
    def __init__(self, c: TinyConfig) -> None:
        super().__init__()
        self.c = c
        E, Fw, D = c.n_routed_experts, c.moe_intermediate_size, c.hidden_size
        self.gate_weight = nn.Parameter(torch.randn(E, D) * 0.02)
        self.register_buffer("e_score_correction_bias", torch.zeros(E))
        self.w_gate = nn.Parameter(torch.randn(E, Fw, D) * D**-0.5)
        self.w_up = nn.Parameter(torch.randn(E, Fw, D) * D**-0.5)
        self.w_down = nn.Parameter(torch.randn(E, D, Fw) * Fw**-0.5 * 0.3)
        self.shared_experts = Mlp(D, Fw)
        self.load = torch.zeros(E)

    def forward(self, x_BTD: Tensor) -> Tensor:
        x_ND = x_BTD.reshape(-1, x_BTD.shape[-1])
        with torch.autocast("cpu", enabled=False):
            scores_NE = torch.sigmoid(F.linear(x_ND.float(), self.gate_weight.float()))
        chosen_NK = (scores_NE + self.e_score_correction_bias).topk(self.c.num_experts_per_tok, -1).indices
        weights_NK = scores_NE.gather(1, chosen_NK)
        weights_NK = weights_NK / (weights_NK.sum(-1, keepdim=True) + 1e-20)
        flat = chosen_NK.reshape(-1)
        order = flat.argsort(stable=True)
        counts = flat.bincount(minlength=self.c.n_routed_experts)
        if self.training:
            self.load += counts
        token_of = order // self.c.num_experts_per_tok
        x_sorted = x_ND.index_select(0, token_of)
        w_sorted = weights_NK.reshape(-1).index_select(0, order)
        outs = []
        for expert, piece in enumerate(x_sorted.split(counts.tolist())):
            hidden = F.silu(F.linear(piece, self.w_gate[expert])) * F.linear(piece, self.w_up[expert])
            outs.append(F.linear(hidden, self.w_down[expert]))
        y_sorted = torch.cat(outs) * w_sorted[:, None]
        out = torch.zeros(x_ND.shape, dtype=y_sorted.dtype).index_add(0, token_of, y_sorted)
        return (out + self.shared_experts(x_ND)).view(x_BTD.shape)


class Layer(nn.Module):
    def __init__(self, c: TinyConfig, dense: bool) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.self_attn = Attention(c)
        self.post_attention_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.mlp = Mlp(c.hidden_size, c.intermediate_size) if dense else Moe(c)

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor], past: list[Tensor] | None = None) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), rope, past)
        return x + self.mlp(self.post_attention_layernorm(x))


class TinyGlm(nn.Module):
    """`forward` -> final-normed hidden states; `logits`, `mtp_hidden`, `mtp_logits` go on from there."""

    def __init__(self, c: TinyConfig) -> None:
        super().__init__()
        self.c = c
        self.embed_tokens = nn.Embedding(c.vocab_size, c.hidden_size)
        self.layers = nn.ModuleList(Layer(c, i < c.first_k_dense_replace) for i in range(c.num_hidden_layers))
        self.norm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.lm_head = nn.Linear(c.hidden_size, c.vocab_size, bias=False)
        self.mtp = Layer(c, dense=False)
        self.enorm, self.hnorm = RMSNorm(c.hidden_size, c.rms_norm_eps), RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.eh_proj = nn.Linear(2 * c.hidden_size, c.hidden_size, bias=False)
        self.mtp_norm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        nn.init.normal_(self.embed_tokens.weight, std=0.5)
        nn.init.normal_(self.lm_head.weight, std=0.02)

    def rope(self, start: int, length: int) -> tuple[Tensor, Tensor]:
        width = int(self.c.head_dim * self.c.partial_rotary_factor)
        inverse = self.c.rope_theta ** (-torch.arange(0, width, 2).float() / width)
        angles = torch.outer(torch.arange(start, start + length).float(), inverse)
        angles = torch.cat([angles, angles], -1)[:, None, :]
        return angles.cos(), angles.sin()

    def forward(self, ids_BT: Tensor, past: list[list[Tensor]] | None = None) -> Tensor:
        start = past[0][0].shape[2] if past and past[0] else 0
        x, rope = self.embed_tokens(ids_BT), self.rope(start, ids_BT.shape[1])
        for i, layer in enumerate(self.layers):
            x = layer(x, rope, None if past is None else past[i])
        return self.norm(x)

    def mtp_hidden(self, hidden_BTD: Tensor, next_ids_BT: Tensor) -> Tensor:
        """Position i gets the target's hidden state i and the embedding of token i+1 (zero at position 0, as vLLM does)."""
        embedding = self.embed_tokens(next_ids_BT)
        embedding = torch.cat([torch.zeros_like(embedding[:, :1]), embedding[:, 1:]], 1)
        x = self.eh_proj(torch.cat([self.enorm(embedding), self.hnorm(hidden_BTD)], -1))
        return self.mtp_norm(self.mtp(x, self.rope(0, x.shape[1])))
