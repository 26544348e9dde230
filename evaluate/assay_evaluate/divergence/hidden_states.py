"""Hidden states of every token of every text, from a vLLM pooling server, kept on disk.

    POST /pooling {"input": ids, "use_activation": false, "encoding_format": "bytes_only"}

gives what the output matrix would be multiplied with: the states after the final norm, not normalised to length 1. A token
takes hidden_size values (12 kB in BF16 at 6,144), where its logits would take 310 kB at a vocabulary of 154,880. One
safetensors file per text, written by rename: what was fetched before a crash is not fetched again. Only the scored tokens'
states are kept.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

from assay.atomic_files import replacing
from assay.errors import MeasureError, ServeError
from assay.records.base import sha256_of
from assay_evaluate.client.client import Endpoint, NotMeasured
from assay_evaluate.divergence.documents import Document
from assay_evaluate.transport.connection import post_once, root_url
from assay_evaluate.transport.errors import TransportError

if TYPE_CHECKING:
    import torch

PATH = "/pooling"
TENSOR = "hidden_PH"
MAX_ATTEMPTS = 3
TOTAL_S = 3600.0
MOST_BYTES_PER_TOKEN = 2**18
"""Of a reply: 65,536 values of four bytes."""
WIRE_DTYPES = {"float32": "float32", "bfloat16": "bfloat16", "float16": "float16"}
"""vLLM's `--dtype` -> `embed_dtype` of the reply: what was computed is neither rounded nor blown up."""


class HiddenStates:
    """The states that one checkpoint gives for the texts of a run: files below `folder`."""

    def __init__(self, folder: Path, who: str, dtype: str) -> None:
        """who: identity of the checkpoint and how it is served; part of every file's name. dtype: a key of WIRE_DTYPES."""
        self.folder = folder
        self._who = who
        self.dtype = dtype

    def path(self, document: Document) -> Path:
        """The file of a text; other ids, checkpoint or way of serving is another file."""
        name = sha256_of([self._who, self.dtype, len(document.prompt_ids), document.ids])[:32]
        return self.folder / f"{name}.safetensors"

    def missing(self, documents: Sequence[Document]) -> list[Document]:
        """Texts that have no file yet."""
        return [document for document in documents if not self.path(document).exists()]

    def load(self, document: Document) -> torch.Tensor:
        """[P, H] of a text, as they were computed: row i is what token i of the reply was predicted from."""
        from safetensors.torch import load_file

        return load_file(self.path(document))[TENSOR]

    def num_bytes(self, documents: Sequence[Document]) -> int:
        """On disk, of all texts."""
        return sum(self.path(document).stat().st_size for document in documents)

    # ------------------------------------------------------------------------------------------------ fetching
    def fetch(
        self, endpoint: Endpoint, documents: Sequence[Document], *, concurrency: int, on_progress: Callable[[str], None]
    ) -> None:
        """Get what is missing from a pooling server. MeasureError if it is gone, NotMeasured if it refuses."""
        self.folder.mkdir(parents=True, exist_ok=True)
        urls = itertools.cycle(map(root_url, endpoint.base_urls))  # servers of the same checkpoint share the work
        with ThreadPoolExecutor(concurrency, "assay-hidden") as workers:
            pairs = zip(self.missing(documents), urls, strict=False)
            jobs = [workers.submit(self._fetch, endpoint, url, document) for document, url in pairs]
            try:
                for number, job in enumerate(jobs, start=1):
                    job.result()
                    if number % 50 == 0 or number == len(jobs):
                        on_progress(f"hidden states: {number}/{len(jobs)} texts")
            except BaseException:
                workers.shutdown(wait=False, cancel_futures=True)
                raise

    def _fetch(self, endpoint: Endpoint, url: str, document: Document) -> None:
        import torch
        from safetensors.torch import save

        raw = _post(endpoint, url, document, self.dtype)
        dtype: torch.dtype = getattr(torch, self.dtype)
        ids = len(document.ids)
        if not raw or len(raw) % (ids * dtype.itemsize):
            raise NotMeasured(f"{PATH} gave {len(raw)} bytes for {ids} tokens; hidden states of every token were asked for")
        states_TH = torch.frombuffer(bytearray(raw), dtype=dtype).reshape(ids, -1)
        first = len(document.prompt_ids) - 1
        kept_PH = states_TH[first : first + len(document.reply_ids)].clone()
        path = self.path(document)
        with replacing(path) as partial:  # not `save_file`: that of a full disk is an error of its own, without a path
            partial.write_bytes(save({TENSOR: kept_PH}, metadata={"item": document.item, "who": self._who}))


def _post(endpoint: Endpoint, url: str, document: Document, dtype: str) -> bytes:
    body = {
        "model": endpoint.model, "input": document.ids, "use_activation": False, "encoding_format": "bytes_only",
        "embed_dtype": WIRE_DTYPES[dtype], "endianness": "little",
    }  # fmt: skip
    most_bytes, error = 2**20 + MOST_BYTES_PER_TOKEN * len(document.ids), ""
    for _ in range(MAX_ATTEMPTS):
        try:
            reply = post_once(url, PATH, body, total_s=TOTAL_S, headers=endpoint.headers, most_bytes=most_bytes)
        except TransportError as failed:
            try:
                endpoint.check_alive()
            except ServeError as gone:
                raise MeasureError(f"the server is gone, what was fetched is kept, run again to go on: {gone}") from None
            error = str(failed)
            continue
        if reply.status == 200:
            return reply.body
        if reply.status < 500:
            raise NotMeasured(f"{PATH}: HTTP {reply.status}: {reply.message}")
        error = f"HTTP {reply.status}: {reply.message}"
    raise MeasureError(f"{url}{PATH}: {error}; what was fetched is kept, run again to go on")
