"""From headers and a precision recipe to a `Plan`: what will happen to every tensor. Reads no weights.

In: a `Checkpoint`, a precision recipe. Out: `assay.records.plan.Plan`, the slabs it is cut into, its identity, the table that
`assay plan` prints, the precisions that fit a checkpoint's shapes. May import checkpoint, kernels (for how many rows a scheme
needs) and formats.
"""
