"""Which weights answer for a label: proved by signatures, for servers that run already; noted, for those started here.

A server that is given by its URL may hold anything. Before anything is measured, all given servers sign (asking/signature.py):
no two labels may have the same weights, and none may have others than when its label was measured before. Each measurement
begins and ends with a signature. What was answered while weights may have changed is never used: from then on its replies
are kept under another key (`KnownWeights.attempt`).
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from assay.errors import MeasureError
from assay.recipes.address import server_place
from assay.records.base import sha256_of
from assay.records.declared import without_address
from assay.records.serving import ABOVE_ZERO, MOST_NOISE, Signature
from assay_evaluate.asking.signature import describe_distance, take_signature
from assay_evaluate.client.client import NotMeasured
from assay_evaluate.client.journal import Journal
from assay_evaluate.run.candidate import Candidate
from assay_evaluate.run.identity import checkpoint_sha256
from assay_evaluate.serving.server import Server


def sign_given(label: str, server: Server) -> Signature:
    """MeasureError: without log-probabilities, or with noisy ones, nothing shows whose weights answer."""
    try:
        signature = take_signature(server)
    except NotMeasured as error:
        raise MeasureError(f"{label}: {server.base_url}: nothing shows which weights answer: {error}") from None
    if signature.noise > MOST_NOISE:
        raise MeasureError(
            f"{label}: {server.base_url}: nothing shows which weights answer: asked twice, its log-probabilities differ by "
            f"{signature.noise:.2g} nats, where {MOST_NOISE:g} are taken; `assay diagnose probe {server.base_url}` looks for "
            "the cause"
        )
    return signature


# ------------------------------------------------------------------------------------------------ before anything is asked
def require_separate_servers(candidates: Sequence[Candidate]) -> None:
    """MeasureError: two labels name one server, or only some of them name one."""
    given = [candidate for candidate in candidates if candidate.endpoint is not None]
    started = [candidate.label for candidate in candidates if candidate.endpoint is None]
    if given and started:
        raise MeasureError(
            f"{', '.join(candidate.label for candidate in given)}: asked of servers that run already; {', '.join(started)}: "
            "would be started here. The two are never served alike, so they cannot be compared: give every label a URL, or none"
        )
    places = [
        (server_place(url), candidate.label, url)
        for candidate in given
        if candidate.endpoint
        for url in candidate.endpoint.addresses
    ]
    for (place, label, url), (other_place, other, other_url) in itertools.combinations(places, 2):
        if place == other_place:
            spelling = url if url == other_url else f"{url} is {other_url}"
            raise MeasureError(
                f"{label} and {other} are one server ({spelling}), which has one checkpoint's weights; give each "
                "label a server of its own"
            )


# ------------------------------------------------------------------------------------------------ what the journal knows
@dataclass(frozen=True)
class KnownWeights:
    """What the run's journal holds of the weights behind a label."""

    checkpoint_sha256: str
    signature: Signature
    attempt: int = 0
    """How often weights changed while they were measured: part of the key of replies."""
    is_open: bool = False
    """A measurement was begun and has not ended: if the weights are others now, nobody can say since when."""


def check_weights(
    candidate: Candidate, server: Server, journal: Journal, before: KnownWeights | None = None
) -> tuple[Signature, KnownWeights]:
    """The signature of the label's server now, and what is known of the weights behind the label, which must be the same.

    Nothing is written: a start that is refused must not bind the label. before: what this run knows of it already.
    MeasureError: they are others, or nothing shows which they are.
    """
    signature = sign_given(candidate.label, server)
    sha256 = named_sha256(candidate, journal)
    kept = journal.find_items("weights", _key(candidate, server, sha256, signature))
    if kept is not None:
        known = KnownWeights(**{**kept[0], "signature": Signature.model_validate(kept[0]["signature"])})
    elif before is not None:
        known = before
    else:
        return signature, KnownWeights(sha256 or unnamed_sha256(server, signature), signature)
    if not known.signature.agrees_with(signature):
        if known.is_open:
            distrust_replies(candidate, server, journal, known)
        raise MeasureError(
            f"{candidate.label}: {server.base_url} does not answer with the weights that it had when {candidate.label} was "
            f"first measured here ({describe_distance(known.signature, signature)}); serve those again; if it is another "
            "checkpoint now, give it another label (NEW=URL), or the run another --name"
        )
    return signature, known


def keep_weights(candidate: Candidate, server: Server, journal: Journal, known: KnownWeights) -> KnownWeights:
    """Write down what is known."""
    data: dict[str, Any] = {**vars(known), "signature": known.signature.model_dump(mode="json")}
    journal.keep_items("weights", _key(candidate, server, known.checkpoint_sha256, known.signature), [data])
    return known


def distrust_replies(candidate: Candidate, server: Server, journal: Journal, known: KnownWeights) -> None:
    """What was answered so far is not used again."""
    keep_weights(candidate, server, journal, dataclasses.replace(known, attempt=known.attempt + 1, is_open=False))


def _key(candidate: Candidate, server: Server, sha256: str | None, signature: Signature) -> dict[str, Any]:
    """Of a folder, whose contents may have changed, its hash; else the label is all there is.

    A server that gives logits is another one than it is once it gives log-probabilities, whatever its weights are.
    """
    checkpoint = None if candidate.checkpoint is None else sha256
    logits = {"logits": True} if signature.is_of_logits else {}
    declared = {} if candidate.variant is None else {"declared": without_address(candidate.declared)}
    served = server.fingerprint.comparable_sha256
    return {"label": candidate.label, "checkpoint": checkpoint, "served": served, **logits, **declared}


def own_key(candidate: Candidate) -> dict[str, Any]:
    """What besides the checkpoint tells the replies of a copy or a variant of the reference from the reference's own."""
    declared = {} if candidate.variant is None else {"declared": without_address(candidate.declared)}
    return {"label": candidate.label, **declared}


def key_of_label(
    candidate: Candidate, server: Server, sha256: str, journal: Journal, *, same_weights: bool
) -> dict[str, Any] | None:
    """What besides the checkpoint tells the replies of a label from those of another label with the same checkpoint.

    The first label to ask keeps the checkpoint's own key, wherever its server moves to; with same_weights, where it is the
    servers that are compared, only at the addresses that it had. None: this is the first, as the journal notes from now on.
    """
    served = {"checkpoint": sha256, "served": server.fingerprint.comparable_sha256}
    addresses = () if candidate.endpoint is None else candidate.endpoint.addresses
    key = {"label": candidate.label, "addresses": sorted(":".join(map(str, server_place(url))) for url in addresses)}
    first = journal.find_items("asked first", served)
    if first is None:
        journal.keep_items("asked first", served, [key])
        return None
    is_first = first[0] == key or (first[0]["label"] == candidate.label and not same_weights)
    return None if is_first else key


def times_remeasured(label: str, journal: Journal) -> int:
    """How often a user had the label measured anew (`--again`): part of the key of its replies."""
    return int(journal.counters(f"again:{label}").get("times", 0))


def count_remeasurement(label: str, journal: Journal) -> None:
    """From now on nothing that was answered for the label before is used."""
    journal.add_counters(f"again:{label}", {"times": 1})


def named_sha256(candidate: Candidate, journal: Journal) -> str | None:
    """Identity of the checkpoint that was named; None: only a server was."""
    if candidate.sha256 is not None or candidate.checkpoint is None:
        return candidate.sha256
    return checkpoint_sha256(candidate.checkpoint, journal.file_sha256)


def unnamed_sha256(server: Server, signature: Signature) -> str:
    """Identity of a checkpoint of which no folder is known: what the server says it loaded, and how it answered first.

    The same weights sign with other bits the next time: whoever meets a signature that agrees keeps the identity that it has.
    """
    return sha256_of({"root": server.root, "signature": signature.model_dump(mode="json")})


# ------------------------------------------------------------------------------------------------ signatures compared
def same_weights_pairs(signed: Mapping[str, tuple[str, Signature]]) -> list[tuple[str, str, str]]:
    """Pairs of labels whose weights cannot be told apart, and a sentence about them. signed: label -> (where, signature)."""
    return [
        (label, other, f"{label} at {url} and {other} at {other_url} answer with the same weights ({describe_distance(a, b)})")
        for (label, (url, a)), (other, (other_url, b)) in itertools.combinations(signed.items(), 2)
        if a.agrees_with(b)
    ]


def require_different_weights(signed: Mapping[str, tuple[str, Signature]]) -> None:
    """MeasureError: two labels have the same weights, or signatures that cannot be compared."""
    kinds = {signature.is_of_logits: f"{label} at {url}" for label, (url, signature) in signed.items()}
    if len(kinds) > 1:
        raise MeasureError(
            f"{kinds[True]} gives {ABOVE_ZERO}, as that of {kinds[False]}; else nothing shows that their weights differ"
        )
    for _, _, sentence in same_weights_pairs(signed):
        raise MeasureError(
            f"{sentence}; start each on its own checkpoint, or say --same-weights if that is meant (MTP layers only draft: "
            "checkpoints that differ in nothing else cannot be told apart)"
        )
