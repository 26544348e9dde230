"""From a plan to files: shard by shard, in bounded memory, journaled, resumable; config, index and manifest come last.

In: a `Plan`, the folder of the source, a runner (a function that makes shards; `local_runner` unless the caller gives another).
Out: a checkpoint folder and its `Manifest`. May import plan, checkpoint, kernels, formats and storage.
"""
