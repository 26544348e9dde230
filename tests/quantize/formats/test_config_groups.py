"""`quantization_config` is what compressed-tensors itself would write, for every scheme."""

from __future__ import annotations

import json
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
from compressed_tensors import __version__ as version
from compressed_tensors.quantization import QuantizationConfig, QuantizationStatus

from assay.errors import PlanError
from assay_quantize.formats.config_groups import quantization_config
from assay_quantize.formats.schemes import SCHEMES, compressed_tensors_scheme


def plan_of(*schemes: str | None) -> Any:
    tensors = [SimpleNamespace(scheme=scheme, name="model.layers.0.self_attn.o_proj.weight") for scheme in schemes]
    return SimpleNamespace(
        tensors=tensors, ignore=("lm_head", "re:.*gate$"), precision="p", source="s", precision_recipe={}, family="glm4_moe",
        config={},
    )  # fmt: skip


@pytest.mark.parametrize("scheme", SCHEMES)
def test_as_compressed_tensors_writes_it(scheme: str) -> None:
    theirs = QuantizationConfig(
        config_groups={"group_0": compressed_tensors_scheme(scheme)},
        format=SCHEMES[scheme].format,
        quantization_status=QuantizationStatus.COMPRESSED,
        ignore=["lm_head", "re:.*gate$"],
    ).model_dump(mode="json")
    ours = quantization_config(plan_of(None, scheme, scheme))
    assert json.dumps(ours) == json.dumps({"version": version, "transform_config": {}, **theirs})
    assert QuantizationConfig.model_validate(ours).model_dump(mode="json") == theirs


def test_nothing_quantized() -> None:
    with pytest.raises(PlanError, match="precision p: nothing in s is quantized"):
        quantization_config(plan_of(None))


def test_the_engine_needs_no_torch() -> None:
    code = (
        "import assay_quantize.engine.quantize, assay_quantize.engine.local_runner, assay_quantize.engine.quantize, sys;"
        "print('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"
