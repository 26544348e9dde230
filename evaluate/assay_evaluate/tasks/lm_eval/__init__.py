"""Tasks of lm-eval: its questions and its scoring, our requests.

In: a session with a served checkpoint, the name of a task or a folder of your own. Out: a `TaskResult`, item by item. May
import what `tasks` may.
"""
