"""Which checkpoint to deploy: speed and quality joined, per operating point.

Comes in: rows of speed, verdicts, what fits a machine. Goes out: a `Choice` record and its sentences. May import: assay,
speed, roofline, statistics.
"""
