"""Candidates of the synthetic run on a deployment profile, made by hand and judged as real ones are. Nothing was measured."""

from __future__ import annotations

import functools
from typing import Any

from probe_reports import CLEAN, probed
from synthetic_run import make_acceptance, make_divergence, make_measurements

from assay.recipes.gate import GateRecipe
from assay.recipes.load import load_recipe
from assay.records.comparable import fingerprints_differ
from assay.records.deployment.record import Deployment
from assay.records.measurement import Measurement
from assay_evaluate.verdicts.acceptance import DraftingSide
from assay_evaluate.verdicts.deployment import DeployedCandidate, judge_deployment, outcome_of, outcome_sentence

QUICK = load_recipe(GateRecipe, "quick")
ELSEWHERE = "4xh200"


@functools.cache
def measured(label: str = "w4a16") -> Measurement:
    return next(one for one in make_measurements(0) if one.label == label)


def drafting(name: str, label: str = "w4a16", **changes: Any) -> DraftingSide:
    return DraftingSide(name, changes.pop("drafts", True), changes.pop("acceptance", make_acceptance(label)), **changes)


def seen(**changes: Any) -> DeployedCandidate:
    """A candidate that is itself elsewhere, within a few times its noise."""
    same = {
        "measured": measured(),
        "profile": ELSEWHERE,
        "divergence": make_divergence("w4a16", 0.05),
        "noise_floor": make_divergence("fp8-repeat"),
        "drafts": (drafting("cpu-emulated"), drafting(ELSEWHERE)),
        "probes_there": None,
        "probes": probed("w4a16", *CLEAN),
    }
    return DeployedCandidate(**{**same, **changes})


def make_deployment(one: DeployedCandidate | None = None) -> Deployment:
    """The record of what was seen, by the limits of the synthetic run."""
    one = one or seen()
    checks = judge_deployment(QUICK, one)
    here = one.measured.fingerprint.model_copy(
        update={"profile": one.profile, "flags": {**one.measured.fingerprint.flags, "tensor-parallel-size": 4}}
    )
    return Deployment(
        model=one.measured.model, label=one.measured.label, profile=one.profile, checkpoint="x",
        checkpoint_sha256=one.measured.checkpoint_sha256, suite_sha256=one.measured.suite_sha256, verdict="PASS",
        gate_recipe_sha256=QUICK.sha256, judged_on=one.measured.fingerprint, deployed_on=here,
        served_differently=tuple(fingerprints_differ(one.measured.fingerprint, here, other=one.profile)),
        divergence=one.divergence, noise_floor=one.noise_floor, acceptance_judged=one.drafts[0].acceptance,
        acceptance=one.drafts[1].acceptance, alarms_judged=None,
        alarms=None if one.probes is None else tuple(alarm.name for alarm in one.probes.alarms),
        not_measured=one.not_measured, checks=checks, outcome=outcome_of(checks),
        sentence=outcome_sentence(checks, one.profile, "PASS"), started="2026-11-22T00:00:00+00:00", seconds=90.0,
    )  # fmt: skip
