"""Records of which a test says only what it is about."""

from __future__ import annotations

from typing import Any

from assay.records.measurement import ItemResult
from assay.records.serving import Fingerprint


def item_result(item: str, correct: bool | None = True, **changes: Any) -> ItemResult:
    """A reply in English that ended by itself; nothing is known of its tokens and its answer."""
    plain = {
        "language": "en", "truncated": False, "wrong_script": False, "finish_reason": "stop", "prompt_tokens": None,
        "output_tokens": None, "answer": None,
    }  # fmt: skip
    return ItemResult(item=item, correct=correct, **(plain | changes))


def blank_fingerprint(**changes: Any) -> Fingerprint:
    """Of a server `s` under profile `p`: nothing else is known."""
    plain = {
        "server": "s", "versions": {}, "hardware": {}, "profile": "p", "flags": {}, "environment": {}, "speculation": None,
        "checkpoint_flags": {}, "emulated": None, "kernels": (),
    }  # fmt: skip
    return Fingerprint(**(plain | changes))
