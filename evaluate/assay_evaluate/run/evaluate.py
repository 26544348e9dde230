"""A whole run: the reference, the reference against itself (the noise floor), then every candidate, each in its own server.

What is measured already, under the same checkpoint, suite and fingerprint, is read from `measurements/` without starting
a server; what was interrupted goes on from the journal.
"""

from __future__ import annotations

import dataclasses
import datetime
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from assay.callbacks import Say
from assay.errors import AssayError, MeasureError
from assay.foreign_text import shown
from assay.recipes.gate import GateRecipe
from assay.recipes.model import Serving
from assay.recipes.profile import ProfileRecipe
from assay.recipes.suite import SuiteRecipe
from assay.records.divergence import EXACT_MODE
from assay.records.measurement import Measurement, TaskResult
from assay.records.probe import ProbeSettings, probes_place
from assay.records.serving import Fingerprint, Signature
from assay_evaluate.asking.signature import take_signature
from assay_evaluate.client.client import NotMeasured
from assay_evaluate.client.journal import Identity, Journal
from assay_evaluate.diagnosis.probes.run_probes import probe_served
from assay_evaluate.divergence.documents import own_suite
from assay_evaluate.divergence.exact import ExactSide, measure_exact
from assay_evaluate.divergence.phase import ReferenceText, reference_text
from assay_evaluate.run.answering.asked_again import require_as_before
from assay_evaluate.run.answering.weights import (
    Known,
    alike,
    asked_as,
    changed,
    count_again,
    distrust,
    keep,
    know,
    named_sha256,
    require_others,
    require_separate,
    sign_given,
    times_again,
)
from assay_evaluate.run.candidate import Candidate, sorted_out
from assay_evaluate.run.context_check import check_context
from assay_evaluate.run.further_rounds import go_on, look_again, look_ahead
from assay_evaluate.run.identity import checkpoint_bytes, identity, identity_of, require_alike
from assay_evaluate.run.own_texts import Asked, find_own_texts, write_own_texts
from assay_evaluate.run.rounds import Rounds
from assay_evaluate.run.set_aside import make_room_for, make_room_for_probes, set_aside_label, set_aside_others
from assay_evaluate.run.suite import measure_suite
from assay_evaluate.run.weight_bits import weight_bits, weight_shares
from assay_evaluate.serving.given import join
from assay_evaluate.serving.server import Server, ServerSpec, planned_fingerprint, serve
from assay_evaluate.tasks.published.choice import settle_sources
from assay_evaluate.tasks.swebench.task import check_suite

StartServer = Callable[[ServerSpec, Say], AbstractContextManager[Server]]


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
    they are held against.
    start_server and foresee (the fingerprint a server would have, without starting it; None: only the server can tell) are
    seams for tests.
    Raises ServeError when a server does not start, MeasureError when one dies, is served unlike the reference, answers with
    other weights than its label's, or otherwise than when it was measured.
    """
    reference, others = sorted_out(candidates)
    require_separate(candidates)
    check_suite(suite)
    check_context(suite, reference, profile, serving)
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
            own_texts=own_suite(suite) if own_texts else None,
        )
        run.check_alike(reference, others)
        if reference.endpoint is not None:
            run.know_weights([reference, *others], same_weights=same_weights)
        run.forget([reference, *others], again)
        first, repeat = run.measure_reference(reference)
        run.report(*set_aside_others(first, run_dir))  # of older runs, whose reference was there already
        measured = [run.measure_candidate(one, first) for one in others]
        first, measured = go_on(run, reference, first, others, measured)
        exact = [
            run.in_exact_mode(reference, first, *pair) for pair in zip([reference, *others], [repeat, *measured], strict=True)
        ]
        return [first, *exact]


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
    own_texts: SuiteRecipe | None = None
    """The suite with the texts that candidates write themselves. None: they write none."""
    known: dict[str, Known] = field(default_factory=dict)
    """Of labels with servers of their own."""
    signed: dict[str, tuple[str, Signature]] = field(default_factory=dict)
    """Of those measured, now or by an earlier run: label -> (which checkpoint, signature)."""
    notes: dict[str, str] = field(default_factory=dict)
    """Label -> what the report must say of its weights."""
    asked_as: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Of labels whose checkpoint another label has as well: part of the key of their replies."""
    times_again: dict[str, int] = field(default_factory=dict)
    """Label -> how often it was measured anew."""

    def report(self, *lines: str | None) -> None:
        for line in lines:
            if line is not None:
                self.on_progress(line)

    def spec(self, one: Candidate) -> ServerSpec:
        assert one.checkpoint is not None, "a server is started on a folder"
        return ServerSpec(
            checkpoint=one.checkpoint,
            profile=self.profile,
            serving=self.serving,
            speculate=self.serving.num_speculative_tokens is not None,
            log_path=self.run_dir / "logs" / f"vllm-{one.label}.log",
        )

    def server(self, one: Candidate) -> AbstractContextManager[Server]:
        """The server that runs already for the checkpoint, or one that is started for it."""
        if one.endpoint is None:
            return self.start_server(self.spec(one), self.on_progress)
        return nullcontext(self.join(one))

    def join(self, one: Candidate) -> Server:
        assert one.endpoint is not None
        return join(one.endpoint, label=one.label, checkpoint=one.checkpoint, profile=self.profile.name)

    def planned(self, one: Candidate) -> Fingerprint | None:
        """How the checkpoint would be served, or is."""
        return self.foresee(self.spec(one)) if one.endpoint is None else self.join(one).fingerprint

    def who(self, label: str, checkpoint: str, fingerprint: Fingerprint) -> Identity:
        if label not in self.times_again:
            self.times_again[label] = times_again(label, self.journal)
        attempt = self.times_again[label] + (self.known[label].attempt if label in self.known else 0)
        return identity(checkpoint, fingerprint, self.suite.name, attempt, self.asked_as.get(label))

    def checkpoint(self, one: Candidate) -> str:
        """Identity of what is measured."""
        return named_sha256(one, self.journal) or self.known[one.label].checkpoint_sha256

    def check_alike(self, reference: Candidate, others: Sequence[Candidate]) -> None:
        """Refuse an unlike comparison before any server is started, where that can be foreseen."""
        ours = self.planned(reference)
        for one in others:
            theirs = self.planned(one)
            if ours is not None and theirs is not None:
                require_alike(ours, theirs, reference.label, one.label)

    def know_weights(self, candidates: Sequence[Candidate], *, same_weights: bool) -> None:
        """Let all given servers sign, before anything is measured. MeasureError: weights are not what their labels say."""
        found: dict[str, tuple[str, Signature]] = {}
        servers = [self.join(one) for one in candidates]
        for one, server in zip(candidates, servers, strict=True):
            signature, self.known[one.label] = know(one, server, self.journal)
            found[one.label] = server.base_url, signature
        if not same_weights:
            require_others(found)
        for _, other, sentence in alike(found):
            self.notes[other] = f"{sentence}, which --same-weights allows"
        for one, server in zip(candidates, servers, strict=True):
            sha256 = self.known[one.label].checkpoint_sha256
            if (key := asked_as(one, server, sha256, self.journal, same_weights=same_weights)) is not None:
                self.asked_as[one.label] = key

    def forget(self, candidates: Sequence[Candidate], again: Sequence[str]) -> None:
        """Of labels that are measured anew: set aside their measurements, and let no reply of before be found.

        MeasureError: there is no such label.
        """
        labels = [one.label for one in candidates]
        if unknown := [label for label in again if label not in labels]:
            raise MeasureError(f"--again {unknown[0]}: no such label; this evaluation has {', '.join(labels)}")
        for one in candidates:
            if one.label in again or labels[0] in again:
                count_again(one.label, self.journal)
                self.report(*set_aside_label(one.label, self.run_dir))

    def find(self, one: Candidate, label: str, checkpoint: str, reference: str) -> Measurement | None:
        """The measurement written by an earlier run, if it is of this checkpoint, suite, reference and way of serving."""
        try:
            found = Measurement.load(self.run_dir / "measurements" / f"{label}.json")
        except AssayError:
            return None  # none yet, or of another version
        planned = self.planned(one)
        same = (
            planned is not None
            and self.who(one.label, checkpoint, planned) == identity_of(found)
            and (found.checkpoint_sha256, found.suite_sha256) == (checkpoint, self.suite.sha256)
            and (found.reference_checkpoint_sha256, found.model) == (reference, self.model)
        )
        if not same:
            return None
        if found.signature is not None:
            self.signed[one.label] = checkpoint, found.signature
        day = found.started.partition("T")[0]
        again = f"`--again {one.label}` measures it anew"
        if one.endpoint is not None and label == one.label:
            num_asked = self.ask_again(one, identity_of(found), f"measured, on {day}")
            again = f"{num_asked} of its questions, asked again, are answered as they were; {again}"
        self.on_progress(f"{label}: measured already, on {day}; {again}")
        return found

    def ask_again(self, one: Candidate, who: Identity, when: str) -> int:
        """A few questions that a given server has answered before. MeasureError: it answers otherwise now."""
        return require_as_before(one.label, self.join(one), self.journal, who, when, self.profile.concurrency)

    def measure_reference(self, one: Candidate) -> tuple[Measurement, Measurement]:
        """The reference, and once more in another batch composition on the same server: the noise floor."""
        checkpoint = self.checkpoint(one)
        label, repeat_label = one.label, f"{one.label}-repeat"
        first = self.find(one, label, checkpoint, checkpoint)
        repeat = self.find(one, repeat_label, checkpoint, checkpoint)
        if first is not None and repeat is not None and self.text_of(first) is not None:
            if not self.rounds.ahead(first, repeat):
                return first, repeat
            with self.server(one) as server:
                require_alike(first.fingerprint, server.fingerprint, label, label)
                return look_ahead(self, one, server, first, repeat), repeat
        with self.server(one) as server:
            first = self.measure(one, label, server, checkpoint, None)
            repeat = self.measure(one, repeat_label, server, checkpoint, self.known_text(first), is_noise_floor=True)
            return look_ahead(self, one, server, first, repeat), repeat

    def measure_candidate(self, one: Candidate, reference: Measurement) -> Measurement:
        checkpoint = self.checkpoint(one)
        if one.endpoint is None and checkpoint == reference.checkpoint_sha256:
            self.asked_as[one.label] = {"label": one.label}  # a copy of the reference is asked all the same
        found = self.find(one, one.label, checkpoint, reference.checkpoint_sha256)
        if found is not None and not self.lacks_own_texts(one, found):
            return found  # `go_on` asks further where that is due
        text = self.known_text(reference)
        with self.server(one) as server:
            require_alike(reference.fingerprint, server.fingerprint, reference.label, one.label)
            if found is None:
                measured = self.measure(one, one.label, server, checkpoint, text)
                return look_again(self, one, server, measured, reference)
            self.write_own_texts(one, server, checkpoint, found.tasks)
            return found

    def lacks_own_texts(self, one: Candidate, found: Measurement) -> bool:
        """Whether a candidate that was measured has yet to write texts of its own."""
        who = self.who(one.label, found.checkpoint_sha256, found.fingerprint)
        return self.own_texts is not None and one.endpoint is None and find_own_texts(self.journal, self.suite, who) is None

    def write_own_texts(self, one: Candidate, server: Server, checkpoint: str, tasks: Sequence[TaskResult]) -> None:
        """Where they are wanted, of a candidate whose server was started here."""
        if self.own_texts is None or one.is_reference or one.checkpoint is None or one.endpoint is not None:
            return
        self.on_progress(f"{one.label}: texts of its own, for deployment profiles")
        who = self.who(one.label, checkpoint, server.fingerprint)
        write_own_texts(
            Asked(
                server,
                self.own_texts,
                one.checkpoint,
                self.serving,
                self.journal,
                who,
                self.profile.concurrency,
                lambda line: self.on_progress(f"{one.label}: {line}"),
            ),
            tasks,
        )

    def in_exact_mode(
        self, reference: Candidate, first: Measurement, one: Candidate, measurement: Measurement
    ) -> Measurement:  # fmt: skip
        """The candidate's measurement with the full-vocabulary KL, if the suite asks for it and it is not there yet."""
        spec = self.suite.divergence
        if spec is None or not spec.exact or measurement.divergence is None:
            return measurement
        if one.endpoint is not None:
            why = {EXACT_MODE: "exact mode starts servers of its own on the checkpoints' folders; these run already"}
            return self.saved(measurement.model_copy(update={"not_measured": measurement.not_measured | why}))
        text = self.known_text(first)

        def side(whose: Candidate, measured: Measurement) -> ExactSide:
            who = self.who(whose.label, measured.checkpoint_sha256, measured.fingerprint)
            return ExactSide(measured, who, lambda: self.states_server(whose))

        found = measure_exact(
            side(reference, first),
            side(one, measurement),
            text,
            self.journal,
            folder=self.run_dir / "hidden_states",
            spans=spec.spans,
            concurrency=self.profile.concurrency,
            on_progress=lambda line: self.on_progress(f"{measurement.label}: {line}"),
        )
        return found if found == measurement else self.saved(found)

    def saved(self, measurement: Measurement) -> Measurement:
        measurement.save(self.run_dir / "measurements" / f"{measurement.label}.json")
        return measurement

    def states_server(self, one: Candidate) -> AbstractContextManager[Server]:
        """A server of the same checkpoint, profile and emulation that gives hidden states instead of replies."""
        log_path = self.run_dir / "logs" / f"vllm-{one.label}-hidden-states.log"
        spec = dataclasses.replace(self.spec(one), speculate=False, hidden_states=True, log_path=log_path)
        return self.start_server(spec, self.on_progress)

    def text_of(self, reference: Measurement) -> ReferenceText | None:
        """What the reference wrote and how it scored it, from the journal; None if the journal does not have it."""
        who = self.who(reference.label, reference.checkpoint_sha256, reference.fingerprint)
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

    def probe(self, settings: ProbeSettings, label: str, server: Server, checkpoint: str) -> None:
        """Serving-fidelity probes, with the profile's concurrency; into run_dir/probes/LABEL.json."""
        self.report(make_room_for_probes(self.run_dir, label, checkpoint))
        probe_served(
            server,
            settings.model_copy(update={"concurrency": self.profile.concurrency}),
            label=label,
            checkpoint_sha256=checkpoint,
            place=probes_place(self.run_dir, label),
            on_progress=lambda line: self.on_progress(f"{label}: {line}"),
        )

    def measure(
        self,
        one: Candidate,
        label: str,
        server: Server,
        checkpoint: str,
        text: ReferenceText | None,
        *,
        is_noise_floor: bool = False,
    ) -> Measurement:
        """Run the suite on `server` and write the measurement. text: None for the reference, which writes it."""
        started, clock = datetime.datetime.now(datetime.UTC), time.monotonic()
        who = self.who(one.label, checkpoint, server.fingerprint)
        self.on_progress(f"{label}: suite {self.suite.name}, {self.profile.concurrency} requests in flight")
        signature = self.begin(one, server, checkpoint)
        if one.endpoint is not None and not is_noise_floor:
            self.ask_again(one, who, "asked before")
        tasks = self.rounds.first(of_reference=one.is_reference, is_noise_floor=is_noise_floor)
        results = measure_suite(
            self.suite,
            server,
            self.journal,
            who,
            text,
            checkpoint=one.checkpoint,
            serving=self.serving,
            is_noise_floor=is_noise_floor,
            concurrency=self.profile.concurrency,
            on_progress=lambda line: self.on_progress(f"{label}: {line}"),
            tasks=tasks,
        )
        results["tasks"] = tuple(self.rounds.noted(results["tasks"], tasks, {}, {}))
        self.write_own_texts(one, server, checkpoint, results["tasks"])
        self.end(one, server, signature)
        if self.suite.probes is not None and not is_noise_floor:
            # Before the measurement is written: with it, the run counts as done.
            self.probe(self.suite.probes, label, server, checkpoint)
            self.end(one, server, signature)  # of probes as well
        measurement = Measurement(
            model=self.model,
            label=label,
            is_reference=one.is_reference and not is_noise_floor,
            is_noise_floor=is_noise_floor,
            checkpoint=server.base_url if one.checkpoint is None else str(one.checkpoint),
            checkpoint_sha256=checkpoint,
            checkpoint_bytes=None if one.checkpoint is None else checkpoint_bytes(one.checkpoint),
            weight_bits=(fewest := None if one.checkpoint is None else weight_bits(one.checkpoint)),
            weight_shares={} if one.checkpoint is None else weight_shares(one.checkpoint, fewest),
            suite=self.suite.name,
            suite_sha256=self.suite.sha256,
            suite_recipe=self.suite.model_dump(mode="json", by_alias=True),
            fingerprint=server.fingerprint,
            started=started.isoformat(timespec="milliseconds"),
            seconds=round(time.monotonic() - clock, 3),
            reference_checkpoint_sha256=checkpoint if text is None else text.who.checkpoint_sha256,
            signature=signature,
            replies_sha256=who.fingerprint_sha256,
            **{**results, "notes": (*one.notes, *self.notes_of(one, server), *results["notes"])},
        )
        self.report(make_room_for(measurement, self.run_dir))
        self.saved(measurement)
        if measurement.is_reference:
            self.report(*set_aside_others(measurement, self.run_dir))
        self.on_progress(f"{label}: measured in {measurement.seconds:.0f} s")
        return measurement

    # ------------------------------------------------------------------------------------------------ whose weights answer
    def begin(self, one: Candidate, server: Server, checkpoint: str) -> Signature | None:
        """The signature before a measurement. None: a server started here gives no log-probabilities."""
        if one.endpoint is None:
            return self.sign_started(one, server, checkpoint)
        signature, known = know(one, server, self.journal, self.known.get(one.label))
        self.known[one.label] = keep(one, server, self.journal, dataclasses.replace(known, is_open=True))
        return signature

    def end(self, one: Candidate, server: Server, before: Signature | None) -> None:
        """MeasureError: the weights of a given server changed meanwhile. One started here has loaded its folder once."""
        if one.endpoint is None or before is None:
            return
        known = self.known[one.label]
        after = sign_given(one.label, server)
        if not before.agrees_with(after):
            distrust(one, server, self.journal, known)
            raise MeasureError(changed(one.label, server, before, after))
        self.known[one.label] = keep(one, server, self.journal, dataclasses.replace(known, is_open=False))

    def sign_started(self, one: Candidate, server: Server, checkpoint: str) -> Signature | None:
        """Of a server that was started on a known folder: equal weights of two checkpoints are worth a note, no refusal.

        A lossless copy in another format has them, and so have checkpoints that differ in their MTP layers only.
        """
        try:
            signature = take_signature(server)
        except NotMeasured:
            return None
        for label, (other, theirs) in self.signed.items():
            if other != checkpoint and theirs.agrees_with(signature):
                self.notes[one.label] = (
                    f"answers as {label} does, though their files differ: a copy without loss, a difference in MTP layers only "
                    "(they change no reply), or a wrong folder"
                )
                self.on_progress(f"{one.label}: {self.notes[one.label]}")
        self.signed[one.label] = checkpoint, signature
        return signature

    def notes_of(self, one: Candidate, server: Server) -> tuple[str, ...]:
        """What the report must say of the weights that answered."""
        found = [self.notes[one.label]] if one.label in self.notes else []
        if one.checkpoint is None:
            found.append(f"no folder of it was named; its server says that it loaded {shown(server.root)}")
        return tuple(found)
