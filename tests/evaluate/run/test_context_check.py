"""A budget that fills the context is an error before a server starts; what a server allows that runs already is its own."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from assay.errors import MeasureError
from assay.recipes.model import Serving
from assay.recipes.profile import GivenServer, Hardware, ProfileRecipe
from assay.recipes.suite import SuiteRecipe
from assay_evaluate.run.candidate import Candidate, check_context


def profile(**options: object) -> ProfileRecipe:
    return ProfileRecipe.model_validate({"schema": 1, "name": "p", "hardware": Hardware(device="cuda"), **options})


@pytest.fixture
def reference(tmp_path: Path) -> Candidate:
    (tmp_path / "config.json").write_text(json.dumps({"max_position_embeddings": 40960}))
    return Candidate("fp8", tmp_path, is_reference=True)


def suite(max_tokens: int) -> SuiteRecipe:
    task = {"kind": "lm_eval", "name": "aime", "tasks": ["aime24"], "max_tokens": max_tokens}
    return SuiteRecipe.model_validate({"schema": 1, "name": "full", "seed": "eval-s", "tasks": [task]})


def test_a_reply_as_long_as_the_context_is_refused(reference: Candidate) -> None:
    check_context(suite(38912), reference, profile(), Serving())
    with pytest.raises(MeasureError) as error:
        check_context(suite(65536), reference, profile(), Serving())
    assert str(error.value) == (
        f"suite full: task aime lets a reply have 65,536 tokens, and {reference.checkpoint} is served with a context of 40,960 "
        "for prompt and reply together (profile p); lower max_tokens in the suite, or raise max-model-len if the model allows "
        "more"
    )


@pytest.mark.parametrize(
    ("vllm", "max_model_len", "context"), [({}, 32768, 32768), ({"max_model_len": 8192}, 32768, 8192), ({}, 99999, 40960)]
)
def test_the_context_is_the_profiles_before_the_models(
    reference: Candidate, vllm: dict[str, int], max_model_len: int, context: int
) -> None:
    serving = Serving(max_model_len=max_model_len)
    check_context(suite(context - 1), reference, profile(vllm=vllm), serving)
    with pytest.raises(MeasureError, match=f"a context of {context:,} "):
        check_context(suite(context), reference, profile(vllm=vllm), serving)


def test_a_server_that_runs_already_is_not_judged(reference: Candidate) -> None:
    given = dataclasses.replace(reference, endpoint=GivenServer(url="http://localhost:1"))
    check_context(suite(65536), given, profile(), Serving())
