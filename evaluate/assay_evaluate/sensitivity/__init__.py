"""Sensitivity of parts, measured by serving, and what statistics say of it.

    damage  divergence at each position -> mean with its interval over texts, and apart by domain, language, structure, context
    ranks   two ways to order parts -> Spearman's rank correlation with a bootstrap interval
    served  checkpoints with one part quantized -> served, on the reference's replies, by the same code as a suite's divergence
    drafts  acceptance of drafts by the precision of the MTP block, from a run's measurements

In: arrays, folders of checkpoints, run folders. Out: parts of the `Sensitivity` record. May import `run` and what is below it.
"""
