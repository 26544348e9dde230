"""Would vLLM load every checkpoint on the profile's GPUs? Its own loaders are asked (`serving/replay.py`), without a GPU."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence

from assay.errors import AssayError
from assay.foreign_text import shown
from assay.installation import setup_command
from assay.recipes.profile import ProfileRecipe
from assay.records.preflight.replay import Finding, FindingKind, Replay
from assay.records.preflight.report import Check
from assay_evaluate.serving.replay import Candidate, replay
from assay_evaluate.serving.server import find_interpreter

GIB = 2**30
_MOST_SHOWN = 400
_REMEDIES: dict[FindingKind, str] = {
    "arguments": "correct `vllm:` of the profile, or `serving:` of the model's recipe",
    "group size": "a precision with smaller groups or one scale per row (`assay recipes`), or a profile with fewer GPUs",
    "shape": "config.json and the shards declare different shapes: take both of one revision, or correct config.json",
    "missing tensor": "download the checkpoint again, or make it again from a whole source",
    "missing expert": "download the checkpoint again, or make it again from a whole source",
    "unused tensor": "config.json declares no such module: take it and the shards of one revision, or correct it",
    "unknown tensor": "config.json declares no such module: take it and the shards of one revision, or correct it",
    "quantization": "let `ignore` in quantization_config name what is stored in 16 bits, and nothing else",
    "ignore list": "let `ignore` in quantization_config name all members of a fused weight, or none",
    "kernel": "take another profile or another precision: vLLM has no kernel for this one on this GPU",
    "shard": "download the shard again",
    "refused": "if vLLM refuses the unquantized model in the same words, correct the checkpoint or take a vLLM of your own "
    "(`interpreter:` of the profile); if not, take another profile or another precision",
}  # fmt: skip
"""What to do where the replay knows nothing better."""


def check_loading(
    candidates: Sequence[Candidate], profile: ProfileRecipe, on_progress: Callable[[str], None]
) -> Iterator[Check]:
    """One PASS for each checkpoint, or a FAIL for each kind of thing that stands against it. UNKNOWN: nobody can be asked.

    A checkpoint that loads, and whose weights and KV cache are too large as vLLM itself counts them, is a FAIL of `memory`.
    """
    if profile.hardware.device == "cpu":
        detail = f"does not apply to {profile.name}: on a CPU, assay's plugin reads every format that assay makes"
        yield Check(check="loading", subject=None, outcome="PASS", detail=detail)
        return
    if find_interpreter(profile) is None:
        detail = "no serving environment here, whose vLLM would be asked"
        yield Check(check="loading", subject=None, outcome="UNKNOWN", detail=detail, remedy=setup_command())
        return
    try:
        records = replay(candidates, on_progress=on_progress)
    except AssayError as error:
        detail = f"vLLM's loaders could not be asked: {shown(str(error).partition(chr(10))[0], _MOST_SHOWN)}"
        yield Check(check="loading", subject=None, outcome="UNKNOWN", detail=detail)
        return
    for record in records:
        yield from checks_of(record)
        yield from too_large(record, profile)


def checks_of(record: Replay) -> Iterator[Check]:
    """What a replay says, as lines."""
    first: dict[FindingKind, list[Finding]] = {}
    for finding in record.every_finding:
        first.setdefault(finding.kind, []).append(finding)
    if not first:
        yield Check(check="loading", subject=record.checkpoint, outcome="PASS", detail=_loads(record))
    for kind, findings in first.items():
        finding, count = findings[0], sum(finding.count for finding in findings)
        # vLLM's words often begin with the module or tensor
        where = "" if finding.where is None or finding.where in finding.message else f"{finding.where}: "
        more = f" (and {count - 1:,} more)" if count > 1 else ""
        detail = f"{kind}: {where}{shown(finding.message, _MOST_SHOWN)}{more}"
        if finding.ranks:  # else it does not depend on the rank
            is_every_rank = len(finding.ranks) == max((part.num_ranks for part in record.parts), default=0)
            detail += ", on every rank" if is_every_rank else f", on rank {', '.join(map(str, finding.ranks))}"
        if kind == "unknown":
            yield Check(check="loading", subject=record.checkpoint, outcome="UNKNOWN", detail=detail, remedy=finding.remedy)
            continue
        remedy = finding.remedy or _REMEDIES[kind]
        yield Check(check="loading", subject=record.checkpoint, outcome="FAIL", detail=detail, remedy=remedy)


def too_large(record: Replay, profile: ProfileRecipe) -> Iterator[Check]:
    """A FAIL if vLLM's own figures leave no room for one sequence; what they lack could only make it worse."""
    memory, usable = record.memory, profile.usable_bytes
    if memory is None or memory.kv_cache_bytes is None or usable is None:
        return
    if memory.weight_bytes + memory.kv_cache_bytes <= usable:
        return
    detail = (
        f"by vLLM's own account each GPU holds {_held(record)}, and {usable / GIB:.1f} GiB are usable, "
        "of which activations and CUDA graphs take their part, too"
    )
    remedy = "lower `max-model-len` (`serving:` of the model's recipe, or the profile), or take a profile with more memory"
    yield Check(check="memory", subject=record.checkpoint, outcome="FAIL", detail=detail, remedy=remedy)


def _held(record: Replay) -> str:
    """`90.0 GiB of weights, and one sequence of 202,752 tokens 11.8 GiB of KV cache`; nothing where vLLM was not asked."""
    if (memory := record.memory) is None:
        return ""
    weights = f"{memory.weight_bytes / GIB:.1f} GiB of weights"
    if memory.kv_cache_bytes is None:
        return weights
    return f"{weights}, and one sequence of {memory.max_model_len:,} tokens {memory.kv_cache_bytes / GIB:.1f} GiB of KV cache"


def _loads(record: Replay) -> str:
    """`vLLM 0.32.0 loads target and draft on 8 ranks; kernels: experts w4a16 MARLIN, ...`."""
    parts = " and ".join(part.part for part in record.parts)
    ranks = max(part.num_ranks for part in record.parts)
    kernels = Counter[str]()
    for row in (row for part in record.parts for row in part.modules):
        if row.kernel is not None or row.scheme is not None:  # a plain linear has no kernel to choose
            kernel = row.kernel or f"{row.method}, kernel not known"
            kernels[f"{row.what}{'' if row.scheme is None else f' {row.scheme}'} {kernel}"] += row.num_modules
    named = ", ".join(f"{name} ({count})" for name, count in sorted(kernels.items()))
    undrafted = "" if record.undrafted is None else f"; no draft: {record.undrafted}"
    held = f"; a GPU holds {_held(record)}" if record.memory is not None else ""
    return f"vLLM {record.vllm} loads {parts} on {ranks} rank{'s' if ranks > 1 else ''}{undrafted}{held}; modules: {named}"
