"""What the config.json of two checkpoints says of the model that is computed, compared as transformers reads it: a field that
is absent stands for its default, and both ways to write rotary embeddings are one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from assay.foreign_text import shown
from assay_quantize.screen.placing import text_config

MEANINGLESS_FIELDS = {
    "architectures", "attention_dropout", "auto_map", "bos_token_id", "chunk_size_feed_forward", "compression_config", "dtype",
    "eos_token_id", "id2label", "initializer_range", "label2id", "mtp_num_hidden_layers", "num_mtp_layers",
    "num_nextn_predict_layers", "output_attentions", "output_hidden_states", "output_router_logits", "pad_token_id",
    "problem_type", "quantization_config", "return_dict", "router_aux_loss_coef", "tie_word_embeddings", "torch_dtype",
    "transformers_version", "use_cache",
}  # fmt: skip
"""Of a config: what does not enter the forward of the decoder. So does nothing that begins with `_` or `unsloth`."""


class Difference(NamedTuple):
    """A field, dotted where it lies in another, and what the two say."""

    field: str
    reference: object
    own: object

    def __str__(self) -> str:
        own, reference = (shown("absent" if value is None else repr(value), 60) for value in (self.own, self.reference))
        return f"{shown(self.field, 60)} is {own}, and {reference} in the reference"


def config_differences(reference: Mapping[str, Any], own: Mapping[str, Any]) -> list[Difference]:
    """Fields of the language model in which two config.json differ, without those that mean nothing to its forward."""
    return _differences(text_config(reference).to_dict(), text_config(own).to_dict())


def _differences(reference: Mapping[str, Any], own: Mapping[str, Any], within: str = "") -> list[Difference]:
    made = []
    for name in sorted(reference.keys() | own.keys(), key=str):
        if name in MEANINGLESS_FIELDS or str(name).startswith(("_", "unsloth")):
            continue
        expected, stated = reference.get(name), own.get(name)
        if isinstance(expected, dict) and isinstance(stated, dict):
            made += _differences(expected, stated, within=f"{within}{name}.")
        elif expected != stated:
            made.append(Difference(f"{within}{name}", expected, stated))
    return made
