"""`extends:` of a precision: what moves, what replaces, what is refused, and in whose name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from assay.errors import RecipeError
from assay.recipes.load import load_recipe, parse_recipe, recipes_dir
from assay.recipes.precision import PrecisionRecipe

W4A16 = recipes_dir() / "precisions" / "w4a16.yaml"


def write(folder: Path, name: str, **keys: Any) -> Path:
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump({"schema": 1, "name": name, **keys}))
    return path


def refusal(path: Path) -> str:
    with pytest.raises(RecipeError) as caught:
        parse_recipe(PrecisionRecipe, path)
    return str(caught.value)


def meaning(path: Path) -> dict[str, Any]:
    """What is left of a file, but its name and its description."""
    kept = parse_recipe(PrecisionRecipe, path).model_dump(mode="json", by_alias=True)
    return {key: value for key, value in kept.items() if key not in ("name", "description")}


def test_an_empty_file_means_the_other_one(tmp_path: Path) -> None:
    path = write(tmp_path, "mine", extends="w4a16")
    assert meaning(path) == meaning(W4A16)
    assert parse_recipe(PrecisionRecipe, path).description == "", "the other one's description would be wrong"
    whole = yaml.safe_load(W4A16.read_text()) | {"name": "mine", "description": ""}
    (tmp_path / "whole").mkdir()
    same = write(tmp_path / "whole", **whole | {"name": "mine"})
    assert parse_recipe(PrecisionRecipe, same).sha256 == parse_recipe(PrecisionRecipe, path).sha256


@pytest.mark.parametrize(
    ("given", "quantize", "keep"),
    [
        ({"keep": {"bf16": ["attention"]}},
         ["dense_mlp", "shared_expert", "routed_expert"],
         {"source": ["norm"], "bf16": ["mtp", "lm_head", "embedding", "router", "indexer", "attention"],
          "fp32": ["router_bias"]}),
        ({"keep": {"fp32": ["router", "norm"]}},
         ["attention", "dense_mlp", "shared_expert", "routed_expert"],
         {"bf16": ["mtp", "lm_head", "embedding", "indexer"], "fp32": ["router_bias", "router", "norm"]}),
        ({"quantize": ["attention", "dense_mlp", "shared_expert", "routed_expert", "indexer"]},
         ["attention", "dense_mlp", "shared_expert", "routed_expert", "indexer"],
         {"source": ["norm"], "bf16": ["mtp", "lm_head", "embedding", "router"], "fp32": ["router_bias"]}),
        ({"quantize": ["routed_expert"], "keep": {"source": ["attention", "dense_mlp"], "bf16": ["shared_expert"]}},
         ["routed_expert"],
         {"source": ["norm", "attention", "dense_mlp"],
          "bf16": ["mtp", "lm_head", "embedding", "router", "indexer", "shared_expert"], "fp32": ["router_bias"]}),
    ],
)  # fmt: skip
def test_roles_move_and_lists_replace(
    tmp_path: Path, given: dict[str, Any], quantize: list[str], keep: dict[str, list[str]]
) -> None:
    found = meaning(write(tmp_path, "mine", extends="w4a16", mtp="drop", **given))
    assert found == meaning(W4A16) | {"quantize": quantize, "keep": keep, "mtp": "drop"}


def test_paths_are_relative_to_the_file_and_chains_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "inner").mkdir()
    monkeypatch.chdir(tmp_path)
    write(tmp_path, "a", extends="w4a16", scheme="w4a16_g32")
    write(tmp_path / "inner", "b", extends="../a.yaml", observer="mse")
    assert meaning(Path("inner/b.yaml")) == meaning(W4A16) | {"scheme": "w4a16_g32", "observer": "mse"}
    deep = write(tmp_path, "c", extends="inner/b.yaml")
    assert meaning(deep) == meaning(Path("inner/b.yaml"))
    deeper = write(tmp_path, "d", extends="c.yaml")
    chain = f"{deep} -> {tmp_path / 'inner/b.yaml'} -> {tmp_path / 'inner/../a.yaml'} -> {W4A16}"
    assert refusal(deeper) == (
        f"{deeper}: extends: more than 3 levels deep, {deeper} -> {chain}; extend a later recipe of this chain"
    )


def test_circles_are_refused(tmp_path: Path) -> None:
    own = write(tmp_path, "own", extends="own.yaml")
    assert refusal(own) == f"{own}: extends: circular, {own} -> {own}; one of these must not use `extends`"
    one, two = (write(tmp_path, name, extends=f"{other}.yaml") for name, other in (("one", "two"), ("two", "one")))
    assert refusal(one) == f"{one}: extends: circular, {one} -> {two} -> {one}; one of these must not use `extends`"


@pytest.mark.parametrize(
    ("extends", "message"),
    [
        ("w4a61", "no precision recipe called 'w4a61'; did you mean w4a16? `assay recipes precisions` lists all 30"),
        ("gone.yaml", "{folder}/gone.yaml: no such file; the path is relative to the recipe that names it"),
        (["w4a16"], "must be the name of a precision or the path of its file (got \"['w4a16']\")"),
        (None, "must be the name of a precision or the path of its file (got 'None')"),
    ],
)
def test_a_missing_base_is_an_error_of_the_extending_file(tmp_path: Path, extends: Any, message: str) -> None:
    path = write(tmp_path, "mine", extends=extends)
    assert refusal(path) == f"{path}: extends: {message.format(folder=tmp_path)}"


def test_a_problem_names_the_file_it_is_in(tmp_path: Path) -> None:
    base = write(tmp_path, "base", extends="w4a16", shceme="fp8_block")
    child = write(tmp_path, "child", extends="base.yaml", observr="mse")
    assert refusal(child).startswith(f"{base}: unknown key 'shceme'; did you mean 'scheme'?")
    write(tmp_path, "base", extends="w4a16", scheme="fp8_block")
    assert refusal(child).startswith(f"{child}: unknown key 'observr'; did you mean 'observer'?")
    child = write(tmp_path, "child", extends="base.yaml", quantize=["routed_expert"], keep={"bf17": ["attention"]})
    assert refusal(child).split("\n  ")[1:] == [
        "keep.bf17: Input should be 'source', 'bf16' or 'fp32' (got 'bf17'); did you mean 'bf16'?",
        "roles dense_mlp, shared_expert are named nowhere; put each under `quantize` or under `keep: {bf16: [...]}`",
    ]


def test_only_a_precision_can_extend(tmp_path: Path) -> None:
    from assay.recipes.profile import ProfileRecipe

    with pytest.raises(RecipeError, match=r"mine.yaml: unknown key 'extends'. Allowed: concurrency, "):
        load_recipe(ProfileRecipe, str(write(tmp_path, "mine", extends="8xh200", hardware={"device": "cpu"})))


def test_a_misspelt_extends_is_the_only_problem_reported(tmp_path: Path) -> None:
    path = write(tmp_path, "mine", extend="w4a16")
    assert refusal(path) == (
        f"{path}: unknown key 'extend'; did you mean 'extends'? Allowed: activations, calibration, description, "
        "extends, headroom, keep, kv_cache, layers, mtp, name, observer, quantize, schema, scheme"
    )
