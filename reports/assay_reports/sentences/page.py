"""The page of a run and its Markdown: the first screen, headings that say what was found, notes, captions and definitions.

`assay_reports/page/first_screen.py` and `findings.py` fill in the first two, `report.py` the notes. Headings of tables stand in
`templates/`.
"""

# ------------------------------------------------------------------------------------------------ the first screen
AGAINST_COPY = "{answer}; the reference is itself a quantized copy"
IS_REFERENCE = "The others are compared with it."
NOT_JUDGED_YET = "Not judged yet."
JUDGED_BEFORE = "Judged by an older version; `assay gate` judges again"
SERVING_FAULT = "serving fault: {clause}"
NO_CANDIDATE = "No candidate was measured beside {reference}"
USE = "Use {label}: it passes at {size}, {share} of {reference}{smallest}"
SMALLEST_OF = "; the smallest of {number} that pass"
VARIANT = "{status}: {variant}"
VARIANTS = "{statuses}, as other ways of serving {reference}"
KEEP = "Keep {reference}: no smaller checkpoint passes{statuses}"
KEEP_STATUSES = " ({statuses})"
JUDGED_ONLY = "{statuses}, compared with {reference}{unsized}"
UNSIZED = "; whether {labels} {are} smaller is unknown"
STATUS_OF = "{labels} {status}"
STATUSES = {
    "PASS": ("passes", "pass"),
    "FAIL": ("fails", "fail"),
    "UNDERPOWERED": ("is undecided", "are undecided"),
    "not failed": ("is not failed by its divergence", "are not failed by their divergence"),
    None: ("is not judged", "are not judged"),
}
"""Status -> verb of one checkpoint, and of several. None: any other."""
UNDECIDED_LOSS = "Whether {label} loses more than {points:g} points on {task}"
UNDECIDED = "{label}, {gate}: undecided"
NO_RESULT = "{tasks}: no result{reason}"
NO_RESULT_REASON = ", {reason}"
SOURCE_IS_BETTER = "Compared with {source}, {reference} itself has lost: {source} scores higher on {gains}"
GAIN = "{task} (+{points} points)"
NO_SPEED = "Speed: {what}"
NO_SPEED_NOTHING = "not measured, so nothing tells which checkpoint is faster or cheaper"
EMULATED = "Kernels: {labels} ran emulated; the scores are the number format's"
NOT_PROBED = "Faults under load: no server was probed; `assay diagnose probe URL` looks for them"
MEND_SERVING = "Fix the serving, then evaluate again with `--again LABEL` for each label that was measured through it"
DECIDE_BY_ITEMS = "To decide {label} on {task}, evaluate with about {needed:,} items; {asked:,} were asked"
DECIDE_BY_MORE = "To decide {label} on {task}, evaluate with more than the {asked:,} items asked so far"
DECIDE_AT_LIMIT = (
    "{label} seems to lose what is allowed or more on {task}, and more than the {asked:,} items asked are unlikely to pass it: "
    "improve the checkpoint, or use another"
)
DECIDE_GATE = "To decide {label} on {gate}, evaluate with {more}"
MORE_TEXTS, MORE_TO_ANSWER = "more texts", "more items"
LOCATE = "Find where {label} goes wrong against {reference}"
JUDGE = "Judge the run"
ASK_TASKS = "Evaluate with a suite that asks tasks: no divergence passes a checkpoint"
MEASURE_SPEED = "Measure speed on the hardware that will serve it"
IMPORT_SPEED = "Measure speed with a benchmark of your own; `assay speed RUN --import FILE` takes its rows"
CHOOSE = "Weigh quality against speed and price"

# ------------------------------------------------------------------------------------------------ headings
NOT_MEASURED_TOO = "; not measured: {tasks}"
NOTHING_SCORED = "No task was scored on a candidate"
NO_LOSS = "No task shows a significant loss over {answers:,} paired answers"
LOST = "{task} lost {losses}"
LOST_FIRST = "{points} points ({label})"
LOST_MORE = "{points} ({label})"
MORE_LOST = "; {number} more tasks lost"
NO_OTHER_LOSS = "; no other significant loss"
MANY_TASKS = "{number} tasks"
NO_LANGUAGE = "No single language shows a loss ({languages})"
NONE_ASKED = "none asked"
WORST_LANGUAGE = "By language: the largest loss is {points} points, {task} in {language} ({label})"
NO_LONG_CONTEXT = "Long context was not measured"
NO_LENGTH = "No length up to {longest:,} tokens shows a loss; longer ones are unknown"
WORST_LENGTH = "By length: the largest loss is {points} points, {task} at {length:,} tokens ({label})"
NO_COURSE = "Divergence was measured, but not along the text"
NO_DIVERGENCE = "Divergence was not measured"
DRIFT_AT = (
    "Divergence is largest at tokens {span} ({label}: KL, lower bound, {most:.2g} nats; the highest of {spans} spans of "
    "{checkpoints})"
)
DRIFT_FRONT = (
    "Divergence is largest at the start of the text ({label}: KL, lower bound, {front:.2g} nats there, {end:.2g} at the end)"
)
DRIFT_LEVEL = (
    "Divergence is level along the text ({label}: KL, lower bound, {front:.2g} nats at the start, {end:.2g} at the end)"
)
NO_ACCEPTANCE = "Acceptance of drafts (MTP) was not measured"
FEWER_ACCEPTED = "Fewer drafts (MTP) are accepted than with {reference}: {losses} fewer"
ACCEPTED_ALIKE = "No significant difference from {reference} in accepted drafts (MTP)"
ACCEPTED_AT_MOST = "{start}; losses of up to {points} points are possible"
NO_PROBES = "Serving was not probed for faults under load"
ALARMS = "Probes of the servers: {alarms} ({names})"
NO_ALARM = "No serving fault found: {number} probes of {labels}, no alarm"
NO_SPEED_HEADING = "Speed was not measured"
NO_SPEED_COMPARED = "Speed: no comparable row (every one is emulated, or does not say whether it drafted)"
FASTEST = "{label} is fastest"
NOT_TOLD_APART = "{labels} cannot be told apart"
SPEED_FEW = "{fastest} at {streams} ({speed:,.1f} tokens/s)"
SPEED_SAME = " and at {streams} ({speed:,.1f})"
SPEED_MANY = ", {fastest} at {streams} ({speed:,.1f})"
SPEED = "{speeds}; {hardware}, {prompts}, {drafting}{origin}"
NO_PLANS = "How the tensors were treated is unknown: the checkpoints were made elsewhere"
UNQUANTIZED = "Share of bytes left unquantized: {shares}"
NO_VERIFICATION = "No checkpoint of this run was verified"
DAMAGED = "Damaged: {labels}"
DAMAGES = "{label} ({number} failed checks)"
VERIFIED = "{labels}: {checks:,} checks, all passed{others}"
NOT_THE_MEASURED = "; {labels} is not the checkpoint that was measured"
SERVED_ALIKE = "All were served alike by {server}{emulated}"
SERVER = "{server}, profile {profile}"
EXTERNAL_SERVER = "servers that assay did not start"
IMPORTED = "servers of which nothing is known"
SERVING_UNKNOWN = "How the checkpoints were served is unknown: another harness asked them"
NO_SPECULATION = "none"
SPECULATION_UNKNOWN = "not known"
DRAFTS_UNKNOWN = "on, with settings that the servers do not tell"
SERVED_EMULATED = "; {labels} emulated, so kernels were not tested"
ONE_LIMIT = "One limit of what this run shows"
LIMITS = "{number} limits of what this run shows"
NOT_JUDGED = "This run has not been judged"
GATES = "Required gates by candidate, optional ones not counted: {counts}"
NO_GATES = "none"
CALIBRATED = "{method} on {tokens:,} tokens of text{withheld}"
WITHHELD = ", checked against the items of {tasks} ({texts} left out)"
ONE_SCHEME = "{role} {scheme}"
SCHEME_OF_LAYERS, MORE_LAYERS = "{role} {scheme} in {number} of {layers} layers", "{scheme} in {number}"
QUANTIZED = "quantized to {scheme}"
KEPT_AS_IN_SOURCE = "kept in {scheme}, as the source has it"
TREATMENTS = {
    "drop": "dropped",
    "add": "scales from the calibration",
    "consume": "scales folded into their weights",
    "keep": "kept in {dtypes}",
    "cast": "cast to {dtypes}",
    "dequantize": "dequantized to {dtypes}",
}
"""Action of a plan -> what was done with the tensor."""
SCALED = ", some scaled by {scales}"

REACHED_ALIKE = "Right answers reached and lost: no task shows more than in {reference}"
REACHED_MORE = "Right answers reached and lost: {label} loses {points} points more than {reference} on {task}"
REACHED_UNKNOWN = "Right answers reached and lost: not measured ({reasons})"

# ------------------------------------------------------------------------------------------------ notes
REACHED = (
    "Reached: wrong answers whose thinking (or what stands before the final answer) states the right one. By chance: how many "
    "of other items' right answers the same words state. Change: reached and lost, of all paired answers; − is more lost "
    "than in the reference."
)
COVERAGE = (
    "Intervals cover {level}; those from fewer than 15 differing replies, several looks, two counts, rare events or means over "
    "texts (KL, agreement) cover at least {level}"
)
GATES_TITLES = {
    "before the run": "Gates, written before the run",
    "after the run": "Gates chosen after the run",
    "not recorded": "Gates; when they were chosen is not recorded",
    None: "Gates",
}
"""When the limits were chosen -> heading. None: nothing was judged."""
NOT_IN_SUITE = "Not part of suite {suite}."
MISSING_PART = "{status}: {reasons}."
NO_REASON = "no reason recorded"
YES_NO = {True: "yes", False: "no", None: "unknown"}
COMPUTED = {True: "emulated", False: "computed by native kernels", None: "computed in an unknown way, or there were none"}
"""Whether formats were emulated -> how they were computed, as it continues "they were"."""
ON_OFF = {True: "on", False: "off"}
TEXTS = "({texts})"
SUBTITLE = "{model} on suite {suite}, compared with {reference}"
COMMANDS_WHERE = "Run the commands in the folder that holds {run}."
NOTHING_MISSING = "Nothing that was requested is missing."
NOTHING_TO_DO = "The records ask for nothing."
MORE_ITEMS = "{task}: {reference} answered {items:,} items, some candidates fewer. {parts}"
ON_PAIRS = "On the {pairs:,} items shared with {labels}, {reference} scores {score}."
PUBLISHED = "Published for {task}: {score}."
NO_VERIFICATION_NOTE = "NOT MEASURED: `assay verify DIR --source DIR` compares a checkpoint's folder with its source."
NO_PROBED_SERVER = "NOT MEASURED: no server of this run was probed."
STOPS = (
    "end-of-text probability where the reference stopped: {candidate} vs {reference} ({outcome}: {change} points over "
    "{ends} ends); elsewhere {candidate_elsewhere:.2g} vs {reference_elsewhere:.2g} a token."
)
STOPS_ALIKE = "no significant difference"
STOPS_LESS, STOPS_MORE = "significantly lower", "significantly higher"
STOPS_UNKNOWN = "too few texts to compare"
NO_STOPS = "no reply of the reference ended by itself."
FLOOR_IS_ZERO = "not defined: the floor is 0 or rounding"
NO_JOURNAL = "journal.db is not in the run's folder, so there are outcomes only"
UNREADABLE_JOURNAL = "journal.db cannot be read ({error}), so there are outcomes only"
NO_REPLIES = "journal.db holds no reply to these items, so there are outcomes only"
NO_TRAJECTORIES = (
    "{folder}/ of the run's folder holds no trajectory of SWE-bench that was graded, so of it there are outcomes only"
)
WEIGHT_ERROR = (
    "Methods that use calibration text (GPTQ, AWQ) minimise the error of a layer's output, so their weight error may be "
    "larger and the checkpoint better."
)

# ------------------------------------------------------------------------------------------------ pictures
QUALITY_CAPTION = (
    "Each mark is a checkpoint: what the gate that decides its verdict saw, as a share of what that gate allows, with the "
    "interval. Lower and further left is better."
)
QUALITY_RULE = " To pass, the whole bar must lie below 100 %."
NOT_DRAWN = " Not drawn, because what decides has no such share: {labels}."
DECIDED_BY = "{status}, decided by {gate}: {clause}"
QUALITY = "Quality against size. {points}"
QUALITY_AXIS = "what the deciding gate saw, % of what it allows"
SIZE_AXIS = "size of the checkpoint, {unit}"
ALLOWED = "allowed"
COMPARED_WITH = "what the others are compared with"
CHANGES = "Change of every task in points, with intervals. {changes}"
CHANGE = "{label}, {task}: {change} ({ends})"
CHANGE_AXIS = "change in points (− is a loss)"
DRIFT = "Mean KL, lower bound, from {reference} against the position in the text: {lines}"
DRIFT_AXIS = "mean KL, lower bound, nats a token"
POSITION_AXIS = "position in the text, tokens"
HELD_OUT = "{label}, held-out text"
SPAN = "{first} to {last}: {kl:.3g} nats"
SPAN_TEXTS = ", {texts} texts"
HEAT_MAP = "Points lost, {title}: {cells}"
BY_DEPTH, BY_PART = "{task} by depth", "{task} by part"
HEAT_CELL = "{row}, {length:,} tokens: {change} ({ends}), {items} items"
DEPTH, ALL_DEPTHS = "depth {depth:g}", "all"
BYTES = "Bytes by role. {sizes}"
SOURCE = "source"
SPEED_PICTURE = "Tokens a second against requests in flight; {title}"
SPEED_AXIS = "output tokens/s, all requests together"
STREAMS_AXIS = "requests in flight"
SPEED_POINT = "{label}, {streams} in flight: {speed:,.1f} tokens/s ({repeats} repeats)"
LADDER = "{hardware}, {prompts}, {drafting}, {origin} by {source}"
DRAFTED, NO_DRAFTS = "{tokens} drafted a step", "speculation off"
FRONTIER = "Expected KL against size of {model}. {points}."
FRONTIER_AXIS = "expected KL, nats a token (sum over parts)"
FITS_NOT = ", does not fit"
FITS_NOT_THE_HARDWARE = "; does not fit the hardware"

# ------------------------------------------------------------------------------------------------ sensitivity
NOTHING_COSTS = "No part costs anything that was measured"
MOST_COSTLY = "Most costly by itself: {role} of layer {layer} in {scheme}, {cost}"
COSTS_NATS = "{cost:.3g} nats a token"
COSTS_SQUARED_ERROR = "a relative squared error of {cost:.3g}"
MAP = "{scheme}. Share of the sum: {shares}. {together}"
TOGETHER = "All parts at once: {together:.3g} nats; the parts sum to {sum:.3g}."
ONE_PART_AT_A_TIME = "{scheme}, one part at a time: {parts}"
PART_NATS = "layer {layer} {role} in {scheme}: {cost:.3g} nats"
PART_ORDER = "layer {layer} {role} in {scheme}: {cost:.3g} (only the order means something)"
PART_SERVED = ", served {nats:.3g}"

# ------------------------------------------------------------------------------------------------ definitions
WORDS: dict[str, tuple[str, str]] = {
    "pass": ("PASS", "Every required gate passed: losses beyond the allowed ones are excluded at the level of the gates."),
    "fail": ("FAIL", "A required gate failed: more than the allowed loss is shown, beyond chance."),
    "underpowered": (
        "UNDERPOWERED",
        "Shown neither within the allowed loss nor beyond it. More items would decide; it never counts as a pass.",
    ),
    "not-measured": (
        "NOT MEASURED",
        "There is no number, or a meaningless one, such as on a task where the reference itself is never right.",
    ),
    "not-failed": (
        "not failed",
        "No task was asked. The divergence is surely within its limits, which does not show that answers are as good.",
    ),
    "reference": ("reference", "The checkpoint that the others are compared with, served in the same way."),
    "floor": ("noise floor", "The reference compared with its own repeat: what differs where nothing was changed."),
    "change": (
        "change",
        "Candidate minus reference in percentage points, over items that both answered; − is a loss. In brackets its interval.",
    ),
    "allowed": ("allowed", "The loss, in points, that the gate of this task allows; written down in the gates' recipe."),
    "pairs": ("pairs", "Items that both sides answered. Items whose request failed are left out on both."),
    "cut-off": ("cut off", "Replies ended by the token budget or the context; they are scored as they stand."),
    "flipped": ("flipped", "Right on one side only. Equal scores can hide flips: losses and gains cancel out."),
    "bc": ("b/c", "Items that only the reference, or only this checkpoint, gets right."),
    "p-pass": ("p pass", "Chance of such data if the margin or more were lost; small enough, and the checkpoint passes."),
    "p-fail": (
        "p fail",
        "Chance of such data if the margin or less were lost, adjusted over the scored tasks; small enough, and it fails.",
    ),
    "p-any": ("p any", "Chance of such data without any difference (McNemar, mid-p). It decides nothing."),
    "mde": ("MDE", "Minimum detectable effect: the smallest loss that would show in 80 % of such runs."),
    "needed": (
        "needed",
        "Pairs with which a checkpoint that loses nothing would pass 4 times in 5; none where a loss is certain.",
    ),
    "kl": (
        "KL",
        "Kullback-Leibler divergence of the next-token distributions from the reference's, in nats a token. How "
        "different, not how much worse. Unbiased: right on average over sampled texts. Lower bound: the truth may be more.",
    ),
    "top1": ("top-1 agreement", "Share of positions where both rank the same token first."),
    "acceptance": ("accepted", "Share of the tokens proposed by the model's own draft head (MTP) that it then accepted."),
    "emulated": (
        "emulated",
        "Weights dequantized and computed in plain arithmetic: the score is the format's, not a kernel's, and says"
        " nothing about speed.",
    ),
    "in-flight": ("requests in flight", "Requests that the server works on at once."),
    "tpot": ("TPOT", "Time per output token: (end-to-end − time to the first token) / (tokens − 1), of one request."),
    "ttft": ("TTFT", "Time to the first token, from the request on."),
}
"""Key -> (word, definition). A definition that no table of a page names is left out of that page."""
