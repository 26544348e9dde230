"""Exact mode of a run: hidden states of reference and candidate, each from a server of its own, then the full-vocabulary KL."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from assay.records.base import sha256_of
from assay.records.divergence import EXACT_MODE, Drift, ExactDivergence
from assay.records.measurement import Measurement
from assay_evaluate.client.client import Endpoint, NotMeasured
from assay_evaluate.client.journal import Identity, Journal, Reply
from assay_evaluate.divergence.documents import num_tokens
from assay_evaluate.divergence.drift import drift_of
from assay_evaluate.divergence.exact import Beside, Head, agreement, exact_divergence
from assay_evaluate.divergence.hidden_states import WIRE_DTYPES, HiddenStates
from assay_evaluate.divergence.phase import ReferenceText
from assay_evaluate.divergence.positions import ScoredDocument
from assay_evaluate.divergence.scoring import exact_requests, pair_scores, scoring_requests
from assay_evaluate.serving.vllm_command import read_config

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
) -> Measurement:
    """The candidate's measurement with `divergence.exact`, or with the reason why not in `not_measured`.

    folder: where hidden states are kept; about 12 kB a token and checkpoint for a large model. It may be deleted afterwards.
    """
    ours = candidate.measurement
    divergence = ours.divergence
    if divergence is None or divergence.exact is not None or EXACT_MODE in ours.not_measured:
        return ours
    try:
        exact = _exact(reference, candidate, text, journal, folder, spans, concurrency, on_progress)
    except NotMeasured as error:
        return ours.model_copy(update={"not_measured": {**ours.not_measured, EXACT_MODE: str(error)}})
    return ours.model_copy(update={"divergence": divergence.model_copy(update={"exact": exact})})


def _exact(
    reference: ExactSide,
    candidate: ExactSide,
    text: ReferenceText,
    journal: Journal,
    folder: Path,
    spans: tuple[int, ...],
    concurrency: int,
    on_progress: Callable[[str], None],
) -> ExactDivergence:
    heads = tuple(Head.load(Path(side.measurement.checkpoint)) for side in (reference, candidate))
    if heads[0].w_VH.shape != heads[1].w_VH.shape:
        raise NotMeasured(f"exact mode: output matrices of {tuple(heads[0].w_VH.shape)} and {tuple(heads[1].w_VH.shape)}")
    states, seconds = [], 0.0
    for side in (reference, candidate):
        kept = HiddenStates(folder, sha256_of([vars(side.who)]), _dtype(side.measurement))
        if kept.missing(text.documents):
            with side.start() as server:
                started = time.monotonic()
                kept.fetch(server, text.documents, concurrency=concurrency, on_progress=on_progress)
                seconds = time.monotonic() - started
        states.append(kept)
    started = time.monotonic()
    documents = {document.item: document for document in text.documents}
    online = pair_scores(text.documents, text.scores, candidate_scores(text, candidate.measurement, candidate.who, journal))
    texts = []
    for doc in online:
        if doc.candidate is None:
            continue  # it computed NaN: counted online
        document = documents[doc.item]
        ours_PH, theirs_PH = (kept.load(document) for kept in states)
        values, ln_p, ln_q = exact_divergence(ours_PH, theirs_PH, (heads[0], heads[1]), document.reply_ids)
        texts.append(Beside(doc, values, ln_p, ln_q))
    drift = _drift("all", online, texts, spans)
    if drift is None:
        raise NotMeasured("exact mode: fewer than two texts have finite values on both sides")
    return ExactDivergence(
        drift=drift,
        held_out=_drift("held_out", online, texts, spans),
        agreement=agreement(texts),
        hidden_size=heads[0].w_VH.shape[1],
        vocabulary=heads[0].w_VH.shape[0],
        stored_dtype=states[1].dtype,
        bytes_per_token=states[1].num_bytes(text.documents) / num_tokens(text.documents),
        seconds=round(seconds + time.monotonic() - started, 3),
    )


def _drift(
    name: Literal["all", "held_out"], online: list[ScoredDocument], texts: list[Beside], spans: tuple[int, ...]
) -> Drift | None:  # fmt: skip
    """Of the sampled or the held-out texts; None if fewer than two have a finite position."""
    chosen = [doc for doc in online if (doc.texts == "held_out") is (name == "held_out")]
    wanted = {id(doc) for doc in chosen}
    usable = [(text.online, text.exact) for text in texts if id(text.online) in wanted and text.exact.finite_P.any()]
    if len(usable) < 2:
        return None
    return drift_of(
        name,
        usable,
        num_documents=len(chosen),
        num_positions=sum(len(doc.reference.tokens_P) for doc in chosen),
        is_sampled=name == "all",
        spans=spans,
    )


def candidate_scores(text: ReferenceText, measurement: Measurement, who: Identity, journal: Journal) -> list[Reply]:
    """The log-probabilities behind a measured divergence, text by text. NotMeasured: the journal has lost some."""
    assert measurement.divergence is not None
    sample = int(measurement.is_noise_floor)
    if measurement.divergence.scored_by == "exact_ids":
        requests = exact_requests(text.documents, text.scores, sample)
    else:
        requests = scoring_requests(text.documents, text.top_k, sample, text.form)
    keys = [request.key(who) for request in requests]
    found = journal.find_last(keys)
    if any(key not in found for key in keys):
        raise NotMeasured("the journal has lost the candidate's log-probabilities; measure it again")
    return [found[key] for key in keys]


def _dtype(measurement: Measurement) -> str:
    """What the server computes in: `--dtype`, else the checkpoint's own."""
    flag = measurement.fingerprint.flags.get("dtype")
    if flag in WIRE_DTYPES:
        return str(flag)
    config = read_config(Path(measurement.checkpoint))
    text = config.get("text_config") or config
    named = str(text.get("dtype") or text.get("torch_dtype") or config.get("dtype") or config.get("torch_dtype"))
    return named.removeprefix("torch.") if named.removeprefix("torch.") in WIRE_DTYPES else "float32"
