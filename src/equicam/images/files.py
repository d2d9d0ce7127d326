"""Files on a disk or at a URL, which anybody may have written: regular ones only, read once and up to a limit.

A URL is s3://, gs://, memory:// or any protocol of fsspec; a `RemotePath` has the few methods of a Path that are needed.
"""

import contextlib
import hashlib
import io
import os
import re
import stat
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import urlsplit

import fsspec
from fsspec.core import url_to_fs

from equicam.errors import EquicamError
from equicam.images.limited import restart_clock

RETRY_WAITS_S = (0.5, 2.0)
"""Seconds to wait before each retry of a request that failed."""
ALLOW_SCHEMES = "EQUICAM_ALLOW_SCHEMES"
"""The environment variable with the protocols that image lists may name, besides that of the list itself."""
LOCAL = ("file", "local")
"""The protocols of files on this machine."""
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")


@dataclass(frozen=True)
class FileStat:
    """Size and modification time of a file, None where they are unknown; while both stay, so does the content."""

    bytes: int | None
    mtime_ns: int | None


UNKNOWN = FileStat(None, None)


@dataclass(frozen=True)
class RemotePath:
    """A file or folder at a URL."""

    url: str
    stat: FileStat | None = field(default=None, compare=False)  # from a listing: saves a request per file
    allowed: bool = field(default=True, compare=False)  # False: only a list names it; never requested

    def __str__(self) -> str:
        return self.url

    def __truediv__(self, child: str) -> "RemotePath":
        """A path below this one."""
        return RemotePath(f"{self.url.rstrip('/')}/{child}")

    @property
    def name(self) -> str:
        """The last component of the URL."""
        return self._path.name

    @property
    def stem(self) -> str:
        """The name without its suffix."""
        return self._path.stem

    @property
    def suffix(self) -> str:
        """The suffix of the name."""
        return self._path.suffix

    @property
    def parent(self) -> "RemotePath":
        """The folder that contains it."""
        protocol, _, path = self.url.partition("://")
        return RemotePath(f"{protocol}://{path.rstrip('/').rpartition('/')[0]}")

    @cached_property
    def _path(self) -> PurePosixPath:
        return PurePosixPath(self.url.partition("://")[2])

    def absolute(self) -> "RemotePath":
        """Itself: a URL is absolute."""
        return self

    def is_file(self) -> bool:
        """Whether it is an existing file."""
        return bool(self._request("isfile"))

    def is_dir(self) -> bool:
        """Whether it is an existing folder."""
        return bool(self._request("isdir"))

    def read_bytes(self, count: int | None = None) -> bytes:
        """The whole file or its first bytes, in one request where the store supports it."""
        found: bytes = self._request("cat_file", **({} if count is None else {"start": 0, "end": count}))
        return found

    def subfolders(self) -> list[str]:
        """The sorted names of the folders directly inside, hidden ones excluded."""
        entries = (entry for entry in self._request("ls", detail=True) if entry["type"] == "directory")
        names = (PurePosixPath(entry["name"]).name for entry in entries)
        return sorted(name for name in names if not name.startswith("."))

    def file_stat(self) -> FileStat:
        """Size and modification time, from the listing if it came from one."""
        return self.stat or _file_stat(self._request("info"))

    def list_files(self) -> "list[tuple[tuple[str, ...], RemotePath]]":
        """Every file below, with its path relative to here as components."""
        found, listing = [], self._request("find", detail=True)
        root = self.file_system()[1].rstrip("/")
        for path, info in listing.items():
            parts = tuple(path[len(root) :].strip("/").split("/"))
            if all(parts):
                found.append((parts, replace(self / "/".join(parts), stat=_file_stat(info))))
        return sorted(found, key=lambda pair: pair[0])

    def _request(self, method: str, **options: Any) -> Any:
        """Call the file system, with retries; every failure is an OSError or, before any request, an EquicamError."""
        for wait in (*RETRY_WAITS_S, None):
            try:
                system, path = self.file_system()
                return getattr(system, method)(path, **options)
            except (EquicamError, FileNotFoundError, PermissionError, IsADirectoryError, NotADirectoryError):
                raise
            except Exception as error:  # every store has exceptions of its own
                if wait is None:
                    raise OSError(f"{type(error).__name__}: {error}") from error
                time.sleep(wait)
        return None

    def file_system(self) -> tuple[fsspec.AbstractFileSystem, str]:
        """The store and the path in it; fsspec caches one instance per process, also after a fork."""
        protocol = scheme(self.url)
        if not self.allowed:
            needs = f"permission to open {protocol}://, because only a list names it"
            fix = f"{ALLOW_SCHEMES}={protocol}, or a copy on a disk"
            raise EquicamError(f"image {self.url!r}", needs, "none", fix)
        try:
            system, path = url_to_fs(protocol + self.url[len(protocol) :])
        except ImportError as error:
            package = getattr(error.__cause__ or error, "name", None) or protocol
            needs, got, fix = f"the package {package}", "no such package", f"pip install {package}"
            raise EquicamError(f"{protocol}://", needs, got, fix) from error
        except ValueError as error:
            needs, got, fix = "a protocol that fsspec knows", f"{protocol}://", "s3://, gs:// or a path"
            raise EquicamError("a URL", needs, got, fix) from error
        return system, path


AnyPath = Path | RemotePath


def is_url(text: object) -> bool:
    """Whether the text starts with a protocol, as in s3://."""
    return _URL.match(str(text)) is not None


def scheme(url: object) -> str:
    """The protocol of a URL in small letters; "file" for a local path."""
    return str(url).partition("://")[0].lower() if is_url(url) else "file"


def may_open(url: str, source: object) -> bool:
    """Whether a URL that a source names may be opened: by the source's own protocol, or one the user allowed.

    A chain of protocols (zip://…::https://…) may not.
    """
    allowed = {*(LOCAL if scheme(source) in LOCAL else (scheme(source),))}
    allowed |= {*os.environ.get(ALLOW_SCHEMES, "").replace(",", " ").lower().split()}
    return "::" not in url and scheme(url) in allowed


def is_allowed(path: AnyPath) -> bool:
    """Whether a path may be opened; a URL that only a list names may not."""
    return isinstance(path, Path) or path.allowed


def as_path(text: str | Path | RemotePath) -> AnyPath:
    """A local or remote path; a URL with a password is refused, because results contain the URL."""
    if isinstance(text, RemotePath):
        return text
    if not is_url(text):
        return Path(text)
    if scheme(text) in LOCAL and "::" not in str(text):
        return Path(str(text).partition("://")[2])
    try:
        password = urlsplit(str(text)).password
    except ValueError as error:
        raise EquicamError("a URL", "a host and a path", error, "s3://bucket/folder") from error
    if password:
        needs = "no password in it, because it is written into results"
        raise EquicamError("a URL", needs, "one with a password", "the settings of the store's own library")
    return RemotePath(str(text))


def file_stat(path: AnyPath | str) -> FileStat:
    """Size and modification time of a file; both None where it cannot be read. Text is a path on this machine."""
    try:
        if isinstance(path, RemotePath):
            return path.file_stat()
        found = os.stat(path)  # noqa: PTH116  # a Path per file is slow for a million files
    except (OSError, ValueError):
        return UNKNOWN
    return FileStat(found.st_size, found.st_mtime_ns)


def file_stats(paths: Sequence[AnyPath]) -> list[FileStat]:
    """`file_stat` of many files, requested concurrently."""
    with ThreadPoolExecutor(16) as pool:
        return list(pool.map(file_stat, paths))


def _file_stat(info: dict[str, Any]) -> FileStat:
    """Stores name the modification time differently, and some have none."""
    names = ("mtime", "LastModified", "last_modified", "updated", "modified", "created")
    when: Any = next((info[name] for name in names if info.get(name) is not None), None)
    size = mtime_ns = None
    with contextlib.suppress(ValueError, TypeError, OverflowError):  # a time in words, say, or none
        when = datetime.fromisoformat(when) if isinstance(when, str) else when
        mtime_ns = int(float(when.timestamp() if isinstance(when, datetime) else when) * 1e9)
    with contextlib.suppress(ValueError, TypeError, OverflowError):
        size = int(info["size"]) if info.get("size") is not None else None
    return FileStat(size, mtime_ns)


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
            remote = file_stat(path)
            refuse_large(remote.bytes or 0, what, limit)
            data = path.read_bytes()
            refuse_large(len(data), what, limit)
            return data, remote
        with open_regular(path, what) as file:
            found = os.fstat(file.fileno())
            refuse_large(found.st_size, what, limit)
            data = file.read(found.st_size + 1)  # a file that grows meanwhile is not followed
        return data, FileStat(found.st_size, found.st_mtime_ns)
    except EquicamError:
        raise
    except FileNotFoundError as error:
        raise EquicamError(what, "an existing file", "No such file", "its full path") from error
    except Exception as error:
        got = str(error) or type(error).__name__
        raise EquicamError(what, "a file that can be read whole", got, "a fresh copy of it") from error


def file_digest(path: Path) -> str:
    """SHA-256 of a file."""
    with open_regular(path, str(path)) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def open_regular(path: Path, what: str) -> io.BufferedReader:
    """Open a regular file to read it; a pipe, which would block, or a device, which may never end, is refused."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    try:
        refuse_irregular(os.fstat(descriptor), what)
    except EquicamError:
        os.close(descriptor)
        raise
    return open(descriptor, "rb")  # noqa: PTH123


def refuse_irregular(found: os.stat_result, what: str) -> None:
    """Raise an EquicamError unless the file is a regular one."""
    if not stat.S_ISREG(found.st_mode):
        kind = _KINDS.get(stat.S_IFMT(found.st_mode), "a special file")
        fix = "its images one by one, or equicam audit" if kind == "a folder" else "a copy in a regular file"
        raise EquicamError(what, "a file", kind, fix)


def refuse_large(size: int, what: str, limit: int) -> None:
    """Raise an EquicamError for more bytes than the limit."""
    if size > limit:
        raise EquicamError(what, f"at most {limit:,} bytes", f"{size:,}", "a smaller file")
