"""Servers that run already, as an evaluation uses them: joined, not started, and left running."""

from __future__ import annotations

import functools
from pathlib import Path

from assay.recipes.profile import GivenServer
from assay_evaluate.serving.api_key import bearer
from assay_evaluate.serving.external import meet_server, require_same
from assay_evaluate.serving.server import Server


def join(given: GivenServer, *, label: str, checkpoint: Path | None, profile: str) -> Server:
    """The server, or servers as one. ServeError: one does not answer, serves something else, or differs from the first.

    checkpoint: the folder that they are said to serve; None: none was named. AssayError: there is no such key.
    """
    headers = bearer(given.api_key_env, f"{label}: api_key_env")
    meet = functools.partial(meet_server, label=label, checkpoint=checkpoint, profile=profile, headers=headers)
    first, *others = (meet(url) for url in given.addresses)
    for one in others:
        require_same(first, one)
    return Server(
        first.base_url,
        first.model,
        first.max_model_len,
        first.fingerprint,
        log_path=None,
        others=tuple(one.base_url for one in others),
        headers=headers,
        root=first.root,
    )
