"""Whatever a server does to one request of an agent, or repeats in a reply, the trajectory goes on as if it had not."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from raw_server import Part, RawServer
from scripted_model import Script, ScriptedModel, Step, load_scripts
from server_behaviours import BEHAVIOURS, http
from swe_suite import FAST, local_task, rows_of

from assay.errors import MeasureError
from assay_evaluate.tasks.swebench.agents import Finished, run_agents
from assay_evaluate.tasks.swebench.settings import settings_for
from assay_evaluate.tasks.swebench.trajectories import measure

pytestmark = pytest.mark.slow

INSTANCE = "tiny__wordwrap-3"
FAILING = [one for one in BEHAVIOURS if one.outcome in {"again", "once"}]
KEY = "sk-of-the-server-hunter2"


class AgentServer(RawServer):
    """A scripted model; `before` says what is sent to a request in place of its reply. None: the reply."""

    def __init__(self, script: ScriptedModel) -> None:
        super().__init__()
        self.script, self.model = script, script.model
        self.headers: dict[str, str] = {"Authorization": f"Bearer {KEY}"}
        self.lock = threading.Lock()
        self.bodies: list[dict[str, Any]] = []

    @property
    def base_urls(self) -> tuple[str, ...]:
        return (self.base_url,)

    def check_alive(self) -> None:
        """It lives."""

    def before(self, number: int, body: dict[str, Any]) -> Sequence[Part] | None:
        return None

    def parts_for(self, head: bytes, body: bytes) -> Sequence[Part]:
        if head.startswith(b"GET"):
            return (http("{}"),)
        reported = json.loads(body)
        with self.lock:
            self.bodies.append(reported)
            instead = self.before(len(self.bodies) - 1, reported)
        if instead is not None:
            return instead
        status, data = self.script.reply(reported)
        return (http(json.dumps(data), f"{status} ?"),)


def ask(dataset: Path, server: Any, folder: Path, **more: Any) -> Finished:
    options = {"filter": INSTANCE, "num_attempts": 1, "num_agents": 1, **more}
    task = local_task(dataset, **options)
    rows = [row for row in rows_of(dataset) if row["instance_id"] == INSTANCE]
    (result,) = run_agents(
        task, rows, [folder / "repeat-0"], server, settings=settings_for(task), runtime=None, run="r", model_name="m",
        num_agents=1, on_progress=lambda line: None, pacing=FAST,
    )  # fmt: skip
    return result


def issue_of(dataset: Path) -> str:
    return next(str(row["problem_statement"]) for row in rows_of(dataset) if row["instance_id"] == INSTANCE)


def test_every_behaviour_once_in_one_trajectory(dataset: Path, tmp_path: Path) -> None:
    """One step for each behaviour, and each is met with it first: every step is made, and none twice."""

    class Misbehaving(AgentServer):
        def before(self, number: int, body: dict[str, Any]) -> Sequence[Part] | None:
            return FAILING[number // 2].parts if number % 2 == 0 and number // 2 < len(FAILING) else None

    steps = [Step(f"echo {number}") for number in range(len(FAILING))] + [Step("echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT")]
    with Misbehaving(ScriptedModel([Script(steps, issue_of(dataset))])) as server:
        result = ask(dataset, server, tmp_path, step_limit=len(FAILING) + 9, max_tokens=1, request_timeout_s=1)
    assert (result.failures, list(result.predictions)) == ({}, [INSTANCE])
    trajectory = json.loads((tmp_path / "repeat-0" / INSTANCE / f"{INSTANCE}.traj.json").read_text())
    outputs = [message["extra"]["raw_output"] for message in trajectory["messages"] if message["role"] == "tool"]
    assert outputs == [f"{number}\n" for number in range(len(FAILING))]
    assert trajectory["info"]["exit_status"] == "Submitted"


def test_a_call_of_another_shape_is_asked_again(dataset: Path, tmp_path: Path) -> None:
    """What the client lets pass as plain JSON, and mini-swe-agent does not."""
    calls: list[Any] = [
        {"function": None}, {"function": {"name": "bash"}}, {"function": {"name": 5, "arguments": "{}"}}, {},
        {"function": {"name": "bash", "arguments": {"command": "ls"}}},
    ]  # fmt: skip

    class Odd(AgentServer):
        def before(self, number: int, body: dict[str, Any]) -> Sequence[Part] | None:
            if number % 2 or number // 2 >= len(calls):
                return None
            message = {"role": "assistant", "content": "", "tool_calls": [calls[number // 2]]}
            return (http(json.dumps({"choices": [{"message": message, "finish_reason": "tool_calls"}]})),)

    with Odd(ScriptedModel(load_scripts({INSTANCE: "solve"}))) as server:
        result = ask(dataset, server, tmp_path, step_limit=20)
    assert result.failures == {} and result.predictions[INSTANCE]["model_patch"].startswith("diff --git")


WRITTEN = (
    '{"command": "echo \\ud800"}', '{"command": "echo \\u0000"}', '{"command": 5}', '{"command": ["ls"]}', '{"command": null}',
    '{"command": {"a": 1}}', "9" * 5000, "[" * 9000 + "]" * 9000, '{"command": ' + "9" * 5000 + "}", "NaN", "[]", '"ls"',
)  # fmt: skip
"""Arguments of calls: commands that no shell can be given, and JSON that cannot be read."""


def test_what_the_model_writes_is_the_models(dataset: Path, tmp_path: Path) -> None:
    """A step that failed, not machinery that is tried again and never scored."""
    steps = [Step("ls", arguments=arguments) for arguments in WRITTEN] + [Step("echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT")]
    with AgentServer(ScriptedModel([Script(steps, issue_of(dataset))])) as server:
        result = ask(dataset, server, tmp_path, max_format_errors=99, step_limit=len(steps))
    assert result.failures == {} and list(result.predictions) == [INSTANCE]
    trajectory = json.loads((tmp_path / "repeat-0" / INSTANCE / f"{INSTANCE}.traj.json").read_text())
    figures = measure(trajectory, native_tool_calls=True)
    assert (figures["num_steps"], figures["num_tool_calls"], trajectory["info"]["exit_status"]) == (13, 13, "Submitted")
    assert (
        ask(dataset, server, tmp_path).predictions == result.predictions
    )  # read again; the server, which is gone, is not asked


def test_one_reply_of_another_server_is_not_the_end(dataset: Path, tmp_path: Path) -> None:
    """A gateway that once answers for another server; one that does so from then on is another server."""

    class Gateway(AgentServer):
        others = frozenset({2})

        def before(self, number: int, body: dict[str, Any]) -> Sequence[Part] | None:
            self.script.fingerprint = "another" if number in self.others else "scripted-1"
            return None

    with Gateway(ScriptedModel(load_scripts({INSTANCE: "solve"}))) as server:
        result = ask(dataset, server, tmp_path / "once")
    assert result.failures == {} and list(result.predictions) == [INSTANCE]
    with Gateway(ScriptedModel(load_scripts({INSTANCE: "solve"}))) as server:
        server.others = frozenset(range(2, 99))  # type: ignore[misc]
        with pytest.raises(MeasureError, match=r"came back as another server \(another, before scripted-1\)"):
            ask(dataset, server, tmp_path / "for good")


def test_a_wrong_key_stops_the_run_at_once(dataset: Path, tmp_path: Path) -> None:
    """And is not the failure of every trajectory, one after the other."""

    class Closed(AgentServer):
        def before(self, number: int, body: dict[str, Any]) -> Sequence[Part] | None:
            return (http('{"error": "no such key"}', "401 Unauthorized"),)

    with (
        Closed(ScriptedModel([])) as server,
        pytest.raises(MeasureError, match=r"HTTP 401: .*no such key.* the address and the key"),
    ):
        ask(dataset, server, tmp_path, num_attempts=3)
    assert len(server.bodies) == FAST.num_request_attempts
    assert not list(tmp_path.rglob("*.traj.json"))


# ------------------------------------------------------------------------------------------------ secrets
def test_no_secret_reaches_an_agent_or_its_files(dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Our environment's and the server's key, though the agent prints all that it sees, and the server repeats its key."""
    secrets = {name: f"hunter2-{name}" for name in ("HF_TOKEN", "HF_HUB_TOKEN", "AWS_SECRET_ACCESS_KEY", "GITHUB_PAT")}
    secrets |= {"HTTPS_PROXY": "http://me:hunter2@proxy:3128", "NOTES": "hf_" + "hunter2" * 4}
    for name, value in secrets.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("LANG", "C.UTF-8")

    class Repeats(AgentServer):
        def before(self, number: int, body: dict[str, Any]) -> Sequence[Part] | None:
            if number == 1:
                return (http(json.dumps({"error": {"message": f"bad header Bearer {KEY}"}}), "500 ?"),)
            if number == 2:
                return (http(json.dumps({"error": {"message": f"bad header Bearer {KEY}"}}), "400 ?"),)
            return None

    printed = Step("env; cat /proc/$PPID/environ | tr '\\0' '\\n'", f"Your key is {KEY}.")
    steps = [printed, printed, Step("echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT")]
    with Repeats(ScriptedModel([Script(steps, issue_of(dataset))])) as server:
        result = ask(dataset, server, tmp_path, num_attempts=2)
    assert result.failures == {} and f"Authorization: Bearer {KEY}" in server.heads[-1]
    texts = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    assert sum(path.name.endswith(".traj.json") for path in texts) == 2  # one failed at the HTTP 400
    assert any(b"LANG=C.UTF-8" in text for text in texts.values()), "the environment was printed"
    assert [path for path, text in texts.items() if b"hunter2" in text] == []
    assert os.environ["HF_TOKEN"] == secrets["HF_TOKEN"]
