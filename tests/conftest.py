"""Fixtures shared by the tests; the makers are in tiny_checkpoints.py and hollow.py."""

from __future__ import annotations

from pathlib import Path

import pytest
from tiny_checkpoints import make_tiny_glm4_moe


@pytest.fixture(scope="session")
def tiny_glm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random GLM-4-MoE with an MTP block: 3 layers, first dense, 4 experts, two shards. Read only; copy it to damage it."""
    return make_tiny_glm4_moe(tmp_path_factory.mktemp("tiny") / "tiny-glm4-moe")
