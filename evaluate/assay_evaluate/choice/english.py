"""The English of a choice: why a cell is empty, why nothing is picked, what would decide, and the recommendation's clauses.

The modules beside it fill these in; `assay choose` and the page print them as the record has them.
"""

# ------------------------------------------------------------------------------------------------ a cell without a row
NOT_MEASURED = "not measured"
EMULATED = "emulated here, which says nothing about speed"
ITS_ROW = "its row {reason}"
NOT_COMPARABLE = "only rows that may not be compared with the others"
OTHER_CONDITIONS = "{origin} under other conditions only"
DRAFTED = "{source}, {tokens} tokens drafted a step"
LIMITS = {"ttft_s": "TTFT", "tpot_s": "TPOT", "end_to_end_s": "end to end"}
NOT_KNOWN = "{limits} not known"

# ------------------------------------------------------------------------------------------------ nothing picked
NONE_MAY_BE_CHOSEN = "no checkpoint that has rows may be chosen: see quality"
NONE_WAS_MEASURED = "none that may be chosen was measured"
NONE_MEETS = "none meets the objective; {setup}, the fastest, misses it: {misses}"
NOT_MEASURED_THERE = "{setup} was not measured there"
MISSED_THERE = "{misses} of {setup} there"
AHEAD = "{what}, which is ahead by its speeds at {below} and {above} streams"

# ------------------------------------------------------------------------------------------------ quality
ASSUMED = "quality was not measured"
REFERENCE = "what the others are compared with"
NO_CANDIDATE = "no candidate of this run ({candidates})"
NO_CANDIDATES = "it has none"
TO_EVALUATE = "measure {label}: `assay evaluate`"
GATES_SAY = "its gates say {status}"
TO_RUN = "{task}: {reason}"
TASKS_NEEDED = "a suite with tasks"
ITEMS_NEEDED = "{task}: {needed:,} paired items ({asked:,} were asked)"
NO_ITEMS_DECIDE = "{task}: no number of items would decide if the observed loss is the true one ({asked:,} were asked)"
UNDECIDED = "{checkpoint} is {status}, so its quality is unknown{run}"
TO_DECIDE = "; to decide it: {what}"
NO_SPEED_EITHER = "{undecided}; its speed is not known either"
NOT_CHOSEN_ANYWAY = "{undecided}; it would not be chosen if it passed"
IF_PASSED = "{undecided}; if it passed: {recommendation}"

# ------------------------------------------------------------------------------------------------ the recommendation
QUALITY_ASSUMED = "quality was not measured (--quality assumed): "
FROM = {"measured": "", "imported": "", "predicted": "predicted, not measured: "}
AS_FAST = "at {streams} {setups} may be as fast as {chosen}"
NOTHING = "nothing can be recommended: {reason}"
THEN = "then "
UP_TO = " up to about {streams}"
AHEAD_WITHIN_NOISE = "{where} {setup} is ahead, within the noise"
ABOUT = "at about {streams}"
ABOUT_FROM = "from about {low} to {high} streams"
NONE_FOR_QUALITY = "nothing that may be chosen"
NONE_FOR_LIMITS, NONE_KNOWN_FOR_LIMITS = "nothing that meets the objective", "nothing known to meet the objective"
UNKNOWN_BEYOND = "beyond which nothing is known of {setup}"
UNKNOWN_BELOW = "below which nothing is known of {setup}"

# ------------------------------------------------------------------------------------------------ rows that are set aside
NO_ROWS = "there are no rows"
ANOTHER_ROW = "{checkpoint} at {streams} from {source}: there is another row from {other}"
WITH_MTP, WITHOUT_MTP = "{checkpoint} with MTP", "{checkpoint} without MTP"
SCHEME_NOT_STATED = "scheme not stated"
ROWS_OF = "{rows} of {checkpoints}: {reason}"
EMULATED_ROW = "emulated, which says nothing about speed"
DRAFTS_NOT_STATED = "nobody states whether they drafted"
NOT_CHOSEN_AT = "at {streams}: it {reason}"
UNLIKE_ROWS = "under other conditions ({unlike})"
CONDITIONS = ("origin", "prompts", "hardware", "number of GPUs", "engine")
NOT_STATED = "not stated"
NO_RATIO = (
    "no ratio of {fastest} ({speed:g} tokens/s, {drafts}) to {others} at {streams}: a ratio would be of drafting and "
    "checkpoint together"
)
OTHER_SPEED = "{checkpoint} ({speed:g}, {drafts})"
DRAFTING_NOT_STATED, NOTHING_DRAFTED, NUM_DRAFTED = "drafting not stated", "nothing drafted", "{tokens} drafted"


def streams(count: int | str) -> str:
    """`1 stream`, `8 streams`."""
    return f"{count} stream{'' if str(count) == '1' else 's'}"


def and_list(words: list[str]) -> str:
    """`a, b and c`"""
    return " and ".join(filter(None, (", ".join(words[:-1]), *words[-1:])))
