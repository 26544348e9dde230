"""KL and drafts of whole checkpoints where vLLM serves them, beside the source served in the same way.

    python benchmarks/bits/served.py w4a16 w4a16-gptq nvfp4 [--model tiny-glm] [--write benchmarks/bits/served.md]

Each precision (a shipped one, or a recipe's file) is made and verified by `assay quantize`, served with the profile of the
model's recipe (emulated on a CPU) with its own MTP head drafting, and scores the replies that the served source wrote at
temperature 1 to questions that nothing was calibrated or chosen on. KL is over the 128 tokens that the source finds likeliest,
the others as one (a lower bound, close for a vocabulary of 876), its mean over the positions of each text; intervals and ratios
are over texts, paired. On a CPU no request has a seed, so each run writes other replies; a mean over replies is rare events:
where one text makes up most of it, take more `--texts`. `--keep FOLDER`: servers are not started again for what is there.
"""

from __future__ import annotations

import argparse
import math
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent))  # python is run with PYTHONSAFEPATH
from held_out import Values, quantized, ratio, resampled

from assay.recipes.load import load_recipe
from assay.recipes.model import ModelRecipe
from assay.recipes.precision import PrecisionRecipe
from assay.recipes.profile import ProfileRecipe
from assay.recipes.suite import SuiteRecipe
from assay.records.measurement import Acceptance, Measurement
from assay_evaluate.client.journal import Journal
from assay_evaluate.divergence.exact import candidate_scores
from assay_evaluate.divergence.phase import ReferenceText, reference_text
from assay_evaluate.divergence.positions import position_divergence
from assay_evaluate.divergence.scoring import pair_scores
from assay_evaluate.run.candidate import Candidate
from assay_evaluate.run.evaluate import evaluate
from assay_evaluate.run.identity import identity

TOP_K = 128
WRITTEN_TOKENS = 512


def suite_of(num_texts: int, seed: str) -> SuiteRecipe:
    """Replies to our own questions, half of them in Chinese, for KL; arithmetic, for drafts."""
    arithmetic = {"kind": "arithmetic", "name": "arithmetic", "languages": ["en", "zh"], "num_steps": [3, 4, 5]}
    return SuiteRecipe.model_validate(
        {
            "schema": 1, "name": "served", "description": "Divergence and drafts of served checkpoints.",
            "seed": f"eval-{seed}", "tasks": [{**arithmetic, "num_items": 50, "max_tokens": 256}],
            "divergence": {"num_documents": max(2, num_texts // 2), "max_tokens": WRITTEN_TOKENS, "top_k": TOP_K},
            "acceptance": True,
        }
    )  # fmt: skip


def measured(model: ModelRecipe, precisions: Sequence[str], suite: SuiteRecipe, folder: Path) -> list[Measurement]:
    """Of the source and its repeat, then of every precision."""
    assert model.source.path is not None, "a model of this machine"
    candidates = [Candidate("source", Path(model.source.path), is_reference=True)]
    for precision in precisions:
        name = load_recipe(PrecisionRecipe, precision).name
        made = folder / name / "checkpoint"
        if not made.is_dir():
            (folder / name).mkdir(parents=True, exist_ok=True)
            quantized(Path(model.source.path), precision, folder / name)
        candidates.append(Candidate(name, made))
    return evaluate(
        model.name,
        candidates,
        suite=suite,
        profile=load_recipe(ProfileRecipe, model.profiles[0]),
        serving=model.serving,
        run_dir=folder / "run",
        on_progress=lambda line: print(line, file=sys.stderr, flush=True),
    )


def kl_by_text(text: ReferenceText, one: Measurement, journal: Journal) -> Values:
    """Mean over the finite positions of each text."""
    who = identity(one.checkpoint_sha256, one.fingerprint, one.suite)
    found = pair_scores(text.documents, text.scores, candidate_scores(text, one, who, journal))
    values = []
    for document in found:
        assert document.candidate is not None, f"{one.label}: {document.item} has no finite log-probabilities"
        scored = position_divergence(document.reference, document.candidate)
        values.append(float(scored.kl_P[scored.finite_P].mean()))
    return np.array(values)


def mean(ours_N: Values) -> str:
    """With the 95 % of resampled texts."""
    low, high = resampled(ours_N)
    return f"{ours_N.mean():.1e} | {low:.1e} to {high:.1e}"


def drafts(ours: Acceptance | None, source: Acceptance | None) -> str:
    """Share of the drafted tokens that were accepted, and the ratio to the source's with 95 % (delta method over replies)."""
    if ours is None or source is None or not ours.rate or not source.rate:
        return "none | | "
    made = ours.rate / source.rate
    if ours.rate_standard_error is None or source.rate_standard_error is None:
        return f"{ours.rate:.4f} | {made:.3f} | not known"
    off = 1.96 * made * math.hypot(ours.rate_standard_error / ours.rate, source.rate_standard_error / source.rate)
    return f"{ours.rate:.4f} | {made:.3f} | {made - off:.3f} to {made + off:.3f}"


def largest(ours_N: Values) -> str:
    """How much of the mean the text with the largest KL makes up."""
    return f"{ours_N.max() / ours_N.sum():.0%}"


def lines(
    model: ModelRecipe, precisions: Sequence[str], pairs: Sequence[str], num_texts: int, seed: str, folder: Path
) -> Iterator[str]:
    """pairs: `A/B`, names of precisions."""
    suite = suite_of(num_texts, seed)
    source, repeat, *others = measured(model, precisions, suite, folder)
    who = identity(source.checkpoint_sha256, source.fingerprint, source.suite)
    with Journal(folder / "run" / "journal.db") as journal:
        text = reference_text(journal, suite, who, source.not_measured.get("divergence"))
        assert text is not None and text.why_not is None
        values: dict[str, Any] = {one.label: kl_by_text(text, one, journal) for one in others}
    first = values[others[0].label]
    yield "# KL and drafts where checkpoints are served"
    yield ""
    more = f" --pairs {' '.join(pairs)}" if pairs else ""
    options = f"--model {model.name} --texts {num_texts} --seed {seed}{more}"
    yield f"`python benchmarks/bits/served.py {' '.join(precisions)} {options}`"
    yield ""
    served_by = f"{source.fingerprint.server} on {model.profiles[0]}"
    drafting = "without an MTP head" if source.acceptance is None else "drafting with its own MTP head"
    yield f"{model.name}: the source and each checkpoint served by {served_by}, {drafting};"
    yield f"{len(first)} replies of at most {WRITTEN_TOKENS} tokens that the source wrote at temperature 1, on which nothing"
    yield "was calibrated or chosen. 95 % over texts; `of one text`: what the text with the largest KL has of the mean;"
    yield "ratios of KL are paired by text; drafts are those of the texts and of 100 sums."
    floor = repeat.divergence
    if floor is not None:
        yield f"The source against its own repeat: {floor.kl_mean.value:.2g} nats."
    yield ""
    heads = ("precision", "mean KL, nats", "95 %", "of one text", f"to {others[0].label}", "95 %", "drafts accepted")
    yield f"| {' | '.join(heads)} | to the source | 95 % |"
    yield f"|{'---|' * 9}"
    yield f"| source | 0 | | | | | {drafts(source.acceptance, source.acceptance).split(' |')[0]} | 1 | |"
    for one in others:
        kl = values[one.label]
        drafted = drafts(one.acceptance, source.acceptance)
        yield f"| {one.label} | {mean(kl)} | {largest(kl)} | {ratio(kl, first)} | {drafted} |"
    if pairs:
        yield ""
        yield "| KL of | to that of | ratio | 95 % |"
        yield "|---|---|---|---|"
    for pair in pairs:
        ours, theirs = pair.split("/")
        yield f"| {ours} | {theirs} | {ratio(values[ours], values[theirs])} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("precisions", nargs="+", help="the first is what the others are compared with")
    parser.add_argument("--model", default="tiny-glm", help="a model recipe whose source lies on this machine")
    parser.add_argument("--texts", type=int, default=1000)
    parser.add_argument("--pairs", nargs="*", default=[], help="A/B: ratios of these as well")
    parser.add_argument("--seed", default="11")
    parser.add_argument("--keep", type=Path, help="folder of checkpoints and replies")
    parser.add_argument("--write", type=Path, help="file of the table")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.keep or Path(temporary)
        text = ""
        for line in lines(load_recipe(ModelRecipe, args.model), args.precisions, args.pairs, args.texts, args.seed, folder):
            print(line, flush=True)
            text += f"{line}\n"
    if args.write is not None:
        args.write.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
