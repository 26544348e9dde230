"""What a checkpoint is: family, forms by role and layer, bits per weight, MTP block, KV cache, who claims to have made it."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Mapping
from typing import Any

from assay.errors import PlanError
from assay.foreign_text import shown
from assay.recipes.family_names import split_layer
from assay.recipes.mtp import declared_layers
from assay.records.inspection import CheckpointFacts, MtpFacts, StoredForm
from assay_quantize.checkpoint.headers import TensorHeader
from assay_quantize.checkpoint.stored import PLAIN, Weight
from assay_quantize.inspection.file_checks import card_metadata
from assay_quantize.inspection.structure_checks import layer_ranges, ranges, stored_mtp_layers
from assay_quantize.inspection.subject import Subject


def facts_of(subject: Subject) -> CheckpointFacts:
    """From headers and small files alone."""
    by_form: dict[tuple[str, str], list[Weight]] = defaultdict(list)
    for weight in subject.stored.weights.values():
        by_form[subject.role(weight), weight.form].append(weight)
    forms = [_stored_form(subject, role, form, weights) for (role, form), weights in sorted(by_form.items())]
    others = list(subject.stored.others.values())
    num_elements = sum(form.num_elements for form in forms) + sum(_elements(header) for header in others)
    num_bytes = sum(header.num_bytes for header in subject.tensors.values())
    architectures = subject.config.get("architectures")
    architecture = architectures[0] if isinstance(architectures, list) and architectures else None
    card = card_metadata(subject.files) or {}
    return CheckpointFacts(
        family=subject.family,
        architecture=None if architecture is None else shown(architecture, 80),
        model_type=_text(subject.config.get("model_type")),
        num_layers=subject.num_layers,
        num_experts=subject.num_experts,
        num_elements=num_elements,
        num_bytes=num_bytes,
        bits_per_weight=8 * num_bytes / num_elements if num_elements else 0.0,
        forms=tuple(forms),
        method=_method(subject),
        producer=_producer(subject),
        activations=subject.declared.activations,
        kv_cache=subject.declared.kv_cache or _kv_scales(subject),
        mtp=_mtp(subject),
        base_model=_base_model(subject, card),
        licence=_text(card.get("license")),
    )


def _stored_form(subject: Subject, role: str, form: str, weights: list[Weight]) -> StoredForm:
    return StoredForm(
        role=role,
        form=form,
        layers=layer_ranges(weights),
        num_weights=len(weights),
        num_elements=sum(weight.num_elements for weight in weights),
        num_bytes=sum(weight.num_bytes for weight in weights),
    )


def _elements(header: TensorHeader) -> int:
    return math.prod(header.shape) if header.dtype in PLAIN else 0


def _text(value: Any) -> str | None:
    if isinstance(value, list):
        value = ", ".join(str(item) for item in value)
    return shown(value, 100) if value else None


def _method(subject: Subject) -> str | None:
    declared = subject.declared
    if declared.method is None:
        return None
    if declared.algorithms:
        return f"{declared.method}, MIXED_PRECISION: {'; '.join(_by_algorithm(declared.algorithms))}"
    algorithm = declared.quantization.get("quant_algo") or declared.quantization.get("format")
    return f"{declared.method}, {shown(algorithm, 40)}" if algorithm else declared.method


def _by_algorithm(algorithms: Mapping[str, str]) -> list[str]:
    """Which layers each algorithm is for, by the entries of quantized_layers."""
    layers: dict[str, set[int]] = defaultdict(set)
    counted: Counter[str] = Counter()
    for entry, algorithm in algorithms.items():
        counted[algorithm] += 1
        if (at := split_layer(f"{entry}.")) is not None:
            layers[algorithm].add(at.layer)
    return [
        f"{shown(algorithm, 40)} of {count:,} modules"
        + (f" in layers {ranges(sorted(layers[algorithm]))}" if layers[algorithm] else "")
        for algorithm, count in sorted(counted.items())
    ]


def _producer(subject: Subject) -> str | None:
    manifest = subject.json.get("assay_manifest.json")
    if manifest is not None:
        return f"assay {shown(manifest.get('assay_version', ''), 30)}".strip()
    if "recipe.yaml" in subject.files.names and subject.declared.method == "compressed-tensors":
        return f"llm-compressor ({subject.declared.producer})"
    return subject.declared.producer


def _kv_scales(subject: Subject) -> str | None:
    scales = [name for name in subject.stored.others if name.endswith(("k_scale", "v_scale"))]
    return f"{len(scales)} scales are stored, nothing is claimed" if scales else None


def _mtp(subject: Subject) -> MtpFacts:
    try:
        declared = declared_layers(subject.config)
    except PlanError:
        declared = None
    forms = sorted({weight.form for weight in subject.stored.weights.values() if subject.role(weight) == "mtp"})
    return MtpFacts(declared=declared, stored=stored_mtp_layers(subject), form=", ".join(forms) or None)


def _base_model(subject: Subject, card: Mapping[str, Any]) -> str | None:
    told = _text(card.get("base_model"))
    if told is None and isinstance(name := subject.config.get("_name_or_path"), str) and name.count("/") == 1:
        told = f"{shown(name, 100)} (by config.json)"
    return told
