"""Limits of a run. `assay_reports/find_limits.py` says when each of them holds."""

# ------------------------------------------------------------------------------------------------ nothing there at all
UNMEASURED = "Nothing was measured: no score, no divergence, no verdict."
NOT_MEASURED = "Requested but not measured: {entries}."
NOT_MEASURED_ENTRY = "{what} of {labels} ({reason})"
NO_REASON = "no reason recorded"
GATES_NOT_BEFORE = "{late}."
SERVING_FAULTS = "Not scored because of a serving fault: {entries}."
SERVING_NOT_LOOKED_AT = (
    "Not checked for serving faults, because the records are too old to show them: {labels} ({rules}). Evaluate again to check."
)

# ------------------------------------------------------------------------------------------------ how sure the scores are
SAMPLE_SIZES = "Sample sizes (worst candidate): {entries}."
SAMPLE_SIZE = "{task}: {num_items} paired items, {missed}"
LOSS_MISSED = "a loss of {points} points is missed 1 time in 5"
NO_LOSS_SEEN = "no loss can show, since {reference} itself is right in only {score}"
SELECTION = (
    "{number} candidates were compared. If all were equally good, the best-looking one would look {points} points too good "
    "on a task (median over tasks and candidates), and one of {number} that each lost exactly the margin would pass in up "
    "to {share} of runs."
)
ONE_SEED = (
    "Each checkpoint answered {items} once{seeds}. The intervals cover other items and other replies, but not what "
    "all replies of a run share, such as a server fault."
)
SEED = " (seed {seeds})"
EACH_ITEM = "each item"
EACH_ITEM_OF = "each item of {tasks}"
SUCH_ITEMS_ONLY = "Intervals of score changes hold for similar questions and for other replies."
WHICH_ITEMS = "Intervals of score changes {parts}."
WHICH_ITEMS_PART = "on {tasks} {claim}"
WHICH_ITEMS_BETWEEN = "; those "
THESE_ITEMS = "hold for these questions only, with other replies"
THESE_CLUSTERS = "hold for similar questions of the same groups (repositories, shared texts), not for other groups"
SUCH_ITEMS = "hold for similar questions"
TRUNCATION = "Replies cut off by the token budget are scored as they stand: {entries}."
TRUNCATED = "{number} of {total} for {label} in {task} ({budget}{reasons})"
BUDGET = "budget {tokens} tokens"
NO_BUDGET = "budget not stated"
TRUNCATED_BY = {
    "context": "ended by the context",
    "empty": "ended inside thinking",
    "reasoning_only": "with the answer in what the server calls thinking",
}
SCREENED_OUT = "Excluded by a screening, and asked nothing: {entries}."
SCREENED_OUT_ENTRY = "{label} ({reason})"
FAILURES = "Items without a reply (failed requests) are left out on both sides: {entries}."
FAILED = "{number} of {total} for {label} in {task}"
USUAL_ERROR = " (most often: {error})"

# ------------------------------------------------------------------------------------------------ what was served
QUANTIZED_REFERENCE = "The reference, {reference}, is itself quantized: every loss is relative to it; {distance}."
FOREIGN_REFERENCE = (
    "The reference, {reference}, is itself a quantized copy of its model ({how}): what it lost is in no verdict, and PASS "
    "means no worse than this copy."
)
SOURCE_MEASURED = "the rows of {source} show how far it is from the unquantized model"
SOURCE_NOT_MEASURED = "how far it is from the unquantized model was not measured"
EMULATED = (
    "{labels} ran emulated (dequantized weights, plain arithmetic): the scores are the number format's, not a kernel's, "
    "and say nothing about speed or kernel bugs."
)
NATIVE_KERNELS_ELSEWHERE = "Native kernels were checked against emulation on {gpu}, not on the GPU used here."
NATIVE_KERNELS = "Native kernels were checked against emulation on one {gpu}, with a small model only ({date}; {outcomes})."
SECOND_ROUNDING = (
    "{labels} ran with VLLM_USE_DEEP_GEMM_E8M0 on: DeepGEMM rounds weights in FP8 blocks a second time when they are "
    "loaded (scales become powers of two). A divergence from such a reference includes that rounding of the reference."
)
UNKNOWN_KERNELS = "Kernels unknown for {labels}: the server's log names none."
IMPORTED = "Another harness asked and scored ({harnesses}), so NOT MEASURED: {not_known}. A change may come from any of these."
IMPORTED_NOT_KNOWN = "{what} of {labels}"
EXTERNAL_SERVER = "{labels} ran on a server that assay did not start: its flags and versions are as reported, not verified."
UNCLEAN_VERSIONS = "Unreleased versions, hard to reproduce: {versions}."
SPECULATION_OFF = "MTP head present but not used, so nothing shows how well it drafts: {labels}."

# ------------------------------------------------------------------------------------------------ divergence
NO_REPEAT = "No noise floor: the reference was not measured twice, so how much of a difference is noise is unknown."
NO_NOISE_FLOOR = "No noise floor for divergence: that of the reference's repeat was not measured ({reason})."
ZERO_NOISE_FLOOR = (
    "The reference repeats itself exactly here (noise floor 0 nats), so divergence is not given as a multiple of it. On "
    "GPUs under load the floor is above zero."
)
KL_LOWER_BOUND = (
    "KL, lower bound: everything outside the reference's top {top_k} tokens is one bucket, with up to {share} of the "
    "probability on average. It can fail a checkpoint, never pass one. KL, unbiased, has no such bias but more noise, and "
    "exists for sampled text only."
)
DIVERGENCE_DIRECTION = (
    "KL and agreement show how different a candidate is, not whether it is worse: a large divergence fails it, a small one "
    "does not prove equally good answers, and one not shown to be small prevents a PASS."
)
FEW_TEXTS = "Divergence over {texts} has no interval and is not judged: that takes {least} texts."
FEW_SAMPLED = " Whether so few were sampled from the reference is not checked either."
SAMPLED_TEXT, HELD_OUT_TEXT = "sampled text", "held-out text"
NOT_SAMPLED = (
    "The texts do not look sampled from the reference: their tokens are {gap:+.2f} nats ({low:+.2f} to {high:+.2f}) more "
    "surprising to it than its own entropy. Either the server's sampler is at fault, or its log-probabilities are not "
    "natural logarithms; the unbiased mean estimates nothing, and no KL passes a gate."
)
MEASUREMENT_NOTES = "Measured differently than usual: {entries}."
MEASUREMENT_NOTE = "{note} ({labels})"
NON_FINITE = "Positions without a finite log-probability are left out of the means: {entries}."
NON_FINITE_ENTRY = "{number} of {total} positions for {label}"
ACCEPTANCE_INTERVAL = (
    "MTP acceptance is known in total only, not per reply, for {labels}: its intervals treat drafted tokens as "
    "independent, and are too narrow if replies differ."
)

# ------------------------------------------------------------------------------------------------ checkpoints
PRECISIONS_BY_SHAPE = "Precisions chosen to fit the checkpoint's shapes: {entries}."
VERIFICATION_GAPS = "Not verified in the checkpoints: {entries}."
NOT_VERIFIED = "{label}: not verified at all"
VERIFICATION_STALE = "The verified files are not the measured ones (different hashes): {labels}."

# ------------------------------------------------------------------------------------------------ what was not asked
GENERATED_QUESTIONS = (
    "The items of {tasks} are generated by assay: their scores compare checkpoints with each other, not with public benchmarks."
)
KINDS_OF_WORK = "Not in this suite: {kinds}."
PUBLIC_BENCHMARKS = "public benchmarks (GSM8K, MATH, GPQA...)"
OTHER_KINDS = {"ruler": "RULER", "swe": "SWE-bench", "tool": "tool calls"}
"""Part of a task's name -> what such a task measures."""
LANGUAGES = "Languages tested: {languages}. Others are unknown."
CONTEXT_LENGTH = "Longest text tested: {longest:,} tokens; beyond it nothing is known (the model accepts {allowed:,})."

# ------------------------------------------------------------------------------------------------ speed and the choice
NO_SPEED = "Speed was not measured: {what}."
NOTHING_SAYS = "nothing here tells which checkpoint is faster or cheaper"
CHOSEN_BY = "speed.json has no rows, and those behind the recommendation are in choice.json only"
SPEED_UNMEASURED = "Speed was not measured for {entries}."
SPEED_UNMEASURED_ENTRY = "{labels} ({reason})"
NOBODY_MEASURED = "not requested"
SPEED_CONDITIONS = (
    "Speed holds for {conditions}, {in_flight} in flight. Other hardware, lengths and loads are unknown. {starts}{cpu}"
)
PROMPT_KINDS = "{kinds} prompts"
PROMPT_LENGTH = "about {lengths} prompt tokens"
REPLY_LENGTH = "about {lengths} reply tokens"
OR_MORE = " or more"
SEVERAL_STARTS = "Each point has {repeats} repeats over {starts} starts of the server."
ONE_START = "Each point has {repeats} repeats of one start of the server: how much starts differ is assumed (3 %)."
ON_A_CPU = " On a CPU the benchmark's client shares the server's cores."
SPEED_FROM_ELSEWHERE = "Speeds not measured here: {entries}."
SPEED_OUTDATED = "Speeds of {labels} are of other bytes than these and left out; `assay speed` measures again."
CHOICE_OUTDATED = "The recommendation of `assay choose` is out of date and left out: {reason}; run it again."

# ------------------------------------------------------------------------------------------------ probes and deployments
NO_LOAD = "No load test and no probes{of}: faults that need concurrency or long uptime would not show{bound}."
NO_LOAD_OF = " of {labels}"
NO_LOAD_BOUND = "; {requests:,} requests without one bound their rate only at {rate}"
PROBES_NOT_RUN = "Probes that could not run: {entries}."
PROBES_NOT_JUDGED = "Probe alarms that no gate judges: {entries}."
PROBE = "{probe} of {label} ({reason})"
RARE_FAULTS = (
    "Garbled replies at {rate:g} in 10,000, as seen in production, take {needed:,} requests under load to show once with "
    "95 % probability; the probes made {made}."
)
NOTHING_SCORED_THERE = "No task was scored for {places}: there the candidate was compared with itself, not with the reference."
DEPLOYMENTS_LEFT_OUT = (
    "Left out: {places}, because the checkpoint, its measurement or its verdict has changed since; `assay deployment` "
    "serves it again."
)
DEPLOYED = "{label} on {profile}"
