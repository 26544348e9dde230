"""`assay blame`: which part of a candidate lost what it lost, and the cheapest change that mends it.

Weights by role, activations, KV cache and config.json are switched between candidate and reference in a small designed
experiment, teacher-forced and layer by layer as a screening is; the layers of what lost most are found by halving. What a
server adds is what the divergence that a run measured has beyond it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from assay.callbacks import Say, say_nothing
from assay.errors import AssayError, did_you_mean
from assay.foreign_text import shown
from assay.quantities import number_ranges
from assay.recipes.precision import PrecisionRecipe
from assay.recipes.text_config import num_hidden_layers
from assay.records.base import Interval, sha256_of
from assay.records.diagnosis.blame import (
    BLAME,
    BLAME_RECORD,
    Blame,
    BlameWord,
    Cause,
    Change,
    Interaction,
    LayerRange,
    Served,
    ServingCause,
)
from assay.records.manifest import load_manifest
from assay.records.run import folder_name
from assay.records.verdict import GateReport, Overall
from assay.safe_files import read_json_object
from assay_pipeline.blaming.change import MEASURED_AT_MOST, Restored, cheapest, options_of
from assay_pipeline.blaming.changed_recipe import changed_recipe, write_recipe
from assay_pipeline.blaming.experiment import STRONG, narrow, run_design
from assay_pipeline.blaming.factors import Factor, factors_of, switches_of
from assay_pipeline.blaming.points import Points
from assay_pipeline.blaming.serving import serving_causes
from assay_pipeline.comparison.damage import unlike_reference
from assay_pipeline.comparison.screen_figures import kl_of_texts, limit_by_bits
from assay_pipeline.comparison.screen_passes import (
    Arithmetic,
    KvCacheDtype,
    PassRunner,
    check_device,
    numerics_of,
    panel_of,
    states_in,
)
from assay_pipeline.comparison.screen_sources import ScreenSource, check_out, check_place
from assay_pipeline.comparison.screen_texts import check_texts, read_panel
from assay_pipeline.comparison.screening import GATES, check_vocabulary, kl_gate, shipped_panel
from assay_pipeline.deployment import folder_of
from assay_pipeline.interrupted import interruptible
from assay_pipeline.judging import load_measurements
from assay_pipeline.places import place_for
from assay_pipeline.run_folders import JOURNAL

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from assay.records.measurement import Measurement

    Floats = NDArray[np.float64]

KV_VARIANT = "kv-cache-dtype=bfloat16"


@dataclass(frozen=True)
class Question:
    """text: as of `screen`; none: what the run's reference wrote, else the shipped panel. anyway: also of a candidate that is
    within the limit. variants: other ways of serving the candidate, which are asked what it lost; profile: None: as in the run.
    max_hours: passes are not begun if they are estimated to take longer."""

    text: tuple[Path, ...] = ()
    num_tokens: int = 8_000
    length: int | None = None
    arithmetic: Arithmetic = "fp32"
    device: str = "cpu"
    kv_cache_dtype: KvCacheDtype = "auto"
    gates: str = GATES
    anyway: bool = False
    variants: tuple[str, ...] = ()
    profile: str | None = None
    max_hours: float | None = None
    memory_bytes: int | None = None


@dataclass(frozen=True)
class _Sides:
    """Folders of both; of a run, the run and what it measured of the candidate."""

    reference: Path
    candidate: Path
    label: str
    run_dir: Path | None = None
    measured: Measurement | None = None
    measured_reference: Measurement | None = None
    gates: GateReport | None = None

    @property
    def run_status(self) -> Overall | None:
        """What the run says of the candidate."""
        return None if self.gates is None else self.gates.overall.get(self.label)


def blame(
    checkpoints: Sequence[str], question: Question, *, candidate: str | None = None, out: Path | None = None,
    say: Say = say_nothing,
) -> tuple[Blame, Path]:  # fmt: skip
    """The record, and where it was written.

    checkpoints: the folder of a run, or those of a reference and a candidate. candidate: label in the run; None: the only one
    that has not passed. out: folder of the record and of what a killed command goes on from. AssayError: there is no such run
    or checkpoint, it cannot be run layer by layer, or the two are not of one model.
    """
    started = time.monotonic()
    sides = _sides(checkpoints, candidate)
    if question.variants and sides.run_dir is None:
        raise AssayError("--variant: is asked what the candidate of a run lost; give the run's folder, or leave it out")
    text = question.text or _default_text(sides)
    check_texts(text)
    check_vocabulary(sides.label, sides.reference, sides.candidate)
    if out is not None:
        check_out(out, [sides.reference, sides.candidate])

    from assay_quantize.calibration.quiet import quiet
    from assay_quantize.screen.texts import stated_in

    kl_gate(question.gates)  # before hours of work
    check_device(question.device)
    place = place_for("blame", f"{BLAME}/{sides.label}", run=sides.run_dir, out=out, say=say)
    sources = [ScreenSource(str(folder), folder) for folder in (sides.reference, sides.candidate)]
    with (
        quiet(),
        interruptible(lambda: f"passes that are done are kept in {place.records}; the same command goes on"),
        states_in(place.records / "passes", is_temporary=False),
        ExitStack() as open_files,
    ):
        reference, stored = (open_files.enter_context(source.opened()) for source in sources)
        for source in sources:
            if (damage := source.damage()) is not None:
                say(f"note: {source.damage_note(damage)}")
        entries = read_panel(text, sides.reference, question.num_tokens, question.length)
        panel = panel_of(list(map(str, text)), entries, stated_in(text))
        texts = [entry.scored for entry in entries]
        say(f"{panel.num_texts} texts, {panel.num_tokens:,} tokens scored")
        runner = PassRunner(
            question.arithmetic, question.device, place.records / "passes", say, question.kv_cache_dtype, question.memory_bytes
        )
        hashes = [source.sha256() for source in sources]
        numerics = numerics_of(question.arithmetic, question.device)
        identity = sha256_of([*hashes, panel.sha256, numerics.model_dump(mode="json"), question.kv_cache_dtype])
        points = Points(runner, reference, stored, texts, identity)
        differences = unlike_reference(sides.reference, sides.candidate)
        answer = _answer(question, sides, points, differences, place.records, say)
        serving: tuple[ServingCause, ...] = ()
        if question.variants and sides.run_dir is not None and sides.measured and sides.measured_reference:
            serving = serving_causes(
                sides.candidate, question.variants, sides.measured_reference, sides.measured, run_dir=sides.run_dir,
                work=place.records, profile=question.profile, say=say,
            )  # fmt: skip
        record = Blame(
            reference=str(sides.reference),
            candidate=str(sides.candidate),
            reference_sha256=hashes[0],
            candidate_sha256=hashes[1],
            numerics=numerics,
            panel=panel,
            surprise=points.surprise,
            kl=answer.kl,
            limit=answer.limit,
            limit_for=answer.limit_for,
            word=answer.word,
            causes=tuple(answer.causes),
            interactions=tuple(answer.interactions),
            unexplained=answer.unexplained,
            layers=tuple(answer.layers),
            change=answer.change,
            served=answer.served,
            run_status=sides.run_status,
            run_reason="" if sides.gates is None else sides.gates.reasons.get(sides.label, ""),
            serving=serving,
            num_passes=points.num_passes,
            seconds=time.monotonic() - started,
        )
    path = place.records / BLAME_RECORD
    record.save(path)
    return record, path


# ------------------------------------------------------------------------------------------------ who
def _sides(checkpoints: Sequence[str], candidate: str | None) -> _Sides:
    if len(checkpoints) == 1:
        return _of_run(Path(checkpoints[0]).expanduser(), candidate)
    if len(checkpoints) != 2:
        raise AssayError("give the folder of a run, or those of a reference and of a candidate")
    if candidate is not None:
        raise AssayError("--candidate: is for a run; of two folders the second is the candidate")
    for text in checkpoints:
        check_place(text)
        if not Path(text).expanduser().is_dir():
            raise AssayError(f"{shown(text)}: is read many times; download it first and give its folder")
    reference, other = (Path(text).expanduser() for text in checkpoints)
    return _Sides(reference, other, folder_name(other))


def _of_run(run_dir: Path, candidate: str | None) -> _Sides:
    if not run_dir.is_dir():
        raise AssayError(
            f"{shown(str(run_dir))}: no such folder; give that of a run, or those of a reference and of a candidate"
        )
    measured = {measurement.label: measurement for measurement in load_measurements(run_dir)}
    references = [label for label, measurement in measured.items() if measurement.is_reference]
    candidates = [
        label for label, measurement in measured.items() if not measurement.is_reference and not measurement.is_noise_floor
    ]
    if not references or not candidates:
        raise AssayError(f"{run_dir}: has no reference and candidate that were measured")
    gates = GateReport.load_if_there(run_dir / "gates.json")
    if candidate is None:
        not_passed = [label for label in candidates if gates is None or gates.overall.get(label) != "PASS"]
        if len(not_passed) != 1 and len(candidates) != 1:
            raise AssayError(f"{run_dir}: say --candidate LABEL, one of {', '.join(not_passed or candidates)}")
        candidate = (not_passed or candidates)[0]
    if candidate not in candidates:
        hint = did_you_mean(candidate, candidates)
        raise AssayError(f"--candidate {shown(candidate)}: {hint}{run_dir} has the candidates {', '.join(candidates)}")
    if measured[candidate].is_variant:
        raise AssayError(
            f"--candidate {candidate}: is the reference's own checkpoint, served another way: its weights lost nothing; what "
            "an FP8 KV cache does to next tokens is said of that folder, given twice, with --kv-cache-dtype fp8"
        )
    reference, other = (folder_of(measured[label], run_dir) for label in (references[0], candidate))
    return _Sides(reference, other, candidate, run_dir, measured[candidate], measured[references[0]], gates)


def _default_text(sides: _Sides) -> tuple[Path, ...]:
    """What the run's reference wrote, if it did; else the shipped panel."""
    from assay.errors import MeasureError
    from assay_evaluate.divergence.documents import texts_of_run

    if sides.run_dir is not None and (sides.run_dir / JOURNAL).is_file():
        try:
            texts_of_run(sides.run_dir)
        except MeasureError:
            pass
        else:
            return (sides.run_dir,)
    return (shipped_panel(),)


# ------------------------------------------------------------------------------------------------ what
@dataclass(frozen=True)
class _Answer:
    """Fields of `Blame`."""

    kl: Interval
    limit: float
    limit_for: str
    word: BlameWord
    causes: Sequence[Cause] = ()
    interactions: Sequence[Interaction] = ()
    unexplained: float | None = None
    layers: Sequence[LayerRange] = ()
    change: Change | None = None
    served: Served | None = None


def _answer(
    question: Question, sides: _Sides, points: Points, differences: Sequence[str], folder: Path, say: Say
) -> _Answer:  # fmt: skip
    from assay_evaluate.statistics.factorial import MOST_FACTORS
    from assay_quantize.screen.mixed_model import Switches

    nothing, everything = points.model(Switches()), points.model(Switches(activations=True, kv_cache=True, config=True))
    factors = factors_of(nothing, everything, differences, MOST_FACTORS)
    for line in _plan(factors, points, question):
        say(line)
    limit = limit_by_bits(kl_gate(question.gates), sides.candidate)

    def kl_of(chosen: Sequence[Factor]) -> Floats:
        return points.kl(switches_of(chosen), _in_words(chosen, factors))

    def interval_of(chosen: Sequence[Factor]) -> Interval:
        return kl_of_texts(kl_of(chosen), points.num_tokens)

    whole = interval_of(factors)
    served = _served(sides.measured, whole)
    answer = _Answer(whole, limit.value, limit.reason, "nothing to blame", served=served)
    within: BlameWord = "undecided" if sides.run_status == "FAIL" else "nothing to blame"
    answer = replace(answer, word=within)
    if whole.high <= limit.value and within == "nothing to blame" and not question.anyway:
        return answer
    experiment = run_design(factors, kl_of)
    is_shown = any(cause.share is not None and cause.share.low > 0 for cause in experiment.causes)
    by_name = {factor.name: factor for factor in factors}
    strong = [cause for cause in experiment.causes if cause.share is not None and cause.share.value >= STRONG]
    ranges = [narrow(by_name[cause.name], kl_of) for cause in strong]
    layers = [span for span in ranges if span is not None]
    is_above = whole.low > limit.value and not points.surprise.is_foreign
    word: BlameWord = "blamed" if is_above and is_shown else "undecided"
    if whole.high <= limit.value:
        word = within
    answer = replace(
        answer, word=word, causes=experiment.causes, interactions=experiment.interactions, layers=layers,
        unexplained=experiment.unexplained,
    )  # fmt: skip
    if word != "blamed":
        return answer
    options = options_of(factors, experiment.causes, layers, whole.value, limit.value, everything)
    if (proposed := cheapest(options, factors, whole, limit.value, interval_of, everything)) is None:
        return answer
    return replace(answer, change=_said(*proposed, sides.candidate, folder))


def _plan(factors: Sequence[Factor], points: Points, question: Question) -> Iterator[str]:
    """What will be done. AssayError: it is estimated to take longer than it may."""
    from assay_evaluate.statistics.factorial import design
    from assay_quantize.estimate.show import duration
    from assay_quantize.screen.estimate import estimate_pass

    if not factors:
        raise AssayError(f"{points.candidate.location}: computes what {points.reference.location} does; nothing to blame")
    yield f"{len(factors)} causes: {'; '.join(factor.what for factor in factors)}"
    num_layers = points.reference_model().num_layers
    most = len(design(len(factors))) + 2 * len(factors) + 2 * math.ceil(math.log2(max(2, num_layers))) + MEASURED_AT_MOST
    seconds = estimate_pass(points.reference_model(), points.texts, points.runner.folder, has_draft=False).seconds
    yield (
        f"estimate: about {duration(seconds)} a pass; one if it is within the limit, else {len(design(len(factors)))} to {most}"
    )
    if question.max_hours is not None and most * seconds > 3600 * question.max_hours:
        raise AssayError(
            f"--max-hours: up to {most} passes of about {duration(seconds)}; give fewer --tokens, or more --max-hours"
        )


def _in_words(chosen: Sequence[Factor], factors: Sequence[Factor]) -> str:
    """What is the candidate's in a pass."""
    if not chosen:
        return "nothing of the candidate"
    if len(chosen) == len(factors) and list(chosen) == list(factors):
        return "all of the candidate"
    parts = []
    for factor in chosen:
        layers = sorted({place.layer for place in factor.places if place.layer is not None})
        several = "s" if len(layers) > 1 else ""
        where = f" of layer{several} {number_ranges(layers)}" if factor.is_part and layers else ""
        parts.append(f"{factor.what}{where}")
    return ", ".join(parts)


def _served(measured: Measurement | None, whole: Interval) -> Served | None:
    """What the run measured on its servers of text that both answer for."""
    drift = () if measured is None or measured.divergence is None else measured.divergence.drift
    for texts in drift:
        if isinstance(texts.kl_mean, Interval):
            return Served(kl=texts.kl_mean, is_more=texts.kl_mean.low > whole.high)
    return None


def _said(change: Change, restored: Sequence[Restored], candidate: Path, folder: Path) -> Change:
    """With the recipe, or the words while serving, that make it."""
    factors = [option.factor for option in restored]
    if {factor.kind for factor in factors} == {"kv_cache"}:
        return change.model_copy(update={"variant": KV_VARIANT})
    if (manifest := load_manifest(candidate)) is None:
        return change
    own = PrecisionRecipe.model_validate(manifest.precision_recipe)
    layers = num_hidden_layers(read_json_object(candidate, "config.json"))
    recipe = changed_recipe(own, factors, layers, f"{own.name}-mended", ", ".join(change.restored))
    if recipe is None:
        return change
    file = folder / f"{recipe.name}.yaml"
    write_recipe(recipe, file)
    return change.model_copy(update={"recipe": str(file)})
