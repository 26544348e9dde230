"""What `assay sensitivity` was asked, what it finds, and the texts it is measured on; for every proxy."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from assay.callbacks import Say, say_nothing
from assay.errors import AssayError
from assay.recipes.calibrated.methods import INTEGERS, GptqCalibration
from assay.recipes.precision import PrecisionRecipe
from assay.records.base import Interval, sha256_of
from assay.records.diagnosis.sensitivity import LayerRouting, UniformDamage, WholeDamage, WorstTensor

if TYPE_CHECKING:
    from assay.recipes.profile import ProfileRecipe
    from assay_evaluate.divergence.documents import Document
    from assay_evaluate.sensitivity.damage import Positions
    from assay_pipeline.targets import Target
    from assay_quantize.calibration.text import Text
    from assay_quantize.sensitivity.parts import Key, Layout
    from assay_quantize.sensitivity.rounded import Rounder

Proxy = Literal["kl", "hidden", "weights"]
Pair = tuple["Key", str]
GPTQ = GptqCalibration(method="gptq")
"""As the shipped precisions have it, so that what is measured is what `assay quantize` makes."""


@dataclass(frozen=True)
class Asked:
    """What the command line says. served: how many parts are also served; 0: none. keep: folder of what may be gone on with."""

    target: Target
    schemes: tuple[str, ...]
    proxy: Proxy
    observer: Literal["minmax", "mse"]
    run: Path | None
    text: tuple[Path, ...]
    num_tokens: int
    length: int
    served: int
    profile: ProfileRecipe | None
    seed: int
    keep: Path
    only_estimate: bool
    by_layer: bool | None = None
    """One layer in memory at a time; None: where the model does not fit."""
    memory_bytes: int | None = None
    hardware: str | None = None
    """With `only_estimate`: on which machine."""
    own: bool = False
    """Texts that the model samples by itself, instead of its replies."""
    method: Literal["none", "gptq"] = "none"
    """How INT4 weights are rounded: to the nearest, or by a calibration."""
    mixes: tuple[PrecisionRecipe, ...] = ()
    """Measured with all their parts quantized at once, beside the parts."""
    parts_of: tuple[Path, str] | None = None
    """Record of the parts and SHA-256 of its texts, where only `mixes` are missing: they are measured on the same."""
    say: Say = field(default=say_nothing, compare=False)


@dataclass
class Figures:
    """What is known of each part, by method."""

    damage: dict[str, dict[Pair, float]] = field(default_factory=dict)
    """Method -> pair -> figure."""
    intervals: dict[Pair, Interval | None] = field(default_factory=dict)
    by_kind: dict[Pair, Any] = field(default_factory=dict)
    routing: dict[Pair, LayerRouting | None] = field(default_factory=dict)
    worst: dict[Pair, tuple[WorstTensor, ...]] = field(default_factory=dict)
    uniform: list[UniformDamage] = field(default_factory=list)
    wholes: list[WholeDamage] = field(default_factory=list)
    served: dict[Pair, Interval] = field(default_factory=dict)
    noise: float | None = None
    num_texts_of_wholes: int | None = None
    """As in the record."""
    not_measured: dict[str, str] = field(default_factory=dict)


def mixes_of(asked: Asked, layout: Layout) -> dict[str, Mapping[Key, str]]:
    """Scheme of each part of every recipe of `asked.mixes`, by a name that says what it is. AssayError: it has what is not
    measured here."""
    by_name: dict[str, Mapping[Key, str]] = {}
    for recipe in asked.mixes:
        where = f"--mix {recipe.name}"
        method = "none" if recipe.calibration == "none" else recipe.calibration.method
        if method not in ("none", "gptq"):
            raise AssayError(f"{where}: has `calibration: {method}`, and parts are measured by gptq or data-free")
        chosen = {key: recipe.scheme_of(key.role, key.layer) for key in layout.sizes if key.role != "mtp"}
        mix = {key: scheme for key, scheme in chosen.items() if scheme is not None}
        measured = asked.method if set(INTEGERS) & set(mix.values()) else method  # --method changes nothing else
        for key, of_recipe, of_request in (("observer", recipe.observer, asked.observer), ("calibration", method, measured)):
            if of_recipe != of_request:
                raise AssayError(
                    f"{where}: has `{key}: {of_recipe}`, and {of_request} is measured; say --{_OPTIONS[key]} {of_recipe}"
                )
        if method == "gptq" and recipe.calibration != GPTQ:
            raise AssayError(f"{where}: has other options of `calibration` than w4a16-gptq, with which parts are measured")
        if recipe.needs_calibration or recipe.kv_cache is not None:
            raise AssayError(f"{where}: scales of activations and of the KV cache are not measured here; name one without them")
        roles = {key.role for key in layout.sizes}
        if others := sorted(set(recipe.quantize) - roles):
            raise AssayError(f"{where}: quantizes {', '.join(others)}, and parts are {', '.join(sorted(roles))}")
        if not mix:
            raise AssayError(f"{where}: keeps every part in 16 bits, which loses nothing; name one that quantizes some")
        left = {(excluded.layer, excluded.role, excluded.scheme): excluded.why for excluded in layout.left_out}
        for part, scheme in mix.items():
            if (reason := left.get((part.layer, part.role, scheme))) is not None:
                raise AssayError(f"{where}: has {part} in {scheme}, which it cannot take: {reason}; give it another or `bf16`")
            if scheme not in layout.sizes[part]:
                raise AssayError(f"{where}: has {part} in {scheme}, which --schemes has not; name that too")
        parts = sorted([key.layer, key.role, scheme] for key, scheme in mix.items())
        by_name[f"mix-{sha256_of(parts)[:16]}"] = mix  # what is measured of it is kept under this name
    return by_name


_OPTIONS = {"observer": "observer", "calibration": "method"}


def as_measured(asked: Asked, mix: PrecisionRecipe) -> PrecisionRecipe:
    """The mix as its parts and the uniform recipes were measured: what its base says beyond that is of all of them alike."""
    same = {"calibration": "none" if mix.calibration == "none" else GPTQ}
    return mix.model_copy(update=same | {"kv_cache": None, "activations": "constant", "headroom": 1.0})


class OtherTexts(AssayError):
    """The model writes others than parts were measured on: another version of torch, another number of threads."""


def check_texts(asked: Asked, documents: Sequence[Document]) -> None:
    """OtherTexts, before anything is measured: they are not those that parts were measured on before."""
    from assay_quantize.sensitivity.texts import texts_sha256

    if asked.parts_of is None:
        return
    record, before = asked.parts_of
    if (now := texts_sha256(scored(documents))) != before:
        raise OtherTexts(f"{record} was measured on other texts than there are now (sha256 {before[:16]} and {now[:16]})")


def by_weights(layout: Layout, rounder: Rounder, figures: Figures, say: Say) -> None:
    from assay_quantize.sensitivity.rounded import relative_error

    pairs = layout.pairs()
    figures.damage["proxy:weights"] = {}
    for number, pair in enumerate(pairs, 1):
        figures.damage["proxy:weights"][pair], worst = relative_error(rounder.weights(*pair))
        figures.worst.setdefault(pair, worst)
        if number % 50 == 0 or number == len(pairs):
            say(f"weights: {number} of {len(pairs)} parts and schemes")


def take_found(
    whole: Mapping[str, Any], parts: Iterable[tuple[Key, str, Any]], layout: Layout, positions: Positions, figures: Figures
) -> None:
    """What proxy `kl` found: of parts on one half of the texts, of wholes on the other, so that a mix is not measured on what
    it was chosen on. whole: of `layout.wholes()`, by name."""
    import numpy as np

    from assay_evaluate.sensitivity.damage import damage_of, halves, only
    from assay_quantize.sensitivity.direct import most_disturbed_router

    every = np.ones(len(positions.text_N), np.bool_)
    split = halves(positions)
    of_parts_N, of_wholes_N = split or (every, every)
    for_parts, for_wholes = only(positions, of_parts_N), only(positions, of_wholes_N)
    figures.num_texts_of_wholes = for_wholes.num_texts if split else None
    figures.damage["proxy:kl"] = {}
    for key, scheme, result in parts:
        made = damage_of(result.kl_N[of_parts_N], for_parts)
        pair = key, scheme
        figures.damage["proxy:kl"][pair] = made.mean
        figures.intervals[pair], figures.by_kind[pair] = made.interval, made.by_kind
        worst = most_disturbed_router(result.other_experts)
        figures.routing[pair] = None if worst is None else LayerRouting(layer=worst[0], other_experts=worst[1])
    for scheme, result in whole.items():
        made = damage_of(result.kl_N[of_wholes_N], for_wholes)
        if (mix := layout.mixes.get(scheme)) is not None:
            figures.wholes.append(
                WholeDamage(
                    schemes=tuple(
                        (key.layer, key.role, scheme_name) for key, scheme_name in mix.items() if key.layer is not None
                    ),
                    damage_nats=made.mean,
                    interval=made.interval,
                    sum_of_parts_nats=sum(figures.damage["proxy:kl"][part] for part in mix.items()),
                )
            )
            continue
        saved = sum(layout.sizes[key]["bf16"] - layout.sizes[key][scheme] for key in layout.wholes()[scheme])
        figures.uniform.append(
            UniformDamage(
                scheme=scheme,
                bytes=layout.other_bytes + sum(sizes["bf16"] for sizes in layout.sizes.values()) - saved,
                damage_nats=made.mean,
                interval=made.interval,
                sum_of_parts_nats=sum(v for (_, s), v in figures.damage["proxy:kl"].items() if s == scheme),
                routing=tuple(
                    LayerRouting(layer=at, other_experts=share) for at, share in sorted(result.other_experts.items())
                ),
            )
        )
    if not any(result.other_experts for result in whole.values()):
        figures.not_measured["routers"] = "no module of the model is given every token's experts"


def texts_for(asked: Asked, model: Any, folder: Path) -> tuple[Sequence[Document], str]:
    from assay_evaluate.divergence.documents import Document
    from assay_evaluate.sensitivity.served import texts_of_run

    if asked.served:
        written = texts_of_run(served_folder(asked, write=True))
        return written, "replies that the served source wrote"
    if asked.run is not None:
        chosen = _some(texts_of_run(asked.run), asked.num_tokens, asked.seed)
        return chosen, f"texts of the reference of {asked.run}"
    if not asked.text and not asked.own:
        return _replies(
            asked, model, folder
        ), f"the model's replies to our questions, sampled at temperature 1, seed {asked.seed}"
    sources = _by_language(asked)
    made: list[Document] = []
    for language, source in sources.items():
        share = asked.num_tokens // len(sources)
        for token_ids in source.sequences(model, folder, share, asked.length, asked.say):
            # nothing predicts a text's first token
            made.append(Document(f"{len(made)}", language, tuple(token_ids[:1]), tuple(token_ids[1:]), "held_out"))
    return made, ", ".join(words for source in sources.values() for words in source.describe())


def _by_language(asked: Asked) -> dict[str, Text]:
    """What texts are taken from; where rows of files say `language`, each language has sequences, and a share, of its own."""
    from assay_quantize.calibration.sources import FileText, languages_of
    from assay_quantize.calibration.text import Text, Weighted

    languages = languages_of(asked.text)
    if len(languages) < 2:
        return {"".join(languages): Text(asked.text, asked.seed)}
    every = {code: [FileText(path, language=code) for path in asked.text] for code in languages}
    has_some = {
        code: [source for source in sources if next(source.open().entries, None) is not None] for code, sources in every.items()
    }
    return {code: Text(mix=tuple(map(Weighted, sources))) for code, sources in has_some.items()}


def _replies(asked: Asked, model: Any, folder: Path) -> Sequence[Document]:
    """To the questions that a suite's divergence has, answered in transformers."""
    from assay_evaluate.divergence.documents import Document, document_items
    from assay_quantize.sensitivity.texts import sample_replies

    suite = suite_of_texts(asked)
    items = document_items(suite.divergence, suite.seed)
    texts = sample_replies(
        model, folder, [item.prompt for item in items], max_tokens=asked.length, seed=asked.seed, say=asked.say
    )  # fmt: skip
    return [
        Document(item.id, item.language, text.ids[: text.first], text.ids[text.first :], "replies", item.kind)
        for item, text in zip(items, texts, strict=True)
    ]


def _some(documents: Sequence[Document], num_tokens: int, seed: int) -> Sequence[Document]:
    """Texts of the run, drawn by their names, until there are enough tokens; in the run's order."""
    drawn = sorted(documents, key=lambda document: hashlib.sha256(f"{seed}:{document.texts}:{document.item}".encode()).digest())
    taken, total = set(), 0
    for document in drawn:
        if total >= num_tokens:
            break
        taken.add(id(document))
        total += len(document.reply_ids)
    return [document for document in documents if id(document) in taken]


def scored(documents: Sequence[Document]) -> Any:
    from assay_quantize.sensitivity.texts import ScoredText

    return [ScoredText(tuple(document.ids), len(document.prompt_ids)) for document in documents]


def suite_of_texts(asked: Asked) -> Any:
    from assay_evaluate.sensitivity.served import suite_of

    num_texts = max(20, asked.num_tokens // asked.length)
    return suite_of(num_texts=num_texts, max_tokens=asked.length, seed=f"sensitivity-{asked.seed}")


def served_folder(asked: Asked, *, write: bool = False) -> Path:
    """Folder of all servers on this source and suite. write: the reference has written its texts there."""
    from assay_pipeline.targets import local_checkpoint
    from assay_quantize.checkpoint.checkpoint import open_checkpoint

    source = local_checkpoint(asked.target.location, say=asked.say)
    suite = suite_of_texts(asked)
    made_from = [
        dict(open_checkpoint(source).data),
        suite.sha256,
        asked.profile.sha256 if asked.profile else None,
        asked.observer,
    ]
    folder = asked.keep / f"served-{sha256_of(made_from)[:16]}"
    if write:
        measure(asked, source, {}, folder)
    return folder


def measure(asked: Asked, source: Path, mixes: Mapping[str, Path], folder: Path) -> Mapping[str, Interval]:
    from assay_evaluate.sensitivity.served import kl_of, measure_served

    assert asked.profile is not None
    measurements = measure_served(
        asked.target.recipe.name, source, "source", mixes, suite=suite_of_texts(asked), profile=asked.profile,
        serving=asked.target.recipe.serving, folder=folder, on_progress=asked.say,
    )  # fmt: skip
    return {measurement.label: kl_of(measurement) for measurement in measurements if measurement.label in mixes}


def check_asked(asked: Asked) -> None:
    """AssayError: options that do not go together."""
    if (asked.text or asked.own) and asked.run is not None:
        raise AssayError("--text gives other texts than --run has: say one of them; --out names a folder for the record")
    if asked.hardware is not None and not asked.only_estimate:
        raise AssayError("--hardware says what another machine would take: say --estimate as well")
    if asked.by_layer and asked.proxy not in ("kl", "hidden"):
        raise AssayError(f"--by-layer is for --proxy kl and hidden; --proxy {asked.proxy} does without")
    if asked.served and (asked.text or asked.own or asked.proxy in ("weights", "hidden")):
        what = "--text" if asked.text or asked.own else f"--proxy {asked.proxy}"
        raise AssayError(f"--served measures on replies that the served source writes, and {what} does without: leave one out")
    if asked.mixes and asked.proxy != "kl":
        raise AssayError(f"--mix measures a whole model, and --proxy {asked.proxy} does not; say --proxy kl")
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
    if asked.own and asked.seed == GPTQ.seed:
        raise AssayError(
            f"--seed {asked.seed}: the model's own text of this seed is what INT4 weights are calibrated on, and they would "
            "look better than they are; say another --seed"
        )
