"""A trained small model, made wide enough for GPU kernels without changing what it computes.

Random weights would give replies that a rounding error changes, and drafts that are never accepted. So a `glm4_moe` checkpoint
is widened: hidden channels, the channels inside each MLP and the heads are repeated, and what a matrix reads is divided by how
often it is repeated (Net2Net, Chen et al., arXiv 1511.05641). Repeats are powers of two, so that BF16 holds the quotients
exactly. The channels are then shuffled: a kernel that reads a channel that lies a whole width further would find its twin.
"""

from __future__ import annotations

import json
import math
import random
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from assay.errors import AssayError
from assay.safe_files import read_json_object
from assay.safetensors_index import INDEX_NAME

if TYPE_CHECKING:
    import torch

SEED = "gpu-check"


@dataclass(frozen=True)
class Widths:
    """How often each width is repeated: powers of two. heads: attention heads, those of keys and values alike."""

    hidden: int = 1
    dense: int = 1
    expert: int = 1
    heads: int = 1


FOR_KERNELS = Widths(hidden=4, dense=4, expert=8, heads=4)
"""tiny-glm becomes hidden 1024, experts 1024, dense MLP 2048, 16 heads of 64: 141 M parameters, 0.28 GB in BF16. DeepGEMM
leaves experts up to 512 wide to Triton (vLLM's `_valid_deep_gemm`); Marlin wants multiples of 128."""

_HEAD_NORMS = "self_attn.q_norm.weight", "self_attn.k_norm.weight"
_KEPT_ROWS = "embed_tokens.weight", "lm_head.weight", "shared_head.head.weight", "mlp.gate.weight"
_MLP = re.compile(r"(?P<mlp>.*\.mlp(?:\.shared_experts|\.experts\.\d+)?)\.(?P<part>gate|up|down)_proj\.weight")


def widen(source: Path, folder: Path, widths: Widths = FOR_KERNELS) -> Path:
    """Write the wide twin of the glm4_moe checkpoint `source` into `folder`, and return `folder`. Same arguments, same bytes.

    AssayError: another architecture, or a tensor whose axes are not known here.
    """
    from safetensors.torch import load_file, save_file

    config = read_json_object(source, "config.json")
    if config.get("model_type") != "glm4_moe":
        raise AssayError(f"{source}: is a {config.get('model_type')}; only glm4_moe checkpoints can be widened")
    tensors = {name: tensor for path in sorted(source.glob("*.safetensors")) for name, tensor in load_file(path).items()}
    axes = _Axes(config, widths)
    folder.mkdir(parents=True, exist_ok=True)
    wide = {name: _widened(tensors[name], axes.of(name)) for name in sorted(tensors)}
    save_file(wide, folder / "model.safetensors", metadata={"format": "pt"})
    for path in source.iterdir():
        if path.is_file() and path.suffix != ".safetensors" and path.name != INDEX_NAME:
            shutil.copyfile(path, folder / path.name)
    (folder / "config.json").write_text(json.dumps(config | axes.sizes, indent=1) + "\n", encoding="utf-8")
    return folder


@dataclass(frozen=True)
class _Axis:
    """places: of the old axis, in the order of the new one; None: the axis stays. repeats: of each old place."""

    places: tuple[int, ...] | None
    repeats: int = 1


_STAYS = _Axis(None)


def _widened(tensor: torch.Tensor, axes: tuple[_Axis, ...]) -> torch.Tensor:
    """Repeat along every axis; of a matrix, divide by the repeats of the last axis, which it sums over."""
    import torch

    for dimension, axis in enumerate(axes):
        if axis.places is not None:
            tensor = tensor.index_select(dimension, torch.tensor(axis.places))
    return (tensor / axes[-1].repeats if len(axes) == 2 else tensor).contiguous()


class _Axes:
    """Which axis of which tensor is repeated, and in what order."""

    def __init__(self, config: Mapping[str, Any], widths: Widths) -> None:
        assert all(math.log2(repeats).is_integer() for repeats in vars(widths).values()), widths
        self._widths = widths
        self._inner = {"dense": config["intermediate_size"], "expert": config["moe_intermediate_size"]}
        self._shared = config["moe_intermediate_size"] * config["n_shared_experts"]
        self._hidden = _shuffled(config["hidden_size"], widths.hidden, "hidden")
        kv_heads, head = config["num_key_value_heads"], config["head_dim"]
        group = config["num_attention_heads"] // kv_heads
        order = _shuffled(kv_heads, widths.heads, "heads").places or ()
        self._kv = _Axis(_spread(order, head), widths.heads)
        self._q = _Axis(_spread(order, head * group), widths.heads)
        self.sizes = {
            "hidden_size": config["hidden_size"] * widths.hidden,
            "intermediate_size": config["intermediate_size"] * widths.dense,
            "moe_intermediate_size": config["moe_intermediate_size"] * widths.expert,
            "num_attention_heads": config["num_attention_heads"] * widths.heads,
            "num_key_value_heads": kv_heads * widths.heads,
        }

    def of(self, name: str) -> tuple[_Axis, ...]:
        """Of the tensor `name`, outermost first."""
        if name.endswith("e_score_correction_bias") or name.endswith(_HEAD_NORMS):
            return (_STAYS,)
        if name.endswith("norm.weight"):
            return (self._hidden,)
        if name.endswith(_KEPT_ROWS):
            # a row of the embedding is looked up, not summed over
            return _STAYS, _Axis(self._hidden.places) if name.endswith("embed_tokens.weight") else self._hidden
        if name.endswith("eh_proj.weight"):  # reads the embedding's channels, then the hidden ones
            old = len(self._hidden.places or ()) // self._hidden.repeats
            places = (*(self._hidden.places or ()), *(old + place for place in self._hidden.places or ()))
            return self._hidden, _Axis(places, self._hidden.repeats)
        if (match := _MLP.fullmatch(name)) is not None:
            mlp, repeats, size = match["mlp"], self._widths.expert, self._inner["expert"]
            if mlp.endswith("shared_experts"):
                size = self._shared
            elif ".experts." not in mlp:
                repeats, size = self._widths.dense, self._inner["dense"]
            inner = _shuffled(size, repeats, mlp)  # channels inside one MLP, shuffled by themselves
            return (self._hidden, inner) if match["part"] == "down" else (inner, self._hidden)
        module, _, part = name.rpartition(".")
        outside = {"q_proj": self._q, "k_proj": self._kv, "v_proj": self._kv}.get(module.rpartition(".")[2])
        if outside is not None:
            return (outside,) if part == "bias" else (outside, self._hidden)
        if module.endswith("self_attn.o_proj"):
            return self._hidden, self._q
        raise AssayError(f"{name}: a tensor whose axes are not known here, so the checkpoint cannot be widened")


def _shuffled(size: int, repeats: int, what: str) -> _Axis:
    """Every place `repeats` times, in an order that depends on `what` alone."""
    places = [*range(size)] * repeats
    random.Random(f"{SEED}:{what}").shuffle(places)
    return _Axis(tuple(places), repeats)


def _spread(order: tuple[int, ...], block: int) -> tuple[int, ...]:
    """Blocks in `order`, the places inside each in theirs."""
    return tuple(number * block + place for number in order for place in range(block))
