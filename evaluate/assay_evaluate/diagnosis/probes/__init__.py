"""Serving-fidelity probes: failures that are not in the weights, found from outside, with a bound for every rate.

    endpoint = find_endpoint("http://127.0.0.1:8000")
    report = run_probes(endpoint, ProbeSettings(), ["argmax", "garble"])

`run_probes.PROBES` is the table of all; docs/fidelity.md says what each sees, its statistic, its threshold and why. In: an
endpoint. Out: a `ProbeReport`. May import `diagnosis.endpoint` and the rooms below diagnosis.
"""
