"""Servers that run already: who they are, and whether several of them may share one suite."""

from __future__ import annotations

import math
import os
import re
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from assay.errors import ServeError, UnreachableError
from assay.foreign_text import shown
from assay.records.manifest import load_manifest
from assay.records.serving import EXTERNAL, Fingerprint
from assay_evaluate.transport.connection import NO_HEADERS, HttpReply, get_once, post_once, root_url, unmask_error
from assay_evaluate.transport.errors import TransportError, UnusableReply
from assay_evaluate.transport.foreign_json import WRONG_SHAPE, fingerprint_in, text_in

PAUSES_S = (1.0, 4.0)
"""Before a server that is busy, or away for a moment, is asked again who it is."""
BUSY = frozenset({408, 429, 500, 502, 503, 504})
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_SAMPLE = re.compile(r"^(?P<name>[a-zA-Z_:][\w:]*)(?:\{.*\})?\s+(?P<value>\S+)")


@dataclass(frozen=True)
class ListedModel:
    """One entry of /v1/models, types checked. None: the server does not say."""

    id: str
    root: str | None
    max_model_len: int | None
    is_adapter: bool

    @property
    def loaded(self) -> str:
        """What the server says it loaded, or how it calls it."""
        return self.root or self.id


@dataclass(frozen=True)
class External:
    """One server that was not started here. `base_url` has no /v1 at its end."""

    base_url: str
    model: str
    root: str
    """What it says it loaded: a folder or hub id, at the server."""
    max_model_len: int
    fingerprint: Fingerprint


def identify_server(
    url: str, *, label: str, checkpoint: Path | None, profile: str, headers: Mapping[str, str] | None = None
) -> External:
    """Ask the server at `url` who it is. ServeError if it does not answer, or says that it serves something else.

    checkpoint: the folder that it is said to serve, if one was named. profile: name of the profile, for the fingerprint.
    """
    base_url = root_url(url)
    what = f"the server of {label}"
    model, *more = list_models(base_url, what=what, headers=headers)
    root = model.loaded
    if others := sorted({listed.loaded for listed in more if not listed.is_adapter} - {root}):
        raise ServeError(
            f"{label}: {url} lists several models ({', '.join(map(shown, [root, *others]))}), and nothing says which is meant; "
            "give the address of a server that has one"
        )
    if checkpoint is not None and (mismatch := describe_mismatch(root, checkpoint)) is not None:
        raise ServeError(
            f"{label}: {url} says that it serves {shown(root)}, not {checkpoint}: {mismatch}; start it on that checkpoint"
        )
    if model.max_model_len is None:
        raise ServeError(f"{url}: /v1/models does not tell max_model_len; without it truncation cannot be seen. Use vLLM")
    version = find_version(base_url, what=what, headers=headers)
    fingerprint = Fingerprint(
        server=EXTERNAL,
        versions={} if version is None else {"vllm": version},
        hardware={},
        profile=profile,
        flags={"max-model-len": model.max_model_len},
        environment={},
        speculation=None,
        checkpoint_flags={},
        emulated=None,
        kernels=(),
        system_fingerprint=_system_fingerprint(base_url, model.id, headers),
    )
    return External(base_url, model.id, root, model.max_model_len, fingerprint)


def _system_fingerprint(base_url: str, model: str, headers: Mapping[str, str] | None) -> str | None:
    """vLLM's hash of its version, parallelism and configuration, which it tells with a reply only. None: it does not.

    UnreachableError: it is busy or away. Replies are kept under this hash: taken for None, all would be asked again.
    """
    request = {"model": model, "prompt": [0], "max_tokens": 1, "temperature": 0}
    for seconds in (*PAUSES_S, None):
        try:
            reply = unmask_error(post_once(base_url, "/v1/completions", request, total_s=600, headers=headers or NO_HEADERS))
            if reply.status not in BUSY:
                return fingerprint_in(reply.json()) if reply.status == 200 else None
            problem = f"HTTP {reply.status}: {reply.message}"
        except UnusableReply:
            return None
        except TransportError as error:
            problem = str(error)
        except WRONG_SHAPE:
            return None
        if seconds is not None:
            time.sleep(seconds)
    raise UnreachableError(f"{base_url}/v1/completions: no reply ({problem}); run again when the server answers")


def describe_mismatch(root: str, checkpoint: Path) -> str | None:
    """How what a server says it loaded, a path or hub id, cannot be `checkpoint`; None: it may be.

    A path that is no folder of this machine proves nothing: the server may run elsewhere. Nor does a hub id by itself: but it
    is the source's if the checkpoint was quantized from it, and a folder of the hub's cache has its id in its path.
    """
    try:
        if Path(root).is_dir():
            return None if os.path.samefile(root, checkpoint) else "that is another folder of this machine"
    except (OSError, ValueError):  # too long, or with a NUL
        return None
    if not _HUB_ID.fullmatch(root):
        return None
    manifest = load_manifest(checkpoint)
    if manifest is not None and manifest.source == root:
        return "that is what the checkpoint was quantized from"
    cached = [part for part in checkpoint.resolve().parts if part.startswith("models--")]
    return "that is another model of the hub" if cached and cached[-1] != f"models--{root.replace('/', '--')}" else None


def require_same(first: External, other: External) -> None:
    """ServeError unless both serve the same model in the same way, as far as they tell: an item may go to either."""
    for what, value, other_value in (
        ("model", first.model, other.model),
        ("max_model_len", first.max_model_len, other.max_model_len),
        ("version", first.fingerprint.versions, other.fingerprint.versions),
        ("system_fingerprint", first.fingerprint.system_fingerprint, other.fingerprint.system_fingerprint),
    ):
        if value != other_value:
            raise ServeError(
                f"{first.base_url} and {other.base_url} differ in {what}: {shown(value)} and {shown(other_value)}; servers "
                "that share a suite must be alike: start them with the same vLLM, flags and checkpoint, or name one of them "
                "only"
            )


def list_models(base_url: str, *, what: str, headers: Mapping[str, str] | None = None) -> list[ListedModel]:
    """What /v1/models lists: at least one model. ServeError: something else came."""
    reply = get(base_url, "/v1/models", what=what, headers=headers)
    try:
        models = [_listed(entry) for entry in reply.json()["data"]]
    except WRONG_SHAPE:
        raise ServeError(f"{base_url}/v1/models: no list of models there; give an OpenAI-compatible server") from None
    if not models:
        raise ServeError(f"{base_url}: /v1/models lists no model; start the server with one")
    return models


def _listed(entry: Mapping[str, Any]) -> ListedModel:
    entry["id"].encode()  # a lone surrogate is no name that could be sent back
    length = entry.get("max_model_len")
    if not (length is None or (type(length) is int and length > 0)):
        raise TypeError("max_model_len is no number of tokens")
    return ListedModel(entry["id"], text_in(entry, "root") or None, length, entry.get("parent") is not None)


def find_version(base_url: str, *, what: str, headers: Mapping[str, str] | None = None) -> str | None:
    """vLLM's version as the server tells it. None: it is not vLLM, or a gateway stands in front of it."""
    for seconds in (*PAUSES_S, None):
        try:
            version = get(base_url, "/version", what=what, headers=headers).json()["version"]
            return shown(version) if isinstance(version, str) else None
        except UnreachableError:  # perhaps for a moment
            if seconds is not None:
                time.sleep(seconds)
        except (ServeError, *WRONG_SHAPE):
            break
    return None


def get(base_url: str, path: str, *, what: str, headers: Mapping[str, str] | None = None) -> HttpReply:
    """The reply to a GET. UnreachableError: none, or a server error; ServeError: another status than 200."""
    try:
        reply = unmask_error(get_once(base_url, path, total_s=60, headers=headers or NO_HEADERS))
    except UnusableReply as error:
        raise ServeError(f"{what} gives no reply that can be used at {base_url}{path}: {error}") from None
    except TransportError as error:
        raise UnreachableError(f"{what} does not answer at {base_url}{path} ({error}); is it running?") from None
    if reply.status != 200:
        kind = UnreachableError if reply.status >= 500 else ServeError
        advice = ""
        if reply.status in {401, 403}:
            todo = "it refuses the key that was sent" if headers else "name the variable with its key"
            advice = f"; {todo} (--api-key-env, or api_key_env)"
        elif reply.status == 404 and urlsplit(base_url).path.strip("/"):
            advice = "; write its address as http://HOST:PORT, without the path of a request"
        raise kind(f"{what} answers {reply.status} at {base_url}{path}: {reply.message}{advice}")
    return reply


def sum_metrics(text: str) -> dict[str, float]:
    """Prometheus text -> name -> value summed over labels; histogram buckets, creation times, NaN and infinity are left out."""
    totals: dict[str, float] = {}
    for line in text.splitlines():
        match = _SAMPLE.match(line)
        if match and not match["name"].endswith(("_bucket", "_created")):
            with suppress(ValueError):  # its value is no number
                value = float(match["value"])
                if math.isfinite(value):
                    totals[match["name"]] = totals.get(match["name"], 0.0) + value
    return totals
