"""Reading activations out of vLLM servers that run `assay_vllm.activations` in their workers.

One request at a time, prompt only: the same tokens in the same batch of one on every server, so that what differs is the
server.
"""

from __future__ import annotations

import base64
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from assay.errors import MeasureError, ServeError
from assay.foreign_text import shown
from assay.recipes.profile import ProfileRecipe
from assay_evaluate.transport.connection import MOST_REPLY_BYTES, HttpReply, post_once
from assay_evaluate.transport.errors import TransportError
from assay_evaluate.transport.foreign_json import WRONG_SHAPE

EXTENSION = "assay_vllm.activations.ActivationWorker"
SKETCH_WIDTH = 16
"""Numbers kept per token and module: with 200 tokens a distance is known to about 3 % of itself."""
TIMEOUT_S = 600.0
MOST_ACTIVATION_BYTES = 8 * 2**30
"""Activations of all prompts: some 100 KB a place and rank, of tens of thousands of places."""


@dataclass(frozen=True, eq=False)
class PointReading:
    """One place of the model on one rank, over all prompts. Sketches [tokens, SKETCH_WIDTH]; None: the place has none."""

    name: str
    kind: str
    partial: bool
    num_tokens: int
    max_abs: float
    mean: float
    rms: float
    non_finite: int
    sketch_TS: NDArray[np.float32] | None
    input_TS: NDArray[np.float32] | None
    chosen_TK: NDArray[np.int32] | None
    """Of a router: the experts of every token, ascending."""
    row_T: NDArray[np.int32] | None
    """Of one expert: which tokens it saw."""


Reading = dict[int, dict[str, PointReading]]
"""Rank -> name -> point, names in order of execution."""


@dataclass(frozen=True)
class WatchedServer:
    """One server and the prompts it is asked. base_url without /v1."""

    base_url: str
    model: str
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Sent with every request: an authorization, say."""

    def call(self, method: str, *arguments: str) -> list[dict[str, Any]]:
        """`method` on every rank; MeasureError says what the server lacks."""
        body = {"method": method, "args": list(arguments)}
        reply = self._post("/collective_rpc", body, MOST_ACTIVATION_BYTES)
        if reply.status == 404:
            raise MeasureError(
                f"{self.base_url}: has no /collective_rpc; start vLLM with VLLM_SERVER_DEV_MODE=1 and "
                f"--worker-extension-cls {EXTENSION} (a server of `assay serve` has neither), or give `assay diagnose locate` "
                "the checkpoint folder instead of the URL: it starts such a server itself"
            )
        if reply.status != 200:
            raise MeasureError(
                f"{self.base_url}: its workers cannot {method} ({reply.message}); start vLLM with "
                f"--worker-extension-cls {EXTENSION} and --enforce-eager, from an environment in which assay is installed"
            )
        with self._as_promised(method):
            return list(reply.json()["results"])

    def prefill(self, prompt: str | Sequence[int]) -> tuple[int, ...]:
        """Let the server read a prompt; its token ids. The salt keeps a prefix cache from answering for the model."""
        body = {
            "model": self.model,
            "prompt": prompt if isinstance(prompt, str) else list(prompt),
            "max_tokens": 1,
            "temperature": 0.0,
            "return_token_ids": True,
            "cache_salt": uuid.uuid4().hex,
        }
        reply = self._post("/v1/completions", body)
        if reply.status != 200:
            raise MeasureError(f"{self.base_url}: HTTP {reply.status} to a prompt: {reply.message}")
        with self._as_promised("/v1/completions"):
            ids = reply.json()["choices"][0].get("prompt_token_ids")
        if ids is None:
            raise MeasureError(f"{self.base_url}: does not tell the prompt's token ids (return_token_ids); it must be a vLLM")
        return tuple(ids)

    @contextmanager
    def _as_promised(self, what: str) -> Iterator[None]:
        """Around reading a reply: MeasureError if it has another shape."""
        try:
            yield
        except WRONG_SHAPE as error:
            raise MeasureError(
                f"{self.base_url}: the answer of {what} is not what this version of assay gives "
                f"({type(error).__name__}: {shown(error)}); install this version beside the server's vLLM"
            ) from None

    def readings(self, method: str) -> Reading:
        """What `method` tells of every rank, ranks ascending."""
        answers = self.call(method)
        with self._as_promised(method):
            reading = {answer["rank"]: {point["name"]: _point(point) for point in answer["points"]} for answer in answers}
            return dict(sorted(reading.items()))

    def _post(self, path: str, body: dict[str, Any], most_bytes: int = MOST_REPLY_BYTES) -> HttpReply:
        try:
            return post_once(self.base_url, path, body, total_s=TIMEOUT_S, headers=self.headers, most_bytes=most_bytes)
        except TransportError as error:
            raise ServeError(f"{self.base_url}{path}: no reply ({error}); is the server running?") from None


def read_activations(
    server: WatchedServer, prompts: Sequence[str | Sequence[int]], on_progress: Callable[[str], None] = lambda line: None
) -> tuple[Reading, list[tuple[int, ...]]]:
    """(what every rank's modules did with the prompts, the prompts as token ids). Hooks are gone afterwards."""
    server.call("watch_activations", f'{{"sketch_width": {SKETCH_WIDTH}}}')
    try:
        ids = [server.prefill(prompt) for prompt in prompts]
        reading = server.readings("take_activations")
    finally:
        server.call("unwatch_activations")
    on_progress(f"{server.base_url}: {sum(map(len, ids))} tokens, {len(reading[0])} points, {len(reading)} ranks")
    return reading, ids


def _point(data: dict[str, Any]) -> PointReading:
    def array(name: str, dtype: Any, *shape: int) -> Any:
        return np.frombuffer(base64.b64decode(data[name]), dtype).reshape(-1, *shape) if data[name] else None

    return PointReading(
        name=shown(data["name"]),
        kind=shown(data["kind"]),
        **{name: data[name] for name in ("partial", "num_tokens", "max_abs", "mean", "rms", "non_finite")},
        sketch_TS=array("sketch", np.float32, SKETCH_WIDTH),
        input_TS=array("input", np.float32, SKETCH_WIDTH),
        chosen_TK=array("chosen", np.int32, data["top_k"]),
        row_T=array("rows", np.int32),
    )


def with_watching(profile: ProfileRecipe, **flags: Any) -> ProfileRecipe:
    """`profile` with what reading activations needs: eager execution, the extension, no prefix cache; then `flags`."""
    own = {"worker-extension-cls": EXTENSION, "enforce-eager": True, "enable-prefix-caching": False, **flags}
    environment = {**profile.environment, "VLLM_SERVER_DEV_MODE": "1"}
    return with_flags(profile, own).model_copy(update={"environment": environment})


def with_flags(profile: ProfileRecipe, flags: dict[str, Any]) -> ProfileRecipe:
    """`profile` with some of vLLM's flags changed, whichever way it spells them."""

    def plain(name: str) -> str:
        return name.removeprefix("--").replace("_", "-").removeprefix("no-")

    kept = {name: value for name, value in profile.vllm.items() if plain(name) not in flags}
    return profile.model_copy(update={"vllm": {**kept, **flags}})
