"""What scoring texts for divergence costs beside reading the same texts without log-probabilities; client included.

    python benchmarks/evaluate/divergence_cost.py --reference examples/tiny_glm/checkpoint --candidate DIR --candidate DIR

Every checkpoint is served as an evaluation serves it (profile cpu-emulated unless told). First, on the reference, the same
texts through the same client and journal: bare prompts with one new token, then with the top 64 log-probabilities in each form
that the server offers, in turn and several times; the best time of each is taken. Then the whole phase: the reference and every
candidate score all texts, and the divergence is computed. Prints a table in Markdown; start of the servers is not counted.
"""

from __future__ import annotations

import argparse
import random
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from assay.recipes.load import load_recipe
from assay.recipes.model import Serving
from assay.recipes.profile import ProfileRecipe
from assay_evaluate.asking.dialect import sampling
from assay_evaluate.client.client import Client
from assay_evaluate.client.journal import Journal, Reply, Request
from assay_evaluate.divergence import summarize
from assay_evaluate.divergence.documents import Document
from assay_evaluate.divergence.scoring import GENERATE, ScoringForm, learn_scoring, pair_scores, scoring_requests
from assay_evaluate.run.identity import identity
from assay_evaluate.serving.server import Server, ServerSpec, serve

LENGTH = 1024
TOP_K = 64
ROUNDS = 3


def texts(num_positions: int, seed: str) -> list[Document]:
    """Texts of 1,024 tokens, random ids of the vocabulary's middle: what they say does not matter to the cost."""
    draw = random.Random(seed)
    count = -(-num_positions // (LENGTH - 1))
    bodies = [tuple(draw.randrange(16, 880) for _ in range(LENGTH)) for _ in range(count)]
    return [Document(f"{seed}/{i}", "en", ids[:1], ids[1:], "replies", "random") for i, ids in enumerate(bodies)]


def bare_requests(documents: Sequence[Document]) -> list[Request]:
    """The same prompts, one new token, no log-probabilities."""
    how = {"max_tokens": 1, "detokenize": False, **sampling(0.0, None)}
    return [Request("bare", d.item, 0, GENERATE, {"token_ids": d.ids, "sampling_params": how}) for d in documents]


def timed(server: Server, requests: list[Request], concurrency: int) -> tuple[float, list[Reply]]:
    """Seconds until all replies are in the journal and in memory."""
    with tempfile.TemporaryDirectory() as folder, Journal(Path(folder) / "journal.db") as journal:
        who = identity("checkpoint", server.fingerprint, "benchmark")
        started = time.perf_counter()
        with Client(server, journal, who, concurrency=concurrency) as client:
            replies = client.ask(requests)
        return time.perf_counter() - started, replies


def compare_forms(server: Server, num_positions: int, concurrency: int) -> dict[str, float]:
    """Form -> best seconds for `num_positions`; `bare` is the same prompts without log-probabilities."""
    who = identity("checkpoint", server.fingerprint, "benchmark")
    with (
        tempfile.TemporaryDirectory() as folder,
        Journal(Path(folder) / "journal.db") as journal,
        Client(server, journal, who, concurrency=1) as client,
    ):
        best = learn_scoring(client, server.fingerprint).form
    forms: list[ScoringForm] = ["completions", "generate", "packed"]
    seconds: dict[str, float] = {}
    for number in range(ROUNDS):
        documents = texts(num_positions, f"round {number}")
        asked = {"bare": bare_requests(documents)}
        asked |= {form: scoring_requests(documents, TOP_K, 0, form) for form in forms[: forms.index(best) + 1]}
        for name, requests in asked.items():
            seconds[name] = min(seconds.get(name, 1e9), timed(server, requests, concurrency)[0])
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--reference", type=Path, required=True)
    parser.add_argument("--candidate", type=Path, action="append", default=[])
    parser.add_argument("--profile", default="cpu-emulated")
    parser.add_argument("--positions", type=int, default=50_000)
    parser.add_argument("--compared-positions", type=int, default=12_000, help="for the forms side by side")
    arguments = parser.parse_args()
    profile = load_recipe(ProfileRecipe, arguments.profile)
    documents = texts(arguments.positions, "phase")
    phase_s = 0.0
    scores: list[list[Reply]] = []
    form: ScoringForm = "completions"
    for folder in [arguments.reference, *arguments.candidate]:
        with tempfile.TemporaryDirectory() as logs:
            spec = ServerSpec(folder, profile, Serving(num_speculative_tokens=1), True, Path(logs) / "vllm.log")
            with serve(spec, lambda line: None) as server:
                if folder is arguments.reference:
                    form = show_forms(server, arguments.compared_positions, profile.concurrency)
                took_s, replies = timed(server, scoring_requests(documents, TOP_K, 0, form), profile.concurrency)
        phase_s += took_s
        scores.append(replies)
        print(f"{folder}: {len(documents) * (LENGTH - 1):,} positions scored in {took_s:.1f} s", flush=True)
    for folder, replies in zip(arguments.candidate, scores[1:], strict=True):
        started = time.perf_counter()
        paired = pair_scores(documents, scores[0], replies)
        record = summarize(paired, reference_checkpoint_sha256="r", top_k=TOP_K, position_buckets=(0,))
        took_s = time.perf_counter() - started
        phase_s += took_s
        print(f"{folder}: statistics in {took_s:.1f} s; mean KL {record.kl_mean.value:.4g} nats (random text)")
    print(f"whole phase, {1 + len(arguments.candidate)} checkpoints: {phase_s:.0f} s")


def show_forms(server: Server, num_positions: int, concurrency: int) -> ScoringForm:
    """Print the forms side by side; the cheapest, which is also what an evaluation would take."""
    seconds = compare_forms(server, num_positions, concurrency)
    print(f"| {num_positions:,} positions, top {TOP_K} | s | times bare |\n|---|---:|---:|")
    for name, took_s in seconds.items():
        print(f"| {name} | {took_s:.2f} | {took_s / seconds['bare']:.2f} |", flush=True)
    found: list[ScoringForm] = ["packed", "generate", "completions"]
    return next(form for form in found if form in seconds)


if __name__ == "__main__":
    main()
