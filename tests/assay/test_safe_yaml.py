"""YAML from outside: what is read, and what is refused in one line, at once."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from assay.errors import RecipeError
from assay.recipes.base import recipes_dir
from assay.recipes.gate import GateRecipe
from assay.recipes.load import load_recipe
from assay.safe_yaml import MAX_BYTES, NotPlainYaml, parse_yaml, read_yaml

BOMB = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{name}: &{name} [{', '.join(9 * ['*' + before])}]\n" for before, name in zip("abcdefgh", "bcdefghi", strict=True)
)


@pytest.mark.parametrize("path", sorted(recipes_dir().rglob("*.yaml")), ids=lambda path: path.stem)
def test_shipped_recipes_are_read_as_pyyaml_reads_them(path: Path) -> None:
    assert read_yaml(path) == yaml.safe_load(path.read_text(encoding="utf-8"))


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("margin: 5\nmargin: 50\n", "not plain YAML: key 'margin' stands twice in one mapping, again in line 2; keep one"),
        ("a:\n  - {x: 1, y: 2, x: 1}\n", "not plain YAML: key 'x' stands twice in one mapping, again in line 2; keep one"),
        ("a: &a 1\nb: *a\n", "not plain YAML: line 1 has an anchor or alias (& or *); write the value out in each place"),
        (BOMB, "not plain YAML: line 1 has an anchor or alias (& or *); write the value out in each place"),
        ("a: !!timestamp x\n", "not plain YAML: line 1 has a tag (tag:yaml.org,2002:timestamp); write a plain value"),
        ("a: !!python/name:os.system\n", "not plain YAML: line 1 has a tag (tag:yaml.org,2002:python/"),
        ("[" * 50_000, "not plain YAML: more than 40 lists and mappings inside each other in line 1"),
        ("a: " * 3, "not YAML: mapping values are not allowed in this context"),
        ("a: 2026-13-45\n", "not YAML: month must be in 1..12"),
        (
            "a: " + "9" * 5000,
            "not plain YAML: line 1 has the whole number 999999999999... of 5000 digits, beyond 64 bits; write a smaller one",
        ),
        ("x: 1\ny: 9223372036854775808\n", "not plain YAML: line 2 has the whole number 9223372036854775808, beyond 64 bits"),
        ("a: 0xffffffffffffffff", "not plain YAML: line 1 has the whole number 0xffffffffffffffff, beyond 64 bits"),
        ("a: \x00", "not YAML: "),
        ("a: 1\n---\nb: 2\n", "not YAML: expected a single document in the stream"),
    ],
)  # fmt: skip
def test_refused(text: str, problem: str) -> None:
    with pytest.raises(NotPlainYaml) as raised:
        parse_yaml(text)
    assert str(raised.value).startswith(problem) and "\n" not in str(raised.value)


def test_longer_than_any_recipe(tmp_path: Path) -> None:
    path = tmp_path / "long.yaml"
    path.write_text("# " + "x" * MAX_BYTES)
    with pytest.raises(NotPlainYaml, match=r"^not plain YAML: longer than 2,000,000 bytes$"):
        read_yaml(path)


def test_a_gates_limit_stands_once(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("schema: 1\nname: mine\nscores:\n  default: {max_loss: 1}\n  default: {max_loss: 99}\n")
    with pytest.raises(RecipeError) as raised:
        load_recipe(GateRecipe, str(path))
    assert str(raised.value) == f"{path}: not plain YAML: key 'default' stands twice in one mapping, again in line 5; keep one"


@pytest.mark.parametrize("limit", [".nan", ".inf", "1e999"])
def test_a_gates_limit_is_finite(tmp_path: Path, limit: str) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(f"schema: 1\nname: mine\ngates: [{{kind: divergence, metric: kl_mean, max: {limit}}}]\n")
    with pytest.raises(RecipeError, match=r"mine.yaml: (?s:.*)\.max: Input should be a finite number"):
        load_recipe(GateRecipe, str(path))
