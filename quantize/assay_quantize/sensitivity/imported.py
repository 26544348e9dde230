"""Sensitivity scores of other tools, as far as their groups are parts of ours.

AutoRound's AutoScheme (0.14) keeps one JSON file for each scheme in `~/.cache/auto_round` (`AR_AUTO_SCHEME_CACHE`):
`{"version": 1, "score_granularity": "per_op", "scheme": {...}, "layer_scores": {module: [bits, loss]}, ...}`, where loss is the
sum of |gradient * rounding error| (`auto_scheme/delta_loss.py`).

ModelOpt's AutoQuantize (0.47) keeps its state with `torch.save`, classes of its own inside: a pickle, which is not read here.
What is needed of it is `search_state["candidate_stats"]`, written as JSON by `HOW_TO_EXPORT`: a group of modules, the formats
tried (`NVFP4_DEFAULT_CFG(effective-bits: 4.5)`), and the score of each: the sum of (gradient * output error)^2, or KL.

Their scores are in units of their own; only the order of parts can be compared with ours.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from assay.errors import QuantizeError
from assay.foreign_text import shown
from assay.safe_files import read_json_object
from assay_quantize.sensitivity.parts import Key, Layout

Tool = Literal["modelopt", "autoround"]

HOW_TO_EXPORT = (
    "json.dump({name: {'formats': [str(f) for f in s['formats']], 'scores': [float(x) for x in s['scores']], 'module_names': "
    "list(s['module_names'])} for name, s in search_state['candidate_stats'].items()}, open('scores.json', 'w'))"
)

MODELOPT_SCHEMES = {
    "INT4_BLOCKWISE_WEIGHT_ONLY_CFG": "w4a16", "INT4_AWQ_CFG": "w4a16", "W4A16_NVFP4_CFG": "nvfp4a16",
    "NVFP4_DEFAULT_CFG": "nvfp4", "NVFP4_AWQ_LITE_CFG": "nvfp4", "MXFP4_DEFAULT_CFG": "mxfp4", "MXFP8_DEFAULT_CFG": "mxfp8",
    "FP8_2D_BLOCKWISE_WEIGHT_ONLY_CFG": "fp8_block", "FP8_PER_CHANNEL_PER_TOKEN_CFG": "fp8_channel", "INT8_DEFAULT_CFG": "w8a8",
    "INT8_SMOOTHQUANT_CFG": "w8a8",
}  # fmt: skip
"""Their format -> the nearest scheme of ours. One scale per tensor (FP8_DEFAULT_CFG) has none."""

_AUTOROUND = {
    ("int", 4, 16, 128, True): "w4a16", ("int", 4, 16, 64, True): "w4a16_g64", ("int", 4, 16, 32, True): "w4a16_g32",
    ("int", 4, 16, -1, True): "w4a16_channel", ("int", 4, 16, 128, False): "w4a16_asym", ("nv_fp", 4, 4, 16, True): "nvfp4",
    ("nv_fp", 4, 16, 16, True): "nvfp4a16", ("mx_fp", 4, 4, 32, True): "mxfp4", ("mx_fp", 8, 8, 32, True): "mxfp8",
    ("fp", 8, 8, (128, 128), True): "fp8_block", ("fp", 8, 8, -1, True): "fp8_channel", ("int", 8, 8, -1, True): "w8a8",
}  # fmt: skip
"""(data_type, bits, act_bits, group_size, sym) of their scheme -> ours."""

_PRESETS = {
    "W4A16": "w4a16", "NVFP4": "nvfp4", "MXFP4": "mxfp4", "MXFP8": "mxfp8", "FP8_BLOCK": "fp8_block", "INT8_W8A8": "w8a8",
}  # fmt: skip
"""The same by their names."""


@dataclass(frozen=True)
class ImportedScores:
    """scores: (part, scheme) -> their score, summed over the part's modules. notes: what of the file is no part of ours."""

    tool: Tool
    scores: Mapping[tuple[Key, str], float]
    notes: tuple[str, ...]


def read_scores(path: Path, layout: Layout) -> ImportedScores:
    """Scores of either tool, told apart by what the file holds. QuantizeError: it is neither, or of another model."""
    if path.suffix in (".pth", ".pt", ".pkl"):
        raise QuantizeError(
            f"{path}: is a pickle, which could run code and is not read; where it was made, write its scores as JSON: "
            f"{HOW_TO_EXPORT}"
        )
    data = read_json_object(path.parent, path.name)
    if isinstance(data.get("layer_scores"), dict):
        imported = _autoround(path, data, layout)
    elif data and all(isinstance(group, dict) and {"formats", "scores"} <= group.keys() for group in data.values()):
        imported = _modelopt(path, data, layout)
    else:
        raise QuantizeError(
            f"{path}: is neither a score file of AutoRound's AutoScheme (with `layer_scores`) nor ModelOpt's `candidate_stats` "
            f"as JSON; the latter is written by {HOW_TO_EXPORT}"
        )
    if not imported.scores:
        raise QuantizeError(
            f"{path}: holds no score of a part of {layout.checkpoint.location}: {'; '.join(imported.notes[:3])}"
        )
    return imported


def _autoround(path: Path, data: Mapping[str, Any], layout: Layout) -> ImportedScores:
    scheme_of_file: Any = data.get("scheme")
    signature = _signature(scheme_of_file) if isinstance(scheme_of_file, dict) else None
    scheme = _PRESETS.get(str(scheme_of_file)) if signature is None else _AUTOROUND.get(signature)
    if scheme is None:
        known = ", ".join(sorted(set(_AUTOROUND.values())))
        raise QuantizeError(f"{path}: its `scheme` {shown(str(scheme_of_file)[:200])} is none of ours ({known})")
    sums: dict[tuple[Key, str], float] = defaultdict(float)
    unknown = []
    for module, entry in data["layer_scores"].items():
        keys = _parts_of([module], layout)
        score = entry[1] if isinstance(entry, list) and len(entry) == 2 else None
        if not isinstance(score, int | float):
            raise QuantizeError(f"{path}: layer_scores.{shown(module)}: not [bits, loss]")
        if len(keys) == 1:
            sums[(keys[0], scheme)] += float(score)
        else:
            unknown.append(module)
    return ImportedScores("autoround", _of_layout(sums, layout), _note_of_unknown(unknown, "modules"))


def _signature(scheme: Mapping[str, Any]) -> tuple[Any, ...]:
    group = scheme.get("group_size")
    bits, act = scheme.get("bits"), scheme.get("act_bits")
    kind, symmetric = scheme.get("data_type"), scheme.get("sym")
    return (
        kind, bits, 16 if act is None or act > 8 else act, tuple(group) if isinstance(group, list) else group,
        True if symmetric is None else symmetric,
    )  # fmt: skip


def _modelopt(path: Path, data: Mapping[str, Any], layout: Layout) -> ImportedScores:
    sums: dict[tuple[Key, str], float] = defaultdict(float)
    unknown, formats = [], set()
    for name, group in data.items():
        modules = group.get("module_names") or [name]
        keys = _parts_of(modules, layout)
        if len(keys) != 1:
            unknown.append(name)
            continue
        if len(group["formats"]) != len(group["scores"]):
            raise QuantizeError(f"{path}: {shown(name)}: {len(group['formats'])} formats and {len(group['scores'])} scores")
        for text, score in zip(group["formats"], group["scores"], strict=True):
            format_ = str(text).partition("(")[0]
            if (scheme := MODELOPT_SCHEMES.get(format_)) is not None:
                sums[(keys[0], scheme)] += float(score)
            elif format_ != "NONE":
                formats.add(format_)
    notes = _note_of_unknown(unknown, "groups") + (
        (f"formats without a scheme of ours: {', '.join(sorted(formats))}",) if formats else ()
    )
    return ImportedScores("modelopt", _of_layout(sums, layout), notes)


def _parts_of(modules: list[str], layout: Layout) -> list[Key]:
    """The parts whose weights lie in these modules; a module may be one weight's, or hold all experts."""
    begins = tuple(f"{module}." for module in modules)
    return [key for key, names in layout.weights.items() if any(name.startswith(begins) for name in names)]


def _of_layout(sums: Mapping[tuple[Key, str], float], layout: Layout) -> dict[tuple[Key, str], float]:
    """Of schemes that are looked at here."""
    return {pair: score for pair, score in sums.items() if pair[1] in layout.sizes[pair[0]]}


def _note_of_unknown(unknown: list[str], what: str) -> tuple[str, ...]:
    if not unknown:
        return ()
    return (f"{len(unknown)} {what} are no part of this model, {shown(unknown[0])} among them",)
