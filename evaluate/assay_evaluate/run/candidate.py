"""What an evaluation is told of each checkpoint, and the server that it is asked at."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from assay.callbacks import Say
from assay.errors import MeasureError
from assay.recipes.model import Serving
from assay.recipes.profile import GivenServer, ProfileRecipe, context_tokens
from assay.recipes.suite import SuiteRecipe
from assay.recipes.variant import Variant
from assay_evaluate.serving.server import Server, ServerSpec, join
from assay_evaluate.serving.vllm_command import read_config
from assay_evaluate.tasks.cells import tasks_filling_context

StartServer = Callable[[ServerSpec, Say], AbstractContextManager[Server]]


@dataclass(frozen=True)
class Candidate:
    """One checkpoint of a run. `label` names its measurement: a precision, or `bf16` for the source.

    checkpoint: its folder; None: only a server is known. sha256: its `checkpoint_sha256`, if it is known already. notes: what
    the report must say of it (`Measurement.notes`). endpoint: the server that runs already for it; None: assay starts one.
    variant: the way of serving that is compared, with the reference's own checkpoint; None: the profile's, as the reference's.
    """

    label: str
    checkpoint: Path | None
    is_reference: bool = False
    sha256: str | None = None
    notes: tuple[str, ...] = ()
    endpoint: GivenServer | None = None
    variant: Variant | None = None

    @property
    def declared(self) -> dict[str, Any]:
        """What it is to differ in from the reference, as it is served (`Measurement.declared`)."""
        return {} if self.variant is None else self.variant.declared


def split_reference(candidates: Sequence[Candidate]) -> tuple[Candidate, list[Candidate]]:
    """(the reference, all others). MeasureError: not one reference, or a label that is no name of a file or is used twice."""
    references = [candidate for candidate in candidates if candidate.is_reference]
    if len(references) != 1:
        raise MeasureError(f"a run needs one reference, {len(references)} are marked as such")
    labels = [candidate.label for candidate in candidates] + [f"{references[0].label}-repeat"]
    unusable = sorted({label for label in labels if labels.count(label) > 1 or "/" in label})
    if unusable:
        raise MeasureError(f"label {unusable[0]!r} is used twice or holds a slash; labels are names of files")
    return references[0], [candidate for candidate in candidates if not candidate.is_reference]


def server_spec(candidate: Candidate, profile: ProfileRecipe, serving: Serving, run_dir: Path) -> ServerSpec:
    """How assay starts a server on the candidate's folder, in its own way of serving if it has one."""
    assert candidate.checkpoint is not None, "a server is started on a folder"
    variant, drafts = candidate.variant, serving.num_speculative_tokens is not None
    if variant is not None and variant.speculation is not None:
        drafts = variant.drafting is not None
    return ServerSpec(
        checkpoint=candidate.checkpoint,
        profile=profile.served_as(variant),
        serving=serving,
        speculate=drafts,
        log_path=run_dir / "logs" / f"vllm-{candidate.label}.log",
    )


def join_server(candidate: Candidate, profile: ProfileRecipe) -> Server:
    """The server that runs already for the candidate."""
    assert candidate.endpoint is not None
    return join(candidate.endpoint, label=candidate.label, checkpoint=candidate.checkpoint, profile=profile.name)


def open_server(
    candidate: Candidate, profile: ProfileRecipe, serving: Serving, run_dir: Path, start_server: StartServer, on_progress: Say
) -> AbstractContextManager[Server]:
    """The server that runs already for the candidate, or one that is started for it."""
    if candidate.endpoint is not None:
        return nullcontext(join_server(candidate, profile))
    return start_server(server_spec(candidate, profile, serving, run_dir), on_progress)


def check_context(suite: SuiteRecipe, reference: Candidate, profile: ProfileRecipe, serving: Serving) -> None:
    """MeasureError naming the first task whose reply may be as long as the whole context: the budget would be cut in silence.

    Prompts of stated lengths that do not fit are left out one by one, by the tasks themselves. Servers that run already are
    not judged, since their context is their own; nor a checkpoint that is not there, which others report.
    """
    folder = reference.checkpoint
    if reference.endpoint is not None or folder is None or not (folder / "config.json").is_file():
        return
    context = context_tokens(read_config(folder), profile, serving)
    for task in tasks_filling_context(suite, context):
        raise MeasureError(
            f"suite {suite.name}: task {task.name} lets a reply have {task.max_tokens:,} tokens, and {folder} is "
            f"served with a context of {context:,} for prompt and reply together (profile {profile.name}); lower "
            "max_tokens in the suite, or raise max-model-len if the model allows more"
        )
