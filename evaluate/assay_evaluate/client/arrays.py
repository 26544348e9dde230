"""Arrays inside a server's JSON."""

from __future__ import annotations

import base64
import io
from tokenize import TokenError
from typing import Any

import numpy as np
import numpy.typing as npt


def read_array(packed: Any, dtype: type[np.generic]) -> npt.NDArray[Any]:
    """Base64 of an .npy file, as `dtype`. ValueError: it is something else, or claims a shape that it does not have."""
    try:
        array = np.load(io.BytesIO(base64.b64decode(packed)), allow_pickle=False)
        return np.asarray(array, dtype)
    except (ValueError, TypeError, EOFError, MemoryError, OverflowError, SyntaxError, TokenError) as error:
        raise ValueError(f"no base64 .npy array: {error}") from None
