"""What is known, in one evaluation, of the weights behind every label, and the identity under which its replies are kept."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from assay.callbacks import Say
from assay.errors import MeasureError
from assay.recipes.profile import ProfileRecipe
from assay.records.declared import ADDRESS
from assay.records.measurement import Measurement
from assay.records.serving import Fingerprint, Signature
from assay_evaluate.asking.signature import describe_distance, take_signature
from assay_evaluate.client.client import NotMeasured
from assay_evaluate.client.journal import Identity, Journal
from assay_evaluate.run.candidate import Candidate, join_server
from assay_evaluate.run.identity import identity, not_as_made
from assay_evaluate.run.weights import (
    KnownWeights,
    check_weights,
    distrust_replies,
    keep_weights,
    key_of_label,
    named_sha256,
    own_key,
    require_different_weights,
    same_weights_pairs,
    sign_given,
    times_remeasured,
)
from assay_evaluate.serving.server import Server


@dataclass(frozen=True)
class LabelWeights:
    """Signs servers before and after they are measured. suite: its name, part of every identity."""

    journal: Journal
    profile: ProfileRecipe
    suite: str
    on_progress: Say
    known: dict[str, KnownWeights] = field(default_factory=dict)
    """Of labels with servers of their own."""
    signed: dict[str, tuple[str, Signature]] = field(default_factory=dict)
    """Of those measured, now or by an earlier run: label -> (which checkpoint, signature)."""
    notes: dict[str, list[str]] = field(default_factory=dict)
    """Label -> what the report must say of its weights."""
    keys: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Of labels whose checkpoint another label has as well: part of the key of their replies."""
    declared: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Of labels with the reference's weights, as --same-weights allows: their server's address (`Measurement.declared`)."""
    num_remeasured: dict[str, int] = field(default_factory=dict)
    """Label -> how often it was measured anew."""

    def checkpoint(self, candidate: Candidate) -> str:
        """Identity of what is measured. A note, if it is not what assay made: a hash is known before a server starts."""
        sha256 = named_sha256(candidate, self.journal)
        if sha256 is None:
            return self.known[candidate.label].checkpoint_sha256
        if candidate.checkpoint is not None and (note := not_as_made(candidate.checkpoint, sha256)) is not None:
            self.note(candidate.label, note)
            self.on_progress(f"{candidate.label}: {note}")
        return sha256

    def note(self, label: str, note: str) -> None:
        self.notes.setdefault(label, []).append(note)

    def who(self, label: str, checkpoint: str, fingerprint: Fingerprint) -> Identity:
        if label not in self.num_remeasured:
            self.num_remeasured[label] = times_remeasured(label, self.journal)
        attempt = self.num_remeasured[label] + (self.known[label].attempt if label in self.known else 0)
        return identity(checkpoint, fingerprint, self.suite, attempt, self.keys.get(label))

    def who_measured(self, label: str, measurement: Measurement) -> Identity:
        return self.who(label, measurement.checkpoint_sha256, measurement.fingerprint)

    def know(self, candidates: Sequence[Candidate], *, same_weights: bool) -> None:
        """Let all given servers sign, before anything is measured. MeasureError: weights are not what their labels say."""
        signed: dict[str, tuple[str, Signature]] = {}
        servers = [join_server(candidate, self.profile) for candidate in candidates]
        for candidate, server in zip(candidates, servers, strict=True):
            signature, self.known[candidate.label] = check_weights(candidate, server, self.journal)
            signed[candidate.label] = server.base_url, signature
        checkpoints = {candidate.label: signed[candidate.label] for candidate in candidates if candidate.variant is None}
        if not same_weights:
            require_different_weights(checkpoints)
        for label, other, sentence in same_weights_pairs(checkpoints):
            self.note(other, f"{sentence}, which --same-weights allows")
            if label == candidates[0].label:
                self.declared[other] = {ADDRESS: checkpoints[other][0]}
        reference = signed[candidates[0].label][1]
        for candidate, server in zip(candidates, servers, strict=True):
            if candidate.variant is not None:
                self.keys[candidate.label] = own_key(candidate)
                self.note(candidate.label, _of_variant(candidates[0].label, reference, signed[candidate.label][1]))
                continue
            sha256 = self.known[candidate.label].checkpoint_sha256
            if (key := key_of_label(candidate, server, sha256, self.journal, same_weights=same_weights)) is not None:
                self.keys[candidate.label] = key

    def begin(self, candidate: Candidate, server: Server, checkpoint: str) -> Signature | None:
        """The signature before a measurement. None: a server started here gives no log-probabilities."""
        if candidate.endpoint is None:
            return self.sign_started(candidate, server, checkpoint)
        signature, known = check_weights(candidate, server, self.journal, self.known.get(candidate.label))
        known = dataclasses.replace(known, is_open=True)
        self.known[candidate.label] = keep_weights(candidate, server, self.journal, known)
        return signature

    def end(self, candidate: Candidate, server: Server, before: Signature | None) -> None:
        """MeasureError: the weights of a given server changed meanwhile. One started here has loaded its folder once."""
        if candidate.endpoint is None or before is None:
            return
        known = self.known[candidate.label]
        after = sign_given(candidate.label, server)
        if not before.agrees_with(after):
            distrust_replies(candidate, server, self.journal, known)
            raise MeasureError(
                f"{candidate.label}: the weights behind {server.base_url} changed while it was measured "
                f"({describe_distance(before, after)}); nothing was written, and what was answered is not used again; serve "
                "its checkpoint and run again"
            )
        known = dataclasses.replace(known, is_open=False)
        self.known[candidate.label] = keep_weights(candidate, server, self.journal, known)

    def sign_started(self, candidate: Candidate, server: Server, checkpoint: str) -> Signature | None:
        """Of a server that was started on a known folder: equal weights of two checkpoints are worth a note, no refusal.

        A lossless copy in another format has them, and so have checkpoints that differ in their MTP layers only.
        """
        try:
            signature = take_signature(server)
        except NotMeasured:
            return None
        for label, (other_checkpoint, other_signature) in self.signed.items():
            if other_checkpoint != checkpoint and other_signature.agrees_with(signature):
                note = (
                    f"answers as {label} does, though their files differ: a copy without loss, a difference in MTP layers only "
                    "(they change no reply), or a wrong folder"
                )
                self.note(candidate.label, note)
                self.on_progress(f"{candidate.label}: {note}")
        self.signed[candidate.label] = checkpoint, signature
        return signature


def _of_variant(reference_label: str, reference: Signature, signature: Signature) -> str:
    """Whether a server that is said to have the reference's checkpoint, served another way, may have it."""
    apart = describe_distance(reference, signature)
    if reference.agrees_with(signature):
        return f"its server answers with the weights of {reference_label} ({apart})"
    return (
        f"that its server has the checkpoint of {reference_label} is taken as said: {apart}, which the other way of serving or "
        "other weights may do"
    )
