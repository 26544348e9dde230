"""What a suite says about a SWE-bench task, beyond what every task says (budget per reply, temperature, top_p)."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Literal

from pydantic import Field

from assay.recipes.base import Section

NAMED_DATASETS = {
    "verified": "SWE-bench/SWE-bench_Verified",
    "lite": "SWE-bench/SWE-bench_Lite",
    "multilingual": "SWE-bench/SWE-bench_Multilingual",
}
"""Short names -> data sets in the current schema (`image`, `eval_script`, ...). The princeton-nlp ones are in the old one."""
LOCAL_SUFFIXES = (".jsonl", ".json", ".parquet")
OPERATIONAL = frozenset(
    {"num_agents", "num_graders", "num_attempts", "server_patience_s", "pull_timeout_s", "request_timeout_s", "name"}
)  # fmt: skip
"""Options that change how long a run takes and what it survives, not what a trajectory or a grade is."""


class SweOptions(Section):
    """Agent (mini-swe-agent), containers and grading (`swebench`). Everything that could change a score is pinned."""

    dataset: str
    """verified, lite, multilingual; a Hugging Face id; a .jsonl, .json or .parquet file, or a folder with SPLIT.parquet or
    SPLIT.jsonl. In the harness's current schema."""
    split: str = "test"
    slice: str | None = Field(default=None, pattern=r"^-?\d*:-?\d*$")
    """Python's, over the instances sorted by id, after `filter`: "0:50"."""
    filter: str | None = None
    """Regular expression; instances whose id begins with a match stay."""
    num_repeats: int = Field(default=1, ge=1)
    """Trajectories per instance."""
    step_limit: int = Field(default=250, ge=1)
    """Model calls per trajectory."""
    wall_time_limit_s: int | None = Field(default=None, ge=1)
    """Of one trajectory. None: none, since a slow server would then cost points."""
    max_format_errors: int = Field(default=3, ge=1)
    """In a row, after which a trajectory ends."""
    tool_calls: Literal["native", "text"] = "native"
    """native: the server's tool-call parser is part of what is scored. text: commands in a fenced block."""
    agent_config: str | None = None
    """A mini-swe-agent YAML whose prompts are used instead of its own benchmarks/swebench.yaml."""
    request_timeout_s: int = Field(default=3600, ge=1)
    environment: Literal["docker", "podman", "singularity", "local"] = "docker"
    """local: no container; what the model writes is run here. Needs `allow_local_execution` and `local_repositories`."""
    allow_local_execution: bool = False
    local_repositories: str | None = None
    """Folder with a repository per instance id; each trajectory works on a copy."""
    command_timeout_s: int = Field(default=60, ge=1)
    container_timeout: str = Field(default="24h", pattern=r"^\d+[smhd]?$")
    """A trajectory's container lives no longer. mini-swe-agent's two hours are too short for a slow server."""
    pull_timeout_s: int = Field(default=3600, ge=1)
    """To fetch an image and start it."""
    network: Literal["none", "bridge"] = "none"
    """Of the agent's containers."""
    grading_network: Literal["none", "bridge"] = "none"
    """Of the containers that run the tests; a few instances of the public data sets need one."""
    grading_timeout_s: int = Field(default=1800, ge=1)
    num_agents: int = Field(default=8, ge=1)
    """Trajectories at once; no more than the profile's concurrency."""
    num_graders: int = Field(default=4, ge=1)
    num_attempts: int = Field(default=3, ge=1)
    """Of one trajectory, or one grading, when the machinery failed and not the model."""
    server_patience_s: int = Field(default=3600, ge=0)
    """How long the queue waits for a server that is gone before the run stops."""
    min_free_disk_gb: float = Field(default=5.0, ge=0)
    """In the container runtime's storage, before a run begins. SWE-bench Verified needs about 120."""

    def _contradictions(self) -> Iterator[str]:
        yield from super()._contradictions()
        if self.environment == "local" and not (self.allow_local_execution and self.local_repositories):
            yield (
                "environment local runs what the model writes on this machine, without a container: it needs "
                "`allow_local_execution: true` and `local_repositories: FOLDER`; or say docker, podman or singularity"
            )
        if self.filter is not None:
            try:
                re.compile(self.filter)
            except re.error as error:
                yield f"filter {self.filter!r} is not a regular expression ({error})"

    @property
    def local_paths(self) -> tuple[str, ...]:
        """Local files whose contents are part of what is measured."""
        data = (self.dataset,) if self.dataset.endswith(LOCAL_SUFFIXES) or self.dataset.startswith((".", "/")) else ()
        return data if self.agent_config is None else (*data, self.agent_config)
