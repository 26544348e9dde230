"""Which files beside the weights go from a source into the new checkpoint: tokenizer, chat template, generation config...

One rule for folders and the hub; a plan names the files with their content, and who downloads or copies them goes by the plan.
Nothing of a source is executed or followed out of its folder: Python files (remote code) are not copied, nor are symbolic
links that lead elsewhere, other weight formats, or the source's model card.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from assay.records.run import WRITTEN_ABOUT
from assay.safe_files import stays_inside
from assay.safetensors_index import INDEX_NAME
from assay_quantize.checkpoint.file_names import CONFIG, JOURNAL, WEIGHT_SUFFIXES

MAX_COPIED_BYTES = 256 << 20
"""A file beside the weights that is larger than this is not a tokenizer."""
MADE_HERE = WRITTEN_ABOUT | {CONFIG, INDEX_NAME, JOURNAL}
OF_THE_SOURCE = frozenset({"quantize_config.json", "quant_config.json", "hf_quant_config.json", "params.json"})
"""Not copied: they describe the source's own weights, and vLLM takes the last one for a model's config."""


def is_copied(name: str, num_bytes: int) -> bool:
    """Whether a file of this name and size is copied, wherever it lies."""
    return not _belongs_to_weights(name) and _reason_not_copied(name, num_bytes) is None


def copied_files(folder: Path) -> list[str]:
    """Names of the files in `folder` that are copied, sorted."""
    files = (path for path in _plain_files(folder) if is_copied(path.name, path.stat().st_size))
    return [path.name for path in files if stays_inside(path, folder)]


def copied_of(data: Mapping[str, str]) -> list[str]:
    """Of the files that a plan is made from (`Plan.source_files`) those that are copied, sorted."""
    return sorted(name for name in data if name != CONFIG and not name.endswith(".safetensors"))


def list_left_out(folder: Path) -> list[str]:
    """A line for every file that somebody might miss in the copy, with the reason."""
    lines = []
    for path in _plain_files(folder):
        if _belongs_to_weights(path.name):
            continue
        reason = _reason_not_copied(path.name, path.stat().st_size)
        if reason is None and not stays_inside(path, folder):
            reason = "it is a link that leads out of the folder"
        if reason is not None:
            lines.append(f"{path} is not copied: {reason}")
    return lines


def _plain_files(folder: Path) -> list[Path]:
    return [path for path in sorted(folder.iterdir()) if path.is_file()]


def _belongs_to_weights(name: str) -> bool:
    """Weights, and files that describe those of the source or are made anew here; nobody misses them. Hidden files, too."""
    known = name in MADE_HERE | OF_THE_SOURCE or name.endswith(".index.json")
    return known or name.startswith(".") or Path(name).suffix in WEIGHT_SUFFIXES


def _reason_not_copied(name: str, num_bytes: int) -> str | None:
    if name.endswith(".py"):
        return "it is code; a model that needs it gets it from its own repository"
    if re.fullmatch(r"\w[\w.+ -]*", name) is None:
        return "its name has other characters than letters, digits, space and `_.+-`"
    if num_bytes > MAX_COPIED_BYTES:
        return f"larger than {MAX_COPIED_BYTES >> 20} MiB"
    return None
