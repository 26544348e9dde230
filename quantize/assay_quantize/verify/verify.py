"""Reopen a quantized checkpoint and trust nothing: neither its manifest, nor its index, nor its config.

With the source at hand, the plan is made again from the source's headers and the recipe in the manifest, every byte of every
tensor is made again and compared, and every copied file is compared with the source's. Without it, the source's headers are
reconstructed from the checkpoint's own, and what that cannot cover is listed in `not_checked`.

What the engine would get wrong must not be wrong here as well, so mistakes of the planner, the header parser and the kernels
are looked for by other means: headers by the safetensors library (`headers.py`), what must be there by names, schemes and
ignore list by compressed-tensors (`config.py`), casts by torch (`slabs.py`), and a tile of weights by the definition in torch
(`definition.py`). What those still share with the engine, each of them says.

Alone, it reads all of the source itself. Of shards that were checked while they were made (`finished.py`), weights may have
been compared with the rows that the engine had read (`judged.py`): of those it shares the reading of the source, but for
pieces of every slab.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from assay.callbacks import Progress
from assay.errors import AssayError, CheckpointError, PlanError
from assay.recipes.precision import PrecisionRecipe
from assay.records.manifest import MANIFEST, Manifest, load_manifest
from assay.records.plan import Plan, TensorPlan
from assay.records.verification import Verification, stamps_of_files
from assay_quantize.checkpoint.checkpoint import Checkpoint, open_checkpoint
from assay_quantize.checkpoint.file_names import CONFIG, JOURNAL
from assay_quantize.checkpoint.headers import TensorHeader
from assay_quantize.formats.schemes import CODES_PER_ELEMENT, KV_LEAVES, PART_LEAVES, SCHEMES, SOURCE_DTYPES, module_of
from assay_quantize.plan.planner import make_plan, plan_sha256
from assay_quantize.verify.findings import Findings

if TYPE_CHECKING:
    from assay_quantize.verify.config import Groups
    from assay_quantize.verify.finished import FinishedShards


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
        what = "is a file" if folder.exists() else "no such folder"
        raise CheckpointError(f"{folder}: {what}; give the folder of a quantized checkpoint")
    source_checkpoint = None if source is None else open_checkpoint(source)
    # only now: numba and torch take seconds to import, and a folder that does not exist is to be reported before
    from assay_quantize.checkpoint.importance import load_importance
    from assay_quantize.kernels.devices import default_workers
    from assay_quantize.verify import config as configs
    from assay_quantize.verify import headers as files
    from assay_quantize.verify.calibrated.layers import check_calibrated
    from assay_quantize.verify.contents import check_hashes_and_contents, contents_by_shard, expected_hashes, opened_checks
    from assay_quantize.verify.original import calibrated_scales, open_original

    started, findings = time.monotonic(), Findings()
    workers = workers or default_workers()
    manifest = _manifest(folder, findings)
    stamps = stamps_of_files(folder)
    config = files.json_object(folder, CONFIG, findings)
    stored = files.stored_tensors(folder, findings)
    shards = sorted({header.shard for header in stored.values()})
    headers = files.check_headers(folder, stored, shards, findings)
    files.check_metadata(folder, shards, findings)
    files.check_index(folder, stored, findings)
    plan = None
    if manifest is not None:
        files.check_files(folder, manifest, hashes, findings)
        if source_checkpoint is not None:
            files.check_copies(folder, manifest, source_checkpoint, findings)
        if config is not None:
            plan = _expected_plan(folder, manifest, config, stored, source_checkpoint, findings)
    tensors: dict[str, list[TensorPlan]] = {}
    groups: Groups | None = None
    if plan is None or config is None:
        findings.not_checked.append("contents, scales, ignore list and MTP: there is no plan to compare with")
    else:
        files.check_planned(plan, stored, findings, shards=source is not None)
        recipe = PrecisionRecipe.model_validate(plan.precision_recipe)
        groups = configs.check_targets(recipe, config, stored, findings)
        if source_checkpoint is not None:
            configs.check_nothing_lost(source_checkpoint, recipe, stored, findings)
        if contents:
            tensors = contents_by_shard(plan.tensors, headers)
        else:
            findings.not_checked.append("contents and scales of the tensors: only hashes were asked for")
    expected = expected_hashes(folder, manifest) if hashes else {}
    with ExitStack() as opened:
        checks = None
        if plan is not None and contents:
            loaded, original = None if importance is None else load_importance(importance), None
            if source_checkpoint is not None:
                original = open_original(source_checkpoint, files.source_headers(source_checkpoint, findings), plan, loaded)
                if not original.recomputes:
                    findings.not_checked.append(
                        "bytes of quantized weights: their scales were searched with channel weights; give the same file with "
                        "--importance"
                    )
            scales = calibrated_scales(plan, loaded)
            if scales is None:
                made_with = f"made with {str(plan.importance_sha256)[:12]}..."
                which = (
                    "it was not given"
                    if loaded is None
                    else f"{importance} is another file (SHA-256 {loaded.sha256[:12]}..., {made_with})"
                )
                findings.not_checked.append(f"static scales against the calibration file, --importance: {which}")
            checks = opened.enter_context(opened_checks(folder, headers, groups, original, plan, scales))
            if sample is not None:
                findings.not_checked.append(f"contents: {100 * (1 - sample):.3g} % of the slabs were left out (--sample)")
            if finished is not None and source is not None:
                for shard, shard_findings in finished.valid_findings(plan, groups, stamps, expected).items():
                    findings.merge(shard_findings)
                    del expected[shard]
                    done = tensors.pop(shard, [])
                    if on_progress is not None:
                        on_progress(shard, sum(output.num_bytes for tensor in done for output in tensor.outputs))
        check_hashes_and_contents(
            folder, expected, tensors, checks, findings, workers=workers, sample=sample, on_progress=on_progress
        )
    if plan is not None and config is not None:
        # what no look at the weights can show of a scheme that rounds activations by a constant
        fixed = sorted({t.scheme for t in plan.tensors if t.scheme and SCHEMES[t.scheme].input_global_scale is not None})
        if fixed and plan.precision_recipe.get("activations") != "calibrated":
            findings.not_checked.append(
                f"activations against the constant range that scheme {', '.join(fixed)} gives them: no data was run; "
                "`assay calibrate` counts, on a model that fits into memory, what lies outside"
            )
        configs.check_fused_scales(plan, folder, stored, findings)
        check_calibrated(plan, folder, stored if contents else None, source_checkpoint, findings, workers, sample)
        configs.check_config(plan, config, findings)
        configs.check_ignore(plan, config, findings)
    configs.check_mtp(config, stored, findings)
    bytes_by_role: Counter[str] = Counter()
    for tensor in plan.tensors if plan is not None else ():
        bytes_by_role[tensor.role] += sum(stored[o.name].num_bytes for o in tensor.outputs if o.name in stored)
    # an error of infinity is a damage already, and no number of a record
    errors = {role: e for role, e in sorted(findings.errors_by_role().items()) if all(map(math.isfinite, e))}
    return Verification(
        checkpoint=str(folder),
        checkpoint_sha256="" if manifest is None else manifest.checkpoint_sha256,
        source=None if source is None else str(source),
        passed=not findings.damages,
        damages=tuple(findings.damages),
        checks=dict(sorted(findings.checks.items())),
        files=stamps,
        not_checked=tuple(findings.not_checked),
        worst_relative_error={role: max(of_role) for role, of_role in errors.items()},
        mean_relative_error={role: math.fsum(of_role) / len(of_role) for role, of_role in errors.items()},
        bytes_by_role=dict(bytes_by_role),
        seconds=time.monotonic() - started,
    )


def num_bytes_of(folder: Path) -> int:
    """Bytes of all shards in a folder: what `on_progress` of `verify` adds up to, headers apart."""
    return sum(path.stat().st_size for path in folder.glob("*.safetensors") if path.is_file())


def _manifest(folder: Path, findings: Findings) -> Manifest | None:
    findings.count("manifest")
    try:
        manifest = load_manifest(folder)
    except AssayError as problem:
        findings.damage("manifest", MANIFEST, str(problem))
        return None
    if manifest is None:
        what = "is missing: quantization did not finish; run the same `assay quantize` again"
        if (folder / MANIFEST).exists():
            what = "is no regular file"
        elif (folder / CONFIG).is_file() and not (folder / JOURNAL).exists():
            what = "is missing: nothing says that `assay quantize` made this checkpoint, and only what it made can be verified"
        findings.damage("manifest", MANIFEST, what)
    return manifest


def _expected_plan(
    folder: Path,
    manifest: Manifest,
    config: Mapping[str, Any],
    stored: Mapping[str, TensorHeader],
    source: Checkpoint | None,
    findings: Findings,
) -> Plan | None:
    """The plan made again; None, with a damage, when that is impossible."""
    findings.count("plan")
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
    try:
        checkpoint = source or reconstructed_source(folder, config, stored)
        plan = make_plan(checkpoint, recipe, model=manifest.model, family=None)
        plan = plan.model_copy(update={"importance_sha256": manifest.importance_sha256, "calibrated": manifest.calibrated})
    except PlanError as problem:
        what = "what the checkpoint holds" if source is None else "the source"
        findings.damage("plan", str(folder), f"recipe and {what} do not fit: {problem}")
        return None
    if source is not None and plan_sha256(plan) != manifest.plan_sha256:
        findings.damage("plan", MANIFEST, f"was made from another source or by another plan: plan {manifest.plan_sha256[:12]}, "
                        f"from {source.location} it would be {plan_sha256(plan)[:12]}")  # fmt: skip
    return plan


def reconstructed_source(folder: Path, config: Mapping[str, Any], stored: Mapping[str, TensorHeader]) -> Checkpoint:
    """The headers the source must have had, from a quantized checkpoint's own: one weight for every group of packed parts."""
    tensors: dict[str, TensorHeader] = {}
    has_cache_scheme = isinstance(declared := config.get("quantization_config"), dict) and bool(declared.get("kv_cache_scheme"))
    for name, header in stored.items():
        module, leaf = module_of(name), name.rpartition(".")[2]
        scale = stored.get(f"{module}.weight_scale")
        if leaf == "weight_packed" or (leaf == "weight" and scale is not None):
            dtype = scale.dtype if scale is not None and scale.dtype in SOURCE_DTYPES else "BF16"
            num_codes = CODES_PER_ELEMENT.get(header.dtype, 1) if leaf == "weight_packed" else 1
            shape = (*header.shape[:-1], header.shape[-1] * num_codes)
            tensors[f"{module}.weight"] = header._replace(name=f"{module}.weight", dtype=dtype, shape=shape)
        elif leaf in KV_LEAVES and has_cache_scheme:
            continue  # of no tensor of the source
        elif leaf not in PART_LEAVES or not {f"{module}.weight_packed", f"{module}.weight"} & stored.keys():
            tensors[name] = header
    shards = {header.shard: 0 for header in tensors.values()}
    plain = {key: value for key, value in config.items() if key != "quantization_config"}
    return Checkpoint(str(folder), None, plain, tensors, shards, ())
