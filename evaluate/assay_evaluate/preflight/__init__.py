"""What can be known of serving and measuring before it is begun: vLLM's loaders, its environment, data sets, contexts, cost.

In: recipes of model, profile, suite and gates; small files of a checkpoint. Out: `Check` records. May import `verdicts`,
`divergence`, `diagnosis` and the rooms below.
"""
