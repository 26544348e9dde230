"""tiny-glm: the GLM-4-MoE architecture with one MTP block, in plain PyTorch, small enough to train on two CPU cores.

Same maths as `Glm4MoeForCausalLM` in transformers and vLLM (parameter names are those of the checkpoint, experts stacked):
sigmoid router whose bias takes part in the choice only, normalised top-k weights, q/k norm per head, rotary embedding on half
of each head.

Shapes: B batch, T tokens, D hidden, H heads, K key-value heads, C head width, E experts, F expert width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

MTP_LOSS_WEIGHT = 0.3
BIAS_STEP = 0.001
"""How far a router bias moves per step towards even load (Wang et al., 2024: balance without an auxiliary loss)."""


class Config(Protocol):
    """What the parts below need of any model's configuration; `to_hf` is its config.json."""

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rope_theta: float
    rms_norm_eps: float
    max_position_embeddings: int

    def to_hf(self) -> dict[str, Any]: ...


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
    """bias: of queries, keys and values, as in GLM."""

    def __init__(self, c: Config, bias: bool) -> None:
        super().__init__()
        self.c = c
        self.q_proj = nn.Linear(c.hidden_size, c.num_attention_heads * c.head_dim, bias)
        self.k_proj = nn.Linear(c.hidden_size, c.num_key_value_heads * c.head_dim, bias)
        self.v_proj = nn.Linear(c.hidden_size, c.num_key_value_heads * c.head_dim, bias)
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
    """Rotary embedding on the first part of each head, or all of it, halves paired (neox style)."""
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


class Experts(nn.Module):
    """A router and the experts it chooses among. load: how many choices fell on each since it was last set to zero."""

    def __init__(self, num_experts: int, hidden: int, width: int) -> None:
        super().__init__()
        E, Fw, D = num_experts, width, hidden
        self.gate_weight = nn.Parameter(torch.randn(E, D) * 0.02)
        self.w_gate = nn.Parameter(torch.randn(E, Fw, D) * D**-0.5)
        self.w_up = nn.Parameter(torch.randn(E, Fw, D) * D**-0.5)
        self.w_down = nn.Parameter(torch.randn(E, D, Fw) * Fw**-0.5 * 0.3)
        self.load = torch.zeros(E)

    def scores(self, x_ND: Tensor) -> Tensor:
        """The router's logits [N, E], in FP32."""
        with torch.autocast("cpu", enabled=False):
            return F.linear(x_ND.float(), self.gate_weight.float())

    def mix(self, x_ND: Tensor, scores_NE: Tensor, chosen_NK: Tensor) -> Tensor:
        """Outputs of the chosen experts, weighted by their scores, which add up to one."""
        weights_NK = scores_NE.gather(1, chosen_NK)
        weights_NK = weights_NK / (weights_NK.sum(-1, keepdim=True) + 1e-20)
        flat = chosen_NK.reshape(-1)
        order = flat.argsort(stable=True)
        counts = flat.bincount(minlength=len(self.gate_weight))
        if self.training:
            self.load += counts
        token_of = order // chosen_NK.shape[1]
        x_sorted = x_ND.index_select(0, token_of)
        w_sorted = weights_NK.reshape(-1).index_select(0, order)
        outs = []
        for expert, piece in enumerate(x_sorted.split(counts.tolist())):
            hidden = F.silu(F.linear(piece, self.w_gate[expert])) * F.linear(piece, self.w_up[expert])
            outs.append(F.linear(hidden, self.w_down[expert]))
        y_sorted = torch.cat(outs) * w_sorted[:, None]
        return torch.zeros(x_ND.shape, dtype=y_sorted.dtype).index_add(0, token_of, y_sorted)


class Moe(Experts):
    def __init__(self, c: TinyConfig) -> None:
        super().__init__(c.n_routed_experts, c.hidden_size, c.moe_intermediate_size)
        self.top_k = c.num_experts_per_tok
        self.register_buffer("e_score_correction_bias", torch.zeros(c.n_routed_experts))
        self.shared_experts = Mlp(c.hidden_size, c.moe_intermediate_size)

    def forward(self, x_BTD: Tensor) -> Tensor:
        x_ND = x_BTD.reshape(-1, x_BTD.shape[-1])
        scores_NE = torch.sigmoid(self.scores(x_ND))
        chosen_NK = (scores_NE + self.e_score_correction_bias).topk(self.top_k, -1).indices
        return (self.mix(x_ND, scores_NE, chosen_NK) + self.shared_experts(x_ND)).view(x_BTD.shape)


class Layer(nn.Module):
    """mlp: made by the caller's function, after the attention."""

    def __init__(self, c: Config, mlp: Callable[[], nn.Module], bias: bool) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.self_attn = Attention(c, bias)
        self.post_attention_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.mlp = mlp()

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor], past: list[Tensor] | None = None) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), rope, past)
        return x + self.mlp(self.post_attention_layernorm(x))


class Decoder(nn.Module):
    """Embedding, layers, norm and output head; `forward` -> final-normed hidden states.

    What training, export and scoring need of a model: a subclass adds its own parts, then calls `start`.
    """

    rotary_factor = 1.0
    """Share of each head that is rotated."""

    def __init__(self, c: Config, layer: Callable[[int], Layer]) -> None:
        super().__init__()
        self.c = c
        self.embed_tokens = nn.Embedding(c.vocab_size, c.hidden_size)
        self.layers = nn.ModuleList(layer(i) for i in range(c.num_hidden_layers))
        self.norm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.lm_head = nn.Linear(c.hidden_size, c.vocab_size, bias=False)

    def start(self) -> None:
        nn.init.normal_(self.embed_tokens.weight, std=0.5)
        nn.init.normal_(self.lm_head.weight, std=0.02)

    def rope(self, start: int, length: int) -> tuple[Tensor, Tensor]:
        width = int(self.c.head_dim * self.rotary_factor)
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

    def nll(self, hidden_BTD: Tensor, ids_BT: Tensor) -> Tensor:
        """Of each token, [B, T], in FP32."""
        logits = self.lm_head(hidden_BTD).float()
        return F.cross_entropy(logits.flatten(0, 1), ids_BT.flatten(), reduction="none").view(ids_BT.shape)

    def more_losses(self, hidden_BTD: Tensor, ids_BT: Tensor, weights_BT: Tensor) -> dict[str, tuple[float, Tensor]]:
        """Name in the log -> (weight, loss), beside that of the next token; `hidden` is of all tokens but the last."""
        return {}

    def after_step(self, rate: float) -> None:
        """What changes without a gradient; `rate` is the share of the full learning rate."""

    def mtp_guess(self, ids_1T: Tensor) -> Tensor | None:
        """[T - 1]: at position i the MTP head's token for i + 2; None without such a head."""
        return None

    def blocks(self) -> list[nn.Module]:
        """The checkpoint's `model.layers.*`."""
        return list(self.layers)

    def more_tensors(self) -> dict[str, Tensor]:
        """Of the checkpoint, beside embedding, final norm, output head and `blocks`."""
        return {}


class TinyGlm(Decoder):
    """`mtp_hidden` goes on from the final-normed hidden states."""

    c: TinyConfig

    def __init__(self, c: TinyConfig) -> None:
        def mlp_of(dense: bool) -> Callable[[], nn.Module]:
            return lambda: Mlp(c.hidden_size, c.intermediate_size) if dense else Moe(c)

        super().__init__(c, lambda i: Layer(c, mlp_of(i < c.first_k_dense_replace), bias=True))
        self.rotary_factor = c.partial_rotary_factor
        self.mtp = Layer(c, mlp_of(dense=False), bias=True)
        self.enorm, self.hnorm = RMSNorm(c.hidden_size, c.rms_norm_eps), RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.eh_proj = nn.Linear(2 * c.hidden_size, c.hidden_size, bias=False)
        self.mtp_norm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.start()

    def mtp_hidden(self, hidden_BTD: Tensor, next_ids_BT: Tensor) -> Tensor:
        """Position i gets the target's hidden state i and the embedding of token i+1 (zero at position 0, as vLLM does)."""
        embedding = self.embed_tokens(next_ids_BT)
        embedding = torch.cat([torch.zeros_like(embedding[:, :1]), embedding[:, 1:]], 1)
        x = self.eh_proj(torch.cat([self.enorm(embedding), self.hnorm(hidden_BTD)], -1))
        return self.mtp_norm(self.mtp(x, self.rope(0, x.shape[1])))

    def more_losses(self, hidden_BTD: Tensor, ids_BT: Tensor, weights_BT: Tensor) -> dict[str, tuple[float, Tensor]]:
        nll = self.nll(self.mtp_hidden(hidden_BTD[:, :-1], ids_BT[:, 1:-1]), ids_BT[:, 2:])
        weights = weights_BT[:, 2:]
        return {"mtp_loss": (MTP_LOSS_WEIGHT, (nll * weights).sum() / weights.sum())}

    def after_step(self, rate: float) -> None:
        for module in self.modules():
            if isinstance(module, Moe):
                module.e_score_correction_bias += BIAS_STEP * rate * torch.sign(module.load.mean() - module.load)
                module.load.zero_()

    def mtp_guess(self, ids_1T: Tensor) -> Tensor:
        return self.lm_head(self.mtp_hidden(self(ids_1T)[:, :-1], ids_1T[:, 1:]))[0].argmax(-1)

    def blocks(self) -> list[nn.Module]:
        return [*self.layers, self.mtp]

    def more_tensors(self) -> dict[str, Tensor]:
        prefix = f"model.layers.{self.c.num_hidden_layers}."
        return {
            prefix + "embed_tokens.weight": self.embed_tokens.weight,
            prefix + "shared_head.head.weight": self.lm_head.weight,
            prefix + "shared_head.norm.weight": self.mtp_norm.weight,
            prefix + "eh_proj.weight": self.eh_proj.weight,
            prefix + "enorm.weight": self.enorm.weight,
            prefix + "hnorm.weight": self.hnorm.weight,
        }
