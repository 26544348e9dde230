"""Reopen a quantized checkpoint and trust nothing: neither its manifest, nor its index, nor its config.

With the source at hand, the plan is made again from the source's headers and the recipe in the manifest, every byte of every
tensor is made again and compared, and every copied file is compared with the source's. Without it, the source's headers are
reconstructed from the checkpoint's own, and what that cannot cover is listed in `not_checked`.

What the engine would get wrong must not be wrong here as well, so mistakes of the planner, the header parser and the kernels
are looked for on another road: headers by the safetensors library (`library.py`), what must be there by names (`names.py`),
schemes and ignore list by compressed-tensors (`presets.py`, `names.py`, `checks.py`), casts by torch (`slabs.py`), and a tile
of weights by the definition in torch (`definition.py`). What those still share with the engine, each of them says.

Alone, it reads all of the source itself. Of shards that were checked while they were made (`finished.py`), weights may have
been compared with the rows that the engine had read (`meanwhile/`): of those it shares the reading of the source, but for
pieces of every slab.
"""

from __future__ import annotations

import math
import re
import time
from collections import Counter
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from assay.callbacks import Progress
from assay.errors import AssayError, CheckpointError, PlanError
from assay.recipes.families import family_of
from assay.recipes.mtp import mtp_problems, names_in_block
from assay.recipes.precision import PrecisionRecipe
from assay.records.manifest import MANIFEST, Manifest, load_manifest
from assay.records.plan import Plan, TensorPlan
from assay.records.verification import Verification, stamps_of_files
from assay.safe_files import read_json_object
from assay.safetensors_index import INDEX_NAME
from assay_quantize.checkpoint.checkpoint import Checkpoint, open_checkpoint
from assay_quantize.checkpoint.file_names import CONFIG, JOURNAL
from assay_quantize.checkpoint.headers import TensorHeader, read_shard_header
from assay_quantize.formats.schemes import INPUT_LEAVES, KV_LEAVES, SCHEMES, SOURCE_DTYPES, module_of
from assay_quantize.plan.calibrated import with_signed_scales
from assay_quantize.plan.identity import plan_sha256
from assay_quantize.plan.planner import make_plan
from assay_quantize.plan.static_scales import needs_calibration, static_scales
from assay_quantize.verify.findings import Findings

if TYPE_CHECKING:
    from assay_quantize.verify.finished import FinishedShards
    from assay_quantize.verify.original import Original
    from assay_quantize.verify.presets import Groups

PACKED_LEAVES = frozenset(
    {"weight_packed", "weight_scale", "weight_shape", "weight_zero_point", "weight_global_scale"} | set(INPUT_LEAVES)
)


def verify(
    folder: Path,
    *,
    source: Path | None = None,
    hashes: bool = True,
    contents: bool = True,
    sample: float | None = None,
    importance: Path | None = None,
    finished: FinishedShards | None = None,
    workers: int | None = None,
    on_progress: Progress | None = None,
) -> Verification:
    """Check the checkpoint in `folder`; every damage names a check, a tensor or file, and what is wrong in numbers.

    source: the checkpoint it was made from. hashes: read every file and compare SHA-256 with the manifest. contents: read every
    tensor, and with a source make it again. sample: of the contents look at this share only (0 to 1) and at the beginning of
    every tensor. importance: file of the channel weights that it was made with. finished: what was found while it was
    made; of a file that was touched since, nothing is taken. workers: threads; None: the cores this process may use.
    on_progress: called with (tensor or file, bytes of the checkpoint); `num_bytes_of` tells how many there will be.
    Raises CheckpointError when there is no such folder, or when the source itself cannot be opened or read.
    """
    if not folder.is_dir():
        raise CheckpointError(f"{folder}: no such folder; give the folder of a quantized checkpoint")
    source_checkpoint = None if source is None else open_checkpoint(source)
    # only now: numba and torch take seconds to import; a folder that is not there is said before, and the command line imports
    # this module to say "done before"
    from assay_quantize.kernels.devices import default_workers
    from assay_quantize.verify.calibrated.digests import check_calibrated
    from assay_quantize.verify.checks import check_config, check_fused_scales, check_ignore, check_planned
    from assay_quantize.verify.contents import check_hashes_and_contents, contents_by_shard, expected_hashes, opened_checks
    from assay_quantize.verify.folder import check_copies, check_files
    from assay_quantize.verify.library import check_headers, check_metadata
    from assay_quantize.verify.names import check_nothing_lost, check_targets

    started, findings = time.monotonic(), Findings()
    manifest = _manifest(folder, findings)
    files = stamps_of_files(folder)
    config = _json_object(folder, CONFIG, findings)
    stored = _stored_tensors(folder, findings)
    shards = sorted({header.shard for header in stored.values()})
    headers = check_headers(folder, stored, shards, findings)
    check_metadata(folder, shards, findings)
    _check_index(folder, stored, findings)
    if manifest is not None:
        check_files(folder, manifest, hashes, findings)
        if source_checkpoint is not None:
            check_copies(folder, manifest, source_checkpoint, findings)
    plan = None
    if manifest is not None and config is not None:
        plan = _expected_plan(folder, manifest, config, stored, source_checkpoint, findings)
    tensors: dict[str, list[TensorPlan]] = {}
    groups: Groups | None = None
    if plan is None or config is None:
        findings.not_checked.append("contents, scales, ignore list and MTP: there is no plan to compare with")
    else:
        check_planned(plan, stored, findings, shards=source is not None)
        recipe = PrecisionRecipe.model_validate(plan.precision_recipe)
        groups = check_targets(recipe, config, stored, findings)
        if source_checkpoint is not None:
            check_nothing_lost(source_checkpoint, recipe, stored, findings)
        tensors = contents_by_shard(plan.tensors, headers) if contents else {}
        if not contents:
            findings.not_checked.append("contents and scales of the tensors: only hashes were asked for")
    with ExitStack() as opened:
        checks = None
        if plan is not None and contents:
            original = _original(source_checkpoint, plan, importance, findings)
            scales = _static_scales(plan, importance, findings)
            signed = with_signed_scales(plan)
            checks = opened.enter_context(opened_checks(folder, headers, groups, original, scales=scales, signed=signed))
            _note_sample(sample, findings)
        expected = expected_hashes(folder, manifest) if hashes else {}
        if finished is not None and plan is not None and contents and source is not None:
            for shard, found in finished.still_holding(plan, groups, files, expected).items():
                findings.take(found)
                del expected[shard]
                done = tensors.pop(shard, [])
                if on_progress is not None:
                    on_progress(shard, sum(output.num_bytes for tensor in done for output in tensor.outputs))
        check_hashes_and_contents(
            folder, expected, tensors, checks, findings,
            workers=workers or default_workers(), sample=sample, on_progress=on_progress,
        )  # fmt: skip
    if plan is not None and config is not None:
        _note_input_range(plan, findings)
        check_fused_scales(plan, folder, stored, findings)
        check_calibrated(
            plan, folder, stored if contents else None, source_checkpoint, findings, workers or default_workers(), sample
        )
        check_config(plan, config, findings)
        check_ignore(plan, config, findings)
    _check_mtp(config, stored, findings)
    return _verification(folder, source, manifest, files, plan, stored, findings, time.monotonic() - started)


def _original(source: Checkpoint | None, plan: Plan, importance: Path | None, findings: Findings) -> Original | None:
    """The source, opened by the safetensors library's headers. CheckpointError: it refuses them."""
    if source is None:
        return None
    from assay_quantize.verify.library import check_headers
    from assay_quantize.verify.original import open_original

    assert source.folder is not None, "opened as a folder"
    parsed = {name: header for shard in source.shards for name, header in read_shard_header(source.folder, shard).items()}
    made = open_original(source, check_headers(source.folder, parsed, source.shards, findings), plan, importance)
    if not made.recomputes:
        findings.not_checked.append(
            "bytes of quantized weights: their scales were searched with channel weights; give the same file with --importance"
        )
    return made


def _static_scales(plan: Plan, importance: Path | None, findings: Findings) -> Mapping[str, float] | None:
    """What the calibration file makes of every static scale; None: it was not given, or is another one."""
    if not needs_calibration(plan):
        return {}
    if importance is not None:
        from assay_quantize.checkpoint.importance import load_importance

        loaded = load_importance(importance)
        if loaded.sha256 == plan.importance_sha256:
            return static_scales(plan, loaded)
        which = (
            f"{importance} is another file (SHA-256 {loaded.sha256[:12]}..., made with {str(plan.importance_sha256)[:12]}...)"
        )
    else:
        which = "it was not given"
    findings.not_checked.append(f"static scales against the calibration file, --importance: {which}")
    return None


def _note_sample(sample: float | None, findings: Findings) -> None:
    if sample is not None:
        findings.not_checked.append(f"contents: {100 * (1 - sample):.3g} % of the slabs were left out (--sample)")


def _note_input_range(plan: Plan, findings: Findings) -> None:
    """What no look at the weights can show of a scheme that rounds activations by a constant."""
    if plan.precision_recipe.get("activations") == "calibrated":
        return
    fixed = sorted({t.scheme for t in plan.tensors if t.scheme and SCHEMES[t.scheme].input_global_scale is not None})
    if fixed:
        findings.not_checked.append(
            f"activations against the constant range that scheme {', '.join(fixed)} gives them: no data was run; "
            "`assay calibrate` counts, on a model that fits into memory, what lies outside"
        )


def num_bytes_of(folder: Path) -> int:
    """Bytes of all shards in a folder: what `on_progress` of `verify` adds up to, headers apart."""
    return sum(path.stat().st_size for path in folder.glob("*.safetensors") if path.is_file())


def _verification(
    folder: Path,
    source: Path | None,
    manifest: Manifest | None,
    files: dict[str, str],
    plan: Plan | None,
    stored: Mapping[str, TensorHeader],
    findings: Findings,
    seconds: float,
) -> Verification:
    bytes_by_role: Counter[str] = Counter()
    for tensor in plan.tensors if plan is not None else ():
        bytes_by_role[tensor.role] += sum(stored[o.name].num_bytes for o in tensor.outputs if o.name in stored)
    errors = findings.errors_by_role()
    return Verification(
        checkpoint=str(folder),
        checkpoint_sha256="" if manifest is None else manifest.checkpoint_sha256,
        source=None if source is None else str(source),
        passed=not findings.damages,
        damages=tuple(findings.damages),
        checks=dict(sorted(findings.checks.items())),
        files=files,
        not_checked=tuple(findings.not_checked),
        # an error of infinity is a damage already, and no number of a record
        worst_relative_error={role: max(seen) for role, seen in sorted(errors.items()) if all(map(math.isfinite, seen))},
        mean_relative_error={
            role: math.fsum(seen) / len(seen) for role, seen in sorted(errors.items()) if all(map(math.isfinite, seen))
        },
        bytes_by_role=dict(bytes_by_role),
        seconds=seconds,
    )


# ------------------------------------------------------------------------------------------------ files
def _manifest(folder: Path, findings: Findings) -> Manifest | None:
    findings.look("manifest")
    try:
        manifest = load_manifest(folder)
    except AssayError as problem:
        findings.damage("manifest", MANIFEST, str(problem))
        return None
    if manifest is None:
        findings.damage("manifest", MANIFEST, _why_no_manifest(folder))
    return manifest


def _why_no_manifest(folder: Path) -> str:
    if (folder / MANIFEST).exists():
        return "is no regular file"
    if (folder / CONFIG).is_file() and not (folder / JOURNAL).exists():
        return "is missing: nothing says that `assay quantize` made this checkpoint, and only what it made can be verified"
    return "is missing: quantization did not finish; run the same `assay quantize` again"


def _json_object(folder: Path, name: str, findings: Findings) -> dict[str, Any] | None:
    findings.look("files")
    try:
        return read_json_object(folder, name, unique_names=True)
    except CheckpointError as problem:
        findings.damage("files", name, str(problem).removeprefix(f"{folder / name}: "))
        return None


def _stored_tensors(folder: Path, findings: Findings) -> dict[str, TensorHeader]:
    """Every tensor on disk, by the shards' own headers."""
    stored: dict[str, TensorHeader] = {}
    for path in sorted(folder.glob("*.safetensors")):
        findings.look("headers")
        try:
            found = read_shard_header(folder, path.name)
        except CheckpointError as problem:
            findings.damage("headers", path.name, str(problem).removeprefix(f"{path}: "))
            continue
        for name, header in found.items():
            if name in stored:
                findings.damage("headers", name, f"is in two shards: {stored[name].shard} and {path.name}")
            stored[name] = header
    return stored


def _check_index(folder: Path, stored: Mapping[str, TensorHeader], findings: Findings) -> None:
    index = _json_object(folder, INDEX_NAME, findings)
    if index is None:
        return
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict):
        findings.damage("index", INDEX_NAME, "has no weight_map")
        return
    listed = {str(shard) for shard in weight_map.values()}
    on_disk = {path.name for path in folder.glob("*.safetensors")}
    findings.look("index", len(stored) + len(on_disk))
    for shard in sorted(on_disk - listed):
        findings.damage("index", shard, "is on disk, but the index puts no tensor in it: vLLM never reads it")
    for shard in sorted(listed - on_disk):
        findings.damage("index", shard, "is in the index, but not on disk")
    for name, shard in weight_map.items():
        header = stored.get(name)
        if header is not None and header.shard != shard:
            findings.damage("index", name, f"is in {header.shard}, the index says {shard}")
        elif header is None and shard in on_disk:
            findings.damage("index", name, f"is in the index, but {shard} does not hold it")
    for name, header in stored.items():
        if name not in weight_map and header.shard in listed:
            findings.damage("index", name, f"is in {header.shard}, but not in the index: vLLM never loads it")
    total = sum(header.num_bytes for header in stored.values())
    metadata = index.get("metadata")
    said = metadata.get("total_size") if isinstance(metadata, dict) else None
    if said != total:
        findings.damage("index", INDEX_NAME, f"says total_size {said}, the shards hold {total} bytes")


# ------------------------------------------------------------------------------------------------ plan
def _expected_plan(
    folder: Path,
    manifest: Manifest,
    config: Mapping[str, Any],
    stored: Mapping[str, TensorHeader],
    source: Checkpoint | None,
    findings: Findings,
) -> Plan | None:
    """The plan made again; None, with a damage, when that is impossible."""
    findings.look("plan")
    try:
        recipe = PrecisionRecipe.model_validate(manifest.precision_recipe)
    except ValidationError as problem:
        what = "; ".join(str(problem.errors()[0]["msg"]).removeprefix("Value error, ").splitlines())
        findings.damage("manifest", MANIFEST, f"its recipe is not one: {what}")
        return None
    if recipe.sha256 != manifest.recipe_sha256:
        findings.damage("manifest", MANIFEST, "its recipe_sha256 is not the hash of its recipe")
    if source is None:
        findings.not_checked.append("kept tensors against the source's bytes: no source given")
        findings.not_checked.append("error of quantized weights: no source given")
        findings.not_checked.append("tensors that are missing altogether, where no other tensor implies them: no source given")
        source = reconstructed_source(folder, config, stored)
        compare_plans = False
    else:
        compare_plans = True
    try:
        plan = make_plan(source, recipe, model=manifest.model, family=None)
        plan = plan.model_copy(update={"importance_sha256": manifest.importance_sha256, "calibrated": manifest.calibrated})
    except PlanError as problem:
        what = "the source" if compare_plans else "what the checkpoint holds"
        findings.damage("plan", str(folder), f"recipe and {what} do not fit: {problem}")
        return None
    if compare_plans and plan_sha256(plan) != manifest.plan_sha256:
        findings.damage("plan", MANIFEST, f"was made from another source or by another plan: plan {manifest.plan_sha256[:12]}, "
                        f"from {source.location} it would be {plan_sha256(plan)[:12]}")  # fmt: skip
    return plan


_COLUMNS_PER_PACKED = {"I32": 8, "U8": 2}
"""dtype of `weight_packed` -> columns of the weight in one of its elements."""


def reconstructed_source(folder: Path, config: Mapping[str, Any], stored: Mapping[str, TensorHeader]) -> Checkpoint:
    """The headers the source must have had, from a quantized checkpoint's own: one weight for every group of packed parts."""
    tensors: dict[str, TensorHeader] = {}
    has_cache_scheme = isinstance(declared := config.get("quantization_config"), dict) and bool(declared.get("kv_cache_scheme"))
    for name, header in stored.items():
        module, leaf = module_of(name), name.rpartition(".")[2]
        scale = stored.get(f"{module}.weight_scale")
        if leaf == "weight_packed" or (leaf == "weight" and scale is not None):
            dtype = scale.dtype if scale is not None and scale.dtype in SOURCE_DTYPES else "BF16"
            packed = _COLUMNS_PER_PACKED.get(header.dtype, 1) if leaf == "weight_packed" else 1
            shape = (*header.shape[:-1], header.shape[-1] * packed)
            tensors[f"{module}.weight"] = header._replace(name=f"{module}.weight", dtype=dtype, shape=shape)
        elif leaf in KV_LEAVES and has_cache_scheme:
            continue  # of no tensor of the source
        elif leaf not in PACKED_LEAVES or not {f"{module}.weight_packed", f"{module}.weight"} & stored.keys():
            tensors[name] = header
    shards = {header.shard: 0 for header in tensors.values()}
    plain = {key: value for key, value in config.items() if key != "quantization_config"}
    return Checkpoint(str(folder), None, plain, tensors, shards, ())


# ------------------------------------------------------------------------------------------------ MTP
def _check_mtp(config: Mapping[str, Any] | None, stored: Mapping[str, TensorHeader], findings: Findings) -> None:
    """The MTP block is whole, or absent and declared so; judged from config and names alone."""
    if config is None:
        return
    packed = (PACKED_LEAVES - {"weight_packed"}) | set(KV_LEAVES)  # of the block's own cache there are none
    names = {re.sub(r"\.weight_packed$", ".weight", name) for name in stored if name.rpartition(".")[2] not in packed}
    try:
        family = family_of(config)
        if block := names_in_block(family, config, names):
            findings.look("mtp", len(block))
        for problem in mtp_problems(family, config, names):
            findings.damage("mtp", problem.where, problem.what)
    except PlanError as error:
        findings.damage("config", CONFIG, str(error))
