"""One planned shard in, one shard out: a pure function of plan and source, so that a rerun writes the same bytes.

The output's header follows from the plan alone (names, dtypes, shapes), so it is written first and each tensor goes to its
place as soon as it is computed: memory is bounded by a tensor per core and its packed parts, whatever the size of the shard.
The file is written under a temporary name, fsynced, hashed and renamed: under its own name a shard is always whole.
"""

from __future__ import annotations

import os
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from assay.errors import QuantizeError
from assay.records import OutputTensor, Plan, ShardRecord, TensorPlan
from assay_quantize.checkpoint import Checkpoint
from assay_quantize.kernels import dequantize_weight, magnitude, quantize_weight, relative_error
from assay_quantize.schemes import SHARES_GLOBAL_SCALE, module_of
from assay_quantize.shard_files import fsync_folder, header_bytes, partial_path, planned_shards, sha256_and_size

TORCH_DTYPES: dict[str, torch.dtype] = {
    "BOOL": torch.bool, "U8": torch.uint8, "I8": torch.int8, "I16": torch.int16, "I32": torch.int32, "I64": torch.int64,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "F16": torch.float16, "BF16": torch.bfloat16,
    "F32": torch.float32, "F64": torch.float64,
}  # fmt: skip
"""safetensors dtype name -> torch dtype."""

Buffer = bytes | memoryview
Progress = Callable[[str, int], None]
"""`progress(tensor_name, bytes_in)`, called when a tensor is done."""


def quantize_shard(
    plan: Plan,
    shard_name: str,
    source: Checkpoint,
    out_folder: Path,
    device: str = "cpu",
    on_progress: Progress | None = None,
) -> ShardRecord:
    """Make the shard `shard_name` of `plan` in `out_folder`, replacing one of that name.

    source: the checkpoint the plan was made from. device: where weights are rounded, `cpu` or `cuda`; the bytes are the same.
    Raises QuantizeError: a weight that is not finite, a source that differs from the plan, a disk that is full.
    """
    started = time.monotonic()
    tensors = planned_shards(plan)[shard_name]
    path = out_folder / shard_name
    partial = partial_path(path)
    prefix, begins = header_bytes(tensors)
    errors: dict[str, float] = {}
    try:
        with partial.open("wb") as file:
            file.write(prefix)
            for tensor, made, error in _outputs(plan, tensors, source, device):
                for output in tensor.outputs:
                    file.seek(begins[output.name])
                    file.write(made[output.name])
                if error is not None:
                    errors[tensor.name] = error
                if on_progress is not None:
                    on_progress(tensor.name, tensor.num_bytes)
            file.flush()
            os.fsync(file.fileno())
        digest, num_bytes = sha256_and_size(partial)
        os.replace(partial, path)
    except OSError as problem:
        raise QuantizeError(f"{path}: cannot be written: {problem.strerror}; finished shards stay, run again") from None
    finally:
        partial.unlink(missing_ok=True)
    fsync_folder(out_folder)
    return ShardRecord(
        name=shard_name, num_bytes=num_bytes, sha256=digest, relative_error=errors, seconds=time.monotonic() - started
    )


def read_tensor(source: Checkpoint, name: str, device: str = "cpu") -> Tensor:
    """A tensor of a checkpoint on `device`; on the CPU it is a view of the mapped file: do not write to it."""
    header = source.tensors[name]
    data = source.read(name)
    dtype = TORCH_DTYPES[header.dtype]
    if not data:
        return torch.empty(header.shape, dtype=dtype, device=device)
    flat = bytes_tensor(data)
    if flat.data_ptr() % dtype.itemsize:
        flat = flat.clone()  # a hand-made file may place a tensor at an odd offset
    return flat.view(dtype).reshape(header.shape).to(device)


def bytes_tensor(data: Buffer) -> Tensor:
    """`data` as U8, without a copy: do not write to it."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given buffer is not writable")
        return torch.frombuffer(data, dtype=torch.uint8)


def _group_magnitudes(plan: Plan, tensors: Sequence[TensorPlan], source: Checkpoint, device: str) -> dict[str, Tensor]:
    """Fused group -> largest |w| over all its members, also those in other shards; only where the scheme shares it."""
    wanted = {t.fused_group for t in tensors if t.scheme in SHARES_GLOBAL_SCALE and t.fused_group is not None}
    amaxes: dict[str, list[Tensor]] = {group: [] for group in sorted(wanted)}
    for tensor in plan.tensors if wanted else ():
        if tensor.fused_group in wanted and tensor.scheme in SHARES_GLOBAL_SCALE:
            amaxes[tensor.fused_group].append(magnitude(read_tensor(source, tensor.name, device)))
    shared = {}
    for group, members in amaxes.items():
        # one dtype for all members: the scale is divided in it, and must come out equal
        dtype = members[0].dtype if len({amax.dtype for amax in members}) == 1 else torch.float32
        shared[group] = torch.stack([amax.to(dtype) for amax in members]).max()
    return shared


def _outputs(
    plan: Plan, tensors: Sequence[TensorPlan], source: Checkpoint, device: str
) -> Iterator[tuple[TensorPlan, dict[str, Buffer], float | None]]:
    """(tensor, output name -> bytes, error of a quantized weight), in order.

    On the CPU, tensors are worked on side by side with one thread each: splitting every small operation over all cores costs
    more than it gains (100 times more on a busy machine). No more than one tensor per core, and one, is held in memory.
    """
    workers = torch.get_num_threads() if device == "cpu" else 1
    pending: deque[tuple[TensorPlan, Future[tuple[dict[str, Buffer], float | None]]]] = deque()
    with one_thread_per_operation(), ThreadPoolExecutor(workers) as pool:
        amax_of_group = _group_magnitudes(plan, tensors, source, device)
        for tensor in tensors:
            _check_unchanged(tensor, source)
            group_amax = amax_of_group.get(tensor.fused_group or "")
            if tensor.action == "keep":
                pending.append((tensor, pool.submit(_kept, tensor, source.read(tensor.name))))
            else:
                value = read_tensor(source, tensor.name, device)
                pending.append((tensor, pool.submit(_converted, tensor, value, group_amax)))
            if len(pending) > workers:
                done, future = pending.popleft()
                yield done, *future.result()
        for done, future in pending:
            yield done, *future.result()


@contextmanager
def one_thread_per_operation() -> Iterator[None]:
    """Inside, PyTorch computes every operation on one thread."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _check_unchanged(tensor: TensorPlan, source: Checkpoint) -> None:
    header = source.tensors.get(tensor.name)
    if header is None or (header.dtype, tuple(header.shape)) != (tensor.dtype, tuple(tensor.shape)):
        raise QuantizeError(f"{tensor.name}: the source is no longer what the plan was made from; make a new plan")


def _kept(tensor: TensorPlan, data: Buffer) -> tuple[dict[str, Buffer], None]:
    (output,) = tensor.outputs
    return {output.name: data}, None


def _converted(tensor: TensorPlan, value: Tensor, group_amax: Tensor | None) -> tuple[dict[str, Buffer], float | None]:
    if tensor.action == "quantize":
        return _quantized(tensor, value, group_amax)
    if tensor.action == "cast":
        (output,) = tensor.outputs
        return {output.name: _bytes_of(cast(value, output), output)}, None
    raise QuantizeError(
        f"{tensor.name}: action {tensor.action} is not available; quantize from a BF16, FP16 or FP32 release of the model"
    )


def cast(value: Tensor, output: OutputTensor) -> Tensor:
    """`value` in the planned dtype. Raises QuantizeError where a finite number would become infinite."""
    made = value.to(TORCH_DTYPES[output.dtype])
    if made.is_floating_point() and bool((~torch.isfinite(made) & torch.isfinite(value)).any()):
        raise QuantizeError(f"{output.name}: some values do not fit {output.dtype}; keep its role in `source` dtype")
    return made


def _quantized(tensor: TensorPlan, w_OI: Tensor, group_amax: Tensor | None) -> tuple[dict[str, Buffer], float]:
    assert tensor.scheme is not None
    if not bool(torch.isfinite(w_OI).all()):
        count = int((~torch.isfinite(w_OI)).sum())
        raise QuantizeError(f"{tensor.name}: {count} of {w_OI.numel()} weights are NaN or infinite; the source is damaged")
    parts = quantize_weight(w_OI, tensor.scheme, global_scale_amax=group_amax)
    error = relative_error(dequantize_weight(parts, tensor.scheme, w_OI.dtype), w_OI)
    if error != error or error == float("inf"):
        raise QuantizeError(f"{tensor.name}: its scales do not fit {tensor.dtype}; quantize from a BF16 or FP32 source")
    module = module_of(tensor.name)
    planned = {output.name: output for output in tensor.outputs}
    made = {f"{module}.{part}": value for part, value in parts.items()}
    assert sorted(made) == sorted(planned), f"{tensor.name}: made {sorted(made)}, planned {sorted(planned)}"
    return {name: _bytes_of(value, planned[name]) for name, value in made.items()}, error


def _bytes_of(value: Tensor, output: OutputTensor) -> memoryview:
    got, want = (value.dtype, tuple(value.shape)), (TORCH_DTYPES[output.dtype], tuple(output.shape))
    assert got == want, f"{output.name}: made {got}, planned {want}"
    return value.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
