"""Precisions that give roles, or layers, schemes of their own: how they are written, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args

import pytest
import yaml

from assay.errors import RecipeError
from assay.recipes.load import load_recipe, parse_recipe
from assay.recipes.precision import PrecisionRecipe, SchemeName, layer_numbers

NAMES = get_args(SchemeName)
MIX = {"attention": "fp8_block", "dense_mlp": "w4a16", "shared_expert": "w4a16", "routed_expert": "w4a16"}


def recipe(folder: Path, name: str = "mine", **keys: Any) -> PrecisionRecipe:
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump({"schema": 1, "name": name, "extends": "w4a16", **keys}))
    return parse_recipe(PrecisionRecipe, path)


def test_a_role_has_its_own_scheme_and_a_layer_another(tmp_path: Path) -> None:
    made = recipe(tmp_path, quantize=MIX, layers={"0-1, 4": {"routed_expert": "fp8_block"}, 3: {"attention": "bf16"}})
    assert made.schemes == ("fp8_block", "w4a16")
    assert made.scheme is None, "that of w4a16 is no use to a mapping"
    assert [made.scheme_of("routed_expert", layer) for layer in (0, 1, 2, 4, None)] == [
        "fp8_block", "fp8_block", "w4a16", "fp8_block", "w4a16",
    ]  # fmt: skip
    assert [made.scheme_of("attention", layer) for layer in (2, 3)] == ["fp8_block", None]
    assert [made.kept_dtype("attention", layer) for layer in (2, 3)] == [None, "bf16"]
    assert made.scheme_of("router", 0) is None
    assert layer_numbers("0-2, 77,5") == {0, 1, 2, 5, 77}


def test_one_scheme_for_all_is_not_hashed_as_a_mix(tmp_path: Path) -> None:
    """What a recipe of one scheme is recorded as did not change: checkpoints made before are the same checkpoints."""
    kept = load_recipe(PrecisionRecipe, "w4a16").model_dump(mode="json", by_alias=True)
    assert sorted(kept) == [
        "calibration", "description", "keep", "mtp", "name", "observer", "quantize", "schema", "scheme",
    ]  # fmt: skip
    made = recipe(tmp_path, quantize=MIX, layers={"0": {"attention": "bf16"}})
    assert PrecisionRecipe.model_validate(made.model_dump(mode="json", by_alias=True)) == made
    assert made.sha256 != recipe(tmp_path, quantize=MIX).sha256


def test_a_mix_can_be_extended(tmp_path: Path) -> None:
    recipe(tmp_path, "mix", quantize=MIX)
    kept = recipe(tmp_path, extends="mix.yaml", keep={"bf16": ["attention"]})
    assert kept.quantize == {role: "w4a16" for role in MIX if role != "attention"}
    one = recipe(tmp_path, extends="mix.yaml", scheme="fp8_channel")
    assert (sorted(one.quantize), one.schemes) == (sorted(MIX), ("fp8_channel",))
    assert recipe(tmp_path, extends="mix.yaml", quantize=list(MIX), scheme="w4a16").quantize == tuple(MIX)


@pytest.mark.parametrize(
    ("keys", "problems"),
    [
        ({"quantize": MIX, "scheme": "w4a16"},
         ["`quantize` gives each role its scheme: leave `scheme` out, or list the roles that all take it"]),
        ({"quantize": MIX | {"attention": "fp8_blocks"}},
         [f"quantize.attention: Input should be {', '.join(map(repr, NAMES[:-1]))} or {NAMES[-1]!r} (got 'fp8_blocks'); "
          "did you mean 'fp8_block'?"]),
        ({"quantize": {role.replace("tt", "t"): scheme for role, scheme in MIX.items()}},
         ["quantize.atention: Input should be 'embedding', 'lm_head', 'norm', 'attention', 'indexer', 'dense_mlp', "
          "'shared_expert', 'routed_expert', 'router', 'router_bias' or 'mtp' (got 'atention'); did you mean 'attention'?"]),
        ({"layers": {"first": {"attention": "bf16"}}},
         ["layers: 'first' names no layers; write numbers and ranges, counted from 0: `0-2, 77`"]),
        ({"layers": {"0-3": {"attention": "bf16"}, "3": {"attention": "fp8_block", "lm_head": "bf16"}}},
         ["layers.3: role lm_head is quantized nowhere else; only roles under `quantize` can differ by layer",
          "layers: role attention of layer 3 is named twice; name it once"]),
        ({"layers": {"3-1": {"attention": "bf16"}}},
         ["layers: '3-1' names no layers; write numbers and ranges, counted from 0: `0-2, 77`"]),
    ],
)  # fmt: skip
def test_a_mix_that_contradicts_itself(tmp_path: Path, keys: dict[str, Any], problems: list[str]) -> None:
    with pytest.raises(RecipeError) as caught:
        recipe(tmp_path, **keys)
    found = str(caught.value).removeprefix(f"{tmp_path / 'mine.yaml'}: ").split("\n  ")
    assert (found if len(problems) == 1 else found[1:]) == problems


def test_a_list_of_roles_needs_a_scheme(tmp_path: Path) -> None:
    recipe(tmp_path, "mix", quantize=MIX)
    with pytest.raises(
        RecipeError, match="`quantize` lists roles: say under `scheme` what all of them take, or give each its own"
    ):
        recipe(tmp_path, extends="mix.yaml", quantize=list(MIX))
