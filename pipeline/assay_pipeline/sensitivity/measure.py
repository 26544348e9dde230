"""What `assay sensitivity` does: texts, proxies and servers, put together into one record."""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from assay.callbacks import Say, say_nothing
from assay.quantities import size
from assay.recipes.calibrated.methods import INTEGERS
from assay.recipes.load import load_recipe
from assay.recipes.precision import PrecisionRecipe
from assay.records.base import sha256_of
from assay.records.diagnosis.sensitivity import SENSITIVITY_NAME, RankCorrelation, Sensitivity, SensitivityPart
from assay_pipeline.interrupted import interruptible
from assay_pipeline.places import check_places, place_for
from assay_pipeline.sensitivity.request import (
    GPTQ,
    Asked,
    Figures,
    Pair,
    Proxy,
    by_weights,
    check_asked,
    check_texts,
    measure,
    mixes_of,
    scored,
    served_folder,
    suite_of_texts,
    take_found,
    texts_for,
)

if TYPE_CHECKING:
    from assay_evaluate.divergence.documents import Document
    from assay_quantize.estimate.sensitivity_time import SensitivityEstimate
    from assay_quantize.sensitivity.direct import Cost
    from assay_quantize.sensitivity.parts import Key, Layout
    from assay_quantize.sensitivity.rounded import CalibratedWeights, Rounder

DEFAULT_SCHEMES = ("w4a16", "w4a16_g32", "nvfp4a16", "fp8_block")
IN_WORDS = {
    "kl": "the divergence itself, in transformers",
    "hidden": "the relative squared error of the states behind a part's layer",
    "weights": "the relative squared error of the weights",
}


@dataclass(frozen=True)
class SensitivityResult:
    """file: where the record was written. Both None: only the cost was asked for. hours: that of a machine that was named, with
    the bytes of the whole model in FP32; None: no machine was named, or no model is run."""

    record: Sensitivity | None = None
    file: Path | None = None
    hours: SensitivityEstimate | None = None
    whole_bytes: int | None = None


def measure_sensitivity(
    target: str,
    *,
    schemes: Sequence[str] = DEFAULT_SCHEMES,
    proxy: Proxy = "kl",
    observer: Literal["minmax", "mse"] = "minmax",
    method: Literal["none", "gptq"] = "none",
    text: Sequence[str] = (),
    num_tokens: int = 16_384,
    length: int = 256,
    mixes: Sequence[str] = (),
    served: int = 0,
    profile: str | None = None,
    seed: int = 0,
    by_layer: bool | None = None,
    memory: str | None = None,
    hardware: str | None = None,
    only_estimate: bool = False,
    run: Path | None = None,
    out: Path | None = None,
    say: Say = say_nothing,
) -> SensitivityResult:
    """What it costs to quantize each role of each layer by itself, in nats a token and in bytes; the record is written.

    target: a model recipe's name, a checkpoint folder or a hub id. schemes: that every part is tried in. text: files, or `own`:
    what the model samples; none: texts of the reference of `run`, else the model's replies to generated questions. mixes:
    precisions that are measured as a whole as well. served: so many parts are also served, with `profile`. by_layer: hold one
    layer in memory at a time; None: where the model does not fit into `memory`. only_estimate: measure nothing, say the cost,
    of `hardware` if it is named. run, out: folder of the record; neither: a new temporary one. AssayError: options that do not
    go together, or a model that cannot be measured here.
    """
    from assay_pipeline.profiles import profile_for
    from assay_pipeline.sensitivity.by_layer import estimate_hours
    from assay_pipeline.targets import resolve_source
    from assay_quantize.engine.budget import parse_memory

    check_places(run, out)
    resolved, is_own = resolve_source(target), list(text) == ["own"]
    place = place_for("sensitivity", ".", run=run, out=out, say=say)
    asked = Asked(
        target=resolved,
        schemes=tuple(schemes),
        proxy=proxy,
        observer=observer,
        method=method,
        run=run,
        text=() if is_own else tuple(map(Path, text)),
        own=is_own,
        num_tokens=num_tokens,
        length=length,
        mixes=tuple(load_recipe(PrecisionRecipe, name) for name in mixes),
        served=served,
        profile=profile_for(resolved, profile) if served else None,
        seed=seed,
        by_layer=by_layer,
        memory_bytes=None if memory is None else parse_memory(memory),
        hardware=hardware,
        only_estimate=only_estimate,
        keep=place.records / "sensitivity",
        say=say,
    )
    check_asked(asked)
    if hardware is not None:
        hours, whole_bytes = estimate_hours(asked)
        return SensitivityResult(hours=hours, whole_bytes=whole_bytes)
    with interruptible(lambda: f"what was measured is kept in {asked.keep}; the same command goes on from there"):
        record = find_sensitivity(asked)
    if record is None:
        return SensitivityResult()
    record.save(place.records / SENSITIVITY_NAME)
    return SensitivityResult(record, place.records / SENSITIVITY_NAME)


def find_sensitivity(asked: Asked) -> Sensitivity | None:
    """The record; None if only the cost was asked for."""
    from assay_pipeline.sensitivity.by_layer import is_by_layer, run_by_layer
    from assay_pipeline.targets import local_source
    from assay_quantize.checkpoint.checkpoint import open_checkpoint
    from assay_quantize.checkpoint.source_reader import SourceReader
    from assay_quantize.sensitivity.parts import find_parts
    from assay_quantize.sensitivity.rounded import Rounder

    started = os.times()
    say = asked.say
    folder = local_source(asked.target, say=say)
    checkpoint = open_checkpoint(folder)
    layout = find_parts(checkpoint, asked.schemes, model=asked.target.recipe.name, observer=asked.observer)
    layout = replace(layout, mixes=mixes_of(asked, layout))
    if asked.parts_of is None:
        say(
            f"{len(layout.sizes)} parts, {', '.join(layout.plans)}: {len(layout.pairs())} to measure by proxy {asked.proxy} "
            f"({IN_WORDS[asked.proxy]})" + (f", {asked.served} of them served" if asked.served else "")
        )
    figures = Figures()
    documents: Sequence[Document] = ()
    texts_description = ""
    with SourceReader(checkpoint) as reader, _calibrated(asked, layout, folder) as calibrated:
        rounder = Rounder(layout, reader, calibrated)
        if asked.proxy == "weights":
            if asked.only_estimate:
                read = size(sum(layout.sizes[key]["bf16"] for key, _ in layout.pairs()))
                say(
                    f"estimate: {read} of weights are read and rounded, no model is run; `assay plan --hardware this` says how "
                    "fast"
                )
                return None
            by_weights(layout, rounder, figures, say)
            figures.not_measured["divergence"] = "proxy weights runs no model"
        elif is_by_layer(asked, layout):
            by_layer = run_by_layer(asked, layout, rounder, reader, figures)
            if by_layer is None:
                return None
            documents, texts_description = by_layer
        else:
            in_transformers = _in_transformers(asked, layout, rounder, folder, figures)
            if in_transformers is None:
                return None
            documents, texts_description = in_transformers
    if asked.served:
        _serve(asked, layout, folder, figures)
    ended = os.times()
    spent = ended.user + ended.system - started.user - started.system + ended.children_user - started.children_user
    return _record(asked, layout, figures, documents, texts_description, round(spent, 1))


@contextmanager
def _calibrated(asked: Asked, layout: Layout, folder: Path) -> Iterator[CalibratedWeights | None]:
    """INT4 weights by GPTQ. None: they are rounded to the nearest."""
    from assay_quantize.sensitivity.rounded import calibrated_weights

    if asked.method == "none":
        yield None
        return
    if asked.only_estimate:
        count = len(set(layout.plans) & set(INTEGERS))
        asked.say(
            f"estimate: before all else {count} INT4 schemes are calibrated, each as long as `assay quantize` of a precision"
        )
        yield None
        return
    with calibrated_weights(layout, folder, asked.keep, GPTQ, asked.say) as weights:
        yield weights


# ------------------------------------------------------------------------------------------------ the model in transformers
def _in_transformers(
    asked: Asked, layout: Layout, rounder: Rounder, folder: Path, figures: Figures
) -> tuple[Sequence[Document], str] | None:
    """The texts and what they are in words; None if only the cost was asked for."""
    from assay_evaluate.sensitivity.damage import positions_of
    from assay_evaluate.sensitivity.served import structural_kinds
    from assay_quantize.calibration.calibrate import BATCH_TOKENS, load_model
    from assay_quantize.sensitivity.direct import Direct, Runner
    from assay_quantize.sensitivity.texts import batched

    model = load_model(layout.checkpoint, folder, "cpu")
    if asked.only_estimate:
        _say_cost(asked, layout, rounder, model, folder)
        return None
    documents, texts_description = texts_for(asked, model, folder)
    check_texts(asked, documents)
    texts = scored(documents)
    asked.say(f"{len(texts)} texts, {sum(text.num_scored for text in texts):,} scored tokens: {texts_description}")
    runner = Runner(model, batched(texts, BATCH_TOKENS))
    structural = structural_kinds(folder)
    if isinstance(structural, str):
        figures.not_measured["structural tokens"] = structural
    positions = positions_of(documents, None if isinstance(structural, str) else structural)
    direct = Direct(layout, rounder, runner, texts, asked.keep, asked.say)
    asked.say(f"{_describe(direct.cost(layout.pairs()))}; an interrupted run resumes from {asked.keep}")
    take_found(dict(direct.wholes()), direct.parts(layout.pairs()), layout, positions, figures)
    figures.noise = direct.noise()
    if not any(kind == "context" for kind, _ in positions.masks):
        figures.not_measured["long context"] = f"no text is longer than {positions.longest} tokens"
    if asked.parts_of is None:  # else nothing is asked for but mixes as a whole
        by_weights(layout, rounder, figures, asked.say)
    return documents, texts_description


def _say_cost(asked: Asked, layout: Layout, rounder: Rounder, model: Any, folder: Path) -> None:
    """From one batch of random tokens, and eight written tokens where the model writes the texts."""
    from assay_quantize.calibration.calibrate import BATCH_TOKENS
    from assay_quantize.sensitivity.direct import Cost, Direct, Runner
    from assay_quantize.sensitivity.texts import batched, random_texts

    if not asked.text and asked.run is None:
        minutes = _minutes_to_write(asked, model, folder)
        asked.say(f"estimate: the model first writes its texts, about {minutes:.1f} minutes of one core")
    texts = random_texts(model, min(asked.num_tokens, BATCH_TOKENS), asked.length)
    runner = Runner(model, batched(texts, BATCH_TOKENS))
    runner.run()  # the first pass also allocates and compiles
    direct = Direct(layout, rounder, runner, texts, None, asked.say)
    cost, scale = direct.cost(layout.pairs()), asked.num_tokens / sum(text.num_scored for text in texts)
    asked.say(_describe(Cost(cost.num_passes, scale * cost.cpu_seconds, round(scale * cost.bytes_kept))))


def _describe(cost: Cost) -> str:
    return (
        f"estimate: {cost.num_passes:.0f} passes over the texts, about {cost.cpu_seconds / 60:.1f} minutes of one core beside "
        f"the rounding of weights; {size(cost.bytes_kept)} to keep"
    )


def _minutes_to_write(asked: Asked, model: Any, folder: Path) -> float:
    """CPU time of one thread, from the first eight tokens of as many texts as are written at once."""
    from assay_evaluate.divergence.documents import document_items
    from assay_quantize.calibration.memory import texts_at_once
    from assay_quantize.sensitivity.texts import sample_replies

    suite = suite_of_texts(asked)
    questions = [item.prompt for item in document_items(suite.divergence, suite.seed)]
    at_once, num_tokens = texts_at_once(model, asked.length), 8
    started = os.times()
    sample_replies(model, folder, questions[:at_once], max_tokens=num_tokens, seed=asked.seed, say=say_nothing)
    ended = os.times()
    seconds = ended.user + ended.system - started.user - started.system
    return seconds / 60 * asked.length / num_tokens * math.ceil(len(questions) / at_once)


# ------------------------------------------------------------------------------------------------ servers
def _serve(asked: Asked, layout: Layout, source: Path, figures: Figures) -> None:
    """One checkpoint and one server after the other; a checkpoint goes once it is measured."""
    from assay.records.measurement import Measurement
    from assay_evaluate.sensitivity.served import kl_of
    from assay_quantize.engine.quantize import quantize
    from assay_quantize.plan.planner import make_plan

    folder = served_folder(asked)
    order = figures.damage[f"proxy:{asked.proxy}"]
    chosen = spread(order, asked.served)
    asked.say(
        f"serving {len(chosen)} checkpoints, {size(sum(s['bf16'] for s in layout.sizes.values()) + layout.other_bytes)} at once"
    )
    for number, pair in enumerate(chosen, 1):
        key, scheme = pair
        label = f"layer-{key.layer}-{key.role.replace('_', '-')}-{scheme.replace('_', '-')}"
        done = folder / "measurements" / f"{label}.json"
        if not done.is_file():
            recipe = layout.recipe(label, {key: scheme})
            plan = make_plan(layout.checkpoint, recipe, model=asked.target.recipe.name, family=layout.family)
            made = folder / label / "checkpoint"
            quantize(plan, source, made)
            measure(asked, source, {label: made}, folder)
            shutil.rmtree(made.parent)
        figures.served[pair] = kl_of(Measurement.load(done))
        asked.say(f"served {number} of {len(chosen)}: {key}, {scheme}: {figures.served[pair].value:.3g} nats")
    figures.damage["served"] = {pair: interval.value for pair, interval in figures.served.items()}


def spread(order: Mapping[Pair, float], count: int) -> list[Pair]:
    """`count` parts evenly over the order of their figures, the first and the last among them."""
    ranked = sorted(order, key=lambda pair: (-order[pair], str(pair)))
    if count >= len(ranked):
        return ranked
    if count == 1:
        return ranked[:1]
    return [ranked[round(i * (len(ranked) - 1) / (count - 1))] for i in range(count)]


# ------------------------------------------------------------------------------------------------ the record
def _record(
    asked: Asked, layout: Layout, figures: Figures, documents: Sequence[Document], texts_description: str, cpu_seconds: float
) -> Sensitivity:
    from assay_evaluate.sensitivity.drafts import mtp_acceptance
    from assay_quantize.checkpoint.checkpoint import open_checkpoint
    from assay_quantize.checkpoint.identity import weights_sha256
    from assay_quantize.sensitivity.texts import texts_sha256

    method = f"proxy:{asked.proxy}"
    plan = next(iter(layout.plans.values()))
    damage = figures.damage[method]
    drafts = () if asked.run is None else mtp_acceptance(asked.run)
    if not drafts and any(key.role == "mtp" for key in layout.sizes):
        where = "say --run" if asked.run is None else f"no measured precision of {asked.run} drafted"
        figures.not_measured["acceptance by precision of the MTP block"] = where
    return Sensitivity(
        model=asked.target.recipe.name,
        family=layout.family,
        source=plan.source,
        source_sha256=plan.source_sha256,
        source_revision=plan.source_revision,
        data_sha256=sha256_of(plan.source_files),
        weights_sha256=weights_sha256(open_checkpoint(Path(plan.source))) if Path(plan.source).is_dir() else None,
        method=method,
        in_nats=asked.proxy not in ("weights", "hidden"),
        observer=asked.observer,
        calibration=None if asked.method == "none" else GPTQ.model_dump(mode="json"),
        texts=texts_description,
        texts_sha256=texts_sha256(scored(documents)),
        num_texts=len(documents),
        num_texts_of_wholes=figures.num_texts_of_wholes,
        num_tokens=sum(len(document.reply_ids) for document in documents),
        seed=str(asked.seed),
        layers=layout.num_layers,
        weights=layout.all_weights,
        other_bytes=layout.other_bytes,
        parts=tuple(
            _part(layout, figures, damage, key, scheme)
            for key, sizes in layout.sizes.items()
            for scheme in ("bf16", *layout.plans)
            if scheme in sizes
        ),
        left_out=layout.left_out,
        uniform=tuple(figures.uniform),
        wholes=tuple(figures.wholes),
        noise_nats=figures.noise,
        correlations=_correlations(asked, figures),
        mtp_acceptance=drafts,
        not_measured=figures.not_measured,
        cpu_seconds=cpu_seconds,
    )  # fmt: skip


def _part(layout: Layout, figures: Figures, damage: Mapping[Pair, float], key: Key, scheme: str) -> SensitivityPart:
    pair = key, scheme
    return SensitivityPart(
        layer=key.layer,
        role=key.role,
        scheme=scheme,
        num_weights=layout.num_weights[key],
        bytes=layout.sizes[key][scheme],
        damage_nats=None if key.role == "mtp" else 0.0 if scheme == "bf16" else damage[pair],
        interval=figures.intervals.get(pair),
        served_nats=figures.served.get(pair),
        worst=figures.worst.get(pair, ()),
        by_kind=figures.by_kind.get(pair, ()),
        routing=figures.routing.get(pair),
    )


def _correlations(asked: Asked, figures: Figures) -> tuple[RankCorrelation, ...]:
    """Every method beside what was served, and every other one beside the method of the record."""
    from assay_evaluate.sensitivity.ranks import rank_correlation

    method = f"proxy:{asked.proxy}"
    flat = {
        name: {(key.layer, key.role, scheme): value for (key, scheme), value in by_pair.items()}
        for name, by_pair in figures.damage.items()
    }
    beside = [("served", name) for name in flat if name != "served"] if "served" in flat else []
    beside += [(method, name) for name in flat if name not in (method, "served")]
    return tuple(rank_correlation(name, flat[name], other, flat[other], seed=str(asked.seed)) for other, name in beside)
