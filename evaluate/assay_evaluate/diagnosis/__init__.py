"""Failures that are not in the weights: found by probes, traced to a serving parameter by levers, to a layer by locate.

In: an endpoint, or a checkpoint that is served for it. Out: `ProbeReport`, `LeverReport`, `Location` records. `asker` and
`endpoint` are what probes and levers share. May import tasks, asking, client, serving and statistics.
"""
