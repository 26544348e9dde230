"""Which mixes `assay sensitivity --mix` and a run take to be measured as a whole, and as what."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from tiny_checkpoints import make_tiny_glm4_moe

from assay.errors import AssayError
from assay.recipes.precision import PrecisionRecipe
from assay_evaluate.divergence.documents import Document
from assay_pipeline.sensitivity.request import Asked, OtherTexts, as_measured, check_texts, mixes_of, scored
from assay_pipeline.targets import resolve_target
from assay_quantize.checkpoint.checkpoint import open_checkpoint
from assay_quantize.sensitivity.parts import Key, Layout, find_parts
from assay_quantize.sensitivity.texts import texts_sha256

KEEP = {"source": ["norm"], "bf16": ["mtp", "lm_head", "embedding", "router", "indexer"], "fp32": ["router_bias"]}


@pytest.fixture(scope="module")
def narrow(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Experts of 64 columns, which no group of 128 divides."""
    return make_tiny_glm4_moe(tmp_path_factory.mktemp("narrow") / "narrow", moe_intermediate=64)


@pytest.fixture(scope="module")
def layout(narrow: Path) -> Layout:
    return find_parts(open_checkpoint(narrow), ["w4a16", "w4a16_g64", "fp8_channel"], model="narrow")


def asked(source: Path, method: str, *mixes: PrecisionRecipe) -> Asked:
    return Asked(
        target=resolve_target(str(source)), schemes=("w4a16", "w4a16_g64", "fp8_channel"),
        proxy="kl", observer="minmax", run=None,
        text=(), num_tokens=640, length=32, served=0, profile=None, seed=0, keep=source, only_estimate=False,
        method=method, mixes=mixes,  # type: ignore[arg-type]
    )  # fmt: skip


def recipe(more: str = "", *, attention: str = "fp8_channel", experts: str = "fp8_channel") -> PrecisionRecipe:
    roles = {"attention": attention, "dense_mlp": "fp8_channel", "shared_expert": "fp8_channel", "routed_expert": experts}
    data = {"schema": 1, "name": "mine", "description": "", "quantize": roles, "keep": KEEP}
    return PrecisionRecipe.model_validate(data | (yaml.safe_load(more) or {}))


@pytest.mark.parametrize("method", ["none", "gptq"])
def test_what_has_no_int4_is_alike_whether_it_is_calibrated(narrow: Path, layout: Layout, method: str) -> None:
    """`assay recipe` writes such a mix with `calibration: none`, whatever its base has; --method gptq rounds INT4 only."""
    (found,) = mixes_of(asked(narrow, method, recipe()), layout).values()
    assert set(found.values()) == {"fp8_channel"}
    if method == "gptq":
        with pytest.raises(AssayError, match="has `calibration: none`, and gptq is measured; say --method none"):
            mixes_of(asked(narrow, method, recipe(attention="w4a16")), layout)


@pytest.mark.parametrize(
    ("more", "attention", "method"),
    [("calibration: {method: gptq, tokens: 4096}", "w4a16", "gptq"), ("kv_cache: fp8", "w4a16", "none")],
)
def test_a_run_measures_its_mix_as_it_measured_the_parts(
    narrow: Path, layout: Layout, more: str, attention: str, method: str
) -> None:
    """The base may say more, of mix and uniform recipes alike: by hand that is refused, a run has accepted it before."""
    made = recipe(more, attention=attention)
    with pytest.raises(AssayError, match="--mix mine: "):
        mixes_of(asked(narrow, method, made), layout)
    plain = asked(narrow, method)
    (found,) = mixes_of(replace(plain, mixes=(as_measured(plain, made),)), layout).values()
    assert found[Key(0, "attention")] == attention and found[Key(1, "routed_expert")] == "fp8_channel"


def test_a_mix_that_cannot_be_or_is_none_is_refused(narrow: Path, layout: Layout) -> None:
    kept = recipe("layers: {0-9: {attention: bf16, dense_mlp: bf16, shared_expert: bf16, routed_expert: bf16}}")
    for mix, said in (
        (kept, "--mix mine: keeps every part in 16 bits, which loses nothing; name one that quantizes some"),
        (
            recipe(experts="w4a16"),
            r"--mix mine: has layer 1 routed_expert in w4a16, which it cannot take: .*64 columns are not a multiple of the "
            "group size 128.*; give it another or `bf16`",
        ),
    ):
        with pytest.raises(AssayError, match=said):
            mixes_of(asked(narrow, "none", mix), layout)


def test_other_texts_than_parts_were_measured_on_are_said_before_anything_is_measured(narrow: Path) -> None:
    texts = [Document("0", "", (1,), (2, 3), "held_out")]
    known = texts_sha256(scored(texts))
    for sha256, is_same in ((known, True), ("f" * 64, False)):
        one = replace(asked(narrow, "none"), parts_of=(Path("run/sensitivity.json"), sha256))
        if is_same:
            check_texts(one, texts)
            continue
        with pytest.raises(OtherTexts) as problem:
            check_texts(one, texts)
        assert str(problem.value) == (
            f"run/sensitivity.json was measured on other texts than there are now (sha256 ffffffffffffffff and {known[:16]})"
        )
