"""Two passes over the same texts -> how far the candidate's next-token distributions are from the reference's, token by token.

The whole vocabulary counts, over each side's own head: its logits are the model's, in the arithmetic of its pass; their softmax
and everything behind it is FP64.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from assay.errors import QuantizeError
from assay_quantize.screen.forward import States
from assay_quantize.screen.layer_model import Logits
from assay_quantize.sensitivity.texts import ScoredText

Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]
LOGIT_BYTES = 64 << 20
"""Of FP32 logits of one side that are held at a time."""
BLOCK_BYTES = 8 << 20
"""Of FP64 values of one side: what is computed of them stays in a cache."""
TOP_K = 10


@dataclass(frozen=True, eq=False)
class TextDivergence:
    """Values at each of the P scored tokens of one text; nats."""

    kl_P: Floats
    """KL(reference || candidate): what a limit is on. Below 0 is rounding, and 0 here."""
    reverse_kl_P: Floats
    """KL(candidate || reference)."""
    js_P: Floats
    """Jensen-Shannon."""
    agrees_P: Bools
    """Both give the same token the largest probability."""
    top_k_shared_P: Floats
    """Share of the reference's `TOP_K` likeliest tokens that are among the candidate's."""
    entropy_P: Floats
    """Of the reference."""
    confidence_P: Floats
    """Largest probability that the reference gives."""
    margin_P: Floats
    """Where they disagree, by how much the reference prefers its own first; elsewhere 0."""
    ln_p_P: Floats
    """ln p of the token that stands there, of the reference."""
    ln_q_P: Floats
    """Of the candidate."""
    tokens_P: npt.NDArray[np.int64]


class PassSide(NamedTuple):
    """One of two passes that are compared. head: `LayerModel.head`, not entered yet; location: of the checkpoint."""

    location: str
    head: AbstractContextManager[Logits]
    states: States


def compare_passes(texts: Sequence[ScoredText], reference: PassSide, candidate: PassSide) -> Iterator[TextDivergence]:
    """Text by text. QuantizeError: the two have different vocabularies, or one computes NaN or infinity."""
    sides = reference, candidate
    at_once = 0
    with reference.head as of_reference, candidate.head as of_candidate:
        for number, text in enumerate(texts):
            ids_1T = torch.tensor([text.ids])
            states = [side.states.state(number) for side in sides]
            if not at_once:
                num_tokens = of_reference(ids_1T, torch.tensor([0]), states[0]).shape[-1]
                at_once = max(1, LOGIT_BYTES // (4 * num_tokens))
            pieces = []
            for first in range(text.first, len(text.ids), at_once):
                at_P = torch.arange(first, min(first + at_once, len(text.ids)))
                logits_p_PV, logits_q_PV = (
                    logits(ids_1T, at_P - 1, state)[0]  # a token is predicted at the place before it
                    for logits, state in zip((of_reference, of_candidate), states, strict=True)
                )
                if logits_p_PV.shape != logits_q_PV.shape:
                    raise QuantizeError(
                        f"{candidate.location}: has {logits_q_PV.shape[1]} tokens in its head, the reference "
                        f"{logits_p_PV.shape[1]}"
                    )
                for side, logits_PV in zip(sides, (logits_p_PV, logits_q_PV), strict=True):
                    if not bool(logits_PV.isfinite().all()):
                        raise QuantizeError(
                            f"{side.location}: computes NaN or infinity; `assay inspect --deep` looks for the weight"
                        )
                pieces.append(token_values(logits_p_PV, logits_q_PV, ids_1T[0, at_P]))
            yield TextDivergence(**{name: np.concatenate([piece[name] for piece in pieces]) for name in pieces[0]})


def token_values(logits_p_PV: Tensor, logits_q_PV: Tensor, tokens_P: Tensor) -> dict[str, npt.NDArray[np.generic]]:
    """Fields of `TextDivergence`, of finite logits of the reference (p) and the candidate (q); their softmax is FP64."""
    rows = max(1, BLOCK_BYTES // (8 * logits_p_PV.shape[1]))
    blocks = [slice(first, first + rows) for first in range(0, len(tokens_P), rows)]
    values = [_values_of_block(logits_p_PV[block], logits_q_PV[block], tokens_P[block]) for block in blocks]
    return {name: torch.cat([block[name] for block in values]).cpu().numpy() for name in values[0]}


def _values_of_block(logits_p_PV: Tensor, logits_q_PV: Tensor, tokens_P: Tensor) -> dict[str, Tensor]:
    ln_p, ln_q = (torch.log_softmax(logits.double(), dim=-1) for logits in (logits_p_PV, logits_q_PV))
    p, q = ln_p.exp(), ln_q.exp()
    top_p, top_q = (logits.topk(min(TOP_K, logits.shape[1])).indices for logits in (logits_p_PV, logits_q_PV))
    first_p, first_q = top_p[:, :1], top_q[:, :1]
    x = tokens_P[:, None].to(ln_p.device)
    dot = torch.linalg.vecdot
    ratio = ln_p - ln_q
    ln_m = torch.logaddexp(ln_p, ln_q).sub_(np.log(2.0))
    return {
        "kl_P": dot(p, ratio).clamp_min(0.0),
        "reverse_kl_P": (-dot(q, ratio)).clamp_min(0.0),
        "js_P": (dot(p, ln_p - ln_m) + dot(q, ln_q - ln_m)).clamp_min(0.0) / 2,
        "agrees_P": (first_p == first_q)[:, 0],
        "top_k_shared_P": (top_p[:, :, None] == top_q[:, None, :]).any(2).double().mean(1),
        "entropy_P": -dot(p, ln_p),
        "confidence_P": p.gather(1, first_p)[:, 0],
        "margin_P": (p.gather(1, first_p) - p.gather(1, first_q))[:, 0],
        "ln_p_P": ln_p.gather(1, x)[:, 0],
        "ln_q_P": ln_q.gather(1, x)[:, 0],
        "tokens_P": tokens_P,
    }


def other_experts(texts: Sequence[ScoredText], reference: States, candidate: States) -> dict[int, tuple[float, float]]:
    """Layer -> (share of tokens with another set of experts, mean share of the chosen experts that are others)."""
    by_layer: dict[int, tuple[float, float]] = {}
    for layer in range(reference.num_layers):
        tokens, changed, replaced = 0, 0, 0.0
        for number in range(len(texts)):
            of_reference, of_candidate = reference.experts(layer, number), candidate.experts(layer, number)
            if of_reference is None or of_candidate is None:
                continue
            is_kept_Tk = (of_reference[:, :, None] == of_candidate[:, None, :]).any(2)
            tokens += len(is_kept_Tk)
            changed += int((~is_kept_Tk.all(1)).sum())
            replaced += float((~is_kept_Tk).double().mean(1).sum())
        if tokens:
            by_layer[layer] = changed / tokens, replaced / tokens
    return by_layer
