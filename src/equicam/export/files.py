"""Names and files of an export: safe on any system, written whole, and never over something that is not ours."""

import hashlib
import json
import re
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from equicam.data.digests import file_digest
from equicam.data.items import valid_utf8
from equicam.errors import EquicamError
from equicam.shards import TEMPORARY_SUFFIX, read_json, write_atomic

LIST_FILE = "exports.json"
"""SHA-256 of every file that exports wrote into a folder: a file that differs from it is somebody's work."""
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
    """A folder that exports write into, which may hold files of others."""

    def __init__(self, folder: Path, *, fix: str = "another --out") -> None:
        self.path, self._fix = folder, fix
        self.written: dict[str, str] = {}  # by this export
        if folder.is_symlink() or (folder.exists() and not folder.is_dir()):
            raise EquicamError(
                valid_utf8(str(folder)), needs="to be a folder", got="a link or a file", fix="another --out"
            )
        folder.mkdir(parents=True, exist_ok=True)
        listed = folder / LIST_FILE
        self._known = read_json(listed) if listed.is_file() else {}

    def refuse_foreign(self, names: Sequence[str]) -> None:
        """Refuse names of files that we did not write, or that were changed since."""
        for name in names:
            path = self.path / name
            if path.is_symlink() or path.exists():
                ours = path.is_file() and not path.is_symlink() and name in self._known
                if not ours or file_digest(path) != self._known[name]:
                    raise EquicamError(
                        valid_utf8(str(path)), needs="to be absent, or as an export wrote it",
                        got="a file that was changed since" if ours else "a file of another origin", fix=self._fix,
                    )  # fmt: skip

    @contextmanager
    def writing(self, name: str) -> Iterator[Path]:
        """A path to write to; the file appears under its name when it is whole."""
        self.refuse_foreign([name])
        with tempfile.TemporaryDirectory(dir=self.path, prefix=".export-", suffix=TEMPORARY_SUFFIX) as folder:
            temporary = Path(folder) / name
            yield temporary
            digest = file_digest(temporary)
            temporary.replace(self.path / name)
        self.written[name] = digest
        self._known[name] = digest
        write_atomic(self.path / LIST_FILE, json.dumps(self._known, indent=1, sort_keys=True).encode())

    @property
    def files(self) -> tuple[Path, ...]:
        """The files that this export wrote."""
        return tuple(self.path / name for name in self.written)
