"""Rounds after the first: the reference is asked further for all candidates together, then the candidates that need it."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

from assay.callbacks import Say
from assay.recipes.model import Serving
from assay.recipes.profile import ProfileRecipe
from assay.records.measurement import Measurement
from assay.records.serving import Fingerprint, Signature
from assay_evaluate.client.journal import Identity, Journal
from assay_evaluate.run.candidate import Candidate
from assay_evaluate.run.identity import require_alike
from assay_evaluate.run.rounds import Rounds, extended, said
from assay_evaluate.run.suite import ask_tasks
from assay_evaluate.serving.server import Server
from assay_evaluate.tasks.looks import Look


class Evaluation(Protocol):
    """What the rounds need of the run that they belong to (`evaluate.py`)."""

    @property
    def rounds(self) -> Rounds: ...
    @property
    def profile(self) -> ProfileRecipe: ...
    @property
    def serving(self) -> Serving: ...
    @property
    def journal(self) -> Journal: ...
    @property
    def on_progress(self) -> Say: ...

    def server(self, one: Candidate) -> AbstractContextManager[Server]: ...
    def who(self, label: str, checkpoint: str, fingerprint: Fingerprint) -> Identity: ...
    def begin(self, one: Candidate, server: Server, checkpoint: str) -> Signature | None: ...
    def end(self, one: Candidate, server: Server, before: Signature | None) -> None: ...
    def saved(self, measurement: Measurement) -> Measurement: ...


def go_on(
    run: Evaluation, reference: Candidate, first: Measurement, others: Sequence[Candidate], measured: Sequence[Measurement]
) -> tuple[Measurement, list[Measurement]]:
    """The measurements of the reference and of the `others` when every task is decided for each, or at its max.

    One start of a server for each checkpoint and round. MeasureError as `evaluate`.
    """
    found = list(measured)
    while wanted := run.rounds.wanted_of_reference(first, found):
        if lacking := {name: one for name, one in wanted.items() if not run.rounds.holds(first, name, one[0])}:
            with run.server(reference) as server:
                require_alike(first.fingerprint, server.fingerprint, reference.label, reference.label)
                first = _ask_further(run, reference, server, first, lacking, first)
        for place, one in enumerate(others):
            if run.rounds.wanted_now(found[place], first):
                with run.server(one) as server:
                    require_alike(first.fingerprint, server.fingerprint, reference.label, one.label)
                    found[place] = look_again(run, one, server, found[place], first)
    return first, found


def look_again(
    run: Evaluation, one: Candidate, server: Server, measured: Measurement, reference: Measurement
) -> Measurement:  # fmt: skip
    """Ask a candidate what is undecided, look, and ask again, as long as the reference has replies enough."""
    while wanted := run.rounds.wanted_now(measured, reference):
        measured = _ask_further(run, one, server, measured, wanted, reference)
    return measured


def look_ahead(run: Evaluation, one: Candidate, server: Server, first: Measurement, repeat: Measurement) -> Measurement:
    """The reference with generated tasks at their last look, so that no candidate waits for it (`Rounds.ahead`)."""
    wanted = run.rounds.ahead(first, repeat)
    return _ask_further(run, one, server, first, wanted, first) if wanted else first


def _ask_further(
    run: Evaluation, one: Candidate, server: Server, measured: Measurement, wanted: Mapping[str, tuple[Look, str]],
    reference: Measurement,
) -> Measurement:  # fmt: skip
    """The measurement with some tasks at a further look, written."""
    clock, label = time.monotonic(), measured.label
    for name, (look, why) in wanted.items():
        run.on_progress(f"{label}: {name} is asked further ({said(look, of_reference=one.is_reference)}): {why}")
    tasks = [run.rounds.task_at(name, look, of_reference=one.is_reference) for name, (look, _) in wanted.items()]
    signature = None if one.endpoint is None else run.begin(one, server, measured.checkpoint_sha256)
    results = ask_tasks(
        run.rounds.suite,
        tasks,
        server,
        run.journal,
        run.who(label, measured.checkpoint_sha256, server.fingerprint),
        run.who(reference.label, reference.checkpoint_sha256, reference.fingerprint),
        checkpoint=one.checkpoint,
        serving=run.serving,
        concurrency=run.profile.concurrency,
        on_progress=lambda line: run.on_progress(f"{label}: {line}"),
    )
    run.end(one, server, signature)
    before = {task.task: task for task in measured.tasks}
    noted = run.rounds.noted(results, tasks, before, {name: why for name, (_, why) in wanted.items()})
    return run.saved(extended(measured, noted, time.monotonic() - clock))
