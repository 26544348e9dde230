"""A whole run: the reference, the reference against itself (the noise floor), then every candidate, each in its own server.

What is measured already, under the same checkpoint, suite and fingerprint, is read from `measurements/` without starting
a server; what was interrupted goes on from the journal.
"""

from __future__ import annotations

import dataclasses
import datetime
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path

from assay.callbacks import Say
from assay.errors import AssayError, MeasureError
from assay.foreign_text import shown
from assay.recipes.gate import GateRecipe
from assay.recipes.model import Serving
from assay.recipes.profile import ProfileRecipe
from assay.recipes.suite import SuiteRecipe
from assay.records.declared import without_address
from assay.records.divergence import EXACT_MODE
from assay.records.measurement import Measurement, TaskResult
from assay.records.probe import probes_place
from assay.records.serving import Fingerprint
from assay_evaluate.client.client import NotMeasured
from assay_evaluate.client.journal import Identity, Journal
from assay_evaluate.diagnosis.probes.run_probes import probe_served
from assay_evaluate.divergence.documents import own_suite
from assay_evaluate.divergence.exact import ExactSide, measure_exact
from assay_evaluate.divergence.phase import ReferenceText, reference_text
from assay_evaluate.run.asked_again import require_as_before
from assay_evaluate.run.candidate import (
    Candidate,
    StartServer,
    check_context,
    join_server,
    open_server,
    server_spec,
    split_reference,
)
from assay_evaluate.run.identity import checkpoint_bytes, identity_of, require_same_serving
from assay_evaluate.run.label_weights import LabelWeights
from assay_evaluate.run.own_texts import find_own_texts, write_own_texts
from assay_evaluate.run.rounds import AHEAD, DueLooks, Rounds, describe_look, extend_measurement
from assay_evaluate.run.set_aside import make_room_for, make_room_for_probes, set_aside_label, set_aside_others
from assay_evaluate.run.suite import ServedCheckpoint, ask_tasks, measure_suite
from assay_evaluate.run.weight_bits import weight_bits, weight_shares
from assay_evaluate.run.weights import count_remeasurement, own_key, require_separate_servers
from assay_evaluate.serving.server import Server, ServerSpec, planned_fingerprint, serve
from assay_evaluate.tasks.lm_eval.load import require_lm_eval
from assay_evaluate.tasks.published.choice import settle_sources
from assay_evaluate.tasks.swebench.task import check_suite


def evaluate(
    model: str,
    candidates: Sequence[Candidate],
    *,
    suite: SuiteRecipe,
    profile: ProfileRecipe,
    serving: Serving,
    run_dir: Path,
    gates: GateRecipe | None = None,
    same_weights: bool = False,
    own_texts: bool = False,
    again: Sequence[str] = (),
    on_progress: Say = lambda line: None,
    start_server: StartServer = serve,
    foresee: Callable[[ServerSpec], Fingerprint | None] = planned_fingerprint,
) -> list[Measurement]:
    """Measurements of the reference, its repeat (`<reference>-repeat`) and every candidate, in this order.

    Written to run_dir/measurements/LABEL.json as they come; every request and reply to run_dir/journal.db. A measurement of
    something else in that place, and what was measured against another reference, moves to measurements/earlier/.
    gates: as registered; tasks with a range of samples or items are asked in rounds until these decide (`rounds.py`). None: all
    go to their max.
    same_weights: labels whose servers run already may have the same weights; each is asked by itself all the same.
    own_texts: every candidate whose server is started here also writes texts of its own (`own_texts.py`).
    again: labels that are measured anew, whatever was answered before; with the reference's all are, since its texts are what
    they are compared with.
    start_server and foresee (the fingerprint a server would have, without starting it; None: only the server can tell) are
    seams for tests.
    Raises ServeError when a server does not start, MeasureError when one dies, is served unlike the reference, answers with
    other weights than its label's, or otherwise than when it was measured.
    """
    reference, others = split_reference(candidates)
    require_separate_servers(candidates)
    require_lm_eval(suite)
    check_suite(suite)
    for candidate in (reference, *(other for other in others if other.variant is not None)):
        check_context(suite, candidate, profile.served_as(candidate.variant), serving)
    with Journal(run_dir / "journal.db") as journal:
        settle_sources(suite, journal, on_progress)
        run = _Evaluation(
            model,
            suite,
            profile,
            serving,
            run_dir,
            journal,
            on_progress,
            start_server,
            foresee,
            Rounds(suite, gates),
            LabelWeights(journal, profile, suite.name, on_progress),
            own_suite(suite) if own_texts else None,
        )
        run.check_serving(reference, others)
        if reference.endpoint is not None:
            run.weights.know([reference, *others], same_weights=same_weights)
        run.forget([reference, *others], again)
        first, repeat = run.measure_reference(reference)
        run.report(*set_aside_others(first, run_dir))  # of older runs, whose reference was there already
        measurements = [run.measure_candidate(candidate, first) for candidate in others]
        first = run.decide_open_tasks(reference, first, others, measurements)
        return [
            first,
            *(
                run.measure_exactly(reference, first, candidate, measurement)
                for candidate, measurement in zip([reference, *others], [repeat, *measurements], strict=True)
            ),
        ]


@dataclass(frozen=True)
class _Evaluation:
    model: str
    suite: SuiteRecipe
    profile: ProfileRecipe
    serving: Serving
    run_dir: Path
    journal: Journal
    on_progress: Say
    start_server: StartServer
    foresee: Callable[[ServerSpec], Fingerprint | None]
    rounds: Rounds
    weights: LabelWeights
    own_suite: SuiteRecipe | None
    """The suite with the texts that candidates write themselves. None: they write none."""
    asked_again: dict[Identity, int] = field(default_factory=dict)
    """Who was asked in this evaluation whether it answers as before -> how many questions."""

    def report(self, *lines: str | None) -> None:
        for line in lines:
            if line is not None:
                self.on_progress(line)

    def reporter(self, label: str) -> Say:
        return lambda line: self.on_progress(f"{label}: {line}")

    def spec(self, candidate: Candidate) -> ServerSpec:
        return server_spec(candidate, self.profile, self.serving, self.run_dir)

    def server(self, candidate: Candidate) -> AbstractContextManager[Server]:
        """The server that runs already for the checkpoint, or one that is started for it."""
        return open_server(candidate, self.profile, self.serving, self.run_dir, self.start_server, self.on_progress)

    def planned(self, candidate: Candidate) -> Fingerprint | None:
        """How the checkpoint would be served, or is."""
        if candidate.endpoint is None:
            return self.foresee(self.spec(candidate))
        return join_server(candidate, self.profile).fingerprint

    def served(
        self, candidate: Candidate, server: Server, who: Identity, label: str, suite: SuiteRecipe | None = None
    ) -> ServedCheckpoint:
        return ServedCheckpoint(
            suite or self.suite,
            server,
            self.journal,
            who,
            candidate.checkpoint,
            self.serving,
            self.profile.concurrency,
            self.reporter(label),
        )

    def save(self, measurement: Measurement) -> Measurement:
        measurement.save(self.run_dir / "measurements" / f"{measurement.label}.json")
        return measurement

    # ------------------------------------------------------------------------------------------------ before any server
    def check_serving(self, reference: Candidate, others: Sequence[Candidate]) -> None:
        """Refuse an unlike comparison before any server is started, where that can be foreseen."""
        reference_fingerprint = self.planned(reference)
        for candidate in others:
            fingerprint = self.planned(candidate)
            if reference_fingerprint is not None and fingerprint is not None:
                require_same_serving(reference_fingerprint, fingerprint, reference.label, candidate.label, candidate.declared)

    def forget(self, candidates: Sequence[Candidate], again: Sequence[str]) -> None:
        """Of labels that are measured anew: set aside their measurements, and let no reply of before be found.

        MeasureError: there is no such label.
        """
        labels = [candidate.label for candidate in candidates]
        if unknown := [label for label in again if label not in labels]:
            raise MeasureError(f"--again {unknown[0]}: no such label; this evaluation has {', '.join(labels)}")
        for label in labels:
            if label in again or labels[0] in again:
                count_remeasurement(label, self.journal)
                self.report(*set_aside_label(label, self.run_dir))

    # ------------------------------------------------------------------------------------------------ round one
    def measure_reference(self, reference: Candidate) -> tuple[Measurement, Measurement]:
        """The reference, and once more in another batch composition on the same server: the noise floor."""
        checkpoint = self.weights.checkpoint(reference)
        label, repeat_label = reference.label, f"{reference.label}-repeat"
        first = self.find(reference, label, checkpoint, checkpoint)
        repeat = self.find(reference, repeat_label, checkpoint, checkpoint)
        if first is not None and repeat is not None and self.text_of(first) is not None:
            if not self.rounds.due_ahead(first, repeat):
                return first, repeat
            with self.server(reference) as server:
                require_same_serving(first.fingerprint, server.fingerprint, label, label)
                return self.look_ahead(reference, server, first, repeat), repeat
        with self.server(reference) as server:
            first = self.measure(reference, label, server, checkpoint, None)
            repeat = self.measure(reference, repeat_label, server, checkpoint, self.known_text(first), is_noise_floor=True)
            return self.look_ahead(reference, server, first, repeat), repeat

    def measure_candidate(self, candidate: Candidate, reference: Measurement) -> Measurement:
        checkpoint = self.weights.checkpoint(candidate)
        if candidate.endpoint is None and checkpoint == reference.checkpoint_sha256:
            # a copy of the reference, and another way of serving it, is asked all the same
            self.weights.keys[candidate.label] = own_key(candidate)
        earlier = self.find(candidate, candidate.label, checkpoint, reference.checkpoint_sha256)
        if earlier is not None:
            who = self.weights.who_measured(candidate.label, earlier)
            writes = self.own_suite is not None and candidate.endpoint is None
            if not writes or find_own_texts(self.journal, self.suite, who) is not None:
                return earlier  # `decide_open_tasks` asks further where that is due
        text = self.known_text(reference)
        with self.server(candidate) as server:
            require_same_serving(
                reference.fingerprint, server.fingerprint, reference.label, candidate.label, candidate.declared
            )
            if earlier is None:
                measurement = self.measure(candidate, candidate.label, server, checkpoint, text)
                return self.ask_due(candidate, server, measurement, reference)
            self.write_own_texts(candidate, server, checkpoint, earlier.tasks)
            return earlier

    def find(self, candidate: Candidate, label: str, checkpoint: str, reference: str) -> Measurement | None:
        """The measurement written by an earlier run, if it is of this checkpoint, suite, reference and way of serving.

        None also where more requests of a task failed than a verdict allows: what is missing is asked again, nothing else.
        """
        try:
            measurement = Measurement.load(self.run_dir / "measurements" / f"{label}.json")
        except AssayError:
            return None  # none yet, or of another version
        planned = self.planned(candidate)
        is_same = (
            planned is not None
            and self.weights.who(candidate.label, checkpoint, planned) == identity_of(measurement)
            and (measurement.checkpoint_sha256, measurement.suite_sha256) == (checkpoint, self.suite.sha256)
            and (measurement.reference_checkpoint_sha256, measurement.model) == (reference, self.model)
            and without_address(measurement.declared) == without_address(candidate.declared)
        )
        if not is_same:
            return None
        if measurement.signature is not None:
            self.weights.signed[candidate.label] = checkpoint, measurement.signature
        day = measurement.started.partition("T")[0]
        again = f"`--again {candidate.label}` measures it anew"
        if candidate.endpoint is not None and label == candidate.label:
            num_asked = self.ask_again(candidate, identity_of(measurement), f"measured, on {day}")
            again = f"{num_asked} of its questions, asked again, are answered as they were; {again}"
        if num_missing := self.num_to_ask_again(measurement):
            self.on_progress(f"{label}: measured on {day}; {num_missing} requests without a reply are asked again")
            return None
        self.on_progress(f"{label}: measured already, on {day}; {again}")
        return measurement

    def num_to_ask_again(self, measurement: Measurement) -> int:
        """Failed requests of the tasks that lack too many replies for a verdict; what a server refused for good is final."""
        most = 0.0 if self.rounds.gates is None else self.rounds.gates.max_excluded
        lacking = [task.task for task in measurement.tasks if task.num_failed > most * task.num_items]
        return self.journal.count_failed(identity_of(measurement), lacking)

    def ask_again(self, candidate: Candidate, who: Identity, when: str) -> int:
        """A few questions that a given server has answered before. MeasureError: it answers otherwise now."""
        if who not in self.asked_again:  # before its earlier measurement is believed, then before it is made again
            server = join_server(candidate, self.profile)
            num_asked = require_as_before(candidate.label, server, self.journal, who, when, self.profile.concurrency)
            self.asked_again[who] = num_asked
        return self.asked_again[who]

    def measure(
        self,
        candidate: Candidate,
        label: str,
        server: Server,
        checkpoint: str,
        text: ReferenceText | None,
        *,
        is_noise_floor: bool = False,
    ) -> Measurement:
        """Run the suite on `server` and write the measurement. text: None for the reference, which writes it."""
        started, clock = datetime.datetime.now(datetime.UTC), time.monotonic()
        who = self.weights.who(candidate.label, checkpoint, server.fingerprint)
        self.on_progress(f"{label}: suite {self.suite.name}, {self.profile.concurrency} requests in flight")
        signature = self.weights.begin(candidate, server, checkpoint)
        if candidate.endpoint is not None and not is_noise_floor:
            self.ask_again(candidate, who, "asked before")
        tasks = self.rounds.first_tasks(of_reference=candidate.is_reference, is_noise_floor=is_noise_floor)
        served = self.served(candidate, server, who, label)
        results = measure_suite(served, text, is_noise_floor=is_noise_floor, tasks=tasks)
        results["tasks"] = tuple(self.rounds.with_round(results["tasks"], tasks, {}, {}))
        self.write_own_texts(candidate, server, checkpoint, results["tasks"])
        self.weights.end(candidate, server, signature)
        if self.suite.probes is not None and not is_noise_floor:
            # Before the measurement is written: with it, the run counts as done.
            declared = without_address(candidate.declared)
            self.report(make_room_for_probes(self.run_dir, label, checkpoint, declared))
            probe_served(
                server,
                self.suite.probes.model_copy(update={"concurrency": self.profile.concurrency}),
                label=label,
                checkpoint_sha256=checkpoint,
                place=probes_place(self.run_dir, label),
                declared=declared,
                on_progress=self.reporter(label),
            )
            self.weights.end(candidate, server, signature)  # of probes as well
        folder = candidate.checkpoint
        fewest_bits = None if folder is None else weight_bits(folder)
        notes = [*candidate.notes, *self.weights.notes.get(candidate.label, ())]
        if folder is None:
            notes.append(f"no folder of it was named; its server says that it loaded {shown(server.root)}")
        measurement = Measurement(
            model=self.model,
            label=label,
            is_reference=candidate.is_reference and not is_noise_floor,
            is_noise_floor=is_noise_floor,
            checkpoint=server.base_url if folder is None else str(folder),
            checkpoint_sha256=checkpoint,
            checkpoint_bytes=None if folder is None else checkpoint_bytes(folder),
            weight_bits=fewest_bits,
            weight_shares={} if folder is None else weight_shares(folder, fewest_bits),
            suite=self.suite.name,
            suite_sha256=self.suite.sha256,
            suite_recipe=self.suite.model_dump(mode="json", by_alias=True),
            fingerprint=server.fingerprint,
            started=started.isoformat(timespec="milliseconds"),
            seconds=round(time.monotonic() - clock, 3),
            reference_checkpoint_sha256=checkpoint if text is None else text.who.checkpoint_sha256,
            signature=signature,
            replies_sha256=who.fingerprint_sha256,
            declared={} if candidate.is_reference else candidate.declared | self.weights.declared.get(label, {}),
            **{**results, "notes": (*notes, *results["notes"])},
        )
        self.report(make_room_for(measurement, self.run_dir))
        self.save(measurement)
        if measurement.is_reference:
            self.report(*set_aside_others(measurement, self.run_dir))
        self.on_progress(f"{label}: measured in {measurement.seconds:.0f} s")
        return measurement

    # ------------------------------------------------------------------------------------------------ texts
    def text_of(self, reference: Measurement) -> ReferenceText | None:
        """What the reference wrote and how it scored it, from the journal; None if the journal does not have it."""
        who = self.weights.who_measured(reference.label, reference)
        return reference_text(self.journal, self.suite, who, reference.not_measured.get("divergence"))

    def known_text(self, reference: Measurement) -> ReferenceText:
        """The same after the reference was measured. MeasureError: the journal has lost it since."""
        text = self.text_of(reference)
        if text is None:
            raise MeasureError(
                f"{self.journal.path}: does not hold what {reference.label} wrote, though it was measured: somebody else "
                "changed the file; run again, which measures anew what is missing"
            )
        return text

    def write_own_texts(self, candidate: Candidate, server: Server, checkpoint: str, tasks: Sequence[TaskResult]) -> None:
        """Where they are wanted, of a candidate whose server was started here."""
        if self.own_suite is None or candidate.is_reference or candidate.checkpoint is None or candidate.endpoint is not None:
            return
        self.on_progress(f"{candidate.label}: texts of its own, for deployment profiles")
        who = self.weights.who(candidate.label, checkpoint, server.fingerprint)
        write_own_texts(self.served(candidate, server, who, candidate.label, self.own_suite), tasks)

    def measure_exactly(
        self, reference: Candidate, first: Measurement, candidate: Candidate, measurement: Measurement
    ) -> Measurement:
        """The candidate's measurement with the full-vocabulary KL, if the suite asks for it and it is not there yet."""
        spec, divergence = self.suite.divergence, measurement.divergence
        if spec is None or not spec.exact or divergence is None or divergence.exact is not None:
            return measurement
        if EXACT_MODE in measurement.not_measured:
            return measurement

        def side(of: Candidate, measured: Measurement) -> ExactSide:
            # Of the same checkpoint, profile and emulation: a server that gives hidden states instead of replies.
            log_path = self.run_dir / "logs" / f"vllm-{of.label}-hidden-states.log"
            states_spec = dataclasses.replace(self.spec(of), speculate=False, hidden_states=True, log_path=log_path)
            who = self.weights.who_measured(of.label, measured)
            return ExactSide(measured, who, lambda: self.start_server(states_spec, self.on_progress))

        try:
            if candidate.endpoint is not None:
                raise NotMeasured("exact mode starts servers of its own on the checkpoints' folders; these run already")
            exact = measure_exact(
                side(reference, first),
                side(candidate, measurement),
                self.known_text(first),
                self.journal,
                folder=self.run_dir / "hidden_states",
                spans=spec.spans,
                concurrency=self.profile.concurrency,
                on_progress=self.reporter(measurement.label),
            )
        except NotMeasured as error:
            not_measured = {**measurement.not_measured, EXACT_MODE: str(error)}
            return self.save(measurement.model_copy(update={"not_measured": not_measured}))
        return self.save(measurement.model_copy(update={"divergence": divergence.model_copy(update={"exact": exact})}))

    # ------------------------------------------------------------------------------------------------ rounds after the first
    def decide_open_tasks(
        self, reference: Candidate, first: Measurement, others: Sequence[Candidate], measurements: list[Measurement]
    ) -> Measurement:
        """Ask further until every task is decided for each candidate, or at its max; the reference's measurement, and those of
        the `others` in `measurements`.

        The reference is asked further for all candidates together, then the candidates that need it: one start of a server
        for each checkpoint and round.
        """
        while due := self.rounds.due_of_reference(first, measurements):
            missing = {name: look for name, look in due.items() if not self.rounds.holds(first, name, look[0])}
            if missing:
                with self.server(reference) as server:
                    require_same_serving(first.fingerprint, server.fingerprint, reference.label, reference.label)
                    first = self.ask_further(reference, server, first, missing, first)
            for place, candidate in enumerate(others):
                if self.rounds.due_now(measurements[place], first):
                    with self.server(candidate) as server:
                        require_same_serving(
                            first.fingerprint, server.fingerprint, reference.label, candidate.label, candidate.declared
                        )
                        measurements[place] = self.ask_due(candidate, server, measurements[place], first)
        return first

    def ask_due(self, candidate: Candidate, server: Server, measurement: Measurement, reference: Measurement) -> Measurement:
        """Ask a candidate what is undecided, look, and ask again, as long as the reference has replies enough."""
        while due := self.rounds.due_now(measurement, reference):
            measurement = self.ask_further(candidate, server, measurement, due, reference)
        return measurement

    def look_ahead(self, reference: Candidate, server: Server, first: Measurement, repeat: Measurement) -> Measurement:
        """The reference with generated tasks at their last look, so that no candidate waits for it."""
        due = self.rounds.due_ahead(first, repeat)
        return self.ask_further(reference, server, first, due, first) if due else first

    def ask_further(
        self, candidate: Candidate, server: Server, measurement: Measurement, due: DueLooks, reference: Measurement
    ) -> Measurement:
        """The measurement with some tasks at a further look, written."""
        clock, label, checkpoint = time.monotonic(), measurement.label, measurement.checkpoint_sha256
        of_reference = candidate.is_reference
        for name, (look, reason) in due.items():
            state = ": asking all items at once" if reason == AHEAD else " is still undecided, asking more"
            self.on_progress(f"{label}: {name}{state} ({describe_look(look, of_reference=of_reference)}): {reason}")
        tasks = [self.rounds.task_at(name, look, of_reference=of_reference) for name, (look, _) in due.items()]
        signature = None if candidate.endpoint is None else self.weights.begin(candidate, server, checkpoint)
        served = self.served(candidate, server, self.weights.who(label, checkpoint, server.fingerprint), label)
        results = ask_tasks(served, tasks, self.weights.who_measured(reference.label, reference))
        self.weights.end(candidate, server, signature)
        reasons: Mapping[str, str] = {name: reason for name, (_, reason) in due.items()}
        results = self.rounds.with_round(results, tasks, {task.task: task for task in measurement.tasks}, reasons)
        return self.save(extend_measurement(measurement, results, time.monotonic() - clock))
