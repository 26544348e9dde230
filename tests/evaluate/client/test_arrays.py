"""Arrays that a server sends inside JSON, and what is none."""

from __future__ import annotations

import base64
import io

import numpy as np
import pytest

from assay_evaluate.client.arrays import read_array


def packed(array: np.ndarray) -> str:
    with io.BytesIO() as buffer:
        np.save(buffer, array)
        return base64.b64encode(buffer.getvalue()).decode()


def test_an_array_comes_back() -> None:
    array = np.arange(24, dtype=np.int32).reshape(2, 3, 4)
    np.testing.assert_array_equal(read_array(packed(array), np.int64), array.astype(np.int64), strict=True)


def header(shape: str) -> str:
    text = f"{{'descr': '<i8', 'fortran_order': False, 'shape': {shape}, }}\n".encode()
    return base64.b64encode(b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text).decode()


@pytest.mark.parametrize(
    "told",
    [None, 7, [], "", "AAAA", "not base64!", packed(np.array(["a"])), header("(10, 10)"), header("(10**9,"),
     header("(999999999999, 999999999999)"), header("(("), packed(np.arange(9))[:-8]],
)  # fmt: skip
def test_what_is_no_array(told: object) -> None:
    with pytest.raises(ValueError, match=r"^no base64 \.npy array: "):
        read_array(told, np.int64)
