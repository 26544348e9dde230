"""Texts that a candidate writes itself where it is judged, so that it can be held against itself on other hardware.

They are written and scored as the reference's are, under the candidate's own identity, once its measurement is done: fewer of
them, since nothing but the server differs later. Scored once more in another batch composition they give the noise floor.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from assay.callbacks import Say
from assay.recipes.model import Serving
from assay.recipes.suite import DivergenceSpec, SuiteRecipe
from assay.records.measurement import Acceptance, Divergence, TaskResult
from assay.records.serving import Fingerprint
from assay_evaluate.asking.acceptance import acceptance, server_counters
from assay_evaluate.asking.dialect import learn_dialect, takes_seeds
from assay_evaluate.asking.session import Session
from assay_evaluate.client.client import Client, NotMeasured
from assay_evaluate.client.journal import Identity, Journal
from assay_evaluate.divergence.documents import own_suite
from assay_evaluate.divergence.phase import DivergencePhase, ReferenceText, reference_text, text_questions, write_and_score
from assay_evaluate.serving.server import Server

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


@dataclass(frozen=True)
class Asked:
    """One served checkpoint and how it is asked. suite: that of the texts (`own_suite`)."""

    server: Server
    suite: SuiteRecipe
    checkpoint: Path
    serving: Serving
    journal: Journal
    who: Identity
    concurrency: int
    on_progress: Say

    @property
    def spec(self) -> DivergenceSpec:
        assert self.suite.divergence is not None, "a suite without divergence has no texts"
        return self.suite.divergence

    @property
    def fingerprint(self) -> Fingerprint:
        return self.server.fingerprint

    def client(self, *, again: bool = False) -> Client:
        """again: another batch composition, as the noise floor has it."""
        in_flight = max(2, self.concurrency // 2 + 1) if again else self.concurrency
        return Client(
            self.server, self.journal, self.who, concurrency=in_flight, newest_first=again, on_progress=self.on_progress
        )

    def session(self, client: Client, *, again: bool = False) -> Session:
        dialect = learn_dialect(client, self.serving.chat_template_kwargs)
        has_parser = self.serving.reasoning_parser is not None
        return Session(client, dialect, self.suite.seed, int(again), has_parser, takes_seeds(self.fingerprint))

    def divergence(self, session: Session, text: ReferenceText) -> tuple[Divergence | None, dict[str, str]]:
        """From those who wrote the text; without one, why."""
        phase = DivergencePhase(session, self.suite, self.who, text, self.checkpoint, self.fingerprint)
        found = phase.finish(())
        return found, phase.not_measured

    def answer(self, session: Session, writer: Identity, tasks: Sequence[TaskResult] = ()) -> Acceptance | None:
        """Answer the questions of `writer`'s texts; what was accepted of the drafts. None: nothing was drafted."""
        key = f"{KEPT}:{self.suite.sha256}:{self.who.checkpoint_sha256}:{self.who.fingerprint_sha256}"
        with server_counters(self.server.metrics, self.journal, key):
            session.ask([one.request for one in text_questions(session, self.spec, writer, tasks)])
        return acceptance(session.tally, self.journal.counters(key))


def find_own_texts(journal: Journal, suite: SuiteRecipe, who: Identity) -> OwnTexts | None:
    """From the journal alone; None if the candidate wrote none, or the journal does not hold all of it."""
    own = own_suite(suite)
    kept = None if own is None else journal.find_items(KEPT, _made_from(own, who))
    if own is None or kept is None:
        return None
    found = kept[0]
    text = reference_text(journal, own, who, found["not_measured"].get("divergence"))
    if text is None:
        return None
    return OwnTexts(
        text,
        None if found["repeat"] is None else Divergence.model_validate(found["repeat"]),
        None if found["acceptance"] is None else Acceptance.model_validate(found["acceptance"]),
        found["not_measured"],
    )


def write_own_texts(asked: Asked, tasks: Sequence[TaskResult]) -> None:
    """Write, score and score again; into the journal. tasks: what the candidate was measured on, for questions of theirs."""
    with asked.client() as client:
        session = asked.session(client)
        accepted = asked.answer(session, asked.who, tasks)
        try:
            missing, note = write_and_score(
                session, asked.suite, asked.spec, asked.who, tasks, asked.checkpoint, asked.fingerprint
            )  # fmt: skip
            missing |= {} if note is None else {"divergence on all texts": note}
        except NotMeasured as error:
            missing = {"divergence": str(error)}
    repeat = None
    text = reference_text(asked.journal, asked.suite, asked.who, missing.get("divergence"))
    if text is not None and text.why_not is None:
        with asked.client(again=True) as client:
            repeat, why = asked.divergence(asked.session(client, again=True), text)
            missing |= {f"noise floor: {what}": reason for what, reason in why.items()}
    found = {
        "repeat": None if repeat is None else repeat.model_dump(mode="json"),
        "acceptance": None if accepted is None else accepted.model_dump(mode="json"),
        "not_measured": missing,
    }
    asked.journal.keep_items(KEPT, _made_from(asked.suite, asked.who), [found])


def _made_from(own: SuiteRecipe, who: Identity) -> dict[str, Any]:
    return {"suite": own.model_dump(mode="json"), "who": [who.checkpoint_sha256, who.fingerprint_sha256, who.suite]}
