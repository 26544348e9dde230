"""`choice.json`: which checkpoint to deploy at which number of streams, what that rests on, and what is not known."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, get_args

from pydantic import Field

from assay.records.base import Interval, Part, Record
from assay.records.verdict import Overall

CHOICE_RECORD = "choice.json"
"""In the folder of a run: what `assay choose` said last."""
State = Literal["measured", "imported", "predicted", "missing"]
QualityWord = Literal["PASS", "FAIL", "UNDERPOWERED", "NOT MEASURED", "not failed", "REFERENCE", "ASSUMED"]


class Setup(Part):
    """What is chosen among: a checkpoint, served with so many drafted tokens, split so over the GPUs."""

    checkpoint: str
    speculation: int
    """Tokens drafted a step; 0: off."""
    parallelism: dict[str, int] = Field(default_factory=dict)
    name: str
    """`w4a16 with MTP`, `fp8`; with what tells two setups of one name apart."""


class Cell(Part):
    """One setup at one number of streams. missing: no row; `why` says what there is instead."""

    setup: str
    concurrency: int
    state: State
    why: str | None = None
    output_tokens_s: float | None = None
    """`SpeedRow.tokens_s`: the geometric mean over starts and repeats, all streams together."""
    interval: Interval | None = None
    """Of it: of repeats and of what differs from start to start. None: one repeat."""
    num_repeats: int = 0
    tokens_s_user: float | None = None
    tokens_s_gpu: float | None = None
    """None: a CPU."""
    ttft_s: float | None = None
    tpot_s: float | None = None
    tpot_derived: bool = False
    """From throughput, lengths and TTFT, where the row does not have it."""
    acceptance_length: float | None = None
    usd_per_million_tokens: float | None = None
    """Output tokens. None: no price was given."""
    meets_objective: bool | None = None
    """None: no objective, or the row lacks what it limits."""
    misses: str | None = None
    """What it misses, in a clause."""
    on_front: bool = False
    """No other setup that may be chosen is at least as good in tokens/s, TTFT and loss of quality, and better in one."""
    floor_tpot_s: float | None = None
    roofline_share: float | None = None
    flag: str | None = None
    """What the roofline says against the number."""
    source: str | None = None
    kernels: tuple[str, ...] = ()


class Quality(Part):
    """What the verdicts say of a checkpoint."""

    checkpoint: str
    word: QualityWord
    may_be_chosen: bool
    detail: str
    """Why, in a clause."""
    to_run: tuple[str, ...] = ()
    """What would decide it: `GSM8K: 1,819 items`."""
    variant: str | None = Field(default=None, exclude_if=lambda variant: variant is None)
    """Of another way of serving the reference's checkpoint: `fp8 with kv-cache-dtype fp8`. None: it is other weights."""
    chance_of_failing: float | None = None
    """Of a PASS: that a true loss is beyond a margin, from the intervals seen. None: not judged by scores."""


class Pick(Part):
    """The choice at one number of streams. setup: None: none meets the objective, or nothing is known."""

    concurrency: int
    setup: str | None
    why_none: str | None = None
    next_best: str | None = None
    lead_tokens_s: float | None = None
    """Of the pick over the next best."""
    ratio: float | None = None
    """Pick over next best, where the rows are alike. None: they are not (`no_ratio`), or there is no other."""
    no_ratio: str | None = None
    chance_best: float | None = None
    """Share of draws in which it is the best. None: nothing was drawn."""
    expected_tokens_s: Interval | None = None
    """What it is expected to run at, with the range of 95 % of draws. The fastest of `n` setups is partly the luckiest, so this
    lies below the `output_tokens_s` that was measured of it. None: nothing was drawn, or chosen before this was."""


class Flip(Part):
    """Where the choice changes, between measured points: throughput is linear in the logarithms of streams and tokens/s."""

    before: str | None
    after: str | None
    """None: nothing meets the objective."""
    at: float
    """Streams."""
    between: tuple[int, int]
    """The rows' numbers of streams on either side."""
    low: float | None = None
    high: float | None = None
    """95 % of the draws that have this flip. None: nothing is known of the noise."""
    chance: float | None = None
    """Share of draws that have it."""
    gap: str | None = Field(default=None, exclude_if=lambda gap: gap is None)
    """Where the rows of one end, and no curves cross: of which nothing is known on the other side, in a clause."""


class Regret(Part):
    """One setup for all points: what is lost where another is best. relative: None: the rows are not all alike."""

    setup: str
    worst_tokens_s: float
    at: int
    relative: float | None = None
    usd_per_million_tokens: float | None = None
    """More, there."""
    misses: tuple[int, ...] = ()
    """Numbers of streams at which it misses the objective and another does not."""


class Choice(Record):
    """What to deploy. `recommendation` is one clause; everything that it rests on follows."""

    kind: Literal["choice"] = "choice"
    model: str | None
    recommendation: str
    quality_assumed: bool
    """Nobody measured that these checkpoints answer like the reference."""
    hardware: str
    num_gpus: int
    origin: Literal["measured", "imported", "predicted"]
    """Of the rows that picks rest on."""
    prompts: str
    engine: str | None
    objective: dict[str, float] = Field(default_factory=dict)
    """`ttft_s`, `tpot_s`, `end_to_end_s` -> the most."""
    usd_per_gpu_hour: float | None = None
    checkpoint_sha256: dict[str, str] = Field(default_factory=dict)
    """Checkpoint -> hash of the bytes whose speed was measured. Absent: its rows are imported or predicted."""
    concurrency: tuple[int, ...]
    setups: tuple[Setup, ...]
    cells: tuple[Cell, ...]
    """Every setup at every number of streams."""
    quality: tuple[Quality, ...]
    picks: tuple[Pick, ...]
    flips: tuple[Flip, ...] = ()
    within_noise: tuple[str, ...] = ()
    """Flips to a setup and back that the recommendation leaves out, as too few draws have them; one clause for each pair."""
    if_passed: tuple[str, ...] = ()
    """What would change if a checkpoint whose quality is undecided passed, one line each."""
    undecided: tuple[str, ...] = ()
    """Checkpoints that are undecided and have no speed either, and what would decide them, one line each."""
    one_for_all: Regret | None = None
    regrets: tuple[Regret, ...] = ()
    refused: tuple[str, ...] = ()
    """Comparisons that were not made, and why, one line each."""
    set_aside: tuple[str, ...] = ()
    """Rows that could not be used, and why."""
    seed: int
    num_draws: int
    noise: str | None = None
    """What the draws take for the noise of speeds, and what of it is assumed. None: nothing was drawn."""

    def why_outdated(self, model: str, hashes: Mapping[str, str], overall: Mapping[str, Overall] | None) -> str | None:
        """Why it is not about this run as it is now, in a clause; None: it is.

        hashes: label -> `checkpoint_sha256` now; of others nothing is known. overall: label -> verdict now; None: nothing is
        judged.
        """
        if self.model is not None and self.model != model:
            return f"it is of {self.model}"
        changed = [label for label, sha256 in self.checkpoint_sha256.items() if hashes.get(label, sha256) != sha256]
        if changed:
            return f"{', '.join(changed)} {'was' if len(changed) == 1 else 'were'} made again since"
        if self.quality_assumed:
            return None
        if overall is None:
            return "there are no verdicts now"
        words = [judgement for judgement in self.quality if judgement.word in get_args(Overall)]
        judged = [judgement for judgement in words if overall.get(judgement.checkpoint, "NOT MEASURED") != judgement.word]
        if judged:
            now = {judgement.checkpoint: overall.get(judgement.checkpoint, "not judged") for judgement in judged}
            return "; ".join(
                f"{judgement.checkpoint} was {judgement.word} then and is {now[judgement.checkpoint]} now"
                for judgement in judged
            )
        return None
