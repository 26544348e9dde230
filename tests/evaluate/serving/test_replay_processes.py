"""How many processes replay vLLM's loaders side by side."""

from __future__ import annotations

import pytest

from assay.recipes.load import load_recipe
from assay.recipes.model import Serving
from assay.recipes.profile import ProfileRecipe
from assay_evaluate.serving import replay


@pytest.mark.parametrize(
    ("tensors", "processes"), [([60_000, 180_000, 180_000], 3), ([300, 200, 400], 1), ([120_000] * 6, 4), ([500_000], 1)]
)
def test_large_checkpoints_are_divided_among_processes(tensors: list[int], processes: int) -> None:
    profile = load_recipe(ProfileRecipe, "8xh200")
    group = [
        replay.Candidate(
            str(count),
            replay.PlannedCheckpoint({}, {"one.safetensors": {f"{number}": ("BF16", (1,)) for number in range(count)}}),
            profile,
            Serving(),
        )
        for count in tensors
    ]
    assert replay._num_processes(group) == processes
