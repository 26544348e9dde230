"""The candidates of the scale search: literal numbers, read by the definition and by the fused kernels.

Each list is tried after the min-max scale itself, in this order. Why these: search_reference.py; what they bring:
docs/decisions/kernels.md.
"""

from __future__ import annotations

INT_FACTORS = (0.80, 0.84, 0.87, 0.89, 0.91, 0.93, 0.95, 0.97, 1.02, 1.04, 1.06, 1.08, 1.10)
"""compressed-tensors divides by 7.5, half of 15 steps: the largest weight lies between two codes. Near 7.5 / 8 it becomes
exact if it is negative, near 7.5 / 7 if it is positive; the best scales lie around these two. From a scan of 0.50 to 1.25 in
steps of 0.01 on tiny-glm, normal and heavy-tailed weights: over 90 % within 0.88 and 1.11."""
FP8_FACTORS = (0.97, 1.06, 1.12, 1.18, 1.25, 1.33, 1.42, 1.5, 1.6, 1.75, 1.9)
"""E4M3 looks alike in every octave: one is scanned, upwards, since clipping costs; from 0.966 on the largest weight is not
clipped but rounds to 448."""
NVFP4_OFFSETS = (-3, -2, -1, 1, 2, 3, 4, 5, 6)
"""Neighbouring E4M3 scales, eight an octave. +4 and +5 make the largest weight 4 instead of 6 ("four over six",
arXiv 2512.02010)."""
MX_OFFSETS = (-1, 1)
"""Half and double."""
CHUNK = 128
"""Columns of a chunk of the error's sum."""
