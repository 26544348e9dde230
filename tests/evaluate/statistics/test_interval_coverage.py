"""What the printed intervals cover: small versions of benchmarks/verdicts/interval_coverage.py, whose table has the figures."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "benchmarks" / "verdicts"))

from interval_coverage import Coverage, Row, covers, every_row, lines

ROWS = {f"{one.printed}: {one.population}": one for one in every_row()}


def holds(name: str, num_draws: int) -> float:
    return covers(ROWS[name], num_draws).holds


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        "mean KL: 20 texts: texts 1.5", "mean KL: 24 texts: texts 1.5", "mean KL: 25 texts: quick late, 5",
        "mean KL: 20 texts: two kinds", "mean KL: 24 texts: rare, texts 0.5", "mean KL: 100 texts: quick late, 20",
        "SWE-bench: loss: lite, sd of repositories 5 points, trajectories: 1",
        "loss, several replies: 198 questions, sure, 2 + 1 replies, 4 points lost",
        "acceptance of drafts, by reply: 40 replies with an sd of 8 points",
    ],
)  # fmt: skip
def test_what_was_covered_least_is_covered(name: str) -> None:
    """At least 93 %, give or take two standard errors of 1,000 draws. Log-normal text means with sigma 1.5 had 91 %."""
    assert 0.917 <= holds(name, 1000) <= 0.995


def test_more_texts_are_lacking_where_one_stands_out() -> None:
    """Of 4,000 draws with 24 texts of log-normal means, sigma 1.5: 91.4 % with one text more, 93.8 % now."""
    assert holds("mean KL: 24 texts: texts 1.5", 4000) > 0.925


@pytest.mark.slow
def test_every_row_draws_what_it_says() -> None:
    """Two draws of each; names are their own, and what is below 93 % is named."""
    assert len(ROWS) == len(every_row())
    table = [line for line in lines(2, "") if line.startswith("|")]
    missed = [covers(entry, 2).holds < 0.93 for entry in ROWS.values()]
    assert ["**below 93 %**" in line for line in table[2:]] == missed


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "word"),
    [
        ("loss, one reply to each item: 400 generated items, 0.5 % differ (two pairs)", "at_least"),
        ("loss, one reply to each item: 1319 problems, 3 % differ", "nominal"),
        ("loss, several replies: 60 problems, even, 5 + 5 replies, 0 points lost", "at_least"),
        ("loss at a length (cells, effective length): 8 items (one length and depth), 5 % differ", "at_least"),
        ("loss over several looks, when it is decided: 60 problems, broken, 6 points lost", "at_least"),
        ("rate (cells of RULER, probes, levers, budget check): 256 trials, 1 %", "at_least"),
        ("SWE-bench: loss: verified, sd of repositories 0 points, trajectories: 1", "at_least"),
        ("top-1 agreement: 48 texts: agrees 0.995", "at_least"),
    ],
)  # fmt: skip
def test_an_interval_is_called_what_it_covers(name: str, word: str) -> None:
    """All but the second cover more than 97 % and said "95 %" before."""
    covered = covers(ROWS[name], 300)
    assert (covered.word, covered.remark) == (word, "")
    assert covered.called[covered.word] > 0.9


def test_a_word_that_is_not_kept_is_remarked() -> None:
    wide = Coverage(0.0, 0.0, 1.0, {"nominal": 1.0, "at_least": 0.0, "about": 0.0}, 2000)
    narrow = Coverage(0.03, 0.03, 1.0, {"nominal": 0.0, "at_least": 1.0, "about": 0.0}, 2000)
    assert [entry.remark for entry in (wide, narrow)] == ["**above 97 %**", "**below 95 %**"]


def test_a_row_does_not_depend_on_the_others() -> None:
    name = "mean KL: 20 texts: even"
    row: Row = ROWS[name]
    assert covers(row, 50) == covers(row, 50)
    assert len([line for line in lines(2, "mean KL") if line.startswith("| mean KL")]) == sum(
        entry.printed == "mean KL" for entry in ROWS.values()
    )
