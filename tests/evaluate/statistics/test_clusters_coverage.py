"""Small versions of benchmarks/verdicts/clusters_coverage.py: what the intervals cover now, and what they covered before."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "benchmarks" / "verdicts"))

from clusters_coverage import drafts, flips, repositories, resolutions, tables, translations

from assay_evaluate.preflight.known_tasks import REPOSITORIES

VERIFIED = tuple(REPOSITORIES["verified"].values())


def test_repositories_with_losses_of_their_own_are_covered() -> None:
    """Verified's sizes, an sd of 5 points: 93 to 97 %, and a candidate that loses the margin passes in 3.1 % at most."""
    alone, lost = repositories(VERIFIED, 0.05, 0.0, 20_000), repositories(VERIFIED, 0.05, 0.05, 20_000)
    assert 0.93 <= alone.now <= 0.97 and 0.93 <= lost.now <= 0.97
    assert lost.false_pass_now <= 0.031
    assert alone.before < 0.90 and lost.false_pass_before > 0.05  # t of G - 1 degrees
    none = repositories(VERIFIED, 0.0, 0.05, 20_000)
    assert none.now >= 0.97 and none.false_pass_now <= 0.025  # two analyses, the wider end of both


def test_translations_are_covered() -> None:
    found = translations(250, 11, 0.1, 0.05, 500)
    assert 0.93 <= found.now <= 0.97 and found.false_pass_now <= 0.045  # 2.5 %, give or take three standard errors
    assert 0.81 <= found.before <= 0.88
    alone = translations(250, 11, 0.0, 0.05, 200)
    assert alone.now >= alone.before >= 0.92


@pytest.mark.parametrize(("num_trajectories", "was"), [(1, 1.0), (2, 1.7), (8, 4.4)])
def test_resolution_is_the_truth_however_many_trajectories(num_trajectories: int, was: float) -> None:
    before, now, truth = resolutions(500, num_trajectories, 1000)
    assert now == pytest.approx(truth, rel=0.05)
    assert before == pytest.approx(was * truth, rel=0.05)


def test_flips_of_several_samples_are_covered() -> None:
    found = flips(60, 8, 0.15, 600)
    assert 0.93 <= found.now <= 0.975 and found.before < 0.70
    assert flips(60, 1, 0.15, 100).now == flips(60, 1, 0.15, 100).before


def test_accepted_drafts_of_replies_that_differ_are_covered() -> None:
    found, alike = drafts(100, 0.08, 600), drafts(100, 0.0, 600)
    assert 0.93 <= found.now <= 0.975 and found.before < 0.70
    assert 0.93 <= alike.now <= 0.975


def test_every_table_is_printed() -> None:
    lines = "\n".join(tables(2)).splitlines()
    assert [line for line in lines if line.startswith("#")] == [
        "# Coverage of intervals over clusters", "## SWE-bench: repositories as clusters", "## Translations of one question",
        "## Resolution with several trajectories", "## Flips of several samples", "## MTP acceptance",
    ]  # fmt: skip
    assert sum(line.startswith("|") for line in lines) == 5 * 2 + 12 + 6 + 4 + 4 + 6
