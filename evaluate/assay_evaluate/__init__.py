"""From served checkpoints to measurements, and from measurements to verdicts.

    run -> verdicts, divergence, diagnosis -> tasks -> asking -> client, serving -> transport, statistics

In: checkpoint folders or URLs, `assay.recipes`. Out: `assay.records`. Never imports assay_quantize.
"""
