"""How both sides are asked for the log-probabilities of a text's own tokens (teacher forcing), and what a server offers for it.

completions  /v1/completions with `prompt_logprobs`: every vLLM; decodes each of the k ids to text and back to JSON
generate     /inference/v1/generate (--enable-scale-out): token ids in and out, nothing is decoded
packed       the same with assay's plugin in the server: one array instead of an object per id
exact ids    `prompt_logprob_token_ids` (vLLM's second model runner, on GPUs): the candidate's log-probability of each of
             the *reference's* top k, so that no id is missing from the sum because the candidate likes it less
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from assay.records.serving import Fingerprint
from assay_evaluate.asking.dialect import COMPLETIONS, sampling
from assay_evaluate.client.client import Client, NotMeasured
from assay_evaluate.client.journal import Identity, Journal, Reply, Request, TokenLogprobs
from assay_evaluate.client.logprob_checks import find_scoring_problem
from assay_evaluate.divergence.documents import Document
from assay_evaluate.divergence.positions import ScoredDocument
from assay_evaluate.divergence.same_scale import other_position, other_scale

TASK_SCORE = "divergence.score"
GENERATE = "/inference/v1/generate"
SCALE_OUT = "enable-scale-out"
MOST_LOST_SHARE = 0.1
"""Of the texts, that one side may be unable to score: the longest ones run out of memory first, and say most."""
ScoringForm = Literal["completions", "generate", "packed"]


@dataclass(frozen=True)
class Scoring:
    """What a server offers. exact_ids: it can score given ids per position."""

    form: ScoringForm
    exact_ids: bool


def learn_scoring(client: Client, fingerprint: Fingerprint) -> Scoring:
    """Ask the server, with three small requests at most; one that was started without the endpoint is not asked.

    The endpoint is there if log-probabilities come: a gateway answers any path with status 200.
    """
    if not fingerprint.flags.get(SCALE_OUT) and fingerprint.server != "external":
        return Scoring("completions", False)
    form: ScoringForm = "packed"
    if not _has_array(_try(client, {"prompt_logprobs": 1, "flat_logprobs": True})):
        form = "generate"
        if not isinstance(_try(client, {"prompt_logprobs": 1}).get("prompt_logprobs"), list):
            return Scoring("completions", False)
    exact = _try(client, {"prompt_logprobs": 1, "prompt_logprob_token_ids": [[0, 1]]})
    return Scoring(form, _has_array(exact))


def _try(client: Client, more: dict[str, Any]) -> dict[str, Any]:
    body = {"token_ids": [0, 0], "sampling_params": {"max_tokens": 1, "temperature": 0.0, "detokenize": False, **more}}
    return client.post(GENERATE, body).data


def _has_array(reply: dict[str, Any]) -> bool:
    return isinstance(reply.get("prompt_token_id_logprobs"), str)


def scoring_requests(documents: Sequence[Document], top_k: int, sample: int, form: ScoringForm) -> list[Request]:
    """Requests for the log-probabilities of each text's own tokens and of the `top_k` likeliest ids beside them."""
    if form == "completions":
        how = {"max_tokens": 1, "prompt_logprobs": top_k, **sampling(0.0, 0)}
        bodies = [{"prompt": document.ids, **how} for document in documents]
    else:
        how = {"prompt_logprobs": top_k, **({"flat_logprobs": True} if form == "packed" else {})}
        bodies = [_token_body(document, how) for document in documents]
    path = COMPLETIONS if form == "completions" else GENERATE
    return [_request(document, sample, path, body) for document, body in zip(documents, bodies, strict=True)]


def exact_requests(documents: Sequence[Document], reference: Sequence[Reply], sample: int) -> list[Request]:
    """Requests for the log-probabilities of the ids that the reference likes best, and of the server's own first choice."""
    requests = []
    for document, scored in zip(documents, reference, strict=True):
        ids = [] if scored.logprobs is None else scored.logprobs.ids_PK.tolist()
        start = len(document.prompt_ids) - 1
        how = {"prompt_logprobs": 1, "prompt_logprob_token_ids": ids, "prompt_logprob_start": start}
        requests.append(_request(document, sample, GENERATE, _token_body(document, how)))
    return requests


def _token_body(document: Document, how: dict[str, Any]) -> dict[str, Any]:
    return {
        "token_ids": document.ids,
        "sampling_params": {"max_tokens": 1, "detokenize": False, **sampling(0.0, None), **how},
    }


def _request(document: Document, sample: int, path: str, body: dict[str, Any]) -> Request:
    return Request(TASK_SCORE, document.item, sample, path, body, logprobs_from=len(document.prompt_ids))


def find_scores(journal: Journal, who: Identity, requests: Sequence[Request]) -> list[Reply] | None:
    """Last replies to scoring requests from the journal alone, those that failed among them; None: one was never asked."""
    keys = [request.key(who) for request in requests]
    replies = journal.find_last(keys)
    return [replies[key] for key in keys] if replies.keys() >= set(keys) else None


def require_scores(
    documents: Sequence[Document], replies: Sequence[Reply], whose: str, *, may_be_nan: bool = False
) -> tuple[list[bool], str | None]:
    """(which texts have scores, a sentence about those that have none; None: all have). NotMeasured: too many have none.

    One text whose scoring fails, out of memory say, is one text. may_be_nan: NaN counts as a score, as of a candidate, whose
    NaN is counted by positions.
    """
    is_scored = [reply.logprobs is not None or (may_be_nan and is_nan(reply)) for reply in replies]
    lost = [
        (document, reply) for document, reply, has_scores in zip(documents, replies, is_scored, strict=True) if not has_scores
    ]
    if not lost:
        return is_scored, None
    document, reply = lost[0]
    if is_nan(reply):
        reason = f"its log-probabilities are NaN ({reply.error})"
    elif reply.status == "answered":
        reason = "no prompt_logprobs in the reply, which vLLM's /v1/completions has"
    else:
        reason = reply.error or "no reply"
    first = f"{whose} cannot score {document.item}: {reason}"
    if len(lost) > max(1, int(MOST_LOST_SHARE * len(documents))):
        raise NotMeasured(f"{len(lost)} of {len(documents)} texts cannot be scored, more than 1 in 10: {first}")
    are = "is" if len(lost) == 1 else "are"
    return is_scored, f"divergence: {len(lost)} of {len(documents)} texts {are} left out: {first}"


def pair_scores(documents: Sequence[Document], reference: Sequence[Reply], candidate: Sequence[Reply]) -> list[ScoredDocument]:
    """Both sides of every text that both could score.

    A candidate that answers "not JSON compliant" computed NaN: kept, with no log-probabilities. NotMeasured: a side gives what
    can be no log-probabilities: logits, other logarithms, values cut off or of other positions.
    """
    scored = [
        scored_document(document, reference_reply.logprobs, candidate_reply.logprobs)
        for document, reference_reply, candidate_reply in zip(documents, reference, candidate, strict=True)
        if reference_reply.logprobs is not None and (candidate_reply.logprobs is not None or is_nan(candidate_reply))
    ]
    if (reason := find_scoring_problem([doc.reference for doc in scored])) is not None:
        raise NotMeasured(reason if reference is candidate else f"the reference's server: {reason}")
    if reference is not candidate:
        of_candidate = [doc.candidate for doc in scored if doc.candidate is not None]
        reason = find_scoring_problem(of_candidate) or other_scale(scored) or other_position(scored)
        if reason is not None:
            raise NotMeasured(reason)
    return scored


def scored_document(document: Document, reference: TokenLogprobs, candidate: TokenLogprobs | None) -> ScoredDocument:
    """A text with both sides' log-probabilities. candidate None: it computed NaN."""
    return ScoredDocument(
        document.item,
        document.language,
        reference,
        candidate,
        texts=document.texts,
        domain=document.domain,
        first_position=len(document.prompt_ids),
        num_thinking=document.num_thinking,
        cluster=document.cluster,
    )


def is_nan(reply: Reply) -> bool:
    """Whether a request for log-probabilities was refused because they are no numbers: in vLLM's words."""
    return reply.status == "refused" and "JSON compliant" in (reply.error or "")
