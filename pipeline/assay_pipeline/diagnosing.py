"""`assay inspect`: what a checkpoint is and what is wrong with it, from its files.

`assay diagnose`: probe, lever and locate of a URL, or of a checkpoint that is served for them; each writes its record.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from assay.callbacks import Say, say_nothing
from assay.errors import AssayError
from assay.foreign_text import check_label, safe_name
from assay.records.base import sha256_of_file
from assay.records.diagnosis.lever import LeverReport
from assay.records.diagnosis.locate import LocateReport
from assay.records.probe import ProbeReport, ProbeSettings, ledger_of
from assay.records.run import folder_name
from assay_pipeline.comparison.damage import say_damage
from assay_pipeline.interrupted import interruptible
from assay_pipeline.places import Place, belongs_to, check_places, place_for, run_holding
from assay_pipeline.profiles import profile_for
from assay_pipeline.targets import (
    local_checkpoint,
    resolve_target,
    url_in,
)

if TYPE_CHECKING:
    from assay_evaluate.diagnosis.levers.search import LeverSettings
    from assay_evaluate.diagnosis.locate.locate import Side
    from assay_evaluate.serving.server import ServerSpec

NEEDS_LABEL = "--run with a URL: say --label as well; what a server calls itself must not speak for a checkpoint of a run"


def _spec_for(
    target: str, profile: str | None, command: str, inside: str, *, label: str | None, run: Path | None, runs: Path,
    out: Path | None, say: Say,
) -> tuple[ServerSpec, str, Place]:  # fmt: skip
    """How a checkpoint is served, what the result is called, and where it is written. inside: the folder in a run."""
    from assay_evaluate.serving.server import ServerSpec

    resolved = resolve_target(target)
    chosen = profile_for(resolved, profile)
    checkpoint = local_checkpoint(resolved.location, say=say)
    say_damage(checkpoint, say)
    its_run, its_label = belongs_to(resolved, checkpoint, runs)
    name = label or its_label
    place = place_for(command, inside.format(label=name), run=run or its_run, out=out, say=say)
    spec = ServerSpec(
        checkpoint=checkpoint, profile=chosen, serving=resolved.recipe.serving, speculate=True,
        log_path=place.logs / f"vllm-{command}-{name}.log",
    )  # fmt: skip
    return spec, name, place


# ------------------------------------------------------------------------------------------------ lever
def find_levers(
    target: str,
    settings: LeverSettings,
    *,
    concurrency: int | None = None,
    profile: str | None = None,
    model: str | None = None,
    api_key_env: str | None = None,
    label: str | None = None,
    run: Path | None = None,
    runs: Path = Path("runs"),
    out: Path | None = None,
    say: Say = say_nothing,
) -> tuple[LeverReport, Path]:
    """Which serving parameter a failure depends on, and the record's file.

    Of a failure the smallest set that fails is sought, and its reproduction lies beside the record. concurrency: None: that of
    the settings for a URL, else the profile's. AssayError: no server or checkpoint, or these words do not go together.
    """
    from assay_evaluate.diagnosis.endpoint import find_endpoint
    from assay_evaluate.diagnosis.levers import search as levers
    from assay_evaluate.diagnosis.levers.reproduction import reproduce
    from assay_evaluate.diagnosis.levers.settings import LEVERS, Setting, ask_running, facts_of, serve_here
    from assay_evaluate.serving.api_key import bearer

    check_label(label)
    check_places(run, out)
    spec = None
    if (url := url_in(target)) is not None:
        if restarts := [name for name in settings.levers or () if LEVERS[name].needs_restart]:
            raise AssayError(
                f"--levers {','.join(restarts)}: the server would have to be started with other settings; give its checkpoint "
                "folder instead of the URL, and it is served here"
            )
        if run is not None and label is None:
            raise AssayError(NEEDS_LABEL)
        endpoint = find_endpoint(url, model, headers=bearer(api_key_env, "--api-key-env"))
        name = label or safe_name(endpoint.model)
        place, start = place_for("lever", f"levers/{name}", run=run, out=out, say=say), ask_running(endpoint)
    else:
        spec, name, place = _spec_for(
            target, profile, "lever", "levers/{label}", label=label, run=run, runs=runs, out=out, say=say
        )
        settings = replace(settings, concurrency=concurrency or spec.profile.concurrency)
        start = serve_here(spec, say)
    facts, base = functools.partial(facts_of, can_restart=spec is not None), Setting(settings.concurrency)
    report, search = levers.find_levers(start, settings, label=name, base=base, facts=facts, on_progress=say)
    if report.baseline.failures:
        report = reproduce(report, search, place.records, spec, say)
    record = place.records / "levers.json"
    report.save(record)
    return report, record


# ------------------------------------------------------------------------------------------------ probe
def probe(
    target: str,
    settings: ProbeSettings,
    names: Sequence[str] | None = None,
    *,
    most: int | None = None,
    concurrency: int | None = None,
    without_speculation: str | None = None,
    profile: str | None = None,
    model: str | None = None,
    api_key_env: str | None = None,
    label: str | None = None,
    run: Path | None = None,
    runs: Path = Path("runs"),
    out: Path | None = None,
    say: Say = say_nothing,
) -> tuple[ProbeReport, Path]:
    """What probes found, and the record's file; requests and replies lie beside it (`ledger_of`).

    names: None: all probes. most: requests of all of them together. without_speculation: URL of a server of the same checkpoint
    without drafts. concurrency: as `find_levers`. AssayError: no server or checkpoint, or these words do not go together.
    """
    from assay_evaluate.diagnosis.endpoint import find_endpoint
    from assay_evaluate.diagnosis.probes.run_probes import probe_checkpoint, run_probes
    from assay_evaluate.serving.api_key import bearer

    check_label(label)
    check_places(run, out)
    url = url_in(target)
    if url is None:
        spec, name, place = _spec_for(target, profile, "probe", "probes", label=label, run=run, runs=runs, out=out, say=say)
        if concurrency is None:
            settings = settings.model_copy(update={"concurrency": spec.profile.concurrency})
        limited = _limited(settings, most, names, has_pair=True)
        _announce(settings, limited, names, has_pair=True, say=say)
        sha256 = _sha256_of(spec.checkpoint, place)
        record = _new_record(place, name, sha256, say)
        with interruptible(lambda: _probed_so_far(record)):
            report = probe_checkpoint(
                spec, limited, names, label=name, checkpoint_sha256=sha256, ledger=ledger_of(record), is_announced=True,
                on_progress=say,
            )  # fmt: skip
    else:
        if run is not None and label is None:
            raise AssayError(NEEDS_LABEL)
        headers, has_pair = bearer(api_key_env, "--api-key-env"), without_speculation is not None
        find = functools.partial(find_endpoint, model=model, timeout_s=settings.timeout_s, headers=headers)
        limited = _limited(settings, most, names, has_pair=has_pair)
        endpoint = find(url, before_asking=lambda: _announce(settings, limited, names, has_pair=has_pair, say=say))
        other = None if without_speculation is None else find(url_in(without_speculation) or without_speculation)
        name = label or safe_name(endpoint.model)
        record = _new_record(place_for("probe", "probes", run=run, out=out, say=say), name, None, say)
        with interruptible(lambda: _probed_so_far(record)):
            report = run_probes(
                endpoint, limited, names, label=name, without_speculation=other, ledger=ledger_of(record), is_announced=True,
                on_progress=say,
            )  # fmt: skip
    report.save(record)
    return report, record


def _probed_so_far(record: Path) -> str:
    return f"results so far are the lines above, and no record is written; requests and replies: {ledger_of(record)}"


def _limited(settings: ProbeSettings, most: int | None, names: Sequence[str] | None, *, has_pair: bool) -> ProbeSettings:
    """Settings of which everything is `most` at most. MeasureError if it is too few for an endpoint that offers everything."""
    from assay_evaluate.diagnosis.probes.planned import fit_settings
    from assay_evaluate.diagnosis.probes.run_probes import checked_names

    return settings if most is None else fit_settings(settings, most, checked_names(names), has_pair=has_pair)


def _announce(
    asked: ProbeSettings, limited: ProbeSettings, names: Sequence[str] | None, *, has_pair: bool, say: Say
) -> None:  # fmt: skip
    """Say what will be sent at most to an endpoint of which nothing is known yet, and what a limit takes away."""
    from assay_evaluate.diagnosis.endpoint import MOST_DISCOVERY_REQUESTS
    from assay_evaluate.diagnosis.probes.planned import cost_of_limit, plan_requests
    from assay_evaluate.diagnosis.probes.run_probes import checked_names

    chosen = checked_names(names)
    planned, unlimited = (plan_requests(each, chosen, has_pair=has_pair) for each in (limited, asked))
    small = f"up to {MOST_DISCOVERY_REQUESTS} small requests come first, to find out what the endpoint offers"
    say(f"{planned.sentence(limited)}; {small}")
    if limited.most_requests is not None:
        say(cost_of_limit(limited, planned, unlimited))


def _sha256_of(checkpoint: Path, place: Place) -> str:
    """A run's journal knows the hashes of files that did not change."""
    from assay_evaluate.client.journal import Journal
    from assay_evaluate.run.identity import checkpoint_sha256

    if place.run_dir is None:
        return checkpoint_sha256(checkpoint, sha256_of_file)
    with Journal(place.run_dir / "journal.db") as journal:
        return checkpoint_sha256(checkpoint, journal.file_sha256)


def _new_record(place: Place, label: str, checkpoint_sha256: str | None, say: Say) -> Path:
    """Its file; the ledger of an earlier run is not added to."""
    from assay_evaluate.run.set_aside import make_room_for_probes

    if place.run_dir is not None and (line := make_room_for_probes(place.run_dir, label, checkpoint_sha256)) is not None:
        say(line)
    path = place.records / f"{label}.json"
    ledger_of(path).unlink(missing_ok=True)
    return path


# ------------------------------------------------------------------------------------------------ locate
def locate(
    a: str,
    b: str | None = None,
    *,
    tensor_parallel_size: int | None = None,
    num_prompts: int = 8,
    profile: str | None = None,
    api_key_env: str | None = None,
    out: Path | None = None,
    say: Say = say_nothing,
) -> tuple[LocateReport, Path]:
    """Where two checkpoints or servers differ first, and the record's file. b: None: the tensor-parallel ranks of `a`."""
    from assay_evaluate.diagnosis.locate.locate import Side, locate_ranks, locate_servers
    from assay_evaluate.serving.api_key import bearer

    texts = {"a": a} if b is None else {"a": a, "b": b}
    headers = bearer(api_key_env, "--api-key-env")
    targets = {name: resolve_target(text) for name, text in texts.items() if not url_in(text)}
    folders = {name: local_checkpoint(target.location, say=say) for name, target in targets.items()}
    for folder in folders.values():
        say_damage(folder, say)
    profiles = {name: profile_for(target, profile) for name, target in targets.items()}
    its_run = next((run for folder in reversed(folders.values()) if (run := run_holding(folder)) is not None), None)
    names = (safe_name(text) if url_in(text) else folder_name(Path(text).expanduser()) for text in texts.values())
    new_place = functools.partial(place_for, "locate", f"locate/{'-'.join(names)}", run=its_run, out=out, say=say)
    place = new_place() if targets else None  # before servers are started: their logs go there

    def side(name: str) -> Side:
        if name not in targets:
            return Side(texts[name], url=url_in(texts[name]), headers=headers)
        assert place is not None
        return Side(
            texts[name], checkpoint=folders[name], profile=profiles[name], serving=targets[name].recipe.serving,
            tensor_parallel_size=tensor_parallel_size or (2 if b is None else 1),
            log_path=place.logs / f"vllm-locate-{name}.log",
        )  # fmt: skip

    report = locate_ranks(side("a"), num_prompts, say) if b is None else locate_servers(side("a"), side("b"), num_prompts, say)
    record = (place or new_place()).records / "location.json"
    report.save(record)
    return report, record
