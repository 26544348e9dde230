"""Arrays inside a server's JSON."""

from __future__ import annotations

import base64
import math
import re
from typing import Any

import numpy as np
import numpy.typing as npt

_NPY = re.compile(
    rb"\x93NUMPY\x01\x00.."
    rb"\{'descr': '([<>|][biuf][0-9]{1,2})', 'fortran_order': (True|False), 'shape': \(([0-9, ]{0,200})\), \} *\n",
    re.DOTALL,
)
"""Magic, version 1.0, length, header as numpy writes it (numpy/lib/_format_impl.py), for numbers only."""


def read_array(packed: Any, dtype: type[np.generic]) -> npt.NDArray[Any]:
    """Base64 of an .npy file, as `dtype`. ValueError: it is something else, or claims a shape that it does not have.

    Not `numpy.load`: it reads the header with `ast`, whose counter of recursion all threads share before Python 3.13
    ("SystemError: AST constructor recursion depth mismatch"), and replies are read by many threads at once.
    """
    try:
        data = base64.b64decode(packed)
        header = _NPY.match(data)
        if header is None:
            raise ValueError("it does not start as one of numbers does")
        kind, fortran, lengths = header.groups()
        shape = tuple(int(length) for length in lengths.split(b",") if length.strip())
        numbers = np.frombuffer(data, np.dtype(kind.decode()), offset=header.end())
        if math.prod(shape) != len(numbers):
            raise ValueError(f"shape {shape} and {len(numbers):,} numbers")
        return numbers.reshape(shape, order="F" if fortran == b"True" else "C").astype(dtype)
    except (ValueError, TypeError) as error:
        raise ValueError(f"no base64 .npy array: {error}") from None
