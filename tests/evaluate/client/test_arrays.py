"""Arrays that a server sends inside JSON, and what is none."""

from __future__ import annotations

import base64
import gc
import io
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from assay_evaluate.client.logprobs import read_array


def packed(array: np.ndarray) -> str:
    with io.BytesIO() as buffer:
        np.save(buffer, array)
        return base64.b64encode(buffer.getvalue()).decode()


@pytest.mark.parametrize("dtype", ["<i4", ">i2", "|u1", "<f4", "|b1"])
@pytest.mark.parametrize("shape", [(), (24,), (2, 0, 3), (2, 3, 4)])
@pytest.mark.parametrize("order", ["C", "F"])
def test_an_array_comes_back(dtype: str, shape: tuple[int, ...], order: str) -> None:
    array = np.asarray(np.arange(np.prod(shape, dtype=int)).reshape(shape), dtype, order=order)
    np.testing.assert_array_equal(read_array(packed(array), np.float64), array.astype(np.float64), strict=True)


def test_many_threads_read_at_once() -> None:
    """With `numpy.load`, this is "SystemError: AST constructor recursion depth mismatch" on Python 3.11 and 3.12."""
    text, want = packed(np.arange(4)), np.arange(4)

    def read(depth: int) -> bool:
        if depth:
            return read(depth - 1)
        return all(np.array_equal(read_array(text, np.int64), want) for _ in range(300))

    switch_s, threshold = sys.getswitchinterval(), gc.get_threshold()
    try:
        sys.setswitchinterval(1e-6)
        gc.set_threshold(1)
        gc.callbacks.append(_let_others_run)
        with ThreadPoolExecutor(16) as threads:
            assert all(threads.map(read, range(16)))
    finally:
        sys.setswitchinterval(switch_s)
        gc.set_threshold(*threshold)
        gc.callbacks.remove(_let_others_run)


def _let_others_run(phase: str, info: dict[str, int]) -> None:
    """Python code that the collector runs, as a finalizer would be: the interpreter may change threads in it."""
    sum(range(200))


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
