"""Libraries that are handed what nobody vouches for: what they raise is one line, and they write nothing where nobody asked."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

from assay.errors import AssayError, QuantizeError
from assay.foreign_text import shown
from assay.secret_text import hide_password

LEVELS = ("LLM_COMPRESSOR_LOG_LEVEL", "AR_LOG_LEVEL")
"""llm-compressor and auto-round read them when they are imported, before they write their first line."""


@contextmanager
def loading(what: str) -> Iterator[None]:
    """Let whatever transformers and tokenizers raise of a config or a tokenizer.json become a QuantizeError: `WHAT: reason`.

    They check little of it: a wrong number ends as a TypeError, ZeroDivisionError or bare Exception in a model's code.
    """
    try:
        yield
    except AssayError:
        raise
    except Exception as problem:
        if isinstance(problem, OSError) and problem.errno is not None:
            raise  # this machine's disk
        reason = " ".join(str(problem).split()) or type(problem).__name__
        raise QuantizeError(f"{what}: {shown(hide_password(reason), 300)}") from None


@contextmanager
def quiet() -> Iterator[None]:
    """llm-compressor logs a line for every weight. To be entered before it is imported for the first time."""
    from loguru import logger
    from tqdm import tqdm  # type: ignore[import-untyped]

    with ExitStack() as stack:
        levels = {name: os.environ.get(name, "CRITICAL") for name in LEVELS}
        stack.enter_context(patch.dict(os.environ, levels))
        init = tqdm.__init__
        silent: Any = lambda bar, *args, **options: init(bar, *args, **{**options, "disable": True})  # noqa: E731
        stack.enter_context(patch.object(tqdm, "__init__", silent))
        for name in ("llmcompressor", "compressed_tensors"):
            logger.disable(name)
        log = logging.getLogger("transformers")
        stack.callback(log.setLevel, log.level)
        log.setLevel(logging.ERROR)
        yield
