"""Divergence in a whole run against scripted servers, where the true distributions are known: every way of scoring, held-out
text, replies to the suite's questions, exact mode from hidden states."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from blank_records import blank_fingerprint
from distributions import log_softmax
from fake_server import VOCABULARY, FakeServer, Scripted, plain_logits
from raw_server import RawServer
from safetensors.torch import save_file

from assay.errors import MeasureError
from assay.recipes.load import load_recipe
from assay.recipes.model import Serving
from assay.recipes.profile import ProfileRecipe
from assay.recipes.suite import SuiteRecipe
from assay.records.measurement import Measurement
from assay.records.serving import Fingerprint
from assay_evaluate.client.client import Address, NotMeasured
from assay_evaluate.client.journal import Journal, Request, TokenLogprobs
from assay_evaluate.client.replies import read_reply
from assay_evaluate.divergence.documents import Document
from assay_evaluate.divergence.exact import Head, exact_divergence
from assay_evaluate.divergence.hidden_states import HiddenStates
from assay_evaluate.run.candidate import Candidate
from assay_evaluate.run.evaluate import evaluate
from assay_evaluate.serving.server import ServerSpec
from assay_evaluate.transport.errors import AnothersReply

SPEC: dict[str, Any] = {
    "num_documents": 2, "max_tokens": 60, "top_k": 20, "suite_documents": 3, "held_out_documents": 2, "held_out_tokens": 200,
    "spans": [0, 50, 100], "exact": True,
}  # fmt: skip
TASKS = [{"kind": "arithmetic", "name": "arithmetic", "num_items": 4, "num_steps": [2], "max_tokens": 64}]
PROFILE = load_recipe(ProfileRecipe, "cpu-emulated").model_copy(update={"concurrency": 3})


def shifted(last: int) -> list[float]:
    """The candidate's logits: the reference's, times 1.2."""
    return [1.2 * value for value in plain_logits(last)]


LOGITS: dict[str, Callable[[int], list[float]]] = {"reference": plain_logits, "candidate": shifted}


def write_checkpoint(folder: Path, logits: Callable[[int], list[float]], **config: Any) -> Path:
    """A checkpoint whose output matrix turns one-hot states into the scripted logits."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"vocab_size": VOCABULARY, **config}))
    table = torch.tensor([logits(last) for last in range(VOCABULARY)])
    save_file({"lm_head.weight": table.T.contiguous()}, folder / "model.safetensors")
    return folder


@pytest.fixture
def folders(tmp_path: Path) -> dict[str, Path]:
    return {name: write_checkpoint(tmp_path / name, logits) for name, logits in LOGITS.items()}


def reply(body: dict[str, Any]) -> Scripted:
    """A story that goes on for a while; in the middle of the alphabet, where ids are letters."""
    return Scripted("the kettle sings and the cat sleeps near the river #### 7", reasoning="well now")


class Servers:
    """Starts scripted servers and remembers what they were asked."""

    def __init__(self, generate: frozenset[str]) -> None:
        self.generate = generate
        self.seen: list[tuple[str, FakeServer]] = []
        self.starts: list[str] = []
        self.die_after: int | None = None

    @contextmanager
    def start(self, spec: ServerSpec, on_progress: Callable[[str], None]) -> Iterator[FakeServer]:
        name = spec.checkpoint.name
        self.starts.append(f"{name} states" if spec.hidden_states else name)
        with FakeServer(reply, logits=LOGITS[name], generate=self.generate) as server:
            server.fingerprint = self.fingerprint(spec)
            self.seen.append((name, server))
            if spec.hidden_states and self.die_after is not None:
                wrote, left = server.wrote, [self.die_after]

                def count(path: str, body: dict[str, Any]) -> None:
                    wrote(path, body)
                    left[0] -= 1
                    if left[0] <= 0:
                        server.die()

                server.wrote = count  # type: ignore[method-assign]
            yield server

    def fingerprint(self, spec: ServerSpec) -> Fingerprint:
        return blank_fingerprint(server="scripted", hardware={"cpu": "x"}, flags={"dtype": "float32", "enable-scale-out": True})

    def asked(self, name: str, path: str) -> list[dict[str, Any]]:
        return [body for who, server in self.seen if who == name for observed, body in server.requests if observed == path]


def run(servers: Servers, folders: dict[str, Path], **spec: Any) -> list[Measurement]:
    suite = SuiteRecipe.model_validate(
        {"schema": 1, "name": "small", "seed": "eval-small", "tasks": TASKS, "divergence": SPEC | spec}
    )
    return evaluate(
        "tiny",
        [Candidate("ours", folders["reference"], is_reference=True), Candidate("theirs", folders["candidate"])],
        suite=suite,
        profile=PROFILE,
        serving=Serving(),
        run_dir=folders["reference"].parent / "run",
        start_server=servers.start,
        foresee=servers.fingerprint,
    )


def kept_documents(run_dir: Path) -> list[dict[str, Any]]:
    with Journal(run_dir / "journal.db") as journal:
        rows = journal._execute("SELECT items FROM items WHERE what = 'divergence.write'")
    from assay_evaluate.client.journal import unpacked

    return list(json.loads(unpacked(rows[-1][0]))[0]["documents"])


def true_kl(documents: list[dict[str, Any]]) -> list[np.ndarray]:
    """Full-vocabulary KL at each position of each text, from the two logit functions themselves."""
    p_VV, q_VV = (log_softmax(np.array([logits(i) for i in range(VOCABULARY)])) for logits in LOGITS.values())
    kl_V = (np.exp(p_VV) * (p_VV - q_VV)).sum(axis=1)
    return [kl_V[[doc["prompt_ids"][-1], *doc["reply_ids"][:-1]]] for doc in documents]


def lumped_kl(documents: list[dict[str, Any]], k: int) -> list[np.ndarray]:
    """The bound at each position: the k likeliest ids, the same on both sides here, and one bucket for the others."""
    p_VV, q_VV = (np.exp(log_softmax(np.array([logits(i) for i in range(VOCABULARY)]))) for logits in LOGITS.values())
    top = np.argsort(-p_VV, axis=1)[:, :k]
    p, q = (np.take_along_axis(side, top, axis=1) for side in (p_VV, q_VV))
    p, q = (np.concatenate([side, 1 - side.sum(axis=1, keepdims=True)], axis=1) for side in (p, q))
    kl_V = (p * np.log(p / q)).sum(axis=1)
    return [kl_V[[doc["prompt_ids"][-1], *doc["reply_ids"][:-1]]] for doc in documents]


# ------------------------------------------------------------------------------------------------ the whole run
@pytest.mark.slow
@pytest.mark.parametrize(
    "generate", [frozenset(), frozenset({"plain"}), frozenset({"plain", "packed"}), frozenset({"plain", "packed", "exact"})],
    ids=["completions", "generate", "packed", "exact ids"],
)  # fmt: skip
def test_every_way_of_scoring_gives_the_same_numbers(
    folders: dict[str, Path], generate: frozenset[str], tmp_path: Path
) -> None:
    servers = Servers(generate)
    _, repeat, candidate = run(servers, folders)
    documents = kept_documents(tmp_path / "run")
    kl = true_kl(documents)
    texts = [document["texts"] for document in documents]
    assert texts == ["replies"] * 4 + ["suite_replies"] * 3 + ["held_out"] * 4
    assert [document["num_thinking"] for document in documents] == [None] * 11  # these servers do not say

    record = candidate.divergence
    assert record is not None and candidate.not_measured == {"acceptance": "served without speculative decoding"}
    assert record.scored_by == ("exact_ids" if "exact" in generate else "top_k")
    sampled = np.concatenate(kl[:7])
    assert (record.num_documents, record.num_positions) == (7, len(sampled))
    # Bound, exact value: the servers compute in double precision, the journal keeps single.
    exact = record.exact
    assert exact is not None
    assert exact.drift.kl_mean.value == pytest.approx(sampled.mean(), rel=1e-5)
    assert exact.drift.kl_max == pytest.approx(sampled.max(), rel=1e-5)
    assert record.kl_mean.value == pytest.approx(np.concatenate(lumped_kl(documents, 20)[:7]).mean(), rel=1e-4)
    assert record.kl_mean.value < 0.5 * exact.drift.kl_mean.value
    assert exact.held_out is not None
    assert exact.held_out.kl_mean.value == pytest.approx(np.concatenate(kl[7:]).mean(), rel=1e-5)
    assert (exact.agreement.num_bound_violations, exact.agreement.num_positions) == (0, len(np.concatenate(kl)))
    assert max(exact.agreement.reference_max_difference, exact.agreement.candidate_max_difference) < 1e-5
    assert (exact.hidden_size, exact.vocabulary, exact.stored_dtype) == (VOCABULARY, VOCABULARY, "float32")
    assert exact.bytes_per_token > 4 * VOCABULARY

    assert [drift.texts for drift in record.drift] == ["all", "replies", "suite_replies", "held_out"]
    held_out = record.drift[-1]
    assert (held_out.num_documents, held_out.num_positions) == (4, 4 * 199)
    assert {group.name: group.num_positions for group in held_out.by_language} == {"en": 398, "zh": 398}
    assert [(span.first, span.num_positions) for span in held_out.by_span] == [(0, 4 * 49), (50, 200), (100, 400)]
    assert {group.name for group in record.drift[0].by_domain} == {"writing", "arithmetic"}
    assert repeat.divergence is not None and repeat.divergence.exact is not None
    assert repeat.divergence.exact.drift.kl_max == pytest.approx(0.0, abs=1e-9)  # the very same states
    assert [drift.kl_max for drift in repeat.divergence.drift] == pytest.approx([0.0] * 4, abs=1e-7)

    # The suite's own questions once more, now at T=1 and with token ids; never with a seed.
    written = [b for b in servers.asked("reference", "/v1/chat/completions") if b["temperature"] == 1.0]
    assert len(written) == 4 + 3
    assert all(body["return_token_ids"] and "seed" not in body for body in written)
    asked_twice = [b["messages"] for b in servers.asked("reference", "/v1/chat/completions") if b["temperature"] == 0.0]
    assert sum(body["messages"] in asked_twice for body in written) == 3
    scored = servers.asked("candidate", "/inference/v1/generate")[-11:]
    if "exact" in generate:
        assert all(len(body["sampling_params"]["prompt_logprob_token_ids"][0]) == 20 for body in scored)
    elif generate:
        assert all(body["sampling_params"].get("flat_logprobs", False) is ("packed" in generate) for body in scored)
    else:
        scored = [body for body in servers.asked("candidate", "/v1/completions") if not isinstance(body["prompt"], str)]
        assert len(scored) == 11  # beside those for the signature

    assert servers.starts == ["reference", "candidate", "reference states", "candidate states"]
    assert run(servers, folders)[2] == candidate
    assert len(servers.starts) == 4


@pytest.mark.slow
def test_exact_ids_lose_no_id_that_the_candidate_likes_less(folders: dict[str, Path]) -> None:
    """The candidate's own top k leaves out ids of the reference's; given ids do not, and the bound gets no lower for it."""
    LOGITS["candidate"] = lambda last: [value + 2 * np.sin(5.1 * i) for i, value in enumerate(plain_logits(last))]
    try:
        bounds = []
        for number, generate in enumerate((frozenset({"plain"}), frozenset({"plain", "exact"}))):
            parent = folders["reference"].parent / str(number)
            parent.mkdir()
            kept = {name: write_checkpoint(parent / name, logits) for name, logits in LOGITS.items()}
            record = run(Servers(generate), kept, exact=False)[2].divergence
            assert record is not None
            bounds.append(record)
    finally:
        LOGITS["candidate"] = shifted
    own, given = bounds
    assert given.kl_mean.value > 1.05 * own.kl_mean.value
    assert given.top1_agreement == own.top1_agreement


@pytest.mark.slow
def test_exact_mode_goes_on_where_it_was_interrupted(folders: dict[str, Path], tmp_path: Path) -> None:
    """The states' server dies after five texts; what was written stays, and is not asked for again."""
    servers = Servers(frozenset({"plain", "packed"}))
    servers.die_after = 5
    with pytest.raises(MeasureError, match="Engine core died"):
        run(servers, folders)
    kept = sorted(tmp_path.glob("run/hidden_states/*.safetensors"))
    assert 4 <= len(kept) <= 5 + 3  # and what was in flight
    assert not list(tmp_path.glob("run/hidden_states/.*"))
    written = {path: path.read_bytes() for path in kept}
    servers.die_after = None
    measured = run(servers, folders)[2]
    assert measured.divergence is not None and measured.divergence.exact is not None
    assert servers.starts == ["reference", "candidate", "reference states", "reference states", "candidate states"]
    assert {path: path.read_bytes() for path in kept} == written
    assert len(list(tmp_path.glob("run/hidden_states/*.safetensors"))) == 22
    second = servers.seen[-2][1]
    assert second.count("/pooling") == 11 - len(kept)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping"),
        ({"tie_word_embeddings": True}, "no unquantized model.embed"),
    ],
)
def test_exact_mode_says_what_it_cannot_do(tmp_path: Path, config: dict[str, Any], words: str) -> None:
    folders = {
        "reference": write_checkpoint(tmp_path / "reference", plain_logits),
        "candidate": write_checkpoint(tmp_path / "candidate", shifted, **config),
    }
    servers = Servers(frozenset({"plain"}))
    measured = run(servers, folders)[2]
    assert measured.divergence is not None and measured.divergence.exact is None
    assert words in measured.not_measured["divergence in exact mode"]
    assert servers.starts == ["reference", "candidate", "reference states"]  # for its repeat; the candidate's is not started
    assert run(servers, folders)[2] == measured


@pytest.mark.slow
def test_held_out_text_from_files(folders: dict[str, Path], tmp_path: Path) -> None:
    """Windows of the files' text in order; too little of it is said, and the rest is measured."""
    texts = tmp_path / "texts"
    texts.mkdir()
    (texts / "a.txt").write_text("letters " * 40)  # 320 "tokens"
    (texts / "b.txt").write_text("more of them " * 40)
    record = run(Servers(frozenset({"plain"})), folders, held_out=str(texts), held_out_tokens=100, exact=False)[2].divergence
    assert record is not None
    assert record.drift[-1].texts == "held_out" and record.drift[-1].num_documents == 2
    first = next(doc for doc in kept_documents(tmp_path / "run") if doc["texts"] == "held_out")
    assert (first["item"], first["domain"], first["language"]) == ("held-out/a.txt/0", "a", "")
    assert bytes([*first["prompt_ids"], *first["reply_ids"]]) == (b"letters " * 40)[:100]
    short = {name: write_checkpoint(tmp_path / "short" / name, logits) for name, logits in LOGITS.items()
             if (tmp_path / "short").mkdir(exist_ok=True) is None}  # fmt: skip
    reference, _, candidate = run(Servers(frozenset({"plain"})), short, held_out=str(texts), held_out_tokens=1000, exact=False)
    assert "fewer than two texts of 1000 tokens" in reference.not_measured["divergence on held-out text"]
    assert candidate.divergence is not None
    assert [drift.texts for drift in candidate.divergence.drift] == ["all", "replies", "suite_replies"]


# ------------------------------------------------------------------------------------------------ parts of it
def test_full_vocabulary_kl_against_numpy() -> None:
    rng = np.random.default_rng(0)
    states = [rng.normal(size=(30, 16)).astype(np.float32) for _ in range(2)]
    matrices = [rng.normal(size=(50, 16)).astype(np.float32) for _ in range(2)]
    tokens = rng.integers(0, 50, 30)
    states[1][7, 3] = np.nan
    values, ln_p, ln_q = exact_divergence(
        *map(torch.from_numpy, states), tuple(Head(torch.from_numpy(m)) for m in matrices), tokens.tolist()
    )
    p, q = (log_softmax(s.astype(np.float64) @ m.T.astype(np.float64)) for s, m in zip(states, matrices, strict=True))
    good = np.arange(30) != 7
    assert (values.finite_P == good).all()
    assert values.kl_P[good] == pytest.approx((np.exp(p) * (p - q)).sum(1)[good], rel=1e-4)
    assert ln_p == pytest.approx(p[np.arange(30), tokens], abs=1e-4)
    assert ln_q[good] == pytest.approx(q[np.arange(30), tokens][good], abs=1e-4)
    assert (values.agrees_P[good] == (p.argmax(1) == q.argmax(1))[good]).all()
    margin = np.exp(p.max(1)) - np.exp(p[np.arange(30), q.argmax(1)])
    assert values.swap_margin_P[good] == pytest.approx(margin[good], abs=1e-5)
    assert (values.tail_mass_P == 0).all()


def test_output_matrix_is_found_in_shards_and_when_tied(tmp_path: Path) -> None:
    folder = tmp_path / "c"
    folder.mkdir()
    table = torch.arange(12.0).reshape(4, 3).to(torch.bfloat16)
    save_file({"lm_head.weight": table}, folder / "b.safetensors")
    save_file({"model.embed_tokens.weight": table + 1}, folder / "a.safetensors")
    index = {"lm_head.weight": "b.safetensors", "model.embed_tokens.weight": "a.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    for tied, vocabulary, expected in ((False, 4, table), (True, 3, (table + 1)[:3])):
        (folder / "config.json").write_text(json.dumps({"tie_word_embeddings": tied, "vocab_size": vocabulary}))
        assert torch.equal(Head.load(folder).w_VH, expected.float())


def test_states_of_another_shape_are_refused(tmp_path: Path) -> None:
    states = HiddenStates(tmp_path, "who", "float32")
    document = Document("x", "en", (1, 2), (3, 4, 5))

    def fetch(raw: bytes) -> None:
        head = f"HTTP/1.1 200 OK\r\nContent-Length: {len(raw)}\r\n\r\n".encode()
        with RawServer(head + raw) as server:
            states.fetch(Address(server.base_url, "model"), [document], concurrency=1, on_progress=print)

    with pytest.raises(NotMeasured, match="gave 12 bytes for 5 tokens"):
        fetch(bytes(12))
    fetch(np.arange(10, dtype="<f4").tobytes())
    # Rows that predict the reply: of its predecessor, not of the last token.
    assert states.load(document).tolist() == [[2, 3], [4, 5], [6, 7]]
    assert states.missing([document, Document("x", "en", (1,), (2, 3, 4, 5))]) == [Document("x", "en", (1,), (2, 3, 4, 5))]


def test_packed_log_probabilities_that_do_not_fit_are_a_failed_reply() -> None:
    import base64
    import io

    def data(array: np.ndarray) -> dict[str, Any]:
        buffer = io.BytesIO()
        np.save(buffer, array)
        return {"choices": [{}], "prompt_token_id_logprobs": base64.b64encode(buffer.getvalue()).decode()}

    body = {"token_ids": [5, 6, 7], "sampling_params": {"prompt_logprobs": 2, "flat_logprobs": True}}
    request = Request("t", "i", 0, "/inference/v1/generate", body, logprobs_from=1)
    good = np.array([[[6, 1, 2], [-3, -1, -2]], [[7, 7, 3], [-0.5, -0.5, -4]]], np.float32)
    result = read_reply(data(good), request, 0.0).logprobs
    assert isinstance(result, TokenLogprobs)
    assert result.tokens_P.tolist() == [6, 7] and result.chosen_P.tolist() == [-3, -0.5]
    assert result.ids_PK.tolist() == [[1, 2], [7, 3]] and result.logprobs_PK.tolist() == [[-1, -2], [-0.5, -4]]
    with pytest.raises(LookupError, match="shape"):
        read_reply(data(good[:1]), request, 0.0)
    with pytest.raises(AnothersReply, match="another text"):
        read_reply(data(good + 1), request, 0.0)
    with pytest.raises(LookupError, match=r"no base64 \.npy array"):
        read_reply({"choices": [{}], "prompt_token_id_logprobs": "AAAA"}, request, 0.0)
