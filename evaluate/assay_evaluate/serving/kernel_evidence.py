"""What vLLM's log says: which kernels were chosen, and, when it died, why.

vLLM has no endpoint that tells which kernel runs a layer; it logs each choice once ("Using MarlinExperts ...",
"Selected CutlassFP8ScaledMMLinearKernel for ..."). A score is a score of these kernels, so the lines go into the fingerprint.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

_PREFIX = re.compile(
    r"^(?:\((?P<process>[\w-]+)(?: pid=\d+)?[^)]*\) )?(?:(?:INFO|WARNING|ERROR|DEBUG) [\d-]+ [\d:.]+ \[[^\]]*\] ?)?"
)
_KERNEL = re.compile(
    r"""^(?:
        Using\ .*(?:backend|GEMM|[Ll]inear|Experts|MoEMethod|FlashAttention\ version|KV\ cache\ format|for\ \S+\ MoE)
      | Selected\ \S+\ for\ 
      | assay-emulate:
      | .*\bMarlin\b
      | .*weight-only
    )""",
    re.VERBOSE,
)
_NOT_A_KERNEL = re.compile(r"Selected backend|pin_memory|structured output|tokenizer|deprecated")

_EXCEPTION = re.compile(r"^(?P<kind>(?:[A-Za-z_]\w*\.)*[A-Z]\w*(?:Error|Exception|Warning|Interrupt|Exit)): (?P<text>.*\S)")
_USAGE = re.compile(r"^\S+\.py: error: .*|^\S*python\S*: .*(?:No module named|can't open file).*|^usage error.*")
_CONSEQUENCE = re.compile(
    r"initialization failed|See root cause|cancelled|died unexpectedly|EngineDeadError|Failed to load plugin"
    r"|EngineCore encountered|Broken pipe|leaked|DeprecationWarning|FutureWarning|UserWarning|Cannot connect to"
)
_NOISE = re.compile(r'\s*(?:File "|\^|~|return |raise |self\.|with |Traceback|usage: |\[(?:-|model_tag))|Route: ')


def strip_prefix(line: str) -> str:
    """A log line without `(EngineCore pid=7) ERROR 11-21 04:52:01 [core.py:12] `."""
    return _PREFIX.sub("", line.rstrip(), count=1)


def kernels_in(lines: Iterable[str]) -> tuple[str, ...]:
    """The lines that name a chosen kernel, each once, in order, without prefix and without the list of losers."""
    kernels: dict[str, None] = {}
    for line in lines:
        text = strip_prefix(line)
        if _KERNEL.match(text) and not _NOT_A_KERNEL.search(text):
            kernels[text.split(" out of potential backends")[0].rstrip(".")] = None
    return tuple(kernels)


def cause_of_death(lines: Iterable[str]) -> str | None:
    """The line that says why vLLM stopped: the last exception that is not just the consequence of another one."""
    texts = [strip_prefix(line) for line in lines]
    cause = None
    for number, text in enumerate(texts):
        if _USAGE.match(text):
            cause = text
        elif (match := _EXCEPTION.match(text)) and not _CONSEQUENCE.search(text):
            # pydantic says only "1 validation error for ModelConfig" on the first line; the reason is on the next
            reason = texts[number + 1].strip() if "validation error" in text and number + 1 < len(texts) else ""
            reason = re.sub(r"\s*\[type=.*", "", reason)
            cause = f"{match['kind'].rsplit('.', 1)[-1]}: {reason or match['text']}"
    return cause


def tail(lines: Iterable[str]) -> str:
    """The end of the log for a person: without tracebacks' code, routes and empty lines; long lines cut."""
    kept = [line.rstrip()[:300] for line in lines if (text := strip_prefix(line)).strip() and not _NOISE.match(text)]
    return "\n".join(f"    {line}" for line in kept[-12:])
