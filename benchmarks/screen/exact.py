"""KL of candidates of tiny-glm by screening beside `exact` divergence of the served checkpoints, and the floor between the two.

    python benchmarks/screen/exact.py WORK [--write benchmarks/screen/exact.md]

WORK is that of `meaning.py`, whose texts and servers' settings are used; what it did not measure is measured first. `exact`
takes the hidden states of reference and candidate from servers (vLLM's pooling runner) and multiplies them with each one's own
head: the whole vocabulary, FP64 behind the logits. The floor is what the same checkpoint differs by from itself where it is
served and where it is screened. Near 0 the root of a KL is a distance, so that the roots of the two figures can differ by the
roots of both floors, the reference's and the candidate's.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))  # python is run with PYTHONSAFEPATH, which leaves this folder out
import numpy as np
import torch
from meaning import measured, profile_of, suite_of_texts, tell, warm_servers

from assay.recipes.load import load_recipe
from assay.recipes.model import ModelRecipe
from assay.records.base import sha256_of
from assay.records.measurement import Measurement
from assay_evaluate.client.journal import Identity, Journal
from assay_evaluate.divergence.documents import Document
from assay_evaluate.divergence.exact import ExactSide, Head, measure_exact
from assay_evaluate.divergence.hidden_states import HiddenStates
from assay_evaluate.divergence.phase import reference_text
from assay_evaluate.run.candidate import Candidate, server_spec
from assay_evaluate.run.identity import identity
from assay_evaluate.serving.server import serve
from assay_pipeline.comparison.screen_passes import PassRunner
from assay_pipeline.comparison.screen_sources import ScreenSource
from assay_pipeline.comparison.screening import screen
from assay_quantize.screen.compare import token_values
from assay_quantize.sensitivity.texts import ScoredText
from assay_reports.screening import nats, plain_nats

MODEL = "tiny-glm"
FIVE = ("fp8", "w4a16", "nvfp4a16", "nvfp4", "mxfp4")
"""nvfp4 and mxfp4 round activations to four bits, fp8 to eight."""


def side_of(measurement: Measurement, run: Path) -> ExactSide:
    """How a server of its hidden states is started."""
    candidate = Candidate(measurement.label, Path(measurement.checkpoint), is_reference=measurement.is_reference)
    spec = server_spec(candidate, profile_of(MODEL), load_recipe(ModelRecipe, MODEL).serving, run)
    log_path = run / "logs" / f"vllm-{measurement.label}-hidden-states.log"
    states_spec = dataclasses.replace(spec, speculate=False, hidden_states=True, log_path=log_path)
    return ExactSide(measurement, who_of(measurement), lambda: serve(states_spec, tell))


def who_of(measurement: Measurement) -> Identity:
    """In the journal."""
    return identity(measurement.checkpoint_sha256, measurement.fingerprint, measurement.suite)


def floor_of(measurement: Measurement, documents: Sequence[Document], run: Path, folder: Path) -> float:
    """Mean KL of the checkpoint as it is served from itself as it is screened."""
    states = HiddenStates(run / "hidden_states", sha256_of([vars(who_of(measurement))]), "float32")
    head = Head.load(Path(measurement.checkpoint))
    texts = [ScoredText((*document.prompt_ids, *document.reply_ids), len(document.prompt_ids)) for document in documents]
    source = ScreenSource(measurement.checkpoint, Path(measurement.checkpoint))
    values = []
    with source.opened() as stored:
        side = PassRunner("fp32", "cpu", folder, tell).run(measurement.label, stored, source, texts).side()
        with side.head as logits:
            for number, (document, text) in enumerate(zip(documents, texts, strict=True)):
                places = torch.arange(text.first - 1, len(text.ids) - 1)
                ids_1T, state = torch.tensor([text.ids]), side.states.state(number)
                ln_q = logits(ids_1T, places, state)[0].double().log_softmax(-1)
                ln_p = torch.cat([piece for _, piece in head.logprobs(states.load(document))])
                values.append(token_values(ln_p, ln_q, ids_1T[0, places + 1])["kl_P"])
    return float(np.concatenate(values).mean())


def lines(work: Path, precisions: Sequence[str], num_texts: int) -> Iterator[str]:
    folder, suite = work / MODEL, suite_of_texts(num_texts)
    (source, _, *others), run = measured(MODEL, precisions, suite, work)
    who = who_of(source)
    with Journal(run / "journal.db") as journal:
        text = reference_text(journal, suite, who, source.not_measured.get("divergence"))
        assert text is not None, "the source wrote its replies when it was measured"
        exact = {
            measurement.label: measure_exact(
                side_of(source, run), side_of(measurement, run), text, journal, folder=run / "hidden_states", spans=(0,),
                concurrency=16, on_progress=tell,
            ).drift
            for measurement in others
        }  # fmt: skip
    record, _ = screen(
        [measurement.checkpoint for measurement in (source, *others)],
        text=[run],
        all_texts=True,
        out=folder / "screened-exact",
        say=tell,
    )
    floors = {
        measurement.label: floor_of(measurement, text.documents, run, folder / "screened-exact" / "floors")
        for measurement in (source, *others)
    }
    yield "# Screened, and exact divergence of served checkpoints\n"
    yield f"{len(others)} precisions of tiny-glm against its BF16 source; {record.panel.num_texts} replies,"
    yield f"{record.panel.num_tokens:,} tokens; whole vocabulary from hidden states that vLLM served (CPU, FP32 arithmetic,"
    yield "formats emulated). Floor: the same checkpoint served and screened; of the source"
    yield f"{floors[source.label]:.1e} nats.\n"
    yield (
        "| candidate | exact, served | screened | floor of the candidate | roots differ by | may differ by "
        "| same first token, exact | screened |"
    )
    yield "|---|---|---|---|---|---|---|---|"
    outside = []
    for candidate in record.candidates:
        served, screened = exact[candidate.label], candidate.drift
        apart = abs(math.sqrt(served.kl_mean.value) - math.sqrt(screened.kl_mean.value))
        most = math.sqrt(floors[source.label]) + math.sqrt(floors[candidate.label])
        if apart > most:
            outside.append(candidate.label)
        yield (
            f"| {candidate.label} | {nats(served.kl_mean)} | {plain_nats(screened.kl_mean.value)} "
            f"| {floors[candidate.label]:.1e} | {apart:.1e} | {most:.1e} "
            f"| {served.top1_agreement.value:.2%} | {screened.top1_agreement.value:.2%} |"
        )
    yield f"\nBeyond the floor: {', '.join(outside) or 'none'}."


def main() -> None:
    arguments = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    arguments.add_argument("work", type=Path)
    arguments.add_argument("precisions", nargs="*", default=FIVE)
    arguments.add_argument("--texts", type=int, default=40, help="as of meaning.py")
    arguments.add_argument("--write", type=Path, help="file of the table")
    options = arguments.parse_args()
    with warm_servers():
        text = "\n".join(lines(options.work, options.precisions, options.texts)) + "\n"
    print(text)
    if options.write is not None:
        options.write.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
