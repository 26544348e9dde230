"""How this assay was installed: from a clone or from a wheel, with which extras, and where its serving environment is kept."""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import json
import os
import shlex
import sys
from pathlib import Path

DISTRIBUTION = "assay-quant"
"""On a package index `assay` is somebody else's project."""

_PACKAGE = Path(__file__).resolve().parent

EXTRA_OF = {
    "torch": "quantize", "compressed_tensors": "quantize", "numba": "quantize", "xxhash": "quantize",
    "llmcompressor": "calibrate", "transformers": "calibrate", "auto_round": "calibrate",
    "lm_eval": "evaluate", "datasets": "evaluate", "pyarrow": "evaluate",
    "ray": "ray", "gguf": "gguf", "minisweagent": "swe", "swebench": "swe", "docker": "swe",
}  # fmt: skip
"""Package that is imported -> the extra that installs it."""
ALSO_CALIBRATE = ("assay calibrate", "assay sensitivity")
"""Commands that need `calibrate` where torch is missing: it includes `quantize`, and nobody is told twice."""


def clone() -> Path | None:
    """The root of the repository that this code runs from; None: it was installed from a wheel."""
    root = _PACKAGE.parent
    return root if (root / "recipes").is_dir() and (root / "Makefile").is_file() else None


def data_file(folder: str) -> Path:
    """`recipes` or `constraints`: beside the package in a clone, inside it in a wheel."""
    inside = _PACKAGE / f"_{folder}"
    return inside if inside.is_dir() else _PACKAGE.parent / folder


def data_home() -> Path:
    """Where this user's data lies: $XDG_DATA_HOME/assay, else ~/.local/share/assay."""
    return Path(os.environ.get("XDG_DATA_HOME") or "~/.local/share").expanduser() / "assay"


def serving_environment() -> Path:
    """What `assay setup` builds."""
    return data_home() / "serve"


def serving_environments() -> list[Path]:
    """Where a serving environment is looked for, in this order: here, in the clone, in this user's data."""
    root = clone()
    places = [Path.cwd() / ".venv-serve", *([] if root is None else [root / ".venv-serve"]), serving_environment()]
    return list(dict.fromkeys(places))


def setup_command() -> str:
    """What builds the serving environment."""
    return "assay setup" if clone() is None else "make setup"


def install_command(extra: str) -> str:
    """What adds an extra to this installation, from where assay itself came."""
    if (root := clone()) is not None and Path(sys.prefix).parent == root:
        return "make setup"
    origin, installer = _origin()
    if root is not None:
        what = ["-e", f"{root}[{extra}]"]
    else:
        what = [f"{DISTRIBUTION}[{extra}]" + ("" if origin is None else f" @ {origin}")]
    if installer == "uv" and Path(sys.prefix).parent.name == "tools":
        return shlex.join(["uv", "tool", "install", "--force", *what])
    if installer == "uv":
        return shlex.join(["uv", "pip", "install", "--python", sys.executable, *what])
    return shlex.join([sys.executable, "-m", "pip", "install", *what])


def plugin_command(interpreter: Path) -> str:
    """What installs assay's vLLM plugin beside a vLLM."""
    origin, _ = _origin()
    what = str(root) if (root := clone()) is not None else DISTRIBUTION + ("" if origin is None else f" @ {origin}")
    return shlex.join([str(interpreter), "-m", "pip", "install", "--no-deps", what])


@functools.cache
def _origin() -> tuple[str | None, str]:
    """The address that assay was installed from (PEP 610), and what installed it. No address: a package index."""
    try:
        installed = importlib.metadata.distribution(DISTRIBUTION)
    except importlib.metadata.PackageNotFoundError:
        return None, "pip"
    told = json.loads(installed.read_text("direct_url.json") or "{}")
    address = told.get("url")
    if address is not None and (vcs := told.get("vcs_info")) is not None:
        address = f"{vcs['vcs']}+{address}@{vcs['commit_id']}"
    return address, (installed.read_text("INSTALLER") or "pip").strip()


def require_extra(extra: str) -> None:
    """ModuleNotFoundError for the first package of an extra that is not installed: for a command that is about to write."""
    for package, extra_of_package in EXTRA_OF.items():
        if extra_of_package == extra and importlib.util.find_spec(package) is None:
            raise ModuleNotFoundError(f"No module named {package!r}", name=package)


def missing(error: ModuleNotFoundError, command: str) -> str | None:
    """One line for a package that an extra installs; None: no extra does. command: what needed it, such as `assay quantize`."""
    package = (error.name or "").partition(".")[0].replace("-", "_")
    if (extra := EXTRA_OF.get(package)) is None:
        return None
    if extra == "quantize" and command in ALSO_CALIBRATE:
        extra = "calibrate"
    return f"`{command}` needs {package}, which is not installed; install it with: {install_command(extra)}"
