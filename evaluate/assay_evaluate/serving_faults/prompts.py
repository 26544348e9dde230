"""What was asked: the same question has the same number of tokens for everybody, and as many as a tokenizer counts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from assay_evaluate.serving_faults.sides import Fault, Finding, Pair, Side, count_of, each_side, is_too_many

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
        (a.prompt_tokens, b.prompt_tokens)
        for a, b in pair.matched
        if a.prompt_tokens is not None and b.prompt_tokens is not None
    ]
    differing = [(before, after) for before, after in known if before != after]
    num, of = len(differing), len(known)
    if not is_too_many(num, of):
        return
    reference, candidate = pair.reference.label, pair.candidate.label
    steps = Counter(after - before for before, after in differing)
    step, most = steps.most_common(1)[0]
    before, after = max(differing, key=lambda lengths: abs(lengths[1] - lengths[0]))
    example = f"the same question had {before} prompt tokens at {reference} and {after} at {candidate}"
    is_shortened = abs(step) > max(SHORTENED_TOKENS, SHORTENED_SHARE * max(before, after))
    how_many = f"{count_of(num, of)} questions"
    longest_alike = max((before for before, after in known if before == after), default=0)
    if most >= CONSTANT_SHARE * of and not is_shortened:
        more = f"{abs(step)} {'more' if step > 0 else 'fewer'} token{'s' if abs(step) > 1 else ''}"
        clause = (
            f"prompts have {more} at {candidate} than at {reference} on {how_many}: another chat template or system prompt, "
            "thinking switched on or off, or a first token put twice"
        )
        yield Finding("both", clause, num, of)
    # Whatever shortens leaves short prompts alone.
    elif (min(steps) > 0 or max(steps) < 0) and min(map(max, differing)) >= longest_alike:
        clause = f"{example} ({how_many} differ): something between shortens prompts"
        yield Finding("candidate" if after < before else "reference", clause, num, of)
    else:
        clause = f"{example} ({how_many} differ, not the longest alone): replies are swapped, or belong to other prompts"
        yield Finding("candidate", clause, num, of)


@each_side
def shortened_prompts(side: Side, other: Side) -> Iterator[Fault]:
    """Fewer prompt tokens billed than a tokenizer counts: something shortens prompts, perhaps on both sides alike."""
    counts = () if side.task.served is None else side.task.served.prompt_counts
    short = [
        prompt
        for prompt in counts
        if prompt.counted - prompt.billed - side.uncounted_tokens > max(UNCOUNTED_TOKENS, UNCOUNTED_SHARE * prompt.counted)
        or prompt.counted - prompt.billed > max(ALONE_TOKENS, ALONE_SHARE * prompt.counted)
    ]
    if short:
        worst = max(short, key=lambda prompt: prompt.counted - prompt.billed)
        yield len(short), len(counts), (
            f"a prompt of {worst.counted} tokens is billed as {worst.billed} by {side.label} "
            f"({count_of(len(short), len(counts))} that were counted are short): something between shortens prompts"
        )  # fmt: skip
