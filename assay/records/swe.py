"""SWE-bench: how each trajectory ended, what it cost, how it was graded; and the same summed over a task.

Two questions are kept apart everywhere: whose fault an end was (the model's own counts, the machinery's is done again and never
scored) and whether the patch resolves the instance. Missing is None.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from assay.records.base import Interval, Part

Fault = Literal["model", "infrastructure"]
"""Who ended a trajectory. Only what the model ended itself is scored."""
Outcome = Literal["resolved", "unresolved", "empty_patch", "patch_does_not_apply", "tests_timed_out", "not_graded"]
"""not_graded: the machinery failed; neither right nor wrong."""


class Trajectory(Part):
    """One agent run on one instance, and its grade."""

    instance: str
    repository: str
    repeat: int
    exit_status: str
    """As mini-swe-agent names it: Submitted, LimitsExceeded, ContextWindowExceededError, RepeatedFormatError..."""
    fault: Fault
    outcome: Outcome
    num_steps: int | None
    """Model calls that were answered."""
    prompt_tokens: int | None
    """Summed over the steps; the history counts again with every step."""
    output_tokens: int | None
    num_cut_off: int | None
    """Replies that reached their token budget."""
    num_format_errors: int | None
    """Replies without a command that could be run."""
    num_tool_calls: int | None
    num_valid_tool_calls: int | None
    """Of those: the tool that was offered, with arguments of its schema. None: commands are not asked for as tool calls."""
    longest_loop_steps: int | None
    """Steps in the longest stretch that only repeats commands with the same output (in a cycle of at most four)."""
    looped: bool | None
    patch_bytes: int | None
    patch_sha256: str | None
    """None: no patch."""
    num_attempts: int
    """Trajectories begun for it; more than one if the machinery failed."""
    accepted_tokens: int | None = None
    """Drafted tokens that were accepted, where the server tells it per reply."""
    drafted_tokens: int | None = None
    error: str | None = None
    """Of infrastructure: one line."""


class SweFigures(Part):
    """One SWE-bench task on one served checkpoint, over all trajectories that count."""

    dataset: str
    dataset_sha256: str
    """Of the rows that were asked."""
    num_instances: int
    """Asked: those whose gold patch passes on this host."""
    num_repeats: int
    gold_failed: tuple[str, ...]
    """Instances left out on both sides: here, even the right patch does not pass."""
    num_resolved: int
    num_infrastructure: int
    """Trajectories without a result through no fault of the model; left out, and done again by a rerun."""
    num_retried: int
    """Trajectories that needed more than one attempt."""
    exit_statuses: dict[str, int]
    outcomes: dict[Outcome, int]
    mean_steps: Interval | None
    mean_output_tokens: Interval | None
    mean_prompt_tokens: Interval | None
    num_format_errors: int
    tool_call_validity: Interval | None
    """Share of tool calls that are valid."""
    looped: Interval | None
    """Share of trajectories that ended up repeating themselves."""
    context_overflow: Interval | None
    patch_applies: Interval | None
    """Of the patches that are not empty."""
    draft_acceptance: float | None
    """accepted / drafted tokens while the agent ran. None: nothing was drafted, or the server does not say."""
    versions: dict[str, str]
    """mini-swe-agent, swebench, the container runtime."""
    agent_config_sha256: str
    """Of prompts, limits and sampling as the agent got them, endpoint left out."""
    trajectories: tuple[Trajectory, ...] = Field(repr=False)


class SweDifference(Part):
    """Reference minus candidate over the instances both have a result for; + is a loss."""

    num_instances: int
    num_repositories: int
    reference_only: int
    """Instances the reference resolves (more often) and the candidate does not."""
    candidate_only: int
    drop: Interval
    """The wider, at each end, of the next two; `by_instance` where the gates ask about these repositories."""
    by_instance: Interval
    """Instances as independent: Tango's for one trajectory each, a bootstrap for several. About these instances."""
    by_repository: Interval | None
    """Instances of one repository rise and fall together, and a few of them may hold all of the loss. About repositories like
    these; its upper end is 1 where so few allow no claim. None: one repository, or one instance of each."""
    p_value: float
    """Two-sided mid-p McNemar."""
    resolution: float
    """Half-width of `by_instance` that a run of this size has when nothing is lost, at the differences that were seen."""
    degrees_of_freedom: float | None = None
    """Of the t of `by_repository`."""
    mean_square: float | None = None
    """Of the differences between shares of resolved trajectories; of one trajectory each, the share that comes out differently.
    None: written before this was."""
    resolution_by_repository: float | None = None
    """As `resolution`, of `by_repository`, if repositories differ by no more than chance. None: so few repositories allow no
    claim about others."""
    num_equal_repositories: float | None = None
    """Repositories of equal size that would count as much. None: written before this was."""
    of_these_repositories: bool = False
    """The gates ask about these repositories, so `drop` is `by_instance`."""
