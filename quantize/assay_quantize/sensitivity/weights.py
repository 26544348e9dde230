"""Proxy `weights`: squared error of a part's weights over their squared norm. Reads the checkpoint once, runs no model.

For a model of any size, in the memory of one weight. It knows nothing of activations nor of what comes behind a layer: only its
order means something, and that within one role rather than between roles. It is no divergence.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from assay.records.diagnosis.sensitivity import WorstTensor
from assay_quantize.sensitivity.fisher import worst


def relative_error(rounded: Iterable[tuple[str, Tensor, Tensor]]) -> tuple[float, tuple[WorstTensor, ...]]:
    """(||rounded - plain||^2 / ||plain||^2 of the whole part, the weights with the largest shares of the error)."""
    errors, norm = {}, 0.0
    for name, plain, back in rounded:
        errors[name] = float(torch.linalg.vector_norm(back - plain, dtype=torch.float64)) ** 2
        norm += float(torch.linalg.vector_norm(plain, dtype=torch.float64)) ** 2
    return (sum(errors.values()) / norm if norm else 0.0), worst(errors)
