"""Shares, percentage points, levels and sizes as people read them: one function for each way of writing them.

A share is a number from 0 to 1; it is written a hundred times as large. Reports, verdicts and probes take them from here,
so that a sentence and the table beside it read alike.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from assay.errors import AssayError


def percent(share: float) -> str:
    """0.975 -> 97.5 %. A share below 0.1 % that is not zero keeps one significant digit."""
    return f"{100 * share:.1g} %" if 0 < abs(share) < 0.001 else f"{100 * share:.1f} %"


def percent_short(share: float) -> str:
    """0.052 -> 5.2 %, 0.95 -> 95 %: in a sentence."""
    return f"{100 * share:.1f} %".replace(".0 %", " %")


def percent_plain(share: float) -> str:
    """0.005 -> 0.5 %, 0.95 -> 95 %: what somebody chose, with the digits it was given."""
    return f"{hundredfold(share)} %"


def interval_name(level: float, coverage: str) -> str:
    """What an interval is called, by `level` and `coverage` of its record: `95 % interval`, `interval of at least 95 %`,
    `interval of about 95 %`."""
    word = {"nominal": "", "at_least": "at least ", "about": "about "}[coverage]
    return f"interval of {word}{percent_short(level)}" if word else f"{percent_short(level)} interval"


def percent_of_events(rate: float) -> str:
    """0.0015 -> 0.15 %, 0.9985 -> 99.85 %: two significant digits of what is rare, the rate or what it lacks to 1."""
    return f"{100 * rate:.2g} %" if rate < 0.995 else f"{100 - float(f'{100 * (1 - rate):.2g}'):g} %"


def number_ranges(numbers: Iterable[int]) -> str:
    """`0-2, 5`, in order."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


def hundredfold(share: float) -> str:
    """0.015 -> 1.5, 0.02 -> 2: the unit stands elsewhere."""
    return f"{100 * share:g}"


def points(share: float) -> str:
    """0.015 -> 1.5, 0.02 -> 2.0: percentage points, the unit stands elsewhere."""
    return f"{100 * share:.1f}"


def points_short(share: float) -> str:
    """0.015 -> 1.5, 0.02 -> 2: a margin in a sentence."""
    return points(share).removesuffix(".0")


def points_signed(share: float) -> str:
    """0.021 -> +2.1."""
    return signed(100 * share)


def change(loss: float) -> str:
    """0.25 -> `loses 25.0 points`, -0.167 -> `gains 16.7 points`; `shows no change` where it rounds to zero."""
    size = points(abs(loss))
    if size == "0.0":
        return "shows no change"
    return f"{'loses' if loss > 0 else 'gains'} {size} points"


def lost_or_gained(low: float, high: float) -> str:
    """Ends of an interval of a loss: `3.1 to 16.6 lost`, `6.5 to 24.2 gained`, `4.6 gained to 12.3 lost`."""
    near, far = points(abs(low)), points(abs(high))
    if low >= 0:
        return f"{near} to {far} lost"
    return f"{far} to {near} gained" if high <= 0 else f"{near} gained to {far} lost"


def capital(text: str) -> str:
    """A clause as the beginning of a sentence."""
    return text[:1].upper() + text[1:]


def and_more(items: Sequence[object], noun: str = "") -> str:
    """`a`, or `a and 3 more`: the first of several, and how many there are besides."""
    more = f" and {len(items) - 1:,} more{noun}"
    return f"{items[0]}{more if len(items) > 1 else ''}"


def signed(number: float) -> str:
    """3.14 -> +3.1; what rounds to zero has no sign."""
    text = f"{number:+.1f}"
    return "0.0" if text in {"+0.0", "-0.0"} else text


def tokens_short(num_tokens: int) -> str:
    """32768 -> 32K, 1048576 -> 1M, 936000 -> 936,000: a length of a context."""
    if num_tokens % 2**20 == 0:
        return f"{num_tokens >> 20}M"
    return f"{num_tokens >> 10}K" if num_tokens % 2**10 == 0 else f"{num_tokens:,}"


def size(num_bytes: float) -> str:
    """Bytes in decimal units, as disks and GPUs are sold: 12.3 MB, 372 GB."""
    for unit, scale in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if abs(num_bytes) >= scale:
            return f"{num_bytes / scale:.3g} {unit}" if num_bytes < 1000 * scale else f"{num_bytes / scale:,.0f} {unit}"
    return f"{num_bytes:.0f} B"


_BUDGET = re.compile(r"(\d{1,15}(?:\.\d{1,6})?)\s*(bpw|[KMGT]i?B|B)", re.IGNORECASE)
_POWERS = {"B": 0, "K": 1, "M": 2, "G": 3, "T": 4}


@dataclass(frozen=True)
class Budget:
    """As it was asked for: bytes of the whole checkpoint, or bits for each weight that the choice is about."""

    text: str
    num_bytes: int | None = None
    bits: float | None = None


def budget_of(text: str, option: str) -> Budget:
    """`405GB` (10^9), `377GiB` (2^30), `6270000B`, `4.5bpw`. AssayError: it is neither. said: how errors name it."""
    match = _BUDGET.fullmatch(text.strip())
    amount = 0.0 if match is None else float(match[1])
    if match is None or amount <= 0:
        raise AssayError(f"{option}: not a valid size; write 405GB or 377GiB for the whole checkpoint, or 4.5bpw")
    if match[2].lower() == "bpw":
        if not 4 <= amount <= 16:
            raise AssayError(f"{option}: bits per weight lie between 4 and 16; write 4.5bpw, or a size such as 405GB")
        return Budget(text.strip(), bits=amount)
    unit = match[2].upper()
    return Budget(text.strip(), num_bytes=int(amount * (1024 if "I" in unit else 1000) ** _POWERS[unit[0]]))
