"""What stands at the end of `assay blame`: causes with their shares, what they do together, layers, and the cheapest change."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Console

from assay.quantities import size
from assay.records.base import Interval
from assay.records.diagnosis.blame import Blame, Change
from assay_cli.terminal import escape, print_rows

_COLOURS = {"nothing to blame": "green", "blamed": "bold red", "undecided": "yellow"}


def print_blame(record: Blame, out: Console) -> None:
    from assay_reports.screening import nats

    panel = record.panel
    out.print(
        escape(
            f"{record.candidate} against {record.reference}; {panel.num_texts} texts, {panel.num_tokens:,} tokens; "
            f"{record.numerics.arithmetic} on {record.numerics.device}"
        )
    )
    out.print(
        f"[{_COLOURS[record.word]}]{record.word}[/]: "
        + escape(f"KL {nats(record.kl)} nats, {record.limit:g} allowed{record.limit_for}")
    )
    rows = [(shown_share(cause.share), escape(cause.what)) for cause in record.causes]
    if rows:
        print_rows(("share of the KL", "cause"), rows, out)
    for line in _lines(record):
        out.print(escape(line))


def shown_share(share: Interval | None) -> str:
    """`62 % (58 to 66)`."""
    if share is None:
        return "not known"
    low, value, high = (round(100 * end) for end in (share.low, share.value, share.high))
    return f"{value} % ({low} to {high})"


def _lines(record: Blame) -> Iterator[str]:
    from assay_reports.screening import nats

    what = {cause.name: cause.what for cause in record.causes}
    if record.surprise.is_foreign and record.word == "undecided":
        surprise = record.surprise
        yield (
            f"these texts are foreign to the reference ({surprise.nll:.2f} nats a token, and {surprise.entropy:.2f} were they "
            "its own words): shares hold for them, what is allowed is for text as it writes; give its replies with --text"
        )
    for pair in record.interactions:
        how = "they add to each other" if pair.share.value > 0 else "they cover each other"
        yield (
            f"{what[pair.first]} with {what[pair.second]}: {how}, {shown_share(pair.share)} beyond what each does alone, half "
            "of it in the share of each"
        )
    for span in record.layers:
        is_one = span.first_layer == span.last_layer
        where = f"layer {span.first_layer}" if is_one else f"layers {span.first_layer} to {span.last_layer}"
        if span.share == 1 and not is_one:
            yield f"{what[span.cause]}: what they lose is spread over {where}"
        else:
            yield f"{what[span.cause]}: {100 * span.share:.0f} % of what they lose by themselves is in {where}"
    if record.unexplained is not None and abs(record.unexplained) >= 0.1:
        yield f"{100 * record.unexplained:.0f} % of the KL is in no cause and no pair of them"
    if record.change is not None:
        yield from _change(record.change, record.limit)
    if record.run_status == "FAIL" and record.kl.high <= record.limit:
        yield (
            f"the run says FAIL: {record.run_reason}; this divergence does not show that loss: name other ways of serving with "
            "--variant, which are asked what it lost"
        )
    for cause in record.serving:
        yield (
            f"served with {cause.what} ({cause.label}): {cause.num_recovered} of {cause.num_lost} lost answers are right, "
            f"{cause.num_again} as it was served: {shown_share(cause.share)} of the loss"
        )
    if record.served is not None and record.served.is_more:
        yield (
            f"while serving the run measured KL {nats(record.served.kl)} nats: kernels, backends or the engine add to it; "
            "compare ways of serving with `--variant`, and `assay diagnose probe`"
        )


def _change(change: Change, limit: float) -> Iterator[str]:
    from assay_reports.screening import nats

    restored = ", ".join(change.restored)
    if not change.is_within:
        yield f"no change tried is within {limit:g}: with {restored} of the reference KL is {nats(change.kl)} nats"
        return
    costs = [f"{size(change.added_bytes)} more, {size(change.weights_bytes)} of weights"] if change.added_bytes else []
    if change.read_ratio > 1:
        costs.append(f"a token reads {change.read_ratio:.2f} times the bytes")
    yield "; ".join([f"cheapest change: {restored} as in the reference: KL {nats(change.kl)} nats", *costs])
    if change.recipe is not None:
        yield f"recipe: {change.recipe}"
    if change.variant is not None:
        yield f"while serving: --{change.variant.replace('=', ' ')}"
