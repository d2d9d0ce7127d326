"""Child processes that never outlive their parent, and bounds on their memory."""

import contextlib
import ctypes
import os
import resource
import signal
import sys
from pathlib import Path

PR_SET_PDEATHSIG = 1


def end_with_parent(parent: int) -> None:
    """Kill this process when its parent ends, however it ends; only the parent handles Ctrl-C."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def limit_memory(extra: int) -> None:
    """Let this process map no more than `extra` bytes beyond what it maps now; more raises a MemoryError.

    Only Linux reports and limits what a process maps.
    """
    with contextlib.suppress(OSError, ValueError):
        present = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        _, hard = resource.getrlimit(resource.RLIMIT_AS)
        wanted = present + extra
        if hard == resource.RLIM_INFINITY or wanted < hard:
            resource.setrlimit(resource.RLIMIT_AS, (wanted, hard))
