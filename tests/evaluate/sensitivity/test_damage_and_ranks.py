"""Divergence at each position -> means, intervals and kinds; two orders of parts -> a rank correlation."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from synthetic_run import make_measurements

from assay.errors import MeasureError
from assay.records.measurement import Acceptance
from assay_evaluate.divergence.documents import Document
from assay_evaluate.sensitivity.damage import damage_of, halves, only, positions_of
from assay_evaluate.sensitivity.drafts import mtp_acceptance
from assay_evaluate.sensitivity.ranks import rank_correlation
from assay_evaluate.sensitivity.served import suite_of, texts_of_run
from assay_evaluate.statistics.skewed import skewed_mean


def document(i: int, length: int, language: str = "en", prompt: int = 3, **more: object) -> Document:
    return Document(f"{i}", language, tuple(range(prompt)), tuple(100 + k for k in range(length)), domain="writing", **more)  # type: ignore[arg-type]


def test_kinds_of_positions() -> None:
    documents = [document(0, 3, num_thinking=2), document(1, 2, "zh", prompt=2000), document(2, 1)]
    positions = positions_of(documents, {100: "thinking", 102: "end"})
    damage = damage_of(np.array([1, 2, 3, 10, 20, 6], np.float32), positions)
    assert damage.mean == 7.0
    assert damage.interval is None, "three texts have no interval"
    told = {(entry.kind, entry.name): (entry.num_positions, entry.damage_nats) for entry in damage.by_kind}
    assert told == {
        ("domain", "writing"): (6, 7.0), ("language", "en"): (4, 3.0), ("language", "zh"): (2, 15.0),
        ("part", "thinking"): (2, 1.5), ("part", "answer"): (1, 3.0),
        ("structural", "thinking"): (3, pytest.approx(17 / 3)), ("structural", "end"): (1, 3.0),
        ("context", "0 to 1023 tokens"): (4, 3.0), ("context", "1024 tokens and more"): (2, 15.0),
    }  # fmt: skip


def test_interval_is_over_texts() -> None:
    """As the divergence of a suite has it; translations of one question are one text."""
    documents = [document(i, 4, cluster=f"{i // 2}" if i < 4 else None) for i in range(30)]
    kl = np.random.default_rng(1).gamma(0.2, 1.0, 120).astype(np.float32)
    positions = positions_of(documents)
    assert (positions.num_texts, positions.longest) == (28, 7)
    assert not any(kind == "context" for kind, _ in positions.masks)
    clusters = np.repeat([0, 0, 1, 1, *range(2, 28)], 4)
    damage = damage_of(kl, positions)
    assert damage.interval == skewed_mean(kl.astype(np.float64), clusters, least=0.0)
    assert damage.interval is not None and damage.interval.n == 28


def test_parts_and_wholes_have_texts_of_their_own() -> None:
    """Half of each language for either, and texts of one question together: a mix is not measured on what it is chosen on."""
    documents = [document(i, 2, "zh" if i % 3 == 0 else "en", cluster="q" if i in (1, 2) else None) for i in range(90)]
    positions = positions_of(documents)
    split = halves(positions)
    assert split is not None
    first, second = (only(positions, mask_N) for mask_N in split)
    assert (positions.num_texts, first.num_texts, second.num_texts) == (89, 45, 44)
    assert {*first.text_N.tolist()} & {*second.text_N.tolist()} == set()
    for name, number in (("en", 60), ("zh", 30)):
        counts = [int(half.masks["language", name].sum()) // 2 for half in (first, second)]
        assert sum(counts) == number and abs(counts[0] - counts[1]) <= 2
    kl = np.where(split[0], 1.0, 3.0).astype(np.float32)
    assert [damage_of(kl[mask_N], half).mean for mask_N, half in zip(split, (first, second), strict=True)] == [1.0, 3.0]
    assert halves(positions_of([document(i, 2) for i in range(39)])) is None, "a half of 19 texts has no interval"


def test_rank_correlation() -> None:
    reference = {(layer, "attention", "w4a16"): float(layer) for layer in range(8)}
    candidate = {part: -value for part, value in reference.items()} | {(99, "attention", "w4a16"): 1.0}
    correlation = rank_correlation("proxy:weights", reference, "served", candidate, seed="0")  # type: ignore[arg-type]
    assert correlation.spearman is not None
    told = correlation.spearman
    assert (told.value, told.low, told.n) == (pytest.approx(-1.0), pytest.approx(-1.0), 8)
    assert told.high == pytest.approx(
        np.tanh(-np.arctanh(41 / 42) + 1.959964 * np.sqrt((1 + (41 / 42) ** 2 / 2) / 5)), abs=1e-6
    )
    assert correlation.parts[3] == (3, "attention", "w4a16", 3.0, -3.0)
    assert rank_correlation("proxy:weights", reference, "served", candidate, seed="0") == correlation  # type: ignore[arg-type]


def test_schemes_of_one_part_are_no_further_parts() -> None:
    """Seven schemes that say of every part what one says tell nothing more of the order of parts."""
    draw = np.random.default_rng(3)
    figures = draw.normal(size=(12, 2)) @ np.array([[1.0, 0.7], [0.0, 0.7]])
    widths = []
    for schemes in (("w4a16",), ("w4a16", "w4a16_g64", "w4a16_g32", "nvfp4", "nvfp4a16", "fp8_block", "w8a8")):
        reference, candidate = (
            {(layer, "attention", scheme): float(figures[layer, side]) for layer in range(12) for scheme in schemes}
            for side in (0, 1)
        )
        told = rank_correlation("proxy:weights", reference, "served", candidate, seed="0").spearman  # type: ignore[arg-type]
        assert told is not None and told.n == 12 * len(schemes)
        assert told.low < told.value < told.high
        widths.append(told.high - told.low)
    assert widths[1] == pytest.approx(widths[0], rel=0.1)


@pytest.mark.parametrize(
    ("theirs", "why"),
    [
        ({(layer, "attention", "w4a16"): 1.0 for layer in range(3)}, "3 parts in both; 4 are needed"),
        ({(layer, "attention", "w4a16"): 1.0 for layer in range(8)}, "one side gives all parts the same"),
    ],
)
def test_no_rank_correlation(theirs: dict[tuple[int, str, str], float], why: str) -> None:
    reference = {(layer, "attention", "w4a16"): float(layer) for layer in range(8)}
    correlation = rank_correlation("proxy:kl", reference, "served", theirs, seed="0")  # type: ignore[arg-type]
    assert (correlation.spearman, correlation.why_not) == (None, why)


def test_suite_of_texts() -> None:
    suite = suite_of(num_texts=24, max_tokens=128, seed="sensitivity-0")
    assert suite.divergence is not None
    assert (suite.tasks, suite.divergence.num_documents, suite.seed) == ((), 12, "eval-sensitivity-0")


def test_a_run_without_texts(tmp_path: Path) -> None:
    with pytest.raises(
        MeasureError, match="holds no measurement of a reference, so no texts; run `assay evaluate`, or say --text"
    ):
        texts_of_run(tmp_path)


def test_drafts_by_precision_of_the_mtp_block(tiny_glm: Path, tmp_path: Path) -> None:
    from assay.recipes.load import load_recipe
    from assay.recipes.precision import PrecisionRecipe
    from assay_quantize.checkpoint.checkpoint import open_checkpoint
    from assay_quantize.plan.planner import make_plan

    measured = make_measurements()[0]
    drafts = Acceptance(num_drafts=200, num_draft_tokens=200, num_accepted_tokens=150, rate=0.75, mean_length=1.75)
    for label in ("w4a16", "w4a16-mtp", "w4a16-nomtp"):
        plan = make_plan(open_checkpoint(tiny_glm), load_recipe(PrecisionRecipe, label), model="tiny", family=None)
        plan.save(tmp_path / label / "plan.json")
        own = measured.model_copy(
            update={"label": label, "is_reference": False, "acceptance": None if "nomtp" in label else drafts}
        )
        own.save(tmp_path / "measurements" / f"{label}.json")
    kept, quantized = mtp_acceptance(tmp_path)
    assert (kept.label, kept.scheme, kept.accepted_share, kept.num_drafted) == ("w4a16", "bf16", 0.75, 200)
    assert (quantized.label, quantized.scheme) == ("w4a16-mtp", "w4a16")
    assert kept.bytes is not None and quantized.bytes is not None and kept.bytes > quantized.bytes
