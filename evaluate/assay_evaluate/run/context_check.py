"""Before a server is started: does the context of a model leave room for the replies that a suite asks for?"""

from __future__ import annotations

from assay.errors import MeasureError
from assay.recipes.model import Serving
from assay.recipes.profile import ProfileRecipe, context_tokens
from assay.recipes.suite import SuiteRecipe
from assay_evaluate.run.candidate import Candidate
from assay_evaluate.serving.vllm_command import read_config
from assay_evaluate.tasks.cells import tasks_filling_context


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
