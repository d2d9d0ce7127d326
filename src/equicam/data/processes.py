"""Child processes that never outlive their parent, with bounds on their time and memory."""

import contextlib
import ctypes
import multiprocessing
import os
import resource
import signal
import sys
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

PR_SET_PDEATHSIG = 1


def end_with_parent(parent: int) -> None:
    """Kill this process when its parent ends, however it ends; only the parent handles Ctrl-C."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def call_alone(function: Callable[..., Any], *arguments: Any) -> tuple[Any, int | None]:
    """What a function returns in a forked process of its own, and that process's exit code; None if it died."""
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_send_result, args=(sender, function, arguments))
    process.start()
    sender.close()
    found = None
    with receiver, contextlib.suppress(EOFError, OSError):
        found = receiver.recv()
    process.join()
    return found, process.exitcode


def _send_result(sender: Connection, function: Callable[..., Any], arguments: Sequence[Any]) -> None:
    sender.send(function(*arguments))


def limit_time(seconds: int | float) -> None:
    """End this process by SIGALRM after so many seconds, even inside C code; 0 takes the limit back."""
    # the signal's default action ends the process; a handler in Python would wait for C code to return
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGALRM})
    signal.setitimer(signal.ITIMER_REAL, seconds)


def limit_memory(extra: int) -> None:
    """Let this process map no more than `extra` bytes beyond what it maps now; more raises a MemoryError.

    Only Linux reports and limits what a process maps. Memory that a parent freed and kept is given back first, because a
    forked process would use it without mapping any.
    """
    give_back_freed_memory()
    with contextlib.suppress(OSError, ValueError):
        present = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        _, hard = resource.getrlimit(resource.RLIMIT_AS)
        wanted = present + extra
        if hard == resource.RLIM_INFINITY or wanted < hard:
            resource.setrlimit(resource.RLIMIT_AS, (wanted, hard))


def give_back_freed_memory() -> None:
    """Give the system what this process freed and keeps; forking takes about 20 ms for each GB that it holds."""
    if sys.platform == "linux" and hasattr(libc := ctypes.CDLL(None), "malloc_trim"):
        libc.malloc_trim(0)
