"""Small files of a checkpoint, in its folder or on the hub: tokenizer, chat template, generation_config.json."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from assay.errors import CheckpointError
from assay.safe_files import MAX_JSON_BYTES, open_inside, parse_json_object

if TYPE_CHECKING:
    from assay_evaluate.preflight.asking import SmallFiles
    from assay_quantize.checkpoint.checkpoint import Checkpoint


def small_files(label: str, checkpoint: Checkpoint) -> SmallFiles:
    """What questions are asked with. CheckpointError: a file cannot be read, or the hub does not give it."""
    from assay_evaluate.preflight.asking import SmallFiles

    tokenizer_config = json_file(checkpoint, "tokenizer_config.json") or {}
    template = text_file(checkpoint, "chat_template.jinja")
    if template is None:
        inside = (json_file(checkpoint, "chat_template.json") or tokenizer_config).get("chat_template")
        template = None if inside is None else str(inside)
    return SmallFiles(label, checkpoint.files, checkpoint.config, tokenizer_config, template, _damage(checkpoint))


def _damage(checkpoint: Checkpoint) -> str | None:
    """What is wrong with tokenizer.json, in a folder; on the hub it is not looked at, for it may have 30 MB."""
    if checkpoint.folder is None:
        return None
    try:
        json_file(checkpoint, "tokenizer.json")
    except CheckpointError as error:
        return str(error)
    return None


def json_file(checkpoint: Checkpoint, name: str) -> dict[str, Any] | None:
    """The object in a file; None: there is no such file."""
    data = _bytes_of(checkpoint, name)
    return None if data is None else parse_json_object(f"{checkpoint.location}/{name}", data)


def text_file(checkpoint: Checkpoint, name: str) -> str | None:
    data = _bytes_of(checkpoint, name)
    return None if data is None else data.decode("utf-8", errors="replace")


def _bytes_of(checkpoint: Checkpoint, name: str) -> bytes | None:
    if name not in checkpoint.files:
        return None
    folder = checkpoint.folder or _downloaded(checkpoint, name)
    try:
        with open_inside(folder, name) as file:
            return file.read(MAX_JSON_BYTES)
    except OSError as error:
        raise CheckpointError(f"{folder / name}: cannot be read: {error.strerror}") from None


def _downloaded(checkpoint: Checkpoint, name: str) -> Path:
    from huggingface_hub import hf_hub_download

    from assay.hub_errors import HUB_ERRORS, hub_error
    from assay.hub_session import guard_hub

    guard_hub()
    try:
        return Path(hf_hub_download(checkpoint.location, name, revision=checkpoint.revision)).parent
    except HUB_ERRORS as error:
        raise hub_error(checkpoint.location, error, name) from None
