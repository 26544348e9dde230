"""How a checkpoint was served (fingerprint), and which weights answered (signature): whether two measurements compare."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from typing import Any

from assay.records.base import Part, sha256_of

EXTERNAL = "external"
"""`Fingerprint.server` of a server that somebody else runs."""
IMPORTED = "imported"
"""`Fingerprint.server` of scores that another harness computed: no file describes how they were served."""


class Fingerprint(Part):
    """How a checkpoint was served. Two measurements compare only if their `comparable_sha256` agree."""

    server: str
    """What answered: `vllm 0.32.0`, started by assay; `external`, a server that somebody else runs; `imported`, not known."""
    versions: dict[str, str]
    hardware: dict[str, str]
    profile: str
    flags: dict[str, Any]
    """vLLM flags but for model, port, and those of the next group."""
    environment: dict[str, str]
    speculation: dict[str, Any] | None
    checkpoint_flags: dict[str, Any]
    """Flags that depend on the checkpoint (quantization, load-format; kv-cache-dtype where its config asks for one)."""
    emulated: bool | None
    """True: dequantized weights, BF16/FP32 arithmetic. False: native kernels. None: unquantized checkpoint or unknown."""
    kernels: tuple[str, ...]
    """Lines of the server's log that name the kernels chosen."""
    system_fingerprint: str | None = None

    @property
    def comparable_sha256(self) -> str:
        """Hash of everything that must be alike between reference and candidate."""
        return sha256_of(
            self.model_dump(mode="json", exclude={"checkpoint_flags", "emulated", "kernels", "system_fingerprint"})
        )


MODEL_FLAGS = frozenset(
    {
        "reasoning-parser", "tool-call-parser", "enable-auto-tool-choice", "default-chat-template-kwargs", "chat-template",
        "trust-remote-code", "tokenizer-mode", "hf-overrides",
    }
)  # fmt: skip
"""Flags that the model itself needs, on any hardware."""
SMALLEST_DIFFERENCE = 1e-3
"""Nats. Up to here two signatures agree even if neither server showed any noise of its own."""
TIMES_NOISE = 3.0
"""Signatures agree up to so many times the noise of the noisier side (docs/decisions/ has the measurements)."""
MOST_NOISE = 0.1
"""Nats. A server with more differs from itself about as much as other weights would: its signature shows nothing."""


class SignedPrompt(Part):
    """What a server answered to one fixed prompt. All log-probabilities are natural; None: it gave no finite number."""

    token_ids: tuple[int, ...]
    """Of the prompt, but for its first token. Empty: the server gives no prompt log-probabilities."""
    logprobs: tuple[float | None, ...]
    """Of these tokens."""
    next: dict[str, float | None]
    """The likeliest tokens after the prompt -> log-probability."""
    model: str | None = None
    """Which model the reply said it was of. None: it said none, or recorded before this was."""
    system_fingerprint: str | None = None
    """Which server configuration. None: as above."""


MOST_LOGPROB = 0.01
"""Above it nothing is a log-probability, however it was rounded (client/logprob_checks.py has the reasons)."""
ABOVE_ZERO = "log-probabilities above 0: start vLLM without --logprobs-mode raw_logits"


class Signature(Part):
    """Which weights answer, as far as log-probabilities can show: those over fixed prompts, each asked alone.

    Bits differ between servers, batches and kernels even if the weights are the same, so signatures are compared by `distance`,
    never hashed to be compared. MTP layers only draft: they change no log-probability, and so no signature.
    """

    prompts_sha256: str
    prompts: tuple[SignedPrompt, ...]
    noise: float
    """Mean |difference| in nats between asking the prompts one by one and all at once: what batches change by themselves."""

    def distance(self, other: Signature) -> float:
        """Mean |difference| of all log-probabilities, in nats; infinity if texts or tokenizers are others."""
        if self.prompts_sha256 != other.prompts_sha256:
            return math.inf
        return mean_difference(self.prompts, other.prompts)

    def tolerance(self, other: Signature) -> float:
        """Nats up to which the two agree."""
        return max(SMALLEST_DIFFERENCE, TIMES_NOISE * max(self.noise, other.noise))

    @property
    def is_of_logits(self) -> bool:
        """Whether the server gives logits under the name of log-probabilities. They say which weights answer as well, but only
        beside others of their kind."""
        values = [value for prompt in self.prompts for value in (*prompt.logprobs, *prompt.next.values()) if value is not None]
        return max(values, default=0.0) > MOST_LOGPROB

    def agrees_with(self, other: Signature) -> bool:
        """Whether the same weights may have answered."""
        return self.distance(other) <= self.tolerance(other)


def mean_difference(first: tuple[SignedPrompt, ...], second: tuple[SignedPrompt, ...]) -> float:
    """Over all that both have, and of likeliest tokens that one does not list the least it can be, in nats.

    Infinity if they have nothing in common, or another tokenizer.
    """
    if [prompt.token_ids for prompt in first] != [prompt.token_ids for prompt in second]:
        return math.inf
    differences = [abs(a - b) for prompt, other in zip(first, second, strict=True) for a, b in _pairs(prompt, other)]
    return sum(differences) / len(differences) if differences else math.inf


def _pairs(first: SignedPrompt, second: SignedPrompt) -> Iterator[tuple[float, float]]:
    values = [*zip(first.logprobs, second.logprobs, strict=True)]
    values += [(first.next[token], second.next[token]) for token in first.next.keys() & second.next.keys()]
    yield from ((a, b) for a, b in values if a is not None and b is not None)
    yield from _missing(first.next, second.next)
    yield from _missing(second.next, first.next)


def _missing(next_logprobs: dict[str, float | None], other_logprobs: dict[str, float | None]) -> Iterator[tuple[float, float]]:
    """Of tokens that only we list: they are no likelier there than the last of their list, so that far apart at least."""
    known = [value for value in other_logprobs.values() if value is not None]
    last = min(known, default=math.inf)
    yield from (
        (value, last)
        for token, value in next_logprobs.items()
        if token not in other_logprobs and value is not None and value > last
    )


def as_arguments(flags: Mapping[str, Any]) -> list[str]:
    """`{"max-model-len": 4096, "enforce-eager": True}` -> `["--max-model-len", "4096", "--enforce-eager"]`."""
    words: list[str] = []
    for name, value in flags.items():
        if value is True:
            words.append(f"--{name}")
        elif value is False:
            words.append(f"--no-{name}")
        elif isinstance(value, dict):
            words += [f"--{name}", json.dumps(value)]
        elif isinstance(value, list | tuple):
            words += [f"--{name}", *map(str, value)]
        else:
            words += [f"--{name}", str(value)]
    return words
