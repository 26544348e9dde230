"""Limits of a run. `assay_reports/limits.py` says when each of them holds."""

# ------------------------------------------------------------------------------------------------ nothing there at all
UNMEASURED = "Nothing was measured: there is no score, no divergence and no verdict for any checkpoint of this run."
NOT_MEASURED = "Asked for and not measured: {entries}."
NOT_MEASURED_ENTRY = "{what} of {labels} ({reason})"
NO_REASON = "no reason recorded"
GATES_NOT_BEFORE = "{late}."
SERVING_FAULTS = "Not scored, for the serving is at fault: {entries}."
SERVING_NOT_LOOKED_AT = (
    "Recorded before replies kept what they say of their serving, so that it was not looked at in {labels}: {rules}. "
    "Measure again to have it looked at."
)

# ------------------------------------------------------------------------------------------------ how sure the scores are
SAMPLE_SIZES = "Sample sizes (of the worst candidate): {entries}."
SAMPLE_SIZE = "{task}: {num_items} paired items, {missed}"
LOSS_MISSED = "a loss of {points} points is missed 1 time in 5"
NO_LOSS_SEEN = "no loss can be seen, for {reference} is right in {score} itself"
SELECTION = (
    "{number} candidates were compared. If all were alike, the one that looks best on a task would look {points} points "
    "too good there (the middle of all tasks and candidates), and one of {number} that each lost the margin would pass in "
    "up to {share}."
)
ONE_SEED = (
    "Each checkpoint answered {items} once (seed {seeds}): the intervals cover other items and other replies to them, but "
    "nothing that all replies of a run share, such as a fault of the server."
)
EACH_ITEM = "each item"
EACH_ITEM_OF = "each item of {tasks}"
SUCH_ITEMS_ONLY = "Intervals of score changes are for questions like these, and other replies to them."
WHICH_ITEMS = "Intervals of score changes {parts}."
WHICH_ITEMS_PART = "on {tasks} are {claim}"
WHICH_ITEMS_BETWEEN = "; those "
THESE_ITEMS = "for these questions only, and other replies to them"
THESE_CLUSTERS = "for questions like these of the same groups (repositories, shared texts), not for other groups"
SUCH_ITEMS = "for questions like these"
TRUNCATION = "Replies cut off by the token budget are scored as they stand: {entries}."
TRUNCATED = "{number} of {total} for {label} in {task} (budget {budget} tokens{reasons})"
TRUNCATED_BY = {
    "context": "ended by the context",
    "empty": "ended inside thinking",
    "reasoning_only": "with the answer in what the server calls thinking",
}
FAILURES = "Items without a reply (infrastructure) are left out on both sides: {entries}."
FAILED = "{number} of {total} for {label} in {task}"
USUAL_ERROR = " (most often: {error})"

# ------------------------------------------------------------------------------------------------ what was served
QUANTIZED_REFERENCE = (
    "The reference is {reference}, not the unquantized model: a loss is a loss against {reference}; {distance}."
)
SOURCE_MEASURED = "{source}, measured as well, shows how far that is from it"
SOURCE_NOT_MEASURED = "how far that is from it was not measured"
EMULATED = (
    "{labels} ran emulated (dequantized weights, plain arithmetic): this scores the number format, not a kernel that would "
    "be deployed, and says nothing about its speed or its bugs."
)
NATIVE_KERNELS_ELSEWHERE = "Native kernels were compared with emulation on {gpu}, which is not the GPU that answered here."
NATIVE_KERNELS = "Native kernels were compared with emulation on one {gpu} and a small model only ({date}; {outcomes})."
SECOND_ROUNDING = (
    "{labels} ran with VLLM_USE_DEEP_GEMM_E8M0 on: weights in FP8 blocks that DeepGEMM takes are rounded once more when "
    "they are loaded, to scales that are powers of two. A divergence from such a reference holds that rounding of the "
    "reference, too."
)
UNKNOWN_KERNELS = "Which kernels ran is not known for {labels}: the server's log named none."
EXTERNAL_SERVER = "{labels} ran on a server that assay did not start: its flags and versions are as told, not as seen."
UNCLEAN_VERSIONS = "Not released versions, hard to reproduce: {versions}."
SPECULATION_OFF = "{labels} carries an MTP head that was not used while measuring: nothing shows that it drafts well."

# ------------------------------------------------------------------------------------------------ divergence
NO_REPEAT = "The reference was not compared with its own repeat: how much of a difference is mere noise is not known."
NO_NOISE_FLOOR = (
    "The divergence of the reference's repeat was not measured ({reason}): how much divergence is mere noise is not known."
)
ZERO_NOISE_FLOOR = (
    "The reference repeats itself exactly on this machine (noise floor 0 nats), so divergence is not given as a multiple "
    "of it; on GPUs under load the floor is above zero."
)
KL_LOWER_BOUND = (
    "KL, lower bound: what lies outside the reference's top {top_k} tokens is one bucket, with up to {share} of the "
    "probability on average; it can fail a checkpoint and passes none. KL, unbiased, has no such bias and more noise; on "
    "held-out text and structural tokens there is none."
)
DIVERGENCE_DIRECTION = (
    "KL and agreement say how much a candidate differs from the reference, not whether it is worse: a large divergence "
    "fails it, one that is not shown to be small keeps it from a PASS, and a small one does not show that its answers are "
    "as good."
)
FEW_TEXTS = "Divergence over {texts} has no interval, and no gate judges it: that takes {least} texts."
FEW_SAMPLED = " Whether so few were sampled from the reference is not checked either."
SAMPLED_TEXT, HELD_OUT_TEXT = "sampled text", "held-out text"
NOT_SAMPLED = (
    "The texts are not what the reference samples: their tokens are {gap:+.2f} nats ({low:+.2f} to {high:+.2f}) more "
    "surprising to it than its own entropy. The server's sampler is at fault, or it does not give natural logarithms of "
    "its probabilities; the unbiased mean is not an estimate of anything, and no KL passes a gate."
)
MEASUREMENT_NOTES = "Measured in another way than usual: {entries}."
MEASUREMENT_NOTE = "{note} ({labels})"
NON_FINITE = "Positions without a finite log-probability are outside the means: {entries}."
NON_FINITE_ENTRY = "{number} of {total} positions for {label}"
ACCEPTANCE_INTERVAL = (
    "The MTP acceptance of {labels} is known in total only, not by reply: intervals take its drafted tokens for "
    "independent and are too narrow if replies differ; they are not intervals of replies."
)

# ------------------------------------------------------------------------------------------------ checkpoints
PRECISIONS_BY_SHAPE = "Precisions were chosen by what the checkpoint's shapes allow: {entries}."
VERIFICATION_GAPS = "Not checked in the checkpoints: {entries}."
NOT_VERIFIED = "{label}: not verified at all"
VERIFICATION_STALE = "What was verified is not what was measured (other hashes): {labels}."

# ------------------------------------------------------------------------------------------------ what was not asked
GENERATED_QUESTIONS = (
    "The items of {tasks} are generated by assay: scores compare checkpoints with each other, and with no public benchmark "
    "or leaderboard."
)
KINDS_OF_WORK = "Not part of this suite: {kinds}."
PUBLIC_BENCHMARKS = "public benchmarks (GSM8K, MATH, GPQA...)"
OTHER_KINDS = {"ruler": "RULER", "swe": "SWE-bench", "tool": "tool calls"}
"""Part of a task's name -> what such a task measures."""
LANGUAGES = "Languages measured: {languages}; nothing is known of any other."
CONTEXT_LENGTH = (
    "The longest text seen has {longest:,} tokens; the model accepts {allowed:,}, and nothing is known beyond {longest:,}."
)

# ------------------------------------------------------------------------------------------------ speed and the choice
NO_SPEED = "Speed was not measured: {what}."
NOTHING_SAYS = "nothing here says which checkpoint is faster, or what its tokens cost"
CHOSEN_BY = "speed.json has no row, and those of the recommendation stand in choice.json alone"
SPEED_UNMEASURED = "Speed was not measured of {entries}."
SPEED_UNMEASURED_ENTRY = "{labels} ({reason})"
NOBODY_MEASURED = "nobody measured it"
SPEED_CONDITIONS = (
    "Speed is of {conditions}, {in_flight} in flight: nothing is known of other hardware, lengths or loads. {starts}{cpu}"
)
PROMPT_KINDS = "{kinds} prompts"
PROMPT_LENGTH = "about {lengths} tokens of prompt"
REPLY_LENGTH = "about {lengths} tokens of reply"
OR_MORE = " or more"
SEVERAL_STARTS = "Repeats ({repeats} a point) are of {starts} starts of each server."
ONE_START = "Repeats ({repeats} a point) share a start of their server: by how much starts differ is assumed (3 %)."
ON_A_CPU = " On a CPU the benchmark's client computes on the same cores."
SPEED_FROM_ELSEWHERE = "Speeds that were not measured here: {entries}."
SPEED_OUTDATED = "Speeds of {labels} were measured of other bytes than these and are left out; `assay speed` measures again."
CHOICE_OUTDATED = "What `assay choose` recommended is left out: {reason}; run it again."

# ------------------------------------------------------------------------------------------------ probes and deployments
NO_LOAD = "No load test and no probes{of}: failures that need concurrency or long uptime were not looked for{bound}."
NO_LOAD_OF = " of {labels}"
NO_LOAD_BOUND = ", and {requests:,} requests without one would bound their rate only at {rate}"
PROBES_NOT_RUN = "Probes that could not run: {entries}."
PROBES_NOT_JUDGED = "Probes that alarm, and no gate judges them: {entries}."
PROBE = "{probe} of {label} ({reason})"
RARE_FAULTS = (
    "Garbled replies at {rate:g} in 10,000, as production has seen them, need {needed:,} loaded requests to be seen once "
    "with 95 %; the probes made {made}."
)
NOTHING_SCORED_THERE = (
    "No task was scored of {places}: there a candidate was held against itself, not against the reference, which was not "
    "served there."
)
DEPLOYMENTS_LEFT_OUT = (
    "Left out: what was seen of {places}, for the checkpoint, its measurement or its verdict has changed since; `assay "
    "deployment` serves it again."
)
DEPLOYED = "{label} on {profile}"
