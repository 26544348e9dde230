"""The model card's sentences. `card.py` and `cards/` fill them in; what is fixed stands in `templates/card.md.j2`."""

# ------------------------------------------------------------------------------------------------ the first sentence
WHAT = "{model} quantized to {precision}: {before} before, {after} after. {trust}"
NOBODY_MEASURED = "Not evaluated yet: for experiments only."
REFERENCE = "The reference of its run: others were compared with it, and its own loss was not measured."
PASS = "PASS: it lost no more than allowed against {reference} on suite {suite} ({limits}, {served})."
FAIL = "FAIL: it lost more than allowed against {reference} on suite {suite}. {instead}"
UNDERPOWERED = "UNDERPOWERED: the data cannot tell whether it lost more than allowed against {reference}. {instead}"
NOT_FAILED = "not failed: its divergence from {reference} is within its limits. No task was asked: what it lost is not known."
NO_VERDICT = "NOT MEASURED: evaluated, but the deciding task gave no result, so there is no verdict. {instead}"
OF_COPY = " Made of a quantized copy of the model ({how}): what that copy lost is in no figure here."
AGAINST_COPY = " The reference is itself a quantized copy of the model: what it lost is in no verdict."
LIMITS, LIMITS_BEFORE = "limits not fixed before the run", "limits fixed before the run"
AS_SERVED, AS_EMULATED = "kernels as served", "emulated arithmetic"
SMALLEST_THAT_PASSED = "Use {label} ({size}), the smallest that passed, or the reference, {reference}."
NOTHING_PASSED = "Use the reference, {reference}: no candidate of this run passed."

# ------------------------------------------------------------------------------------------------ the table at the top
MISSING = "not measured"
UNQUANTIZED, FP8 = "BF16", "FP8"
REFERENCE_TITLE = "{label} (reference)"
SIZE, MEMORY, SPEED, VERDICT = "size of the weights", "memory while served", "speed", "verdict"
IS_REFERENCE = "reference"
SCORE = "{task}, correct"
EACH_GPU = " a GPU"
MEMORY_CELL = "{size}{each} ({hardware})"
OUTPUT = "output, {at_once} ({prompts} prompts, {drafts}, {hardware}{engine})"
ONE_AT_ONCE, SEVERAL_AT_ONCE = "1 request at a time", "{number} requests at once"
DRAFTS, NO_DRAFTS = "{number} drafted a step", "no speculation"
SPEED_CELL = "{speed:,.1f} tokens/s"
FIRST_TOKEN = ", first after {seconds:.3g} s"
OTHER_TOKENS = ", then one every {milliseconds:.3g} ms"

# ------------------------------------------------------------------------------------------------ how it was asked and made
SAMPLED = "temperature {temperature:g}, top_p {top_p:g}"
TOP_K = ", top_k {top_k}"
GREEDY = "greedy (temperature 0)"
SAMPLING = "{how}: {tasks}"
SCALES = "scales on {tokens:,} tokens of text"
UNKNOWN_CALIBRATION = "unknown"
UNKNOWN_HARDWARE = "unknown hardware"

# ------------------------------------------------------------------------------------------------ what a screening says
COMPARED_WITH, STORED_AS = "compared with", "{name} ({stored_as})"
KL, ALLOWED = "KL, nats a token", "allowed, nats"
SAME_FIRST = "same first token"
TEXTS, SCREENED_TEXTS = "texts", "{texts}, {tokens:,} tokens scored: {files} ({source})"
SOURCE_NOT_STATED = "their source is not stated"
NUMERICS, COMPUTED_IN = "computed in", "{arithmetic} on {device}, torch {torch}, transformers {transformers}"
REFERENCE_WEIGHTS, THESE_WEIGHTS, THESE_TEXTS = "weights compared with, SHA-256", "these weights, SHA-256", "tokens, SHA-256"
IS_DAMAGED = "`assay inspect` finds it damaged: {damage}"
WIDENED = (
    "Computed otherwise than what it is compared with ({cause}), which alone makes {kl} nats: the interval is widened by it"
)
FP8_KV_CACHE = "Keys and values were rounded as an FP8 cache does"
NOT_COMPUTED = "Not computed: {what}"

# ------------------------------------------------------------------------------------------------ why a role was kept
NOT_QUANTIZED = {
    "mtp": "drafts tokens for speculation: its errors cost accepted drafts",
    "router": "chooses the experts: a small error sends a token to others",
    "router_bias": "chooses the experts: a small error sends a token to others",
    "indexer": "chooses which earlier tokens attention reads: a small error loses some",
    "embedding": "is looked up, not multiplied: quantizing makes it no faster",
    "lm_head": "its error enters every logit",
    "norm": "vectors: little to save",
}
"""Role -> why recipes keep it."""
LEFT_OUT = "the recipe leaves it out"
SINGLE_TENSORS = "vectors, or weights that vLLM cannot hold quantized"
"""Of a role that is quantized otherwise."""
RECIPE_KEEPS = "the recipe keeps it"

# ------------------------------------------------------------------------------------------------ what the hub shows
DATASET = "{task} (assay suite {suite})"
METRIC = "share correct"
SOURCE = "model card, measured with assay"
NOTE_ITEMS = "{number} items"
NOTE_SAMPLES = "mean of {number} replies to each"
NOTE_SERVED = "{server}, suite {suite}, replies of at most {tokens} tokens"
NOTE_EMULATED = "number format emulated"
