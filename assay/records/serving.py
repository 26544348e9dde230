"""The serving fingerprint: how a checkpoint was served, and whether two measurements compare."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from assay.records.base import Part, sha256_of


class Fingerprint(Part):
    """How a checkpoint was served. Two measurements compare only if their `comparable_sha256` agree."""

    server: str
    """What answered: `vllm 0.32.0`, started by assay; `external`, a server that somebody else runs."""
    versions: dict[str, str]
    hardware: dict[str, str]
    profile: str
    flags: dict[str, Any]
    """vLLM flags but for model, port, and those of the next group."""
    environment: dict[str, str]
    speculation: dict[str, Any] | None
    checkpoint_flags: dict[str, Any]
    """Flags that depend on the checkpoint's format (quantization, load-format)."""
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
