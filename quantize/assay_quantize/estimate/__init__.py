"""Hours, bytes and memory of a plan on some hardware, extrapolated from measured rates.

In: a `Plan`, rates of a machine (named, or measured here in seconds). Out: an `Estimate`. May import engine (its memory budget)
and everything below it.
"""
