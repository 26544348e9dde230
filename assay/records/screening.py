"""`screening.json`: how far candidates' next-token distributions are from the reference's, over texts that both were given.

Teacher-forced, full vocabulary, layer by layer in transformers; no server, no kernels of one, no tasks: what it says of a
candidate is a divergence and never that it is safe. All in nats. Intervals are over texts.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field

from assay.records.base import Interval, Part, Record
from assay.records.divergence import Drift, DriftGroup, Ranking, TextMean

SCREENING_NAME = "screening.json"
SCREENED = "screened"
"""Folder of a run for the record, page and states of a screening of its checkpoints."""
ScreenWord = Literal["FAIL", "not failed", "UNDERPOWERED"]
"""FAIL: the divergence surely exceeds the limit. not failed: it surely does not. UNDERPOWERED: the interval holds the limit,
there are too few texts for one, or it lies above it on texts that are foreign to the reference. No word here says PASS: tasks
do."""
FOREIGN_NATS = 1.0
"""By so much the reference is more surprised by foreign texts than by its own. Of human prose and code in the languages of a
model it is some tenths."""


class Numerics(Part):
    """What figures of one checkpoint depend on beside its weights; two of different numerics are not ranked."""

    arithmetic: Literal["fp32", "bf16"]
    device: str
    torch: str
    transformers: str


class StatedTexts(Part):
    """Where texts come from, in the words of whoever brought them; that no model was trained on them cannot be shown. None: not
    stated."""

    source: str | None = None
    licence: str | None = None
    date: str | None = None


class Panel(Part):
    """The texts. sha256: of their tokens and of which of them are scored."""

    files: tuple[str, ...]
    sha256: str
    num_texts: int
    num_tokens: int
    """Scored."""
    stated: StatedTexts = StatedTexts()


class RouterChange(Part):
    """changed: share of the tokens that are sent to another set of experts. replaced: mean share of the chosen experts."""

    layer: int
    changed: float
    replaced: float


class Drafts(Part):
    """Tokens that the MTP block drafts one step ahead, teacher-forced, and how many of them the decoder would take.

    accepted: mean over D drafts of the sum of min(p, q), at temperature 1. greedy: share of drafts that greedy decoding takes.
    Each of the reference and the candidate is asked with its own decoder and its own block.
    """

    num_drafts: int
    reference_accepted: float
    accepted: float
    change: Interval | None
    """Candidate minus reference, paired by text; None: fewer than 20 texts."""
    reference_greedy: float
    greedy: float


class AppliedFloor(Part):
    """What the interval of the KL was widened by: the candidate was computed another way than the reference.

    cause: what differs. kl: of the reference from itself, computed the two ways, in nats. The roots of the KL's ends are moved
    by its root: near 0 the root of a divergence is a distance.
    """

    cause: str
    kl: float


class Screened(Part):
    """One candidate."""

    label: str
    location: str
    weights_sha256: str
    stored_as: str
    bits_per_weight: float
    """Of weights with two dimensions, their scales included."""
    word: ScreenWord
    limit: float
    limit_for: str
    """What the limit is for, ` for 4-bit weights`."""
    tokens_needed: int | None
    """UNDERPOWERED: scored tokens that would decide, at this spread of texts. None: it is decided, or cannot be told."""
    drift: Drift
    floor: AppliedFloor | None = None
    """None: both sides were computed alike, and a checkpoint against itself is exactly 0."""
    reverse_kl_mean: TextMean
    """KL(candidate || reference)."""
    jensen_shannon_mean: TextMean
    top_k_shared: TextMean
    """Share of the reference's ten likeliest tokens that are among the candidate's."""
    by_entropy: tuple[DriftGroup, ...]
    """Of the reference's distribution, in nats."""
    by_structural: tuple[DriftGroup, ...] = ()
    """Where tokens stand that the tokenizer adds by name: thinking, tools, end, other. Empty: none does, or their names are not
    known."""
    routers: tuple[RouterChange, ...]
    drafts: Drafts | None = None
    """None: one of the two has no MTP block that is run."""
    fp8_kv_cache: bool = False
    """Keys and values were rounded as an FP8 cache does, by the checkpoint's scales or 1."""
    not_applied: tuple[str, ...]
    """What of the checkpoint this pass does not compute: the format of its KV cache, an MTP block."""


class ScreenEstimate(Part):
    """What was expected before the first pass, of all checkpoints that had none yet. flop: of products with weights."""

    read_bytes: int
    flop: float
    state_bytes: int
    """On the disk, at most."""
    seconds: float
    usd: float | None
    """None: no price was given."""


class Surprise(Part):
    """Of the reference by the texts, in nats a token. nll: mean of -ln p of the token that stands there. entropy: mean of what
    it would be if the texts were the reference's own words."""

    nll: float
    entropy: float

    @property
    def is_foreign(self) -> bool:
        """Whether the texts are so far from what the reference writes that limits, which are for its replies, do not apply."""
        return self.nll - self.entropy > FOREIGN_NATS


class Screening(Record):
    """Candidates against one reference, over the same texts."""

    kind: Literal["screening"] = "screening"
    reference: str
    """Folder of the checkpoint, or of its pack."""
    pack_seal: str | None = None
    """Of the pack that stood for the reference."""
    foreign_reference: str | None = None
    """How the reference is quantized, if it is a quantized copy of its model; None: it is not, or is not known."""
    damages: dict[str, str] = Field(default_factory=dict)
    """Name of the reference, or label of a candidate -> what `assay inspect` finds damaged in it."""
    unlike_reference: dict[str, tuple[str, ...]] = Field(default_factory=dict)
    """Label of a candidate -> what of its config.json or tokenizer is another model's than the reference."""
    reference_sha256: str
    reference_stored_as: str
    numerics: Numerics
    """Of the candidates."""
    panel: Panel
    surprise: Surprise
    candidates: tuple[Screened, ...]
    """The least divergence first."""
    rankings: tuple[Ranking, ...]
    num_texts_given: int | None = None
    """Of the panel that was given, where a part of it decided; `panel` is of those that were looked at. None: recorded before
    a screening could stop."""
    estimate: ScreenEstimate | None = None
    """None: passes of a screening before were gone on with."""
    seconds: float

    @property
    def refused(self) -> tuple[str, ...]:
        """Labels of candidates that surely diverge too far, are damaged, or are another model by their own small files."""
        return tuple(
            candidate.label
            for candidate in self.candidates
            if candidate.word == "FAIL" or candidate.label in self.damages or candidate.label in self.unlike_reference
        )

    def of_weights(self, checkpoint_sha256: str) -> Screened | None:
        """The candidate of these very weights and files; None: it is of others."""
        return next((candidate for candidate in self.candidates if candidate.weights_sha256 == checkpoint_sha256), None)


def load_screening(place: Path) -> Screening:
    """Of its file, or of the folder that it lies in. AssayError: as of `Record.load`."""
    return Screening.load(place / SCREENING_NAME if place.is_dir() else place)


def is_screening(place: Path) -> bool:
    """Whether a record lies there: a file of this name, or a folder that holds one. A run whose checkpoints were screened has
    its own in `SCREENED`."""
    return place.name == SCREENING_NAME if place.is_file() else (place / SCREENING_NAME).is_file()
