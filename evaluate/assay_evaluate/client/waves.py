"""Requests that are sent together and numbered by slot, and the tally of all that came of them."""

from __future__ import annotations

import heapq
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from assay.errors import MeasureError
from assay_evaluate.client.exchanges import Ask, Exchange

Slim = Callable[[Exchange], Exchange]
Send = Callable[[Ask, int, int], Exchange]
"""(request, slot, concurrency) -> what came of it."""

STAGGER_S = 0.002
"""Between the requests of a wave: they arrive together and in order."""
GIVE_UP_AFTER = 8
"""Requests in a row without any reply after which the server counts as gone."""
PROGRESS_EVERY_S = 10.0


class Tally:
    """What was asked so far, and what came of it. For several threads."""

    def __init__(self) -> None:
        self.num_requests = 0
        self.num_failed = 0
        self.errors: Counter[str] = Counter()
        self.exchanges: dict[str, Exchange] = {}
        """By id; of repeats of an id the last."""
        self.system_fingerprint: str | None = None
        self._lost_in_a_row = 0
        self._lock = threading.Lock()

    def count(self, exchange: Exchange) -> bool:
        """Keep an exchange; whether the server still answers anything."""
        with self._lock:
            self.num_requests += 1
            self.exchanges[exchange.id] = exchange
            self.system_fingerprint = self.system_fingerprint or exchange.system_fingerprint
            if exchange.status in ("refused", "failed"):
                self.num_failed += 1
                status = exchange.reply.http_status
                is_status = status is not None and status != 200
                self.errors[f"HTTP {status}" if is_status else str(exchange.reply.error).partition(":")[0]] += 1
            self._lost_in_a_row = self._lost_in_a_row + 1 if exchange.is_lost else 0
            return self._lost_in_a_row < GIVE_UP_AFTER


def ask_in_waves(
    asks: Sequence[Ask], concurrency: int, send: Send, stop: Callable[[], None], tell: Callable[[str], None]
) -> list[Exchange]:
    """`concurrency` requests at once, and in order; the next ones wait for the last reply of these.

    `slot` is the place in the wave.
    """
    waves = [asks[first : first + concurrency] for first in range(0, len(asks), concurrency)]
    return [exchange for wave in waves for exchange in ask_together(wave, concurrency, send, stop, tell)]


def ask_together(
    asks: Sequence[Ask], concurrency: int, send: Send, stop: Callable[[], None], tell: Callable[[str], None]
) -> list[Exchange]:
    """What came of every request, in their order; `concurrency` in flight, a new one as soon as one ends.

    stop: called after an error or Ctrl-C: threads that wait to send a request again need not, and are waited for.
    """
    is_wave = len(asks) <= concurrency
    free = list(range(concurrency))
    lock = threading.Lock()

    def one(number: int, ask: Ask) -> Exchange:
        if is_wave:
            return send(ask, number, concurrency)
        with lock:
            slot = heapq.heappop(free)
        try:
            return send(ask, slot, concurrency)
        finally:
            with lock:
                heapq.heappush(free, slot)

    told = time.monotonic()
    found: list[Exchange] = []
    with ThreadPoolExecutor(max_workers=min(concurrency, max(len(asks), 1))) as pool:
        jobs = []
        try:
            for number, ask in enumerate(asks):
                jobs.append(pool.submit(one, number, ask))
                if number < concurrency:
                    time.sleep(STAGGER_S)
            for number, job in enumerate(jobs):
                found.append(job.result())
                if time.monotonic() - told > PROGRESS_EVERY_S:
                    told = time.monotonic()
                    tell(f"{asks[0].id.partition('/')[0]}: {number + 1}/{len(asks)}")
        except BaseException:
            stop()
            for job in jobs:
                job.cancel()
            raise
    return found


def gone(base_url: str, last: Exchange) -> MeasureError:
    """What to say when nothing comes back any more."""
    return MeasureError(f"{base_url}: {GIVE_UP_AFTER} requests in a row had no reply ({last.reply.error}); is it running?")
