"""Memory of this process and of the machine, as /proc says."""

from __future__ import annotations

import os
from pathlib import Path


def resident_bytes() -> int:
    """What this process holds in memory (RSS); 0 where /proc does not say."""
    try:
        pages = Path("/proc/self/statm").read_text(encoding="ascii").split()[1]
    except OSError:
        return 0
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


def available_bytes() -> int:
    """Memory of the machine that is free, or that the kernel would give back: its page cache."""
    lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    cached = next((int(line.split()[1]) << 10 for line in lines if line.startswith("Cached:")), 0)
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") + cached
