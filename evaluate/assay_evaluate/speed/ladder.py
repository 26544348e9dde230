"""The points that are measured, the order in which that happens, and what a good request takes (`ttft<2s tpot<25ms`)."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from assay.errors import AssayError
from assay.foreign_text import shown

MIN_REQUESTS = 8
REQUESTS_IN_FLIGHT = 2
"""Requests of a repeat, per request in flight: the first wave fills the batch, the second meets a full one."""


@dataclass(frozen=True, order=True)
class Point:
    """One operating point of one server. `prompts`: their kind. `concurrency`: requests in flight."""

    prompts: str
    concurrency: int


@dataclass(frozen=True)
class Ladder:
    """What is wanted of every checkpoint. `speculation`: tokens drafted a step, 0 for off. Lengths are in tokens.

    num_requests: of a repeat; None: eight, or two for each request in flight. objective: of goodput, see `SpeedRow.objective`.
    """

    concurrency: tuple[int, ...] = (1, 4, 8)
    speculation: tuple[int, ...] = (0, 1)
    prompts: tuple[str, ...] = ("chat",)
    repeats: int = 3
    starts: int = 2
    """Of each server, no more than repeats: those of one start do not show by how much starts differ (decision 214)."""
    num_requests: int | None = None
    output_tokens: int = 128
    prompt_tokens: int = 1024
    """Of `long` prompts, about."""
    objective: Mapping[str, float] = field(default_factory=dict)
    seed: int = 0

    @property
    def points(self) -> tuple[Point, ...]:
        """Of one server, in order."""
        return tuple(Point(prompts, concurrency) for prompts in self.prompts for concurrency in self.concurrency)

    def requests_of(self, point: Point) -> int:
        """Requests of a repeat."""
        return self.num_requests or max(MIN_REQUESTS, REQUESTS_IN_FLIGHT * point.concurrency)

    def same_points(self) -> dict[str, Any]:
        """What rows of two ladders must share to be repeats of one point; as the record's `settings` have it."""
        return {
            "num_requests": self.num_requests,
            "output_tokens": self.output_tokens,
            "prompt_tokens": self.prompt_tokens,
            "objective": dict(self.objective),
            "seed": self.seed,
        }

    def settings(self) -> dict[str, Any]:
        """All of it, for the record."""
        points = {name: list(getattr(self, name)) for name in ("concurrency", "speculation", "prompts")}
        return {**points, "repeats": self.repeats, "starts": self.starts, **self.same_points()}


def shuffled(points: Mapping[Point, range], seed: str) -> Iterator[tuple[int, Point]]:
    """(repeat, point): every repeat is a pass over all points that it is wanted of, each pass in an order of its own.

    So the repeats of a point are spread over the time that its server runs, and a machine that slows down does not slow down
    one point only (randomized complete blocks).
    """
    for repeat in sorted({repeat for repeats in points.values() for repeat in repeats}):
        one_pass = list(points)
        random.Random(f"{seed}:order:{repeat}").shuffle(one_pass)
        yield from ((repeat, point) for point in one_pass if repeat in points[point])


def deal_repeats(num_repeats: int, num_starts: int, ladder: Ladder) -> list[range]:
    """Repeats that each further start of a server measures of a point that has `num_repeats`, of `num_starts` starts.

    As many starts in all as the ladder says, if need be with more repeats than it says; none where nothing is missing.
    """
    starts = max(min(ladder.starts, ladder.repeats) - num_starts, 0)
    missing = max(ladder.repeats - num_repeats, starts)
    starts = max(starts, 1 if missing else 0)
    made, first = [], num_repeats
    for start in range(starts):
        num = missing // starts + (start < missing % starts)
        made.append(range(first, first + num))
        first += num
    return made


def shuffled_servers(servers: Sequence[tuple[str, int]], seed: int, turn: int = 0) -> list[tuple[str, int]]:
    """(label, speculation) of the servers in the order in which they are started in their turn."""
    order = list(servers)
    random.Random(f"{seed}:servers{f':{turn}' if turn else ''}").shuffle(order)
    return order


# ------------------------------------------------------------------------------------------------ what a good request takes
LIMITS = {"ttft": "ttft_s", "tpot": "tpot_s", "e2e": "end_to_end_s", "e2el": "end_to_end_s"}
VLLM_NAMES = {"ttft_s": "ttft", "tpot_s": "tpot", "end_to_end_s": "e2el"}
"""As `vllm bench serve --goodput` calls them, in milliseconds."""
_SECONDS = {"ms": 1e-3, "s": 1.0}
_LIMIT = re.compile(r"([a-z0-9]+)\s*(?:<|:)\s*([0-9]+(?:\.[0-9]+)?)\s*(ms|s)")
_LEAST_S, _MOST_S = 1e-9, 1e9


def parse_objective(text: str) -> dict[str, float]:
    """`SpeedRow.objective` of `ttft<2s tpot<25ms` (commas may stand between them). AssayError: it says something else."""
    limits: dict[str, float] = {}
    for part in re.sub(r"\s*([<:])\s*", r"\1", text.replace(",", " ")).split():
        limit = _LIMIT.fullmatch(part)
        if limit is None or limit[1] not in LIMITS or not _LEAST_S <= float(limit[2]) * _SECONDS[limit[3]] <= _MOST_S:
            raise AssayError(
                f"--objective {shown(repr(text))}: {shown(repr(part))} is no limit; write `ttft<2s tpot<25ms`, with ttft, tpot "
                "or e2e, and s or ms"
            )
        if LIMITS[limit[1]] in limits:
            raise AssayError(f"--objective {shown(repr(text))}: names {limit[1]} twice; give one limit for each")
        limits[LIMITS[limit[1]]] = float(limit[2]) * _SECONDS[limit[3]]
    if not limits:
        raise AssayError(f"--objective {shown(repr(text))}: names no limit; write `ttft<2s tpot<25ms`")
    return limits
