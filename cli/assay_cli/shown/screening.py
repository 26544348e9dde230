"""What a screening found: a line for each candidate, where it differs most, what it does not say."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from assay.quantities import percent, points_signed
from assay.records.base import Interval
from assay.records.pack import Pack
from assay.records.screening import Screened, Screening
from assay_cli.terminal import escape, print_rows

if TYPE_CHECKING:
    from assay.records.preflight.power import ScreeningPower
    from assay_evaluate.verdicts.screening_comparison import ScreenedChange, ScreeningComparison

FEW_TEXTS = "fewer than 20 texts have no interval; give more texts"
_COLOURS = {"FAIL": "bold red", "not failed": "green", "UNDERPOWERED": "yellow"}


def print_screening(record: Screening, out: Console) -> None:
    """Least divergence first; then by what parts, and what would tell more."""
    from assay_reports.rankings import ranked
    from assay_reports.screening import nats, unseen

    panel, given = record.panel, record.num_texts_given
    some = "" if given in (None, panel.num_texts) else f" of {given}"
    out.print(
        escape(
            f"reference {record.reference} ({record.reference_stored_as}); {panel.num_texts}{some} texts, {panel.num_tokens:,} "
            f"tokens; {record.numerics.arithmetic} on {record.numerics.device}"
        )
    )
    rows = []
    for candidate in record.candidates:
        agreement = candidate.drift.top1_agreement.value
        rows.append(
            (
                f"[{_COLOURS[candidate.word]}]{candidate.word}[/]",
                escape(candidate.label),
                f"{candidate.bits_per_weight:.2f}",
                nats(candidate.drift.kl_mean),
                f"{candidate.limit:g}{escape(candidate.limit_for)}",
                f"{agreement:.1%}",
            )
        )
    print_rows(("", "candidate", "bits", "KL, nats", "limit", "same first token"), rows, out)
    for candidate in record.candidates:
        for line in _details(record, candidate):
            out.print(escape(f"{candidate.label}: {line}"))
    for sentence in ranked(record.rankings):
        out.print(escape(sentence))
    if record.foreign_reference is not None:
        out.print(escape("The reference is itself a quantized copy: what it lost is in no figure here."))
    out.print(escape(f"{unseen(panel.num_texts)}."))
    out.print("A divergence is no verdict on tasks: `assay judge` and `assay evaluate` ask both checkpoints questions.")


def print_screening_comparison(record: ScreeningComparison, out: Console) -> None:
    """What is compared, what differs, then a row for each candidate."""
    for name, side in (("first", record.first), ("second", record.second)):
        texts = f"{side.num_texts} texts, {side.num_tokens:,} tokens"
        numerics = f"{side.numerics.arithmetic} on {side.numerics.device}"
        out.print(escape(f"{name:7} {side.place}: reference {side.reference}; {texts}; {numerics}"))
    for line in record.differences or ("same reference, texts and numerics",):
        out.print(escape(line))
    rows = [
        (escape(candidate.label), *(_side_of(candidate, at) for at in (0, 1)), escape(_changed(candidate)))
        for candidate in record.candidates
    ]
    print_rows(("candidate", "first: KL, nats", "second: KL, nats", "second against first"), rows, out)


def _side_of(candidate: ScreenedChange, at: int) -> str:
    from assay_reports.screening import nats

    word, kl = candidate.words[at], candidate.kl[at]
    return "" if word is None or kl is None else f"[{_COLOURS[word]}]{word}[/] {nats(kl)}"


def _changed(candidate: ScreenedChange) -> str:
    if candidate.not_compared is not None:
        return f"not compared: {candidate.not_compared}"
    times = "" if candidate.ratio is None else f": {candidate.ratio:.2f} times the KL"
    words = {
        "less": f"loses less{times}",
        "more": f"loses more{times}",
        "not told apart": "not told apart by these intervals; one screening of both pairs the texts",
        "the same weights": "the same weights",
    }
    told = words[candidate.change or "not told apart"]
    return told if candidate.note is None else f"{told}; {candidate.note}"


def print_screening_power(record: ScreeningPower, out: Console) -> None:
    """A row for each candidate, then for each pair."""
    from assay_reports.rankings import ratio_of
    from assay_reports.screening import nats, plain_nats

    out.print(escape(f"screened against {record.reference}: {record.num_texts} texts, {record.num_tokens:,} tokens"))
    numbers = next(candidate.half_widths for candidate in record.candidates if candidate.half_widths)
    columns = ("candidate", "KL, nats", "limit", "decides at", *(f"± at {entry.num_tokens:,}" for entry in numbers))
    rows = []
    for candidate in record.candidates:
        widths = [
            plain_nats(entry.nats) + ("" if entry.share is None else f" ({percent(entry.share)})")
            for entry in candidate.half_widths
        ] or ["no interval"] * len(numbers)
        decides = _tokens(candidate.tokens_needed, record.num_tokens, "decided") if candidate.half_widths else "not known"
        rows.append((escape(candidate.label), nats(candidate.kl), f"{candidate.limit:g}", decides, *widths))
    print_rows(columns, rows, out)
    for ranking in record.rankings:
        ratio = "no ratio" if ranking.ratio is None else f"{ratio_of(ranking.ratio)} times its KL"
        told = _tokens(ranking.tokens_needed, record.num_tokens, "told apart")
        out.print(escape(f"{ranking.first} against {ranking.second}: {ratio}; {told}"))
    if record.is_foreign:
        out.print("The texts are foreign to the reference: no number of such texts fails a candidate.")
    out.print(
        "About, of more texts like these: half-widths fall with the root of their number, and a rare text that loses much "
        "changes them. What decides does so if the KL seen is the true one."
    )


def _tokens(needed: int | None, screened: int, already: str) -> str:
    if needed is None:
        return "no number of tokens"
    return already if needed <= screened else f"{needed:,} tokens"


def print_pack(record: Pack, folder: Path, out: Console) -> None:
    """What was written, what it does not say, and what to do with it."""
    panel, stated = record.panel, record.panel.stated
    head = "with the head" if record.holds_head else "with a hash of the head"
    out.print(escape(f"{folder}: {record.reference} ({record.reference_stored_as}), {head}"))
    if record.foreign_reference is not None:
        out.print(
            escape(f"a quantized copy ({record.foreign_reference}): what it lost itself is in no figure against this pack")
        )
    out.print(escape(f"texts: {panel.num_texts}, {panel.num_tokens:,} tokens scored; {record.numerics.arithmetic}"))
    said = [
        f"{name} {value or 'not stated'}"
        for name, value in (("source", stated.source), ("licence", stated.licence), ("date", stated.date))
    ]
    out.print(escape(f"of the texts: {', '.join(said)}"))
    for floor in record.floors:
        out.print(
            escape(f"floor, {floor.cause}: {floor.kl_mean:.2g} nats, {floor.kl_largest:.2g} in one of {floor.num_texts} texts")
        )
    out.print(escape(f"next: assay screen --pack {shlex.quote(str(folder))} CANDIDATE"))


def _details(record: Screening, candidate: Screened) -> list[str]:
    from assay_reports.screening import plain_nats, why

    lines = ["keys and values rounded as an FP8 cache does"] if candidate.fp8_kv_cache else []
    if (damage := record.damages.get(candidate.label)) is not None:
        lines.append(f"damaged, as `assay inspect` finds: {damage}")
    lines += [f"another model than the reference: {what}" for what in record.unlike_reference.get(candidate.label, ())]
    if candidate.floor is not None:
        lines.append(
            f"computed otherwise than the reference ({candidate.floor.cause}), which alone makes "
            f"{candidate.floor.kl:.2g} nats: the interval is widened by it"
        )
    groups = [group for table in (candidate.drift.by_domain, candidate.drift.by_language) for group in table]
    if len(groups) > 1:
        worst = max(groups, key=lambda group: group.kl_mean)
        lines.append(f"most on {worst.name}, {plain_nats(worst.kl_mean)} nats")
    if candidate.routers:
        worst_layer = max(candidate.routers, key=lambda change: change.changed)
        lines.append(f"layer {worst_layer.layer} sends {worst_layer.changed:.1%} of the tokens to another set of experts")
    if (drafts := candidate.drafts) is not None:
        ends = None if drafts.change is None else map(points_signed, (drafts.change.low, drafts.change.high))
        change = "" if ends is None else f" ({' to '.join(ends)} points)"
        lines.append(
            f"{drafts.accepted:.1%} of MTP drafts accepted, {drafts.reference_accepted:.1%} of the reference's{change}"
        )
    if candidate.word == "UNDERPOWERED":
        lines.append(why(record, candidate) if isinstance(candidate.drift.kl_mean, Interval) else FEW_TEXTS)
    lines += [f"not computed: {what}" for what in candidate.not_applied]
    return lines
