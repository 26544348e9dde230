"""What `assay sensitivity` does: texts, proxies, servers and imported scores, put together into one record."""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from assay.cli.terminal import say
from assay.errors import AssayError
from assay.quantities import size
from assay.recipes.precision import INTEGERS, GptqCalibration
from assay.records.base import Interval, sha256_of
from assay.records.diagnosis.sensitivity import (
    LayerRouting,
    MtpAcceptance,
    RankCorrelation,
    Sensitivity,
    SensitivityPart,
    UniformDamage,
    WorstTensor,
)

if TYPE_CHECKING:
    from assay.cli.targets import Target
    from assay.recipes.profile import ProfileRecipe
    from assay_evaluate.divergence.documents import Document
    from assay_evaluate.sensitivity.damage import Positions
    from assay_quantize.sensitivity.calibrated import CalibratedWeights
    from assay_quantize.sensitivity.direct import Direct
    from assay_quantize.sensitivity.parts import Key, Layout
    from assay_quantize.sensitivity.rounded import Rounder

Proxy = Literal["kl", "fisher", "weights"]
Pair = tuple["Key", str]

IN_WORDS = {
    "kl": "the divergence itself, in transformers",
    "fisher": "a second-order estimate from one backward pass",
    "weights": "the relative squared error of the weights",
}


@dataclass(frozen=True)
class Asked:
    """What the command line says. served: how many parts are also served; 0: none. keep: folder of what may be gone on with."""

    aim: Target
    schemes: tuple[str, ...]
    proxy: Proxy
    observer: Literal["minmax", "mse"]
    run: Path | None
    text: tuple[Path, ...]
    num_tokens: int
    length: int
    served: int
    profile: ProfileRecipe | None
    scores: tuple[Path, ...]
    seed: int
    keep: Path
    only_estimate: bool
    own: bool = False
    """Texts that the model samples by itself, instead of its replies."""
    method: Literal["none", "gptq"] = "none"
    """How INT4 weights are rounded: to the nearest, or by a calibration."""


@dataclass
class _Figures:
    """What is known of each part, by method."""

    damage: dict[str, dict[Pair, float]] = field(default_factory=dict)
    """Method -> pair -> figure."""
    intervals: dict[Pair, Interval | None] = field(default_factory=dict)
    by_kind: dict[Pair, Any] = field(default_factory=dict)
    routing: dict[Pair, LayerRouting | None] = field(default_factory=dict)
    worst: dict[Pair, tuple[WorstTensor, ...]] = field(default_factory=dict)
    uniform: list[UniformDamage] = field(default_factory=list)
    served: dict[Pair, Interval] = field(default_factory=dict)
    noise: float | None = None
    not_measured: dict[str, str] = field(default_factory=dict)


def find_sensitivity(asked: Asked) -> Sensitivity | None:
    """The record; None if only the cost was asked for."""
    from assay.cli.targets import local_checkpoint
    from assay_quantize.checkpoint.checkpoint import open_checkpoint
    from assay_quantize.checkpoint.source_reader import SourceReader
    from assay_quantize.sensitivity.imported import read_scores
    from assay_quantize.sensitivity.parts import find_parts
    from assay_quantize.sensitivity.rounded import Rounder

    started = os.times()
    folder = local_checkpoint(asked.aim.location)
    checkpoint = open_checkpoint(folder)
    layout = find_parts(checkpoint, asked.schemes, model=asked.aim.recipe.name, observer=asked.observer)
    imported = [read_scores(path, layout) for path in asked.scores]  # what is wrong with them is said before any work
    say(
        f"{len(layout.sizes)} parts, {', '.join(layout.plans)}: {len(layout.pairs())} to measure by proxy {asked.proxy} "
        f"({IN_WORDS[asked.proxy]})" + (f", {asked.served} of them served" if asked.served else "")
    )
    figures = _Figures()
    documents: Sequence[Document] = ()
    told = ""
    with SourceReader(checkpoint) as reader, _calibrated(asked, layout, folder) as calibrated:
        rounder = Rounder(layout, reader, calibrated)
        if asked.proxy == "weights":
            if asked.only_estimate:
                _say_cost_of_rounding(layout)
                return None
            _by_weights(layout, rounder, figures)
            figures.not_measured["divergence"] = "proxy weights runs no model"
        else:
            found = _in_transformers(asked, layout, rounder, folder, figures)
            if found is None:
                return None
            documents, told = found
    if asked.served:
        _serve(asked, layout, folder, documents, figures)
    for one in imported:
        name = f"imported:{one.tool}"
        figures.damage[name] = {**figures.damage.get(name, {}), **one.scores}
        figures.not_measured |= {f"{name}, {i + 1}": note for i, note in enumerate(one.notes)}
    ended = os.times()
    spent = ended.user + ended.system - started.user - started.system + ended.children_user - started.children_user
    return _record(asked, layout, figures, documents, told, round(spent, 1))


@contextmanager
def _calibrated(asked: Asked, layout: Layout, folder: Path) -> Iterator[CalibratedWeights | None]:
    """INT4 weights by GPTQ. None: they are rounded to the nearest."""
    from assay_quantize.sensitivity.calibrated import calibrated_weights

    if asked.method == "none":
        yield None
        return
    if asked.only_estimate:
        count = len(set(layout.plans) & set(INTEGERS))
        say(f"estimate: before all else {count} INT4 schemes are calibrated, each as long as `assay quantize` of a precision")
        yield None
        return
    with calibrated_weights(layout, folder, asked.keep, calibration_of(asked), say) as found:
        yield found


def calibration_of(asked: Asked) -> GptqCalibration:
    """As the shipped precisions have it, so that what is measured is what `assay quantize` makes."""
    return GptqCalibration(method="gptq")


# ------------------------------------------------------------------------------------------------ without a model
def _by_weights(layout: Layout, rounder: Rounder, figures: _Figures) -> None:
    from assay_quantize.sensitivity.weights import relative_error

    pairs = layout.pairs()
    figures.damage["proxy:weights"] = {}
    for number, pair in enumerate(pairs, 1):
        figures.damage["proxy:weights"][pair], worst = relative_error(rounder.weights(*pair))
        figures.worst.setdefault(pair, worst)
        if number % 50 == 0 or number == len(pairs):
            say(f"weights: {number} of {len(pairs)} parts and schemes")


def _say_cost_of_rounding(layout: Layout) -> None:
    read = sum(layout.sizes[key]["bf16"] for key, _ in layout.pairs())
    say(f"estimate: {size(read)} of weights are read and rounded, no model is run; `assay plan --hardware this` says how fast")


# ------------------------------------------------------------------------------------------------ the model in transformers
def _in_transformers(
    asked: Asked, layout: Layout, rounder: Rounder, folder: Path, figures: _Figures
) -> tuple[Sequence[Document], str] | None:
    """The texts and what they are in words; None if only the cost was asked for."""
    from assay_evaluate.sensitivity.damage import positions_of
    from assay_evaluate.sensitivity.served import structural_kinds
    from assay_quantize.calibration.calibrate import BATCH_TOKENS, load_model
    from assay_quantize.sensitivity.direct import Direct
    from assay_quantize.sensitivity.running import Runner
    from assay_quantize.sensitivity.texts import batched

    model = load_model(layout.checkpoint, folder, "cpu")
    documents, told = _texts(asked, model, folder)
    texts = _scored(documents)
    say(f"{len(texts)} texts, {sum(one.num_scored for one in texts):,} scored tokens: {told}")
    runner = Runner(model, batched(texts, BATCH_TOKENS))
    if asked.proxy == "kl":
        structural = structural_kinds(folder)
        if isinstance(structural, str):
            figures.not_measured["structural tokens"] = structural
        positions = positions_of(documents, None if isinstance(structural, str) else structural)
        direct = Direct(layout, rounder, runner, texts, asked.keep, say)
        if not _say_cost(direct, layout, asked):
            return None
        _directly(direct, layout, positions, figures)
        if not any(kind == "context" for kind, _ in positions.masks):
            figures.not_measured["long context"] = f"no text is longer than {positions.longest} tokens"
    elif asked.only_estimate:
        say("estimate: three passes of the whole model over the texts, one of them backward")
        return None
    _by_fisher(layout, rounder, runner, texts, figures)
    return documents, told


def _say_cost(direct: Direct, layout: Layout, asked: Asked) -> bool:
    """False: only the estimate was asked for."""
    cost = direct.cost(layout.pairs())
    say(
        f"estimate: {cost.num_passes:.0f} passes over the texts, about {cost.cpu_seconds / 60:.1f} minutes of one core beside "
        f"the rounding of weights; {size(cost.bytes_kept)} are kept in {asked.keep}, from where a run that is stopped goes on"
    )
    return not asked.only_estimate


def _directly(direct: Direct, layout: Layout, positions: Positions, figures: _Figures) -> None:
    from assay_evaluate.sensitivity.damage import damage_of
    from assay_quantize.sensitivity.direct import mean_other_experts

    whole = dict(direct.uniform())
    figures.damage["proxy:kl"] = {}
    for key, scheme, found in direct.parts(layout.pairs()):
        made = damage_of(found.kl_N, positions)
        pair = key, scheme
        figures.damage["proxy:kl"][pair] = made.mean
        figures.intervals[pair], figures.by_kind[pair] = made.interval, made.by_kind
        worst = mean_other_experts(found.other_experts)
        figures.routing[pair] = None if worst is None else LayerRouting(layer=worst[0], other_experts=worst[1])
    for scheme, found in whole.items():
        made = damage_of(found.kl_N, positions)
        keys = [key for key, sizes in layout.sizes.items() if key.role != "mtp" and scheme in sizes]
        saved = sum(layout.sizes[key]["bf16"] - layout.sizes[key][scheme] for key in keys)
        figures.uniform.append(
            UniformDamage(
                scheme=scheme,
                bytes=layout.other_bytes + sum(sizes["bf16"] for sizes in layout.sizes.values()) - saved,
                damage_nats=made.mean,
                interval=made.interval,
                sum_of_parts_nats=sum(v for (_, s), v in figures.damage["proxy:kl"].items() if s == scheme),
                routing=tuple(LayerRouting(layer=at, other_experts=share) for at, share in sorted(found.other_experts.items())),
            )
        )
    if not any(found.other_experts for found in whole.values()):
        figures.not_measured["routers"] = "no module of the model is given every token's experts"
    figures.noise = direct.noise()


def _by_fisher(layout: Layout, rounder: Rounder, runner: Any, texts: Any, figures: _Figures) -> None:
    from assay_quantize.sensitivity import fisher, weights
    from assay_quantize.sensitivity.texts import batched

    found = fisher.curvatures(runner.model, runner.addresses, batched(texts, 1), say)
    num_scored = sum(one.num_scored for one in texts)
    figures.damage |= {"proxy:fisher": {}, "proxy:weights": {}}
    for pair in layout.pairs():
        rounded = list(rounder.weights(*pair))
        figures.damage["proxy:fisher"][pair], figures.worst[pair] = fisher.damage(rounded, found, num_scored)
        figures.damage["proxy:weights"][pair], _ = weights.relative_error(rounded)


# ------------------------------------------------------------------------------------------------ texts
def _texts(asked: Asked, model: Any, folder: Path) -> tuple[Sequence[Document], str]:
    from assay_evaluate.divergence.documents import Document
    from assay_evaluate.sensitivity.served import texts_of_run
    from assay_quantize.calibration.text import Text

    if asked.served:
        written = texts_of_run(_served_folder(asked, write=True))
        return written, "replies that the served source wrote"
    if asked.run is not None:
        chosen = _some(texts_of_run(asked.run), asked.num_tokens, asked.seed)
        return chosen, f"texts of the reference of {asked.run}"
    if not asked.text and not asked.own:
        return _replies(
            asked, model, folder
        ), f"the model's replies to our questions, sampled at temperature 1, seed {asked.seed}"
    source = Text(asked.text, asked.seed)
    sequences = source.sequences(model, folder, asked.num_tokens, asked.length, say)
    # nothing predicts a text's first token
    made = [Document(f"{i}", "", tuple(one[:1]), tuple(one[1:]), "held_out") for i, one in enumerate(sequences)]
    return made, ", ".join(source.describe())


def _replies(asked: Asked, model: Any, folder: Path) -> Sequence[Document]:
    """To the questions that a suite's divergence has, answered in transformers."""
    from assay_evaluate.divergence.documents import Document, document_items
    from assay_quantize.sensitivity.texts import sample_replies

    suite = _suite(asked)
    items = document_items(suite.divergence, suite.seed)
    texts = sample_replies(
        model, folder, [item.prompt for item in items], max_tokens=asked.length, seed=asked.seed, say=say
    )  # fmt: skip
    return [
        Document(item.id, item.language, text.ids[: text.first], text.ids[text.first :], "replies", item.kind)
        for item, text in zip(items, texts, strict=True)
    ]


def _some(documents: Sequence[Document], num_tokens: int, seed: int) -> Sequence[Document]:
    """Texts of the run, drawn by their names, until there are enough tokens; in the run's order."""
    drawn = sorted(documents, key=lambda one: hashlib.sha256(f"{seed}:{one.texts}:{one.item}".encode()).digest())
    taken, total = set(), 0
    for one in drawn:
        if total >= num_tokens:
            break
        taken.add(id(one))
        total += len(one.reply_ids)
    return [one for one in documents if id(one) in taken]


def _scored(documents: Sequence[Document]) -> Any:
    from assay_quantize.sensitivity.texts import ScoredText

    return [ScoredText(tuple(one.ids), len(one.prompt_ids)) for one in documents]


# ------------------------------------------------------------------------------------------------ servers
def _suite(asked: Asked) -> Any:
    from assay_evaluate.sensitivity.served import suite_of

    num_texts = max(20, asked.num_tokens // asked.length)
    return suite_of(num_texts=num_texts, max_tokens=asked.length, seed=f"sensitivity-{asked.seed}")


def _served_folder(asked: Asked, *, write: bool = False) -> Path:
    """Folder of all servers on this source and suite. write: the reference has written its texts there."""
    from assay.cli.targets import local_checkpoint
    from assay_quantize.checkpoint.checkpoint import open_checkpoint

    source = local_checkpoint(asked.aim.location)
    suite = _suite(asked)
    made_from = [
        dict(open_checkpoint(source).data),
        suite.sha256,
        asked.profile.sha256 if asked.profile else None,
        asked.observer,
    ]
    folder = asked.keep / f"served-{sha256_of(made_from)[:16]}"
    if write:
        _measure(asked, source, {}, folder)
    return folder


def _measure(asked: Asked, source: Path, mixes: Mapping[str, Path], folder: Path) -> Mapping[str, Interval]:
    from assay_evaluate.sensitivity.served import kl_of, measure_served

    assert asked.profile is not None
    found = measure_served(
        asked.aim.recipe.name, source, "source", mixes, suite=_suite(asked), profile=asked.profile,
        serving=asked.aim.recipe.serving, folder=folder, on_progress=say,
    )  # fmt: skip
    return {one.label: kl_of(one) for one in found if one.label in mixes}


def _serve(asked: Asked, layout: Layout, source: Path, documents: Sequence[Document], figures: _Figures) -> None:
    """One checkpoint and one server after the other; a checkpoint goes once it is measured."""
    from assay.records.measurement import Measurement
    from assay_evaluate.sensitivity.served import kl_of
    from assay_quantize.engine.quantize import quantize
    from assay_quantize.plan.planner import make_plan

    folder = _served_folder(asked)
    order = figures.damage[f"proxy:{asked.proxy}"]
    chosen = spread(order, asked.served)
    say(
        f"serving {len(chosen)} checkpoints, {size(sum(s['bf16'] for s in layout.sizes.values()) + layout.other_bytes)} at once"
    )
    for number, pair in enumerate(chosen, 1):
        key, scheme = pair
        label = f"layer-{key.layer}-{key.role.replace('_', '-')}-{scheme.replace('_', '-')}"
        done = folder / "measurements" / f"{label}.json"
        if not done.is_file():
            recipe = layout.recipe(label, {key: scheme})
            plan = make_plan(layout.checkpoint, recipe, model=asked.aim.recipe.name, family=layout.family)
            made = folder / label / "checkpoint"
            quantize(plan, source, made)
            _measure(asked, source, {label: made}, folder)
            shutil.rmtree(made.parent)
        figures.served[pair] = kl_of(Measurement.load(done))
        say(f"served {number} of {len(chosen)}: {key}, {scheme}: {figures.served[pair].value:.3g} nats")
    figures.damage["served"] = {pair: found.value for pair, found in figures.served.items()}


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
    asked: Asked, layout: Layout, figures: _Figures, documents: Sequence[Document], told: str, cpu_seconds: float
) -> Sensitivity:
    from assay_quantize.sensitivity.texts import texts_sha256

    method = f"proxy:{asked.proxy}"
    plan = next(iter(layout.plans.values()))
    damage = figures.damage[method]
    drafts = _drafts(asked.run)
    if not drafts and any(key.role == "mtp" for key in layout.sizes):
        where = "say --run" if asked.run is None else f"no measured precision of {asked.run} drafted"
        figures.not_measured["acceptance by precision of the MTP block"] = where
    return Sensitivity(
        model=asked.aim.recipe.name,
        family=layout.family,
        source=plan.source,
        source_sha256=plan.source_sha256,
        source_revision=plan.source_revision,
        data_sha256=sha256_of(plan.source_files),
        method=method,
        in_nats=asked.proxy != "weights",
        observer=asked.observer,
        calibration=None if asked.method == "none" else calibration_of(asked).model_dump(mode="json"),
        texts=told,
        texts_sha256=texts_sha256(_scored(documents)),
        num_texts=len(documents),
        num_tokens=sum(len(one.reply_ids) for one in documents),
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
        noise_nats=figures.noise,
        correlations=_correlations(asked, figures),
        mtp_acceptance=drafts,
        not_measured=figures.not_measured,
        cpu_seconds=cpu_seconds,
    )  # fmt: skip


def _part(layout: Layout, figures: _Figures, damage: Mapping[Pair, float], key: Key, scheme: str) -> SensitivityPart:
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


def _correlations(asked: Asked, figures: _Figures) -> tuple[RankCorrelation, ...]:
    """Every method beside what was served, and every other one beside the method of the record."""
    from assay_evaluate.sensitivity.ranks import rank_correlation

    method = f"proxy:{asked.proxy}"
    flat = {
        name: {(key.layer, key.role, scheme): value for (key, scheme), value in found.items()}
        for name, found in figures.damage.items()
    }
    beside = [("served", name) for name in flat if name != "served"] if "served" in flat else []
    beside += [(method, name) for name in flat if name not in (method, "served")]
    return tuple(rank_correlation(name, flat[name], other, flat[other], seed=str(asked.seed)) for other, name in beside)


def _drafts(run: Path | None) -> tuple[MtpAcceptance, ...]:
    from assay_evaluate.sensitivity.drafts import mtp_acceptance

    return () if run is None else mtp_acceptance(run)


def check_asked(asked: Asked) -> None:
    """AssayError: options that do not go together."""
    if (asked.text or asked.own) and asked.run is not None:
        raise AssayError("--text gives other texts than --run has: say one of them; --out names a folder for the record")
    if asked.served and (asked.text or asked.own or asked.proxy == "weights"):
        what = "--text" if asked.text or asked.own else "--proxy weights"
        raise AssayError(f"--served measures on replies that the served source writes, and {what} does without: leave one out")
    if asked.method == "none":
        return
    if asked.proxy != "kl" or asked.served:
        what = "--served" if asked.served else f"--proxy {asked.proxy}"
        raise AssayError(
            f"--method {asked.method}: {what} says nothing of calibrated weights; measure them with --proxy kl alone"
        )
    if not set(asked.schemes) & set(INTEGERS):
        raise AssayError(
            f"--method {asked.method}: is for INT4, and --schemes has none of it; name one of {', '.join(INTEGERS)}"
        )
    if asked.own and asked.seed == calibration_of(asked).seed:
        raise AssayError(
            f"--seed {asked.seed}: the model's own text of this seed is what INT4 weights are calibrated on, and they would "
            "look better than they are; say another --seed"
        )
