"""What `assay blame` prints of a record."""

from __future__ import annotations

import io

from rich.console import Console

from assay.records.base import Interval
from assay.records.diagnosis.blame import Blame, Cause, Change, Interaction, LayerRange, Served, ServingCause
from assay.records.screening import Numerics, Panel, Surprise
from assay_cli.shown.blame import print_blame


def interval(value: float, low: float, high: float) -> Interval:
    return Interval(value=value, low=low, high=high, n=40)


WHOLE = Blame(
    reference="glm", candidate="glm-w4", reference_sha256="0", candidate_sha256="1",
    numerics=Numerics(arithmetic="fp32", device="cpu", torch="2", transformers="5"),
    panel=Panel(files=("replies.jsonl",), sha256="2", num_texts=40, num_tokens=8000), surprise=Surprise(nll=0.5, entropy=0.5),
    kl=interval(0.2, 0.15, 0.3), limit=0.08, limit_for=" for 4-bit weights", word="blamed",
    causes=(
        Cause(kind="weights", name="routed_expert", what="weights of routed experts", share=interval(0.7, 0.6, 0.8)),
        Cause(kind="kv_cache", name="kv_cache", what="FP8 KV cache", share=interval(0.304, -0.004, 0.5)),
        Cause(kind="activations", name="activations", what="rounding of activations", share=None),
    ),
    interactions=(Interaction(first="routed_expert", second="kv_cache", share=interval(-0.2, -0.3, -0.1)),),
    unexplained=0.15, layers=(LayerRange(cause="routed_expert", first_layer=3, last_layer=5, share=0.9),),
    change=Change(
        restored=("weights of routed experts of layers 3-5",), kl=interval(0.04, 0.03, 0.06), is_within=True,
        added_bytes=3_000_000, weights_bytes=30_000_000, read_ratio=1.25, recipe="blamed/w4a16-mended.yaml",
    ),
    served=Served(kl=interval(0.9, 0.8, 1.0), is_more=True),
    serving=(
        ServingCause(
            label="old", what="another serving environment", num_lost=60, num_recovered=55, num_again=5,
            share=interval(0.83, 0.7, 0.9),
        ),
    ),
    num_passes=20, seconds=1.0,
)  # fmt: skip


def printed(record: Blame) -> list[str]:
    out = io.StringIO()
    print_blame(record, Console(file=out, width=400, no_color=True))
    return [line.rstrip() for line in out.getvalue().splitlines()]


def test_everything_that_was_found() -> None:
    assert printed(WHOLE) == [
        "glm-w4 against glm; 40 texts, 8,000 tokens; fp32 on cpu",
        "blamed: KL 0.2000 (0.1500 to 0.3000) nats, 0.08 allowed for 4-bit weights",
        "share of the KL  cause",
        "70 % (60 to 80)  weights of routed experts",
        "30 % (0 to 50)   FP8 KV cache",
        "not known        rounding of activations",
        "weights of routed experts with FP8 KV cache: they cover each other, -20 % (-30 to -10) beyond what each does alone, "
        "half of it in the share of each",
        "weights of routed experts: 90 % of what they lose by themselves is in layers 3 to 5",
        "15 % of the KL is in no cause and no pair of them",
        "cheapest change: weights of routed experts of layers 3-5 as in the reference: KL 0.0400 (0.0300 to 0.0600) nats; 3 MB "
        "more, 30 MB of weights; a token reads 1.25 times the bytes",
        "recipe: blamed/w4a16-mended.yaml",
        "served with another serving environment (old): 55 of 60 lost answers are right, 5 as it was served: 83 % (70 to 90) "
        "of the loss",
        "while serving the run measured KL 0.9000 (0.8000 to 1.0000) nats: kernels, backends or the engine add to it; compare "
        "ways of serving with `--variant`, and `assay diagnose probe`",
    ]


def test_what_decides_nothing() -> None:
    plain = WHOLE.model_copy(
        update={
            "causes": (),
            "interactions": (),
            "unexplained": None,
            "layers": (),
            "change": None,
            "served": None,
            "serving": (),
        }
    )
    spread = (LayerRange(cause="routed_expert", first_layer=0, last_layer=9, share=1.0),)
    for changes, lines in (
        ({"word": "nothing to blame", "kl": interval(0.01, 0.0, 0.02)},
         ["nothing to blame: KL 0.0100 (0 to 0.0200) nats, 0.08 allowed for 4-bit weights"]),
        ({"word": "undecided", "surprise": Surprise(nll=17.0, entropy=2.8)},
         ["undecided: KL 0.2000 (0.1500 to 0.3000) nats, 0.08 allowed for 4-bit weights",
          "these texts are foreign to the reference (17.00 nats a token, and 2.80 were they its own words): shares hold for "
          "them, what is allowed is for text as it writes; give its replies with --text"]),
        ({"word": "undecided", "kl": interval(0.01, 0.0, 0.02), "run_status": "FAIL", "run_reason": "loses 9 points"},
         ["undecided: KL 0.0100 (0 to 0.0200) nats, 0.08 allowed for 4-bit weights",
          "the run says FAIL: loses 9 points; this divergence does not show that loss: name other ways of serving with "
          "--variant, which are asked what it lost"]),
        ({"change": WHOLE.change.model_copy(update={"is_within": False})},  # type: ignore[union-attr]
         ["blamed: KL 0.2000 (0.1500 to 0.3000) nats, 0.08 allowed for 4-bit weights",
          "no change tried is within 0.08: with weights of routed experts of layers 3-5 of the reference KL is 0.0400 (0.0300 "
          "to 0.0600) nats"]),
        ({"causes": WHOLE.causes[:1], "layers": spread},
         ["blamed: KL 0.2000 (0.1500 to 0.3000) nats, 0.08 allowed for 4-bit weights", "share of the KL  cause",
          "70 % (60 to 80)  weights of routed experts",
          "weights of routed experts: what they lose is spread over layers 0 to 9"]),
    ):  # fmt: skip
        assert printed(plain.model_copy(update=changes))[1:] == lines
