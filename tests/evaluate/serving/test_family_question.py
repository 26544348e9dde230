"""What `assay family` gives to vLLM's loaders of a checkpoint's headers."""

from __future__ import annotations

from assay_evaluate.serving import family_draft


def test_scales_of_weights_are_left_out_and_a_routers_own_scale_is_not() -> None:
    """DeepSeek-V4 has `wo_a.scale` beside a weight; Gemma 4's router multiplies by `router.scale`."""
    config = {"architectures": ["NewForCausalLM"], "text_config": {"num_experts": 4}}
    headers = {
        "layers.0.wo_a.weight": ("F8_E4M3", (8, 8)), "layers.0.wo_a.scale": ("F8_E8M0", (1, 1)),
        "layers.0.router.scale": ("BF16", (8,)), "layers.0.q_proj.weight": ("F8_E4M3", (8, 8)),
        "layers.0.q_proj.weight_scale_inv": ("F32", (1, 1)),
    }  # fmt: skip
    asked = family_draft._question(config, headers)
    assert asked.weights == {
        "layers.0.wo_a.weight": ("BF16", (8, 8)), "layers.0.router.scale": ("BF16", (8,)),
        "layers.0.q_proj.weight": ("BF16", (8, 8)),
    }  # fmt: skip
