"""The page of a screening. `screening.py` fills it in; what is fixed is in `templates/screening.html.j2`."""

ALONE = "{label}: {word}; its KL from {reference} is {kl} nats{limit}"
AHEAD = "{first} is ahead: {ratio} times the KL of {second}"
NOT_APART = "{first} and {second} are not told apart on {num_texts} texts"
NO_RATIO = "{first} has the least KL; these texts rank nothing"
LIMIT = ", {limit:g} allowed{limit_for}"
FAILED = "surely beyond what is allowed"
NOT_FAILED = "surely within what is allowed; whether tasks are lost is not known"
FOREIGN = (
    "not decided: these texts are foreign to the reference ({nll:.2f} nats a token, and {entropy:.2f} were they its own "
    "words), and what is allowed is for text as it writes; give its replies with --text"
)
UNDECIDED = "not decided: {remedy}"
MORE_TOKENS = "about {tokens:,} tokens would"
MORE_TEXTS = "more texts are needed"
RANKED = "{first} loses less than {second}: {ratio} times its KL on the same texts"
NO_RANKING = "{first} and {second} are not ranked by these texts"
NOT_RANKED = "{first} is not told apart from {second}: {ratio} times its KL on the same texts"
PICTURE = "KL from the reference against bits per weight. {points}"
HINT = "{label}, {bits:.2f} bits: KL {kl} nats"
KL_AXIS = "KL from the reference, nats"
BITS_AXIS = "bits per weight, scales included"
CAPTION = (
    "Each mark is a checkpoint: the mean KL of its next-token distributions from the reference's, with the interval over "
    "texts; the dash is what is allowed at its bits. Lower and further left is better."
)
NOT_SAID = (
    "Whether tasks are solved: no divergence shows it; `assay judge` and `assay evaluate` ask questions",
    "What only a server does: kernels, caches, load, faults; `assay diagnose probe` looks for them",
    "Long generation: each token was predicted behind the text as it stands, not behind the candidate's own words",
)
UNSEEN = (
    "Losses that few texts have: one of 1 text in {one_in} is in none of these {num_texts} with a chance of 2.5 %, a rarer one "
    "more often"
)
IS_DAMAGED = "{heading}; {label} is damaged"
IS_OTHER = "{heading}; {label} is another model than the reference"
AGAINST_COPY = "{heading}; the reference is itself a quantized copy"
COPY = "What the reference lost itself: it is a quantized copy of its model ({how}), and a KL of 0 means as good as this copy"
DAMAGED = "{label}: {damage}"
ZERO = "0, as the reference"
