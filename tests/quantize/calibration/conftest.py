"""What calibrations of tiny models share: a model, text in its words, one thread."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tiny_checkpoints import make_tiny_glm4_moe


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Text in words of the tiny tokenizer (`write_tokenizer`): letters drawn at random."""
    drawn = random.Random(0)
    path = tmp_path_factory.mktemp("text") / "words.txt"
    path.write_text(" ".join("".join(drawn.choices("abcdefghijklmnop", k=5)) for _ in range(400)))
    return path


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_glm4_moe(tmp_path_factory.mktemp("source") / "model")


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Several threads add up in an order of their own: with two, a row of this model has other codes from a tie on."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
