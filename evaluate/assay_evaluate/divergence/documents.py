"""Texts the reference wrote, and their scoring by reference and candidate (teacher forcing).

The texts are replies the *reference* samples at T=1, top_p=1, no penalties: what a model says itself is where drift shows,
and only on text sampled this way is the corrected KL unbiased. They are sampled once and kept with their exact token ids; text
is never tokenized again, for another split into tokens would be another document.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from assay.recipes import DivergenceSpec
from assay_evaluate.client import NotMeasured
from assay_evaluate.dialect import COMPLETIONS, sampling
from assay_evaluate.divergence.positions import ScoredDocument
from assay_evaluate.items import Item, arithmetic_item, writing_item
from assay_evaluate.journal import Identity, Journal, Reply, Request
from assay_evaluate.session import Session

TASK_WRITE = "divergence.write"
TASK_SCORE = "divergence.score"


@dataclass(frozen=True)
class Document:
    """A question's prompt and the reference's reply, as token ids."""

    item: str
    language: str
    prompt_ids: tuple[int, ...]
    reply_ids: tuple[int, ...]


def document_items(spec: DivergenceSpec, seed: str) -> list[Item]:
    """The questions the texts answer: per language, half ask for a text, half for a calculation."""
    items = []
    for language in spec.languages:
        num_writing = (spec.num_documents + 1) // 2
        items += [writing_item(f"{seed}:divergence", i, language) for i in range(num_writing)]
        items += [
            arithmetic_item(f"{seed}:divergence", i, language, (3, 4, 5)[i % 3])
            for i in range(spec.num_documents - num_writing)
        ]
    return items


def find_documents(journal: Journal, made_from: Any) -> tuple[list[Document], int] | None:
    """The texts kept under `made_from` and the top k they are scored with, or None."""
    kept = journal.find_items(TASK_WRITE, made_from)
    if kept is None:
        return None
    texts = kept[0]["documents"]
    ids = ("prompt_ids", "reply_ids")
    return [Document(d["item"], d["language"], *(tuple(d[name]) for name in ids)) for d in texts], kept[0]["top_k"]


def write_documents(session: Session, spec: DivergenceSpec, made_from: Any, top_k: int) -> list[Document]:
    """Let the reference write the texts, or take those it wrote before (a sampled text cannot be written twice alike).

    top_k: how many ids they are to be scored with; kept beside them.

    NotMeasured if the server does not return token ids, or nearly no reply came.
    """
    kept = find_documents(session.client.journal, made_from)
    if kept is not None:
        return kept[0]
    items = document_items(spec, session.seed)
    requests = [
        session.request(
            TASK_WRITE,
            item.id,
            [{"role": "user", "content": item.prompt}],
            max_tokens=spec.max_tokens,
            temperature=1.0,
            with_ids=True,
        )
        for item in items
    ]
    documents = []
    for item, reply in zip(items, session.client.ask(requests), strict=True):
        if reply.status != "answered":
            continue
        if reply.token_ids is None or reply.prompt_token_ids is None:
            raise NotMeasured("the server returns no token ids (vLLM's return_token_ids); texts cannot be scored exactly")
        # One position must stay free: scoring asks for one new token.
        room = len(reply.token_ids)
        if session.max_model_len is not None:
            room = min(room, session.max_model_len - 1 - len(reply.prompt_token_ids))
        if room > 0:
            documents.append(Document(item.id, item.language, reply.prompt_token_ids, reply.token_ids[:room]))
    if len(documents) < max(2, len(items) // 2):
        raise NotMeasured(f"only {len(documents)} of {len(items)} texts were written by the reference")
    session.client.journal.keep_items(TASK_WRITE, made_from, [{"top_k": top_k, "documents": [asdict(d) for d in documents]}])
    return documents


def scoring_requests(documents: Sequence[Document], top_k: int, sample: int) -> list[Request]:
    """Requests for the log-probabilities of each text's reply tokens and of the `top_k` likeliest ids beside them."""
    return [
        Request(
            TASK_SCORE,
            document.item,
            sample,
            COMPLETIONS,
            {
                "prompt": [*document.prompt_ids, *document.reply_ids],
                "max_tokens": 1,
                "prompt_logprobs": top_k,
                **sampling(0.0, 0),
            },
            logprobs_from=len(document.prompt_ids),
        )
        for document in documents
    ]


def find_scores(journal: Journal, who: Identity, documents: Sequence[Document], top_k: int) -> list[Reply] | None:
    """The reference's scores from the journal alone, or None if one is missing."""
    replies = [journal.find(request.key(who)) for request in scoring_requests(documents, top_k, 0)]
    return [reply for reply in replies if reply is not None] if None not in replies else None


def pair_scores(documents: Sequence[Document], reference: Sequence[Reply], candidate: Sequence[Reply]) -> list[ScoredDocument]:
    """Both sides of every text that the reference could score and the candidate was able to be asked about.

    A candidate that answers "not JSON compliant" computed NaN: kept, with no log-probabilities. NotMeasured if the server
    refuses for another reason (top_k above --max-logprobs, say), or gives no log-probabilities at all.
    """
    scored = []
    for document, ours, theirs in zip(documents, reference, candidate, strict=True):
        for side in (ours, theirs):
            if side.status == "refused" and not _is_nan(side):
                raise NotMeasured(f"the server refuses to score text {document.item}: {side.error}")
            if side.status == "answered" and side.logprobs is None:
                raise NotMeasured("the server returns no prompt_logprobs; divergence needs vLLM's /v1/completions")
        if ours.logprobs is not None and (theirs.logprobs is not None or _is_nan(theirs)):
            scored.append(ScoredDocument(document.item, document.language, ours.logprobs, theirs.logprobs))
    return scored


def _is_nan(reply: Reply) -> bool:
    return reply.status == "refused" and "JSON compliant" in (reply.error or "")
