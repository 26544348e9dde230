"""A screening on one page: who is ahead and by how much, size against KL, and where it hurts."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from pathlib import Path

from markupsafe import Markup

from assay.foreign_text import in_page
from assay.records.base import Interval, write_text_atomically
from assay.records.divergence import DriftGroup, TextMean
from assay.records.run import folder_name
from assay.records.screening import Screened, Screening
from assay_evaluate.statistics.skewed import unseen_share
from assay_reports.page.svg import (
    SERIES,
    Box,
    Picture,
    Scale,
    axis_below,
    axis_left,
    decades,
    on_screen_and_phone,
    place_names,
    shape_of,
    steps,
)
from assay_reports.rankings import ranked, ratio_of
from assay_reports.report import document_parts, environment
from assay_reports.sentences import screening as english

STRUCTURAL = "structural token"
LEAST_KL = 1e-6
"""What is drawn at the foot of the picture: a KL of 0 has no place on a logarithmic axis."""


def heading(record: Screening) -> str:
    """Who is ahead, or what is said of the only one; that it is damaged or another model, and that the reference is a copy."""
    answer, first = _answer(record), record.candidates[0].label
    if first in record.damages or first in record.unlike_reference:
        what = english.IS_DAMAGED if first in record.damages else english.IS_OTHER
        answer = what.format(heading=answer, label=first)
    return answer if record.foreign_reference is None else english.AGAINST_COPY.format(heading=answer)


def not_said(record: Screening) -> list[str]:
    """What no figure here is about."""
    copy = [] if record.foreign_reference is None else [english.COPY.format(how=record.foreign_reference)]
    return [*copy, *english.NOT_SAID, unseen(record.panel.num_texts)]


def unseen(num_texts: int) -> str:
    """How rare a loss these texts may show nothing of."""
    return english.UNSEEN.format(one_in=math.floor(1 / unseen_share(num_texts)), num_texts=num_texts)


def damages(record: Screening) -> list[str]:
    """What is damaged of which checkpoint."""
    return [english.DAMAGED.format(label=label, damage=damage) for label, damage in record.damages.items()]


def others(record: Screening) -> list[str]:
    """What makes which candidate another model than the reference."""
    return [
        english.DAMAGED.format(label=label, damage=what) for label, told in record.unlike_reference.items() for what in told
    ]


def _answer(record: Screening) -> str:
    first = record.candidates[0]
    if len(record.candidates) == 1:
        limit = english.LIMIT.format(limit=first.limit, limit_for=first.limit_for)
        return english.ALONE.format(
            label=first.label, word=first.word, reference=name_of(record.reference), kl=nats(first.drift.kl_mean), limit=limit
        )
    ranking = record.rankings[0]
    names = {"first": ranking.first, "second": ranking.second, "num_texts": record.panel.num_texts}
    if ranking.ratio is None:
        return english.NO_RATIO.format(**names)
    return (english.AHEAD if ranking.is_ranked else english.NOT_APART).format(**names, ratio=ratio_of(ranking.ratio))


def why(record: Screening, candidate: Screened) -> str:
    """The word of a candidate, in a sentence."""
    mean = candidate.drift.kl_mean
    if record.surprise.is_foreign and isinstance(mean, Interval) and mean.low > candidate.limit:
        return english.FOREIGN.format(nll=record.surprise.nll, entropy=record.surprise.entropy)
    if candidate.word == "FAIL":
        return english.FAILED
    if candidate.word == "not failed":
        return english.NOT_FAILED
    needed = candidate.tokens_needed
    return english.UNDECIDED.format(remedy=english.MORE_TOKENS.format(tokens=needed) if needed else english.MORE_TEXTS)


def parts(record: Screening) -> list[tuple[str, list[tuple[str, list[DriftGroup | None]]]]]:
    """(kind of part, rows of its name and every candidate's group of it); None: it has none of that name."""
    kinds: dict[str, list[Sequence[DriftGroup]]] = {
        "domain": [candidate.drift.by_domain for candidate in record.candidates],
        "language": [candidate.drift.by_language for candidate in record.candidates],
        "thinking and answer": [candidate.drift.by_part for candidate in record.candidates],
        STRUCTURAL: [candidate.by_structural for candidate in record.candidates],
        "position": [candidate.drift.curve for candidate in record.candidates],
        "entropy of the reference": [candidate.by_entropy for candidate in record.candidates],
        "certainty of the reference": [candidate.drift.by_confidence for candidate in record.candidates],
    }
    tables = []
    for kind, groups in kinds.items():
        names = list(dict.fromkeys(group.name for of_candidate in groups for group in of_candidate))
        rows = [(name, [next((g for g in of if g.name == name), None) for of in groups]) for name in names]
        if len(rows) > (kind != STRUCTURAL):  # others say nothing where there is one row
            tables.append((kind, rows))
    return tables


def layers(record: Screening) -> list[tuple[int, list[float | None]]]:
    """(layer, share of the tokens that each candidate sends to another set of experts)."""
    numbers = sorted({change.layer for candidate in record.candidates for change in candidate.routers})
    return [
        (layer, [next((c.changed for c in candidate.routers if c.layer == layer), None) for candidate in record.candidates])
        for layer in numbers
    ]


def picture(candidates: Sequence[Screened]) -> Markup:
    """KL against bits per weight."""
    ends = [end for candidate in candidates for end in (*_ends(candidate), candidate.limit) if end > LEAST_KL]
    low, high = 10 ** math.floor(math.log10(min(ends))), 10 ** math.ceil(math.log10(max(ends)))
    hints = [
        english.HINT.format(label=entry.label, bits=entry.bits_per_weight, kl=nats(entry.drift.kl_mean)) for entry in candidates
    ]
    right = 1.1 * max(candidate.bits_per_weight for candidate in candidates)
    height = 330

    def draw(width: int, css: str) -> Markup:
        drawn = Picture(width, height, english.PICTURE.format(points=". ".join(hints)), css)
        across, up = Scale(0, right, 64, width - 12), Scale(low, high, height - 48, 40, is_log=True)
        axis_left(drawn, up, 64, decades(low, high), _tick, english.KL_AXIS, width - 12)
        axis_below(drawn, across, height - 48, steps(0, right), lambda value: f"{value:g}", english.BITS_AXIS, 40)
        places: list[tuple[float, float, str]] = []
        taken: list[Box] = []
        for number, (candidate, hint) in enumerate(zip(candidates, hints, strict=True)):
            series = f"s{number % SERIES}"
            x, bottom = across(candidate.bits_per_weight), height - 48.0
            y = up(candidate.drift.kl_mean.value) if candidate.drift.kl_mean.value > low else bottom
            least, most = (up(end) if end > low else bottom for end in _ends(candidate))
            drawn.line(x, least, x, most, f"bar {series}")
            drawn.line(x - 9, up(candidate.limit), x + 9, up(candidate.limit), "limit")
            drawn.mark(x, y, series, shape_of(series), hint, 6)
            places.append((x, y, candidate.label))
            taken += [(x - 2, most, x + 2, least), (x - 9, up(candidate.limit) - 2, x + 9, up(candidate.limit) + 2)]
        for x, y, anchor, name in place_names(places, (64, 40, width - 12, height - 48), taken):
            drawn.text(x, y, name, "name", anchor)
        return drawn.drawn()

    return on_screen_and_phone(draw, 560)


def _tick(value: float) -> str:
    """A power of ten without an exponent."""
    return f"{value:.{max(0, -round(math.log10(value)))}f}"


def _ends(candidate: Screened) -> tuple[float, float]:
    mean = candidate.drift.kl_mean
    return (mean.low, mean.high) if isinstance(mean, Interval) else (mean.value, mean.value)


def nats(mean: TextMean) -> str:
    """`0.0123 (0.0110 to 0.0136)`."""
    value = plain_nats(mean.value)
    return f"{value} ({plain_nats(mean.low)} to {plain_nats(mean.high)})" if isinstance(mean, Interval) else value


def plain_nats(value: float) -> str:
    """Four decimals, or two digits of what is smaller: `0.0123`, `0.000042`, `0`."""
    if value == 0:
        return "0"
    if abs(value) < LEAST_KL:
        return "below 0.000001"
    return f"{value:.4f}" if abs(value) >= 0.001 else f"{value:.{1 - math.floor(math.log10(abs(value)))}f}"


def name_of(location: str) -> str:
    """Of a checkpoint's folder, or of a file."""
    return folder_name(Path(location))


def write_screening_page(record: Screening, path: Path) -> None:
    """The page, under the same policy as a report."""
    jinja = environment(html=True)
    page = jinja.get_template("screening.html.j2").render(
        record=record, heading=heading(record), why=functools.partial(why, record), rankings=ranked(record.rankings),
        parts=parts(record), layers=layers(record), files=[name_of(file) for file in record.panel.files],
        not_said=not_said(record), damages=damages(record), others=others(record),
        picture=picture(record.candidates), nats=nats, plain_nats=plain_nats, name_of=name_of, said=english, series=SERIES,
        **document_parts(jinja),
    )  # fmt: skip
    write_text_atomically(path, in_page(page))
