"""Profile recipes: how vLLM is run on some hardware."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

from pydantic import Field

from assay.recipes.base import Recipe, Section


class Hardware(Section):
    """What a profile needs. `gpu` is matched, without case, inside the device name the driver reports."""

    device: Literal["cpu", "cuda"]
    gpu: str | None = None
    num_gpus: int = 0
    memory_bytes_each: int | None = None


class ProfileRecipe(Recipe):
    hardware: Hardware
    emulate: bool = False
    """Serve quantized checkpoints through assay's plugin: dequantized weights, quantize-dequantized activations."""
    vllm: dict[str, Any] = Field(default_factory=dict)
    """vLLM's own flags without the dashes in front: `max-model-len: 4096`. Passed verbatim; `true` is a bare flag."""
    environment: dict[str, str] = Field(default_factory=dict)
    startup_timeout_s: float = Field(default=600.0, gt=0)
    concurrency: int = Field(default=8, ge=1)
    """Requests in flight while measuring, per server."""
    interpreter: str | None = None
    """Python of another environment that has vLLM; default: `.venv-serve`."""
    base_url: str | None = None
    """A server that runs already (one checkpoint only); nothing is started then."""
    base_urls: tuple[str, ...] = ()
    """Several such servers of the same checkpoint: they share the items, each item always goes to the same one."""

    def _contradictions(self) -> Iterator[str]:
        if self.base_url is not None and self.base_urls:
            yield "say either `base_url` or `base_urls`"
        for twice in sorted({url for url in self.base_urls if self.base_urls.count(url) > 1}):
            yield f"`base_urls` names {twice} twice"

    @property
    def urls(self) -> tuple[str, ...]:
        """Servers that run already; empty: one is started."""
        return self.base_urls if self.base_url is None else (self.base_url,)
