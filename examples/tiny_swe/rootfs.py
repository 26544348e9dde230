"""A root file system for containers from this machine's own programs: git, Python with pytest, a shell and its friends.

No registry of images is needed, nor the network: programs, the libraries that `ldd` names, Python's standard library. About
100 MB; Linux only.
"""

from __future__ import annotations

import importlib.metadata
import io
import os
import re
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

PROGRAMS = (
    "bash", "sh", "git", "cat", "ls", "cp", "mv", "rm", "mkdir", "rmdir", "ln", "chmod", "touch", "head", "tail", "sort",
    "uniq", "wc", "cut", "tr", "tee", "echo", "printf", "env", "pwd", "true", "false", "test", "sleep", "timeout", "date",
    "dirname", "basename", "readlink", "realpath", "seq", "stat", "uname", "id", "kill", "ps", "grep", "sed", "find", "xargs",
    "diff", "patch",
)  # fmt: skip
NEEDED = ("bash", "git", "cat", "tail", "sleep", "rm", "mkdir", "sed", "grep")
PACKAGES = ("pytest", "pluggy", "iniconfig", "packaging", "pygments")
LEFT_OUT = {"test", "tests", "idlelib", "tkinter", "turtledemo", "lib2to3", "ensurepip", "site-packages", "config"}
LAYOUT = "2"
"""Grows when the same machine would make another file system than before."""


class CannotBuild(RuntimeError):
    """This machine lacks something; the message says what."""


def identity() -> str:
    """What the file system is made of: another Python, git or pytest makes another one."""
    git = subprocess.run(["git", "--version"], capture_output=True, text=True, check=True).stdout.strip()
    packages = [f"{name} {importlib.metadata.version(name)}" for name in PACKAGES]
    return "; ".join([LAYOUT, f"python {sys.version.split()[0]}", sys.base_prefix, git, *packages])


def write(target: io.BufferedIOBase) -> None:
    """The file system as a tar stream. CannotBuild without Linux, git, or a usual shell."""
    missing = [name for name in NEEDED if shutil.which(name) is None]
    if sys.platform != "linux" or missing:
        raise CannotBuild(f"needs Linux with {', '.join(NEEDED)}; missing here: {', '.join(missing) or 'Linux'}")
    programs = [Path(found) for name in PROGRAMS if (found := shutil.which(name))]
    python = _python()
    with tarfile.open(fileobj=target, mode="w|", format=tarfile.GNU_FORMAT) as tar:
        added: set[str] = set()
        _skeleton(tar, added)
        for file in (*programs, python, *_libraries([*programs, python, *_stdlib_extensions()])):
            _add(tar, added, file, _real_folder(file) / file.name)
        for name in ("python", "python3"):
            _link(tar, added, f"/usr/bin/{name}", str(_real_folder(python) / python.name))
        for file, name in _python_files():
            _add(tar, added, file, name)


# ------------------------------------------------------------------------------------------------ what goes in
def _python() -> Path:
    """The interpreter behind a virtual environment."""
    found = Path(sys.base_prefix) / "bin" / f"python{sys.version_info.major}.{sys.version_info.minor}"
    if not found.is_file():
        raise CannotBuild(f"{found}: no such file; the Python that runs this has no usual prefix")
    return found


def _standard_library() -> Path:
    return Path(os.__file__).parent


def _stdlib_extensions() -> list[Path]:
    return sorted((_standard_library() / "lib-dynload").glob("*.so"))


def _python_files() -> list[tuple[Path, Path]]:
    """(file, its place) of the standard library and of pytest with what it needs."""
    library = _standard_library()
    found = [
        (file, _real_folder(file) / file.name)
        for file in library.rglob("*")
        if file.is_file() and not LEFT_OUT & set(file.relative_to(library).parts[:-1]) and not _is_left_out(file, library)
    ]
    site = library / "site-packages"
    for package in PACKAGES:
        for file in importlib.metadata.files(package) or []:
            path = Path(str(file.locate()))
            if path.is_file() and ".." not in file.parts:
                found.append((path, site / Path(*file.parts)))
    return found


def _is_left_out(file: Path, library: Path) -> bool:
    return any(part.startswith("config-") for part in file.relative_to(library).parts)


def _libraries(files: list[Path]) -> list[Path]:
    """Shared libraries of programs, and the loader, as `ldd` names them."""
    output = subprocess.run(["ldd", *map(str, files)], capture_output=True, text=True, check=False).stdout
    return [Path(name) for name in sorted(set(re.findall(r"(?:=> |^\s+)(/\S+) \(0x", output, re.MULTILINE)))]


# ------------------------------------------------------------------------------------------------ writing
def _real_folder(file: Path) -> Path:
    """/lib/x86_64-linux-gnu -> /usr/lib/x86_64-linux-gnu where the one is a link to the other."""
    return file.parent.resolve()


def _skeleton(tar: tarfile.TarFile, added: set[str]) -> None:
    for folder, mode in (
        ("/tmp", 0o1777),
        ("/root", 0o755),
        ("/etc", 0o755),
        ("/usr/bin", 0o755),
        ("/proc", 0o755),
        ("/sys", 0o755),
    ):
        info = tarfile.TarInfo(folder.lstrip("/"))
        info.type, info.mode = tarfile.DIRTYPE, mode
        tar.addfile(info)
    for name in ("bin", "sbin", "lib", "lib64"):
        if os.path.islink(f"/{name}"):
            _link(tar, added, f"/{name}", os.readlink(f"/{name}"))
    texts = {
        "/etc/passwd": "root:x:0:0:root:/root:/bin/bash\n",
        "/etc/group": "root:x:0:\n",
        "/etc/gitconfig": "[safe]\n\tdirectory = *\n[user]\n\tname = tiny\n\temail = tiny@example.invalid\n",
    }
    for name, text in texts.items():
        info = tarfile.TarInfo(name.lstrip("/"))
        info.size, info.mode = len(text), 0o644
        tar.addfile(info, io.BytesIO(text.encode()))


def _add(tar: tarfile.TarFile, added: set[str], file: Path, name: Path) -> None:
    """The contents of `file`, links followed, under `name`."""
    if str(name) in added or not file.is_file():
        return
    added.add(str(name))
    info = tarfile.TarInfo(str(name).lstrip("/"))
    stat = file.stat()
    info.size, info.mode = stat.st_size, stat.st_mode & 0o755
    info.mtime = int(stat.st_mtime)  # compiled Python is used only beside a source of the same time
    with file.open("rb") as contents:
        tar.addfile(info, contents)


def _link(tar: tarfile.TarFile, added: set[str], name: str, target: str) -> None:
    if name in added:
        return
    added.add(name)
    info = tarfile.TarInfo(name.lstrip("/"))
    info.type, info.linkname = tarfile.SYMTYPE, target
    tar.addfile(info)
