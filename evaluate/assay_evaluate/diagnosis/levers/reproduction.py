"""From a failure among many requests to the fewest that still fail, and a folder with which anybody can see it fail.

smallest = shrink(asks, fails)                        delta debugging (Zeller and Hildebrandt 2002, ddmin)
write_bundle(folder, ...)                             reproduce.py, requests.json, server.sh, README.md
"""

from __future__ import annotations

import shlex
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import assay
from assay.callbacks import Say
from assay.foreign_text import in_markdown, shown
from assay.records.base import canonical_json, write_text_atomically
from assay.records.diagnosis.lever import LeverReport
from assay_evaluate.client.exchanges import Ask, Exchange
from assay_evaluate.diagnosis.endpoint import ProbedEndpoint
from assay_evaluate.diagnosis.levers import reproduction_script
from assay_evaluate.diagnosis.levers.search import Search, parameters_of
from assay_evaluate.diagnosis.levers.settings import Setting, with_setting
from assay_evaluate.diagnosis.probes.determinism import tokens_of
from assay_evaluate.serving.server import ServerSpec, interpreter_for
from assay_evaluate.serving.vllm_command import vllm_command

Item = TypeVar("Item")
MOST_TRIALS = 40


def shrink(items: Sequence[Item], fails: Callable[[Sequence[Item]], bool], most_trials: int = MOST_TRIALS) -> list[Item]:
    """A subset that still fails and none of whose parts did when tried; order is kept. `items` themselves must fail.

    ddmin: halves, then their complements, then finer. At most `most_trials` calls: the best so far is returned then.
    """
    kept, parts, trials = list(items), 2, 0
    while len(kept) >= 2 and trials < most_trials:
        size = -(-len(kept) // parts)
        pieces = [kept[first : first + size] for first in range(0, len(kept), size)]
        rests = [[item for other in pieces if other is not piece for item in other] for piece in pieces]
        tried = [(piece, 2) for piece in pieces] + [(rest, max(parts - 1, 2)) for rest in rests if len(pieces) > 2]
        for smaller, next_parts in tried:
            if trials >= most_trials:
                break
            trials += 1
            if fails(smaller):
                kept, parts = list(smaller), next_parts
                break
        else:
            if parts >= len(kept):
                break
            parts = min(2 * parts, len(kept))
    return kept


def shrink_requests(search: Search, endpoint: ProbedEndpoint, report: LeverReport) -> list[Ask]:
    """The fewest of the search's requests that still fail under its base setting, cut after the last first wrong token.

    Every set is asked as often as the baseline was, as one that fails now and then must be given a chance to.
    """

    def fails(subset: Sequence[Ask]) -> bool:
        return bool(search.observe(endpoint, search.base, subset).failures)

    asks = search.asks(endpoint)
    positions = [failure.position for failure in report.baseline.failures]
    if known := [position for position in positions if position is not None]:
        shorter = [replace(ask, body={**ask.body, "max_tokens": min(ask.body["max_tokens"], max(known) + 8)}) for ask in asks]
        asks = shorter if len(known) == len(positions) and fails(shorter) else asks
    return shrink(asks, fails)


def reproduce(
    report: LeverReport, search: Search, folder: Path, spec: ServerSpec | None, on_progress: Say = lambda line: None
) -> LeverReport:
    """Shrink, write the bundle, and return the report that says so. spec: what was served; None: somebody else's server."""
    with search.start(search.base) as endpoint:
        asks = shrink_requests(search, endpoint, report)
        search.observe(endpoint, search.base, asks)  # the last one tried need not be the one kept
        on_progress(f"smallest set that fails: {len(asks)} of {report.baseline.num_requests // search.settings.num_passes}")
    done = report.model_copy(update={"smallest": tuple(ask.id for ask in asks), "bundle": str(folder)})
    command, environment = command_of(spec, search.base)
    if spec is not None:  # the one that was asked is gone; what server.sh starts listens here
        endpoint = replace(endpoint, base_url=f"http://127.0.0.1:{port_of(spec)}")
    write_bundle(
        folder, done, asks, search.exchanges[search.base], replies_without_failure(search, report), endpoint, search.base,
        command, environment,
    )  # fmt: skip
    return done


def replies_without_failure(search: Search, report: LeverReport) -> dict[str, Exchange]:
    """Replies under the first lever that made the failure go away: what the others ought to have been. Empty: none did."""
    gone = next((effect.observation for effect in report.effects if effect.effect == "gone"), None)
    for setting, exchanges in search.exchanges.items():
        if gone is not None and parameters_of(setting) == gone.setting:
            return {exchange.id: exchange for exchange in exchanges}
    return {}


def command_of(spec: ServerSpec | None, setting: Setting) -> tuple[list[str] | None, dict[str, str]]:
    """(command line of the server under `setting`, its environment as far as it matters)."""
    if spec is None:
        return None, {}
    speculate = spec.speculate if setting.speculation is None else setting.speculation
    command = vllm_command(
        spec.checkpoint, with_setting(spec.profile, setting), spec.serving, speculate=speculate, port=port_of(spec),
        served_model_name=spec.served_model_name,
    )  # fmt: skip
    return [str(interpreter_for(spec.profile, spec.interpreter)), *command.arguments], command.recorded_environment


def port_of(spec: ServerSpec) -> int:
    """On which the server of server.sh listens."""
    return spec.port or 8000


def write_bundle(
    folder: Path,
    report: LeverReport,
    asks: Sequence[Ask],
    replies: Sequence[Exchange],
    expected: Mapping[str, Exchange],
    endpoint: ProbedEndpoint,
    setting: Setting,
    command: Sequence[str] | None,
    environment: Mapping[str, str],
) -> None:
    """Everything another person needs. expected: id -> the reply under the setting in which nothing failed; may lack some.

    command: of the server that failed; None: somebody else's.
    """
    failures = {failure.request: f"{failure.kind}: {failure.detail}" for failure in report.baseline.failures}
    actual_tokens = {exchange.id: list(tokens_of(exchange)) for exchange in replies}
    expected_tokens = {name: list(tokens_of(exchange)) for name, exchange in expected.items() if exchange.is_answered}
    requests: list[dict[str, Any]] = []
    for ask in asks:
        length = int(ask.body["max_tokens"])
        requests.append({
            "id": ask.id, "path": ask.path, "body": ask.body,
            "expected": expected_tokens[ask.id][:length] if ask.id in expected_tokens else None,
            "got": actual_tokens.get(ask.id), "seen": failures.get(ask.id, "did not fail by itself"),
        })  # fmt: skip
    bundle = {
        "assay": assay.__version__, "label": report.label, "lever": report.lever, "sentence": report.sentence,
        "base_url": endpoint.base_url, "model": endpoint.model, "concurrency": setting.concurrency, "passes": 10,
        "seed": "requests are greedy: no seed is sent; the server's own is in server.sh", "requests": requests,
    }  # fmt: skip
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(reproduction_script.__file__, folder / "reproduce.py")
    write_text_atomically(folder / "requests.json", canonical_json(bundle) + "\n")
    write_text_atomically(folder / "server.sh", _server_script(command, environment, endpoint))
    write_text_atomically(folder / "README.md", _readme(report, len(requests)))
    report.save(folder / "levers.json")


def _server_script(command: Sequence[str] | None, environment: Mapping[str, str], endpoint: ProbedEndpoint) -> str:
    if command is None:
        facts = {"model": endpoint.model, "version": endpoint.offer.version, "fingerprint": endpoint.system_fingerprint}
        line = ", ".join(f"{name} {shown(value)}" for name, value in facts.items())
        return f"#!/bin/sh\n# assay did not start this server; it says of itself: {line}\nexit 2\n"
    variables = "".join(f"export {name}={shlex.quote(value)}\n" for name, value in sorted(environment.items()))
    folder = Path(command[0]).parent
    return (
        "#!/bin/sh\n# The server on which it failed. In its PATH the programs of its environment (ninja) come first.\n"
        "# It has a key if VLLM_API_KEY is set, here and for reproduce.py; else whoever is on this machine may ask it.\n"
        f'export PATH={shlex.quote(str(folder))}:"$PATH"\n{variables}exec {shlex.join(command)}\n'
    )


def _readme(report: LeverReport, num_requests: int) -> str:
    lines = [f"- {effect.lever}: {in_markdown(effect.sentence)}" for effect in report.effects]
    return (
        f"# {in_markdown(report.label)}: {in_markdown(report.sentence)}\n\n"
        "    sh server.sh &                 # wait until it answers\n"
        "    python reproduce.py URL        # exit 1: it failed again\n\n"
        f"{num_requests} requests, sent together. requests.json holds each with what was expected and what came; "
        "levers.json is the whole record.\n\n" + "\n".join(lines) + "\n"
    )
