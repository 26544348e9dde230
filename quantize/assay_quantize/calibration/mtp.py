"""What goes into the MTP block: the model's own hidden states and the token after each, as vLLM's drafters hand them over.

vLLM 0.32, `models/glm4_moe_mtp.py`, `models/deepseek_mtp.py` and `v1/spec_decode/llm_base_proposer.py`: the hidden state of a
position is the one behind the final norm; the embedding is the model's, of the token at the next position, and zero at position
0; both are normed, put side by side, embedding first, and projected by `eh_proj`. What comes out enters a decoder layer like
the others, at the position of the hidden state. transformers builds none of this.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from assay.recipes.families import text_of
from assay.records.plan import Plan
from assay_quantize.calibration.skeleton import Skeleton
from assay_quantize.checkpoint.source_reader import SourceReader


class MtpInput:
    """Made of what is behind the last decoder layer. The parts that no layer has are read from the source."""

    def __init__(self, skeleton: Skeleton, reader: SourceReader, plan: Plan, layer: int, tokens: Tensor) -> None:
        """layer: of the MTP block. tokens: all that will come. QuantizeError: the source lacks a part."""
        self._eps = float(text_of(plan.config).get("rms_norm_eps", 1e-6))
        at = f"{skeleton.prefix}.{layer}"
        self._final_H, self._enorm_H, self._hnorm_H, self._eh_proj_HI = (
            skeleton.value(reader, f"{name}.weight")
            for name in (f"{skeleton.prefix.rpartition('.')[0]}.norm", f"{at}.enorm", f"{at}.hnorm", f"{at}.eh_proj")
        )
        self._embedded = skeleton.embedded(reader, tokens)

    def __call__(self, hidden_BTH: Tensor, tokens_BT: Tensor) -> Tensor:
        """[B, T - 1, H]: the last position has no next token."""
        hidden = self._normed(self._normed(hidden_BTH[:, :-1], self._final_H), self._hnorm_H)
        embedding = self._embedded(tokens_BT[:, 1:]).clone()
        embedding[:, 0] = 0
        both_BTI = torch.cat([self._normed(embedding, self._enorm_H), hidden], -1)
        return nn.functional.linear(both_BTI, self._eh_proj_HI)

    def _normed(self, value: Tensor, weight_H: Tensor) -> Tensor:
        return nn.functional.rms_norm(value, (value.shape[-1],), weight_H, self._eps)
