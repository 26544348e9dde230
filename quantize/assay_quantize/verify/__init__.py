"""Reopens a quantized checkpoint and checks everything; neither manifest, nor index, nor config is trusted.

In: the folder of a checkpoint, and its source where there is one. Out: a `Verification` that names every damage. May import
plan, checkpoint, kernels, formats and storage, but never the engine: a check must not use the code that it checks.
"""
