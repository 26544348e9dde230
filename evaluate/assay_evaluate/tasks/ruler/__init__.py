"""Long context: the thirteen RULER tasks and a needle grid, generated offline for a model's own tokenizer and template.

Written from the published method (Hsieh et al. 2024, arXiv 2404.06654). In: a task, a length, a counter of tokens, a seed.
Out: items with their answers, and scores. May import what `tasks` may, and needs no server; `tasks.ruler_task` asks the
items.
"""
