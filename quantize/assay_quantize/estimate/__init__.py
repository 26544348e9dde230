"""How long a plan will take on some hardware, and how much it will read, write and hold in memory, from measured rates.

In: a `Plan`, the rates of a machine (a known one, or this one, measured in two seconds). Out: an `Estimate`. May import
engine and calibration (their memory) and everything below them.
"""
