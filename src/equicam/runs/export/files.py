"""Names and files of an export: safe on any system, written whole, and over another file only by force."""

import hashlib
import re
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from equicam.errors import EquicamError
from equicam.images.digests import file_digest
from equicam.images.items import valid_utf8
from equicam.shards import TEMPORARY_SUFFIX

MAX_NAME_CHARS = 80
RESERVED = re.compile(r"(con|prn|aux|nul|com\d|lpt\d)(\..*)?", re.IGNORECASE)  # on Windows


def safe_names(ids: Sequence[str]) -> dict[str, str]:
    """A file name for each id: letters, digits, dots, - and _; a digest is added where it would not be the id's alone."""
    plain = {one: _safe(one) for one in ids}
    count = Counter(name.casefold() for name in plain.values())
    return {
        one: name
        if name == one and count[name.casefold()] == 1
        else f"{name}-{hashlib.sha256(one.encode()).hexdigest()[:8]}"
        for one, name in plain.items()
    }


def _safe(text: str) -> str:
    name = re.sub(r"[^A-Za-z0-9._-]+", "_", text.replace("\\", "/").rpartition("/")[2]).strip("._-")
    name = name[-MAX_NAME_CHARS:].lstrip("._-")
    return f"_{name}" if not name or RESERVED.fullmatch(name) else name


class ExportFolder:
    """A folder that exports write into, which may hold files of others and verdicts that were drawn into exports."""

    def __init__(self, folder: Path, *, force: bool = False) -> None:
        self.path, self._force = folder, force
        self.written: dict[str, str] = {}  # SHA-256 by name
        if folder.is_symlink() or (folder.exists() and not folder.is_dir()):
            raise EquicamError(
                valid_utf8(str(folder)), needs="to be a folder", got="a link or a file", fix="another --out"
            )
        folder.mkdir(parents=True, exist_ok=True)

    def refuse_existing(self, names: Sequence[str]) -> None:
        """Refuse names that are taken, unless files are to be replaced by force."""
        for path in (self.path / name for name in names):
            if path.is_dir() or (not self._force and (path.is_symlink() or path.exists())):
                raise EquicamError(
                    valid_utf8(str(path)), needs="to be absent, because verdicts may have been drawn into it",
                    got="a folder" if path.is_dir() else "an existing file",
                    fix="another --out" if path.is_dir() else "--force to replace it, or another --out",
                )  # fmt: skip

    @contextmanager
    def writing(self, name: str) -> Iterator[Path]:
        """A path to write to; the file appears under its name when it is whole."""
        self.refuse_existing([name])
        with tempfile.TemporaryDirectory(dir=self.path, prefix=".export-", suffix=TEMPORARY_SUFFIX) as folder:
            temporary = Path(folder) / name
            yield temporary
            digest = file_digest(temporary)
            self.refuse_existing([name])  # it may have come while ours was written
            temporary.replace(self.path / name)
        self.written[name] = digest

    @property
    def files(self) -> tuple[Path, ...]:
        """The files that this export wrote."""
        return tuple(self.path / name for name in self.written)
