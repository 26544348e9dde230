"""Profile recipes: how vLLM is run on some hardware."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, Literal, Self

from pydantic import Field

from assay.errors import AssayError
from assay.recipes.address import problem_with, server_place
from assay.recipes.base import Recipe, Section, refused_secrets
from assay.recipes.model import Serving
from assay.recipes.text_config import text_of
from assay.recipes.variant import Variant, Variants, flag_name

GPU_MEMORY_UTILIZATION = 0.92
"""vLLM's default of `gpu-memory-utilization` (vllm/config/cache.py)."""


MAX_RANKS = 1024
"""More GPUs than serve any model together: loops over ranks stay short."""


class Hardware(Section):
    """What a profile needs. `gpu` is matched, without case, inside the device name the driver reports."""

    device: Literal["cpu", "cuda"]
    gpu: str | None = None
    num_gpus: int = Field(default=0, ge=0, le=MAX_RANKS)
    memory_bytes_each: int | None = Field(default=None, ge=1)

    def _contradictions(self) -> Iterator[str]:
        if self.gpu is not None and not self.gpu.isprintable():
            yield "gpu: must be text of one line, as in the name that the driver reports"


class GivenServer(Section):
    """A server that runs already: its address, what it claims to serve, and the name of its key."""

    url: str | None = None
    urls: tuple[str, ...] = ()
    """Several servers of the same checkpoint instead: they share the items, each item always goes to the same one."""
    checkpoint: str | None = None
    """The folder that it serves. None: only what it answers says which weights it has."""
    api_key_env: str | None = None
    """Environment variable that holds its API key."""

    def _contradictions(self) -> Iterator[str]:
        if (self.url is None) == (not self.urls):
            yield "say either `url` or `urls`"
        for address in self.addresses:
            if (problem := problem_with(address)) is not None:
                yield problem
        places = [server_place(address) for address in self.addresses if problem_with(address) is None]
        if len(set(places)) < len(places):
            yield "`urls` names one server twice"

    @property
    def addresses(self) -> tuple[str, ...]:
        """All of its URLs, as they were written."""
        return self.urls if self.url is None else (self.url,)


class ProfileRecipe(Recipe):
    explained: ClassVar[Mapping[str, str]] = dict.fromkeys(
        ("base_url", "base_urls"),
        "is gone: every checkpoint needs a server of its own; write `endpoints: {LABEL: {url: http://HOST:PORT}, ...}`, one "
        "entry for each label of the run, such as fp8 and w4a16 (`urls: [...]` for several servers of one label)",
    )
    hardware: Hardware
    emulate: bool = False
    """Serve quantized checkpoints through assay's plugin: dequantized weights, quantize-dequantized activations."""
    vllm: dict[str, Any] = Field(default_factory=dict)
    """vLLM's own flags without the dashes in front: `max-model-len: 4096`. Passed verbatim; `true` is a bare flag."""
    environment: dict[str, str] = Field(default_factory=dict)
    """Variables of the server. Secrets, by name or looks, are given to it and recorded nowhere."""
    startup_timeout_s: float = Field(default=600.0, gt=0)
    concurrency: int = Field(default=8, ge=1)
    """Requests in flight while measuring, per server."""
    interpreter: str | None = None
    """Python of another environment that has vLLM. None: `.venv-serve` here or in the clone, else what `assay setup` built."""
    endpoints: dict[str, GivenServer] = Field(default_factory=dict)
    """Label of the run -> the server that runs already for it. Empty: assay starts one for every checkpoint."""
    variants: Variants = Field(default_factory=dict, exclude_if=lambda variants: not variants)
    """Name -> another way of serving, measured where `--variant NAME` asks for it."""

    def _contradictions(self) -> Iterator[str]:
        yield from super()._contradictions()
        yield from refused_secrets(self.vllm, "vllm")
        yield from self._unusable_numbers()

    def _unusable_numbers(self) -> Iterator[str]:
        for name in ("tensor-parallel-size", "data-parallel-size", "pipeline-parallel-size"):
            ranks = self.flags.get(name, 1)
            if type(ranks) is not int or not 1 <= ranks <= MAX_RANKS:
                yield f"vllm: {name} must be a whole number from 1 to {MAX_RANKS}, got {ascii(ranks)[:40]}"
        share = self.flags.get("gpu-memory-utilization", 1)
        if type(share) not in (int, float) or not 0 < share <= 1:
            yield f"vllm: gpu-memory-utilization must be a number above 0 and up to 1, got {ascii(share)[:40]}"

    @property
    def flags(self) -> dict[str, Any]:
        """`vllm`, with names as vLLM's documentation has them: `max_model_len` and `--max-model-len` are `max-model-len`."""
        return {flag_name(name): value for name, value in self.vllm.items()}

    def with_tensor_parallel(self, size: int | None) -> Self:
        """With another `tensor-parallel-size` and so many more or fewer GPUs; None: as it is. AssayError: its servers run
        already."""
        if size is None:
            return self
        if self.endpoints:
            raise AssayError(f"--tensor-parallel-size: the servers of profile {self.name} run already; leave it out")
        flags = {name: value for name, value in self.vllm.items() if flag_name(name) != "tensor-parallel-size"}
        replicas = self.flags.get("data-parallel-size", 1) * self.flags.get("pipeline-parallel-size", 1)
        hardware = self.hardware.model_copy(update={"num_gpus": size * replicas}) if self.hardware.num_gpus else self.hardware
        return self.model_copy(update={"vllm": flags | {"tensor-parallel-size": size}, "hardware": hardware})

    def served_as(self, variant: Variant | None) -> Self:
        """With what the variant says instead; None: as it is. AssayError: a number of its flags cannot be."""
        if variant is None:
            return self
        ranks = variant.flags.get("tensor-parallel-size")
        base = self if type(ranks) is not int else self.with_tensor_parallel(ranks)
        flags = {name: value for name, value in base.vllm.items() if flag_name(name) not in variant.flags} | variant.flags
        # `no-enable-prefix-caching: true` of a profile would win over `--enable-prefix-caching`
        flags |= {f"no-{name}": None for name, value in variant.flags.items() if value is None or isinstance(value, bool)}
        if variant.speculation is not None:
            flags = {name: value for name, value in flags.items() if flag_name(name) != "speculative-config"}
            flags["speculative-config"] = variant.drafting
        made = base.model_copy(
            update={
                "vllm": flags,
                "environment": base.environment | variant.environment,
                "interpreter": variant.interpreter or base.interpreter,
            }
        )
        if problems := [*made._unusable_numbers()]:
            raise AssayError(f"variant {variant.name}: {problems[0]}")
        return made

    @property
    def gpu_memory_utilization(self) -> float:
        """Share of a GPU's memory that vLLM takes; on a CPU of the machine's."""
        return float(self.flags.get("gpu-memory-utilization", GPU_MEMORY_UTILIZATION))

    @property
    def usable_bytes(self) -> int | None:
        """Of each GPU; None: the profile states no memory."""
        each = self.hardware.memory_bytes_each
        return None if each is None else int(each * self.gpu_memory_utilization)


# ------------------------------------------------------------------------------------------------ context
def context_tokens(config: Mapping[str, Any], profile: ProfileRecipe, serving: Serving) -> int | None:
    """The `max-model-len` with which a checkpoint is served: the profile's before the model recipe's, never above its own.

    config: its config.json. None: nobody says.
    """
    own = text_of(config).get("max_position_embeddings")
    asked = profile.flags.get("max-model-len") or serving.max_model_len
    return min((length for length in (own, asked) if isinstance(length, int)), default=None)
