"""`ttft<2s tpot<25ms` as limits in seconds."""

from __future__ import annotations

import re

from assay.errors import AssayError
from assay.foreign_text import shown

FIELDS = {"ttft": "ttft_s", "tpot": "tpot_s", "e2e": "end_to_end_s", "e2el": "end_to_end_s"}
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
        if limit is None or limit[1] not in FIELDS or not _LEAST_S <= float(limit[2]) * _SECONDS[limit[3]] <= _MOST_S:
            raise AssayError(
                f"--objective {shown(repr(text))}: {shown(repr(part))} is no limit; write `ttft<2s tpot<25ms`, with ttft, tpot "
                "or e2e, and s or ms"
            )
        if FIELDS[limit[1]] in limits:
            raise AssayError(f"--objective {shown(repr(text))}: names {limit[1]} twice; give one limit for each")
        limits[FIELDS[limit[1]]] = float(limit[2]) * _SECONDS[limit[3]]
    if not limits:
        raise AssayError(f"--objective {shown(repr(text))}: names no limit; write `ttft<2s tpot<25ms`")
    return limits


def goodput_words(objective: dict[str, float]) -> list[str]:
    """Arguments of `vllm bench serve --goodput`."""
    return [f"{VLLM_NAMES[name]}:{1000 * seconds:g}" for name, seconds in sorted(objective.items())]
