"""Tiny sources of checkpoints that are verified."""

from __future__ import annotations

from pathlib import Path

import pytest
from tiny_checkpoints import make_tiny_glm4_moe


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """By dtype."""
    folder, size = tmp_path_factory.mktemp("sources"), {"num_layers": 2, "num_experts": 2, "hidden": 128}
    return {d: make_tiny_glm4_moe(folder / d, dense_intermediate=128, dtype=d, **size) for d in ("bf16", "fp32")}
