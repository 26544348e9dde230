"""Kinds of text as strata, texts of one question as clusters, and the intervals that follow."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from fake_server import FakeServer, Scripted
from lm_eval_questions import WHO, session_with

from assay.recipes.suite import ArithmeticTask, DivergenceSpec
from assay.records.base import Interval
from assay.records.divergence import Estimate
from assay_evaluate.client.journal import TokenLogprobs
from assay_evaluate.divergence import ScoredDocument, summarize
from assay_evaluate.divergence.documents import suite_questions, write_replies
from assay_evaluate.divergence.scoring import scored_document
from assay_evaluate.divergence.strata import Kind, strata_of
from assay_evaluate.tasks.generated import arithmetic_items, run_generated


def kinds(**numbers: int) -> list[Kind]:
    return [tuple(name.split("_")) for name, number in numbers.items() for _ in range(number)]


@pytest.mark.parametrize(
    ("texts", "strata"),
    [
        (kinds(own_a_en=20, own_a_zh=20), {("own", "a", "en"): 20, ("own", "a", "zh"): 20}),
        (kinds(own_a_en=12, own_a_zh=12, own_b_en=24), {("own", "a"): 24, ("own", "b", "en"): 24}),
        # suite quick: twelve writing and twelve arithmetic texts in each language, ten replies to each task
        (
            kinds(own_writing_en=12, own_writing_zh=12, own_sums_en=12, own_sums_zh=12, suite_needle_en=10, suite_tools_zh=10),
            {("own", "writing"): 24, ("own", "sums"): 24, ("suite",): 20},
        ),
        # nine small ones are too few by themselves: all texts of that part are one stratum
        (kinds(own_a_en=30, own_a_zh=9), {("own", "a"): 39}),
        (kinds(own_a_en=30, own_b_en=5, own_c_en=5), {("own",): 40}),
        (kinds(own_a_en=30, suite_b_en=5), {(): 35}),
        (kinds(own_a_en=30, suite_b_en=15, more_c_en=5), {("own", "a", "en"): 30, (): 20}),
        (kinds(own_a_en=5, suite_b_en=5), {(): 10}),
        ([], {}),
    ],
)
def test_small_kinds_are_joined(texts: list[Kind], strata: dict[Kind, int]) -> None:
    assert Counter(strata_of(texts)) == strata


def text(number: int, nats: float, **labels: str) -> ScoredDocument:
    """Ten positions with two possible tokens, `nats` or so apart."""
    p = 0.7
    q = p * np.exp(-nats * (1 + 0.3 * np.sin(number)))
    ids = np.tile(np.array([[0, 1]], dtype=np.int32), (10, 1))
    sides = []
    for entry in (p, q):
        pair = np.tile(np.log([[entry, 1 - entry]]), (10, 1)).astype(np.float32)
        sides.append(TokenLogprobs(tokens_P=np.zeros(10, np.int32), chosen_P=pair[:, 0], ids_PK=ids, logprobs_PK=pair))
    return ScoredDocument(f"t{number}", labels.pop("language", "en"), *sides, **labels)  # type: ignore[arg-type]


def test_how_many_texts_of_a_kind_there_are_is_no_chance() -> None:
    """The same texts, told apart by task or not: the interval is shorter where the suite fixes the numbers."""
    kinds = [("replies", "writing", 0.01), ("suite_replies", "codes", 0.2)]
    apart = [text(i, nats, texts=name, domain=task) for name, task, nats in kinds for i in range(24)]
    alike = [text(i, nats, texts="replies", domain="writing") for _, _, nats in kinds for i in range(24)]
    results = [
        summarize(texts, reference_checkpoint_sha256="r", top_k=2, position_buckets=(0,)).kl_mean for texts in (apart, alike)
    ]
    assert isinstance(results[0], Interval) and isinstance(results[1], Interval)
    assert results[0].value == results[1].value and results[0].n == results[1].n == 48
    assert results[0].high - results[0].low < 0.5 * (results[1].high - results[1].low)


def test_one_text_of_25_with_most_of_the_kl() -> None:
    """As codes and needles of suite quick on tiny-glm: the interval ended at 24 times the mean, now at 19.4."""
    kl = summarize(
        [text(i, 0.8 if i == 7 else 0.005, texts="suite_replies", domain=f"task {i % 5}") for i in range(25)],
        reference_checkpoint_sha256="r", top_k=2, position_buckets=(0,),
    ).kl_mean  # fmt: skip
    assert isinstance(kl, Interval) and kl.low == 0 and 5 < kl.high / kl.value < 20


# ------------------------------------------------------------------------------------------------ texts of one question
def translated(num_questions: int, languages: tuple[str, ...], *, share: bool) -> list[ScoredDocument]:
    """Each question answered in every language, as far off in all of them."""
    return [
        replace(
            text(question, 0.2, language=language, texts="suite_replies", domain="mgsm"),
            cluster=f"mgsm/{question}" if share else None,
        )
        for language in languages
        for question in range(num_questions)
    ]


def test_translations_of_one_question_are_one_text() -> None:
    """Sixty texts that answer twenty questions say what twenty texts say; 57 that answer nineteen are too few."""

    def kl_mean(texts: list[ScoredDocument]) -> Interval | Estimate:
        return summarize(texts, reference_checkpoint_sha256="r", top_k=2, position_buckets=(0,)).kl_mean

    once, alone, together = (
        kl_mean(translated(20, languages, share=share))
        for languages, share in ((("en",), True), (("en", "zh", "de"), False), (("en", "zh", "de"), True))
    )
    assert isinstance(once, Interval) and isinstance(alone, Interval) and isinstance(together, Interval)
    assert (once.n, alone.n, together.n) == (20, 60, 20)
    assert [together.value, together.low, together.high] == pytest.approx([once.value, once.low, once.high])
    assert alone.high - alone.low < 0.7 * (together.high - together.low)
    few, value = kl_mean(translated(19, ("en", "zh", "de"), share=True)), kl_mean(translated(19, ("en",), share=True)).value
    assert few == Estimate(value=few.value, n=19) and few.value == pytest.approx(value)


def test_a_text_keeps_the_cluster_of_the_question_that_it_answers(tmp_path: Path) -> None:
    """From the item's result to the text that is scored."""
    task = ArithmeticTask(kind="arithmetic", name="sums", languages=("en",), num_items=4, num_steps=(2,), max_tokens=64)
    with FakeServer(lambda body: Scripted("so it is #### 7")) as server, session_with(server, tmp_path) as session:
        items = run_generated(session, task, arithmetic_items(task, "eval-test")).items
        results = {("sums", item.item): replace(item, cluster=f"q{i // 2}") for i, item in enumerate(items[:3])}
        spec = DivergenceSpec(num_documents=2, max_tokens=8, suite_documents=20)
        documents = write_replies(session, suite_questions(session, spec, WHO, results))
    sides = text(0, 0.1).reference
    result = {
        document.item: (document.language, document.cluster)
        for document in (scored_document(doc, sides, None) for doc in documents)
    }
    assert result == {
        f"sums/{items[0].item}": ("en", "sums/q0"),
        f"sums/{items[1].item}": ("en", "sums/q0"),
        f"sums/{items[2].item}": ("en", "sums/q1"),
        f"sums/{items[3].item}": ("", None),
    }
