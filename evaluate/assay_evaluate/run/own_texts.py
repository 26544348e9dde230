"""Texts that a candidate writes itself where it is judged, so that it can be compared with itself on other hardware.

They are written and scored as the reference's are, under the candidate's own identity, once its measurement is done: fewer of
them, since nothing but the server differs later. Scored once more in another batch composition they give the noise floor.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from assay.recipes.suite import DivergenceSpec, SuiteRecipe
from assay.records.measurement import Acceptance, Divergence, TaskResult
from assay_evaluate.asking.acceptance import acceptance, server_counters
from assay_evaluate.asking.session import Session
from assay_evaluate.client.client import NotMeasured
from assay_evaluate.client.journal import Identity, Journal
from assay_evaluate.divergence.documents import own_suite
from assay_evaluate.divergence.phase import ReferenceText, reference_text, text_questions, write_and_score
from assay_evaluate.run.suite import ServedCheckpoint

KEPT = "own texts"


@dataclass(frozen=True)
class OwnTexts:
    """What a candidate left where it was judged. not_measured: what of it could not be had -> why."""

    text: ReferenceText
    repeat: Divergence | None
    """The texts scored once more by the same server."""
    acceptance: Acceptance | None
    """While they were written."""
    not_measured: dict[str, str]


def find_own_texts(journal: Journal, suite: SuiteRecipe, who: Identity) -> OwnTexts | None:
    """From the journal alone; None if the candidate wrote none, or the journal does not hold all of it."""
    own = own_suite(suite)
    items = None if own is None else journal.find_items(KEPT, _made_from(own, who))
    if own is None or items is None:
        return None
    kept = items[0]
    text = reference_text(journal, own, who, kept["not_measured"].get("divergence"))
    if text is None:
        return None
    return OwnTexts(
        text,
        None if kept["repeat"] is None else Divergence.model_validate(kept["repeat"]),
        None if kept["acceptance"] is None else Acceptance.model_validate(kept["acceptance"]),
        kept["not_measured"],
    )


def write_own_texts(served: ServedCheckpoint, tasks: Sequence[TaskResult]) -> None:
    """Write, score and score again; into the journal. tasks: what the candidate was measured on, for questions of theirs.

    The suite of `served` is that of the texts (`own_suite`).
    """
    suite, journal, who = served.suite, served.journal, served.who
    with served.session() as session:
        accepted = answer_questions(served, session, who, tasks)
        try:
            fingerprint = served.server.fingerprint
            missing, note = write_and_score(session, suite, _spec(suite), who, tasks, served.checkpoint, fingerprint)
            missing |= {} if note is None else {"divergence on all texts": note}
        except NotMeasured as error:
            missing = {"divergence": str(error)}
    repeat = None
    text = reference_text(journal, suite, who, missing.get("divergence"))
    if text is not None and text.why_not is None:
        with served.session(is_repeat=True) as session:
            phase = served.divergence_phase(session, text)
            repeat = phase.finish(())
            missing |= {f"noise floor: {what}": reason for what, reason in phase.not_measured.items()}
    kept = {
        "repeat": None if repeat is None else repeat.model_dump(mode="json"),
        "acceptance": None if accepted is None else accepted.model_dump(mode="json"),
        "not_measured": missing,
    }
    journal.keep_items(KEPT, _made_from(suite, who), [kept])


def answer_questions(
    served: ServedCheckpoint, session: Session, writer: Identity, tasks: Sequence[TaskResult] = ()
) -> Acceptance | None:
    """Answer the questions of `writer`'s texts; what was accepted of the drafts. None: nothing was drafted."""
    suite, journal, who = served.suite, served.journal, served.who
    key = f"{KEPT}:{suite.sha256}:{who.checkpoint_sha256}:{who.fingerprint_sha256}"
    with server_counters(served.server.metrics, journal, key):
        session.ask([question.request for question in text_questions(session, _spec(suite), writer, tasks)])
    return acceptance(session.tally, journal.counters(key))


def _spec(suite: SuiteRecipe) -> DivergenceSpec:
    assert suite.divergence is not None, "a suite without divergence has no texts"
    return suite.divergence


def _made_from(own: SuiteRecipe, who: Identity) -> dict[str, Any]:
    return {"suite": own.model_dump(mode="json"), "who": [who.checkpoint_sha256, who.fingerprint_sha256, who.suite]}
