"""Which gateways that lose or change replies `assay diagnose probe` sees before a real vLLM, and that it sees none without one.

    python benchmarks/trust/lost_text.py [--clean 20] [--only WORD ...] [--write benchmarks/trust/lost_text.md]

Serves tiny-glm on the CPU with its MTP head and prefix caching. Each kind of gateway
(`tests/support/serving/lossy_gateways.py`) changes 2 % of the replies unless the table says otherwise, and all probes are run
through it; then as often without a gateway as --clean says, each time with other prompts and 64 requests in flight. Half an
hour on two cores.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests" / "support" / "serving")]  # python is run with PYTHONSAFEPATH
from lossy_gateways import BreaksOff, Gateway, Swapping, kinds, proxied  # noqa: E402

from assay.recipes.load import load_recipe  # noqa: E402
from assay.recipes.model import ModelRecipe  # noqa: E402
from assay.recipes.profile import ProfileRecipe  # noqa: E402
from assay.records.probe import ProbeReport, ProbeSettings  # noqa: E402
from assay_evaluate.client.client import Client  # noqa: E402
from assay_evaluate.client.decoded_text import MARK  # noqa: E402
from assay_evaluate.diagnosis.endpoint import find_endpoint  # noqa: E402
from assay_evaluate.diagnosis.probes.run_probes import run_probes  # noqa: E402
from assay_evaluate.serving.server import Server, ServerSpec, serve  # noqa: E402

CHECKPOINT = ROOT / "examples" / "tiny_glm" / "checkpoint"
SETTINGS = ProbeSettings(
    num_requests=32, num_garble_requests=64, num_alone=4, num_neighbours=0, num_scored=64, long_tokens=200, max_tokens=64,
    concurrency=8,
)  # fmt: skip
CLEAN = SETTINGS.model_copy(update={"num_alone": 2, "num_scored": 16, "concurrency": 64})


Asked = Callable[[dict[str, Any]], dict[str, Any]]


def as_it_is(body: dict[str, Any]) -> dict[str, Any]:
    return body


def unchanged(body: dict[str, Any], reply: dict[str, Any]) -> bool:
    return False


def hotter(body: dict[str, Any]) -> dict[str, Any]:
    return {**body, "temperature": 1.5 if body["temperature"] else 0}


def warmer(body: dict[str, Any]) -> dict[str, Any]:
    return {**body, "temperature": 1.3 if body["temperature"] else 0}


def coldest(body: dict[str, Any]) -> dict[str, Any]:
    return {**body, "temperature": 0}


def capped(body: dict[str, Any]) -> dict[str, Any]:
    """Every fortieth request, by its text."""
    is_hit = zlib.crc32(json.dumps(body["messages"]).encode()) % 40 == 0
    return {**body, "max_tokens": min(40, body["max_tokens"])} if is_hit else body


ASKED: dict[str, tuple[Asked, str]] = {
    "temperature 1.5 in place of 1": (hotter, "all"),
    "temperature 1.3 in place of 1": (warmer, "all"),
    "temperature 0 in place of 1": (coldest, "all"),
    "at most 40 tokens": (capped, "1 in 40 prompts"),
}


def profile() -> ProfileRecipe:
    recipe = load_recipe(ProfileRecipe, "cpu-emulated")
    vllm = {name: value for name, value in recipe.vllm.items() if name != "no-enable-prefix-caching"}
    return recipe.model_copy(update={"vllm": {**vllm, "enable-prefix-caching": True, "max-num-seqs": 64}})


@dataclass
class Table:
    """Probes of one server, with gateways and without, as rows of Markdown."""

    server: Server
    place: Path | None
    kinds: list[str] = field(default_factory=list)
    clean: list[str] = field(default_factory=list)
    missed: int = 0
    false_alarms: int = 0

    def probe(self, url: str, settings: ProbeSettings) -> ProbeReport:
        endpoint = find_endpoint(url, self.server.model, headers=self.server.headers)
        return run_probes(endpoint, settings)

    def add(self, what: str, share: str, hits: str, report: ProbeReport, *, is_clean: bool = False) -> None:
        alarms = "; ".join(
            f"`{alarm.name}` {alarm.events} of {alarm.trials:,}" if alarm.events else f"`{alarm.name}`: {alarm.reason}"
            for alarm in report.alarms
        )
        row = f"| {what} | {share} | {hits} | {alarms or 'none'} |"
        (self.clean if is_clean else self.kinds).append(row)
        self.missed += not is_clean and not alarms
        self.false_alarms += is_clean and bool(alarms)
        print(time.strftime("%T"), row, *(f"\n    {one.name}: {one.reason}" for one in report.alarms), flush=True)
        if self.place is not None:
            self.place.write_text(self.text(), encoding="utf-8")

    def text(self) -> str:
        seen = f"{len(self.kinds) - self.missed} of {len(self.kinds)} kinds are seen"
        found = f"{seen}; {self.false_alarms} of {len(self.clean)} runs without a gateway alarm."
        command = (
            f"`python benchmarks/trust/lost_text.py --clean {len(self.clean)}`: tiny-glm, vLLM 0.32 on two cores, MTP and "
        )
        command += "prefix caching on."
        head = "| what a gateway does | to | replies hit | probes that alarm: events |\n|---|---|---|---|"
        return "\n".join(
            ["# Gateways that lose or change replies", "", command, "", found, "", head, *self.kinds, *self.clean, ""]
        )


def look(table: Table, client: Client, only: list[str], num_clean: int) -> None:
    """Every kind of gateway, or those with one of `only` in their name, then the server itself."""

    def decode(ids: list[int]) -> str:
        return MARK.sub("", str(client.post("/detokenize", {"tokens": ids}).data["prompt"]))

    up = table.server.base_url
    gateways: dict[str, tuple[Gateway, Asked, str]] = {
        what: (Gateway(change, round(1 / share)), as_it_is, f"{share:.0%}") for what, (change, share) in kinds(decode).items()
    }
    gateways["another request's reply"] = (Swapping(50), as_it_is, "2%")
    gateways |= {what: (Gateway(unchanged, 1), asked, share) for what, (asked, share) in ASKED.items()}
    for what, (gateway, asked, share) in gateways.items():
        if not any(word in what for word in only):
            continue
        with proxied(up, gateway, asked) as url:
            report = table.probe(url, SETTINGS)
        table.add(what, share, str(gateway.hits or ""), report)
    if any(word in "the last third of a body lost" for word in only):
        breaking = BreaksOff(50)
        with proxied(up, Gateway(unchanged, 1), breaks_off=breaking) as url:
            report = table.probe(url, SETTINGS)
        table.add("the last third of a body lost", "2%", str(breaking.hits), report)
    for number in range(num_clean):
        report = table.probe(up, CLEAN.model_copy(update={"seed": f"clean-{number}"}))
        table.add(f"nothing; prompts {number}", "", "", report, is_clean=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clean", type=int, default=20)
    parser.add_argument("--only", nargs="*", default=[""], help="kinds of gateways with one of these in their name")
    parser.add_argument("--write", type=Path)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        spec = ServerSpec(
            checkpoint=CHECKPOINT, profile=profile(), serving=load_recipe(ModelRecipe, "tiny-glm").serving, speculate=True,
            log_path=Path(folder) / "vllm.log",
        )  # fmt: skip
        with serve(spec) as server, Client(server) as client:
            table = Table(server, given.write)
            look(table, client, given.only, given.clean)
    print(table.text())
    sys.exit(1 if table.missed or table.false_alarms else 0)


if __name__ == "__main__":
    main()
