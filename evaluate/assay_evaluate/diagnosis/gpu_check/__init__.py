"""What only a GPU can show: native kernels against emulation, kernels foreseen against kernels chosen.

In: checkpoints of one small model in several precisions, the machine. Out: a `GpuCheck` record. May import serving, client,
asking and tasks; no other room of `diagnosis`.
"""
