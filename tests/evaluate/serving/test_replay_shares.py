"""How many processes replay vLLM's loaders, and which checkpoints each of them takes."""

from __future__ import annotations

import pytest

from assay_evaluate.serving import replay


@pytest.mark.parametrize(
    ("tensors", "cores", "shares"),
    [
        ([60_000, 180_000, 180_000], 2, [[1, 0], [2]]),
        ([60_000, 180_000, 180_000], 16, [[1], [2], [0]]),
        ([60_000, 180_000, 180_000], 1, [[1, 2, 0]]),
        ([300, 200, 400], 16, [[2, 0, 1]]),
        ([120_000] * 6, 64, [[0, 4], [1, 5], [2], [3]]),
    ],
)
def test_large_checkpoints_are_divided_among_processes(
    monkeypatch: pytest.MonkeyPatch, tensors: list[int], cores: int, shares: list[list[int]]
) -> None:
    monkeypatch.setattr(replay, "num_cores", lambda: cores)
    assert replay._shares(dict(enumerate(tensors))) == shares
