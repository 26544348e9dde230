"""Who rounds, on CPU threads: the fused kernels, or the reference (torch). Both give the same bytes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from assay_quantize import kernels
from assay_quantize.kernels import QuantizedRows
from assay_quantize.kernels.rows import Array, Kernels


@dataclass(frozen=True)
class Computer:
    """Rows in, parts out."""

    kernels: Kernels = "fused"

    def amax_rows(self, w_OI: Array, dtype: str) -> float:
        """Largest |w| of the rows; NaN when a weight is not finite. By the fused kernels: it is the same number."""
        return kernels.amax_rows(w_OI, dtype)

    def quantize_rows(
        self,
        w_OI: Array,
        dtype: str,
        scheme: str,
        *,
        amax: float | None,
        amax_dtype: str,
        observer: str,
        importance_I: Array | None,
        memory: Array | None = None,
    ) -> QuantizedRows:
        """`kernels.quantize_rows`."""
        return kernels.quantize_rows(
            w_OI, dtype, scheme, amax=amax, amax_dtype=amax_dtype, observer=observer, importance_I=importance_I,
            kernels=self.kernels, memory=memory,
        )  # fmt: skip

    @contextmanager
    def ready(self) -> Iterator[None]:
        """While worker threads compute: where torch does it, each operation on one thread."""
        if self.kernels == "fused":
            yield
            return
        import torch

        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            yield
        finally:
            torch.set_num_threads(threads)
