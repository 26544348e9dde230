"""The first words of a server that was started here: garbage is one line, and another server on its port is not believed."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from raw_server import Part, RawServer
from server_behaviours import http

from assay.errors import ServeError
from assay.recipes.load import load_recipe
from assay.recipes.model import Serving
from assay.recipes.profile import ProfileRecipe
from assay_evaluate.serving import server as starting
from assay_evaluate.serving.external import identify_server
from assay_evaluate.serving.server import ServerSpec
from assay_evaluate.serving.vllm_command import vllm_command

KEY = "sk-0123456789abcdef"
NESTED = "[" * 900 + "]" * 900


class Log:
    """Of a process, as far as errors quote it."""

    def __init__(self, path: Path) -> None:
        self.log_path = path

    def log_lines(self) -> list[str]:
        return ["loading"]

    def exit_status(self) -> int | None:
        return None


class FirstWords(RawServer):
    """Answers /v1/models and a first request as it is told to. keys: that it takes; none: it asks for no key."""

    def __init__(self, models: bytes, reply: bytes = http("{}"), *, keys: Sequence[str] = (KEY,)) -> None:
        super().__init__()
        self.models, self.reply, self.keys = models, reply, keys

    def parts_for(self, head: bytes, body: bytes) -> Sequence[Part]:
        if self.keys and not any(f"Authorization: Bearer {key}\r\n".encode() in head for key in self.keys):
            return (http('{"error": "Unauthorized"}', "401 Unauthorized"),)
        return (self.models,) if head.startswith(b"GET /v1/models") else (self.reply,)


@pytest.fixture
def spec(tiny_glm: Path, tmp_path: Path) -> ServerSpec:
    profile = load_recipe(ProfileRecipe, "cpu-emulated")
    return ServerSpec(tiny_glm, profile, Serving(), speculate=False, log_path=tmp_path / "vllm.log")


def introduce(server: RawServer, spec: ServerSpec, key: str | None = KEY) -> starting.Server:
    command = vllm_command(spec.checkpoint, spec.profile, spec.serving, speculate=False, port=1, served_model_name="model")
    process: Any = Log(spec.log_path)
    return starting._introduce(process, server.base_url, spec, command, {"vllm": "0"}, key)


def listed(spec: ServerSpec, **changes: Any) -> str:
    return json.dumps({"data": [{"id": "model", "root": str(spec.checkpoint.resolve()), "max_model_len": 77, **changes}]})


def test_ours(spec: ServerSpec) -> None:
    with FirstWords(http(listed(spec)), http('{"system_fingerprint": "vllm-0"}')) as server:
        met = introduce(server, spec)
    assert (met.max_model_len, met.fingerprint.system_fingerprint) == (77, "vllm-0")
    assert met.headers == {"Authorization": f"Bearer {KEY}"} and KEY not in repr(met)


@pytest.mark.parametrize(
    ("keys", "why"),
    [
        ((), "answers 200 to a request without a key, not 401: another server took the port"),
        (("sk-another",), "answers 401 to a request with the key of the server started here, not 200: another server"),
    ],
)
def test_another_server_with_the_same_root_is_not_believed(keys: tuple[str, ...], why: str, spec: ServerSpec) -> None:
    with FirstWords(http(listed(spec)), keys=keys) as server, pytest.raises(ServeError) as refused:
        introduce(server, spec)
    assert why in str(refused.value) and KEY not in str(refused.value)


def test_a_server_for_everybody_is_known_by_its_root_only(spec: ServerSpec) -> None:
    with FirstWords(http(listed(spec)), keys=()) as server:
        assert introduce(server, spec, key=None).headers == {}
    with (
        FirstWords(http(listed(spec, root="/elsewhere")), keys=()) as server,
        pytest.raises(ServeError, match="another server"),
    ):
        introduce(server, spec, key=None)


MODELS = (
    "", "null", "5", "[]", "{}", "<html>", "[" * 100_000, "9" * 5000, '{"data": null}', '{"data": 5}', '{"data": []}',
    '{"data": [5]}', '{"data": [{}]}', '{"data": [{"id": 5}]}', '{"data": [{"id": "\\ud800"}]}', f'{{"data": {NESTED}}}',
    '{"data": {"id": "model"}}',
)  # fmt: skip
OF_ONE = (
    {"root": None}, {"root": 5}, {"root": json.loads(NESTED)}, {"root": "/elsewhere"}, {"max_model_len": None},
    {"max_model_len": 0}, {"max_model_len": -5}, {"max_model_len": True}, {"max_model_len": 7.5}, {"max_model_len": "77"},
)  # fmt: skip
REPLIES = ("", "null", "5", "[]", "<html>", "[" * 100_000, "9" * 5000, "\x1b[2J")


@pytest.mark.parametrize("body", [*MODELS, *OF_ONE], ids=lambda body: repr(body)[:30])
def test_garbage_in_the_list_of_models(body: str | dict[str, Any], spec: ServerSpec, tmp_path: Path) -> None:
    """Of one that was started here, and of one that was given."""
    text = body if isinstance(body, str) else listed(spec, **body)
    with FirstWords(http(text)) as server, pytest.raises(ServeError) as refused:
        introduce(server, spec)
    assert str(refused.value).isprintable() and len(str(refused.value)) < 600
    with FirstWords(http(text), keys=()) as server:
        try:
            identify_server(server.base_url, label="fp8", checkpoint=tmp_path, profile="mine")
        except ServeError as error:
            assert str(error).isprintable()


@pytest.mark.parametrize("body", REPLIES, ids=lambda body: repr(body)[:30])
def test_garbage_in_place_of_the_first_token(body: str, spec: ServerSpec) -> None:
    with FirstWords(http(listed(spec)), http(body)) as server, pytest.raises(ServeError) as refused:
        introduce(server, spec)
    first = str(refused.value).splitlines()[0]
    assert first.startswith("vLLM cannot generate a token (its reply is not what the API promises: ") and first.isprintable()


def test_the_key_is_in_the_environment_and_nowhere_else(spec: ServerSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither on the command line, which everyone may read, nor in what is recorded; each server has another one."""
    seen: list[tuple[tuple[str, ...], dict[str, str]]] = []

    def start(command: tuple[str, ...], environment: dict[str, str], log_path: Path) -> None:
        seen.append((command, environment))
        raise OSError(28, "No space left on device")

    monkeypatch.setenv("VLLM_API_KEY", "a user's own")
    monkeypatch.setattr(starting, "SupervisedProcess", start)
    monkeypatch.setattr(starting, "interpreter_for", lambda *_: Path("/env/bin/python"))
    monkeypatch.setattr(starting, "installed_versions", lambda _: {"vllm": "0", "assay": "0"})
    for _ in range(2):
        with pytest.raises(ServeError), starting.serve(spec):
            pass
    keys = [environment["VLLM_API_KEY"] for _, environment in seen]
    assert len(set(keys)) == 2 and all(len(key) >= 43 for key in keys)
    assert not any(key in repr(command) for key, (command, _) in zip(keys, seen, strict=True))
    assert "VLLM_API_KEY" not in starting.planned_fingerprint(spec).environment
