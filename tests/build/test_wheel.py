"""The wheel by itself: what is in it, and what works where no extra is installed."""

from __future__ import annotations

import email
import json
import re
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from given_servers import given_servers
from tiny_checkpoints import make_tiny_glm4_moe

from assay.installation import EXTRA_OF, clone, install_command, missing, plugin_command
from assay_pipeline.serving_setup import _wheel_of_this

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    words = ["wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", str(folder), str(ROOT)]
    subprocess.run([sys.executable, "-m", "pip", *words], check=True, timeout=300, capture_output=True)
    (made,) = folder.glob("*.whl")
    return made


def test_it_holds_all_data_that_commands_read(wheel: Path) -> None:
    assert re.fullmatch(r"assay_quant-[\d.]+-py3-none-any\.whl", wheel.name)
    names = set(zipfile.ZipFile(wheel).namelist())
    recipes = {f"assay/_recipes/{path.relative_to(ROOT / 'recipes')}" for path in (ROOT / "recipes").rglob("*.*")}
    pins = ("install.sh", "build.hashes.txt", "serve-cpu.hashes.txt", "serve-cuda.hashes.txt", "serve-cuda.txt")
    templates = {f"assay_reports/templates/{path.name}" for path in (ROOT / "reports/assay_reports/templates").iterdir()}
    assert recipes | {f"assay/_constraints/{name}" for name in pins} | templates <= names
    assert {name.partition("/")[0] for name in names if not name.startswith("assay_quant-")} == {
        "assay", "assay_cli", "assay_evaluate", "assay_pipeline", "assay_quantize", "assay_reports", "assay_vllm",
    }  # fmt: skip


def test_it_is_called_by_a_name_of_its_own_and_needs_no_torch(wheel: Path) -> None:
    archive = zipfile.ZipFile(wheel)
    (information,) = {name.partition("/")[0] for name in archive.namelist() if ".dist-info" in name}
    told = email.message_from_bytes(archive.read(f"{information}/METADATA"))
    assert told["Name"] == "assay-quant"
    base = {re.split(r"[<>=\[ ;]", line)[0] for line in told.get_all("Requires-Dist", []) if "extra ==" not in line}
    assert base == {
        "httpx", "huggingface-hub", "jinja2", "jsonschema", "numpy", "pydantic", "pyyaml", "rich", "safetensors", "scipy",
        "tokenizers", "typer",
    }  # fmt: skip
    assert "assay = assay_cli:command" in archive.read(f"{information}/entry_points.txt").decode()


# ------------------------------------------------------------------------------------------------ without any extra
WITHOUT_EXTRAS = """
import contextlib, io, json, sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in absent:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
absent = sys.argv[2].split(",")
sys.meta_path.insert(0, Absent())
from assay_cli import main
ended = []
for words in json.loads(sys.argv[1]):
    sys.argv = ["assay", *words]
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()) as err:
        try:
            code = main()
        except SystemExit as end:
            code = end.code
    ended.append([code, err.getvalue().strip().splitlines()[-1:]])
print(json.dumps(ended))
"""
"""A program. In: command lines as JSON, and packages that it cannot import. Out: exit codes and last
lines on stderr, as JSON."""
NEEDS_EXTRA = {
    ("quantize", "source", "-p", "w4a16", "--out", "made"): ("quantize", "torch"),
    ("quantize", "source", "-p", "w4a16-gptq", "--out", "made"): ("quantize", "llmcompressor"),
    ("quantize", "source", "-p", "w4a16"): ("quantize", "torch"),
    ("verify", "source"): ("verify", "torch"),
    ("calibrate", "source", "--out", "w.safetensors"): ("calibrate", "torch"),
    ("sensitivity", "source"): ("sensitivity", "torch"),
    ("plan", "source", "-p", "w4a16", "--hardware", "this"): ("plan", "numba"),
}
RAY = ("quantize", "source", "-p", "w4a16", "--out", "made", "--runner", "ray")
WORK = (
    ("plan", "source", "-p", "w4a16"), ("init", "source"), ("plan", "source.yaml", "-p", "w4a16"), ("recipes",), ("status",),
    ("plan", "glm-5", "--profile", "8xh200"),
)  # fmt: skip


def test_without_extras_commands_work_or_say_which_extra_in_one_line(tmp_path: Path) -> None:
    make_tiny_glm4_moe(tmp_path / "source")
    with given_servers("a", "b") as servers:
        judge = ("judge", *(server.base_url for server in servers.by_label.values()), "--suite", "full")
        needs_extra = NEEDS_EXTRA | {judge: ("judge", "lm_eval")}
        words = [*needs_extra, RAY, *WORK]
        done = subprocess.run(
            [sys.executable, "-c", WITHOUT_EXTRAS, json.dumps(words), ",".join(EXTRA_OF)],
            capture_output=True, text=True, timeout=300, check=False, cwd=tmp_path,
        )  # fmt: skip
        assert servers.count("/v1/chat/completions") == 0, "none of its tasks was begun"
    assert done.returncode == 0, done.stderr
    ended = dict(zip(words, json.loads(done.stdout), strict=True))
    for command, (name, package) in needs_extra.items():
        line = f"error: `assay {name}` needs {package}, which is not installed; install it with: {install_command('quantize')}"
        assert ended[command] == [2, [line]], command
    ray = f"--runner ray: Ray is not installed; take --runner local, or install it with: {install_command('ray')}"
    assert ended[RAY] == [2, [f"error: {ray}"]]
    assert {command: ended[command][0] for command in WORK} == dict.fromkeys(WORK, 0)
    assert not (tmp_path / "made").exists() and not (tmp_path / "runs" / "source").exists()


# ------------------------------------------------------------------------------------------------ what is said of it
@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """No clone, and an environment of somebody's."""
    monkeypatch.setattr("assay.installation.clone", lambda: None)
    monkeypatch.setattr(sys, "prefix", "/home/me/env")
    monkeypatch.setattr(sys, "executable", "/home/me/env/bin/python")
    yield monkeypatch


@pytest.mark.parametrize(
    ("origin", "prefix", "command"),
    [
        ((None, "pip"), "/home/me/env", "/home/me/env/bin/python -m pip install 'assay-quant[quantize]'"),
        (
            ("file:///w/a.whl", "pip"), "/home/me/env",
            "/home/me/env/bin/python -m pip install 'assay-quant[quantize] @ file:///w/a.whl'",
        ),
        (
            ("git+https://host/a@1f", "uv"), "/home/me/env",
            "uv pip install --python /home/me/env/bin/python 'assay-quant[quantize] @ git+https://host/a@1f'",
        ),
        (
            ("file:///w/a.whl", "uv"), "/home/me/.local/share/uv/tools/assay-quant",
            "uv tool install --force 'assay-quant[quantize] @ file:///w/a.whl'",
        ),
    ],
)  # fmt: skip
def test_an_extra_comes_from_where_assay_came(
    installed: pytest.MonkeyPatch, origin: tuple[str | None, str], prefix: str, command: str
) -> None:
    installed.setattr("assay.installation._origin", lambda: origin)
    installed.setattr(sys, "prefix", prefix)
    assert install_command("quantize") == command
    line = missing(ModuleNotFoundError(name="torch.nn"), "assay run")
    assert line == f"`assay run` needs torch, which is not installed; install it with: {command}"
    assert missing(ModuleNotFoundError(name="assay_misspelt"), "assay run") is None
    for name in ("assay calibrate", "assay sensitivity"):  # what they need beside torch comes with it, in one download
        calibrate = command.replace("[quantize]", "[calibrate]")
        line = missing(ModuleNotFoundError(name="torch"), name)
        assert line == f"`{name}` needs torch, which is not installed; install it with: {calibrate}"


def test_in_a_clone_everything_is_installed_by_make() -> None:
    assert clone() == ROOT
    assert plugin_command(Path("/serve/bin/python")) == f"/serve/bin/python -m pip install --no-deps {ROOT}"


def test_the_plugins_wheel_is_the_installed_one(wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Made of the files of an installation, it holds what the wheel held that was installed."""
    words = ["install", "--quiet", "--no-deps", "--target", str(tmp_path / "site"), str(wheel)]
    subprocess.run([sys.executable, "-m", "pip", *words], check=True, timeout=300, capture_output=True)
    monkeypatch.syspath_prepend(tmp_path / "site")
    (tmp_path / "again").mkdir()
    again = _wheel_of_this(tmp_path / "again")
    assert again.name == wheel.name
    before, after = zipfile.ZipFile(wheel), zipfile.ZipFile(again)
    assert set(after.namelist()) == set(before.namelist())
    assert all(after.read(name) == before.read(name) for name in before.namelist() if not name.endswith("/RECORD"))


def test_nobody_is_sent_to_another_project_of_the_name() -> None:
    """`assay` on a package index is somebody else's."""
    words = r"(pip|tool) install[^|]*[ '\"]assay(\[|['\" ]|$)|uvx assay"
    told = subprocess.run(["git", "grep", "-nE", words], cwd=ROOT, capture_output=True, text=True, check=False)
    assert [line for line in told.stdout.splitlines() if not line.startswith("tests/build/test_wheel.py:")] == []
