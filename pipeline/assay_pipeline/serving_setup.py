"""`assay setup`: the serving environment, built from the pinned files of `constraints/` where this user's data lies."""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import signal
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

from assay.errors import AssayError
from assay.installation import DISTRIBUTION, clone, data_file, serving_environment
from assay_pipeline.interrupted import interruptible, terminable

STAMP = ".ready"
"""Written last; says what the environment was built from."""
_OF_AN_INSTALLATION = frozenset({"RECORD", "INSTALLER", "REQUESTED", "direct_url.json"})
"""What an installer adds to the files of a wheel."""


def build_serving_environment(python: Path | None, say: Callable[[str], None], *, again: bool = False) -> Path:
    """Its folder. What is there already and was built from the same pins and this version of assay stays, unless `again`.

    python: that it is made with; None: the one that runs. AssayError: it cannot be built; the message names the log.
    """
    folder, constraints = serving_environment(), data_file("constraints")
    stamp, ready = _stamp(constraints), folder / STAMP
    is_ready = (folder / "bin" / "python").is_file() and ready.is_file() and ready.read_text(encoding="utf-8") == stamp
    if is_ready and not again:
        say(f"{folder} is ready; --again builds it anew")
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    ready.unlink(missing_ok=True)
    environment = os.environ | {"PYTHON": str(python or sys.executable)}
    kept = "what was downloaded is kept in pip's cache; the same command goes on"
    with tempfile.TemporaryDirectory(prefix="assay-setup-") as temporary, interruptible(lambda: kept):
        plugin = [] if clone() is not None else [str(_wheel_of_this(Path(temporary)))]
        words = ["bash", str(constraints / "install.sh"), "serve", str(folder), *plugin]
        errors: list[str] = []
        with terminable(), subprocess.Popen(
            words, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace",
            start_new_session=True,
        ) as building:  # fmt: skip
            assert building.stdout is not None
            try:
                for line in map(str.rstrip, building.stdout):
                    errors.append(line.removeprefix("error: ")) if line.startswith("error: ") else say(line)
            except BaseException:
                os.killpg(building.pid, signal.SIGTERM)  # the installer, and the pip that it started
                raise
    if building.returncode != 0:
        raise AssayError(errors[-1] if errors else f"{folder}: could not be built (exit {building.returncode})")
    ready.write_text(stamp, encoding="ascii")
    return folder


def _stamp(constraints: Path) -> str:
    """Changes with the pins, with how they are installed, and with assay: two wheels of one version may differ."""
    pins = b"".join(path.read_bytes() for path in sorted([*constraints.glob("serve-*.hashes.txt"), constraints / "install.sh"]))
    of_pins = hashlib.sha256(pins).hexdigest()
    if (folder := clone()) is not None:
        return f"{of_pins} {folder}"
    record = importlib.metadata.distribution(DISTRIBUTION).read_text("RECORD") or ""
    lines = [line for line in record.splitlines() if line.partition(",")[0].endswith((".py", ".yaml", ".json"))]
    return f"{of_pins} {hashlib.sha256(chr(10).join(sorted(lines)).encode()).hexdigest()}"


def _wheel_of_this(folder: Path) -> Path:
    """The installed assay as a wheel, for its vLLM plugin: another environment cannot see the files of this one."""
    installed = importlib.metadata.distribution(DISTRIBUTION)
    files = [
        file for file in installed.files or ()
        if ".." not in file.parts and "__pycache__" not in file.parts and file.name not in _OF_AN_INSTALLATION
    ]  # fmt: skip
    (information,) = {file.parts[0] for file in files if file.name == "METADATA"}
    wheel = folder / f"{DISTRIBUTION.replace('-', '_')}-{installed.version}-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
        for file in files:
            archive.write(str(file.locate()), str(file))
        archive.writestr(f"{information}/RECORD", "".join(f"{file},,\n" for file in [*files, f"{information}/RECORD"]))
    return wheel
