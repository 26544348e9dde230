"""Where a command that serves or examines a checkpoint writes: never into the working directory by itself.

--out DIR: there. --run RUN, or a checkpoint that belongs to a run: into that run. Else: into a new folder under the system's
temporary directory, which is printed.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path

from assay.callbacks import Say, say_nothing
from assay.errors import AssayError
from assay.records.run import folder_name
from assay_pipeline.run_folders import run_of
from assay_pipeline.targets import Target, source_label


@dataclass(frozen=True)
class Place:
    """records: folder of what the command finds. logs: folder of what its servers say. run_dir: the run that both lie in."""

    records: Path
    logs: Path
    run_dir: Path | None = None


def place_for(command: str, inside: str, *, run: Path | None = None, out: Path | None = None, say: Say = say_nothing) -> Place:
    """inside: the folder of such records in a run. run: the run, if there is one. out: what the user named; it comes first."""
    if out is not None:
        return Place(out, out)
    if run is not None:
        return Place(run / inside, run / "logs", run)
    folder = Path(tempfile.mkdtemp(prefix=f"assay-{command}-"))
    say(f"writing to {folder} (--out DIR to change)")
    return Place(folder, folder)


def check_places(run: Path | None, out: Path | None) -> None:
    """AssayError: both were given."""
    if run is not None and out is not None:
        raise AssayError("--run puts what is found into a run, --out into any folder: say one of them")


def run_holding(checkpoint: Path) -> Path | None:
    """RUN of RUN/PRECISION/checkpoint, as it was written. None: the folder lies in no run."""
    whole = checkpoint.resolve()
    is_in_run = whole.name == "checkpoint" and (whole.parent / "plan.json").is_file()
    if not is_in_run:
        return None
    return checkpoint.parent.parent if checkpoint.name == "checkpoint" and len(checkpoint.parts) > 2 else whole.parent.parent


def belongs_to(target: Target, checkpoint: Path, runs: Path) -> tuple[Path | None, str]:
    """(run, label): of RUN/PRECISION/checkpoint those; of a source the run that was made from it, if there is one."""
    from assay_evaluate.serving.vllm_command import read_config

    if (run := run_holding(checkpoint)) is not None:
        return run, checkpoint.resolve().parent.name
    if (run := run_of(checkpoint, target.recipe.name, runs)) is not None:
        return run, source_label(read_config(checkpoint))
    return None, folder_name(checkpoint)
