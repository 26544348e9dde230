"""Who rounds: the fused kernels on CPU threads, or the reference (torch) on CPU threads or a GPU. All give the same bytes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from assay_quantize import kernels
from assay_quantize.kernels import QuantizedRows
from assay_quantize.kernels.rows import Array, Kernels


@dataclass(frozen=True)
class Computer:
    """Rows in, parts out, on one device. device: `cpu` or `cuda` (torch, whatever `kernels` says)."""

    device: str = "cpu"
    kernels: Kernels = "fused"

    def amax_rows(self, w_OI: Array, dtype: str) -> float:
        """Largest |w| of the rows; NaN when a weight is not finite. On the CPU: reading costs more than comparing."""
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
        """`kernels.quantize_rows` on this device."""
        if self.device == "cpu" or observer != "minmax":  # scales are searched on the CPU
            return kernels.quantize_rows(
                w_OI, dtype, scheme, amax=amax, amax_dtype=amax_dtype, observer=observer, importance_I=importance_I,
                kernels=self.kernels, memory=memory,
            )  # fmt: skip
        from assay_quantize.kernels import compiled

        return compiled.quantize_rows(w_OI, dtype, scheme, amax=amax, amax_dtype=amax_dtype, device=self.device)

    @contextmanager
    def ready(self) -> Iterator[None]:
        """While worker threads compute: where torch does it, each operation on one thread, and never by Triton kernels."""
        if self.device == "cpu" and self.kernels == "fused":
            yield
            return
        import torch
        from compressed_tensors.utils import impl_backend

        threads, eager = torch.get_num_threads(), impl_backend.ENFORCE_EAGER
        torch.set_num_threads(1)
        # once and for all threads: switched per call, one thread would switch it off under another
        impl_backend.ENFORCE_EAGER = True
        try:
            yield
        finally:
            torch.set_num_threads(threads)
            impl_backend.ENFORCE_EAGER = eager
