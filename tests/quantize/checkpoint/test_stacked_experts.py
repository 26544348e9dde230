"""Experts of a layer in one tensor, either way round or in turns, read as the weights of single experts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tiny_checkpoints import write_json

from assay.errors import RecipeError
from assay.recipes import family_names, own_families
from assay.recipes.family_names import add_family
from assay.records.plan import TensorPlan
from assay_quantize.checkpoint.checkpoint import Checkpoint, open_checkpoint
from assay_quantize.checkpoint.source_reader import SourceReader
from assay_quantize.checkpoint.torch_tensors import read_tensor

EXPERTS, HIDDEN, WIDTH = 3, 64, 48
CONFIG = {"architectures": ["MineForCausalLM"], "num_experts": EXPERTS, "num_hidden_layers": 1, "hidden_size": HIDDEN}
FAMILY = """
schema: 1
name: mine
architectures: [MineForCausalLM]
reasoning_parser: qwen3
num_experts: [num_experts]
layer:
  "mlp.experts.{{expert}}.gate_proj.weight": {{role: routed_expert, kind: linear, split: rows, fused: gate_up_proj}}
  "mlp.experts.{{expert}}.up_proj.weight": {{role: routed_expert, kind: linear, split: rows, fused: gate_up_proj}}
  "mlp.experts.{{expert}}.down_proj.weight": {{role: routed_expert, kind: linear, split: columns}}
  "mlp.experts.{{expert}}.gate_proj.bias": {{role: routed_expert}}
  "mlp.experts.{{expert}}.up_proj.bias": {{role: routed_expert}}
stacked:
  mlp.experts.both:
    parts: ["mlp.experts.{{expert}}.gate_proj.weight", "mlp.experts.{{expert}}.up_proj.weight"]
    transposed: {transposed}
    interleaved: {interleaved}
  mlp.experts.both_bias:
    parts: ["mlp.experts.{{expert}}.gate_proj.bias", "mlp.experts.{{expert}}.up_proj.bias"]
    interleaved: {interleaved}
  mlp.experts.down: {{parts: ["mlp.experts.{{expert}}.down_proj.weight"], transposed: {transposed}}}
"""


@pytest.fixture
def _own_families(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(own_families, "FILES", {})
    family_names.names_of.cache_clear()


def _checkpoint(folder: Path, tensors: dict[str, torch.Tensor], *, transposed: bool, interleaved: bool) -> Checkpoint:
    file = folder / "mine.yaml"
    file.write_text(FAMILY.format(transposed=str(transposed).lower(), interleaved=str(interleaved).lower()))
    add_family(str(file))
    write_json(folder / "config.json", CONFIG)
    save_file({f"model.layers.0.mlp.experts.{name}": tensor for name, tensor in tensors.items()}, folder / "model.safetensors")
    return open_checkpoint(folder)


def _turns(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """[E, O, ...] twice, output by output."""
    return torch.stack([first, second], 2).flatten(1, 2)


@pytest.mark.usefixtures("_own_families")
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("width", [WIDTH, HIDDEN // 2, HIDDEN])
def test_every_expert_is_read_as_its_own_weight(tmp_path: Path, transposed: bool, interleaved: bool, width: int) -> None:
    """width: HIDDEN // 2 makes gate and up a square, HIDDEN makes down one; then the family says which way round it is."""
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(torch.bfloat16)

    gate, up, down = random(EXPERTS, width, HIDDEN), random(EXPERTS, width, HIDDEN), random(EXPERTS, HIDDEN, width)
    gate_bias, up_bias = random(EXPERTS, width), random(EXPERTS, width)
    both = _turns(gate, up) if interleaved else torch.cat([gate, up], 1)
    both_bias = _turns(gate_bias, up_bias) if interleaved else torch.cat([gate_bias, up_bias], 1)
    stored = {"both": both, "both_bias": both_bias, "down": down}
    if transposed:
        stored |= {name: stored[name].transpose(1, 2).contiguous() for name in ("both", "down")}
    opened = _checkpoint(tmp_path, stored, transposed=transposed, interleaved=interleaved)

    expected = {
        f"model.layers.0.mlp.experts.{expert}.{name}": tensor[expert]
        for expert in range(EXPERTS)
        for name, tensor in {
            "gate_proj.weight": gate, "up_proj.weight": up, "down_proj.weight": down, "gate_proj.bias": gate_bias,
            "up_proj.bias": up_bias,
        }.items()
    }  # fmt: skip
    assert opened.tensors.keys() == expected.keys()
    with SourceReader(opened) as reader:
        for name, tensor in expected.items():
            assert torch.equal(read_tensor(opened, name), tensor), name
            plan, rows = _plan(opened, name), tensor.shape[0]
            assert opened.tensors[name].num_bytes == tensor.numel() * 2
            assert _bits(reader.read_rows(plan, 5, rows - 3)) == _bits(tensor[5 : rows - 3])
            raw = bytes(tensor.contiguous().view(torch.uint8).numpy().tobytes())
            assert bytes(reader.read_bytes(plan, 6, len(raw) - 10)) == raw[6 : len(raw) - 10]


def _plan(checkpoint: Checkpoint, name: str) -> TensorPlan:
    header = checkpoint.tensors[name]
    module = name.rpartition(".")[0]
    return TensorPlan(
        name, "routed_expert", "routed_expert", module, "keep", None, None, header.dtype, header.shape, header.num_bytes,
        header.shard, header.shard, (),
    )  # fmt: skip


def _bits(values: Any) -> list[int]:
    if isinstance(values, torch.Tensor):
        values = values.contiguous().view(torch.uint16).numpy()
    bits: list[int] = values.flatten().tolist()
    return bits


@pytest.mark.usefixtures("_own_families")
def test_a_family_of_ones_own_is_not_called_as_another(tmp_path: Path) -> None:
    (file := tmp_path / "glm4_moe.yaml").write_text(
        FAMILY.format(transposed="false", interleaved="false").replace("mine", "glm4_moe")
    )
    with pytest.raises(RecipeError) as caught:
        add_family(str(file))
    assert str(caught.value) == f"{file}: name glm4_moe: another family is called so; give yours a name of its own"
