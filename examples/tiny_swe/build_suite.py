"""Make the small SWE suite: repositories with history, a data set in the harness's schema, and images without a registry.

    python examples/tiny_swe/build_suite.py                 # repositories and build/test.jsonl
    python examples/tiny_swe/build_suite.py --images        # and one image per instance, in the daemon that `docker` speaks to

Same contents, same commits: everything is dated and signed alike, so that the data set is the same on every machine. What is
there already and was made of the same things is not made again.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import io
import json
import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
import rootfs
from repositories import REPOSITORIES, Bug, Files, Repository

HERE = Path(__file__).parent
BUILD = HERE / "build"
OWNER = "tiny"
BASE_IMAGE = "tiny-swe/base:latest"
LABEL = "io.assay.tiny_swe"
DATED = {
    "GIT_AUTHOR_NAME": "tiny", "GIT_AUTHOR_EMAIL": "tiny@example.invalid", "GIT_AUTHOR_DATE": "2026-01-01T00:00:00+0000",
    "GIT_COMMITTER_NAME": "tiny", "GIT_COMMITTER_EMAIL": "tiny@example.invalid",
    "GIT_COMMITTER_DATE": "2026-01-01T00:00:00+0000",
    "GIT_CONFIG_NOSYSTEM": "1", "GIT_CONFIG_GLOBAL": "/dev/null",
}  # fmt: skip
EVAL_SCRIPT = """#!/bin/bash
set -uxo pipefail
cd /testbed
git status
git checkout {base} {files}
git apply -v - <<'EOF_TESTS'
{test_patch}EOF_TESTS
: '>>>>> Start Test Output'
python -m pytest -rA -p no:cacheprovider {files}
: '>>>>> End Test Output'
git checkout {base} {files}
"""


def instance_id(repository: Repository, bug: Bug) -> str:
    """As SWE-bench names them: owner__repository-number."""
    return f"{OWNER}__{repository.name}-{bug.number}"


def image_name(instance: str) -> str:
    return f"tiny-swe/{instance}:latest"


# ------------------------------------------------------------------------------------------------ repositories
def build_dataset(folder: Path = BUILD) -> Path:
    """FOLDER/test.jsonl and FOLDER/repositories/INSTANCE, each a clone at its base commit; the path of the data set."""
    repositories = folder / "repositories"
    shutil.rmtree(repositories, ignore_errors=True)
    rows = [
        build_instance(repository, bug, repositories / instance_id(repository, bug))
        for repository in REPOSITORIES
        for bug in repository.bugs
    ]
    path = folder / "test.jsonl"
    path.write_text("".join(json.dumps(row, sort_keys=True) + "\n" for row in rows), encoding="utf-8")
    return path


def build_instance(repository: Repository, bug: Bug, folder: Path) -> dict[str, object]:
    """The repository at its base commit in `folder`, and its row."""
    folder.mkdir(parents=True)
    _git(folder, "init", "-q", "-b", "main")
    _commit(folder, "Begin", repository.first)
    for message, files in repository.later:
        _commit(folder, message, files)
    base = _git(folder, "rev-parse", "HEAD").strip()
    patch, test_patch = _diff(folder, bug.fix), _diff(folder, bug.tests)
    instance = instance_id(repository, bug)
    before = {name for file in bug.tests for name in _tests((folder / file).read_text(encoding="utf-8"), file)}
    after = {name for file, text in bug.tests.items() for name in _tests(text, file)}
    return {
        "instance_id": instance,
        "repo": f"{OWNER}/{repository.name}",
        "base_commit": base,
        "environment_setup_commit": base,
        "version": "1.0",
        "problem_statement": bug.issue,
        "hints_text": "",
        "created_at": "2026-01-01T00:00:00Z",
        "patch": patch,
        "test_patch": test_patch,
        "FAIL_TO_PASS": sorted(after - before),
        "PASS_TO_PASS": sorted(after & before),
        "image": image_name(instance),
        "eval_script": EVAL_SCRIPT.format(base=base, files=" ".join(sorted(bug.tests)), test_patch=test_patch),
        "log_parser": "parse_log_pytest",
        "eval_type": "pass_and_fail",
    }


def _git(folder: Path, *arguments: str) -> str:
    return subprocess.run(
        ["git", *arguments], cwd=folder, env=os.environ | DATED, capture_output=True, text=True, check=True
    ).stdout  # fmt: skip


def _write(folder: Path, files: Files) -> None:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")


def _commit(folder: Path, message: str, files: Files) -> None:
    _write(folder, files)
    _git(folder, "add", "-A")
    _git(folder, "commit", "-q", "-m", message)


def _diff(folder: Path, files: Files) -> str:
    """The patch that makes `files`; the folder is left as it was."""
    _write(folder, files)
    try:
        return _git(folder, "diff")
    finally:
        _git(folder, "checkout", "-q", ".")


def _tests(text: str, file: str) -> set[str]:
    """Names of the tests in a file, as pytest prints them."""
    return {f"{file}::{node.name}" for node in ast.parse(text).body if isinstance(node, ast.FunctionDef)}


# ------------------------------------------------------------------------------------------------ images
def build_images(dataset: Path, runtime: str = "docker") -> dict[str, bool]:
    """Image -> whether it was made now. SystemExit with one line if Docker does not answer or this machine cannot."""
    rows = [json.loads(line) for line in dataset.read_text(encoding="utf-8").splitlines()]
    made = {}
    base = hashlib.sha256(rootfs.identity().encode()).hexdigest()[:16]
    if _label(runtime, BASE_IMAGE) != base:
        _import_base(runtime, base)
        made[BASE_IMAGE] = True
    for row in rows:
        folder = dataset.parent / "repositories" / row["instance_id"]
        identity = f"{base}-{row['base_commit'][:16]}"
        made[row["image"]] = _label(runtime, row["image"]) != identity
        if made[row["image"]]:
            _add_repository(runtime, row["image"], folder, identity)
    return made


def _call(runtime: str, *arguments: str, **options: object) -> subprocess.CompletedProcess[bytes]:
    done = subprocess.run([runtime, *arguments], capture_output=True, check=False, **options)  # type: ignore[call-overload]
    if done.returncode != 0:
        reason = " ".join(done.stderr.decode(errors="replace").split())[:300]
        raise SystemExit(f"error: {runtime} {arguments[0]}: {reason}; is it running, and DOCKER_HOST set to it?")
    return done


def _label(runtime: str, image: str) -> str:
    """What an image was made of; empty if it is not there."""
    query = '{{index .Config.Labels "' + LABEL + '"}}'
    found = subprocess.run([runtime, "image", "inspect", "-f", query, image], capture_output=True, text=True, check=False)
    return found.stdout.strip() if found.returncode == 0 else ""


def _import_base(runtime: str, identity: str) -> None:
    changes = ["ENV PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "ENV HOME=/root", "ENV LANG=C.UTF-8"]
    changes += ["ENV PYTHONDONTWRITEBYTECODE=1", "WORKDIR /testbed", f"LABEL {LABEL}={identity}"]
    options = [word for change in changes for word in ("--change", change)]
    process = subprocess.Popen(
        [runtime, "import", *options, "-", BASE_IMAGE], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    )
    assert process.stdin is not None and process.stderr is not None
    try:
        rootfs.write(process.stdin)  # type: ignore[arg-type]
        process.stdin.close()
    except BrokenPipeError:
        pass
    except rootfs.CannotBuild as error:
        process.kill()
        raise SystemExit(f"error: images of examples/tiny_swe cannot be made here: {error}") from None
    words = process.stderr.read().decode(errors="replace")
    if process.wait() != 0:
        raise SystemExit(f"error: {runtime} import: {' '.join(words.split())[:300]}; is it running?")


def _add_repository(runtime: str, image: str, folder: Path, identity: str) -> None:
    """The base image with one repository in /testbed: create, copy, commit; nothing runs."""
    container = _call(runtime, "create", BASE_IMAGE, "true").stdout.decode().strip()
    try:
        _call(runtime, "cp", "-", f"{container}:/", input=_as_tar(folder))
        _call(runtime, "commit", "--change", f"LABEL {LABEL}={identity}", container, image)
    finally:
        _call(runtime, "rm", "-f", container)


def _as_tar(folder: Path) -> bytes:
    stream = io.BytesIO()

    def of_root(info: tarfile.TarInfo) -> tarfile.TarInfo:
        info.uid = info.gid = 0
        info.uname = info.gname = "root"
        return info

    with tarfile.open(fileobj=stream, mode="w") as tar:
        tar.add(folder, arcname="testbed", filter=of_root)
    return stream.getvalue()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", action="store_true", help="make the images as well")
    parser.add_argument("--runtime", default="docker", help="docker or podman")
    parser.add_argument("--out", type=Path, default=BUILD, help="folder of the data set and the repositories")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    dataset = build_dataset(options.out)
    print(f"{dataset}: {len(dataset.read_text(encoding='utf-8').splitlines())} instances")
    if options.images:
        made = build_images(dataset, options.runtime)
        print(f"{sum(made.values())} images made, {len(made) - sum(made.values())} there already")


if __name__ == "__main__":
    main()
