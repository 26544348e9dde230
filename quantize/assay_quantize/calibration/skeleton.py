"""A model of transformers of which one decoder layer at a time has weights: the others pass on what they are given.

It is built on torch's meta device, so it takes no memory. A layer that is filled gets its weights from the source's files, in
whatever form they are stored, its experts one linear after the other (llm-compressor's `LinearExperts2D`); emptied, it is gone.
The model's own forward is run, so masks, positions and what one layer hands to the next are the model's.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from assay.errors import QuantizeError
from assay.recipes.text_config import text_of
from assay.records.plan import Plan, TensorPlan
from assay_quantize.calibration.one_layer import End, Passing, State, again_with_buffers, parent, run_layer
from assay_quantize.calibration.quiet import loading
from assay_quantize.checkpoint.source_reader import SourceReader
from assay_quantize.checkpoint.torch_tensors import TORCH_DTYPES

EMBEDDING_ROWS = 4096
"""Rows of the embedding that are read at once."""


class _Embedded(nn.Module):
    """Stands for the embedding: rows of the tokens that occur. ids: sorted."""

    def __init__(self, ids: Tensor, rows_VH: Tensor) -> None:
        super().__init__()
        self.ids, self.rows_VH = ids, rows_VH

    def forward(self, tokens: Tensor) -> Tensor:
        return self.rows_VH[torch.searchsorted(self.ids, tokens.contiguous()).clamp_max(len(self.ids) - 1)]


class Skeleton:
    """The model of a source. dtype, device: in which and where it is run. has_mtp: behind its layers stands the one of its MTP
    block, which is one like the last. Raises QuantizeError: transformers does not build such a model, or calls its tensors
    otherwise than the source."""

    def __init__(
        self, folder: Path, plan: Plan, dtype: torch.dtype, device: str = "cpu", *, has_mtp: bool = False
    ) -> None:  # fmt: skip
        from transformers import AutoConfig, AutoModelForCausalLM

        by_config: Any = AutoModelForCausalLM
        self.where, self.dtype, self.device = str(folder), dtype, device
        self._tensors: Mapping[str, TensorPlan] = {tensor.name: tensor for tensor in plan.tensors}
        with loading(f"{folder}: transformers cannot build it"):
            config: Any = AutoConfig.from_pretrained(folder)
            if hasattr(config, "quantization_config"):
                del config.quantization_config
            with torch.device("meta"):
                self.model = by_config.from_config(config, dtype=dtype)
        self.model.eval()
        self.base = self.model.base_model
        lists = [
            (name, module)
            for name, module in self.model.named_modules()
            if isinstance(module, nn.ModuleList) and name.rpartition(".")[2] == "layers"
        ]
        if len(lists) != 1 or getattr(self.base, "layers", None) is not lists[0][1]:
            raise self._unknown(f"it has {len(lists)} lists of decoder layers, one is needed")
        self.prefix, self._layers = lists[0][0], list(lists[0][1])
        if has_mtp:
            kind: Any = type(self._layers[-1])
            config = self.base.config
            # its layer is one like the last, with its own indexer
            for key in ("layer_types", "mlp_layer_types", "indexer_types"):
                if isinstance(kinds := getattr(config, key, None), list) and len(kinds) == len(self._layers):
                    setattr(config, key, [*kinds, "full" if key == "indexer_types" else kinds[-1]])
            with torch.device("meta"):
                self._layers.append(kind(config, len(self._layers)).to(dtype).eval())
            config.num_hidden_layers = len(self._layers)
        self._passing = Passing()
        embedding = self.model.get_input_embeddings()
        self._embedding = next(name for name, module in self.model.named_modules() if module is embedding)
        again_with_buffers(self.base, self.device, self.where)
        self._norm = self.base.norm
        self.base.norm = nn.Identity()

    @property
    def num_layers(self) -> int:
        return len(self._layers)

    def _unknown(self, reason: str) -> QuantizeError:
        return QuantizeError(
            f"{self.where}: cannot be calibrated layer by layer: {reason}; take a precision without `calibration`: w4a16-mse"
        )

    # -------------------------------------------------------------------------------------------- running
    def use_embedding(self, reader: SourceReader, tokens: Tensor) -> None:
        """Have the model know the embeddings of `tokens`, in its dtype."""
        self.model.set_input_embeddings(self.embedded(reader, tokens))

    def embedded(self, reader: SourceReader, tokens: Tensor) -> nn.Module:
        """Tokens [B, T], of those in `tokens`, to their embeddings [B, T, H]."""
        tensor = self._tensor(f"{self._embedding}.weight")
        ids = torch.unique(tokens)
        rows_VH = torch.empty(len(ids), tensor.shape[1], dtype=self.dtype)
        for begin in range(0, tensor.shape[0], EMBEDDING_ROWS):
            end = min(begin + EMBEDDING_ROWS, tensor.shape[0])
            is_in = (ids >= begin) & (ids < end)
            if is_in.any():
                rows_VH[is_in] = self._rows(reader, tensor, begin, end)[ids[is_in] - begin].to(self.dtype)
        return _Embedded(ids.to(self.device), rows_VH.to(self.device))

    def pass_embedding(self) -> None:
        """The first layer is done: nobody looks at embeddings, but the model asks for them."""
        columns = int(self._tensor(f"{self._embedding}.weight").shape[1])
        nothing = torch.zeros(1, columns, dtype=self.dtype, device=self.device)
        self.model.set_input_embeddings(_Embedded(torch.zeros(1, dtype=torch.long, device=self.device), nothing))

    def run(self, layer: int, tokens: Tensor, state: State | None) -> State:
        """What layer `layer` makes of `state`, or of the embedded `tokens` [B, T] where it is None; it must be filled.

        Both may lie anywhere, the result is on the device."""
        with loading(f"{self.where}: transformers cannot run it"):
            return run_layer(self.base, self._layers[layer], self._passing, tokens, state, self.device)

    def head(self, reader: SourceReader) -> nn.Module:
        """What makes logits of the last layer's hidden states: the last norm and the output head, filled."""
        name = next(name for name, module in self.model.named_modules() if module is self.model.get_output_embeddings())
        if getattr(self.base.config, "tie_word_embeddings", False) and f"{name}.weight" not in self._tensors:
            name = self._embedding
        norm = f"{self.prefix.rpartition('.')[0]}.norm"
        for leaf, parameter in list(self._norm.named_parameters()):
            value = self._value(reader, f"{norm}.{leaf}", tuple(parameter.shape)).to(self.dtype)
            self._norm._parameters[leaf] = nn.Parameter(value.to(self.device), requires_grad=False)
        weight_VH = self._tensor(f"{name}.weight")
        rows = self._rows(reader, weight_VH, 0, weight_VH.shape[0]).to(self.device).to(self.dtype)
        linear = nn.Linear(weight_VH.shape[1], weight_VH.shape[0], bias=False, device="meta")
        linear.weight = nn.Parameter(rows, requires_grad=False)
        return nn.Sequential(self._norm, linear)

    # -------------------------------------------------------------------------------------------- one layer
    def plain(self, reader: SourceReader, name: str) -> Tensor:
        """A weight as the source has it, in the model's dtype."""
        tensor = self._tensor(name)
        return self._rows(reader, tensor, 0, tensor.shape[0]).to(self.dtype)

    @contextmanager
    def filled(self, layer: int, reader: SourceReader) -> Iterator[nn.Module]:
        """The model with the weights of one layer; all others pass on their input. Afterwards the layer is gone."""
        whole = self._layers[layer]
        self._linearize(whole)
        for name, parameter in list(whole.named_parameters()):
            module, leaf = parent(whole, name)
            value = self._value(reader, f"{self.prefix}.{layer}.{name}", tuple(parameter.shape))
            # to the device as it is stored: half the bytes
            module._parameters[leaf] = nn.Parameter(value.to(self.device).to(self.dtype), requires_grad=False)
        for name, buffer in list(whole.named_buffers()):
            module, leaf = parent(whole, name)
            if leaf in module._non_persistent_buffers_set:
                raise self._unknown(f"layer {layer} computes {name} when it is built")
            value = self._value(reader, f"{self.prefix}.{layer}.{name}", tuple(buffer.shape)).to(buffer.dtype)
            module._buffers[leaf] = value.to(self.device)
        others = [self._passing if number != layer else whole for number in range(self.num_layers)]
        others[layer + 1 :] = [End()] * (self.num_layers - layer - 1)
        self.base.layers = nn.ModuleList(others)
        try:
            yield whole
        finally:
            self.base.layers = nn.ModuleList([self._passing] * self.num_layers)
            self._layers[layer] = self._passing

    def _linearize(self, layer: nn.Module) -> None:
        """Experts that are one 3-D parameter become linears, without weights so far."""
        from llmcompressor.modeling.moe.linear_experts import LinearExperts2D
        from llmcompressor.modeling.moe.linearize import get_non_linearized_moes

        for name, module in get_non_linearized_moes(layer):
            config = getattr(module, "config", self.base.config)
            linear: Any = LinearExperts2D.get_linear_experts_cls(type(module))  # type: ignore[arg-type]
            with torch.device("meta"):
                layer.set_submodule(name, linear(config).to(self.dtype))

    def value(self, reader: SourceReader, name: str) -> Tensor:
        """A tensor of the source, in the model's dtype."""
        return self._value(reader, name, tuple(self._tensor(name).shape)).to(self.device, self.dtype)

    def _value(self, reader: SourceReader, name: str, shape: tuple[int, ...]) -> Tensor:
        tensor = self._tensor(name)
        if tuple(tensor.shape) != shape:
            raise self._unknown(f"{name} is {list(tensor.shape)} in the source and {list(shape)} in transformers")
        if tensor.shape:
            return self._rows(reader, tensor, 0, tensor.shape[0])
        raw = np.frombuffer(reader.read_bytes(tensor, 0, tensor.num_bytes), np.uint8).copy()
        return torch.from_numpy(raw).view(TORCH_DTYPES[tensor.dtype])[0]

    def _tensor(self, name: str) -> TensorPlan:
        tensor = self._tensors.get(name)
        if tensor is None:
            raise self._unknown(f"transformers has a tensor {name}, the source has none of that name")
        return tensor

    def _rows(self, reader: SourceReader, tensor: TensorPlan, begin: int, end: int) -> Tensor:
        rows = reader.read_rows(tensor, begin, end)
        return torch.from_numpy(rows).view(TORCH_DTYPES[tensor.logical_dtype])


# ------------------------------------------------------------------------------------------------ the MTP block
class MtpInput:
    """What goes into the MTP block, made of what is behind the last decoder layer: the model's own hidden states and the token
    after each, as vLLM's drafters hand them over. The parts that no layer has are read from the source.

    vLLM 0.32, `models/glm4_moe_mtp.py`, `models/deepseek_mtp.py` and `v1/spec_decode/llm_base_proposer.py`: the hidden state of
    a position is the one behind the final norm; the embedding is the model's, of the token at the next position, and zero at
    position 0; both are normed, put side by side, embedding first, and projected by `eh_proj`. What comes out enters a decoder
    layer like the others, at the position of the hidden state. transformers builds none of this.
    """

    def __init__(self, skeleton: Skeleton, reader: SourceReader, plan: Plan, layer: int, tokens: Tensor) -> None:
        """layer: of the MTP block. tokens: all that will come. QuantizeError: the source lacks a part."""
        self._eps = float(text_of(plan.config).get("rms_norm_eps", 1e-6))
        block = f"{skeleton.prefix}.{layer}"
        self._final_H, self._enorm_H, self._hnorm_H, self._eh_proj_HI = (
            skeleton.value(reader, f"{name}.weight")
            for name in (f"{skeleton.prefix.rpartition('.')[0]}.norm", f"{block}.enorm", f"{block}.hnorm", f"{block}.eh_proj")
        )
        self._embedded = skeleton.embedded(reader, tokens)

    def __call__(self, hidden_BTH: Tensor, tokens_BT: Tensor) -> Tensor:
        """[B, T - 1, H]: the last position has no next token."""
        hidden = self._normed(self._normed(hidden_BTH[:, :-1], self._final_H), self._hnorm_H)
        embedding = self._embedded(tokens_BT[:, 1:]).clone()
        embedding[:, 0] = 0
        joined_BTI = torch.cat([self._normed(embedding, self._enorm_H), hidden], -1)
        return nn.functional.linear(joined_BTI, self._eh_proj_HI)

    def _normed(self, value: Tensor, weight_H: Tensor) -> Tensor:
        return nn.functional.rms_norm(value, (value.shape[-1],), weight_H, self._eps)
