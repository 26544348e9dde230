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


def cached_bytes() -> int:
    """Memory the kernel would give back: its page cache."""
    for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
        if line.startswith("Cached:"):
            return int(line.split()[1]) << 10
    return 0
