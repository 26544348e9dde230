"""`assay preflight`: everything that can be known of a run before it costs anything. Gathers the checks of the stages.

A check is a function from the planned run to `Check` records. To add one: a function here that hands a stage what it needs of
the run, and its place in `CHECKS`. What it cannot find out is an AssayError, and becomes one UNKNOWN.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING

from assay.errors import AssayError
from assay.foreign_text import one_line
from assay.quantities import size
from assay.recipes.gate import ScoreGate
from assay.recipes.load import load_recipe
from assay.recipes.profile import ProfileRecipe, context_tokens
from assay.recipes.suite import SuiteRecipe
from assay.records.preflight.report import Check, CheckName, PreflightReport
from assay_pipeline.comparison.planned_run import PlannedRun, is_on_gpus

if TYPE_CHECKING:
    from assay_evaluate.roofline.weights import ServedWeights
    from assay_evaluate.serving.replay import Candidate


def preflight(run: PlannedRun, on_progress: Callable[[str], None]) -> PreflightReport:
    """All checks of a run, in their order. on_progress: is told what takes longer than a moment."""
    started = time.monotonic()
    checks: list[Check] = []
    for name, look in CHECKS:
        try:
            checks += list(look(run, on_progress))
        except AssayError as error:
            detail = f"could not be looked at: {one_line(str(error).partition(chr(10))[0])}"
            checks.append(Check(check=name, subject=None, outcome="UNKNOWN", detail=detail))
    return report_of(run, checks, time.monotonic() - started)


def report_of(run: PlannedRun, checks: Iterable[Check] = (), seconds: float = 0.0) -> PreflightReport:
    """Without checks: of a run whose checkpoints are made and measured already."""
    return PreflightReport(
        model=run.target.recipe.name,
        source=run.source.location,
        profile=run.profile.name,
        suite=run.suite.name,
        precisions=tuple(checkpoint.label for checkpoint in run.checkpoints if checkpoint.location is None),
        checks=tuple(checks),
        seconds=seconds,
    )


# ------------------------------------------------------------------------------------------------ the checks
def check_hardware(run: PlannedRun, on_progress: Callable[[str], None]) -> Iterator[Check]:
    """Whether the GPUs of the profile are here. A profile that was named may be for another machine, unless the run begins."""
    from assay_evaluate.serving.hardware import describe_hardware, describe_needs, find_gpus, fits

    if not run.is_served_here:
        detail = (
            f"the servers of its endpoints ({', '.join(run.profile.endpoints)}) run already: their GPUs, environment, context, "
            "memory, tensor parallelism and loaders are not looked at"
        )
        remedy = "`assay preflight` with a profile for their machine, without `endpoints`, looks at these"
        yield Check(check="hardware", subject=run.profile.name, outcome="UNKNOWN", detail=detail, remedy=remedy)
        return
    here = describe_hardware()
    machine_text = f"this machine has {here.get('gpus', 'no GPU')}, {here['cores']} cores, {here['memory']}"
    if fits(run.profile.hardware, find_gpus()):
        yield Check(check="hardware", subject=run.profile.name, outcome="PASS", detail=machine_text)
        return
    detail = f"profile {describe_needs(run.profile)}; {machine_text}"
    if run.named and not run.here:
        detail += "; disk and environment are those of this machine, the rest is for the machine that the profile names"
        remedy = f"run it again on {run.profile.name} before `assay run`"
        yield Check(check="hardware", subject=run.profile.name, outcome="UNKNOWN", detail=detail, remedy=remedy)
        return
    remedy = f"--profile {run.profile.name} checks the run for that machine; known profiles: `assay recipes`"
    if run.named:
        remedy = (
            "begin the run where these GPUs are, or leave --profile out (make: PROFILE) to have one chosen for this machine; "
            f"`assay preflight --profile {run.profile.name}` alone checks the run for a machine elsewhere"
        )
    yield Check(check="hardware", subject=run.profile.name, outcome="FAIL", detail=detail, remedy=remedy)


def check_plans(run: PlannedRun, on_progress: Callable[[str], None]) -> Iterator[Check]:
    """Whether every precision can be made of the source."""
    for checkpoint in run.checkpoints:
        if checkpoint.plan is not None:
            plan = checkpoint.plan
            made = f"{len(plan.tensors):,} tensors, {size(plan.bytes_in)} -> {size(plan.bytes_out)}"
            if checkpoint.automatic is not None and not checkpoint.is_chosen:
                made = f"schemes are chosen in the run within {checkpoint.automatic.budget.text}; looked at as its base, {made}"
            yield Check(check="plan", subject=checkpoint.label, outcome="PASS", detail=made)
        elif checkpoint.problem is not None:
            what, _, remedy = checkpoint.problem.rpartition("; ")
            other = "leave it out (--precisions), or take another precision"
            detail, remedy = (one_line(what), one_line(remedy)) if what else (one_line(remedy), other)
            yield Check(check="plan", subject=checkpoint.label, outcome="FAIL", detail=detail, remedy=remedy)


def check_environment(run: PlannedRun, on_progress: Callable[[str], None]) -> Iterable[Check]:
    """Driver, compilers and packages of the servers."""
    from assay_evaluate.preflight.environment import check_environment as look

    configs = {checkpoint.label: checkpoint.config for checkpoint in run.checkpoints if checkpoint.config is not None}
    return look(run.profile, configs) if run.is_served_here else ()


def check_tokenizer(run: PlannedRun, on_progress: Callable[[str], None]) -> Iterator[Check]:
    """Tokenizer, chat template and parsers: of the source, whose files the checkpoints made here get, and of the reference."""
    from assay_evaluate.preflight.asking import check_tokenizer as look
    from assay_pipeline.comparison.small_files import small_files

    looked_at = {"source": run.source}
    if run.reference.headers is not None and run.reference.headers.location != run.source.location:
        looked_at["reference"] = run.reference.headers
    for label, checkpoint in looked_at.items():
        yield from look(small_files(label, checkpoint), run.suite, run.profile, run.target.recipe.serving, _required(run))


def check_data_sets(run: PlannedRun, on_progress: Callable[[str], None]) -> Iterable[Check]:
    """Data sets of the hub."""
    from assay_evaluate.preflight.data_sets import check_data_sets as look

    return look(run.suite)


def check_context(run: PlannedRun, on_progress: Callable[[str], None]) -> Iterable[Check]:
    """Prompts and replies against the context that the profile serves."""
    from assay_evaluate.preflight.asking import check_context as look

    return look(run.suite, _context(run), _required(run), is_chat=_is_chat(run)) if run.is_served_here else ()


def _context(run: PlannedRun) -> int | None:
    return context_tokens(run.reference.config or run.source.config, run.profile, run.target.recipe.serving)


def _is_chat(run: PlannedRun) -> bool:
    from assay_pipeline.comparison.small_files import small_files

    return "chat-template" in run.target.recipe.serving.vllm or small_files("source", run.source).template is not None


def counted(run: PlannedRun) -> SuiteRecipe:
    """The suite with numbers only; of servers that run already, by what profile and config say of the context."""
    from assay_evaluate.tasks.cells import settle_suite

    return settle_suite(run.suite, _context(run), is_chat=_is_chat(run))


def _required(run: PlannedRun) -> frozenset[str]:
    """Tasks that a required gate judges."""
    return frozenset(gate.task for gate in run.gates.gates if isinstance(gate, ScoreGate) and gate.required)


def check_sampling(run: PlannedRun, on_progress: Callable[[str], None]) -> Iterable[Check]:
    """How the suite asks, against the model's card."""
    from assay_evaluate.preflight.asking import check_sampling as look
    from assay_pipeline.comparison.small_files import json_file

    return look(run.suite, run.target.recipe, json_file(run.source, "generation_config.json"))


def check_cost(run: PlannedRun, on_progress: Callable[[str], None]) -> Iterable[Check]:
    """Requests, tokens and hours of measuring. How long it takes to quantize says `assay plan --hardware`."""
    from assay_evaluate.preflight import cost

    return cost.check_cost(
        counted(run),
        run.profile,
        run.target.recipe.serving,
        reference=run.reference.label,
        weights=served_weights_of(run),
        own_texts=bool(run.target.recipe.deployment_profiles),
    )


def served_weights_of(run: PlannedRun) -> dict[str, ServedWeights | None]:
    """Label -> what a server reads and computes, of every checkpoint, the reference first; None: not known."""
    from assay_evaluate.preflight.cost import held_by
    from assay_evaluate.roofline.weights import served_weights

    return {
        checkpoint.label: None
        if checkpoint.stored is None
        else served_weights(
            checkpoint.stored.family,
            checkpoint.stored.config,
            ((weight.name, weight.shape, weight.num_bytes) for weight in checkpoint.stored.weights),
            bytes_each=held_by(run.profile),
        )
        for checkpoint in run.checkpoints
    }


def check_power(run: PlannedRun, on_progress: Callable[[str], None]) -> Iterator[Check]:
    """Whether the suite can decide."""
    from assay_evaluate.preflight import power

    suite = counted(run)
    yield power.check_power(suite, run.gates)
    if (check := power.check_num_texts(suite, run.gates)) is not None:
        yield check


def check_disk(run: PlannedRun, on_progress: Callable[[str], None]) -> Iterator[Check]:
    """Downloads, checkpoints, staging and journal against what is free."""
    from assay_quantize.preflight.disk import Writes
    from assay_quantize.preflight.disk import check_disk as look

    run_dir = run.run_dir
    folders = {plan.precision: (plan, run_dir / plan.precision / "checkpoint") for plan in run.plans}
    released = run.reference.headers if run.reference.plan is None else None
    allowed = JOURNAL_BYTES[run.profile.hardware.device]
    yield from look(
        Writes(run.source, run.target.recipe.include_source, released, folders, run_dir, allowed, run.stream_from is not None)
    )


def check_memory(run: PlannedRun, on_progress: Callable[[str], None]) -> Iterator[Check]:
    """Weights, KV cache and workspace of each GPU or of this machine, for every checkpoint."""
    from assay_quantize.preflight import memory

    profile, serving = run.profile, run.target.recipe.serving
    if is_on_gpus(profile):
        others = [load_recipe(ProfileRecipe, name) for name in run.target.recipe.profiles]
        others = [other for other in others if other.name != profile.name]
        checks = (memory.check_memory(label, model, profile, serving, others) for label, model in run.stored())
        yield from (check for check in checks if check is not None)
    elif run.is_served_here:
        from assay_evaluate.preflight.cost import held_by
        from assay_evaluate.serving import hardware
        from assay_evaluate.serving.vllm_command import server_environment

        space = server_environment(profile).get("VLLM_CPU_KVCACHE_SPACE")
        held, usable_bytes = held_by(profile), hardware.usable_memory_bytes()
        for label, model in run.stored():
            yield memory.check_cpu_memory(
                label, model, profile, serving, bytes_each=held, space=space, memory_bytes=usable_bytes
            )


def check_split(run: PlannedRun, on_progress: Callable[[str], None]) -> Iterator[Check]:
    """Groups and blocks against tensor parallelism, for every checkpoint."""
    from assay_quantize.preflight.memory import check_split as look

    if is_on_gpus(run.profile):
        yield from (look(label, model, run.profile, run.target.recipe.serving) for label, model in run.stored())


def check_loading(run: PlannedRun, on_progress: Callable[[str], None]) -> Iterator[Check]:
    """vLLM's own loaders, for every checkpoint."""
    from assay_evaluate.preflight.loading import check_loading as look

    if run.is_served_here:
        yield from look(list(_to_replay(run)), run.profile, on_progress)


def _to_replay(run: PlannedRun) -> Iterator[Candidate]:
    from assay_evaluate.serving.replay import Candidate, PlannedCheckpoint, planned

    serving = run.target.recipe.serving
    for checkpoint in run.checkpoints:
        if checkpoint.plan is not None:
            assert checkpoint.config is not None
            yield Candidate(checkpoint.label, planned(checkpoint.plan, checkpoint.config), run.profile, serving)
        elif checkpoint.headers is not None and checkpoint.headers.folder is not None:
            yield Candidate(checkpoint.label, checkpoint.headers.folder, run.profile, serving)
        elif checkpoint.headers is not None:
            shards: dict[str, dict[str, tuple[str, tuple[int, ...]]]] = defaultdict(dict)
            for name, header in checkpoint.headers.tensors.items():
                shards[header.shard][name] = (header.dtype, header.shape)
            yield Candidate(checkpoint.label, PlannedCheckpoint(checkpoint.headers.config, shards), run.profile, serving)


JOURNAL_BYTES = {"cpu": 1 * 10**9, "cuda": 10 * 10**9}
"""Allowed for journal, logs and report. Of `full` on a GPU: 90 million tokens of text for each checkpoint, about 0.5 GB, and
log-probabilities; not measured there."""
Look = Callable[[PlannedRun, Callable[[str], None]], Iterable[Check]]
"""A check: the planned run, and who is told what takes long."""
CHECKS: tuple[tuple[CheckName, Look], ...] = (
    ("hardware", check_hardware),
    ("plan", check_plans),
    ("environment", check_environment),
    ("tokenizer", check_tokenizer),
    ("data sets", check_data_sets),
    ("context", check_context),
    ("sampling", check_sampling),
    ("cost", check_cost),
    ("power", check_power),
    ("disk", check_disk),
    ("memory", check_memory),
    ("split", check_split),
    ("loading", check_loading),
)
"""In the order in which they are made and shown: first what takes no time."""
