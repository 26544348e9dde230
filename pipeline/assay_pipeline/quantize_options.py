"""How checkpoints are made, as the user says it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from assay.callbacks import Say, Track, say_nothing, track_nothing


@dataclass(frozen=True)
class TextOptions:
    """Text for calibrations, as the command line says it. sources: of --text; empty: what recipes say. withhold: suites and
    runs whose items no text may hold; None: what recipes say. runs: whose runs of the same model are withheld by default."""

    sources: tuple[str, ...] = ()
    withhold: tuple[str, ...] | None = None
    runs: Path = Path("runs")


@dataclass(frozen=True)
class QuantizeOptions:
    """How checkpoints are made; their bytes depend on `importance` and `text`, of calibrated ones on where they are calibrated.

    device: where calibrations run; `auto`: a GPU if PyTorch sees one. runner: local or ray. workers: threads; None: every core
    this process may use. memory_bytes: bound of the process's memory; None: the engine's default. importance: file of channel
    weights. allow_not_finite: copy NaN and infinity in what is not quantized. stream_from: `hub`: each shard of the source is
    downloaded when it is due and deleted after; None: the source is there, or is downloaded whole first. text: what calibrated
    precisions are calibrated with. say, track: who is told how it goes.
    """

    device: str = "auto"
    runner: str = "local"
    workers: int | None = None
    memory_bytes: int | None = None
    importance: Path | None = None
    allow_not_finite: bool = False
    stream_from: str | None = None
    text: TextOptions = TextOptions()
    say: Say = say_nothing
    track: Track = track_nothing
