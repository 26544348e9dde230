"""Local files of a suite are part of its identity; what questions were asked with is recorded, and must be alike."""

from __future__ import annotations

from pathlib import Path

import pytest
from blank_records import blank_fingerprint
from synthetic_run import make_measurements

from assay.errors import MeasureError, RecipeError
from assay.recipes.load import load_recipe, recipe_names
from assay.recipes.model import Serving
from assay.recipes.suite import SuiteRecipe
from assay.recipes.suite_files import named_files, with_files_hashed
from assay.records.base import sha256_of
from assay.records.comparable import check_comparable
from assay.records.measurement import AskedWith
from assay_evaluate.asking.dialect import Dialect
from assay_evaluate.run.suite import describe_asking, template_sha256


def suite_over(folder: Path) -> SuiteRecipe:
    return SuiteRecipe.model_validate(
        {
            "schema": 1, "name": "own", "seed": "eval-own",
            "tasks": [
                {"kind": "lm_eval", "name": "own", "tasks": ["own"], "max_tokens": 64, "include_path": str(folder / "tasks")},
                {"kind": "ruler", "name": "ruler", "num_items": 1, "lengths_tokens": [1024], "max_tokens": 64,
                 "squad": str(folder / "squad.json")},
            ],
        }
    )  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "tasks" / "cache").mkdir(parents=True)
    (tmp_path / "tasks" / "own.yaml").write_text("task: own\n")
    (tmp_path / "tasks" / "data.jsonl").write_text("{}\n")
    (tmp_path / "squad.json").write_text("{}")
    return tmp_path


def test_other_data_are_another_suite(folder: Path) -> None:
    suite = suite_over(folder)
    assert named_files(suite) == [str(folder / "squad.json"), str(folder / "tasks")]
    first = with_files_hashed(suite)
    assert first.sha256 != suite.sha256
    assert with_files_hashed(suite_over(folder)).sha256 == first.sha256
    (folder / "tasks" / "cache" / "dataset_info.json").write_text("{}")  # what a data set library leaves behind
    (folder / "tasks" / "notes.md").write_text("mine")
    assert with_files_hashed(suite).sha256 == first.sha256
    seen = {first.sha256}
    for name, text in (("tasks/data.jsonl", '{"a": 1}\n'), ("tasks/own.yaml", "task: own\n#\n"), ("squad.json", "[]")):
        (folder / name).write_text(text)
        seen.add(with_files_hashed(suite).sha256)
    assert len(seen) == 4


def test_a_path_that_is_not_there(folder: Path) -> None:
    (folder / "squad.json").unlink()
    with pytest.raises(RecipeError, match=r"suite own: .*squad\.json: no such file or folder; paths are relative to"):
        with_files_hashed(suite_over(folder))


@pytest.mark.parametrize(
    "name", sorted(set(recipe_names("suites")) - {"swe-tiny"})
)  # that one names what `make swe-images` builds
def test_shipped_suites_name_no_local_files(name: str) -> None:
    suite = load_recipe(SuiteRecipe, name)
    assert with_files_hashed(suite) == suite


# ------------------------------------------------------------------------------------------------ asked with
def test_template_of_a_checkpoint_or_of_a_flag(tmp_path: Path) -> None:
    assert template_sha256(tmp_path) is None
    (tmp_path / "tokenizer_config.json").write_text('{"chat_template": "{{ old }}"}')
    assert template_sha256(tmp_path) == sha256_of("{{ old }}")
    (tmp_path / "chat_template.jinja").write_text("{{ new }}")
    assert template_sha256(tmp_path) == sha256_of("{{ new }}")
    (tmp_path / "mine.jinja").write_text("{{ mine }}")
    fingerprint = blank_fingerprint(server="e", flags={"chat-template": str(tmp_path / "mine.jinja")})
    dialect = Dialect(True, True, {"enable_thinking": True})
    assert describe_asking(tmp_path, Serving(reasoning_parser="glm45"), fingerprint, dialect, False) == AskedWith(
        is_chat=True, chat_template_sha256=sha256_of("{{ mine }}"), chat_template_kwargs={"enable_thinking": True},
        reasoning_parser="glm45", tool_call_parser=None, sends_seeds=False,
    )  # fmt: skip


def test_other_chat_templates_are_refused() -> None:
    reference, candidate = make_measurements()[:2]
    ours = AskedWith(
        is_chat=True, chat_template_sha256="a", chat_template_kwargs={}, reasoning_parser=None, tool_call_parser=None,
        sends_seeds=False,
    )  # fmt: skip
    theirs = ours.model_copy(update={"chat_template_sha256": "b"})
    check_comparable(reference.model_copy(update={"asked_with": ours}), candidate)  # recorded before this was
    check_comparable(*(one.model_copy(update={"asked_with": ours}) for one in (reference, candidate)))
    with pytest.raises(MeasureError, match=r"asked differently: chat_template_sha256 \(a, candidate b\); the same questions"):
        check_comparable(
            reference.model_copy(update={"asked_with": ours}), candidate.model_copy(update={"asked_with": theirs})
        )  # fmt: skip
