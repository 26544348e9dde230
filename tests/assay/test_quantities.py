"""One share, written in each of the ways there are."""

from __future__ import annotations

import pytest

from assay import quantities
from assay_reports import text


@pytest.mark.parametrize(
    ("share", "written"),
    [
        (0.0, ("0.0 %", "0 %", "0 %", "0 %", "0", "0.0", "0", "0.0")),
        (0.0004, ("0.04 %", "0 %", "0.04 %", "0.04 %", "0.04", "0.0", "0", "0.0")),
        (0.015, ("1.5 %", "1.5 %", "1.5 %", "1.5 %", "1.5", "1.5", "1.5", "+1.5")),
        (0.02, ("2.0 %", "2 %", "2 %", "2 %", "2", "2.0", "2", "+2.0")),
        (0.9512, ("95.1 %", "95.1 %", "95.12 %", "95 %", "95.12", "95.1", "95.1", "+95.1")),
        (0.998, ("99.8 %", "99.8 %", "99.8 %", "99.8 %", "99.8", "99.8", "99.8", "+99.8")),
        (1.0, ("100.0 %", "100 %", "100 %", "100 %", "100", "100.0", "100", "+100.0")),
    ],
)
def test_shares(share: float, written: tuple[str, ...]) -> None:
    ways = (
        quantities.percent, quantities.percent_short, quantities.percent_plain, quantities.percent_of_events,
        quantities.hundredfold, quantities.points, quantities.points_short, quantities.points_signed,
    )  # fmt: skip
    assert tuple(way(share) for way in ways) == written


def test_losses_have_a_sign_and_nothing_has_none() -> None:
    assert [quantities.points_signed(share) for share in (-0.0123, -0.0001, 0.0001)] == ["-1.2", "0.0", "0.0"]
    assert [text.percent(None), text.points(None)] == ["NOT MEASURED"] * 2


def test_numbers_in_ranges() -> None:
    written = [quantities.number_ranges(numbers) for numbers in ((), (3,), range(3), (7, 0, 1, 2, 5, 6), (1, 3, 5))]
    assert written == ["", "3", "0-2", "0-2, 5-7", "1, 3, 5"]
