"""How often the probes' gate fails a checkpoint that did nothing, and how often it sees one that did.

    python benchmarks/verdicts/probe_rates.py [--draws 20000] [--seed 1]

Draws how many requests a fault of the serving hits on either side, makes the probes' records of them and lets
`verdicts.probes.judge_probes` judge. "Before" is the rule that it replaced: any alarm that the reference does not have is FAIL,
and one that it has is no FAIL only if Newcombe's interval of the two rates holds 0. No model and no server: some minutes of one
core. The committed result is probe_rates.md beside this file, which the program prints.
"""

from __future__ import annotations

import argparse
import functools
from collections import Counter
from dataclasses import dataclass

import numpy as np

from assay.recipes.gate import ProbesGate
from assay.records.measurement import Measurement
from assay.records.probe import ProbeReport, ProbeResult, ProbeSettings
from assay_evaluate.diagnosis.probes.planned import EVERYTHING
from assay_evaluate.statistics.proportions import clopper_pearson, independent_difference
from assay_evaluate.statistics.rates import sentence, upper_bound
from assay_evaluate.verdicts.probes import judge_probes

GATE = ProbesGate(kind="probes")
Counts = tuple[tuple[int, int], ...]
"""(requests hit, requests) of each probe."""


@dataclass(frozen=True)
class Setting:
    """Probes with so many requests each. rates: of the fault on the reference's side and on the candidate's.

    is_one_fault: a request that is hit is seen by all probes that look at it, the first `requests` of the largest.
    """

    what: str
    probes: tuple[tuple[str, int], ...]
    rates: tuple[float, float]
    is_one_fault: bool = False


SCAN, EXAMINED, ALONE = ("garble", 7500), ("recompute", 128), ("determinism", 12)
INNOCENT = (
    Setting("scan of 7,500, 1 in 100,000 on both", (SCAN,), (1e-5, 1e-5)),
    Setting("scan of 7,500, 1 in 10,000 on both", (SCAN,), (1e-4, 1e-4)),
    Setting("scan of 7,500, 4 in 10,000 on both", (SCAN,), (4e-4, 4e-4)),
    Setting("scan of 7,500, 1 in 1,000 on both", (SCAN,), (1e-3, 1e-3)),
    Setting("scan of 7,500, 1 in 100 on both", (SCAN,), (1e-2, 1e-2)),
    Setting("default scan of 256, 1 in 250 on both", (("garble", 256),), (4e-3, 4e-3)),
    Setting("`recompute` of 128 replies, 1 in 250 on both", (EXAMINED,), (4e-3, 4e-3)),
    Setting("`recompute` of 128 replies, 1 in 30 on both", (EXAMINED,), (0.033, 0.033)),
    Setting("`determinism` of 12 prompts, 1 in 10 on both", (ALONE,), (0.1, 0.1)),
    Setting("three probes, one fault each, 1 in 1,000 on both", (SCAN, EXAMINED, ("text", 7500)), (1e-3, 1e-3)),
    Setting("one fault seen by four, 1 in 1,000 on both", (SCAN, ("text", 7500), EXAMINED, ALONE), (1e-3, 1e-3), True),
)
GUILTY = (
    Setting("scan of 7,500, none and 4 in 10,000", (SCAN,), (0.0, 4e-4)),
    Setting("scan of 7,500, none and 1 in 1,000", (SCAN,), (0.0, 1e-3)),
    Setting("scan of 7,500, none and 2 in 1,000", (SCAN,), (0.0, 2e-3)),
    Setting("scan of 7,500, 1 in 10,000 and 1 in 1,000", (SCAN,), (1e-4, 1e-3)),
    Setting("scan of 7,500, 1 in 1,000 and 3 in 1,000", (SCAN,), (1e-3, 3e-3)),
    Setting("default scan of 256, none and 2 in 100", (("garble", 256),), (0.0, 0.02)),
    Setting("default scan of 256, none and 5 in 100", (("garble", 256),), (0.0, 0.05)),
    Setting("`recompute` of 128 replies, none and 1 in 10", (EXAMINED,), (0.0, 0.1)),
    Setting("`determinism` of 12 prompts, none and half", (ALONE,), (0.0, 0.5)),
    Setting("one fault seen by four, none and 2 in 1,000", (SCAN, ("text", 7500), EXAMINED, ALONE), (0.0, 2e-3), True),
)


def draw(setting: Setting, rate: float, rng: np.random.Generator) -> Counts:
    if not setting.is_one_fault:
        return tuple((int(rng.binomial(count, rate)), count) for _, count in setting.probes)
    most = max(count for _, count in setting.probes)
    hit = np.flatnonzero(rng.random(most) < rate)
    return tuple((int((hit < count).sum()), count) for _, count in setting.probes)


def report(label: str, setting: Setting, counts: Counts) -> ProbeReport:
    results = [
        ProbeResult(
            name=name, status="alarm" if hit else "ok", events=hit, trials=of, unit="request", rate=clopper_pearson(hit, of),
            upper=upper_bound(hit, of), sentence=sentence(hit, of, "request"), reason=f"{hit} of {of}" if hit else None,
            requests_hit=hit, num_requests=of,
        )
        for (name, _), (hit, of) in zip(setting.probes, counts, strict=True)
    ]  # fmt: skip
    return ProbeReport(
        label=label, base_url="", model="", checkpoint_sha256=None, max_model_len=None, offer=EVERYTHING,
        settings=ProbeSettings(), results=tuple(results), num_requests=sum(of for _, of in counts), num_failed=0, errors={},
        system_fingerprint=None, started="", seconds=0.0,
    )  # fmt: skip


@functools.cache
def now(setting: Setting, before: Counts, after: Counts) -> str:
    def measured(label: str) -> Measurement:
        return Measurement.model_construct(label=label, checkpoint_sha256=label)

    reports = [report("reference", setting, before), report("candidate", setting, after)]
    return judge_probes(GATE, reports, measured("reference"), measured("candidate")).status


@functools.cache
def as_before(before: Counts, after: Counts) -> str:
    own = shared = 0
    for (other, other_of), (hit, of) in zip(before, after, strict=True):
        if hit:
            is_shared = other > 0 and independent_difference(hit, of, other, other_of).low <= 0
            own, shared = own + (not is_shared), shared + is_shared
    return "FAIL" if own else "NOT MEASURED" if shared else "PASS"


def row(setting: Setting, draws: int, rng: np.random.Generator) -> str:
    old, new = Counter[str](), Counter[str]()
    for _ in range(draws):
        before, after = (draw(setting, rate, rng) for rate in setting.rates)
        old[as_before(before, after)] += 1
        new[now(setting, before, after)] += 1
    shares = [f"{100 * some[status] / draws:.1f} %" for some, status in (
        (old, "FAIL"), (new, "FAIL"), (new, "NOT MEASURED"), (new, "UNDERPOWERED"), (new, "PASS"),
    )]  # fmt: skip
    return f"| {setting.what} | {' | '.join(shares)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draws", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    rng = np.random.default_rng(given.seed)
    head = "| fault | FAIL before | FAIL | NOT MEASURED | UNDERPOWERED | PASS |\n|---|---|---|---|---|---|"
    print("# Whose fault it is that a probe alarms\n")
    print(f"`python benchmarks/verdicts/probe_rates.py --draws {given.draws} --seed {given.seed}`: shares of the draws.")
    print("The rate of the fault is that of requests, on the reference's side and on the candidate's.\n")
    print("## The serving is at fault on both sides alike: FAIL is wrong (at most 2.5 %)\n")
    print("\n".join([head, *(row(one, given.draws, rng) for one in INNOCENT)]))
    print("\n## The candidate is at fault: FAIL is right\n")
    print("\n".join([head, *(row(one, given.draws, rng) for one in GUILTY)]))


if __name__ == "__main__":
    main()
