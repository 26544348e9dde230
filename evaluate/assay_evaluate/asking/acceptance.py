"""How much of what the MTP head drafts is accepted, while the tasks run.

Where the server says it per reply (vLLM's `--per-request-spec-decode-metrics`), it is in the journal with the reply and
survives a resume. Else the server's own counters, read before and after, are added up in the journal.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from assay.errors import ServeError
from assay.records.measurement import Acceptance
from assay_evaluate.client.journal import Journal, Reply
from assay_evaluate.statistics.drafts import ratio_standard_error

COUNTERS = {
    "vllm:spec_decode_num_drafts_total": "num_drafts",
    "vllm:spec_decode_num_draft_tokens_total": "num_draft_tokens",
    "vllm:spec_decode_num_accepted_tokens_total": "num_accepted_tokens",
}


class AcceptanceTally:
    """Sums the speculation of replies as they are handed out, and what the spread between replies needs."""

    def __init__(self) -> None:
        self.totals: Counter[str] = Counter()
        self.num_replies = 0
        self.squares = (0, 0, 0)
        """Sums over replies: drafted^2, drafted x accepted, accepted^2, in tokens."""
        self._lock = threading.Lock()

    def add(self, replies: Sequence[Reply]) -> None:
        """Count the replies that say something."""
        with self._lock:
            for reply in replies:
                drafts = reply.speculation or {}
                self.totals.update(drafts)
                if drafted := drafts.get("num_draft_tokens", 0):
                    accepted = drafts["num_accepted_tokens"]
                    terms = (drafted**2, drafted * accepted, accepted**2)
                    self.squares = tuple(map(sum, zip(self.squares, terms, strict=True)))  # type: ignore[assignment]
                    self.num_replies += 1

    @property
    def rate_standard_error(self) -> float | None:
        """Of accepted / drafted tokens, replies being what is sampled. None: fewer than two drafted anything."""
        drafted, accepted = self.totals["num_draft_tokens"], self.totals["num_accepted_tokens"]
        return ratio_standard_error(self.num_replies, drafted, accepted, self.squares)


@contextmanager
def server_counters(metrics: Callable[[], dict[str, float]], journal: Journal, key: str) -> Iterator[None]:
    """Add what the server counted in the meantime to the journal's sums under `key`.

    Nothing if it does not count, or counts less than before: it was started anew.
    """
    before = _read(metrics)
    try:
        yield
    finally:
        after = _read(metrics)
        if before and after.keys() == before.keys() and all(after[name] >= before[name] for name in after):
            journal.add_counters(key, {name: after[name] - before[name] for name in after})


def _read(metrics: Callable[[], dict[str, float]]) -> dict[str, float]:
    try:
        totals = metrics()
    except ServeError:  # no /metrics there, or the server is gone: whoever asks next will say so
        return {}
    return {name: totals[counter] for counter, name in COUNTERS.items() if counter in totals}


def acceptance(per_reply: AcceptanceTally, counted: dict[str, float]) -> Acceptance | None:
    """From the replies where they say, else from the server's counters; None if neither saw any speculation."""
    by_reply = bool(per_reply.totals["num_drafts"])
    totals = per_reply.totals if by_reply else Counter({k: int(v) for k, v in counted.items()})
    drafts, drafted, accepted = (totals[name] for name in COUNTERS.values())
    if not drafts:
        return None
    return Acceptance(
        num_drafts=drafts,
        num_draft_tokens=drafted,
        num_accepted_tokens=accepted,
        rate=accepted / drafted if drafted else None,
        mean_length=1 + accepted / drafts,
        num_replies=per_reply.num_replies if by_reply else None,
        rate_standard_error=per_reply.rate_standard_error if by_reply else None,
    )
