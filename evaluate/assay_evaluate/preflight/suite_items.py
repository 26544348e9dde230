"""How many items a suite asks, without asking: counted where the suite says it, looked up where a data set does."""

from __future__ import annotations

from assay.recipes.suite import ArithmeticTask, LmEvalTask, NeedleTask, RulerTask, SweTask, TaskBase, ToolsTask
from assay_evaluate.preflight.known_tasks import LM_EVAL, REPOSITORIES
from assay_evaluate.tasks.cells import num_cells
from assay_evaluate.tasks.swebench.dataset import sliced

UNKNOWN_COUNT = "how many items it has is not known here, since only the run loads its data"


def num_items(task: TaskBase) -> int | None:
    """Items of a task, each counted once however often it is asked; of a range, its max. None: not known."""
    match task:
        case ArithmeticTask() | NeedleTask() | RulerTask() | ToolsTask():
            return task.num_made * num_cells(task)
        case LmEvalTask():
            return _of_lm_eval(task)
        case SweTask():
            sizes = cluster_sizes(task)
            return None if sizes is None else sum(sizes)
        case _:
            raise TypeError(f"{type(task).__name__}: no kind of task that a suite has")


def _of_lm_eval(task: LmEvalTask) -> int | None:
    """`limit` is of each task behind a name, as lm-eval has it. A folder of one's own may hold another task of a known name."""
    if task.include_path is not None or any(name not in LM_EVAL for name in task.tasks):
        return None
    sizes = [size for name in task.tasks for size in LM_EVAL[name].sizes]
    return sum(size if task.most_items is None else min(size, task.most_items) for size in sizes)


def cluster_sizes(task: SweTask) -> tuple[int, ...] | None:
    """Instances of each repository that are left after `slice`; None: another data set, or a `filter`."""
    known = REPOSITORIES.get(task.dataset)
    if known is None or task.filter is not None:
        return None
    instances = [repository for repository, size in known.items() for _ in range(size)]
    left = sliced(instances, task.slice)
    return tuple(count for repository in known if (count := left.count(repository)))


def replies_each(task: TaskBase) -> int:
    """Replies, or trajectories, to each item; of a range, its max."""
    return task.num_repeats if isinstance(task, SweTask) else task.most_samples
