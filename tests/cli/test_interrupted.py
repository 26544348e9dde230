"""Ctrl-C, sent as a signal to the real command: one line that says what is kept, exit 130, and the same command goes on."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from command_line import INTERRUPTIBLE, Run
from fake_server import Scripted
from given_servers import given_servers
from tiny_checkpoints import make_tiny_glm4_moe


def started(*arguments: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", INTERRUPTIBLE, *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.slow
def test_an_evaluation_says_how_many_replies_it_has(run: Run, tmp_path: Path) -> None:
    asked = threading.Event()

    def reply(body: dict[str, Any]) -> Scripted:
        if "messages" in body:
            asked.set()
            threading.Event().wait(0.2)
        return Scripted("#### 7")

    with given_servers("a", "b", reply=reply) as servers:
        Path("here.yaml").write_text(servers.profile())
        Path("many.yaml").write_text(
            "schema: 1\nname: many\nseed: eval-many\nacceptance: false\n"
            "tasks: [{kind: arithmetic, name: sums, num_items: 500, num_steps: [2], max_tokens: 32}]\n"
        )
        for name in ("a", "b"):
            make_tiny_glm4_moe(tmp_path / name)
        child = started(
            "evaluate", "--reference", "a", "--candidate", "b", "--suite", "many.yaml", "--profile", "here.yaml"
        )  # fmt: skip
        assert asked.wait(60), child.poll()
        child.send_signal(signal.SIGINT)
        out, err = child.communicate(timeout=120)
    assert (child.returncode, out) == (130, ""), err
    assert re.fullmatch(
        r"interrupted; \d+ replies are kept in runs/a/journal.db; the same command asks only what is missing",
        err.splitlines()[-1],
    ), err
    assert "Traceback" not in err


@pytest.mark.slow
def test_a_quantization_says_how_many_shards_are_finished(run: Run, tmp_path: Path) -> None:
    source = make_tiny_glm4_moe(tmp_path / "source")
    code = INTERRUPTIBLE.replace(
        "cli.main()",
        "import os, assay_quantize.engine.local_runner as local\n"
        "def stop(*given, **named): os.kill(os.getpid(), signal.SIGINT)\n"
        "local.run_local = stop; cli.main()",
    )
    command = [sys.executable, "-c", code, "quantize", str(source), "-p", "w4a16", "--out", "made"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout) == (130, ""), done.stderr
    assert done.stderr == "interrupted; made: 0 of 2 shards are finished and kept; the same command makes the rest\n"
    assert run("quantize", source, "-p", "w4a16", "--out", "made")[0] == 0


WHEN_IMPORTED = """
import os, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
from assay_cli import command
moment = sys.argv.pop(1)
class Interrupt:
    def find_spec(self, name, path=None, target=None):
        if name == moment:
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Interrupt())
command()
"""
"""The program, interrupted when it first imports a module: a moment that no clock decides."""


@pytest.mark.slow
@pytest.mark.parametrize(
    "moment", ["assay_cli.root", "typer", "pydantic", "assay_pipeline.judging", "assay_quantize.plan.show"]
)
def test_an_interrupt_while_modules_are_imported_leaves_no_traceback(tmp_path: Path, moment: str) -> None:
    """Also in a command, which imports its stages late."""
    command = [sys.executable, "-c", WHEN_IMPORTED, moment, "plan", str(tmp_path), "--precision", "w4a16"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout) == (130, "")
    assert done.stderr in ("", "interrupted\n")


IN_A_C_EXTENSION = """
import builtins, os, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
from assay_cli import command
imported = builtins.__import__
def interrupt(name, *given, **named):
    if name == "numpy._core._multiarray_umath" and sys._getframe(1).f_code.co_filename.startswith("<frozen importlib"):
        builtins.__import__ = imported
        os.kill(os.getpid(), signal.SIGINT)
    return imported(name, *given, **named)
builtins.__import__ = interrupt
command()
"""
"""The program, interrupted while a C extension of numpy imports numpy, which prints the interrupt and raises ImportError."""


@pytest.mark.slow
def test_an_interrupt_that_a_c_extension_turns_into_an_import_error_is_one() -> None:
    command = [sys.executable, "-c", IN_A_C_EXTENSION, "power", "first-look"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "interrupted\n")
