"""What a calibration saw, in lines: text, tokens of the experts as a line of blocks a layer, ranges of activations."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from assay.records.calibration import BLOCKS, CalibratedLayers, Calibration, TextSource, WithheldItems

SHOWN = 3
"""Weights, tasks and experts that are named; the others are counted."""


def lines(made: Calibration) -> Iterator[str]:
    """What is printed."""
    yield f"{made.file}: channel weights of {made.weights:,} weights over {made.num_tokens:,} tokens"
    yield from text_lines(made.sources, made.withheld)
    yield from repeated_lines(made)
    if made.tokens_by_expert is not None:
        least, median, most = made.tokens_by_expert
        yield f"tokens of a routed expert: {least:,} (least), {median:,} (median), {most:,} (most)"
        if made.tokens_per_expert is not None:
            yield _ended(made, least)
    yield from coverage_lines(made)
    inputs = made.nvfp4_inputs
    yield (
        f"activations in the constant range of nvfp4: {inputs.num_cut_off / inputs.num_groups:.2%} of the groups are cut off "
        f"(largest {inputs.largest:.4g} of 2688, {inputs.largest_at}), "
        f"{inputs.num_coarse / inputs.num_groups:.2%} have a coarse scale, "
        f"{inputs.num_zeroed / inputs.num_groups:.2%} become 0 (most: {inputs.most_zeroed:.2%}, {inputs.most_zeroed_at})"
    )
    if made.starved:
        names = ", ".join(f"{name} ({count})" for name, count in list(made.starved.items())[:SHOWN])
        more = f" and {len(made.starved) - SHOWN:,} more" if len(made.starved) > SHOWN else ""
        yield f"left out, fewer than {made.min_tokens} tokens: {names}{more}; raise --tokens to have them in"


def text_lines(sources: Sequence[TextSource], withheld: Sequence[WithheldItems]) -> Iterator[str]:
    """What the text was made of, and what it was compared with."""
    total = sum(source.num_tokens for source in sources) or 1
    for source in sources:
        kind = f" ({source.kind})" if source.kind else ""
        dropped = f", {source.num_dropped} left out for items of an evaluation in them" if source.num_dropped else ""
        lost = (
            f", thinking of {source.num_without_thinking} not shown by the chat template" if source.num_without_thinking else ""
        )
        ended = ", all there is" if source.is_exhausted else ""
        asked = f" for {source.weight:.0%}" if sources[1:] else ""
        share = f"{source.num_tokens / total:.0%}{asked}: " if sources[1:] else ""
        amount = f"{source.num_texts:,} texts, {source.num_tokens:,} tokens"
        yield f"text {source.source}{kind}: {share}{amount}{ended}{dropped}{lost}"
    known = [items for items in withheld if items.num_items is not None]
    unknown = [items for items in withheld if items.num_items is None]
    if known:
        items, with_one = sum(items.num_items or 0 for items in known), sum(items.dropped for items in known)
        yield f"compared with {items:,} items of {len(known)} tasks: {with_one} texts have one in them and were left out"
    if unknown:
        names = ", ".join(f"{items.suite}/{items.task} ({items.why})" for items in unknown[:SHOWN])
        yield f"not compared with {names}{f' and {len(unknown) - SHOWN} more tasks' if len(unknown) > SHOWN else ''}"


def repeated_lines(made: Calibration | CalibratedLayers) -> Iterator[str]:
    """That text is the same again and again: the more of it, the less the calibration says."""
    if made.num_repeated:
        count = made.num_tokens // made.length
        yield (
            f"note: {made.num_repeated:,} of {count:,} sequences are the same as one before them, token for token, so only "
            f"{count - made.num_repeated:,} are different; give more text"
        )


def _ended(made: Calibration, least: int) -> str:
    if made.ended == "every expert":
        return f"every expert saw at least {made.tokens_per_expert:,} tokens"
    reason = "the text is at its end" if made.ended == "text" else "that were all tokens asked for; raise --tokens"
    return f"not every expert saw {made.tokens_per_expert:,} tokens (least: {least:,}): {reason}"


def coverage_lines(made: Calibration) -> Iterator[str]:
    """One line a layer: tokens of its experts, from none (a dot) to the most of any expert of the model (a full block)."""
    if not (most := made.most_tokens):
        return
    width = len(str(max(layer_coverage.layer for layer_coverage in made.coverage)))
    yield f"tokens of each expert, by layer (· none, {BLOCKS[-1]} {most:,}):"
    for layer_coverage in made.coverage:
        unseen = f", {len(layer_coverage.unseen)} unseen" if layer_coverage.unseen else ""
        least, largest = min(layer_coverage.tokens), max(layer_coverage.tokens)
        yield f"  {layer_coverage.layer:>{width}} {layer_coverage.drawn(most)} {least:,} to {largest:,}{unseen}"
    if named := made.unseen:
        more = f" and {len(named) - SHOWN} more" if len(named) > SHOWN else ""
        yield f"no token reached {', '.join(named[:SHOWN])}{more}: their static scales are the largest of their layer"
