"""Libraries that write to stdout and draw bars where nobody asked: llm-compressor logs a line for every weight."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from unittest.mock import patch

LEVELS = ("LLM_COMPRESSOR_LOG_LEVEL", "AR_LOG_LEVEL")
"""llm-compressor and auto-round read them when they are imported, before they write their first line."""


@contextmanager
def quiet() -> Iterator[None]:
    """To be entered before llm-compressor is imported for the first time."""
    from loguru import logger
    from tqdm import tqdm  # type: ignore[import-untyped]

    with ExitStack() as stack:
        levels = {name: os.environ.get(name, "CRITICAL") for name in LEVELS}
        stack.enter_context(patch.dict(os.environ, levels))
        stack.enter_context(patch.object(tqdm, "__init__", _without_bar(tqdm.__init__)))
        for name in ("llmcompressor", "compressed_tensors"):
            logger.disable(name)
        theirs = logging.getLogger("transformers")
        stack.callback(theirs.setLevel, theirs.level)
        theirs.setLevel(logging.ERROR)
        yield


def _without_bar(init: Callable[..., None]) -> Callable[..., None]:
    return lambda self, *args, **named: init(self, *args, **{**named, "disable": True})
