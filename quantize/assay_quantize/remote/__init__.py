"""Where shards are made elsewhere or come from elsewhere: Ray tasks on a cluster, sources streamed from the hub.

In: what a runner of the engine is given. Out: finished shards and their records, the same bytes as on one machine. Optional:
nothing else in this package imports it. May import engine and everything below it.
"""
