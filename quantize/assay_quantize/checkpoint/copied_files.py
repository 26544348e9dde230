"""Which files beside the weights go from a source into the new checkpoint: tokenizer, chat template, generation config...

One rule for folders and the hub; a plan names the files with their content, and who downloads or copies them goes by the plan.
Of folders inside a checkpoint only that with further chat templates is looked into (transformers: `additional_chat_templates`).
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


TEMPLATES = "additional_chat_templates"
"""Folder of a checkpoint: `tool_use.jinja` in it is the chat template that a tokenizer knows as `tool_use`."""


def is_template_beside(name: str) -> bool:
    """Whether a path in a checkpoint is that of a further chat template."""
    folder, _, file = name.partition("/")
    return folder == TEMPLATES and re.fullmatch(r"\w[\w.+ -]*\.jinja", file) is not None


def is_copied(name: str, num_bytes: int) -> bool:
    """Whether a file of this path and size is copied."""
    return not _belongs_to_weights(name) and _reason_not_copied(name, num_bytes) is None


def copied_files(folder: Path) -> list[str]:
    """Paths of the files in `folder` that are copied, sorted."""
    files = ((path, path.relative_to(folder).as_posix()) for path in _plain_files(folder))
    return [name for path, name in files if is_copied(name, path.stat().st_size) and stays_inside(path, folder)]


def copied_of(data: Mapping[str, str]) -> list[str]:
    """Of the files that a plan is made from (`Plan.source_files`) those that are copied, sorted."""
    return sorted(name for name in data if name != CONFIG and not name.endswith(".safetensors"))


def list_left_out(folder: Path) -> list[str]:
    """A line for every file that somebody might miss in the copy, with the reason."""
    lines = []
    for path in _plain_files(folder):
        if _belongs_to_weights(path.name):
            continue
        reason = _reason_not_copied(path.relative_to(folder).as_posix(), path.stat().st_size)
        if reason is None and not stays_inside(path, folder):
            reason = "it is a link that leads out of the folder"
        if reason is not None:
            lines.append(f"{path} is not copied: {reason}")
    return lines


def _plain_files(folder: Path) -> list[Path]:
    return [path for path in sorted([*folder.iterdir(), *(folder / TEMPLATES).glob("*")]) if path.is_file()]


def _belongs_to_weights(name: str) -> bool:
    """Weights, and files that describe those of the source or are made anew here; nobody misses them. Hidden files, too."""
    known = name in MADE_HERE | OF_THE_SOURCE or name.endswith(".index.json")
    return known or name.startswith(".") or Path(name).suffix in WEIGHT_SUFFIXES


def _reason_not_copied(name: str, num_bytes: int) -> str | None:
    if name.endswith(".py"):
        return "it is code; a model that needs it gets it from its own repository"
    if "/" in name and not is_template_beside(name):
        return "it is no chat template (*.jinja)"
    if re.fullmatch(r"\w[\w.+ -]*", name.rpartition("/")[2]) is None:
        return "its name has other characters than letters, digits, space and `_.+-`"
    if num_bytes > MAX_COPIED_BYTES:
        return f"larger than {MAX_COPIED_BYTES >> 20} MiB"
    return None
