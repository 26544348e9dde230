"""Runs one command and takes its whole process group down when the process that asked for it is gone, however it went.

    python -I _supervisor.py PARENT_PID COMMAND...        (as leader of a new session)

A context manager cannot clean up after `kill -9`; vLLM's engine and workers would keep the GPU. This process polls its parent
instead of using PR_SET_PDEATHSIG, which fires when the *thread* that started the child ends. Standard library only.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

POLL_S = 0.25
GRACE_S = 10.0


def main() -> int:
    """Exit status of the command, 128 + signal if it was killed; 0 if the parent went away."""
    parent_pid, command = int(sys.argv[1]), sys.argv[2:]
    # A handler, not SIG_IGN: ignoring would be inherited by the command, which must obey.
    signal.signal(signal.SIGTERM, lambda *_: None)
    child = subprocess.Popen(command)
    while os.getppid() == parent_pid:
        status = child.poll()
        if status is not None:
            return 128 - status if status < 0 else status
        time.sleep(POLL_S)
    group = os.getpgrp()
    os.killpg(group, signal.SIGTERM)
    deadline = time.monotonic() + GRACE_S
    while child.poll() is None and time.monotonic() < deadline:
        time.sleep(POLL_S)
    os.killpg(group, signal.SIGKILL)  # ourselves included
    return 0


if __name__ == "__main__":
    sys.exit(main())
