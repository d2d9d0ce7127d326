"""The one place where files are opened: processes with limits of time and memory, without network and programs.

Anybody may have written a file, and the libraries that read it are written in C. So this process opens none of them: a
child does, whose death is an error that names the file. A child is an interpreter of its own, which has no memory, thread, lock or
descriptor of its parent. It may map 4 GiB more than it starts with, has two minutes for each answer, and cannot connect
anywhere or start a program.

    upright = limited.call(decode, data, what)

Where a process is itself such a child, and where there is no fork (on Windows), the function is simply called.
"""

import atexit
import contextlib
import ctypes
import errno
import logging
import math
import multiprocessing
import os
import pickle
import platform
import resource
import select
import signal
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from logging.handlers import QueueHandler
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from queue import SimpleQueue
from types import GeneratorType
from typing import Any, NoReturn, ParamSpec, TypeVar

from equicam.errors import EquicamError, error_text

MAX_SECONDS = 120.0
"""For one image, raster or batch of a list: the largest images allowed take a fifth of it."""
MAX_MEMORY_BYTES = 4 * 2**30
"""Of a child, beyond what it starts with; the largest images allowed need up to 3.4 GiB."""
LIMITS = "EQUICAM_DECODE_LIMITS"
"""The environment variable that multiplies both, for a slow store or a preprocessing of one's own."""
ATTEMPTS = 3
"""Times a file is tried before an error says that it kills the process: others may have killed it."""
MAX_IDLE = 16
"""Children kept for the next file; one thread at a time uses each. Starting one takes about half a second."""
PR_SET_PDEATHSIG, PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS = 1, 22, 38
_ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
"""Each thread of a numerical library maps memory."""

P = ParamSpec("P")
T = TypeVar("T")


class TimeLimitError(EquicamError):
    """A file that takes longer to read than it may."""


class KilledError(EquicamError):
    """A file whose reading ends the process that reads it."""


def in_child() -> bool:
    """Whether this process is one that opens files for another."""
    return _in_child


def inside() -> bool:
    """Whether files are opened in this process: it is such a child, or there is no fork."""
    return _in_child or not hasattr(os, "fork")


def call(function: Callable[P, T], *arguments: P.args, **options: P.kwargs) -> T:
    """What a function of a module returns in a child that stays for the next call; its exceptions are raised here."""
    return _call(partial(function, *arguments, **options), network=False)


def call_connected(function: Callable[P, T], *arguments: P.args, **options: P.kwargs) -> T:
    """The same in a child that may connect: for rasters at a URL, of which only parts are fetched."""
    return _call(partial(function, *arguments, **options), network=True)


def stream(function: Callable[P, Iterator[T]], *arguments: P.args, **options: P.kwargs) -> Iterator[T]:
    """What a generator of a module yields in a child; the limit of time is for each value."""
    if inside():
        yield from function(*arguments, **options)
    else:
        yield from _answers(partial(function, *arguments, **options))


def limits() -> tuple[float, int]:
    """Seconds and bytes that a child has."""
    return MAX_SECONDS * limits_scale(), int(MAX_MEMORY_BYTES * limits_scale())


def limits_scale() -> float:
    """The factor of the limits of time and memory that the user sets in the environment."""
    text = os.environ.get(LIMITS) or "1"
    with contextlib.suppress(ValueError):
        if 0 < float(text) < math.inf:
            return float(text)
    raise EquicamError(LIMITS, "a factor above 0", repr(text), f"{LIMITS}=4")


def enter(memory_bytes: int, *, network: bool = False) -> None:
    """Make this process one that opens files: what it may map, connect to and start is limited until it ends."""
    global _in_child
    _in_child = True
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # only the parent handles Ctrl-C
    _limit_memory(memory_bytes)
    forbid(network=network)


def end_idle() -> None:
    """End the children that wait for a call."""
    with _lock:
        while _idle:
            _idle.pop().end()


def call_alone(function: Callable[..., Any], *arguments: Any) -> tuple[Any, int | None]:
    """What any function returns in a forked process of its own, and that process's exit code; None if it died."""
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=lambda: sender.send(function(*arguments)))
    process.start()
    sender.close()
    found = None
    with receiver, contextlib.suppress(EOFError, OSError):
        found = receiver.recv()
    process.join()
    return found, process.exitcode


def end_with_parent(parent: int) -> None:
    """Kill this process when its parent ends, however it ends; only the parent handles Ctrl-C."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def limit_time(seconds: int | float) -> None:
    """End this process by SIGALRM after so many seconds, even inside C code; 0 takes the limit back."""
    # the signal's default action ends the process; a handler in Python would wait for C code to return
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGALRM})
    signal.setitimer(signal.ITIMER_REAL, seconds)


def _limit_memory(extra: int) -> None:
    """Let this process map no more than `extra` bytes beyond what it maps now; more raises a MemoryError.

    Only Linux reports and limits what a process maps. Memory that a parent freed and kept is given back first, because a
    forked process would use it without mapping any.
    """
    give_back_freed_memory()
    with contextlib.suppress(OSError, ValueError):
        present = _mapped_bytes()
        _, hard = resource.getrlimit(resource.RLIMIT_AS)
        wanted = present + extra
        if present and (hard == resource.RLIM_INFINITY or wanted < hard):
            resource.setrlimit(resource.RLIMIT_AS, (wanted, hard))


def _mapped_bytes() -> int:
    """What this process maps; 0 where there is no /proc."""
    with contextlib.suppress(OSError):
        return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    return 0


def restart_clock() -> None:
    """Give this answer all its seconds again: a data set of a thousand files has them for each."""
    if _seconds:
        limit_time(_seconds)


def give_back_freed_memory() -> None:
    """Give the system what this process freed and keeps; forking takes about 20 ms for each GB that it holds."""
    if sys.platform == "linux" and hasattr(libc := ctypes.CDLL(None), "malloc_trim"):
        libc.malloc_trim(0)


_SYSTEM_CALLS = {
    # audit number of the machine; socket and connect; execve, execveat, ptrace and io_uring_setup
    "x86_64": (0xC000003E, (41, 42), (59, 322, 101, 425)),
    "aarch64": (0xC00000B7, (198, 203), (221, 281, 117, 425)),
}


def forbid(*, network: bool) -> None:
    """Let the kernel refuse connections (unless `network`) and programs to this process and its children, on Linux.

    A reader that is talked into following an address or starting a helper gets "operation not permitted".
    """
    if sys.platform != "linux" or platform.machine() not in _SYSTEM_CALLS:
        return
    machine, connecting, starting = _SYSTEM_CALLS[platform.machine()]
    refused = [*starting, *(() if network else connecting)]
    load, equal, at_least, answer = 0x20, 0x15, 0x35, 0x06  # instructions of the kernel's filters
    allow, refuse = 0x7FFF0000, 0x00050000 | errno.EPERM
    rest = len(refused)
    program = [
        (load, 0, 0, 4),  # the machine: calls of another kind have other numbers
        (equal, 0, rest + 3, machine),
        (load, 0, 0, 0),  # the number of the call
        (at_least, rest + 1, 0, 0x40000000),
        *((equal, rest - i, 0, number) for i, number in enumerate(refused)),
        (answer, 0, 0, allow),
        (answer, 0, 0, refuse),
    ]
    # struct sock_filter: code, where to if yes, where to if no, operand; struct sock_fprog: length, address
    code = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *line) for line in program))
    header = struct.pack("@HP", len(program), ctypes.addressof(code))
    prctl = ctypes.CDLL(None).prctl
    # a kernel without filters refuses; the limits of the libraries themselves remain
    if prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0:
        prctl(PR_SET_SECCOMP, 2, header, 0, 0)


class _DiedError(Exception):
    """A child that ended before it answered."""


class _Child:
    """A process that answers calls, one after another."""

    def __init__(self, *, network: bool) -> None:
        self.network, self.calls, self.is_full = network, 0, False
        self._place: tuple[str | None, dict[str, str]] | None = None  # its folder and environment
        self._ours, theirs = multiprocessing.Pipe()
        code = (
            f"import sys; sys.path[:] = {[one for one in sys.path if isinstance(one, str)]!r}\n"
            f"from equicam.images.limited import serve\n"
            f"serve({theirs.fileno()}, {limits()[1]}, network={network})"
        )
        # not a multiprocessing.Process: a daemon may not start one, and forks keep their parent's locks
        with theirs:
            self.process = subprocess.Popen(  # noqa: S603  # ourselves
                [sys.executable, "-c", code], pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL,
                env=os.environ | _ONE_THREAD,
            )  # fmt: skip

    def request(self, function: Callable[[], Any], seconds: float) -> Iterator[tuple[str, Any]]:
        """Kinds and values of its answers, until the last."""
        self.calls += 1
        place = (_folder(), dict(os.environ))
        news, self._place = place if place != self._place else None, place
        request: Any = ForkingPickler.dumps((function, seconds, news))
        kind = _NEXT
        while kind == _NEXT:
            try:
                if request:
                    self._ours.send_bytes(request)
                    request = None
                answer = self._ours.recv_bytes()
            except (EOFError, OSError) as error:
                raise _DiedError from error
            kind, value, records, self.is_full = pickle.loads(answer)  # noqa: S301  # of our own child
            for record in records:
                logging.getLogger(record.name).handle(record)
            yield kind, value

    def end(self) -> int:
        """End it at once; the signal that had ended it before, if it was dead."""
        self._ours.close()
        self.process.kill()
        return -self.process.wait()


_NEXT, _VALUE, _DONE, _FAILED, _NO_MEMORY = "next", "value", "done", "failed", "no memory"
_in_child = False
_seconds = 0.0
_full_bytes = 0  # mapped by this child: with more it is not kept, so that the next file has all its memory
# what a child would log, which its parent logs with the next answer
_records = SimpleQueue[logging.LogRecord]()
_idle: list[_Child] = []
_lock = threading.Lock()
atexit.register(end_idle)


def _forget_idle() -> None:
    """In a forked process: they are its parent's."""
    global _lock
    _lock = threading.Lock()
    for child in _idle:
        child.process.returncode = 0
    _idle.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_idle)


def _folder() -> str | None:
    """The folder that relative paths start from; None if it was removed."""
    with contextlib.suppress(OSError):
        return os.getcwd()  # noqa: PTH109
    return None


def _call(function: "partial[T]", *, network: bool) -> T:
    if inside():
        return function()
    (found,) = _answers(function, network=network)
    return found  # type: ignore[no-any-return]


def _answers(function: "partial[Any]", *, network: bool = False) -> Iterator[Any]:
    """What a child answers to a call: one value, or those of a generator."""
    begun, seconds = False, limits()[0]
    for attempt in range(1, ATTEMPTS + 1):
        child, keep = _borrow(network=network, fresh=attempt > 1), False
        try:
            for kind, value in child.request(function, seconds):
                keep = kind in (_VALUE, _DONE, _FAILED) and not child.is_full
                if kind == _NO_MEMORY:
                    if child.calls > 1 and not begun:
                        break  # what it had read before may have taken the memory
                    raise _no_memory(function, value)
                if kind == _FAILED:
                    raise value
                if kind != _DONE:
                    begun = True
                    yield value
                if kind != _NEXT:
                    return
        except _DiedError:
            ended_by = child.end()
            if ended_by == signal.SIGALRM or begun or attempt == ATTEMPTS:
                what = _name(function)
                if ended_by == signal.SIGALRM:
                    needs, fix = f"to be read within {seconds:g} s", f"{LIMITS}=4, if you trust it"
                    raise TimeLimitError(what, needs, "more time", fix) from None
                got = "the end of the process that reads it"
                raise KilledError(what, "to be read", got, "a fresh copy of it") from None
        finally:
            with _lock:
                if keep := keep and len(_idle) < MAX_IDLE:
                    _idle.append(child)
            if not keep:
                child.end()


def _borrow(*, network: bool, fresh: bool) -> _Child:
    with _lock:
        for place, child in enumerate(() if fresh else _idle):
            if child.network == network:
                return _idle.pop(place)
    return _Child(network=network)


def _name(function: "partial[Any]") -> str:
    """What a call reads."""
    paths = (a if isinstance(a, str | os.PathLike) else getattr(a, "path", None) for a in function.args)
    what = next((str(path) for path in paths if path), "a file")
    return what if " " in what else f"file {what!r}"


def _no_memory(function: "partial[Any]", error: Exception) -> EquicamError:
    if not isinstance(error, EquicamError):
        got, fix = "a file too large for it", "a smaller or tiled copy"
        error = EquicamError(_name(function), "less memory to be read", got, fix)
    error.__cause__ = MemoryError()
    return error


def serve(descriptor: int, memory: int, *, network: bool) -> NoReturn:
    """The life of a child: it answers until its parent has gone."""
    import equicam.images.items  # noqa: F401  # so that the libraries themselves are not counted

    log = logging.getLogger("equicam")
    log.handlers, log.propagate = [QueueHandler(_records)], False
    enter(memory, network=network)
    global _full_bytes
    _full_bytes = _mapped_bytes() + memory // 8
    threading.Thread(target=_end_with_connection, args=(descriptor,), daemon=True).start()
    with contextlib.suppress(BaseException), Connection(descriptor) as connection:
        while True:
            function, seconds, news = connection.recv()
            if news is not None:
                folder, environment = news
                os.environ.clear()
                os.environ.update(environment)
                if folder is not None:
                    os.chdir(folder)
            _answer(connection, seconds, function)
    os._exit(0)


def _end_with_connection(descriptor: int) -> None:
    """End this process when its parent has gone, whatever it is doing."""
    hang_up = select.poll()
    hang_up.register(descriptor, 0)
    hang_up.poll()
    os._exit(1)


def _answer(connection: Connection, seconds: float, function: Callable[[], Any]) -> None:
    global _seconds
    _seconds = seconds
    try:
        limit_time(seconds)
        found = function()
        if isinstance(found, GeneratorType):
            for value in found:
                _send(connection, _NEXT, value)
                limit_time(seconds)
            found = None
            _send(connection, _DONE, None)
        else:
            _send(connection, _VALUE, found)
    except Exception as error:  # noqa: BLE001  # whatever it is, the parent raises it
        limit_time(0)
        _send(connection, _NO_MEMORY if is_memory_error(error) else _FAILED, error)


def is_memory_error(error: BaseException) -> bool:
    """Whether there was too little memory."""
    return isinstance(error, MemoryError) or isinstance(error.__cause__, MemoryError)


def _send(connection: Connection, kind: str, value: Any) -> None:
    records = [_records.get() for _ in range(_records.qsize())]
    try:
        data = ForkingPickler.dumps((kind, value, records, _mapped_bytes() > _full_bytes))
    except MemoryError:
        data = ForkingPickler.dumps((_NO_MEMORY, MemoryError(), (), True))
    except Exception as error:  # noqa: BLE001  # an exception that cannot be pickled
        text = f"{type(value).__name__}: {error_text(value) if isinstance(value, BaseException) else error}"
        data = ForkingPickler.dumps((_FAILED, OSError(text), (), False))
    limit_time(0)  # the parent may take its time
    connection.send_bytes(data)
