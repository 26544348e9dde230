"""A candidate on a deployment profile: served there, asked what it was asked where it was judged, and compared with itself.

The two servers are unlike on purpose, so nothing asks that their fingerprints agree; every difference is in the record.
"""

from __future__ import annotations

import dataclasses
import datetime
import time
from pathlib import Path

from assay.callbacks import Say
from assay.errors import MeasureError
from assay.recipes.gate import GateRecipe
from assay.recipes.model import Serving
from assay.recipes.profile import ProfileRecipe
from assay.recipes.suite import SuiteRecipe
from assay.recipes.variant import declared_variant
from assay.records.comparable import fingerprints_differ
from assay.records.deployment.record import Deployment, deployment_place
from assay.records.measurement import Acceptance, Divergence, Measurement
from assay.records.probe import ProbeReport, ProbeSettings
from assay.records.serving import MODEL_FLAGS
from assay.records.verdict import GateReport
from assay_evaluate.client.journal import Journal
from assay_evaluate.diagnosis.probes.run_probes import probe_served
from assay_evaluate.divergence.documents import own_suite
from assay_evaluate.run.candidate import StartServer
from assay_evaluate.run.identity import checkpoint_sha256, identity, identity_of
from assay_evaluate.run.own_texts import OwnTexts, answer_questions, find_own_texts
from assay_evaluate.run.suite import ServedCheckpoint
from assay_evaluate.serving.server import ServerSpec, serve
from assay_evaluate.verdicts.acceptance import DraftingSide
from assay_evaluate.verdicts.deployment import DeployedCandidate, judge_deployment, outcome_of, outcome_sentence


def deploy(
    measured: Measurement,
    checkpoint: Path,
    judged: GateReport,
    *,
    profile: ProfileRecipe,
    run_dir: Path,
    probed: ProbeReport | None = None,
    on_progress: Say = lambda line: None,
    start_server: StartServer = serve,
) -> Deployment:
    """Serve a candidate of the run on `profile`; the record is written to run_dir/deployment/PROFILE/LABEL.json.

    checkpoint: its folder on this machine. judged: the run's verdicts. probed: its probes where it was judged. Raises what
    `check_deployable` raises; ServeError: the server does not start.
    """

    def report(line: str) -> None:
        on_progress(f"{measured.label}: {line}")

    started, clock = datetime.datetime.now(datetime.UTC), time.monotonic()
    suite = SuiteRecipe.model_validate(measured.suite_recipe)
    gates = GateRecipe.model_validate(judged.gate_recipe)
    with Journal(run_dir / "journal.db") as journal:
        check_deployable(measured, checkpoint, profile, journal)
        own_texts = find_own_texts(journal, suite, identity_of(measured))
        serving = serving_of(measured)
        spec = ServerSpec(
            checkpoint=checkpoint,
            profile=served_there(measured, profile),
            serving=serving,
            speculate=measured.fingerprint.speculation is not None,
            log_path=run_dir / "logs" / f"vllm-{measured.label}-on-{profile.name}.log",
        )
        with start_server(spec, on_progress) as server:
            fingerprint = server.fingerprint
            # What is served is in question, so nothing that an earlier deployment answered is taken for this one's.
            who = identity(measured.checkpoint_sha256, fingerprint, suite.name, attempt=time.time_ns())
            served = ServedCheckpoint(suite, server, journal, who, checkpoint, serving, profile.concurrency, report)
            divergence, accepted, missing = _compare_with_itself(measured, own_texts, served)
            # As hard as where it was judged; else as the suite says, else by default.
            settings = probed.settings if probed is not None else suite.probes or ProbeSettings()
            place = deployment_place(run_dir, profile.name, measured.label)
            probes = probe_served(
                server,
                settings.model_copy(update={"concurrency": profile.concurrency}),
                label=measured.label,
                checkpoint_sha256=measured.checkpoint_sha256,
                place=place.parent / "probes" / place.name,
                on_progress=report,
            )
    no_drafts = missing.get("acceptance", "the server drafted nothing")
    accepted_before = None if own_texts is None else own_texts.acceptance
    judged_on = measured.fingerprint
    subject = DeployedCandidate(
        measured,
        profile.name,
        divergence,
        None if own_texts is None else own_texts.repeat,
        (
            DraftingSide(judged_on.profile, judged_on.speculation is not None, accepted_before, no_drafts),
            DraftingSide(profile.name, fingerprint.speculation is not None, accepted, no_drafts),
        ),
        probed,
        probes,
        missing,
    )
    checks = judge_deployment(gates, subject)
    record = Deployment(
        model=measured.model,
        label=measured.label,
        profile=profile.name,
        checkpoint=str(checkpoint),
        checkpoint_sha256=measured.checkpoint_sha256,
        suite_sha256=measured.suite_sha256,
        verdict=judged.overall[measured.label],
        gate_recipe_sha256=judged.gate_recipe_sha256,
        judged_on=measured.fingerprint,
        deployed_on=fingerprint,
        served_differently=tuple(fingerprints_differ(measured.fingerprint, fingerprint, other=profile.name)),
        divergence=divergence,
        noise_floor=subject.noise_floor,
        acceptance_judged=accepted_before,
        acceptance=accepted,
        alarms_judged=None if probed is None else tuple(alarm.name for alarm in probed.alarms),
        alarms=tuple(alarm.name for alarm in probes.alarms),
        not_measured=missing,
        checks=checks,
        outcome=outcome_of(checks),
        sentence=outcome_sentence(checks, profile.name, judged.overall[measured.label]),
        started=started.isoformat(timespec="milliseconds"),
        seconds=round(time.monotonic() - clock, 3),
    )
    record.save(deployment_place(run_dir, profile.name, measured.label))
    return record


def check_deployable(measured: Measurement, checkpoint: Path, profile: ProfileRecipe, journal: Journal) -> None:
    """MeasureError: nothing can be said of this candidate there, or the folder is not what was measured."""
    if measured.fingerprint.server == "external":
        raise MeasureError(
            f"{measured.label}: was measured at a server that ran already, whose flags nobody knows; evaluate it with servers "
            "that assay starts"
        )
    if measured.fingerprint.profile == profile.name:
        raise MeasureError(f"{measured.label}: was judged on {profile.name} itself; name the profile that it is deployed on")
    sha256 = checkpoint_sha256(checkpoint, journal.file_sha256)
    if sha256 != measured.checkpoint_sha256:
        raise MeasureError(
            f"{checkpoint}: is not the checkpoint that was measured as {measured.label} ({sha256[:12]}, measured "
            f"{measured.checkpoint_sha256[:12]}); copy that one here, or evaluate this one first"
        )


def served_there(measured: Measurement, profile: ProfileRecipe) -> ProfileRecipe:
    """The profile, with what a variant declares: it is that way of serving which was judged."""
    return profile.served_as(declared_variant(measured.label, measured.declared)) if measured.is_variant else profile


def serving_of(measured: Measurement) -> Serving:
    """What the model itself needs, as it was measured: the run knows it, and a recipe may have changed since.

    Flags of a profile (GPUs, KV cache, batch) are left to the profile; where that names no context, the measured one holds.
    """
    flags = measured.fingerprint.flags
    own = {name: flags[name] for name in sorted(MODEL_FLAGS & flags.keys())}
    if measured.fingerprint.speculation is not None:
        own["speculative-config"] = measured.fingerprint.speculation
    length = flags.get("max-model-len")
    return Serving(
        reasoning_parser=flags.get("reasoning-parser"),
        tool_call_parser=flags.get("tool-call-parser"),
        max_model_len=length if isinstance(length, int) else None,
        chat_template_kwargs={} if measured.asked_with is None else measured.asked_with.chat_template_kwargs,
        vllm=own,
    )


def _compare_with_itself(
    measured: Measurement, own_texts: OwnTexts | None, served: ServedCheckpoint
) -> tuple[Divergence | None, Acceptance | None, dict[str, str]]:
    """(divergence, acceptance, what is missing -> why) of the deployed candidate on what it left where it was judged."""
    own = own_suite(served.suite)
    if own is None or own_texts is None:
        reason = f"suite {served.suite.name} has no divergence, so the candidate wrote no texts"
        if own is not None:
            reason = (
                f"{measured.label} wrote no texts of its own on {measured.fingerprint.profile}; `assay evaluate --own-texts` "
                "there writes them and measures nothing again"
            )
        return None, None, {"divergence": reason, "acceptance": reason}
    served = dataclasses.replace(served, suite=own)
    with served.session() as session:
        accepted = answer_questions(served, session, own_texts.text.who)
        phase = served.divergence_phase(session, own_texts.text)
        divergence = phase.finish(())
    return divergence, accepted, {**own_texts.not_measured, **phase.not_measured}
