"""vLLM's GPU loaders, replayed for a model of every family on one rank and on eight: the table of docs/families.md."""

from __future__ import annotations

import families_replayed
import pytest
from families_replayed import BESIDE, EXAMPLES, PRECISIONS, Cell

from assay.records.preflight.replay import Replay

pytestmark = [pytest.mark.slow, pytest.mark.serve]


@pytest.fixture(scope="module")
def records() -> dict[Cell, Replay]:
    return families_replayed.replay_all([*families_replayed.replayed_families(), *BESIDE])


REFUSED: dict[Cell, str] = {
    **{Cell(family, "w4a16-g32", 8): "group size" for family in ("gemma4", "glm4_moe", "glm4v_moe", "nemotron_h", "qwen4_exp")},
    **{Cell("step3p7", what, ranks): "arguments" for what in ("source", *PRECISIONS) for ranks in (1, 8)},
    **{Cell("laguna", what, ranks): "missing tensor" for what in ("source", *PRECISIONS) for ranks in (1, 8)},
    Cell("gpt_oss", "w4a16-g32", 8): "group size",
    **{Cell("gpt_oss", "fp8-channel", ranks): "no plan" for ranks in (1, 8)},
    Cell("granitemoehybrid", "w4a16-g32", 8): "shape",
    Cell("mimo_v2_flash", "source", 8): "shape",
}
"""What vLLM 0.32 does not load -> the kind of what stands against it; docs/families.md has the reasons."""


@pytest.mark.parametrize("family", [*families_replayed.replayed_families(), *BESIDE])
def test_what_vllm_loads(records: dict[Cell, Replay], family: str) -> None:
    """Everything but what REFUSED lists; a draft is built where the family says that vLLM drafts."""
    example = (EXAMPLES | BESIDE)[family]
    for cell in (Cell(family, what, ranks) for what in ("source", *PRECISIONS) for ranks in (1, example.most_ranks)):
        record = records.get(cell)
        said = [finding.message for finding in record.every_finding] if record is not None else []
        if (kind := REFUSED.get(cell)) is not None:
            assert families_replayed.said_of(record) == kind, (cell, said)
            continue
        assert record is not None
        assert (record.outcome, said, record.asked) == ("PASS", [], ()), cell
        assert len(record.parts) == 1 + example.mtp, cell


def test_the_page_has_this_table(records: dict[Cell, Replay]) -> None:
    """`make families-table` writes it."""
    assert families_replayed.table_on_page() == families_replayed.table(records)
