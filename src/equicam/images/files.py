"""Bytes of files that anybody may have written: regular files only, read once and up to a limit."""

import io
import os
import stat
from pathlib import Path

from equicam.errors import EquicamError
from equicam.images.limited import restart_clock
from equicam.images.remote import AnyPath, FileStat, RemotePath, file_stat

MAX_IMAGE_BYTES = 2**30
"""Larger image files are refused; the most pixels that are decoded need 0.7 GiB as uncompressed 32-bit floats."""
MAX_LIST_BYTES = 2**26
"""The same for the lists and annotations of published data sets; the largest has 2 MB."""

_KINDS = {
    stat.S_IFDIR: "a folder", stat.S_IFIFO: "a named pipe", stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a character device", stat.S_IFBLK: "a block device",
}  # fmt: skip


def read_file(path: AnyPath, *, what: str, limit: int) -> tuple[bytes, FileStat]:
    """The bytes of a regular file, with size and time of the very file they were read from.

    Every failure is an EquicamError, in which `what` names the file.
    """
    restart_clock()
    try:
        if isinstance(path, RemotePath):
            return _read_remote(path, what, limit)
        with open_regular(path, what) as file:
            found = os.fstat(file.fileno())
            refuse_large(found.st_size, what, limit)
            data = file.read(found.st_size + 1)  # a file that grows meanwhile is not followed
        return data, FileStat(found.st_size, found.st_mtime_ns)
    except EquicamError:
        raise
    except FileNotFoundError as error:
        raise EquicamError(what, needs="an existing file", got="No such file", fix="its full path") from error
    except IsADirectoryError as error:
        raise _irregular(what, "a folder") from error
    except Exception as error:
        raise EquicamError(
            what, needs="a file that can be read whole", got=str(error) or type(error).__name__, fix="a fresh copy of it",
        ) from error  # fmt: skip


def open_regular(path: Path, what: str) -> io.BufferedReader:
    """Open a regular file to read it; a pipe, which would block, or a device, which may never end, is refused."""
    file = open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC), "rb")  # noqa: PTH123, SIM115
    try:
        refuse_irregular(os.fstat(file.fileno()), what)
    except EquicamError:
        file.close()
        raise
    return file


def refuse_irregular(found: os.stat_result, what: str) -> None:
    """Raise an EquicamError unless the file is a regular one."""
    if not stat.S_ISREG(found.st_mode):
        raise _irregular(what, _KINDS.get(stat.S_IFMT(found.st_mode), "a special file"))


def _read_remote(path: RemotePath, what: str, limit: int) -> tuple[bytes, FileStat]:
    found = file_stat(path)
    refuse_large(found.bytes or 0, what, limit)
    data = path.read_bytes()
    refuse_large(len(data), what, limit)
    return data, found


def refuse_large(size: int, what: str, limit: int) -> None:
    """Raise an EquicamError for more bytes than the limit."""
    if size > limit:
        raise EquicamError(what, needs=f"at most {limit:,} bytes", got=f"{size:,}", fix="a smaller file")


def _irregular(what: str, kind: str) -> EquicamError:
    fix = "its images one by one, or equicam audit" if kind == "a folder" else "a copy in a regular file"
    return EquicamError(what, needs="a file", got=kind, fix=fix)
