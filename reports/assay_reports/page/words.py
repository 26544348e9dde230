"""Definitions that the page shows on hover and focus, and lists at its end: one or two sentences each."""

from __future__ import annotations

WORDS: dict[str, tuple[str, str]] = {
    "pass": (
        "PASS",
        "Every gate that counts has passed: losses beyond the allowed ones are excluded at the level of the gates.",
    ),
    "fail": (
        "FAIL",
        "A gate that counts has failed: more than the allowed loss is shown, beyond what chance explains.",
    ),
    "underpowered": (
        "UNDERPOWERED",
        "Neither shown to be within the allowed loss nor beyond it. More items would decide; it is never a pass.",
    ),
    "not-measured": (
        "NOT MEASURED",
        "There is no number, or one that means nothing, such as a task on which the reference itself is never right.",
    ),
    "reference": (
        "reference",
        "The checkpoint that the others are compared with, served in the same way.",
    ),
    "floor": (
        "noise floor",
        "The reference held against its own repeat: how much differs where nothing was changed.",
    ),
    "change": (
        "change",
        "Candidate minus reference in percentage points, over items that both answered; − is a loss. In brackets its interval.",
    ),
    "allowed": (
        "allowed",
        "The loss, in points, that the gate of this task allows; written down in the gates' recipe.",
    ),
    "pairs": (
        "pairs",
        "Items that both sides answered. Items whose request failed are left out on both.",
    ),
    "cut-off": (
        "cut off",
        "Replies ended by the token budget or the context; they are scored as they stand.",
    ),
    "flipped": (
        "flipped",
        "Right on one side only. Equal scores hide flips, for losses and gains cancel out.",
    ),
    "bc": (
        "b/c",
        "Items that only the reference, or only this checkpoint, gets right.",
    ),
    "p-pass": (
        "p pass",
        "Chance of such data if the margin or more were lost; small enough, and the checkpoint passes.",
    ),
    "p-fail": (
        "p fail",
        "Chance of such data if the margin or less were lost, adjusted over the scored tasks; small enough, and it fails.",
    ),
    "p-any": (
        "p any",
        "Chance of such data without any difference (McNemar, mid-p). It decides nothing.",
    ),
    "mde": (
        "MDE",
        "Minimum detectable effect: the smallest loss that would show in 80 % of such runs.",
    ),
    "needed": (
        "needed",
        "Pairs with which a checkpoint that loses nothing would pass, 4 times in 5; none where it surely loses something.",
    ),
    "kl": (
        "KL",
        "Kullback-Leibler divergence of the next-token distributions from the reference's, in nats a token. How "
        "different, not how much worse. Unbiased: right on average over sampled texts. Lower bound: the truth may be more.",
    ),
    "top1": (
        "top-1 agreement",
        "Share of positions where both think the same token most likely.",
    ),
    "acceptance": (
        "accepted",
        "Share of the tokens proposed by the model's own draft head (MTP) that it then accepted.",
    ),
    "emulated": (
        "emulated",
        "Weights dequantized and computed in plain arithmetic: the score is the format's, not a kernel's, and says"
        " nothing about speed.",
    ),
    "in-flight": (
        "requests in flight",
        "Requests that the server works on at once.",
    ),
    "tpot": (
        "TPOT",
        "Time per output token: (end-to-end − time to the first token) / (tokens − 1), of one request.",
    ),
    "ttft": (
        "TTFT",
        "Time to the first token, from the request on.",
    ),
}
"""Key -> (word, definition). A definition that no table of a page names is left out of that page."""
