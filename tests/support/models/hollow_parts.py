"""Parts of hollow models: names and shapes of attention, MLPs, experts and norms, for `hollow_moe.py` and `hollow_later.py`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from towers import tower_shapes

from assay.recipes.text_config import text_of

Shapes = Iterator[tuple[str, tuple[int, ...]]]
Config = dict[str, Any]


class Model(NamedTuple):
    """A model of a family.

    named: as it is published. small: what a small checkpoint has otherwise, in the part that describes the language model.
    made_by: classes of transformers (config, model) that write the same names; None: it has none. layers: so many have one of
    each kind. most_ranks: among which its heads can be shared; 8: or more. mtp: it has an MTP block with which vLLM drafts.
    in_fp32: names that are stored as FP32, beside the biases of routers, as a regular expression. published: of a model that is
    released quantized: (its config, names and shapes) -> (config, names and shapes, dtypes) of the release.
    """

    named: str
    config: Config
    shapes: Callable[[Config], Shapes]
    small: Config
    made_by: tuple[str, str] | None = None
    layers: int = 2
    most_ranks: int = 8
    mtp: bool = False
    in_fp32: str = r"(?!)"
    published: Callable[[Config, Shapes], tuple[Config, Shapes, dict[str, str]]] | None = None


# ------------------------------------------------------------------------------------------------ parts
def linears(prefix: str, *, bias: bool = False, **shapes: tuple[int, ...]) -> Shapes:
    for name, shape in shapes.items():
        yield f"{prefix}.{name}.weight", shape
        if bias:
            yield f"{prefix}.{name}.bias", shape[:1]


def norms_of(prefix: str, width: int, *names: str, bias: bool = False) -> Shapes:
    return linears(prefix, bias=bias, **dict.fromkeys(names, (width,)))


def mlp_of(prefix: str, hidden: int, width: int, names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")) -> Shapes:
    gate, up, down = names
    return linears(prefix, **{gate: (width, hidden), up: (width, hidden), down: (hidden, width)})


def gqa_of(prefix: str, text: Config, *, bias: bool = False, o_bias: bool | None = None, o: str = "o_proj") -> Shapes:
    """Grouped-query attention. o_bias: of the last projection, if it differs."""
    hidden, heads, kv_heads = text["hidden_size"], text["num_attention_heads"], text["num_key_value_heads"]
    width = text.get("head_dim") or hidden // heads
    rows = {"q_proj": heads, "k_proj": kv_heads, "v_proj": kv_heads}
    yield from linears(prefix, bias=bias, **{name: (count * width, hidden) for name, count in rows.items()})
    yield from linears(prefix, bias=bias if o_bias is None else o_bias, **{o: (hidden, heads * width)})


def experts_of(
    prefix: str, count: int, hidden: int, width: int, names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
) -> Shapes:
    for expert in range(count):
        yield from mlp_of(f"{prefix}.{expert}", hidden, width, names)


def whole_model(
    config: Config, layer: Callable[[str, Config, int], Shapes], root: str = "model", *, head: str = "lm_head",
        tower: str | None = None,
    norm: str = "norm",
) -> Shapes:  # fmt: skip
    """Embedding, layers, norm and head; the head unless it is tied; behind them a tower."""
    text = text_of(config)
    hidden = text["hidden_size"]
    yield f"{root}.embed_tokens.weight", (text["vocab_size"], hidden)
    for number in range(text["num_hidden_layers"]):
        yield from layer(f"{root}.layers.{number}", text, number)
    yield f"{root}.{norm}.weight", (hidden,)
    if not config.get("tie_word_embeddings", text.get("tie_word_embeddings")):
        yield f"{head}.weight", (text["vocab_size"], hidden)
    if tower is not None:
        yield from tower_shapes(tower, hidden)


NORMS = ("input_layernorm", "post_attention_layernorm")
W123 = ("w1", "w3", "w2")
TEXT = {"dtype": "bfloat16", "hidden_act": "silu", "tie_word_embeddings": False}
SMALL = {
    "num_hidden_layers": 2, "hidden_size": 256, "vocab_size": 512, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 4096, "num_experts_per_tok": 2, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2,
}  # fmt: skip
