"""Failures that are not in the weights: probes find them, levers name the serving parameter, locate names the layer.

In: an endpoint, or a checkpoint that is served for it. Out: `ProbeReport`, `LeverReport`, `LocateReport`. `endpoint` is
what probes and levers share. May import tasks, asking, client, serving, transport and statistics.
"""
