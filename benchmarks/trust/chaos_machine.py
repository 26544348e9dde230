"""The machine that chaos.py disturbs: disks that can be full, and a wall clock that jumps.

Disks are small tmpfs where this process may mount them, so that the kernel itself says ENOSPC; elsewhere a shim
(chaos_shim.c, LD_PRELOAD) does. The clock is always the shim's: a real one belongs to everybody on the machine.
"""

from __future__ import annotations

import os
import shutil
import struct
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

DAY_S = 86_400
SHIM = Path(__file__).with_name("chaos_shim.c")
ROOMY = "size=2g"
MOST_REMOUNTS = 200
"""The kernel refuses a size below what is used, and meanwhile somebody writes."""
RUNS, JOURNAL = 1, 2
"""Which disk is full: that of all runs, or that of the journal."""


@dataclass
class Machine:
    """`runs`: where runs go. `run_dir`: of the one that is disturbed; its journal has a disk of its own."""

    runs: Path
    run_dir: Path
    control: Path
    environment: dict[str, str]
    mounted: bool
    """False: the shim refuses to write."""
    clock_s: int = 0
    full: int = 0

    def set_clock(self, offset_s: int) -> None:
        """Every process that runs, and all that follow, see the wall clock so many seconds from the true one."""
        self.clock_s = offset_s
        self._tell()

    def fill(self, disk: int) -> None:
        """From now on nothing more fits on it."""
        if not self.mounted:
            self.full = disk
            return self._tell()
        place = self._place(disk)
        for _ in range(MOST_REMOUNTS):
            used = max(4096, shutil.disk_usage(place).used)  # 0 would be without a limit
            command = ["mount", "-o", f"remount,size={used}", str(place)]
            if subprocess.run(command, check=False, capture_output=True).returncode == 0:
                return None
        raise AssertionError(f"{place}: is written to faster than it can be filled")

    def empty(self, disk: int) -> None:
        """There is room again."""
        if not self.mounted:
            self.full = 0
            return self._tell()
        subprocess.run(["mount", "-o", f"remount,{ROOMY}", str(self._place(disk))], check=True)
        return None

    def _place(self, disk: int) -> Path:
        return self.runs if disk == RUNS else (self.run_dir / "journal.db").resolve().parent

    def _tell(self) -> None:
        with self.control.open("r+b") as file:  # in place: the shim has it mapped
            file.write(struct.pack("qq", self.clock_s, self.full))


@contextmanager
def machine(folder: Path, model: str, *, may_mount: bool = True) -> Iterator[Machine]:
    """A machine whose files are below `folder`, which is empty. CalledProcessError: no C compiler."""
    runs, journal = folder / "runs", folder / "journal-disk"
    run_dir, control, shim = runs / model, folder / "control", folder / "shim.so"
    runs.mkdir()
    journal.mkdir()
    subprocess.run(["cc", "-O2", "-shared", "-fPIC", "-o", str(shim), str(SHIM)], check=True)
    control.write_bytes(bytes(16))
    environment = {
        "LD_PRELOAD": str(shim), "CHAOS_CONTROL": str(control),
        "CHAOS_FULL_1": str(runs), "CHAOS_FULL_2": str(run_dir / "journal.db"),
    }  # fmt: skip
    mounted: list[Path] = []
    try:
        if may_mount and os.geteuid() == 0:
            for place in (runs, journal):
                if (
                    subprocess.run(["mount", "-t", "tmpfs", "-o", ROOMY, "assay-chaos", str(place)], check=False).returncode
                    == 0
                ):
                    mounted.append(place)
        run_dir.mkdir()
        if len(mounted) == 2:
            (run_dir / "journal.db").symlink_to(journal / "journal.db")
        yield Machine(runs, run_dir, control, environment, len(mounted) == 2)
    finally:
        for place in mounted:
            subprocess.run(["umount", "--lazy", str(place)], check=True)
