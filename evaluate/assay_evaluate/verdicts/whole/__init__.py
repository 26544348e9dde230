"""All score gates together.

In: verdicts of the score gates, the gates' `whole:`. Out: a `WholeClaim`. May import statistics.
"""
