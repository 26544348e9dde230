"""Keys and values as an FP8 cache holds them: the whole model in transformers, with a cache of its own that rounds them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from command_line import Run
from layer_logits import logits_of
from safetensors.torch import load_file, save_file
from tiny_families import deepseek_v3, glm4_moe, glm_moe_dsa, make_tiny, qwen3_moe, qwen3_next
from torch import Tensor

from assay.records.screening import Screening
from assay_quantize.checkpoint.checkpoint import open_checkpoint
from assay_quantize.decoding.open_stored import open_stored
from assay_quantize.screen.kv_cache import CacheScales, as_cached, in_tiles, is_computed
from assay_quantize.screen.layer_model import LayerModel
from assay_quantize.screen.placing import text_config

TOKENS = torch.randint(7, 800, (1, 40), generator=torch.Generator().manual_seed(0))
E4M3 = np.array([m / 512 for m in range(8)] + [(8 + m) * 2.0 ** (e - 10) for e in range(1, 16) for m in range(8)][:-1])
"""Every value from 0 up that 4 bits of exponent and 3 of mantissa make (Micikevicius et al., FP8 Formats, table 1)."""


def on_grid(x: np.ndarray[Any, Any], scale: float) -> np.ndarray[Any, Any]:
    """The nearest value of `E4M3` times scale, of two that are equally near the one with an even code."""
    scaled = np.abs(x.astype(np.float64)) / scale
    distances = np.abs(scaled[..., None] - E4M3)
    near = distances == distances.min(-1, keepdims=True)
    codes = np.arange(len(E4M3))
    code = np.where(near & (codes % 2 == 0), codes, -1).max(-1)
    code = np.where(code < 0, near.argmax(-1), code)
    return np.sign(x) * E4M3[code] * scale


def test_values_are_those_of_the_format() -> None:
    assert len(E4M3) == 127 and E4M3.max() == 448
    generator = torch.Generator().manual_seed(1)
    for scale in (1.0, 0.25, 2.0**-9):
        x = 3 * torch.randn(4000, generator=generator)
        assert np.array_equal(as_cached(x, scale).numpy(), on_grid(x.numpy(), scale))
    assert as_cached(torch.tensor([1e6, -1e6, 0.0]), 1.0).tolist() == [448, -448, 0]
    latent = torch.randn(3, 256, generator=generator) * torch.tensor([1.0, 0.0, 1e4])[:, None]
    tiles = latent.reshape(3, 2, 128)
    scales = (tiles.abs().amax(-1) / 448).numpy()
    made = in_tiles(latent).reshape(3, 2, 128).numpy()
    for row, tile in ((0, 0), (0, 1), (2, 0)):
        scale = float(scales[row, tile])
        assert np.allclose(made[row, tile], on_grid(tiles[row, tile].numpy(), scale), rtol=1e-6)
    assert not made[1].any()


def whole_logits(folder: Path, config: dict[str, Any], scales: dict[int, CacheScales]) -> Tensor:
    """Of transformers' from_pretrained, with a cache that rounds what it is given, as it gives it back."""
    from transformers import AutoModelForCausalLM, DynamicCache

    known = text_config(json.loads((folder / "config.json").read_text()))
    model = AutoModelForCausalLM.from_pretrained(
        folder, config=known, dtype=torch.float32, experts_implementation="eager"
    ).eval()

    class Rounding(DynamicCache):
        def update(self, keys: Tensor, values: Tensor, layer: int, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
            key, value = scales.get(layer, CacheScales())
            return super().update(
                as_cached(keys, key), as_cached(values, key if "kv_lora_rank" in config else value), layer, *args, **kwargs
            )

    if "index_topk" in config:  # transformers caches it expanded, vLLM as it is
        for layer in model.base_model.layers:
            layer.self_attn.kv_a_layernorm.register_forward_hook(lambda _module, _args, latent: in_tiles(latent))
    cache = None if "index_topk" in config else Rounding(config=known)
    with torch.no_grad():
        made: Tensor = model(input_ids=TOKENS, past_key_values=cache, use_cache=cache is not None).logits
    return made


@pytest.mark.parametrize(
    "config",
    [glm4_moe(), qwen3_moe(), deepseek_v3(), glm_moe_dsa(), qwen3_next()],
    ids=lambda config: str(config["model_type"]),
)
def test_logits_are_those_of_the_whole_model(tmp_path: Path, config: dict[str, Any]) -> None:
    folder = make_tiny(tmp_path / "model", config)
    with open_stored(open_checkpoint(folder, allow_quantized=True)) as stored:
        assert torch.equal(logits_of(LayerModel(stored, fp8_kv_cache=True), TOKENS), whole_logits(folder, config, {}))
        assert not torch.equal(logits_of(LayerModel(stored), TOKENS), whole_logits(folder, config, {}))


@pytest.fixture
def with_scales(tmp_path: Path) -> Path:
    """W4A16 of a tiny model that asks for an FP8 cache, with scales of two of its layers."""
    from assay_pipeline.quantizing import quantize

    quantize(str(make_tiny(tmp_path / "source", glm4_moe())), precision="w4a16-g32", out=tmp_path / "made")
    (tmp_path / "made" / "assay_manifest.json").unlink()
    config = json.loads((tmp_path / "made" / "config.json").read_text())
    config["quantization_config"]["kv_cache_scheme"] = {
        "type": "float", "num_bits": 8, "strategy": "tensor", "dynamic": False, "symmetric": True,
    }  # fmt: skip
    (tmp_path / "made" / "config.json").write_text(json.dumps(config))
    path = next((tmp_path / "made").glob("*.safetensors"))
    added = {
        "model.layers.0.self_attn.k_scale": torch.tensor(0.02), "model.layers.0.self_attn.v_scale": torch.tensor(0.03),
        "model.layers.1.self_attn.k_scale": torch.tensor(0.04),
    }  # fmt: skip
    save_file({**load_file(path), **added}, tmp_path / "made" / "model.safetensors", {"format": "pt"})
    path.unlink()
    for index in (tmp_path / "made").glob("*.index.json"):
        index.unlink()
    return tmp_path / "made"


def test_scales_that_are_stored(with_scales: Path, tmp_path: Path, run: Run) -> None:
    with open_stored(open_checkpoint(with_scales, allow_quantized=True)) as stored:
        assert is_computed(stored.kv)
        model = LayerModel(stored, fp8_kv_cache=True)
        scales = [model._cache_scales(layer) for layer in range(3)]
        assert scales == [
            CacheScales(pytest.approx(0.02), pytest.approx(0.03)), CacheScales(pytest.approx(0.04), 1.0), CacheScales(1.0, 1.0),
        ]  # fmt: skip
        plain = logits_of(LayerModel(stored), TOKENS)
        rounded = logits_of(model, TOKENS)
    assert not torch.equal(plain, rounded)
    # a screening computes with it where the checkpoint asks for it, and for others where it is told to
    text = tmp_path / "texts.jsonl"
    text.write_text("".join(json.dumps({"text": f"Number {n} follows {n - 1}, always."}) + "\n" for n in range(24)))
    words = ("screen", str(tmp_path / "source"), str(with_scales), str(tmp_path / "source"), "--text", str(text))
    figures = {}
    for dtype in ("auto", "fp8"):
        code, out, err = run(*words, "--kv-cache-dtype", dtype, "--out", str(tmp_path / dtype))
        assert code in (0, 1), err
        assert "made: keys and values rounded as an FP8 cache does" in out
        record = Screening.load(tmp_path / dtype / "screening.json")
        figures[dtype] = {
            entry.label: (entry.fp8_kv_cache, entry.drift.kl_mean.value, entry.not_applied) for entry in record.candidates
        }
    assert figures["auto"]["made"] == figures["fp8"]["made"] and figures["auto"]["made"][0]
    assert figures["auto"]["source-2"] == (False, 0.0, ())
    assert figures["fp8"]["source-2"][0] and 0 < figures["fp8"]["source-2"][1] < figures["auto"]["made"][1]
