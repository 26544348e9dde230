"""`assay judge LINK`: one checkpoint instead of two: inspect it, screen it against its base, say what would tell more."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

from assay.callbacks import Say, Track, say_nothing, track_nothing
from assay.errors import AssayError
from assay.foreign_text import shown
from assay.records.inspection import Inspection
from assay.records.link import LinkAnswer, LinkStep
from assay.records.manifest import load_manifest
from assay.records.pack import PACK_NAME
from assay.records.screening import Screening
from assay_pipeline.comparison.inspecting import inspect
from assay_pipeline.comparison.screen_passes import Arithmetic
from assay_pipeline.comparison.screening import PAGE_NAME, screen
from assay_pipeline.targets import gguf_files, may_be_on_the_hub, url_in

MAY_BE_BASE = "nothing in it is quantized and it names no base: it may be one itself"
IS_GGUF = "GGUF is inspected and not screened; a model in GGUF is compared as a server"


def judge_link(
    target: str,
    *,
    base: str | None = None,
    text: Sequence[Path] = (),
    num_tokens: int = 20_000,
    arithmetic: Arithmetic = "fp32",
    device: str = "cpu",
    memory_bytes: int | None = None,
    out: Path | None = None,
    say: Say = say_nothing,
    track: Track = track_nothing,
) -> LinkAnswer:
    """target: a folder, a hub id or the URL of files. base: folder, hub id or pack of its base; None: the one that it was made
    from, or that it names, if that is on this machine (in the Hugging Face cache). Weights come from the hub if `base` is
    given, and not otherwise: they may be a terabyte. text, num_tokens, arithmetic, device, memory_bytes, out: as
    of `screen`.

    AssayError: nothing can be read at `target`, or there is no `base`.
    """
    inspection = inspect(target, track=track)
    folder = Path(inspection.checkpoint).expanduser()
    is_gguf = bool(gguf_files(folder))
    named = inspection.facts.base_model
    reference = base or source_here(folder) or (None if named is None else cached(named))
    if reference is not None and not is_gguf and not (Path(reference) / PACK_NAME).is_file():
        try:  # files beside the weights: what a divergence over given tokens does not show
            inspection = inspect(target, source=reference, kept=False, track=track)
        except AssayError:
            if base is not None and inspection.is_clean:
                raise
    screening, reason = None, _not_comparable(inspection, folder, reference, may_download=base is not None)
    if reason is None and reference is not None:
        try:
            screening, path = screen(
                [reference, str(folder) if folder.is_dir() else inspection.checkpoint],
                text=text,
                num_tokens=num_tokens,
                arithmetic=arithmetic,
                device=device,
                memory_bytes=memory_bytes,
                out=out,
                say=say,
            )
            say(f"page: {path.with_name(PAGE_NAME)}")
        except AssayError as problem:
            if base is not None and inspection.is_clean:
                raise
            reason = str(problem)
    return LinkAnswer(
        inspection=inspection,
        base=reference or named,
        screening=screening,
        not_screened=reason,
        steps=tuple(_steps(inspection, target, reference, screening, reason)),
    )


def server_url(target: str) -> str | None:
    """The URL of a server, if `target` is one and names no page of the hub and no file."""
    url = url_in(target)
    return None if url is None or len([part for part in url.split("/")[3:] if part not in ("", "v1")]) > 0 else url


def source_here(folder: Path) -> str | None:
    """The folder that a checkpoint of ours was made from, by its manifest, if it is there."""
    try:
        manifest = load_manifest(folder) if folder.is_dir() else None
    except AssayError:
        return None
    return manifest.source if manifest is not None and Path(manifest.source).is_dir() else None


def cached(name: str) -> str | None:
    """The folder of a hub repository that was downloaded to this machine; None: it was not."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        return snapshot_download(name, local_files_only=True)
    except (HFValidationError, LocalEntryNotFoundError, OSError):
        return None


def _not_comparable(inspection: Inspection, folder: Path, reference: str | None, *, may_download: bool) -> str | None:
    """Why there is no screening; None: there can be one."""
    if gguf_files(folder):
        return IS_GGUF
    if not folder.is_dir():
        if not may_be_on_the_hub(inspection.checkpoint):
            return "its weights are not on this machine; download it and give the folder"
        if not may_download:
            return "its weights are on the hub; with --base they are read from there, a shard at a time"
    if inspection.facts.method is None and reference is None:
        return MAY_BE_BASE
    if reference is None:
        named = inspection.facts.base_model
        return (
            "it does not name its base; give the base's folder or pack with --base"
            if named is None
            else f"its base, {shown(named)}, is not on this machine; give its folder or pack with --base"
        )
    return None


def _steps(
    inspection: Inspection, target: str, reference: str | None, screening: Screening | None, reason: str | None
) -> list[LinkStep]:
    """reason: of no screening."""
    folder, base = Path(inspection.checkpoint).expanduser(), reference or inspection.facts.base_model or "BASE"
    is_pack = (Path(base) / PACK_NAME).is_file()
    again = f"assay judge {shlex.quote(target)} --base {shlex.quote(base)}"
    steps = []
    if reason == MAY_BE_BASE:
        return [
            LinkStep(sentence="judge a checkpoint that was made of it", command=f"assay judge {shlex.quote(target)} CANDIDATE")
        ]
    if gguf_files(folder) or any(finding.defect == "method_not_served" for finding in inspection.findings):
        engine = "llama-server" if gguf_files(folder) else "an engine that has its method"
        served = f"serve it with {engine}, and the model that it was made of, and judge it by their URLs"
        return [LinkStep(sentence=served, command="assay judge REFERENCE_URL URL")]
    on_hub = may_be_on_the_hub(inspection.checkpoint)
    if screening is None and (on_hub or (reference is None and folder.is_dir())):
        steps.append(
            LinkStep(
                sentence="compare it with its base, token by token, without a server",
                command=again,
            )
        )
    if screening is not None and any(candidate.word == "UNDERPOWERED" for candidate in screening.candidates):
        needed = max((candidate.tokens_needed or 0 for candidate in screening.candidates), default=0)
        if needed:
            steps.append(
                LinkStep(
                    sentence="decide whether it exceeds the limit",
                    command=f"{again} --tokens {needed} --text REPLIES.jsonl",
                )
            )
    steps.append(
        LinkStep(
            sentence="ask both questions, served: whether tasks are lost is not known yet",
            command=f"assay judge {'BASE' if is_pack else shlex.quote(base)} {shlex.quote(target)}",
        )
    )
    return steps
