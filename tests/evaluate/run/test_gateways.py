"""A whole evaluation of the same weights behind gateways that do what gateways do: what is said, and what is not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fake_server import FakeServer, Scripted
from given_servers import scaled_logits
from small_suite import SERVING

from assay.recipes.gate import GateRecipe
from assay.recipes.profile import GivenServer, Hardware, ProfileRecipe
from assay.recipes.suite import ArithmeticTask, SuiteRecipe
from assay.records.measurement import Measurement
from assay_evaluate.client import client as client_module
from assay_evaluate.run.candidate import Candidate
from assay_evaluate.run.evaluate import evaluate
from assay_evaluate.tasks.generated import arithmetic_items
from assay_evaluate.verdicts.gates import judge

SUITE = SuiteRecipe.model_validate(
    {
        "schema": 1, "name": "sums", "seed": "eval-sums", "acceptance": False,
        "tasks": [{"kind": "arithmetic", "name": "sums", "languages": ["en"], "num_items": 40, "num_steps": [2],
                   "max_tokens": 64}],
        "divergence": {"num_documents": 4, "languages": ["en"], "max_tokens": 60, "top_k": 5},
    }
)  # fmt: skip
GATES = GateRecipe.model_validate(
    {
        "schema": 1, "name": "sums",
        "gates": [{"kind": "score", "task": "sums", "max_drop": 0.3}, {"kind": "truncation", "max_share": 0.02}],
    }
)  # fmt: skip
Change = Callable[[dict[str, Any]], dict[str, Any]]
SUMS = SUITE.tasks[0]
assert isinstance(SUMS, ArithmeticTask)
ANSWERS = {item.prompt: f"It is #### {item.answer}" for item in arithmetic_items(SUMS, SUITE.seed)}


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "wait_s", lambda *of: 0.0)


class Gateway(FakeServer):
    """Answers paths that it does not know with `{}`, and makes `change` to what comes to a question of the task."""

    def __init__(self, factor: float, change: Change = lambda data: data) -> None:
        super().__init__(self.solve, logits=lambda last: scaled_logits(factor, last))
        self.change = change

    def solve(self, body: dict[str, Any]) -> Scripted:
        return Scripted(ANSWERS.get(body["messages"][-1]["content"], "a story") if "messages" in body else "x")

    def tell(self, path: str) -> tuple[int, dict[str, Any]]:
        return super().tell(path) if path.startswith("/v1/") else (200, {})

    def _answer(self, path: str, body: dict[str, Any]) -> tuple[int, dict[str, Any] | bytes] | None:
        return super()._answer(path, body) if path.startswith("/v1/") else (200, {})

    def _generated(self, scripted: Scripted, body: dict[str, Any], ids: list[int], chat: bool) -> dict[str, Any]:
        data = super()._generated(scripted, body, ids, chat)
        return self.change(data) if chat and body.get("max_tokens") == 64 else data


def run(
    folder: Path, change: Change, lines: list[str] | None = None, *, of_reference: Change = lambda data: data
) -> tuple[list[Measurement], dict[str, str]]:  # fmt: skip
    """Measurements, and the detail of the candidate's verdicts by gate with its status."""
    with Gateway(1.0, of_reference) as reference, Gateway(1.01, change) as candidate:
        measured = evaluate(
            "tiny",
            [
                Candidate("ref", None, is_reference=True, endpoint=GivenServer(url=reference.base_url)),
                Candidate("cand", None, endpoint=GivenServer(url=candidate.base_url)),
            ],
            suite=SUITE,
            profile=ProfileRecipe(schema=1, name="given", hardware=Hardware(device="cpu"), concurrency=8),
            serving=SERVING,
            run_dir=folder / "run",
            on_progress=([] if lines is None else lines).append,
        )
    verdicts = [one for one in judge(measured, GATES, model="tiny").verdicts if one.candidate == "cand"]
    return measured, {one.gate: f"{one.status}: {one.detail}" for one in verdicts}


def whole(data: dict[str, Any]) -> dict[str, Any]:
    return data


def in_parts(data: dict[str, Any]) -> dict[str, Any]:
    message = data["choices"][0]["message"]
    thinking = {"type": "thinking", "thinking": [{"type": "text", "text": "hm"}]}
    message["content"] = [thinking, {"type": "text", "text": message["content"]}]
    return data


def bills_the_prompt(data: dict[str, Any]) -> dict[str, Any]:
    usage = data["usage"]
    usage["completion_tokens"] = usage["total_tokens"]
    return data


def thinks_aloud(data: dict[str, Any]) -> dict[str, Any]:
    message = data["choices"][0]["message"]
    message["content"] = f"<think>Is it #### 1?</think>{message['content']}"
    return data


def thinks(data: dict[str, Any]) -> dict[str, Any]:
    data["choices"][0]["message"]["reasoning"] = "hm"
    return data


@pytest.mark.parametrize(("change", "of_reference"), [(whole, whole), (in_parts, thinks), (thinks_aloud, thinks)])
def test_the_same_weights_pass(change: Change, of_reference: Change, tmp_path: Path) -> None:
    """The gateway's `{}` for /tokenize, /version, /metrics and /inference/v1/generate misleads nobody; thinking is thinking
    wherever it stands."""
    measured, verdicts = run(tmp_path, change, of_reference=of_reference)
    assert {gate: said.partition(":")[0] for gate, said in verdicts.items()} == {"score sums": "PASS", "truncation": "PASS"}
    assert [one.divergence is not None for one in measured] == [False, True, True]
    assert [one.not_measured for one in measured] == [{}, {}, {}]


def test_counts_that_cannot_be_are_not_taken_for_cuts(tmp_path: Path) -> None:
    """Every reply would have reached its budget. Whether any did cannot be seen, so there is no score."""
    measured, verdicts = run(tmp_path, bills_the_prompt)
    assert measured[2].tasks[0].num_truncated == 0
    assert verdicts["score sums"].startswith(
        "NOT MEASURED: Serving fault on sums: the usage of all 40 replies of cand contradicts itself (prompt_tokens "
    )


def aborted(data: dict[str, Any]) -> dict[str, Any]:
    data["choices"][0] |= {"finish_reason": "abort", "message": {"content": "Let me"}}
    return data


def out_of_quota(data: dict[str, Any]) -> dict[str, Any]:
    return {"error": {"message": "quota of 5 requests exceeded", "code": 429}}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "words"),
    [
        (aborted, "HTTP 200 with finish_reason abort: the server did not finish the reply"),
        (out_of_quota, "HTTP 200 with an error in it (429): quota of 5 requests exceeded"),
        (lambda data: {}, "reply is not what the API promises: KeyError: 'choices'; received {}"),
    ],
)
def test_replies_that_are_none_are_told_in_the_servers_words(change: Change, words: str, tmp_path: Path) -> None:
    """Of every reply, and of every fourth question."""
    _, verdicts = run(tmp_path / "all", change)
    said = verdicts["score sums"]
    assert said.startswith("NOT MEASURED: sums has no score for cand: no item has a reply; the first error: ") and words in said

    asked: dict[str, int] = {}

    def sometimes(data: dict[str, Any]) -> dict[str, Any]:
        answer = data["choices"][0]["message"]["content"]
        return change(data) if asked.setdefault(answer, len(asked)) % 4 == 0 else data

    _, verdicts = run(tmp_path / "some", sometimes)
    said = verdicts["score sums"]
    assert said.startswith("NOT MEASURED: ") and f"most often: {words}. Run the evaluation again" in said
    assert "cand lacks " in said and "ref lacks" not in said
