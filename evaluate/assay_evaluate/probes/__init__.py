"""Serving-fidelity probes: failures that are not in the weights, found from outside, with a bound for every rate.

    endpoint = find_endpoint("http://127.0.0.1:8000")
    report = run_probes(endpoint, ProbeSettings(), ["argmax", "garble"])

`PROBES` is the table of all; docs/fidelity.md says what each sees, its statistic, its threshold and why.
"""

from assay.probe_records import Offer, ProbeReport, ProbeResult, ProbeSettings, Witness
from assay_evaluate.probes.asking import Ask, Asker, Exchange
from assay_evaluate.probes.endpoint import ProbedEndpoint, find_endpoint
from assay_evaluate.probes.run import PROBES, run_probes

__all__ = [
    "PROBES",
    "Ask",
    "Asker",
    "Exchange",
    "Offer",
    "ProbeReport",
    "ProbeResult",
    "ProbeSettings",
    "ProbedEndpoint",
    "Witness",
    "find_endpoint",
    "run_probes",
]
