"""Losses that are not spread evenly: in a few clusters, or in one subgroup of a task.

    clusters   the mean over clusters that were sampled, where a few of them may hold all of the loss

In: counts, arrays. Out: intervals, p values. May import numpy and scipy only.
"""
