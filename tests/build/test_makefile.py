"""What `make` builds on a bare machine, and what it says of a command line that cannot be meant. Nothing is installed."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
INSTALLER = """#!/usr/bin/env bash
set -e
echo "$*" >> installs.txt
test "$1" = check && exit
touch started-$1
for _ in $(seq 100); do
  ls started-* | grep -qv "$1" && echo "$1 beside another" >> installs.txt && break
  sleep 0.02
done
mkdir -p $2/bin
printf '#!/bin/sh\\necho "assay $*"\\n' > $2/bin/assay
chmod +x $2/bin/assay
"""
"""Stands in for constraints/install.sh: waits two seconds for another one to begin, and makes an `assay` that echoes."""


@pytest.fixture
def bare(tmp_path: Path) -> Path:
    """A checkout in which nothing is built."""
    shutil.copy(ROOT / "Makefile", tmp_path)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    shutil.copytree(ROOT / "constraints", tmp_path / "constraints")
    return tmp_path


@pytest.fixture
def stubbed(bare: Path) -> Path:
    (bare / "constraints" / "install.sh").write_text(INSTALLER)
    return bare


def make(folder: Path, *arguments: str) -> tuple[int, str, str]:
    done = subprocess.run(["make", *arguments], cwd=folder, capture_output=True, text=True, timeout=60, check=False)
    return done.returncode, done.stdout, done.stderr


def installs(folder: Path) -> list[str]:
    return sorted((folder / "installs.txt").read_text().splitlines())


def test_both_environments_are_built_side_by_side(stubbed: Path) -> None:
    code, out, err = make(stubbed, "quantize", "eval")
    assert (code, err) == (0, "")
    assert installs(stubbed) == [
        "check work serve", "serve .venv-serve", "serve beside another", "work .venv", "work beside another"
    ]  # fmt: skip
    steps = ["assay quantize tiny-glm --runs runs", "assay evaluate tiny-glm --runs runs"]
    assert out.splitlines() == ["assay preflight tiny-glm --first --runs runs", *steps]
    chosen = make(stubbed, "quantize", "eval", "report", "card", "choose")[1].splitlines()
    assert chosen[3:] == [f"assay {what} tiny-glm --runs runs" for what in ("speed", "choose", "report", "card")]
    assert make(stubbed, "choose")[1].splitlines() == ["assay choose tiny-glm --runs runs"]
    assert make(stubbed, "quantize", "eval", "PREFLIGHT=0")[1].splitlines() == steps


def test_streaming_is_passed_on(stubbed: Path) -> None:
    assert make(stubbed, "quantize", "STREAM=hub")[1] == "assay quantize tiny-glm --stream-from hub --runs runs\n"


def test_what_precisions_are_calibrated_with_is_passed_on(stubbed: Path) -> None:
    assert make(stubbed, "quantize", "TEXT=a.jsonl@0.7 own@0.3", "IMPORTANCE=seen.safetensors")[1] == (
        "assay quantize tiny-glm --importance seen.safetensors --text a.jsonl@0.7 --text own@0.3 --runs runs\n"
    )


def test_what_is_published_is_one_precision_of_the_model(stubbed: Path) -> None:
    assert make(stubbed, "publish", "REPO=me/x", "PRECISIONS=w4a16")[1] == "assay publish tiny-glm/w4a16 me/x --runs runs\n"
    assert make(stubbed, "publish", "REPO=me/x")[1] == "assay publish tiny-glm me/x --runs runs\n"
    code, out, err = make(stubbed, "publish")
    assert (code, out) == (2, "") and "set REPO=OWNER/NAME, the repository to publish to" in err


def test_quantize_alone_needs_no_serving_environment(stubbed: Path) -> None:
    assert make(stubbed, "quantize")[0] == 0
    assert installs(stubbed) == ["work .venv"]
    assert make(stubbed, "quantize", "eval")[0] == 0
    assert installs(stubbed) == ["check serve", "serve .venv-serve", "serve beside another", "work .venv"]


def test_only_docs_and_test_build_the_environment_of_the_site(stubbed: Path) -> None:
    assert make(stubbed, "docs")[0] == 2, "the stand-in makes no Python"
    assert installs(stubbed) == ["docs .venv-docs"]


def test_a_misspelt_variable_is_an_error(bare: Path) -> None:
    code, out, err = make(bare, "quantize", "MODLE=glm-5", "PRECISIONS=w4a16 fp8")
    assert (code, out) == (2, "")
    known = "MODEL PRECISIONS PROFILE SUITE WORKERS MEMORY IMPORTANCE TEXT STREAM RUNS PREFLIGHT REPO PYTHON"
    assert err.partition(" *** ")[2] == f"MODLE: no such variable; known: {known}.  Stop.\n"


PYTHON = """#!/bin/sh
test "$1" = -m || exit 0
mkdir -p "$3/bin"
printf '#!/bin/sh\\necho "$*" >> "%s"\\n' "$PWD/pip.txt" > "$3/bin/python"
chmod +x "$3/bin/python"
"""
"""Stands in for Python: makes an environment whose pip writes down what it is asked for."""
HASHED = "--require-hashes --no-deps --no-build-isolation --force-reinstall -r {{constraints}}/{}.hashes.txt"
PLUGIN = "--no-deps --no-build-isolation -e {root}"


@pytest.mark.parametrize(
    ("has_gpu", "expected"),
    [
        (True, [HASHED.format("build"), HASHED.format("serve-cuda"), "-r {constraints}/serve-cuda.txt", PLUGIN]),
        (False, ["torch==2.13.0", HASHED.format("build"), HASHED.format("serve-cpu"), PLUGIN]),
    ],
)
def test_the_serving_environment_is_what_is_pinned(bare: Path, has_gpu: bool, expected: list[str]) -> None:
    (tools := bare / "tools").mkdir()
    scripts = {
        "python": PYTHON,
        "df": '#!/bin/sh\necho; echo "x 0 0 99999999 0 /"\n',
        "nvidia-smi": f"#!/bin/sh\nexit {not has_gpu:d}\n",
    }
    for name, text in scripts.items():
        (tools / name).write_text(text)
        (tools / name).chmod(0o755)
    script = f'PATH="{tools}:$PATH" PYTHON={tools}/python constraints/install.sh serve .venv-serve'
    done = subprocess.run(["bash", "-c", script], cwd=bare, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    asked = (bare / "pip.txt").read_text().splitlines()
    assert asked == [
        "-m pip --disable-pip-version-check --no-input install " + one.format(root=bare, constraints=bare / "constraints")
        for one in expected
    ]


FAILING = """#!/bin/sh
test "$1" = -m || exit 0
mkdir -p "$3/bin"
printf '#!/bin/sh\\ncat "%s"\\nexit 1\\n' "$PWD/said.txt" > "$3/bin/python"
chmod +x "$3/bin/python"
"""
"""Stands in for Python: makes an environment whose pip says what is in said.txt, and fails."""


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        (
            "WARNING: Retrying (Retry(total=0)) after connection broken by 'NewConnectionError': /torch/\n"
            "ERROR: Could not find a version that satisfies the requirement torch==2.13.0 (from versions: none)\n"
            "ERROR: No matching distribution found for torch==2.13.0\n",
            "No matching distribution found for torch==2.13.0; pip had no connection to a package index: check the network, or "
            "set PIP_INDEX_URL",
        ),
        ("ERROR: Could not install packages due to an OSError\n\n", "Could not install packages due to an OSError"),
        ("Killed\n", "Killed"),
    ],
)
def test_a_step_that_fails_is_one_line_with_the_reason_that_pip_gives(bare: Path, said: str, reason: str) -> None:
    (bare / "said.txt").write_text(said)
    (tools := bare / "tools").mkdir()
    for name, text in (
        ("python", FAILING),
        ("df", '#!/bin/sh\necho; echo "x 0 0 99999999 0 /"\n'),
        ("nvidia-smi", "#!/bin/sh\nexit 1\n"),
    ):
        (tools / name).write_text(text)
        (tools / name).chmod(0o755)
    script = f'PATH="{tools}:$PATH" PYTHON={tools}/python constraints/install.sh serve .venv-serve'
    done = subprocess.run(["bash", "-c", script], cwd=bare, capture_output=True, text=True, timeout=60, check=False)
    line = f"error: serve environment: 'PyTorch' failed: {reason}; the whole log is .venv-serve/install.log\n"
    assert (done.returncode, done.stderr) == (2, line)


@pytest.mark.parametrize("goals", [["quantize"], ["quantize", "eval"], ["setup"]])
def test_a_python_that_is_not_there_or_too_old_is_one_line(bare: Path, goals: list[str]) -> None:
    (old := bare / "old").write_text('#!/bin/sh\ntest "$1" = --version && echo "Python 3.9.2"\n')
    old.chmod(0o755)
    for python, said in (
        ("/usr/bin/nope", "no such program"),
        (str(old), "is Python 3.9.2"),
    ):
        code, out, err = make(bare, *goals, f"PYTHON={python}")
        lines = err.splitlines()
        assert (code, out, lines[0]) == (
            2, "", f"error: {python}: {said}; give a Python 3.11 or newer: PYTHON=... with make, --python with `assay setup`"
        )  # fmt: skip
        assert len(lines) == 2 and lines[1].startswith("make: *** ")


def test_room_is_asked_for_everything_that_is_missing(bare: Path) -> None:
    (tools := bare / "tools").mkdir()
    for name, text in (("df", 'echo; echo "x 0 0 9437184 0 /"'), ("nvidia-smi", 'echo "GPU 0: NVIDIA H100"')):
        (tools / name).write_text(f"#!/bin/sh\n{text}\n")
        (tools / name).chmod(0o755)

    def check(*kinds: str) -> str:
        script = f'PATH="{tools}:$PATH" PYTHON={sys.executable} constraints/install.sh check {" ".join(kinds)}'
        done = subprocess.run(["bash", "-c", script], cwd=bare, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == (2 if done.stderr else 0)
        return done.stderr

    assert check("work", "serve") == f"error: {bare} has 9 GiB free; 22 GiB are needed to build: work serve\n"
    assert check("work") == ""
    (tools / "nvidia-smi").write_text("#!/bin/sh\nexit 9\n")
    assert check("work", "serve") == ""
