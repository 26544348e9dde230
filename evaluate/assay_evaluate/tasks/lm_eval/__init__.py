"""Tasks of lm-eval: its questions and its scoring, our requests.

In: the name of a task, or a folder of one's own. Out: a `TaskResult`, item by item. May import what `tasks` may.
"""
