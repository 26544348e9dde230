"""A plan as a person reads it: bytes per role, what is kept and how, where MTP is, and which machines hold the result."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from types import MappingProxyType

from rich.console import Console
from rich.table import Table

from assay.foreign_text import in_rich
from assay.records.plan import Plan, TensorPlan
from assay_quantize.plan.calibrated import calibrated_mtp_layer, calibrated_tensors, method_of
from assay_quantize.plan.fits import KV_TOKENS, WORKSPACE_BYTES, Fit, fits
from assay_quantize.plan.planner import bytes_by_role
from assay_quantize.plan.stored import stored_by

METHOD_NAMES = {"gptq": "GPTQ", "awq": "AWQ", "smoothquant": "SmoothQuant", "autoround": "AutoRound"}


def print_plan(plan: Plan, console: Console) -> None:
    """Print the layer map; readable at 100 columns."""
    ratio = plan.bytes_out / plan.bytes_in if plan.bytes_in else 0.0
    shards = {tensor.shard_out for tensor in plan.tensors} - {None}
    console.print(f"[bold]{plan.model}[/] -> [bold]{plan.precision}[/]   family {plan.family}   source {in_rich(plan.source)}")
    console.print(
        f"{len(plan.tensors):,} tensors, {gigabytes(plan.bytes_in)} -> {gigabytes(plan.bytes_out)} ({ratio:.1%}) "
        f"in {len(shards)} shard{'s' * (len(shards) != 1)}"
    )
    console.print(_role_table(plan))
    console.print(f"MTP: {mtp_line(plan)}")
    console.print(
        f"ignore: {len(plan.ignore)} patterns tell vLLM what is not quantized: {in_rich('  '.join(plan.ignore))}"
    )  # fmt: skip
    rows = fits(stored_by(plan))
    console.print(_fit_table(rows))
    shares = ", ".join(sorted({f"{row.utilization:.0%}" for row in rows}))
    console.print(
        f"Estimated, for each GPU. usable: {shares} of its memory (gpu-memory-utilization). left: for the KV cache, after the "
        f"weights and {gigabytes(WORKSPACE_BYTES)} of workspace. fit: whether the GPUs can share the weights "
        f"and the cache holds {KV_TOKENS:,} tokens. "
        "KV tokens: what the cache holds, and its dtype (auto: the model's). TP: no if tensor parallelism on so many GPUs "
        "would cut through an attention head or a quantization group, which vLLM refuses (--profile NAME says which)."
    )


def _role_table(plan: Plan) -> Table:
    table = Table(title="bytes per role", title_justify="left")
    for heading in ("role", "tensors", "in", "out", "what happens"):
        table.add_column(heading, justify="right" if heading in ("tensors", "in", "out") else "left")
    by_role: dict[str, list[TensorPlan]] = defaultdict(list)
    for tensor in plan.tensors:
        by_role[tensor.role].append(tensor)
    changed: dict[str, str] = {}  # tensor -> how a calibration changes it: `by GPTQ`, `scaled by AWQ`
    if (method := method_of(plan)) is not None:
        scales, *_ = rounds = [METHOD_NAMES[part] for part in method.split("+")]
        for tensors in calibrated_tensors(plan).values():
            for tensor in tensors:
                is_rounded = tensor.action == "quantize"
                changed[tensor.name] = f"by {' and '.join(rounds)}" if is_rounded else f"scaled by {scales}"
    for role, (count, bytes_in, bytes_out) in bytes_by_role(plan).items():
        what = what_happens(by_role[role], changed)
        table.add_row(role, f"{count:,}", gigabytes(bytes_in), gigabytes(bytes_out), what)
    table.add_section()
    table.add_row("all", f"{len(plan.tensors):,}", gigabytes(plan.bytes_in), gigabytes(plan.bytes_out), "")
    return table


def what_happens(tensors: list[TensorPlan], changed: Mapping[str, str] = MappingProxyType({})) -> str:
    """ "w4a16 225, BF16 as is 150, F32 to BF16 3": each action with the number of tensors, most frequent first.

    changed: tensor -> how a calibration changes it.
    """
    counts = Counter(_treatment(tensor, changed.get(tensor.name)) for tensor in tensors)
    if len(counts) == 1:
        return next(iter(counts))
    return ", ".join(f"{count:,} {what}" for what, count in counts.most_common())


def _treatment(tensor: TensorPlan, changed: str | None) -> str:
    if tensor.action == "quantize":
        return f"{tensor.scheme} {changed or ''}".strip()
    if tensor.action == "drop":
        return "dropped"
    if tensor.action == "add":
        return "scales from the calibration"
    if tensor.action == "consume":
        return "scales folded in"
    if tensor.action == "keep":
        kept = tensor.scheme or ("scales" if tensor.outputs[0].name != tensor.name else tensor.dtype)
        return f"{kept} {changed or 'as is'}"
    cast = f"{tensor.dtype} to {tensor.outputs[0].dtype}"
    return cast if changed is None else f"{cast}, {changed}"


def mtp_line(plan: Plan) -> str:
    """Where the MTP block is and how it is treated, in one sentence."""
    block = [tensor for tensor in plan.tensors if tensor.role == "mtp"]
    if not block:
        return "none in this checkpoint"
    where = f"layer {', '.join(map(str, plan.mtp_layers))}" if plan.mtp_layers else "mtp.*"
    size = gigabytes(sum(tensor.num_bytes for tensor in block))
    if not plan.keeps_mtp:
        return f"{where} ({len(block):,} tensors, {size}) is dropped; config.json will declare none"
    if any(tensor.scheme is not None for tensor in block):
        method, is_calibrated = method_of(plan), calibrated_mtp_layer(plan) is not None
        text = "" if method is None else f"; {'calibrated, too' if is_calibrated else 'rounded without text'}"
        what = f"is quantized like the layers; its input projection and head are not{text}"
        return f"{where} ({len(block):,} tensors, {size}) {what}"
    return f"{where} ({len(block):,} tensors, {size}) is kept, {what_happens(block)}"


def _fit_table(rows: list[Fit]) -> Table:
    table = Table(title="does it fit (GB of one GPU)", title_justify="left")
    for heading in ("profile", "usable", "weights", "left", "fit", "KV tokens", "TP"):
        table.add_column(heading, justify="left" if heading == "profile" else "right", no_wrap=True)
    for row in rows:
        table.add_row(
            row.profile,
            f"{row.usable_bytes / 1e9:,.0f}",
            f"{row.weight_bytes / 1e9:,.1f}",
            f"{row.free_bytes / 1e9:,.0f}",
            _yes(row.holds() and row.splits),
            f"{row.kv_tokens / 1e6:.2f} M {row.kv_dtype}",
            _yes(row.splits),
        )
    return table


def _yes(true: bool) -> str:
    return "[green]yes[/]" if true else "[red]no[/]"


def gigabytes(num_bytes: int) -> str:
    """10^9 bytes, with enough digits for small things: 1,507.2 GB, 6.24 MB, 96 B."""
    for unit, size in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if abs(num_bytes) >= size:
            value = num_bytes / size
            return f"{value:,.1f} {unit}" if abs(value) >= 10 else f"{value:.2f} {unit}"
    return f"{num_bytes} B"
