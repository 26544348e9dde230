"""`assay sensitivity` of a model that does not fit into memory: one layer at a time, and what it would take elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from assay.errors import AssayError
from assay.quantities import size
from assay_pipeline.sensitivity.request import Asked, Figures, mixes_of, scored, take_found, texts_for

if TYPE_CHECKING:
    from assay_evaluate.divergence.documents import Document
    from assay_quantize.checkpoint.source_reader import SourceReader
    from assay_quantize.estimate.sensitivity_time import SensitivityEstimate
    from assay_quantize.sensitivity.parts import Layout
    from assay_quantize.sensitivity.rounded import Rounder


def is_by_layer(asked: Asked, layout: Layout) -> bool:
    """Whether one layer at a time is held: where that was asked for, or the model does not fit."""
    from assay_quantize.sensitivity.layered import whole_bytes

    if asked.proxy == "hidden" or asked.by_layer:
        return True
    needed = whole_bytes(next(iter(layout.plans.values())))
    memory, limit_text = _memory(asked)
    if needed <= memory or asked.by_layer is False:
        return False
    asked.say(f"{limit_text}: the model takes {size(needed)} in FP32, {size(memory)} are left: one layer at a time is held")
    return True


def _memory(asked: Asked) -> tuple[int, str]:
    """What is left for the model, and of what."""
    from assay_quantize.storage.resident import available_bytes, resident_bytes

    if asked.memory_bytes is not None:
        return max(0, asked.memory_bytes - resident_bytes()), f"--memory {size(asked.memory_bytes)}"
    return available_bytes(), "this machine"


def run_by_layer(
    asked: Asked, layout: Layout, rounder: Rounder, reader: SourceReader, figures: Figures
) -> tuple[Sequence[Document], str] | None:
    """The texts and what they are in words; None if only the cost was asked for."""
    from assay_evaluate.sensitivity.damage import positions_of
    from assay_evaluate.sensitivity.served import structural_kinds
    from assay_quantize.sensitivity.layered import Layered, check_memory, needed_bytes, states_bytes

    folder = layout.checkpoint.folder
    assert folder is not None
    if not asked.text and asked.run is None:
        raise AssayError(
            "one layer at a time: the model is not in memory and cannot write replies; give --text FILE, or --run RUN for "
            "those of its reference (in a model's recipe: `automatic: {texts: [FILE]}`)"
        )
    documents, texts_description = texts_for(asked, None, folder)
    texts, to_the_end = scored(documents), asked.proxy == "kl"
    plan, longest = next(iter(layout.plans.values())), max(len(text.ids) for text in texts)
    memory, limit_text = _memory(asked)
    check_memory(plan, longest, memory, limit_text)
    tokens = sum(len(text.ids) for text in texts)
    asked.say(f"{len(texts)} texts, {tokens:,} tokens: {texts_description}")
    disk = states_bytes(layout, tokens, longest, to_the_end=to_the_end)
    asked.say(
        f"estimate: each layer is filled once, {size(needed_bytes(plan, longest))} of memory beside the process, up to "
        f"{size(disk)} of states in {asked.keep}; --hardware MACHINE says hours"
    )
    if asked.only_estimate:
        return None
    layered = Layered(layout, rounder, reader, texts, asked.keep, asked.say)
    layered.run(to_the_end=to_the_end)
    figures.damage["proxy:hidden"] = dict(layered.hidden)
    if to_the_end:
        structural = structural_kinds(folder)
        if isinstance(structural, str):
            figures.not_measured["structural tokens"] = structural
        positions = positions_of(documents, None if isinstance(structural, str) else structural)
        results = list(layered.divergences())
        whole = {scheme: damage for key, scheme, damage in results if key is None}
        take_found(whole, ((key, s, damage) for key, s, damage in results if key is not None), layout, positions, figures)
        if not any(kind == "context" for kind, _ in positions.masks):
            figures.not_measured["long context"] = f"no text is longer than {positions.longest} tokens"
    else:
        figures.not_measured["divergence"] = "proxy hidden goes no further than a part's own layer"
    figures.damage["proxy:weights"] = {pair: error for pair, (error, _) in layered.weights.items()}
    figures.worst |= {pair: worst for pair, (_, worst) in layered.weights.items()}
    return documents, texts_description


def estimate_hours(asked: Asked) -> tuple[SensitivityEstimate, int | None]:
    """What it would take on `asked.hardware`, by headers or by the shapes that ship with assay; no weight is read. With it the
    bytes of the whole model in FP32; None: no model is run."""
    from assay_pipeline.hardware.estimates import machine_for, with_shapes
    from assay_pipeline.targets import open_source
    from assay_quantize.estimate.sensitivity_time import estimate_sensitivity
    from assay_quantize.sensitivity.layered import needed_bytes, states_bytes, whole_bytes
    from assay_quantize.sensitivity.parts import find_parts

    assert asked.hardware is not None
    target = with_shapes(asked.target, asked.say)
    layout = find_parts(open_source(target), asked.schemes, model=target.recipe.name, observer=asked.observer)
    layout = replace(layout, mixes=mixes_of(asked, layout))
    plan = next(iter(layout.plans.values()))
    machine, cores, of_torch = machine_for(plan, asked.hardware, with_torch=True)
    to_the_end, is_weights = asked.proxy == "kl", asked.proxy == "weights"
    largest = max(count for count in layout.num_weights.values())
    made = estimate_sensitivity(
        layout.plans,
        [(key.layer or 0, scheme, layout.num_weights[key]) for key, scheme in layout.pairs()],
        machine,
        cores,
        of_torch,
        proxy=asked.proxy,
        tokens=asked.num_tokens,
        length=asked.length,
        memory_bytes=min(largest, 1 << 30) if is_weights else needed_bytes(plan, asked.length),
        disk_bytes=0 if is_weights else states_bytes(layout, asked.num_tokens, asked.length, to_the_end=to_the_end),
        mixes=[[(scheme, layout.num_weights[key]) for key, scheme in mix.items()] for mix in layout.mixes.values()],
    )
    return made, None if is_weights else whole_bytes(plan)
