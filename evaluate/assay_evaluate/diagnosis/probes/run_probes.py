"""All probes, and one run of some of them against an endpoint."""

from __future__ import annotations

import datetime
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

from assay.callbacks import Say
from assay.errors import MeasureError
from assay.records.probe import ProbeReport, ProbeResult, ProbeSettings, ledger_of
from assay_evaluate.client.client import Client
from assay_evaluate.diagnosis.endpoint import ProbedEndpoint, find_endpoint
from assay_evaluate.diagnosis.probes.acceptance import probe_acceptance
from assay_evaluate.diagnosis.probes.determinism import compare_with_undrafted, probe_determinism, probe_speculation
from assay_evaluate.diagnosis.probes.garble import probe_garble
from assay_evaluate.diagnosis.probes.nonfinite import probe_nonfinite
from assay_evaluate.diagnosis.probes.planned import change_by_offer, plan_requests
from assay_evaluate.diagnosis.probes.probe_session import ProbeSession
from assay_evaluate.diagnosis.probes.ranking import probe_argmax, probe_consensus
from assay_evaluate.diagnosis.probes.recompute import probe_recompute
from assay_evaluate.diagnosis.probes.routing import probe_routing
from assay_evaluate.diagnosis.probes.swapped import probe_swapped
from assay_evaluate.diagnosis.probes.temperature import probe_temperature
from assay_evaluate.diagnosis.probes.tool_ladder import probe_tools
from assay_evaluate.diagnosis.probes.whole_text import probe_text
from assay_evaluate.serving.server import Server, ServerSpec, serve

PROBES: dict[str, Callable[[ProbeSession], ProbeResult]] = {
    "argmax": probe_argmax,
    "recompute": probe_recompute,
    "consensus": probe_consensus,
    "routing": probe_routing,
    "determinism": probe_determinism,
    "speculation": probe_speculation,
    "acceptance": probe_acceptance,
    "temperature": probe_temperature,
    "tools": probe_tools,
    "garble": probe_garble,  # this one and the next three look at everything that was asked
    "text": probe_text,
    "nonfinite": probe_nonfinite,
    "swapped": probe_swapped,
}


def run_probes(
    endpoint: ProbedEndpoint,
    settings: ProbeSettings | None = None,
    names: Sequence[str] | None = None,
    *,
    label: str | None = None,
    without_speculation: ProbedEndpoint | None = None,
    ledger: Path | None = None,
    is_announced: bool = False,
    on_progress: Callable[[str], None] = lambda line: None,
) -> ProbeReport:
    """Run the probes called `names` (None: all), in the order of `PROBES`, and report.

    without_speculation: the same checkpoint on a server that drafts nothing, for the pair. ledger: every request and reply,
    JSON lines, appended.
    is_announced: what an endpoint that offers everything is sent was said before; what differs from it is.
    MeasureError: a name that is not in the table, or the server is gone.
    """
    settings, names = settings or ProbeSettings(), checked_names(names)
    with Client(endpoint, timeout_s=settings.timeout_s, ledger=ledger, on_progress=on_progress) as client:
        session = ProbeSession(endpoint, settings, client, without_speculation, on_progress)
        has_pair = without_speculation is not None
        return run_session(session, names, label=label, has_pair=has_pair, is_announced=is_announced)


def checked_names(names: Sequence[str] | None) -> list[str]:
    """Those that were asked for, in the order of the table. MeasureError: one that is not in it."""
    unknown = [name for name in names or () if name not in PROBES]
    if unknown:
        raise MeasureError(f"no probe called {unknown[0]!r}; there are: {', '.join(PROBES)}")
    return [name for name in PROBES if names is None or name in names]


def run_session(
    session: ProbeSession, names: Sequence[str], *, has_pair: bool, label: str | None = None, is_announced: bool = False
) -> ProbeReport:
    """Run `names`, in their order, on a session that is open; what it was asked before is not asked again.

    has_pair: a server without speculation is asked as well, now or later. is_announced: as for `run_probes`.
    """
    started, clock = datetime.datetime.now(datetime.UTC), time.monotonic()
    endpoint, client, settings = session.endpoint, session.client, session.settings
    if not is_announced:
        planned = plan_requests(settings, names, endpoint.offer, endpoint.max_model_len, has_pair=has_pair)
        session.on_progress(planned.sentence(settings))
    elif line := change_by_offer(settings, names, endpoint.offer, endpoint.max_model_len, has_pair=has_pair):
        session.on_progress(line)
    results = []
    for name in names:
        begun = time.monotonic()
        results.append(PROBES[name](session))
        mark = "ALARM: " if results[-1].status == "alarm" else ""
        session.on_progress(f"{name}: {mark}{results[-1].sentence} ({time.monotonic() - begun:.0f} s)")
    return ProbeReport(
        label=label or endpoint.model,
        base_url=endpoint.base_url,
        model=endpoint.model,
        checkpoint_sha256=endpoint.checkpoint_sha256,
        max_model_len=endpoint.max_model_len,
        offer=endpoint.offer,
        settings=settings,
        results=tuple(results),
        num_requests=client.tally.num_requests,
        num_failed=client.tally.num_failed,
        errors=dict(sorted(client.tally.errors.items())),
        system_fingerprint=client.tally.system_fingerprint,
        started=started.isoformat(timespec="seconds"),
        seconds=round(time.monotonic() - clock, 3),
    )


# ------------------------------------------------------------------------------------------------ of a checkpoint
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
    is_announced: bool = False,
    on_progress: Say = lambda line: None,
    start_server: Callable[[ServerSpec, Say], AbstractContextManager[Server]] = serve,
) -> ProbeReport:
    """Serve `spec` and run the probes; where it drafts, serve it again without and compare. ServeError, MeasureError.

    The servers run one after the other: two of them fit on no machine that is sized for one. is_announced: as for `run_probes`.
    """
    names = checked_names(names)
    environment = {**COUNT_NANS, **spec.profile.environment}
    spec = replace(spec, profile=spec.profile.model_copy(update={"environment": environment}))
    with start_server(spec, on_progress) as server:
        endpoint = replace(_find_server(server), checkpoint_sha256=checkpoint_sha256)
        with Client(endpoint, timeout_s=settings.timeout_s, ledger=ledger, on_progress=on_progress) as client:
            session = ProbeSession(endpoint, settings, client, None, on_progress)
            report = run_session(session, names, label=label, has_pair=True, is_announced=is_announced)
            needs_pair = "speculation" in names and endpoint.offer.speculation
            if needs_pair:
                _ = session.greedy  # asked while this server is there
        fingerprint = server.fingerprint
    if needs_pair:
        log_path = spec.log_path.with_stem(f"{spec.log_path.stem}-undrafted")
        with start_server(replace(spec, speculate=False, log_path=log_path), on_progress) as server:
            pair = compare_with_undrafted(session, _find_server(server))
        on_progress(f"speculation: {'ALARM: ' if pair.status == 'alarm' else ''}{pair.sentence}")
        results = tuple(pair if result.name == "speculation" else result for result in report.results)
        report = report.model_copy(update={"results": results})
    return report.model_copy(update={"fingerprint": fingerprint})


def probe_served(
    server: Server,
    settings: ProbeSettings,
    *,
    label: str,
    checkpoint_sha256: str,
    place: Path,
    declared: Mapping[str, Any] | None = None,
    on_progress: Say = lambda line: None,
) -> ProbeReport:
    """All probes on a server that runs anyway, but for the pair, which needs another; written to `place`. MeasureError.

    declared: of a variant (`ProbeReport.declared`).
    """
    names = [name for name in PROBES if name != "speculation"]
    ledger_of(place).unlink(missing_ok=True)
    endpoint = replace(_find_server(server), checkpoint_sha256=checkpoint_sha256)
    report = run_probes(endpoint, settings, names, label=label, ledger=ledger_of(place), on_progress=on_progress)
    report = report.model_copy(update={"fingerprint": server.fingerprint, "declared": dict(declared or {})})
    report.save(place)
    return report


def _find_server(server: Server) -> ProbedEndpoint:
    return find_endpoint(server.base_url, server.model, headers=server.headers)
