"""Every shipped family against the draft that vLLM's own classes give of it, without any family's file."""

from __future__ import annotations

from pathlib import Path

import hollow
import pytest
import yaml

from assay.recipes import families
from assay.recipes.families import family_of, names_of
from assay.recipes.family import FamilyRecipe, Form
from assay.recipes.load import load_recipe
from assay_evaluate.serving.family_draft import Draft, as_yaml, draft_family
from assay_quantize.checkpoint.checkpoint import open_checkpoint

pytestmark = [pytest.mark.serve, pytest.mark.slow]

NOT_STORED = "this release stores none"
SKIPPED = "some DeepSeek-V3 descendants store it; vLLM skips it"
_BIASES = {f"self_attn.{part}_proj.bias": NOT_STORED for part in "qkv"}
_DENSE = {f"mlp.{part}_proj.weight": "every layer of this release has experts" for part in ("gate", "up", "down")}
_MLA = {
    "self_attn.q_proj.weight": "only where q_lora_rank is null",
    "self_attn.q_a_proj.bias": NOT_STORED,
    "self_attn.kv_a_proj_with_mqa.bias": NOT_STORED,
    "self_attn.o_proj.bias": NOT_STORED,
    "self_attn.rotary_emb.inv_freq": SKIPPED,
}
ABSENT: dict[str, dict[str, str]] = {
    "glm-4.5-air": {"self_attn.q_norm.weight": "GLM-4.7 has it", "self_attn.k_norm.weight": "GLM-4.7 has it"},
    "glm-5": {**_MLA, "shared_head.head.weight": "DeepSeek-V3 has it", "embed_tokens.weight": "DeepSeek-V3 has it"},
    "deepseek-v3": _MLA,
    "deepseek-v3.2": _MLA,
    "glm-4.7-flash": _MLA,
    "qwen3-30b-a3b": {**_BIASES, **_DENSE},
    "qwen3-next-80b-a3b": {**_BIASES, **_DENSE},
}
"""Model -> names of the family that its checkpoint lacks, and why."""

OTHERWISE: dict[str, dict[str, tuple[str, str, str]]] = {
    "qwen3-next-80b-a3b": {
        "linear_attn.in_proj_ba.weight": (
            "linear", "plain", "vLLM can quantize it, but its FP8-block layer cannot hold 64 rows; no precision quantizes it"
        ),
        "linear_attn.conv1d.weight": (
            "bare", "plain", "a convolution: vLLM gives its layer no quantization config, the pattern is harmless"
        ),
    },
}  # fmt: skip
"""Model -> name -> (kind in the draft, in the file, why)."""


@pytest.mark.parametrize("model", ABSENT)
def test_the_shipped_family_is_the_draft(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = open_checkpoint(hollow.hollow_model(tmp_path / model, model))
    names = names_of(family_of(checkpoint.config))
    monkeypatch.setattr(families, "family_names", list)
    headers = {name: (header.dtype, header.shape) for name, header in checkpoint.tensors.items()}
    draft = draft_family(checkpoint.config, headers)

    assert (draft.layers, draft.mtp_layers, draft.untaken) == (names.layers, names.mtp_layers, ())
    drafted = {**draft.outside, **draft.layer, **draft.mtp_layer, **draft.mtp}
    shipped = {**names.outside, **names.layer, **names.mtp_layer, **names.mtp}
    assert {name: _expected(model, name, form) for name, form in shipped.items() if name not in ABSENT[model]} == drafted
    assert shipped.keys() - drafted.keys() == ABSENT[model].keys()
    _check_file(draft, tmp_path)


def _expected(model: str, name: str, form: Form) -> Form:
    drafted, shipped, _ = OTHERWISE.get(model, {}).get(name, (form.kind, form.kind, ""))
    assert form.kind == shipped
    return form.model_copy(update={"kind": drafted})


def _check_file(draft: Draft, folder: Path) -> None:
    """What is written is a family's file that reads back as the draft."""
    (file := folder / f"{draft.name}.yaml").write_text(as_yaml(draft, "a hollow checkpoint"))
    assert yaml.safe_load(file.read_text())["name"] == draft.name
    recipe = load_recipe(FamilyRecipe, str(file))
    assert (recipe.outside, recipe.layer) == (draft.outside, draft.layer)
    assert (recipe.mtp.layers, recipe.mtp.layer, recipe.mtp.outside) == (draft.mtp_layers, draft.mtp_layer, draft.mtp)


def test_all_families_are_drafted() -> None:
    assert {family_of(hollow.MODELS[model][0]) for model in ABSENT} == set(families.family_names())
