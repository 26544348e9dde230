"""What was asked: the same question has the same number of tokens for everybody, and as many as a tokenizer counts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from assay_evaluate.alike.sides import Finding, Pair, exceeds, found, some

CONSTANT_SHARE = 0.95
"""Of the questions, for a difference that is the same everywhere."""
SHORTENED_TOKENS, SHORTENED_SHARE = 32, 0.1
"""What a constant difference must be, at least, both, to be no matter of a template."""
UNCOUNTED_TOKENS, UNCOUNTED_SHARE = 8, 0.02
"""What may be billed below the count, beyond what no prompt of the server is billed for."""
ALONE_TOKENS, ALONE_SHARE = 64, 0.2
"""The same where all prompts lack alike, so that it may be the counting."""


def other_prompts(pair: Pair) -> Iterator[Finding]:
    """The same question with another number of prompt tokens on either side. Tokenizers are deterministic: any is a fault."""
    known = [
        (ours.prompt_tokens, theirs.prompt_tokens)
        for ours, theirs in pair.both
        if ours.prompt_tokens is not None and theirs.prompt_tokens is not None
    ]
    differing = [(ours, theirs) for ours, theirs in known if ours != theirs]
    num, of = len(differing), len(known)
    if not exceeds(num, of):
        return
    reference, candidate = pair.reference.label, pair.candidate.label
    steps = Counter(theirs - ours for ours, theirs in differing)
    step, most = steps.most_common(1)[0]
    ours, theirs = max(differing, key=lambda one: abs(one[1] - one[0]))
    example = f"the same question had {ours} prompt tokens at {reference} and {theirs} at {candidate}"
    shortened = abs(step) > max(SHORTENED_TOKENS, SHORTENED_SHARE * max(ours, theirs))
    how_many = f"{some(num, of)} questions"
    if most >= CONSTANT_SHARE * of and not shortened:
        more = f"{abs(step)} {'more' if step > 0 else 'fewer'} token{'s' if abs(step) > 1 else ''}"
        yield Finding(
            "both",
            f"prompts have {more} at {candidate} than at {reference} on {how_many}: another chat template or system prompt, "
            "thinking switched on or off, or a first token put twice",
            num, of,
        )  # fmt: skip
    elif (min(steps) > 0 or max(steps) < 0) and _are_the_longest(known):
        yield Finding(
            "candidate" if theirs < ours else "reference",
            f"{example} ({how_many} differ): something between shortens prompts",
            num, of,
        )  # fmt: skip
    else:
        yield Finding(
            "candidate",
            f"{example} ({how_many} differ, not the longest alone): replies are swapped, or belong to other prompts",
            num, of,
        )  # fmt: skip


def _are_the_longest(known: Sequence[tuple[int, int]]) -> bool:
    """Whether the questions that differ are those with the longest prompts: whatever shortens leaves short ones alone."""
    differing = [max(one) for one in known if one[0] != one[1]]
    alike = [ours for ours, theirs in known if ours == theirs]
    return min(differing) >= max(alike, default=0)


def shortened_prompts(pair: Pair) -> Iterator[Finding]:
    """Fewer prompt tokens billed than a tokenizer counts: something shortens prompts, perhaps on both sides alike."""
    for side, _ in pair:
        counts = () if side.task.served is None else side.task.served.prompt_counts
        short = [
            one
            for one in counts
            if one.counted - one.billed - side.uncounted_tokens > max(UNCOUNTED_TOKENS, UNCOUNTED_SHARE * one.counted)
            or one.counted - one.billed > max(ALONE_TOKENS, ALONE_SHARE * one.counted)
        ]
        if short:
            worst = max(short, key=lambda one: one.counted - one.billed)
            yield found(
                pair, side,
                f"a prompt of {worst.counted} tokens is billed as {worst.billed} by {side.label} "
                f"({some(len(short), len(counts))} that were counted are short): something between shortens prompts",
                len(short), len(counts),
            )  # fmt: skip
