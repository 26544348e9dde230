"""Servers that run already: who they are, and whether several of them may share one suite."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from assay.errors import ServeError, UnreachableError
from assay.foreign_text import shown
from assay.recipes.profile import ProfileRecipe
from assay.records.serving import Fingerprint
from assay_evaluate.transport.connection import NO_HEADERS, HttpReply, get_once, post_once, root_url
from assay_evaluate.transport.errors import TransportError, UnusableReply
from assay_evaluate.transport.foreign_json import NotJson, fingerprint_in

_SAMPLE = re.compile(r"^(?P<name>[a-zA-Z_:][\w:]*)(?:\{.*\})?\s+(?P<value>\S+)")


@dataclass(frozen=True)
class External:
    """One server that was not started here. `base_url` has no /v1 at its end."""

    base_url: str
    model: str
    max_model_len: int
    fingerprint: Fingerprint


def meet_server(url: str, *, checkpoint: Path, profile: ProfileRecipe, wanted_model: str) -> External:
    """Ask the server at `url` who it is. ServeError if it does not answer, or is known to serve something else."""
    base_url = root_url(url)
    what = f"the server of profile {profile.name} (`{'base_url' if profile.base_url else 'base_urls'}: {url}`)"
    models = list_models(base_url, what=what)
    model = next((m for m in models if m["id"] == wanted_model), models[0])
    root = str(model.get("root") or model["id"])
    if _is_another_folder(root, checkpoint):
        raise ServeError(f"{url} serves {shown(root)}, not {checkpoint}; start it on that checkpoint, or leave the address out")
    if model.get("max_model_len") is None:
        raise ServeError(f"{url}: /v1/models does not tell max_model_len; without it truncation cannot be seen. Use vLLM")
    version = find_version(base_url, what=what)
    fingerprint = Fingerprint(
        server="external",
        versions={} if version is None else {"vllm": version},
        hardware={},
        profile=profile.name,
        flags={"max-model-len": int(model["max_model_len"])},
        environment={},
        speculation=None,
        checkpoint_flags={},
        emulated=None,
        kernels=(),
        system_fingerprint=_system_fingerprint(base_url, model["id"]),
    )
    return External(base_url, model["id"], int(model["max_model_len"]), fingerprint)


def _system_fingerprint(base_url: str, model: str) -> str | None:
    """vLLM's hash of its version, parallelism and configuration, which it tells with a reply only. None: it does not."""
    request = {"model": model, "prompt": [0], "max_tokens": 1, "temperature": 0}
    try:
        reply = post_once(base_url, "/v1/completions", request, total_s=600)
        return fingerprint_in(reply.json()) if reply.status == 200 else None
    except (TransportError, NotJson, AttributeError):
        return None


def _is_another_folder(told: str, checkpoint: Path) -> bool:
    """Whether `told`, a path at the server, is a folder of this machine and not `checkpoint`. What is no path is neither."""
    try:
        return Path(told).is_dir() and checkpoint.is_dir() and not os.path.samefile(told, checkpoint)
    except (OSError, ValueError):  # too long, or with a NUL
        return False


def require_same(first: External, other: External) -> None:
    """ServeError unless both serve the same model in the same way, as far as they tell: an item may go to either."""
    for what, ours, theirs in (
        ("model", first.model, other.model),
        ("max_model_len", first.max_model_len, other.max_model_len),
        ("version", first.fingerprint.versions, other.fingerprint.versions),
        ("system_fingerprint", first.fingerprint.system_fingerprint, other.fingerprint.system_fingerprint),
    ):
        if ours != theirs:
            raise ServeError(
                f"{first.base_url} and {other.base_url} differ in {what}: {shown(ours)} and {shown(theirs)}; servers that "
                "share a suite must be alike: start them with the same vLLM, flags and checkpoint, or name one of them only"
            )


def list_models(base_url: str, *, what: str, headers: Mapping[str, str] | None = None) -> list[dict[str, Any]]:
    """What /v1/models lists: at least one, each with an `id` that is text, and `max_model_len` a number if there is one.

    ServeError: something else came.
    """
    reply = get(base_url, "/v1/models", what=what, headers=headers)
    try:
        models = reply.json()["data"]
        for model in models:
            model["id"].encode()
            range(model.get("max_model_len") or 0)
    except (ValueError, LookupError, TypeError, AttributeError):
        raise ServeError(f"{base_url}/v1/models: no list of models there; give an OpenAI-compatible server") from None
    if not models:
        raise ServeError(f"{base_url}: /v1/models lists no model; start the server with one")
    return list(models)


def find_version(base_url: str, *, what: str, headers: Mapping[str, str] | None = None) -> str | None:
    """vLLM's version as the server tells it. None: it is not vLLM, or a gateway stands in front of it."""
    try:
        return shown(get(base_url, "/version", what=what, headers=headers).json()["version"])
    except (ServeError, NotJson, LookupError, TypeError):
        return None


def get(base_url: str, path: str, *, what: str, headers: Mapping[str, str] | None = None) -> HttpReply:
    """The reply to a GET. UnreachableError: none, or a server error; ServeError: another status than 200."""
    try:
        reply = get_once(base_url, path, total_s=60, headers=headers or NO_HEADERS)
    except UnusableReply as error:
        raise ServeError(f"{what} gives no reply that can be used at {base_url}{path}: {error}") from None
    except TransportError as error:
        raise UnreachableError(f"{what} does not answer at {base_url}{path} ({error}); is it running?") from None
    if reply.status != 200:
        kind = UnreachableError if reply.status >= 500 else ServeError
        raise kind(f"{what} answers {reply.status} at {base_url}{path}: {reply.message}")
    return reply


def sum_metrics(text: str) -> dict[str, float]:
    """Prometheus text -> name -> value summed over labels; histogram buckets and creation times are left out."""
    totals: dict[str, float] = {}
    for line in text.splitlines():
        match = _SAMPLE.match(line)
        if match and not match["name"].endswith(("_bucket", "_created")):
            with suppress(ValueError):  # its value is no number
                totals[match["name"]] = totals.get(match["name"], 0.0) + float(match["value"])
    return totals
