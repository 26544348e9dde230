"""`assay diagnose locate`: in which layer, expert and rank two servers part, and what a recipe could do about it.

    location = locate_servers(side_a, side_b)         two checkpoints, or two servers that run
    location = locate_ranks(side_a)                   the tensor-parallel ranks of one

A side is a `Side`: a checkpoint folder that is served here, or the URL of a server whose workers can be watched.
"""

from __future__ import annotations

import functools
import math
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import yaml

from assay.callbacks import Say
from assay.errors import AssayError, MeasureError
from assay.foreign_text import safe_name
from assay.recipes.model import Serving
from assay.recipes.precision import PrecisionRecipe
from assay.recipes.profile import ProfileRecipe
from assay.records.base import write_text_atomically
from assay.records.diagnosis.locate import LocateReport, Parting, PointDifference, Remedy
from assay.records.manifest import load_manifest
from assay.records.plan import Plan
from assay.records.run import plan_of
from assay_evaluate.diagnosis.locate.compare import (
    compare,
    compare_ranks,
    find_first_parting,
    find_outlier,
    find_rank_parting,
    shares_of_error,
)
from assay_evaluate.diagnosis.locate.reading import Reading, WatchedServer, read_activations, with_watching
from assay_evaluate.serving.external import list_models
from assay_evaluate.serving.server import ServerSpec, serve
from assay_evaluate.serving.vllm_command import bind_cores
from assay_evaluate.tasks.items import arithmetic_item
from assay_evaluate.transport.connection import root_url

NUM_PROMPTS = 8
WORST_SHOWN = 12
SEED = "eval-locate"


@dataclass(frozen=True)
class Side:
    """What is read: exactly one of `url` and `checkpoint`; `profile` and `serving` belong to the latter."""

    label: str
    url: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Sent with every request to `url`: an authorization, say."""
    checkpoint: Path | None = None
    profile: ProfileRecipe | None = None
    serving: Serving = field(default_factory=Serving)
    tensor_parallel_size: int = 1
    log_path: Path = Path("locate.log")


def prompts(count: int = NUM_PROMPTS) -> list[str]:
    """Questions of both languages, always the same."""
    return [arithmetic_item(SEED, index, ("en", "zh")[index % 2], 3 + index % 3).prompt for index in range(count)]


def locate_servers(a: Side, b: Side, num_prompts: int = NUM_PROMPTS, on_progress: Say = lambda line: None) -> LocateReport:
    """Both sides read the same tokens, A twice: what it differs from itself is noise. They are served one after the other."""
    started = time.monotonic()
    with watch_side(a, on_progress) as server:
        reading_a, ids = read_activations(server, prompts(num_prompts), on_progress)
        again, _ = read_activations(server, ids)
    with watch_side(b, on_progress) as server:
        reading_b, _ = read_activations(server, ids, on_progress)
    return judge_servers(a, b, reading_a, again, reading_b, ids, time.monotonic() - started)


def judge_servers(
    a: Side, b: Side, reading_a: Reading, again: Reading, reading_b: Reading, ids: Sequence[Sequence[int]], seconds: float
) -> LocateReport:
    """What two readings say. again: side A once more."""
    _check_same_tokens(reading_a, reading_b, a, b)
    points, missing = compare(reading_a, reading_b, again)
    first, odd = find_first_parting(points), find_outlier(points)
    is_same_folder = a.checkpoint is not None and b.checkpoint is not None and a.checkpoint.resolve() == b.checkpoint.resolve()
    recipe = None if is_same_folder else precision_of(b.checkpoint)
    shares = {} if recipe is None or first is None else shares_of_error(points, recipe.quantize)
    # every layer of another precision differs a little: the first says where quantization begins, not what costs most
    role = odd.role if odd is not None else next(iter(shares), None if first is None else first.role)
    remedy = None if recipe is None or role is None else remedy_for(recipe, role)
    if remedy is not None and b.checkpoint is not None:
        reason = None if odd is None else f"{odd.name} stands out"
        explanation = explain_role(role, reason, shares, b.checkpoint)
        remedy = remedy.model_copy(update={"sentence": f"{remedy.sentence}: {explanation}"})
    sentence = f"nothing differs by more than noise ({len(points)} places compared)"
    if first is not None:
        stands_out = f"; stands out: {_describe(odd)}" if odd is not None and odd.name != first.name else ""
        sentence = f"they first differ at {_describe(first)}{stands_out}"
    return LocateReport(
        how="servers", a=a.label, b=b.label, tensor_parallel_size=len(reading_a), num_prompts=len(ids),
        num_tokens=sum(map(len, ids)), first=first, outlier=odd, remedy=remedy, points=tuple(points),
        sentence=sentence + _describe_shares(shares, points),
        not_compared=tuple(missing), seconds=round(seconds, 3),
    )  # fmt: skip


def locate_ranks(a: Side, num_prompts: int = NUM_PROMPTS, on_progress: Say = lambda line: None) -> LocateReport:
    """The ranks of one server, by what all must hold alike and by the sizes of the weights that are each one's own."""
    started = time.monotonic()
    with watch_side(a, on_progress) as server:
        reading, ids = read_activations(server, prompts(num_prompts), on_progress)
        weights = server.readings("weigh_parameters")
    if len(reading) < 2:
        raise MeasureError(f"{a.label}: has one rank; serve it with --tensor-parallel-size 2 or more to compare ranks")
    points, missing = compare_ranks({rank: reading[rank] | weights[rank] for rank in reading})
    first = find_rank_parting(points)
    finding = "no rank stands out" if first is None else _describe(first)
    return LocateReport(
        how="ranks", a=a.label, b=None, tensor_parallel_size=len(reading), num_prompts=len(ids),
        num_tokens=sum(map(len, ids)), first=first, outlier=None, remedy=None, points=tuple(points),
        sentence=f"{finding} ({len(points)} places compared)", not_compared=tuple(missing),
        seconds=round(time.monotonic() - started, 3),
    )  # fmt: skip


@contextmanager
def watch_side(side: Side, on_progress: Say = lambda line: None) -> Iterator[WatchedServer]:
    """The side's server: the one that runs, or one that is started for it and stopped afterwards."""
    if side.url is not None:
        base_url = root_url(side.url)
        model = list_models(base_url, what="the server", headers=side.headers)[0].id
        yield WatchedServer(base_url, model, side.headers)
        return
    assert side.checkpoint is not None and side.profile is not None
    flags = {"tensor-parallel-size": side.tensor_parallel_size} if side.tensor_parallel_size > 1 else {}
    profile = bind_cores(with_watching(side.profile, **flags), side.tensor_parallel_size)
    spec = ServerSpec(side.checkpoint, profile, side.serving, speculate=False, log_path=side.log_path)
    with serve(spec, on_progress) as server:
        yield WatchedServer(server.base_url, server.model, server.headers)


def _check_same_tokens(reading_a: Reading, reading_b: Reading, a: Side, b: Side) -> None:
    """Of linear layers: an embedding is used by a draft head, too, where a server speculates."""
    for name, point in reading_a[0].items():
        other = reading_b[0].get(name)
        if point.kind == "linear" and other is not None and point.num_tokens != other.num_tokens:
            raise MeasureError(
                f"{b.label}: computed {other.num_tokens} tokens at {name}, {a.label} {point.num_tokens}: other requests were "
                "under way, or a cache answered; let both servers be idle, without --enable-prefix-caching"
            )


# ------------------------------------------------------------------------------------------------ in words
def _describe_shares(shares: Mapping[str, float], points: Sequence[PointDifference]) -> str:
    """How far the residual streams are apart at the end, and what brought that in."""
    if not shares:
        return ""
    last = [point for point in points if point.kind == "residual" and point.distance is not None][-1]
    parts = ", ".join(f"{share:.0%} `{role}`" for role, share in shares.items())
    return f"; at {last.name} the sides differ by {last.distance:.3g}; the quantized roles brought in, of the error: {parts}"


def explain_role(role: str | None, reason: str | None, shares: Mapping[str, float], checkpoint: Path) -> str:
    """Why this role: what it brings in, and of every role what a byte more would take away of the error at most."""
    more_bytes = bytes_to_keep(checkpoint)
    gains = [
        f"`{name}` {share:.0%} for {num_bytes / 1e6:,.3g} MB ({share / num_bytes * 1e6:.2%} per MB)"
        for name, share in shares.items()
        if (num_bytes := more_bytes.get(name))
    ]
    reason = reason or f"`{role}` brings most of the error in"
    return reason + (f"; error that keeping a role in BF16 would spare, for its bytes: {', '.join(gains)}" if gains else "")


def bytes_to_keep(checkpoint: Path) -> dict[str, int]:
    """Role -> bytes by which a checkpoint would grow if the role's quantized weights were BF16. Empty: it has no plan."""
    path = plan_of(checkpoint)
    more_bytes: dict[str, int] = defaultdict(int)
    for tensor in Plan.load(path).tensors if path.is_file() else ():
        if tensor.action == "quantize":
            more_bytes[tensor.role] += 2 * math.prod(tensor.shape) - sum(output.num_bytes for output in tensor.outputs)
    return dict(more_bytes)


def _describe(parting: Parting) -> str:
    rank = "" if parting.rank is None or "on rank" in parting.why else f" on rank {parting.rank}"
    return f"{parting.name}{rank}: {parting.why}"


def worst_points(points: Sequence[PointDifference]) -> list[PointDifference]:
    """Those that add most, for a table."""
    return sorted((p for p in points if p.added is not None), key=lambda p: -(p.added or 0.0))[:WORST_SHOWN]


# ------------------------------------------------------------------------------------------------ remedy
@functools.cache
def precision_of(checkpoint: Path | None) -> PrecisionRecipe | None:
    """The recipe in a checkpoint's manifest; None: it was not made here."""
    manifest = None if checkpoint is None else load_manifest(checkpoint)
    if manifest is None:
        return None
    data = dict(manifest.precision_recipe)
    data["schema"] = data.pop("schema_version", 1)
    return PrecisionRecipe.model_validate(data)


def remedy_for(recipe: PrecisionRecipe, role: str) -> Remedy | None:
    """The recipe with `role` kept in BF16 if it is quantized, in FP32 if it is kept in less. None: it is in FP32 already."""
    kept = recipe.kept_dtype(role)
    if kept == "fp32":
        return None
    dtype = "bf16" if kept is None else "fp32"
    data = recipe.model_dump(mode="json", exclude_defaults=True)
    data["schema"] = data.pop("schema_version", 1)
    data["name"] = f"{recipe.name}-{role.replace('_', '-')}-{dtype}"
    data["description"] = f"{recipe.name} with {role} kept in {dtype.upper()}: a remedy proposed by `assay diagnose locate`."
    is_mix = isinstance(recipe.quantize, dict)
    data["quantize"] = (
        {r: s for r, s in data["quantize"].items() if r != role} if is_mix else [r for r in recipe.quantize if r != role]
    )
    if recipe.layers:
        others = {text: {r: s for r, s in roles.items() if r != role} for text, roles in recipe.layers.items()}
        data["layers"] = {text: roles for text, roles in others.items() if roles}
    keep: dict[str, list[str]] = {name: [r for r in roles if r != role] for name, roles in recipe.keep.items()}
    keep[dtype] = [*keep.get(dtype, []), role]
    data["keep"] = {name: roles for name, roles in keep.items() if roles}
    first_keys = ("schema", "name", "description")
    ordered = {key: data[key] for key in (*first_keys, *sorted(data.keys() - set(first_keys)))}
    return Remedy(
        role=role,
        keep="bf16" if dtype == "bf16" else "fp32",
        sentence=f"keep `{role}` in {dtype.upper()}, quantize again with the changed recipe, and locate again",
        recipe=yaml.safe_dump(ordered, sort_keys=False, allow_unicode=True),
    )


def write_remedy(location: LocateReport, folder: Path) -> Path:
    """The proposed recipe as FOLDER/NAME.yaml, for `assay quantize -p`; AssayError if none was proposed."""
    if location.remedy is None or location.remedy.recipe is None:
        raise AssayError(
            f"{folder}: no recipe to write: {location.b or location.a} was not quantized by assay, or not its precision differs"
        )
    path = folder / f"{safe_name(yaml.safe_load(location.remedy.recipe)['name'])}.yaml"
    write_text_atomically(path, location.remedy.recipe)
    return path
