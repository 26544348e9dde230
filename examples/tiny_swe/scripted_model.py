"""An OpenAI-compatible server whose "model" is a script: it solves some bugs, gets some wrong, loops on one, dies on one.

    with ScriptedModel(load_scripts(careful=True)) as server:      # server.base_url; server.die(); server.live()
        ...

No weights, no luck: which reply comes depends on the instance (recognised by its issue) and on how many replies the history
already holds, so that a trajectory is the same whenever, and however often, it is interrupted. It answers as vLLM 0.32 does:
thinking in `reasoning`, `system_fingerprint`, errors in vLLM's words.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Literal

sys.path.insert(0, str(Path(__file__).parent))
from build_suite import instance_id
from repositories import REPOSITORIES, Bug, Files

Behaviour = Literal["solve", "wrong", "empty", "loop", "prose", "overflow", "bad_calls", "broken", "does_not_apply"]
"""broken: the server answers HTTP 500 to it, always. The others are the model's own doing."""
CAREFUL: dict[str, Behaviour] = {
    "tiny__wordwrap-3": "solve", "tiny__wordwrap-5": "solve", "tiny__ranges-7": "solve", "tiny__ranges-9": "wrong",
    "tiny__roman-2": "solve", "tiny__csvline-4": "solve", "tiny__lru-6": "loop", "tiny__slug-8": "solve",
}  # fmt: skip
HASTY: dict[str, Behaviour] = {
    "tiny__wordwrap-3": "solve", "tiny__wordwrap-5": "wrong", "tiny__ranges-7": "solve", "tiny__ranges-9": "prose",
    "tiny__roman-2": "solve", "tiny__csvline-4": "overflow", "tiny__lru-6": "loop", "tiny__slug-8": "bad_calls",
}  # fmt: skip
TOO_LONG = "This model's maximum context length is 4096 tokens. However, your request has 4203 input tokens."
NO_SUCH_LINES = "diff --git a/x b/x\\n--- a/x\\n+++ b/x\\n@@ -9 +9 @@\\n-a\\n+b\\n"
SUBMIT = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT && cat patch.txt"


@dataclass(frozen=True)
class Step:
    """One reply. `command` None: prose without a tool call. `arguments`: put in place of the command's JSON."""

    command: str | None
    thinking: str = "Let me look."
    arguments: str | None = None
    status: int = 200
    error: str = ""


HAND_IN = (Step("git diff > patch.txt && cat patch.txt"), Step(SUBMIT, "Done."))

BAD_CALLS = (Step("ls", arguments='{"command": "ls'), Step("ls", arguments='{"cmd": "ls"}'))


@dataclass
class Script:
    """Replies to one instance, in order; the last comes again and again."""

    steps: list[Step]
    issue: str


def load_scripts(behaviours: dict[str, Behaviour]) -> list[Script]:
    """A script for every instance that is named."""
    return [
        Script(script_for(behaviours[name], bug), bug.issue)
        for repository in REPOSITORIES
        for bug in repository.bugs
        if (name := instance_id(repository, bug)) in behaviours
    ]


def script_for(behaviour: Behaviour, bug: Bug) -> list[Step]:
    look = [Step("ls && git log --oneline"), Step(f"cat {' '.join(sorted(bug.fix))}", "The bug must be in there.")]
    ends: dict[Behaviour, list[Step]] = {
        "solve": [*_edit(bug.fix), *HAND_IN],
        "wrong": [*_edit(bug.wrong), *HAND_IN],
        "empty": [Step("git diff > patch.txt"), Step(SUBMIT)],
        "does_not_apply": [Step(f"printf '{NO_SUCH_LINES}' > patch.txt"), Step(SUBMIT)],
        "loop": [Step("cat README.md", "I should read the README.")],
        "prose": [Step(None, "I would rather explain it.")],
        "overflow": [
            Step(None, status=400, error=TOO_LONG)
        ],
        "bad_calls": [*BAD_CALLS, *_edit(bug.fix), *HAND_IN],
        "broken": [Step(None, status=500, error="Internal Server Error")],
    }  # fmt: skip
    return look + ends[behaviour]


def _edit(files: Files) -> list[Step]:
    return [
        Step(f"cat > {name} <<'EOF_OF_FILE'\n{text}EOF_OF_FILE", "Now I change it.") for name, text in sorted(files.items())
    ]


@dataclass
class ScriptedModel:
    """The server. `die()`: connections are refused from then on; `live()`: it answers again, under the same address."""

    scripts: list[Script]
    model: str = "scripted"
    delay_s: float = 0.0
    fingerprint: str = "scripted-1"
    before_reply: Callable[[int], None] | None = None
    """Called with the number of the request, before it is answered."""
    requests: list[dict[str, Any]] = field(default_factory=list)
    max_model_len: int = 4096
    headers: Mapping[str, str] = field(default_factory=dict)
    """What every client must send; 401 without it."""

    def __post_init__(self) -> None:
        self._lock = threading.Lock()
        self._port = 0
        self._server: ThreadingHTTPServer | None = None

    def __enter__(self) -> ScriptedModel:
        self.live()
        return self

    def __exit__(self, *_: object) -> None:
        self.die()

    @property
    def base_url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    @property
    def base_urls(self) -> tuple[str, ...]:
        return (self.base_url,)

    def live(self) -> None:
        if self._server is None:
            self._server = ThreadingHTTPServer(("127.0.0.1", self._port), _handler(self))
            self._server.daemon_threads = True
            self._port = self._server.server_address[1]
            threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()

    def die(self) -> None:
        server, self._server = self._server, None
        if server is not None:
            server.shutdown()
            server.server_close()

    @property
    def is_alive(self) -> bool:
        return self._server is not None

    def check_alive(self) -> None:
        """What `assay` asks of a server; whether this one will be back, only the caller knows."""

    def reply(self, body: dict[str, Any], path: str = "/v1/chat/completions") -> tuple[int, dict[str, Any]]:
        if path != "/v1/chat/completions":
            return 404, {"error": {"message": "Not Found", "type": "NotFoundError", "code": 404}}
        with self._lock:
            self.requests.append(body)
            number = len(self.requests)
        if self.before_reply is not None:
            self.before_reply(number)
        time.sleep(self.delay_s)
        messages = body["messages"]
        first = str(messages[1]["content"]) if len(messages) > 1 else ""
        script = next((one for one in self.scripts if one.issue.strip() in first), None)
        if script is None:
            return 200, self._completion(Step(None, "There is no script for this question."), 0, len(first))
        done = sum(message["role"] in {"assistant"} or _is_complaint(message) for message in messages[2:])
        step = script.steps[min(done, len(script.steps) - 1)]
        if step.status != 200:
            return step.status, {"error": {"message": step.error, "type": "BadRequestError", "code": step.status}}
        return 200, self._completion(step, done, sum(len(str(message.get("content"))) for message in messages))

    def _completion(self, step: Step, number: int, length: int) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": None, "reasoning": step.thinking}
        if step.command is None:
            message["content"] = step.thinking
        else:
            arguments = step.arguments or json.dumps({"command": step.command})
            call = {"id": f"call_{number}", "type": "function", "function": {"name": "bash", "arguments": arguments}}
            message["tool_calls"] = [call]
        written = len(step.command or step.thinking) // 4 + 1
        return {
            "id": f"chatcmpl-{number}", "object": "chat.completion", "created": 0, "model": self.model,
            "system_fingerprint": self.fingerprint,
            "choices": [{"index": 0, "message": message, "finish_reason": "tool_calls" if step.command else "stop"}],
            "usage": {"prompt_tokens": length // 4, "completion_tokens": written, "total_tokens": length // 4 + written},
        }  # fmt: skip


def _is_complaint(message: dict[str, Any]) -> bool:
    """mini-swe-agent keeps its complaint about a reply without a command, and not the reply."""
    return message["role"] == "user" and "ool call" in str(message.get("content"))


def _handler(scripted: ScriptedModel) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if not self.has_key():
                self.send(401, {"error": "Unauthorized"})
                return
            answer = scripted.reply(body, self.path)
            if not scripted.is_alive:  # it died meanwhile: the reply is lost
                self.close_connection = True
                return
            self.send(*answer)

        def do_GET(self) -> None:
            if not scripted.is_alive:
                self.close_connection = True
                return
            if not self.has_key():
                self.send(401, {"error": "Unauthorized"})
                return
            known = {"/health": {}, "/v1/models": {"data": [{"id": scripted.model, "max_model_len": scripted.max_model_len}]}}
            self.send(200 if self.path in known else 404, known.get(self.path, {}))

        def has_key(self) -> bool:
            return all(self.headers[name] == value for name, value in scripted.headers.items())

        def send(self, status: int, data: dict[str, Any]) -> None:
            payload = json.dumps(data).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(payload)))
            self.end_headers()
            self.wfile.write(payload)

        def log_message(self, format: str, *arguments: Any) -> None:
            """Quiet."""

    return Handler
