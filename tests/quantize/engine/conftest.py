"""The source that tests of the engine share."""

from __future__ import annotations

from pathlib import Path

import pytest
from engine_sources import TINY
from tiny_checkpoints import make_tiny_glm4_moe


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_glm4_moe(tmp_path_factory.mktemp("engine") / "source", **TINY)
