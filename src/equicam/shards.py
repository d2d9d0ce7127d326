"""A folder of parts: work that may be cut off at any moment and taken up again.

Each part is one Parquet file, written under a temporary name, synced and renamed, so that it is there whole or not at
all. `fingerprint.json` says what the parts are of; another fingerprint is refused by name of what differs.
"""

import json
import math
import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from equicam.errors import EquicamError

FINGERPRINT = "fingerprint.json"


def write_whole(path: Path, data: bytes) -> None:
    """Bytes under a name, all of them or none, on the disk when this returns."""
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".part")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        Path(temporary).chmod(0o666 & ~_umask())
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def write_table(path: Path, table: pa.Table) -> None:
    """A table as Parquet, all of it or nothing."""
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink, compression="zstd")
    write_whole(path, sink.getvalue().to_pybytes())


def read_table(path: Path, columns: Sequence[str] | None = None) -> pa.Table:
    """A table from Parquet; a file that is no longer one is named."""
    try:
        return pq.read_table(path, columns=None if columns is None else list(columns))
    except (pa.ArrowException, ValueError) as error:
        raise EquicamError(
            str(path), needs="to be as it was written", got=next(iter(str(error).splitlines()), "no Parquet"),
            fix="deleting it and computing it again",
        ) from error  # fmt: skip


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file; one that is no longer any is named."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(found, dict):
            raise ValueError("no object")
    except ValueError as error:
        raise EquicamError(
            str(path), needs="to be as it was written", got=error, fix="restoring it"
        ) from error
    return found


def json_ready(value: Any) -> Any:
    """Nested values for JSON, which has no NaN or infinity: null in their place."""
    if isinstance(value, Mapping):
        return {str(key): json_ready(one) for key, one in value.items()}
    if isinstance(value, tuple | list):
        return [json_ready(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """What differs between two fingerprints, in words."""
    keys = sorted({*before, *now})
    return [
        f"{key} was {_short(before.get(key))}, is {_short(now.get(key))}"
        for key in keys
        if before.get(key) != now.get(key)
    ]


def plain(fingerprint: Mapping[str, Any]) -> dict[str, Any]:
    """A fingerprint as it reads back from JSON."""
    found: dict[str, Any] = json.loads(json.dumps(fingerprint))
    return found


def refuse_another(what: str, before: Mapping[str, Any], now: Mapping[str, Any], *, fix: str) -> None:
    """An error that names what differs, if anything does."""
    if found := differences(before, plain(now)):
        raise EquicamError(what, needs="the same settings to go on", got="; ".join(found), fix=fix)


def part_path(folder: Path, number: int) -> Path:
    """Where a part of a folder is, or will be."""
    return folder / f"part-{number:06d}.parquet"


class Parts:
    """Numbered parts in a folder, all of one fingerprint."""

    def __init__(self, folder: Path, fingerprint: Mapping[str, Any], *, fix: str) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        known = folder / FINGERPRINT
        if known.is_file():
            refuse_another(str(folder), read_json(known), fingerprint, fix=fix)
        elif any(folder.iterdir()):
            raise EquicamError(
                str(folder), needs="to be empty, new or ours", got="other files in it", fix=fix
            )
        else:
            write_whole(known, json.dumps(fingerprint, indent=1).encode())

    def path(self, number: int) -> Path:
        """Where a part is, or will be."""
        return part_path(self.folder, number)

    def pending(self, count: int) -> list[int]:
        """The parts that are not there yet."""
        return [number for number in range(count) if not self.path(number).is_file()]

    def write(self, number: int, table: pa.Table) -> None:
        """Put a part there, whole."""
        write_table(self.path(number), table)

    def read(self, count: int) -> pa.Table:
        """All parts in order."""
        return pa.concat_tables([read_table(self.path(number)) for number in range(count)])


def _short(value: Any) -> str:
    text = "absent" if value is None else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 80 else f"{text[:77]}…"


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
