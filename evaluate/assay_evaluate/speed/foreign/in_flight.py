"""How many requests a file had in flight, against what it says: the limit, the rate, the prompts, Little's law."""

from __future__ import annotations

from dataclasses import dataclass

from assay.records.speed import SpeedRepeat

BOUND = 0.75
"""Share of the limit that is in flight on average from which a rate did not hold the requests back."""
BEYOND = 1.5
"""Times the limit that Little's law may find where end-to-end times follow from TTFT, TPOT and mean lengths."""
PEAK_FROM_S = 2.0
"""vLLM counts requests per whole second: of shorter ones its peak is too high."""
SENT_AT, AS_MANY = "requests were sent at", "at most"
"""How notes begin that say how many were in flight."""


@dataclass(frozen=True)
class InFlight:
    """concurrency: most at once. request_rate: None: it held nothing back. doubt: as `SpeedRow.doubt`."""

    concurrency: int
    request_rate: float | None
    notes: tuple[str, ...]
    doubt: str | None


def in_flight(limit: int | None, rate: float | None, num_prompts: int | None, repeat: SpeedRepeat) -> InFlight | None:
    """limit: `--max-concurrency`; rate: requests a second, None: without one. None: nobody knows how many were in flight."""
    mean, peak, notes = repeat.in_flight, repeat.peak_in_flight, []
    held = rate is not None and (limit is None or mean is None or mean < BOUND * limit)
    caps = {"the limit": limit, "the prompts": num_prompts}
    if held:
        caps["the peak"] = peak if repeat.end_to_end_s is None or repeat.end_to_end_s.mean >= PEAK_FROM_S else None
        caps["the mean"] = None if caps["the peak"] or mean is None else max(1, round(mean))
    known = {name: value for name, value in caps.items() if value}
    if not known or (not held and limit is None):
        return None
    which = min(known, key=lambda name: known[name])
    most = known[which]
    average = "" if mean is None else f", {mean:.1f} on average"
    if held:
        of = "" if limit is None else f" of the {limit:,} allowed"
        notes.append(f"{SENT_AT} {rate:g} a second, so at most {most:,}{of} were in flight{average}")
    elif rate is not None:
        notes.append(f"{SENT_AT} {rate:g} a second, which did not hold them back{average}")
    if not held and which == "the prompts" and limit is not None and limit > most:
        notes.append(f"{AS_MANY} {most:,} requests were in flight, as many as there were; the limit was {limit:,}")
    doubt = None
    slack = 1.05 if repeat.end_to_end_s is not None else BEYOND
    if mean is not None and limit is not None and mean > slack * limit:
        doubt = f"by its own times {mean:.1f} requests were in flight on average, and it says that at most {limit:,} were"
    return InFlight(most, rate if held else None, tuple(notes), doubt)
