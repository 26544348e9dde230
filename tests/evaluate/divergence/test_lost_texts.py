"""Texts that cannot be scored: one is left out and told, many leave divergence not measured, with the server's own words."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from blank_records import blank_fingerprint
from fake_server import VOCABULARY, FakeServer, Scripted, plain_logits

from assay.recipes.load import load_recipe
from assay.recipes.model import Serving
from assay.recipes.profile import ProfileRecipe
from assay.recipes.suite import SuiteRecipe
from assay.records.measurement import Measurement
from assay_evaluate.client import client as client_module
from assay_evaluate.client.journal import Journal
from assay_evaluate.run.candidate import Candidate
from assay_evaluate.run.evaluate import evaluate
from assay_evaluate.serving.server import ServerSpec

OOM = "CUDA out of memory. Tried to allocate 9.27 GiB"
TOO_LONG = "This model's maximum context length is 40 tokens"
NO_LOGPROBS = "no prompt_logprobs in the reply, which vLLM's /v1/completions has"
NUM_TEXTS = 12
SUITE = SuiteRecipe.model_validate(
    {
        "schema": 1, "name": "small", "seed": "eval-small", "acceptance": False,
        "tasks": [{"kind": "arithmetic", "name": "sums", "num_items": 2, "num_steps": [2], "max_tokens": 64}],
        "divergence": {"num_documents": NUM_TEXTS, "languages": ["en"], "max_tokens": 60, "top_k": 5},
    }
)  # fmt: skip
FINGERPRINT = blank_fingerprint(server="scripted", hardware={"cpu": "x"})


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "wait_s", lambda *of: 0.0)


class Loses(FakeServer):
    """Answers `answer` to the scoring of some texts: those whose length is a multiple of one of `lost`'s."""

    def __init__(self, lost: Callable[[list[int]], bool], answer: tuple[int, dict[str, Any]], **more: Any) -> None:
        super().__init__(**more)
        self.lost, self.scored_answer = lost, answer

    def _answer(self, path: str, body: dict[str, Any]) -> tuple[int, dict[str, Any] | bytes] | None:
        if body.get("prompt_logprobs", 0) > 1 and self.lost(body["prompt"]):
            return self.scored_answer
        return super()._answer(path, body)


def error(status: int, message: str) -> tuple[int, dict[str, Any]]:
    return status, {"error": {"message": message, "code": status}}


class Servers:
    """Of both checkpoints, and how often each was started."""

    def __init__(self, lost: dict[str, int], answer: tuple[int, dict[str, Any]]) -> None:
        """lost: folder -> how many of the texts it cannot score."""
        self.lost, self.answer, self.starts = lost, answer, list[str]()
        self.first: dict[str, list[list[int]]] = {}
        self.numbers = iter(range(10**6))

    def reply(self, body: dict[str, Any]) -> Scripted:
        """No text twice."""
        return Scripted(f"the kettle sings {next(self.numbers)} times #### 7" if body.get("return_token_ids") else "#### 7")

    @contextmanager
    def start(self, spec: ServerSpec, on_progress: Callable[[str], None]) -> Iterator[FakeServer]:
        name = spec.checkpoint.name
        self.starts.append(name)
        chosen = self.first.setdefault(name, [])

        def lost(prompt: list[int]) -> bool:
            if len(chosen) < self.lost.get(name, 0) and prompt not in chosen:
                chosen.append(prompt)
            return prompt in chosen

        with Loses(lost, self.answer, reply=self.reply, logits=plain_logits) as server:
            server.fingerprint = FINGERPRINT
            yield server


def run(folder: Path, servers: Servers, lines: list[str] | None = None) -> list[Measurement]:
    for name in ("reference", "candidate"):
        (folder / name).mkdir(exist_ok=True)
        (folder / name / "config.json").write_text(json.dumps({"vocab_size": VOCABULARY}))
        (folder / name / "model.safetensors").write_bytes(name.encode())
    return evaluate(
        "tiny",
        [Candidate("ours", folder / "reference", is_reference=True), Candidate("theirs", folder / "candidate")],
        suite=SUITE,
        profile=load_recipe(ProfileRecipe, "cpu-emulated"),
        serving=Serving(),
        run_dir=folder / "run",
        on_progress=([] if lines is None else lines).append,
        start_server=servers.start,
        foresee=lambda spec: FINGERPRINT,
    )


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (error(500, OOM), f"HTTP 500: {OOM}"),
        (error(400, TOO_LONG), f"HTTP 400: {TOO_LONG}"),
        ((200, error(502, "no provider")[1]), "HTTP 200 with an error in it (502): no provider"),
        ((200, {"choices": [{"text": "x", "finish_reason": "length"}]}), NO_LOGPROBS),
        (error(400, "Out of range float values are not JSON compliant: nan"), None),
    ],
)  # fmt: skip
def test_one_text_that_the_reference_cannot_score_is_left_out_and_told(
    answer: tuple[int, dict[str, Any]], said: str | None, tmp_path: Path
) -> None:
    said = said or "its log-probabilities are NaN (HTTP 400: Out of range float values are not JSON compliant: nan)"
    servers, lines = Servers({"reference": 1}, answer), list[str]()
    first, repeat, candidate = measured = run(tmp_path, servers, lines)
    [prompt] = servers.first["reference"]
    item = _item_of(tmp_path, prompt)
    note = f"divergence: 1 of 12 texts is left out: the reference cannot score {item}: {said}"
    for entry in (repeat, candidate):
        assert entry.divergence is not None and entry.divergence.num_documents == NUM_TEXTS - 1
    assert [note in entry.notes for entry in measured] == [True, True, True]
    assert f"ours: {note}" in lines
    assert first.not_measured == {}
    assert run(tmp_path, servers) == measured and servers.starts == ["reference", "candidate"]


def test_one_text_that_the_candidate_cannot_score_is_left_out_and_told(tmp_path: Path) -> None:
    servers = Servers({"candidate": 1}, error(500, OOM))
    _, repeat, candidate = run(tmp_path, servers)
    item = _item_of(tmp_path, servers.first["candidate"][0])
    assert repeat.divergence is not None and repeat.divergence.num_documents == NUM_TEXTS
    assert candidate.divergence is not None and candidate.divergence.num_documents == NUM_TEXTS - 1
    assert f"divergence: 1 of 12 texts is left out: it cannot score {item}: HTTP 500: {OOM}" in candidate.notes


@pytest.mark.parametrize(
    ("answer", "words"), [(error(500, OOM), f"HTTP 500: {OOM}"), (error(400, "top_k is 1"), "HTTP 400: top_k is 1")]
)
def test_many_texts_that_the_reference_cannot_score(answer: tuple[int, dict[str, Any]], words: str, tmp_path: Path) -> None:
    servers = Servers({"reference": 3}, answer)
    measured = run(tmp_path, servers)
    reason = measured[0].not_measured["divergence"]
    assert reason.startswith("3 of 12 texts cannot be scored, more than 1 in 10: the reference cannot score ")
    assert reason.endswith(f": {words}")
    assert [(entry.divergence, entry.not_measured) for entry in measured[1:]] == [(None, {"divergence": reason})] * 2
    assert run(tmp_path, servers) == measured and servers.starts == ["reference", "candidate"]


def test_many_texts_that_the_candidate_cannot_score(tmp_path: Path) -> None:
    _, repeat, candidate = run(tmp_path, Servers({"candidate": 3}, error(500, OOM)))
    assert repeat.divergence is not None and candidate.divergence is None
    reason = candidate.not_measured["divergence"]
    assert reason.startswith("3 of 12 texts cannot be scored, more than 1 in 10: it cannot score ")


def _item_of(folder: Path, prompt: list[int]) -> str:
    """The text's name, by its ids."""
    from assay_evaluate.client.journal import unpacked

    with Journal(folder / "run" / "journal.db") as journal:
        rows = journal._execute("SELECT items FROM items WHERE what = 'divergence.write'")
    documents = json.loads(unpacked(rows[-1][0]))[0]["documents"]
    return next(str(document["item"]) for document in documents if [*document["prompt_ids"], *document["reply_ids"]] == prompt)
