"""From a checkpoint and a precision recipe to a quantized checkpoint, and the verification of what was written.

    checkpoint -> plan -> engine (on this machine; remote: on a cluster, or from the hub) -> verify
    below them   formats (tables), kernels (arithmetic), storage (the disk);   beside them   calibration, estimate

In: a checkpoint folder or hub id, `assay.recipes`. Out: a checkpoint folder, `assay.records`. Never imports assay_evaluate.
"""
