"""From a plan to files: shard by shard, in bounded memory, journaled, resumable; config, index and manifest come last.

In: a `Plan`, the folder of the source, a runner (the function that makes the shards: `local_runner`, or another that the
caller gives). Out: a checkpoint folder and its `Manifest`. May import plan, checkpoint, kernels, formats and storage.
"""
