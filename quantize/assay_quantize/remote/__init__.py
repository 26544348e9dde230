"""Shards made by Ray tasks on a cluster, and sources streamed from the hub.

In: what the engine gives a runner. Out: finished shards and their records, the same bytes as on one machine. Optional: no
other room imports it. May import engine and everything below it.
"""
