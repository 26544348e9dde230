"""Recipes: what a person writes, in YAML, strictly parsed; six kinds, one folder each under `recipes/`.

    models/      a model: where its weights are, its family, what it is compared with, which precisions, how it is served
    precisions/  what to quantize, by role, and what to keep
    profiles/    how vLLM is run on some hardware; the one open block `vllm:` is passed on verbatim, under vLLM's flag names
    suites/      what is measured
    gates/       limits, written down before the run
    families/    how an architecture names its tensors; blocks/ are the parts that several families share

In: a recipe's name or a YAML file, and the config.json of a checkpoint (`families`: how an architecture names its tensors).
Out: frozen, checked objects. May import `assay.records` and the small modules of `assay`; neither torch nor vllm.
"""
