"""Full-vocabulary KL from hidden states and each checkpoint's own output matrix.

    ln p = log_softmax(h_reference · W_reference^T)        KL = Σ_V p (ln p - ln q)

Nothing is truncated, so there is no tail and no estimate. It is an audit of the online values rather than a replacement: hidden
states come from another server than the one that is deployed (no speculation, vLLM's pooling runner), and the product is
computed here in FP32. How far the two are apart is therefore part of the result.

In a run hidden states of reference and candidate come each from a server of its own.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from assay.recipes.text_config import text_of
from assay.records.base import sha256_of
from assay.records.divergence import Agreement, ExactDivergence, TextMean
from assay.records.measurement import Measurement
from assay.safe_files import read_json_object
from assay.safetensors_index import INDEX_NAME, weight_map
from assay_evaluate.client.client import Endpoint, NotMeasured
from assay_evaluate.client.journal import Identity, Journal, Reply
from assay_evaluate.divergence.documents import num_tokens
from assay_evaluate.divergence.drift import NOT_NEGATIVE, drift_of, gather, text_mean
from assay_evaluate.divergence.hidden_states import WIRE_DTYPES, HiddenStates
from assay_evaluate.divergence.phase import ReferenceText
from assay_evaluate.divergence.positions import Floats, PositionDivergence, ScoredDocument, position_divergence
from assay_evaluate.divergence.scoring import exact_requests, find_scores, pair_scores, scoring_requests
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

        text = text_of(read_config(checkpoint))
        for key in ("final_logit_softcapping", "logit_scale", "logits_scaling", "logits_scale"):
            if text.get(key) not in (None, 1, 1.0, 0):
                raise NotMeasured(f"exact mode: {key} of config.json changes the logits after the output matrix")
        names = TIED_NAMES if text.get("tie_word_embeddings") else NAMES
        for path, name in _tensors(checkpoint, names):
            with safe_open(path, framework="pt") as file:
                w_VH = file.get_tensor(name)
            device = "cuda" if torch.cuda.is_available() else "cpu"
            return cls(w_VH[: text.get("vocab_size")].to(device, torch.float32))
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
    arrays: dict[str, Floats] = {name: torch.cat([part[name] for part in parts]).cpu().numpy() for name in parts[0]}
    finite_P, agrees_P = arrays["finite"].astype(np.bool_), arrays["agrees"].astype(np.bool_)
    values = {name: np.where(finite_P, arrays[name], 0.0) for name in ("kl", "confidence", "margin", "ln_px", "ln_qx")}
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
    return divergence, arrays["ln_px"], arrays["ln_qx"]


# ------------------------------------------------------------------------------------------------ beside the server's values
@dataclass(frozen=True, eq=False)
class ExactText:
    """One text: the server's log-probabilities of both sides, and what exact mode has at the same positions."""

    online: ScoredDocument
    exact: PositionDivergence
    reference_ln_P: Floats
    """Of the tokens that stand there, by exact mode."""
    candidate_ln_P: Floats


def agreement(texts: Sequence[ExactText]) -> Agreement:
    """How far exact mode and the server's own values are apart, over the positions that are finite in both."""
    differences: dict[str, list[Any]] = {"reference": [], "candidate": []}
    exact, lumped = [], []
    for text in texts:
        assert text.online.candidate is not None, "texts without a candidate are left out"
        online = position_divergence(text.online.reference, text.online.candidate)
        is_finite_P = online.finite_P & text.exact.finite_P
        lumped.append((text.online, _masked(online, is_finite_P)))
        exact.append((text.online, _masked(text.exact, is_finite_P)))
        pair = ((text.online.reference, text.reference_ln_P), (text.online.candidate, text.candidate_ln_P))
        for name, (server, exact_ln_P) in zip(differences, pair, strict=True):
            apart_P = np.abs(server.chosen_P.astype(np.float64) - exact_ln_P)[is_finite_P]
            differences[name].append((apart_P, np.exp(server.chosen_P[is_finite_P]) >= SEEN_PROBABILITY))
    bound, truth = gather(lumped), gather(exact)
    sampled_N = np.concatenate([np.full(int(values.finite_P.sum()), doc.texts != "held_out") for doc, values in exact])
    gap: TextMean | None = None
    if sampled_N.any():
        gap = text_mean(truth.only(sampled_N), (bound.unbiased_N - truth.kl_N)[sampled_N])
    statistics: dict[str, float] = {}
    for name, parts in differences.items():
        apart_N, likely_N = (np.concatenate([part[i] for part in parts]) for i in (0, 1))
        statistics[f"{name}_mean_difference"] = float(apart_N.mean())
        statistics[f"{name}_max_difference"] = float(apart_N[likely_N].max(initial=0.0))
    return Agreement(
        num_positions=len(truth.kl_N),
        lumped_mean=text_mean(bound, bound.kl_N, NOT_NEGATIVE),
        unbiased_minus_exact=gap,
        num_bound_violations=int((bound.kl_N > truth.kl_N * (1 + BOUND_SLACK) + BOUND_SLACK_NATS).sum()),
        **statistics,
    )


def _masked(values: PositionDivergence, finite_P: Any) -> PositionDivergence:
    return PositionDivergence(**vars(values) | {"finite_P": finite_P})


# ------------------------------------------------------------------------------------------------ a run's exact mode
StartStates = Callable[[], AbstractContextManager[Endpoint]]


@dataclass(frozen=True)
class ExactSide:
    """One checkpoint: how to start the server that gives its hidden states, called only if some are missing."""

    measurement: Measurement
    who: Identity
    start: StartStates


def measure_exact(
    reference: ExactSide,
    candidate: ExactSide,
    text: ReferenceText,
    journal: Journal,
    *,
    folder: Path,
    spans: tuple[int, ...],
    concurrency: int,
    on_progress: Callable[[str], None],
) -> ExactDivergence:
    """Full-vocabulary values of a measured candidate. NotMeasured: why there are none.

    folder: where hidden states are kept; about 12 kB a token and checkpoint for a large model. It may be deleted afterwards.
    """
    heads = tuple(Head.load(Path(side.measurement.checkpoint)) for side in (reference, candidate))
    if heads[0].w_VH.shape != heads[1].w_VH.shape:
        raise NotMeasured(f"exact mode: output matrices of {tuple(heads[0].w_VH.shape)} and {tuple(heads[1].w_VH.shape)}")
    all_states, seconds = [], 0.0
    for side in (reference, candidate):
        states = HiddenStates(folder, sha256_of([vars(side.who)]), _dtype(side.measurement))
        if states.missing(text.documents):
            with side.start() as server:
                started = time.monotonic()
                states.fetch(server, text.documents, concurrency=concurrency, on_progress=on_progress)
                seconds = time.monotonic() - started
        all_states.append(states)
    started = time.monotonic()
    documents = {document.item: document for document in text.documents}
    online = pair_scores(text.documents, text.scores, candidate_scores(text, candidate.measurement, candidate.who, journal))
    texts = []
    for doc in online:
        if doc.candidate is None:
            continue  # it computed NaN: counted online
        document = documents[doc.item]
        reference_PH, candidate_PH = (states.load(document) for states in all_states)
        values, ln_p, ln_q = exact_divergence(reference_PH, candidate_PH, (heads[0], heads[1]), document.reply_ids)
        texts.append(ExactText(doc, values, ln_p, ln_q))
    drift, held_out = (
        drift_of(
            name,
            [doc for doc in online if (doc.texts == "held_out") is (name == "held_out")],
            [(text.online, text.exact) for text in texts],
            is_sampled=name == "all",
            spans=spans,
        )
        for name in ("all", "held_out")
    )
    if drift is None:
        raise NotMeasured("exact mode: fewer than two texts have finite values on both sides")
    return ExactDivergence(
        drift=drift,
        held_out=held_out,
        agreement=agreement(texts),
        hidden_size=heads[0].w_VH.shape[1],
        vocabulary=heads[0].w_VH.shape[0],
        stored_dtype=all_states[1].dtype,
        bytes_per_token=all_states[1].num_bytes(text.documents) / num_tokens(text.documents),
        seconds=round(seconds + time.monotonic() - started, 3),
    )


def candidate_scores(text: ReferenceText, measurement: Measurement, who: Identity, journal: Journal) -> list[Reply]:
    """The log-probabilities behind a measured divergence, text by text. NotMeasured: the journal has lost some."""
    assert measurement.divergence is not None
    sample = int(measurement.is_noise_floor)
    if measurement.divergence.scored_by == "exact_ids":
        requests = exact_requests(text.documents, text.scores, sample)
    else:
        requests = scoring_requests(text.documents, text.top_k, sample, text.form)
    if (scores := find_scores(journal, who, requests)) is None:
        raise NotMeasured("the journal has lost the candidate's log-probabilities; measure it again")
    return scores


def _dtype(measurement: Measurement) -> str:
    """What the server computes in: `--dtype`, else the checkpoint's own."""
    flag = measurement.fingerprint.flags.get("dtype")
    if flag in WIRE_DTYPES:
        return str(flag)
    config = read_config(Path(measurement.checkpoint))
    text = text_of(config)
    named = str(text.get("dtype") or text.get("torch_dtype") or config.get("dtype") or config.get("torch_dtype"))
    return named.removeprefix("torch.") if named.removeprefix("torch.") in WIRE_DTYPES else "float32"
