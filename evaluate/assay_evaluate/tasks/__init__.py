"""What is asked and how a reply is scored: generated questions, lm-eval's tasks, RULER, tool calls, SWE-bench.

In: a session with a served checkpoint, a task of a suite recipe. Out: a `TaskResult`. May import asking, client and
statistics.
"""
