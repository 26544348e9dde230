"""Logits of a model that is run layer by layer."""

from __future__ import annotations

import torch
from torch import Tensor

from assay_quantize.calibration.one_layer import State
from assay_quantize.screen.layer_model import LayerModel


def logits_of(model: LayerModel, tokens: Tensor) -> Tensor:
    """At every place."""
    state: State | None = None
    model.use_embedding(tokens)
    for layer in range(model.num_layers):
        with model.filled(layer):
            state = model.run(layer, tokens, state)
    assert state is not None
    with model.head() as logits:
        return logits(tokens, torch.arange(tokens.shape[1]), state)
