"""The page of a run and its Markdown: the first screen, headings that say what was found, notes, captions and definitions.

`assay_reports/page/findings.py` fills in the first two, `report.py` the notes. Headings of tables stand in `templates/`.
"""

# ------------------------------------------------------------------------------------------------ the first screen
IS_REFERENCE = "What the others are compared with."
NOT_JUDGED_YET = "Not judged yet."
JUDGED_BEFORE = "Judged by an older version: `assay gate` judges again"
SERVING_FAULT = "serving fault: {clause}"
NO_CANDIDATE = "No candidate was measured beside {reference}"
USE = "Use {label}: it passes, with {size}, {share} of {reference}{smallest}"
SMALLEST_OF = "; the smallest of {number} that pass"
KEEP = "Keep {reference}: no smaller checkpoint passes{statuses}"
KEEP_STATUSES = " ({statuses})"
JUDGED_ONLY = "{statuses}, held against {reference}{unsized}"
UNSIZED = "; whether {labels} {are} smaller is not known"
STATUS_OF = "{labels} {status}"
STATUSES = {
    "PASS": ("passes", "pass"),
    "FAIL": ("fails", "fail"),
    "UNDERPOWERED": ("is undecided", "are undecided"),
    None: ("is not judged", "are not judged"),
}
"""Status -> verb of one checkpoint, and of several. None: any other."""
UNDECIDED_LOSS = "Whether {label} loses more than {points:g} points on {task}"
UNDECIDED = "{label}, {gate}: undecided"
NO_RESULT = "{tasks}: no result{reason}"
NO_RESULT_REASON = ", {reason}"
NO_SPEED = "Speed: {what}"
NO_SPEED_NOTHING = "not measured, so nothing here says which is faster or cheaper"
EMULATED = "Kernels: {labels} ran emulated; these are scores of the format"
NOT_PROBED = "Faults under load: no server was probed"
MEND_SERVING = "Mend the serving, then evaluate again, with `--again LABEL` for each label that was measured through it"
ASK_MORE = "To decide {label}, ask more of {task}: {amount}"
ABOUT_SO_MANY = "about {needed:,} items in all; {asked:,} were asked"
VERY_MANY = "what was lost is close to what is allowed, so it may take very many"
LOCATE = "Find what in {label} costs that"
JUDGE = "Judge the run"
MEASURE_SPEED = "Measure speed where it will be served"
CHOOSE = "Weigh quality against speed and price"

# ------------------------------------------------------------------------------------------------ headings
NOT_MEASURED_TOO = "; not measured: {tasks}"
NOTHING_SCORED = "No task was scored on a candidate"
NO_LOSS = "No task shows a loss over {answers:,} paired answers"
LOST = "{task} lost {losses}"
LOST_FIRST = "{points} points ({label})"
LOST_MORE = "{points} ({label})"
MORE_LOST = "; {number} more tasks lost"
NO_OTHER_LOSS = "; no other loss is shown at 95 %"
MANY_TASKS = "{number} tasks"
NO_LANGUAGE = "No language shows a loss of its own ({languages})"
NONE_ASKED = "none asked"
WORST_LANGUAGE = "By language: most was lost on {task} in {language} ({label}), {points} points"
NO_LONG_CONTEXT = "Long context was not measured"
NO_LENGTH = "No length up to {longest:,} tokens shows a loss; nothing is known beyond"
WORST_LENGTH = "By length: {label} lost most at {length:,} tokens, {points} points of {task}"
NO_COURSE = "Divergence was measured, its course along the text was not"
NO_DIVERGENCE = "Divergence was not measured"
DRIFT_AT = (
    "Drift is largest at tokens {span} ({label}: KL, lower bound, {most:.2g} nats; the highest of {spans} spans of "
    "{checkpoints})"
)
DRIFT_FRONT = "Drift is largest at the front ({label}: KL, lower bound, {front:.2g} nats there, {end:.2g} at the end)"
DRIFT_LEVEL = "Drift stays level along the text ({label}: KL, lower bound, {front:.2g} nats at the front, {end:.2g} at the end)"
NO_ACCEPTANCE = "Acceptance of drafts (MTP) was not measured"
FEWER_ACCEPTED = "Fewer drafts are accepted: {losses} less than with {reference}"
ACCEPTED_ALIKE = "No difference in accepted drafts (MTP) from {reference} is shown"
ACCEPTED_AT_MOST = "{start}; losses of up to {points} points are not excluded"
NO_PROBES = "Serving was not probed for faults under load"
ALARMS = "Probes of the servers: {alarms} ({names})"
NO_ALARM = "No fault of serving was found: {number} probes of {labels}, no alarm"
NO_SPEED_HEADING = "Speed was not measured"
NO_SPEED_COMPARED = "Speed: every row is of an emulated format, or does not say whether it drafted, so none is compared"
FASTEST = "{label} is fastest"
NOT_TOLD_APART = "{labels} cannot be told apart"
SPEED_FEW = "{fastest} at {streams} ({speed:,.1f} tokens/s)"
SPEED_SAME = " and at {streams} ({speed:,.1f})"
SPEED_MANY = ", {fastest} at {streams} ({speed:,.1f})"
SPEED = "{speeds}; {hardware}, {prompts}, {drafting}{origin}"
NO_PLANS = "What was done to the tensors is not known: the checkpoints were made elsewhere"
UNQUANTIZED = "Bytes kept unquantized: {shares}"
NO_VERIFICATION = "No checkpoint of this run was verified"
DAMAGED = "Damaged: {labels}"
DAMAGES = "{label} ({number} damages)"
VERIFIED = "{labels}: {checks:,} things checked, none damaged{others}"
NOT_THE_MEASURED = "; {labels} is not the checkpoint that was measured"
SERVED = "All were served alike, by {server}, profile {profile}{emulated}"
SERVED_EMULATED = "; {labels} emulated, so nothing is said about kernels"
ONE_LIMIT = "One thing that this run cannot tell"
LIMITS = "{number} things that this run cannot tell, or tells with a limit"
NOT_JUDGED = "Nobody has judged this run"
GATES = "Gates that count, by candidate: {counts}"
NO_GATES = "none"
CALIBRATED = "{method} on {tokens:,} tokens of text{withheld}"
WITHHELD = ", held against the items of {tasks} ({texts} left out)"

# ------------------------------------------------------------------------------------------------ pictures
QUALITY = "Quality against size. {points}"
QUALITY_AXIS = "loss on the worst task, % of what is allowed"
SIZE_AXIS = "size of the checkpoint, {unit}"
ALLOWED = "allowed"
COMPARED_WITH = "what the others are compared with"
WORST_TASK = "{change} on {task} ({ends}), {margin} allowed"
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
    "pass": (
        "PASS",
        "Every gate that counts has passed: losses beyond the allowed ones are excluded at the level of the gates.",
    ),
    "fail": (
        "FAIL",
        "A gate that counts has failed: more than the allowed loss is shown, beyond what chance explains.",
    ),
    "underpowered": (
        "UNDERPOWERED",
        "Neither shown to be within the allowed loss nor beyond it. More items would decide; it is never a pass.",
    ),
    "not-measured": (
        "NOT MEASURED",
        "There is no number, or one that means nothing, such as a task on which the reference itself is never right.",
    ),
    "reference": (
        "reference",
        "The checkpoint that the others are compared with, served in the same way.",
    ),
    "floor": (
        "noise floor",
        "The reference held against its own repeat: how much differs where nothing was changed.",
    ),
    "change": (
        "change",
        "Candidate minus reference in percentage points, over items that both answered; − is a loss. In brackets its interval.",
    ),
    "allowed": (
        "allowed",
        "The loss, in points, that the gate of this task allows; written down in the gates' recipe.",
    ),
    "pairs": (
        "pairs",
        "Items that both sides answered. Items whose request failed are left out on both.",
    ),
    "cut-off": (
        "cut off",
        "Replies ended by the token budget or the context; they are scored as they stand.",
    ),
    "flipped": (
        "flipped",
        "Right on one side only. Equal scores hide flips, for losses and gains cancel out.",
    ),
    "bc": (
        "b/c",
        "Items that only the reference, or only this checkpoint, gets right.",
    ),
    "p-pass": (
        "p pass",
        "Chance of such data if the margin or more were lost; small enough, and the checkpoint passes.",
    ),
    "p-fail": (
        "p fail",
        "Chance of such data if the margin or less were lost, adjusted over the scored tasks; small enough, and it fails.",
    ),
    "p-any": (
        "p any",
        "Chance of such data without any difference (McNemar, mid-p). It decides nothing.",
    ),
    "mde": (
        "MDE",
        "Minimum detectable effect: the smallest loss that would show in 80 % of such runs.",
    ),
    "needed": (
        "needed",
        "Pairs with which a checkpoint that loses nothing would pass, 4 times in 5; none where it surely loses something.",
    ),
    "kl": (
        "KL",
        "Kullback-Leibler divergence of the next-token distributions from the reference's, in nats a token. How "
        "different, not how much worse. Unbiased: right on average over sampled texts. Lower bound: the truth may be more.",
    ),
    "top1": (
        "top-1 agreement",
        "Share of positions where both think the same token most likely.",
    ),
    "acceptance": (
        "accepted",
        "Share of the tokens proposed by the model's own draft head (MTP) that it then accepted.",
    ),
    "emulated": (
        "emulated",
        "Weights dequantized and computed in plain arithmetic: the score is the format's, not a kernel's, and says"
        " nothing about speed.",
    ),
    "in-flight": (
        "requests in flight",
        "Requests that the server works on at once.",
    ),
    "tpot": (
        "TPOT",
        "Time per output token: (end-to-end − time to the first token) / (tokens − 1), of one request.",
    ),
    "ttft": (
        "TTFT",
        "Time to the first token, from the request on.",
    ),
}
"""Key -> (word, definition). A definition that no table of a page names is left out of that page."""
