"""`assay pack`: what candidates are screened against without their reference, in one sealed folder."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from assay.callbacks import Say, say_nothing
from assay.errors import AssayError, CheckpointError
from assay.records.pack import PACK_NAME, Pack
from assay.records.run import folder_name
from assay.records.screening import Numerics, Panel, StatedTexts
from assay.safe_files import open_inside
from assay_pipeline.comparison.screen_cost import Most, estimated, shown_estimate, shown_memory
from assay_pipeline.comparison.screen_passes import Arithmetic, PassRunner, check_device, numerics_of, panel_of, states_in
from assay_pipeline.comparison.screen_sources import ScreenSource, check_out, check_place, source_of
from assay_pipeline.comparison.screen_texts import check_texts, read_panel
from assay_pipeline.comparison.screen_workers import HERE, PassWorkers
from assay_pipeline.interrupted import interruptible
from assay_pipeline.targets import foreign_note, take_up_family_of


def pack(
    reference: str | Path,
    *,
    text: Sequence[Path],
    out: Path,
    num_tokens: int = 200_000,
    length: int | None = None,
    arithmetic: Arithmetic = "fp32",
    device: str = "cpu",
    with_head: bool = True,
    memory_bytes: int | None = None,
    stated: StatedTexts | None = None,
    workers: PassWorkers = HERE,
    say: Say = say_nothing,
) -> Pack:
    """Write a pack of `reference` to `out`; a killed one goes on with its layer.

    reference: a folder or an id of the hub. A whole one of the same weights, texts and numerics is left as it is. text,
    num_tokens, length, arithmetic, device, memory_bytes, workers: as of `screen`. with_head: False leaves out the head, of
    which the hash is held. stated: what is said of the texts beside what their files say. AssayError: `out` holds something
    else; the checkpoint is damaged, or cannot be read or run.
    """
    from assay_quantize.calibration.quiet import quiet
    from assay_quantize.screen.draft import DRAFTS, write_drafts
    from assay_quantize.screen.forward import ScreenPass
    from assay_quantize.screen.pack import (
        CONFIG,
        FLOOR_TEXTS,
        STATES,
        TOKENIZER,
        floor,
        head_sha256,
        seal,
        write_head,
        write_texts,
    )
    from assay_quantize.screen.texts import stated_in

    check_place(str(reference))
    check_texts(text)
    check_device(device)
    workers.check()
    work = out.absolute().with_name(f".{out.absolute().name}.partial")
    is_empty = not out.exists() or (out.is_dir() and not any(out.iterdir()))
    if not is_empty and not (out / PACK_NAME).is_file() and not work.is_dir():  # a killed one was about to move its files
        raise AssayError(f"{out}: is not empty; give a new folder as --out")
    if (folder := Path(reference).expanduser()).is_dir():
        check_out(out, [folder])
    source = source_of(str(reference), work / "hub", say)
    foreign = _checked(source, say)
    workers.check_source(source)
    with (
        quiet(),
        interruptible(lambda: f"layers that are done are kept in {work}; the same command goes on"),
        states_in(work / "passes"),
        workers.ready(device) as tasks,
        source.opened() as stored,
    ):
        runner = PassRunner(arithmetic, device, work / "passes", say, memory_bytes=memory_bytes, tasks=tasks)
        texts = read_panel(text, source.folder, num_tokens, length)
        said = {} if stated is None else stated.model_dump(exclude_none=True)
        panel = panel_of([path.name for path in text], texts, stated_in(text).model_copy(update=said))
        say(f"{panel.num_texts} texts, {panel.num_tokens:,} tokens scored")
        if (out / PACK_NAME).is_file():
            return _same_pack(out, source, panel, numerics_of(arithmetic, device), with_head)
        scored = [entry.scored for entry in texts]
        few = scored[:FLOOR_TEXTS]
        other: Arithmetic = "bf16" if arithmetic == "fp32" else "fp32"
        of_other, in_other = f"in-{other}", replace(runner, arithmetic=other)
        costs = {"reference": runner.cost("reference", stored, [*scored, *few, *few])}
        costs[of_other] = in_other.cost(of_other, stored, few)
        estimate = estimated(costs, scored, Most(), work)
        if estimate is not None:
            say(f"estimate: {shown_estimate(estimate)}; {shown_memory(costs)}")
        made = runner.run("reference", stored, source, scored, num_doubled=len(few))
        tensors, states = made.model.head_tensors(), made.states
        assert isinstance(states, ScreenPass), "one pass over all texts"
        doubled = replace(made, states=replace(states, first=len(scored)))
        floors = [floor("batch shape", few, made.side(), replace(doubled, model=runner.model(stored)).side())]
        otherwise = in_other.run(of_other, stored, source, few)
        floors.append(floor("arithmetic", few, replace(made, model=runner.model(stored)).side(), otherwise.side()))
        folder = work / "pack"
        shutil.rmtree(folder, ignore_errors=True)
        states.linked(folder / STATES, len(scored))
        write_texts(folder, texts)
        for name in (CONFIG, TOKENIZER):
            if (source.folder / name).is_file():
                with open_inside(source.folder, name) as given, (folder / name).open("wb") as written:
                    shutil.copyfileobj(given, written)
        if not isinstance(made.drafts, str):
            write_drafts(folder / DRAFTS, made.drafts)
        if with_head:
            write_head(folder, tensors)
        record = seal(
            folder,
            {
                "reference": folder_name(source.folder) if source.mirror is None else source.location,
                "reference_sha256": made.sha256,
                "reference_stored_as": stored.what,
                "foreign_reference": foreign,
                "numerics": numerics_of(arithmetic, device),
                "panel": panel,
                "num_layers": states.num_layers,
                "holds_head": with_head,
                "head_sha256": head_sha256(tensors),
                "no_drafts": made.drafts if isinstance(made.drafts, str) else None,
                "floors": tuple(floors),
            },
        )
    out.mkdir(parents=True, exist_ok=True)
    for path in sorted(folder.iterdir(), key=lambda path: path.name == PACK_NAME):  # the record last
        shutil.rmtree(out / path.name, ignore_errors=True)  # of one that was killed here
        os.replace(path, out / path.name)
    shutil.rmtree(work)
    return record


def _checked(source: ScreenSource, say: Say) -> str | None:
    """How the reference is quantized, if it is a copy, which is said. CheckpointError: it is damaged; whoever screens against
    the pack has no weights to find that in."""
    take_up_family_of(source.folder)
    if (damage := source.damage()) is not None:
        raise CheckpointError(
            f"{source.location}: {source.damage_note(damage)}; candidates would be compared with the damage; give a whole "
            "checkpoint"
        )
    if (foreign := source.foreign()) is not None:
        say(f"note: {foreign_note(source.location, foreign)}")
    return foreign


def _same_pack(out: Path, source: ScreenSource, panel: Panel, numerics: Numerics, with_head: bool) -> Pack:
    """The pack that is there. AssayError: it is another."""
    from assay_quantize.screen.pack import open_pack

    record = open_pack(out).record
    asked = (source.sha256(), panel, numerics, with_head)
    if (record.reference_sha256, record.panel, record.numerics, record.holds_head) != asked:
        raise AssayError(f"{out}: holds another pack, of {record.reference}; give a new folder as --out")
    return record
