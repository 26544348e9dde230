"""Tensors that a checkpoint with a calibrated KV cache has and its source has not. Their values: `static_scales.py`."""

from __future__ import annotations

from collections.abc import Mapping

from assay.errors import PlanError
from assay.recipes.precision import PrecisionRecipe
from assay.records.plan import OutputTensor, TensorPlan
from assay_quantize.formats.schemes import KV_LEAVES, module_of


def cache_scales(recipe: PrecisionRecipe, plans: Mapping[str, TensorPlan], where: str) -> list[TensorPlan]:
    """What is added for a calibrated KV cache: `k_scale` and `v_scale` of every attention with heads, in the shard of its keys.

    plans: of the source's tensors, by name. vLLM loads them as `SELF_ATTN.attn.k_scale` (`get_cache_scale_mapper` of its
    quantization configs); latent attention (MLA) has none to load: its class gets no KV-cache method from
    `CompressedTensorsConfig.get_quant_method`, and its scale stays 1. Raises PlanError: the model has no other attention.
    """
    if recipe.kv_cache != "fp8_calibrated":
        return []
    made = []
    for name, keys in plans.items():
        if not name.endswith(".k_proj.weight") or keys.part != "attention" or keys.role == "mtp":
            continue
        module = module_of(keys.module)
        for leaf in KV_LEAVES:
            output = OutputTensor(f"{module}.{leaf}", "F32", (1,), 4)
            made.append(
                TensorPlan(
                    output.name, keys.role, keys.part, module, "add", None, None, "F32", (1,), 0, keys.shard_in, keys.shard_out,
                    (output,),
                )
            )  # fmt: skip
    if not made:
        raise PlanError(
            f"precision {recipe.name}: kv_cache fp8_calibrated: {where} has no attention with keys of its own (`k_proj`); of "
            "latent attention (MLA) vLLM loads no scales of the cache and takes 1: say `kv_cache: fp8`"
        )
    return made
