"""The small SWE suite that agents without containers are asked."""

from __future__ import annotations

from pathlib import Path

import pytest
import swe_suite  # puts examples/tiny_swe on the path
from build_suite import build_dataset


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny-swe")
    result = build_dataset(folder)
    swe_suite.EXAMPLE_REPOSITORIES = folder / "repositories"
    return result
