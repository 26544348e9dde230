"""`assay screen`: how far candidates are from a reference over the same texts, layer by layer, without a server."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

from assay.callbacks import Say, say_nothing
from assay.errors import AssayError
from assay.installation import data_file
from assay.recipes.gate import DivergenceGate, GateRecipe
from assay.recipes.load import load_recipe
from assay.recipes.text_config import text_of
from assay.records.pack import PACK_NAME
from assay.records.screening import SCREENING_NAME, Screening
from assay.safe_files import read_json_object
from assay_pipeline.comparison.damage import unlike_reference
from assay_pipeline.comparison.pack_source import pack_folder
from assay_pipeline.comparison.screen_cost import Most, estimated, shown_estimate, shown_memory
from assay_pipeline.comparison.screen_figures import rankings_of, surprise_of
from assay_pipeline.comparison.screen_looks import ERROR, Looks, looks_of
from assay_pipeline.comparison.screen_passes import (
    Arithmetic,
    KvCacheDtype,
    PassRunner,
    check_device,
    numerics_of,
    panel_of,
    reference_pack,
    states_in,
)
from assay_pipeline.comparison.screen_sources import check_out, check_place, label_of, source_of
from assay_pipeline.comparison.screen_texts import check_texts, read_panel
from assay_pipeline.comparison.screen_workers import HERE, PassWorkers
from assay_pipeline.interrupted import interruptible
from assay_pipeline.places import place_for
from assay_pipeline.targets import foreign_note

PAGE_NAME = "screening.html"
GATES = "default"
"""Whose limit on `kl_mean`, by the bits of the weights, FAIL is about."""


def screen(
    checkpoints: Sequence[str],
    *,
    pack: str | Path | None = None,
    text: Sequence[Path] = (),
    num_tokens: int = 20_000,
    length: int | None = None,
    arithmetic: Arithmetic = "fp32",
    device: str = "cpu",
    kv_cache_dtype: KvCacheDtype = "auto",
    all_texts: bool = False,
    gates: str = GATES,
    most: Most | None = None,
    memory_bytes: int | None = None,
    workers: PassWorkers = HERE,
    out: Path | None = None,
    say: Say = say_nothing,
) -> tuple[Screening, Path]:
    """The record, and where it was written.

    checkpoints: folders and ids of the hub, the reference first, which may be a pack. pack: a folder, or a data set of the hub;
    it stands for the reference, and all are candidates.
    text: files of plain text or JSON lines, and folders of runs, of which the texts that their reference wrote count; none: the
    shipped panel, or the texts of the pack. num_tokens: scored, of all texts; length: of one, at most; None: so that there are
    about 40 texts. kv_cache_dtype: of candidates, as of vLLM; `auto`: as each checkpoint says. all_texts: do not stop where
    some of them decide. gates: whose limits FAIL is about. most: what it may take, or it is not begun. memory_bytes: of the
    process, or of the GPU, at most; None: what is free. workers: who computes. out: folder of the record and of the states that
    a killed screening goes on from. AssayError: a checkpoint cannot be read or run so.
    """
    started = time.monotonic()
    if pack is None and checkpoints and (Path(checkpoints[0]) / PACK_NAME).is_file():
        pack, checkpoints = Path(checkpoints[0]), checkpoints[1:]
    _check_sides(checkpoints, pack, text)
    check_texts(text)
    workers.check()
    places = dict(_labelled(checkpoints))  # before torch is imported, which takes seconds, and anything is written
    if out is not None:
        check_out(out, [folder for text in checkpoints if (folder := Path(text).expanduser()).is_dir()])

    from assay_quantize.calibration.quiet import quiet
    from assay_quantize.screen.pack import open_pack
    from assay_quantize.screen.texts import stated_in
    from assay_reports.screening import write_screening_page

    place_of_pack = None if pack is None else pack_folder(pack, say)
    text = text or [shipped_panel()]
    gate = kl_gate(gates)
    check_device(device)
    place = place_for("screen", ".", out=out, say=say)
    with (
        quiet(),
        interruptible(lambda: f"layers that are done are kept in {place.records}; the same command goes on"),
        states_in(place.records / "passes", is_temporary=out is None),
        workers.ready(device) as tasks,
        ExitStack() as open_files,
    ):
        runner = PassRunner(arithmetic, device, place.records / "passes", say, kv_cache_dtype, memory_bytes, tasks)
        sources = {label: source_of(text, place.records / "hub" / label, say) for label, text in places.items()}
        for source in sources.values():
            workers.check_source(source)
        stored = {label: open_files.enter_context(source.opened()) for label, source in sources.items()}
        damages = {label: damage for label, source in sources.items() if (damage := source.damage()) is not None}
        of_pack = None if place_of_pack is None else open_pack(place_of_pack)
        first = next(iter(sources))
        entries = read_panel(text, sources[first].folder, num_tokens, length) if of_pack is None else of_pack.texts
        panel = panel_of(list(map(str, text)), entries, stated_in(text)) if of_pack is None else of_pack.record.panel
        texts = [entry.scored for entry in entries]
        for label, damage in damages.items():
            say(f"note: {label}: {sources[label].damage_note(damage)}")
        candidates = list(sources)[of_pack is None :]
        compared_with = sources[first].folder if place_of_pack is None else place_of_pack
        unlike = {label: told for label in candidates if (told := unlike_reference(compared_with, sources[label].folder))}
        for label, told in unlike.items():
            say(f"note: {label}: another model than the reference: {'; '.join(told)}")
        for label in candidates:
            check_vocabulary(label, compared_with, sources[label].folder)
        foreign = sources[first].foreign() if of_pack is None else of_pack.record.foreign_reference
        if foreign is not None:
            say(f"note: {foreign_note(sources[first].location if of_pack is None else str(place_of_pack), foreign)}")
        say(f"{panel.num_texts} texts, {panel.num_tokens:,} tokens scored")
        costs = {label: runner.cost(label, stored[label], texts) for label in sources}
        estimate = estimated(costs, texts, most or Most(), place.records)
        if estimate is not None:
            say(f"estimate: {shown_estimate(estimate)}; {shown_memory(costs)}")
        looks = looks_of(len(entries))
        if all_texts or any(source.mirror is not None for source in sources.values()):  # a shard would come twice
            looks = [list(range(len(entries)))]
        level = 1 - ERROR / len(looks)
        reference_of_pack = None if of_pack is None else reference_pack(of_pack, runner)
        passes = Looks(runner, sources, stored, entries, panel, gate, level, reference_of_pack, say)
        num_looked = 0
        for new in looks:
            looked = passes.look(new)
            num_looked += len(new)
            if looked.is_settled and num_looked < len(entries):
                say(f"decided by {num_looked} of {len(entries)} texts; --all-texts takes all of them")
                break
        numerics = numerics_of(arithmetic, device)
    reference, screened, values = looked.reference, looked.screened, looked.values
    screened.sort(key=lambda candidate: candidate.drift.kl_mean.value)
    record = Screening(
        reference=reference.location,
        pack_seal=reference.pack_seal,
        foreign_reference=foreign,
        damages=damages,
        unlike_reference=unlike,
        reference_sha256=reference.sha256,
        reference_stored_as=reference.stored_as,
        numerics=numerics,
        panel=reference.panel,
        surprise=surprise_of(next(iter(values.values()))),
        candidates=tuple(screened),
        rankings=tuple(rankings_of(screened, values, level)),
        num_texts_given=len(entries),
        estimate=estimate,
        seconds=time.monotonic() - started,
    )
    path = place.records / SCREENING_NAME
    record.save(path)
    write_screening_page(record, place.records / PAGE_NAME)
    return record, path


def shipped_panel() -> Path:
    """Texts of assay's own pages and code: a file of JSON lines."""
    return data_file("recipes") / "panels" / "assay.jsonl"


def _check_sides(checkpoints: Sequence[str], pack: str | Path | None, text: Sequence[Path]) -> None:
    if pack is None and len(checkpoints) < 2:
        raise AssayError("give a reference and a candidate or more, or `--pack PACK` and candidates")
    if not checkpoints:
        raise AssayError("give a candidate's folder beside the pack")
    if pack is not None and text:
        raise AssayError(f"--text: {pack} has its own texts; leave --text out")


def check_vocabulary(label: str, reference: Path, folder: Path) -> None:
    """Before hours of work. AssayError: the two have heads of different sizes. reference: its folder, or its pack."""
    sizes = [text_of(read_json_object(place, "config.json")).get("vocab_size") for place in (reference, folder)]
    if all(isinstance(size, int) for size in sizes) and sizes[0] != sizes[1]:
        raise AssayError(
            f"{label}: has {sizes[1]:,} tokens in its head, the reference {sizes[0]:,}: it is another model, whose next-token "
            "distributions are over other tokens; give a candidate of this reference"
        )


def _labelled(texts: Sequence[str]) -> Iterator[tuple[str, str]]:
    used: set[str] = set()
    for text in texts:
        check_place(text)
        label = label_of(text)
        number = 1
        while label in used:
            number += 1
            label = f"{label_of(text)}-{number}"
        used.add(label)
        yield label, text


def kl_gate(name: str) -> DivergenceGate:
    """The limit on a mean KL of gates. AssayError: they have none."""
    for gate in load_recipe(GateRecipe, name).gates:
        if isinstance(gate, DivergenceGate) and gate.metric == "kl_mean" and gate.over != "spans":
            return gate
    raise AssayError(f"--gates {name}: has no limit on kl_mean; take {GATES}")
