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
LOGIT_BYTES = 128 << 20
"""Of FP64 logits of one side that are held at a time."""
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
    with reference.head as of_reference, candidate.head as of_candidate:
        for number, text in enumerate(texts):
            ids_1T = torch.tensor([text.ids])
            states = reference.states.state(number), candidate.states.state(number)
            pieces = []
            first, end = text.first - 1, len(text.ids) - 1  # a token is predicted at the place before it
            at_once = None
            while first < end:
                places = torch.arange(first, min(first + (at_once or 1), end))
                ln_p, ln_q = (
                    _log_softmax(logits(ids_1T, places, state), side.location)
                    for logits, state, side in zip((of_reference, of_candidate), states, (reference, candidate), strict=True)
                )
                if ln_p.shape != ln_q.shape:
                    raise QuantizeError(
                        f"{candidate.location}: has {ln_q.shape[1]} tokens in its head, the reference {ln_p.shape[1]}"
                    )
                pieces.append(token_values(ln_p, ln_q, ids_1T[0, places + 1]))
                first += len(places)
                at_once = max(1, LOGIT_BYTES // (8 * ln_p.shape[1]))
            yield TextDivergence(**{name: np.concatenate([piece[name] for piece in pieces]) for name in pieces[0]})


def _log_softmax(logits_1PV: Tensor, location: str) -> Tensor:
    ln_p_PV = torch.log_softmax(logits_1PV[0].double(), dim=-1)
    if not bool(ln_p_PV.isfinite().all()):
        raise QuantizeError(f"{location}: computes NaN or infinity; `assay inspect --deep` looks for the weight")
    return ln_p_PV


def token_values(ln_p: Tensor, ln_q: Tensor, tokens_P: Tensor) -> dict[str, npt.NDArray[np.generic]]:
    """Fields of `TextDivergence`, of logarithms of probabilities [P, V] in FP64."""
    p, q = ln_p.exp(), ln_q.exp()
    ln_m = torch.logaddexp(ln_p, ln_q) - np.log(2.0)
    top_p, top_q = ln_p.topk(min(TOP_K, ln_p.shape[1])).indices, ln_q.topk(min(TOP_K, ln_p.shape[1])).indices
    first_p, first_q = top_p[:, :1], top_q[:, :1]
    x = tokens_P[:, None].to(ln_p.device)
    shared = (top_p[:, :, None] == top_q[:, None, :]).any(2).double().mean(1)
    values = {
        "kl_P": (p * (ln_p - ln_q)).sum(1).clamp_min(0.0),
        "reverse_kl_P": (q * (ln_q - ln_p)).sum(1).clamp_min(0.0),
        "js_P": ((p * (ln_p - ln_m)).sum(1) + (q * (ln_q - ln_m)).sum(1)).clamp_min(0.0) / 2,
        "agrees_P": (first_p == first_q)[:, 0],
        "top_k_shared_P": shared,
        "entropy_P": -(p * ln_p).sum(1),
        "confidence_P": p.gather(1, first_p)[:, 0],
        "margin_P": (p.gather(1, first_p) - p.gather(1, first_q))[:, 0],
        "ln_p_P": ln_p.gather(1, x)[:, 0],
        "ln_q_P": ln_q.gather(1, x)[:, 0],
        "tokens_P": tokens_P,
    }
    return {name: value.cpu().numpy() for name, value in values.items()}


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
