"""Verdicts on the replies themselves: cut off, looping, longer than the reference's.

In: paired replies, limits. Out: verdicts. May import statistics and `assay` only.
"""
