"""Full-vocabulary KL from hidden states and each checkpoint's own output matrix.

    ln p = log_softmax(h_reference · W_reference^T)        KL = Σ_V p (ln p - ln q)

Nothing is truncated, so there is no tail and no estimate. It is an audit of the online values rather than a replacement: hidden
states come from another server than the one that is deployed (no speculation, vLLM's pooling runner), and the product is
computed here in FP32. How far the two are apart is therefore part of the result.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from assay.records.divergence import Agreement, TextMean
from assay.safe_files import read_json_object
from assay.safetensors_index import INDEX_NAME, weight_map
from assay_evaluate.client.client import NotMeasured
from assay_evaluate.divergence.drift import NOT_NEGATIVE, gather, text_mean
from assay_evaluate.divergence.positions import Floats, PositionDivergence, ScoredDocument, position_divergence
from assay_evaluate.serving.vllm_command import read_config

if TYPE_CHECKING:
    import torch

LOGIT_BYTES = 256 << 20
"""Of logits held at a time, per side."""
NAMES = ("lm_head.weight", "language_model.lm_head.weight", "model.language_model.lm_head.weight")
TIED_NAMES = (
    "model.embed_tokens.weight",
    "language_model.model.embed_tokens.weight",
    "model.language_model.embed_tokens.weight",
)
SEEN_PROBABILITY = 1e-3
"""Below it a difference of log-probabilities says more about rounding than about the two servers."""
BOUND_SLACK = 1e-3
BOUND_SLACK_NATS = 1e-4


# ------------------------------------------------------------------------------------------------ the output matrix
@dataclass(frozen=True, eq=False)
class Head:
    """w_VH: the output matrix, FP32, on the device that computes."""

    w_VH: torch.Tensor

    @classmethod
    def load(cls, checkpoint: Path) -> Head:
        """From the checkpoint's own files. NotMeasured if it is quantized, or logits are more than a product with it."""
        import torch
        from safetensors import safe_open

        config = read_config(checkpoint)
        text = config.get("text_config") or config
        for key in ("final_logit_softcapping", "logit_scale", "logits_scaling", "logits_scale"):
            if text.get(key) not in (None, 1, 1.0, 0):
                raise NotMeasured(f"exact mode: {key} of config.json changes the logits after the output matrix")
        names = TIED_NAMES if text.get("tie_word_embeddings") else NAMES
        for path, name in _tensors(checkpoint, names):
            with safe_open(path, framework="pt") as file:
                w_VH = file.get_tensor(name)
            device = "cuda" if torch.cuda.is_available() else "cpu"
            vocabulary = text.get("vocab_size")
            return cls(w_VH[:vocabulary].to(device, torch.float32))
        raise NotMeasured(f"exact mode: {checkpoint} has no unquantized {' or '.join(names[:1])}; keep lm_head in BF16")

    def logprobs(self, hidden_PH: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
        """(first position, ln p [n, V] in FP64) in pieces that fit into memory."""
        import torch

        at_once = max(1, LOGIT_BYTES // (8 * self.w_VH.shape[0]))
        for first in range(0, hidden_PH.shape[0], at_once):
            h_nH = hidden_PH[first : first + at_once].to(self.w_VH.device, torch.float32)
            yield first, torch.log_softmax((h_nH @ self.w_VH.T).double(), dim=-1)


def _tensors(checkpoint: Path, names: Sequence[str]) -> Iterator[tuple[Path, str]]:
    """Files of the checkpoint that hold one of `names`."""
    from safetensors import safe_open

    if (checkpoint / INDEX_NAME).is_file():
        file_of = weight_map(f"{checkpoint}: {INDEX_NAME}", read_json_object(checkpoint, INDEX_NAME))
        yield from ((checkpoint / file_of[name], name) for name in names if name in file_of)
        return
    for path in sorted(checkpoint.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            yield from ((path, name) for name in names if name in file.keys())  # noqa: SIM118 (not a dict)


# ------------------------------------------------------------------------------------------------ one text
def exact_divergence(
    reference_PH: torch.Tensor, candidate_PH: torch.Tensor, heads: tuple[Head, Head], tokens_P: Sequence[int]
) -> tuple[PositionDivergence, Floats, Floats]:
    """Full-vocabulary values at each position of one text; ln p and ln q of the tokens that stand there."""
    import torch

    parts: list[dict[str, torch.Tensor]] = []
    tokens = torch.as_tensor(tokens_P, dtype=torch.int64)
    for (first, ln_p), (_, ln_q) in zip(heads[0].logprobs(reference_PH), heads[1].logprobs(candidate_PH), strict=True):
        x = tokens[first : first + len(ln_p), None].to(ln_p.device)
        p = ln_p.exp()
        first_p, first_q = ln_p.argmax(1, keepdim=True), ln_q.argmax(1, keepdim=True)
        parts.append(
            {
                "kl": torch.where(p > 0, p * (ln_p - ln_q), 0.0).sum(1),
                "finite": ln_p.isfinite().all(1) & ln_q.isfinite().all(1),
                "agrees": (first_p == first_q)[:, 0],
                "confidence": p.gather(1, first_p)[:, 0],
                "margin": (p.gather(1, first_p) - p.gather(1, first_q))[:, 0],
                "ln_px": ln_p.gather(1, x)[:, 0],
                "ln_qx": ln_q.gather(1, x)[:, 0],
            }
        )
    found: dict[str, Floats] = {name: torch.cat([part[name] for part in parts]).cpu().numpy() for name in parts[0]}
    finite_P, agrees_P = found["finite"].astype(np.bool_), found["agrees"].astype(np.bool_)
    values = {name: np.where(finite_P, found[name], 0.0) for name in ("kl", "confidence", "margin", "ln_px", "ln_qx")}
    kl_P = np.maximum(values["kl"], 0.0)  # below zero is rounding
    divergence = PositionDivergence(
        kl_P,
        kl_P,
        np.zeros_like(kl_P),
        agrees_P & finite_P,
        finite_P,
        confidence_P=values["confidence"],
        swap_margin_P=np.where(agrees_P, 0.0, values["margin"]),
        ln_ratio_P=values["ln_px"] - values["ln_qx"],
        probability_change_P=np.exp(values["ln_qx"]) - np.exp(values["ln_px"]),
    )
    return divergence, found["ln_px"], found["ln_qx"]


# ------------------------------------------------------------------------------------------------ beside the server's values
@dataclass(frozen=True, eq=False)
class Beside:
    """One text: the server's log-probabilities of both sides, and what exact mode has at the same positions."""

    online: ScoredDocument
    exact: PositionDivergence
    reference_ln_P: Floats
    """Of the tokens that stand there, by exact mode."""
    candidate_ln_P: Floats


def agreement(texts: Sequence[Beside], *, level: float = 0.95) -> Agreement:
    """How far exact mode and the server's own values are apart, over the positions that are finite in both."""
    differences: dict[str, list[Any]] = {"reference": [], "candidate": []}
    exact, lumped = [], []
    for text in texts:
        assert text.online.candidate is not None, "texts without a candidate are left out"
        online = position_divergence(text.online.reference, text.online.candidate)
        both_P = online.finite_P & text.exact.finite_P
        lumped.append((text.online, _masked(online, both_P)))
        exact.append((text.online, _masked(text.exact, both_P)))
        pair = ((text.online.reference, text.reference_ln_P), (text.online.candidate, text.candidate_ln_P))
        for name, (ours, theirs_P) in zip(differences, pair, strict=True):
            apart_P = np.abs(ours.chosen_P.astype(np.float64) - theirs_P)[both_P]
            differences[name].append((apart_P, np.exp(ours.chosen_P[both_P]) >= SEEN_PROBABILITY))
    bound, truth = gather(lumped), gather(exact)
    sampled_N = np.concatenate([np.full(int(one.finite_P.sum()), doc.texts != "held_out") for doc, one in exact])
    gap: TextMean | None = None
    if sampled_N.any():
        gap_N = (bound.unbiased_N - truth.kl_N)[sampled_N]
        gap = text_mean(truth.only(sampled_N), gap_N, level=level)
    found: dict[str, float] = {}
    for name, parts in differences.items():
        apart_N, seen_N = (np.concatenate([part[i] for part in parts]) for i in (0, 1))
        found[f"{name}_mean_difference"] = float(apart_N.mean())
        found[f"{name}_max_difference"] = float(apart_N[seen_N].max(initial=0.0))
    return Agreement(
        num_positions=len(truth.kl_N),
        lumped_mean=text_mean(bound, bound.kl_N, NOT_NEGATIVE, level=level),
        unbiased_minus_exact=gap,
        num_bound_violations=int((bound.kl_N > truth.kl_N * (1 + BOUND_SLACK) + BOUND_SLACK_NATS).sum()),
        **found,
    )


def _masked(one: PositionDivergence, finite_P: Any) -> PositionDivergence:
    return PositionDivergence(**vars(one) | {"finite_P": finite_P})
