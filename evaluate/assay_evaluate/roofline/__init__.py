"""Bounds of speed from bytes: what a step of decoding reads, the least time that takes, and which kernel a format gets.

Comes in: weights of a checkpoint by name, shape and bytes; a GPU; requests in flight. Goes out: bytes, floors, predicted rows,
flags of rows that a floor contradicts. May import: assay.
"""
