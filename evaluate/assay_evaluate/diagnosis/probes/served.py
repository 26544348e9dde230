"""Probes of a checkpoint: served as an evaluation serves it, and once more without speculation for the pair."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path

from assay.callbacks import Say
from assay.recipes.profile import ProfileRecipe
from assay.records.probe import ProbeReport, ProbeSettings, ledger_of
from assay_evaluate.client.client import Client
from assay_evaluate.diagnosis.endpoint import ProbedEndpoint, find_endpoint
from assay_evaluate.diagnosis.probes.probe_session import ProbeSession
from assay_evaluate.diagnosis.probes.run_probes import PROBES, checked_names, run_probes, run_session
from assay_evaluate.diagnosis.probes.speculation import pair_with
from assay_evaluate.serving.server import Server, ServerSpec, serve

COUNT_NANS = {"VLLM_COMPUTE_NANS_IN_LOGITS": "1"}
"""Makes vLLM count requests whose logits held NaN; changes nothing else."""


def probe_checkpoint(
    spec: ServerSpec,
    settings: ProbeSettings,
    names: Sequence[str] | None = None,
    *,
    label: str,
    checkpoint_sha256: str,
    ledger: Path,
    on_progress: Say = lambda line: None,
    start_server: Callable[[ServerSpec, Say], AbstractContextManager[Server]] = serve,
) -> ProbeReport:
    """Serve `spec` and run the probes; where it drafts, serve it again without and compare. ServeError, MeasureError.

    The servers run one after the other: two of them fit on no machine that is sized for one.
    """
    wanted = checked_names(names)
    spec = replace(spec, profile=_counting(spec.profile))
    with start_server(spec, on_progress) as server:
        endpoint = replace(_met(server), checkpoint_sha256=checkpoint_sha256)
        with Client(endpoint, timeout_s=settings.timeout_s, ledger=ledger, on_progress=on_progress) as client:
            session = ProbeSession(endpoint, settings, client, None, on_progress)
            report = run_session(session, wanted, label=label)
            is_pair = "speculation" in wanted and endpoint.offer.speculation
            if is_pair:
                _ = session.greedy  # asked while this server is there
        fingerprint = server.fingerprint
    if is_pair:
        report = _with_pair(report, session, replace(spec, speculate=False), on_progress, start_server)
    return report.model_copy(update={"fingerprint": fingerprint})


def probe_served(
    server: Server,
    settings: ProbeSettings,
    *,
    label: str,
    checkpoint_sha256: str,
    place: Path,
    on_progress: Say = lambda line: None,
) -> ProbeReport:
    """All probes on a server that runs anyway, but for the pair, which needs another; written to `place`. MeasureError."""
    names = [name for name in PROBES if name != "speculation"]
    ledger_of(place).unlink(missing_ok=True)
    endpoint = replace(_met(server), checkpoint_sha256=checkpoint_sha256)
    report = run_probes(endpoint, settings, names, label=label, ledger=ledger_of(place), on_progress=on_progress)
    report = report.model_copy(update={"fingerprint": server.fingerprint})
    report.save(place)
    return report


def _met(server: Server) -> ProbedEndpoint:
    return find_endpoint(server.base_url, server.model, headers=server.headers)


def _counting(profile: ProfileRecipe) -> ProfileRecipe:
    return profile.model_copy(update={"environment": {**COUNT_NANS, **profile.environment}})


def _with_pair(
    report: ProbeReport,
    session: ProbeSession,
    spec: ServerSpec,
    on_progress: Say,
    start_server: Callable[[ServerSpec, Say], AbstractContextManager[Server]],
) -> ProbeReport:
    """The report with the pair's result in place of "no second server"."""
    spec = replace(spec, log_path=spec.log_path.with_stem(f"{spec.log_path.stem}-undrafted"))
    with start_server(spec, on_progress) as server:
        pair = pair_with(session, _met(server))
    on_progress(f"speculation: {'ALARM: ' if pair.status == 'alarm' else ''}{pair.sentence}")
    results = tuple(pair if one.name == "speculation" else one for one in report.results)
    return report.model_copy(update={"results": results})
