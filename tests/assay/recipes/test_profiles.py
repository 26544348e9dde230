"""Numbers of a profile that cannot be are named before anything is planned with them."""

from __future__ import annotations

from pathlib import Path

import pytest

from assay.errors import RecipeError
from assay.recipes.load import load_recipe, recipe_names
from assay.recipes.profile import ProfileRecipe


@pytest.mark.parametrize("name", recipe_names("profiles"))
def test_a_second_rounding_of_the_reference_is_off_or_said(name: str) -> None:
    """vLLM rounds weights in FP8 blocks again for DeepGEMM (`VLLM_USE_DEEP_GEMM_E8M0`, 1 by default), the reference's too.
    On an H200 it need not; on Blackwell its kernels want it, and vLLM takes them on RTX PRO 6000 too (`support_deep_gemm`)."""
    profile = load_recipe(ProfileRecipe, name)
    gpu = profile.hardware.gpu or ""
    said = (profile.environment.get("VLLM_USE_DEEP_GEMM_E8M0"), "rounded a second time for DeepGEMM" in profile.description)
    assert said == {"H200": ("0", False), "B200": (None, True), "RTX PRO 6000": (None, True)}.get(gpu, (None, False))


@pytest.mark.parametrize(
    ("vllm", "problem"),
    [
        ("tensor-parallel-size: a", "vllm: tensor-parallel-size must be a whole number from 1 to 1024, got 'a'"),
        ("tensor_parallel_size: [2]", "vllm: tensor-parallel-size must be a whole number from 1 to 1024, got [2]"),
        (
            "tensor-parallel-size: 1000000000",
            "vllm: tensor-parallel-size must be a whole number from 1 to 1024, got 1000000000",
        ),
        ("data-parallel-size: 0", "vllm: data-parallel-size must be a whole number from 1 to 1024, got 0"),
        ("gpu-memory-utilization: .nan", "vllm: gpu-memory-utilization must be a number above 0 and up to 1, got nan"),
        ("gpu-memory-utilization: 1.5", "vllm: gpu-memory-utilization must be a number above 0 and up to 1, got 1.5"),
    ],
)
def test_numbers_that_cannot_be(tmp_path: Path, vllm: str, problem: str) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(f"schema: 1\nname: mine\nhardware: {{device: cuda, gpu: H200, num_gpus: 4}}\nvllm: {{{vllm}}}\n")
    with pytest.raises(RecipeError) as error:
        load_recipe(ProfileRecipe, str(path))
    assert str(error.value) == f"{path}: {problem}"


def test_a_gpu_of_several_lines(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text('schema: 1\nname: mine\nhardware: {device: cuda, gpu: "H200\\nx", num_gpus: 4}\n')
    with pytest.raises(RecipeError) as error:
        load_recipe(ProfileRecipe, str(path))
    assert "must be text of one line" in str(error.value) and "\n" not in str(error.value)
