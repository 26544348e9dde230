"""What page, command line and changelog say of an engine upgrade."""

HEADLINE = "{status}: {after} in place of {before}"
VERSION = "vLLM {version}"
UNKNOWN_VERSION = "the server at {where}"
PATCHED = "vLLM {version} at {where}"
LINE = "{after} in place of {before}, {model}: {status} on {suite}: {reason}{speed}{found}"
SPEED = "; {ratio:.2f} times the tokens/s at {concurrency} in flight{interval}"
SPEED_INTERVAL = " ({low:.2f} to {high:.2f})"
FOUND = "; lost between {good} and {bad}"
UNDECIDED = " ({count} in between could not be told)"
NOTE = "The same checkpoint on two engines. Nothing else differs: profile, flags and questions are those of the reference."
NOTE_OF_SERVERS = (
    "Two servers that run already. assay sees their versions and contexts at most; that they serve the same checkpoint, and "
    "alike, is taken as said."
)
STEPS = "Engines in between were compared with {before}{tasks}; replies are in run {run}."
ON_TASKS = ", on {tasks} alone"
NO_ENGINES_BETWEEN = (
    "No engine in between was named or is installed here, so the loss is between these two. Name some with `--between`, from "
    "old to new."
)
