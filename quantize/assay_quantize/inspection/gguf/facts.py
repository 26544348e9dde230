"""What a model in GGUF files is: architecture, types by role and block, bits per weight, MTP block, who made it."""

from __future__ import annotations

from collections import defaultdict

from assay.foreign_text import shown
from assay.records.inspection import CheckpointFacts, MtpFacts, StoredForm
from assay_quantize.decoding.gguf_header import GgufTensor
from assay_quantize.inspection.file_checks import card_metadata
from assay_quantize.inspection.gguf.model import GgufModel
from assay_quantize.inspection.structure_checks import ranges

FAMILIES = {
    "afmoe": "afmoe", "bailingmoe2": "bailing_moe", "dots1": "dots1", "ernie4_5-moe": "ernie4_5_moe",
    "exaone-moe": "exaone_moe", "gemma4": "gemma4", "glm-dsa": "glm_moe_dsa", "glm4moe": "glm4_moe",
    "granitehybrid": "granitemoehybrid", "granitemoe": "granitemoe", "hunyuan-moe": "hunyuan_v1_moe", "lfm2moe": "lfm2_moe",
    "llama4": "llama4", "mimo2": "mimo_v2_flash", "minimax-m2": "minimax_m2", "nemotron_h_moe": "nemotron_h", "olmoe": "olmoe",
    "phimoe": "phimoe", "qwen2moe": "qwen2_moe", "qwen35moe": "qwen3_5_moe", "qwen3moe": "qwen3_moe",
    "qwen3next": "qwen3_next", "qwen3vlmoe": "qwen3_vl_moe", "step35": "step3p5",
}  # fmt: skip
"""`general.architecture` -> assay's family, where one of llama.cpp's is one of assay's. `deepseek2` is several, `llama` and
`gpt-oss` none."""


def facts_of(model: GgufModel) -> CheckpointFacts:
    """From headers alone."""
    by_form: dict[tuple[str, str], list[GgufTensor]] = defaultdict(list)
    for name, tensor in model.tensors.items():
        if len(tensor.shape) > 1 and name.endswith(".weight"):
            by_form[model.role(name), tensor.kind].append(tensor)
    known = [tensor for tensor in model.tensors.values() if tensor.num_bytes]
    num_elements, num_bytes = sum(tensor.num_elements for tensor in known), sum(tensor.num_bytes for tensor in known)
    architecture, card = model.architecture, card_metadata(model.files) or {}
    return CheckpointFacts(
        family=FAMILIES.get(architecture or ""),
        architecture=None if architecture is None else shown(architecture, 80),
        model_type=None,
        num_layers=len(model.trunk) or None,
        num_experts=model.count("expert_count") or None,
        num_elements=num_elements,
        num_bytes=num_bytes,
        bits_per_weight=8 * num_bytes / num_elements if num_elements else 0.0,
        forms=tuple(_stored_form(model, role, kind, tensors) for (role, kind), tensors in sorted(by_form.items())),
        method=_method(model),
        producer=_text(model, "general.quantized_by"),
        activations=None,
        kv_cache=None,
        mtp=_mtp(model),
        base_model=_base_model(model) or _card(card.get("base_model")),
        licence=_text(model, "general.license") or _card(card.get("license")),
    )


def _stored_form(model: GgufModel, role: str, kind: str, tensors: list[GgufTensor]) -> StoredForm:
    blocks = {number for tensor in tensors if (number := model.block_of(tensor.name)) is not None}
    return StoredForm(
        role=role,
        form=kind,
        layers=ranges(sorted(blocks)),
        num_weights=len(tensors),
        num_elements=sum(tensor.num_elements for tensor in tensors),
        num_bytes=sum(tensor.num_bytes for tensor in tensors),
    )


def _text(model: GgufModel, key: str) -> str | None:
    told = model.main.text(key)
    return shown(told, 100) if told else None


def _card(told: object) -> str | None:
    return shown(told[0] if isinstance(told, list) and told else told, 100) if told else None


def _method(model: GgufModel) -> str:
    """`general.file_type` by the name that llama-quantize gives it."""
    from gguf import LlamaFileType

    told = model.main.count("general.file_type")
    name = next((kind.name for kind in LlamaFileType if kind == told), None)
    return "GGUF" if name is None else f"GGUF, {name.removeprefix('MOSTLY_').removeprefix('ALL_')}"


def _mtp(model: GgufModel) -> MtpFacts:
    kinds = {tensor.kind for name, tensor in model.tensors.items() if model.role(name) == "mtp" and len(tensor.shape) > 1}
    return MtpFacts(declared=model.declared_mtp, stored=len(model.mtp_blocks), form=", ".join(sorted(kinds)) or None)


def _base_model(model: GgufModel) -> str | None:
    """`zai-org/GLM-4.5-Air` of its address, else its name."""
    address = model.main.text("general.base_model.0.repo_url") or ""
    if address.startswith("https://huggingface.co/") and address.count("/") == 4:
        return shown(address.removeprefix("https://huggingface.co/"), 100)
    return shown(address, 100) if address else _text(model, "general.base_model.0.name")
