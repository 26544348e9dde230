"""Reopens a quantized checkpoint and trusts nothing: neither manifest, nor index, nor config.

In: the folder of a checkpoint, and its source where there is one. Out: a `Verification` that names every damage. May import
plan, checkpoint, kernels, formats and storage, but never the engine: what made the checkpoint has no say here.
"""
