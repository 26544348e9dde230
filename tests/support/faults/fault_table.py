"""The table of benchmarks/trust/planted_faults.md: every fault planted in a real vLLM, the probes that saw it, after how many
requests.

    PYTHONPATH=tests/support python -m faults.fault_table --write benchmarks/trust/planted_faults.md --keep runs/faults

One server of tiny-glm with its MTP head serves all faults of one process, one without speculation the pair; a third, over two
ranks, the fault that is located.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from assay.records.probe import ProbeReport, ProbeSettings
from assay_evaluate.diagnosis.endpoint import find_endpoint
from assay_evaluate.diagnosis.locate.locate import Side, judge_servers, locate_ranks, prompts
from assay_evaluate.diagnosis.locate.reading import WatchedServer, read_activations
from assay_evaluate.diagnosis.probes.run_probes import run_probes
from assay_evaluate.serving.server import serve
from faults.planting import faulty_spec, foreign_ids, planted

BEGIN, END = "<!-- fault table: begin -->", "<!-- fault table: end -->"
BLOCKS, STALE_FROM = 400, 200


@dataclass(frozen=True)
class Planting:
    """One row. `parameters` of the fault in worker.py."""

    row: str
    fault: str
    parameters: dict[str, Any] = field(default_factory=dict)


def plantings() -> list[Planting]:
    return [
        Planting("top token dropped from 1 % of steps", "top token dropped", {"rate": 0.01}),
        Planting("tokens ranked in BF16, log-probabilities in FP32", "BF16 before top-k"),
        Planting("logits of decode rounded to BF16, of prefill not", "BF16 logits in decode"),
        Planting(f"stale KV rows above block {STALE_FROM} of {BLOCKS}", "stale KV above a slot", {"block": STALE_FROM}),
        Planting("a neighbour's logits from place 8 of the batch on", "rows mixed up under load", {"row": 8}),
        Planting("log-probabilities 0.5 nats low from token 64 on", "log-probabilities shifted", {"position": 64, "nats": 0.5}),
        Planting("NaN logits in 1 of 1,000 steps", "NaN logits", {"rate": 0.001}),
        Planting("foreign-script tokens, 5 in 10,000", "foreign tokens", {"rate": 5e-4, "tokens": foreign_ids()}),
        Planting("loops in 5 % of requests", "loops", {"rate": 0.05, "start": 24, "period": 6}),
        Planting("drafts accepted whatever the model says, 30 %", "wrong drafts accepted", {"rate": 0.3}),
        Planting("MTP experts zeroed", "MTP experts zeroed"),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--keep", type=Path, required=True, help="folder of logs and reports; those there are not made again")
    parser.add_argument("--write", type=Path, help="Markdown file whose table is replaced")
    parser.add_argument("--requests", type=int, default=48)
    parser.add_argument("--garble", type=int, default=256)
    parser.add_argument("--concurrency", type=int, default=16)
    arguments = parser.parse_args()
    arguments.keep.mkdir(parents=True, exist_ok=True)
    settings = ProbeSettings(
        num_requests=arguments.requests, num_garble_requests=arguments.garble, concurrency=arguments.concurrency,
        long_tokens=256, max_tokens=144,
    )  # fmt: skip
    reports = probe_all(arguments.keep, settings)
    located = locate_one(arguments.keep)
    text = table(reports, located)
    print(text)
    if arguments.write is not None:
        replace_table(arguments.write, text)


def probe_all(keep: Path, settings: ProbeSettings) -> list[tuple[str, dict[str, int], ProbeReport]]:
    """(row, what was planted, report), the healthy server first and last; what it accepts is what is expected afterwards."""
    rows = [Planting("healthy, before", ""), *plantings(), Planting("healthy, after", "")]
    wanted = [(row, keep / f"{number:02}.json") for number, row in enumerate(rows)]
    if not all(path.is_file() for _, path in wanted):
        spec = faulty_spec(keep / "vllm.log", block_size=32, enable_prefix_caching=True, num_gpu_blocks_override=BLOCKS)
        plain = replace(spec, speculate=False, log_path=keep / "plain.log")
        with serve(spec, print) as server, serve(plain, print) as other:
            endpoint, pair = find_endpoint(server.base_url, server.model), find_endpoint(other.base_url, other.model)
            for row, path in wanted:
                if path.is_file():
                    continue
                settings = settings.model_copy(update={"expected_acceptance_length": expected_length(wanted[0][1])})
                started = time.monotonic()
                told: dict[str, Any] = {}
                if row.fault:
                    with planted(server, row.fault, **row.parameters) as told:
                        report = run_probes(endpoint, settings, label=row.row, without_speculation=pair)
                else:
                    report = run_probes(endpoint, settings, label=row.row, without_speculation=pair)
                path.write_text(json.dumps({"told": told, "report": report.model_dump(mode="json")}))
                alarms = [f"{one.name}: {one.reason}" for one in report.alarms]
                print(f"{row.row}: {time.monotonic() - started:.0f} s, planted {told}, {alarms}", flush=True)
    found = []
    for row, path in wanted:
        data = json.loads(path.read_text())
        found.append((row.row, data["told"], ProbeReport.model_validate(data["report"])))
    return found


def expected_length(healthy: Path) -> float | None:
    """Tokens per step on the healthy server. None: it is being measured."""
    if not healthy.is_file():
        return None
    report = ProbeReport.model_validate(json.loads(healthy.read_text())["report"])
    [length] = [one.details["mean_length"] for one in report.results if one.name == "acceptance"]
    assert isinstance(length, float)
    return length


def locate_one(keep: Path) -> dict[str, Any]:
    """An expert scaled on rank 1 of two, located against the healthy server and between the ranks."""
    path = keep / "located.json"
    if not path.is_file():
        with serve(faulty_spec(keep / "ranks.log", speculate=False, tensor_parallel_size=2), print) as server:
            watched = WatchedServer(server.base_url, server.model)
            before, ids = read_activations(watched, prompts())
            again, _ = read_activations(watched, ids)
            side = Side("tiny-glm", url=server.base_url)
            healthy = judge_servers(side, side, before, again, again, ids, 0.0), locate_ranks(side)
            with planted(server, "expert scaled", layer=2, expert=5, factor=4.0, rank=1):
                after, _ = read_activations(watched, ids)
                faulty = judge_servers(side, side, before, again, after, ids, 0.0), locate_ranks(side)
        path.write_text(json.dumps({
            "healthy": [one.first is None for one in healthy],
            "found": [None if one.first is None else one.first.model_dump(mode="json") for one in faulty],
            "num_prompts": len(ids),
        }))  # fmt: skip
    located: dict[str, Any] = json.loads(path.read_text())
    return located


def table(reports: list[tuple[str, dict[str, int], ProbeReport]], located: dict[str, Any]) -> str:
    """Markdown. Requests: what the probe had looked at when it saw the first event."""
    lines = ["| fault | planted | probes that saw it (requests to the first event) |", "|---|---|---|"]
    for row, told, report in reports:
        if row.startswith("healthy"):
            continue
        seen = [f"`{one.name}` ({one.first_event_at or one.num_requests})" for one in report.alarms]
        planted_here = f"{told['events']:,} times" + (f" in {told['requests']:,} requests" if told["requests"] else "")
        lines.append(f"| {row} | {planted_here} | {', '.join(seen) or 'none'} |")
    named = [f"`{one['name']}`, rank {one['rank']}" for one in located["found"]]
    lines.append(
        f"| expert 5 of layer 2 times 4 on rank 1 of 2 | once | `assay diagnose locate` ({located['num_prompts']} prompts): "
        f"{named[0]}; `--ranks`: {named[1]} |"
    )
    lines += ["", "False alarms on the healthy server, before and after all faults:", ""]
    lines += ["| probe | alarms | of | not run because |", "|---|---|---|---|"]
    healthy = [report for row, _, report in reports if row.startswith("healthy")]
    for name in dict.fromkeys(one.name for report in healthy for one in report.results):
        results = [one for report in healthy for one in report.results if one.name == name]
        ran = [one for one in results if one.status != "not_run"]
        counted = f"{sum(one.trials or 0 for one in ran):,} {ran[0].unit}s in {len(ran)} runs" if ran else ""
        alarms = str(sum(one.status == "alarm" for one in ran)) if ran else ""
        lines.append(f"| `{name}` | {alarms} | {counted} | {'' if ran else results[0].reason} |")
    healthy = located["healthy"]
    lines.append(f"| `assay diagnose locate`, `--ranks` | {healthy.count(False)} | {len(healthy)} runs | |")
    return "\n".join(lines)


def replace_table(path: Path, text: str) -> None:
    """What stands between the two marks of a Markdown file."""
    old = path.read_text(encoding="utf-8")
    before, _, rest = old.partition(BEGIN)
    _, _, after = rest.partition(END)
    path.write_text(f"{before}{BEGIN}\n{text}\n{END}{after}", encoding="utf-8")


if __name__ == "__main__":
    main()
