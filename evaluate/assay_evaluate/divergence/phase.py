"""The part of a suite's run that measures divergence: the reference writes and scores texts, everybody else scores them.

Scoring costs one forward pass over texts that exist already. A candidate's requests are put in line behind those of its last
task (`begin`), so that the server reads them while the task's last replies are still being written.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import compress
from pathlib import Path
from typing import Any, Literal

from assay.recipes.suite import DivergenceSpec, SuiteRecipe
from assay.recipes.text_config import text_of
from assay.records.measurement import Divergence, TaskResult
from assay.records.serving import Fingerprint
from assay_evaluate.asking.session import Session
from assay_evaluate.client.client import NotMeasured
from assay_evaluate.client.journal import Identity, Journal, Reply, Request
from assay_evaluate.divergence.documents import (
    Document,
    KeptTexts,
    TextQuestion,
    find_texts,
    held_out_documents,
    keep_texts,
    own_questions,
    suite_questions,
    write_replies,
)
from assay_evaluate.divergence.scoring import (
    ScoringForm,
    exact_requests,
    find_scores,
    learn_scoring,
    pair_scores,
    require_scores,
    scoring_requests,
)
from assay_evaluate.divergence.structural import StructuralIds, structural_ids
from assay_evaluate.divergence.summary import summarize
from assay_evaluate.serving.vllm_command import read_config

REFERENCE = "the reference"
_Asked = tuple[list[Request], Literal["exact_ids", "top_k"]]
"""Requests for scores, and what they ask of."""


@dataclass(frozen=True)
class ReferenceText:
    """The texts of a run and the reference's own scores of them. `why_not`: reason if there are none."""

    who: Identity
    documents: Sequence[Document]
    scores: Sequence[Reply]
    top_k: int
    form: ScoringForm
    why_not: str | None
    note: str | None = None
    """Which texts are left out, for the reference cannot score them. None: none."""


def reference_text(journal: Journal, suite: SuiteRecipe, who: Identity, why_not: str | None) -> ReferenceText | None:
    """From the journal alone; None if it does not hold all of it. why_not: the reference could not write any."""
    if suite.divergence is None or why_not is not None:
        return ReferenceText(who, (), (), 0, "completions", why_not or "the suite does not ask for it")
    kept = find_texts(journal, _text_made_from(suite, who))
    if kept is None:
        return None
    scores = find_scores(journal, who, scoring_requests(kept.documents, kept.top_k, 0, kept.form))
    if scores is None:
        return None
    try:
        has, note = require_scores(kept.documents, scores, REFERENCE)
    except NotMeasured as error:
        return ReferenceText(who, (), (), 0, "completions", str(error))
    documents, scores = list(compress(kept.documents, has)), list(compress(scores, has))
    return ReferenceText(who, documents, scores, kept.top_k, kept.form, None, note)


def _text_made_from(suite: SuiteRecipe, who: Identity) -> dict[str, Any]:
    assert suite.divergence is not None
    made_from: dict[str, Any] = {
        "seed": suite.seed,
        "spec": suite.divergence.model_dump(mode="json", exclude={"position_buckets", "spans", "exact"}),
        "reference": [who.checkpoint_sha256, who.fingerprint_sha256],
    }
    if suite.divergence.held_out is not None:
        made_from["held_out"] = suite.files_sha256.get(suite.divergence.held_out)
    return made_from


def write_and_score(
    session: Session,
    suite: SuiteRecipe,
    spec: DivergenceSpec,
    who: Identity,
    tasks: Sequence[TaskResult],
    checkpoint: Path | None,
    fingerprint: Fingerprint,
) -> tuple[dict[str, str], str | None]:
    """The reference's part: (what of the texts could not be had -> why, a sentence about texts that are left out).

    NotMeasured if there are too few replies to score, or too few can be scored.
    """
    journal, made_from = session.client.journal, _text_made_from(suite, who)
    kept = find_texts(journal, made_from)
    if kept is None:
        no_held_out: str | None = None
        documents = write_replies(session, text_questions(session, spec, who, tasks))
        try:
            documents += held_out_documents(session, spec)
        except NotMeasured as error:
            no_held_out = str(error)
        # more ids than the vocabulary has cannot be asked for
        vocabulary = None if checkpoint is None else text_of(read_config(checkpoint)).get("vocab_size")
        top_k = min(spec.top_k, vocabulary) if isinstance(vocabulary, int) else spec.top_k
        kept = KeptTexts(tuple(documents), top_k, learn_scoring(session.client, fingerprint).form, no_held_out)
        keep_texts(journal, made_from, kept)
    scores = session.client.ask(scoring_requests(kept.documents, kept.top_k, session.sample, kept.form))
    note = require_scores(kept.documents, scores, REFERENCE)[1]  # now, instead of with every candidate
    return {} if kept.no_held_out is None else {"divergence on held-out text": kept.no_held_out}, note


def text_questions(
    session: Session, spec: DivergenceSpec, who: Identity, tasks: Sequence[TaskResult]
) -> list[TextQuestion]:  # fmt: skip
    """The questions that the texts of `who` answer: our own, and those of the suite's tasks that `who` was asked."""
    results = {(task.task, item.item): item for task in tasks for item in task.items}
    return [*own_questions(session, spec), *suite_questions(session, spec, who, results)]


@dataclass
class DivergencePhase:
    """Divergence of one checkpoint in one run of a suite. text: None if this is the reference, which writes it."""

    session: Session
    suite: SuiteRecipe
    who: Identity
    text: ReferenceText | None
    checkpoint: Path | None
    fingerprint: Fingerprint
    not_measured: dict[str, str] = field(default_factory=dict)
    """What could not be had -> why, after `finish`."""
    notes: list[str] = field(default_factory=list)
    """What was left out, in sentences, after `finish`."""
    _asked: _Asked | None = None

    def begin(self) -> None:
        """Put the scoring of texts that exist already in line; nothing is waited for."""
        if self.text is not None and self.text.why_not is None:
            self.session.client.submit(self._requests(self.text)[0])

    def finish(self, tasks: Sequence[TaskResult]) -> Divergence | None:
        """Divergence from the reference; None for the reference itself, and with a reason in `not_measured`."""
        spec = self.suite.divergence
        if spec is None:
            return None
        try:
            if self.text is not None:
                return self._compare(spec, self.text)
            missing, note = write_and_score(self.session, self.suite, spec, self.who, tasks, self.checkpoint, self.fingerprint)
            self.not_measured |= missing
            self._note(note)
        except NotMeasured as error:
            self.not_measured["divergence"] = str(error)
        return None

    def _requests(self, text: ReferenceText) -> _Asked:
        if self._asked is None:
            sample = self.session.sample
            if learn_scoring(self.session.client, self.fingerprint).exact_ids:
                asked: _Asked = exact_requests(text.documents, text.scores, sample), "exact_ids"
            else:
                asked = scoring_requests(text.documents, text.top_k, sample, text.form), "top_k"
            self._asked = asked
        return self._asked

    def _compare(self, spec: DivergenceSpec, text: ReferenceText) -> Divergence:
        if text.why_not is not None:
            raise NotMeasured(text.why_not)
        requests, scored_by = self._requests(text)
        replies = self.session.client.ask(requests)
        self._note(text.note)
        self._note(require_scores(text.documents, replies, "it", may_be_nan=True)[1])
        return summarize(
            pair_scores(text.documents, text.scores, replies),
            reference_checkpoint_sha256=text.who.checkpoint_sha256,
            top_k=text.top_k,
            position_buckets=spec.position_buckets,
            spans=spec.spans_within(self.session.max_model_len),
            scored_by=scored_by,
            structural_ids=self._structural_ids(),
        )

    def _note(self, note: str | None) -> None:
        if note is not None:
            self.notes.append(note)
            self.session.client.tell(note)

    def _structural_ids(self) -> StructuralIds | str:
        """By the candidate's own folder, whose tokenizer is the reference's; or why they are not known."""
        if self.checkpoint is None:
            return "no folder of the checkpoint was named, so its tokenizer is not known"
        try:
            return structural_ids(self.checkpoint)
        except NotMeasured as error:
            return str(error)
