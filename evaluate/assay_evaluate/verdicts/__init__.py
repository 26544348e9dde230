"""From measurements and limits to verdicts: PASS, FAIL, UNDERPOWERED or NOT MEASURED, with a reason each.

In: `Measurement` and `ProbeReport` records, a gate recipe. Out: a `GateReport`. Asks no server. May import statistics.
"""
