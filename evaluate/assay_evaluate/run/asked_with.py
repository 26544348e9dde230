"""What stands between a question and the tokens the model sees: chat template, its arguments, parser, seeds."""

from __future__ import annotations

from pathlib import Path

from assay.recipes.model import Serving
from assay.records.base import sha256_of
from assay.records.measurement import AskedWith
from assay.records.serving import Fingerprint
from assay.safe_files import read_json_object
from assay_evaluate.asking.dialect import Dialect


def describe(
    checkpoint: Path | None, serving: Serving, fingerprint: Fingerprint, dialect: Dialect, sends_seeds: bool
) -> AskedWith:
    """For the record; reads the checkpoint's template, or the one that a flag puts in its place."""
    flag = fingerprint.flags.get("chat-template")
    return AskedWith(
        is_chat=dialect.is_chat,
        chat_template_sha256=template_sha256(checkpoint, None if flag is None else Path(str(flag))),
        chat_template_kwargs=dialect.chat_template_kwargs,
        reasoning_parser=serving.reasoning_parser,
        tool_call_parser=serving.tool_call_parser,
        sends_seeds=sends_seeds,
    )


def template_sha256(checkpoint: Path | None, instead: Path | None = None) -> str | None:
    """Hash of the chat template's text; None if there is none here to read (a server elsewhere may have one).

    CheckpointError: tokenizer_config.json is no JSON object.
    """
    for file in (instead, None if checkpoint is None else checkpoint / "chat_template.jinja"):
        if file is not None and file.is_file():
            return sha256_of(file.read_text(encoding="utf-8", errors="replace"))
    if checkpoint is None:
        return None
    there = (checkpoint / "tokenizer_config.json").is_file()
    template = read_json_object(checkpoint, "tokenizer_config.json").get("chat_template") if there else None
    return None if template is None else sha256_of(template)
