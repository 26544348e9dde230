"""What is read: a checkpoint's headers, index and config, and the rows of its weights in whatever form they are stored.

In: a folder or a hub id. Out: `Checkpoint` (headers only), `SourceReader` (rows of logical weights, FP8 and fused experts
included), channel weights, and the layout of shard files. May import kernels, formats and storage.
"""
