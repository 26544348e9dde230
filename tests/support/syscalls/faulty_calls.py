"""The calls by which a process changes the disk, or reads a file: counted, and one of them made to go wrong.

faulty_calls.c is compiled here and loaded by LD_PRELOAD into a Python of its own (`forking.py`); that one forks, the child arms
it, and the parent reads what the child did from memory that both share.
"""

from __future__ import annotations

import ctypes
import enum
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

LONGEST, MOST_CALLS = 512, 16384
SOURCE = Path(__file__).with_name("faulty_calls.c")


class Fault(enum.IntEnum):
    """What happens at the call. The last two are of calls that read, all others of calls that change the disk."""

    COUNT = 0
    """Nothing."""
    KILL = 1
    """SIGKILL before it."""
    TORN = 2
    """SIGKILL when half of it is written; of a call that writes no bytes, before it."""
    NO_SPACE = 3
    """ENOSPC, and from then on of every call that takes space."""
    SHORT = 4
    """Half of it is written, and then the disk is full."""
    IO_ERROR = 5
    """EIO, once."""
    READ_ERROR = 6
    """EIO, once, for reading or opening."""
    READ_SHORT = 7
    """Half of what was asked for, once."""

    @property
    def reads(self) -> bool:
        return self in (Fault.READ_ERROR, Fault.READ_SHORT)

    @property
    def kills(self) -> bool:
        return self in (Fault.KILL, Fault.TORN)


class Call(NamedTuple):
    """One that was counted. path: of a file, or what a new one is to be called."""

    name: str
    path: str


class _Call(ctypes.Structure):
    _fields_ = (("name", ctypes.c_char * 16), ("path", ctypes.c_char * LONGEST))


class _Shared(ctypes.Structure):
    """`struct shared`."""

    _fields_ = (
        ("fault", ctypes.c_int), ("at", ctypes.c_long), ("under", ctypes.c_char * LONGEST), ("seen", ctypes.c_long),
        ("is_full", ctypes.c_int), ("hit", ctypes.c_long), ("calls", _Call * MOST_CALLS),
    )  # fmt: skip


def why_not() -> str | None:
    """Why nothing can be swept here; None: it can."""
    if sys.platform != "linux" or sys.maxsize < 2**32:
        return "the shim is for 64-bit Linux"
    return None if shutil.which(os.environ.get("CC", "gcc")) else "no C compiler (gcc, or CC)"


def build(folder: Path) -> Path:
    """The shared library, made in `folder`."""
    library = folder / "faulty_calls.so"
    compiler = os.environ.get("CC", "gcc")
    subprocess.run([compiler, "-O2", "-Wall", "-Werror", "-shared", "-fPIC", "-o", library, SOURCE], check=True, timeout=120)
    return library


class Shim:
    """The library as it is loaded in this process, and in the children that it forks."""

    def __init__(self) -> None:
        """OSError: it is not loaded."""
        try:
            function = ctypes.CDLL(None).faulty_calls_shared
        except AttributeError:
            raise OSError("faulty_calls.so is not loaded: start Python with LD_PRELOAD") from None
        function.restype = ctypes.c_void_p
        self._shared = _Shared.from_address(function())

    def arm(self, under: str, fault: Fault, at: int) -> None:
        """From now on count, and let call number `at` (from 1) under this folder go wrong; 0: none."""
        self.disarm()
        self._shared.fault, self._shared.at = fault, at
        self._shared.seen = self._shared.hit = self._shared.is_full = 0
        self._shared.under = under.encode()

    def disarm(self) -> None:
        """Count no more."""
        self._shared.under = b""

    def calls(self) -> list[Call]:
        """All that were counted since `arm`."""
        seen = self._shared.seen
        assert seen <= MOST_CALLS, f"{seen} calls, {MOST_CALLS} are kept"
        return [Call(one.name.decode(), one.path.decode(errors="replace")) for one in self._shared.calls[:seen]]

    def hit(self) -> Call | None:
        """The call that went wrong; None: so many were not made."""
        number: Any = self._shared.hit
        one = self._shared.calls[number - 1] if number else None
        return None if one is None else Call(one.name.decode(), one.path.decode(errors="replace"))
