"""What can be known of a run from plans and headers before it is begun: disk, memory of each GPU, tensor parallelism.

In: plans, what is stored, a profile. Out: `Check` records. May import every other room of this package.
"""
