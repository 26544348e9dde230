"""Six questions with answers and scripted replies, and a session with a scripted server, for tasks of lm-eval."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fake_server import FakeServer, Scripted

from assay_evaluate.asking.dialect import Dialect
from assay_evaluate.asking.session import Session
from assay_evaluate.client.client import Client
from assay_evaluate.client.journal import Identity, Journal

WHO = Identity("checkpoint", "fingerprint")

REPLIES = {  # what is in the data file -> what the model says
    "2 + 2": "Two and two is four. The answer is 4.",
    "10 - 3": "10 - 3 = 7, so #### 7",
    "6 * 7": "It is 41.",
    "1000 + 234": "The answer is 1,234.",
    "5 + 5": "That makes $10",
    "9 - 9": "no number at all",
}
ANSWERS = {"2 + 2": "4", "10 - 3": "7", "6 * 7": "42", "1000 + 234": "1234", "5 + 5": "10", "9 - 9": "0"}


@contextmanager
def session_with(server: FakeServer, path: Path, sample: int = 0) -> Iterator[Session]:
    with Journal(path / "journal.db") as journal, Client(server, journal, WHO, max_attempts=2, backoff_s=0.01) as client:
        yield Session(client, Dialect(True, True, {}), "eval-test", sample, has_reasoning_parser=False)


def reply_to(prompt: str) -> str:
    return REPLIES[prompt.removeprefix("Q: ").split("\n")[0]]


def reply_from_file(body: dict[str, Any]) -> Scripted:
    return Scripted(reply_to(body["messages"][-1]["content"]))


def lm_eval_alone(folder: Path, name: str, say: Callable[[str], str]) -> dict[str, dict[int, bool]]:
    """lm-eval's verdicts on the saved replies, with none of our code: filter -> document -> right."""
    from lm_eval.api.model import LM
    from lm_eval.evaluator import simple_evaluate
    from lm_eval.tasks import TaskManager

    class Saved(LM):
        def generate_until(self, requests: list[Any]) -> list[str]:
            return [say(request.args[0]) for request in requests]

        def loglikelihood(self, requests: list[Any]) -> list[Any]:
            raise NotImplementedError

        loglikelihood_rolling = loglikelihood

    manager = TaskManager(include_path=str(folder), include_defaults=False)
    results = simple_evaluate(Saved(), tasks=[name], task_manager=manager, bootstrap_iters=0)
    assert results is not None
    verdicts: dict[str, dict[int, bool]] = {}
    for row in results["samples"][name]:
        verdicts.setdefault(row["filter"], {})[row["doc_id"]] = bool(row["exact_match"])
    return verdicts
