"""Probe reports made by hand: a clean one, and one that alarms. Nothing here was measured."""

from __future__ import annotations

from synthetic_run import make_measurements

from assay.records.probe import Offer, ProbeReport, ProbeResult, ProbeSettings
from assay_evaluate.statistics.proportions import clopper_pearson
from assay_evaluate.statistics.rates import sentence, upper_bound

OFFER = Offer(
    is_vllm=True, version="0.32.0", chat=True, completions=True, logprobs=20, prompt_logprobs=20, token_ids=True,
    extended_sampling=True, tokenize=True, metrics=True, counts_nans=True, speculation=True, routed_experts=False,
    cache_salt=True, streams=True,
)  # fmt: skip


def result(name: str, events: int | None, trials: int | None, reason: str | None = None) -> ProbeResult:
    if events is None or trials is None:
        return ProbeResult(
            name=name, status="not_run", events=None, trials=None, unit="request", rate=None, upper=None,
            sentence=f"not run: {reason}", reason=reason,
        )  # fmt: skip
    return ProbeResult(
        name=name, status="alarm" if reason else "ok", events=events, trials=trials, unit="request",
        rate=clopper_pearson(events, trials), upper=upper_bound(events, trials), sentence=sentence(events, trials, "request"),
        reason=reason,
    )  # fmt: skip


def sha256_of_label(label: str) -> str:
    """Of the checkpoint that the synthetic run measured under this label."""
    return next(m.checkpoint_sha256 for m in make_measurements(0) if m.label == label)


def probed(label: str, *results: ProbeResult, sha256: str | None = None) -> ProbeReport:
    return ProbeReport(
        label=label, base_url="http://127.0.0.1:1", model="model", checkpoint_sha256=sha256 or sha256_of_label(label),
        max_model_len=4096, offer=OFFER, settings=ProbeSettings(), results=results, num_requests=2400, num_failed=0, errors={},
        system_fingerprint=None, started="2026-11-21T00:00:00+00:00", seconds=9.0,
    )  # fmt: skip


CLEAN = (
    result("argmax", 0, 4000),
    result("garble", 0, 2000),
    result("tools", None, None, "the server does not accept tool calls"),
)
ALARM = (result("argmax", 0, 4000), result("garble", 3, 2000, "3 of 2000 replies are garbled, and not by the model's habit"))
