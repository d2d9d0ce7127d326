"""Pictures by URL: s3://, gs://, memory://, whatever fsspec knows; a place with the few verbs of a Path we need."""

import io
import posixpath
import re
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import fsspec

from equicam.errors import EquicamError

WAITS = (0.5, 2.0)
"""Seconds before a store that failed is asked again."""
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")


@dataclass(frozen=True)
class Stamp:
    """Size and time of a file; while they stay, its content is taken to stay. Without a time, nobody knows."""

    bytes: int | None
    mtime_ns: int | None


@dataclass(frozen=True)
class Remote:
    """A file or folder at a URL."""

    url: str
    known: Stamp | None = field(
        default=None, compare=False
    )  # from a listing: spares a question for each file
    held: bytes | None = field(default=None, compare=False, repr=False)  # what is in it, once fetched

    def __str__(self) -> str:
        return self.url

    def __truediv__(self, below: str) -> "Remote":
        """A path beneath this one, or a URL of its own."""
        return Remote(below if is_url(below) else f"{self.url.rstrip('/')}/{below}")

    @property
    def name(self) -> str:
        """The last name in it."""
        return posixpath.basename(self.url.rstrip("/"))

    @property
    def stem(self) -> str:
        """The name without its suffix."""
        return posixpath.splitext(self.name)[0]

    @property
    def suffix(self) -> str:
        """The suffix of the name."""
        return posixpath.splitext(self.name)[1]

    @property
    def parent(self) -> "Remote":
        """The folder it is in."""
        start, _, path = self.url.partition("://")
        return Remote(f"{start}://{posixpath.dirname(path.rstrip('/'))}")

    def absolute(self) -> "Remote":
        """Itself."""
        return self

    def is_file(self) -> bool:
        """Whether a file is there."""
        found: bool = self._ask("isfile")
        return found

    def is_dir(self) -> bool:
        """Whether a folder is there."""
        found: bool = self._ask("isdir")
        return found

    def read_bytes(self) -> bytes:
        """All of the file, in one request where the store can do that."""
        found: bytes = self._ask("cat_file") if self.held is None else self.held
        return found

    def fetched(self) -> "Remote":
        """The same with its bytes in memory, for who reads them twice."""
        return replace(self, held=self.read_bytes())

    def folders(self) -> list[str]:
        """The names of the folders in it, sorted, without hidden ones."""
        found = (entry for entry in self._ask("ls", detail=True) if entry["type"] == "directory")
        names = (posixpath.basename(entry["name"].rstrip("/")) for entry in found)
        return sorted(name for name in names if not name.startswith("."))

    def stamp(self) -> Stamp:
        """Size and time, as listed or asked for."""
        return self.known or _stamp(self._ask("info"))

    def below(self) -> "list[tuple[tuple[str, ...], Remote]]":
        """Every file beneath it, by its names from here on; hidden ones are left out."""
        system = self._system()
        root = system._strip_protocol(self.url).rstrip("/")
        found = []
        for path, info in self._ask("find", detail=True).items():
            parts = tuple(path[len(root) :].strip("/").split("/"))
            if all(parts) and not any(part.startswith(".") for part in parts):
                place = Remote((self / "/".join(parts)).url, _stamp(info))
                found.append((parts, place))
        return sorted(found, key=lambda pair: pair[0])

    def _ask(self, verb: str, **options: Any) -> Any:
        """What the file system says; a network that fails is asked again, and whatever it raises is an OSError."""
        system = self._system()
        for wait in (*WAITS, None):
            try:
                return getattr(system, verb)(system._strip_protocol(self.url), **options)
            except (FileNotFoundError, PermissionError, IsADirectoryError, NotADirectoryError):
                raise
            except Exception as error:  # every store has errors of its own
                if wait is None:
                    raise OSError(f"{type(error).__name__}: {error}") from error
                time.sleep(wait)
        return None

    def _system(self) -> Any:
        # fsspec keeps one for each process: a forked one gets its own
        protocol = self.url.partition("://")[0].lower()
        try:
            return fsspec.filesystem(protocol)
        except ImportError as error:
            package = getattr(error.__cause__ or error, "name", None) or protocol
            raise EquicamError(
                f"{protocol}://",
                needs=f"the package {package}",
                got="no such package",
                fix=f"pip install {package}",
            ) from error
        except ValueError as error:
            raise EquicamError(
                "a URL",
                needs="a protocol that fsspec knows",
                got=f"{protocol}://",
                fix="s3://, gs:// or a path",
            ) from error


Place = Path | Remote


def is_url(text: object) -> bool:
    """Whether it begins as a URL does."""
    return _URL.match(str(text)) is not None


def place(text: str | Path | Remote) -> Place:
    """A path, or a place at a URL; a password in it would be written into every row, and is refused."""
    if isinstance(text, Remote) or not is_url(text):
        return text if isinstance(text, Remote) else Path(text)
    if urlsplit(str(text)).password:
        raise EquicamError(
            "a URL", needs="no password in it, for it is written into results", got="one with a password",
            fix="the settings of the store's own library",
        )  # fmt: skip
    return Remote(str(text))


def opened(path: Place | str) -> Any:
    """A file to read from: a path itself, or what is at a URL, in memory."""
    return io.BytesIO(path.read_bytes()) if isinstance(path, Remote) else path


def stamp(path: Place) -> Stamp:
    """Size and time of a file; nothing where there is none."""
    try:
        if isinstance(path, Remote):
            return path.stamp()
        there = path.stat()
    except (OSError, ValueError):
        return Stamp(None, None)
    return Stamp(there.st_size, there.st_mtime_ns)


def stamps(paths: Sequence[Place]) -> list[Stamp]:
    """The same of many, asked for side by side."""
    with ThreadPoolExecutor(16) as pool:
        return list(pool.map(stamp, paths))


def _stamp(info: dict[str, Any]) -> Stamp:
    """Stores name the time differently, and some have none."""
    names = ("mtime", "LastModified", "last_modified", "updated", "modified", "created")
    when = next((info[name] for name in names if info.get(name) is not None), None)
    if isinstance(when, str):
        when = datetime.fromisoformat(when)
    if isinstance(when, datetime):
        when = when.timestamp()
    size = info.get("size")
    return Stamp(None if size is None else int(size), None if when is None else int(float(when) * 1e9))
