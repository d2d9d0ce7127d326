"""A run on disk: a folder that pandas, polars and DuckDB read without us.

    manifest.json          what makes it reproducible
    sample.parquet         every picture it is of, in order, and the part it is in
    items/part-*.parquet   one row a picture
    maps/part-*.parquet    its map, PEUM and views at layer resolution, float16
    digests.json           SHA-256 of every part, once all are there
    events.sqlite          what happened, each event chained to the one before

Parts are whole or not there; pending are those that are not, so resuming needs no order. A part's maps are written
before its items: items mean that both are there.
"""

import fcntl
import hashlib
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from equicam.auditing.manifest import Spec, read_spec, refuse_difference
from equicam.data.items import Item, valid_utf8
from equicam.data.remote import AnyPath, RemotePath
from equicam.errors import EquicamError
from equicam.shards import read_table, write_table, write_whole

ITEMS = pa.schema(
    [
        pa.field("id", pa.string(), nullable=False),
        pa.field("path", pa.string()),
        pa.field("index", pa.int64()),  # which picture of a file that holds many
        pa.field("sha256", pa.string()),
        pa.field("bytes", pa.int64()),
        pa.field("mtime_ns", pa.int64()),
        pa.field("width", pa.int32()),
        pa.field("height", pa.int32()),
        pa.field("frame", pa.list_(pa.float32())),  # x0 y0 x1 y1 of the picture: what the model saw
        pa.field("label", pa.string()),
        pa.field("target", pa.int32()),  # the class explained: the top-1
        pa.field("prob", pa.float32()),  # its probability
        pa.field("top5", pa.list_(pa.int32())),
        pa.field("top5_prob", pa.list_(pa.float32())),
        pa.field("peum", pa.float64()),
        pa.field("flip_rate", pa.float32()),
        pa.field("kept", pa.int32()),  # views the gate let through
        pa.field("prob_by_view", pa.list_(pa.float32())),
        pa.field("top1_by_view", pa.list_(pa.int32())),
        pa.field("agree_by_view", pa.list_(pa.float32())),  # Pearson of each view with the mean of the others
        pa.field("flags", pa.list_(pa.string())),
        pa.field("eq", pa.float64()),  # disc Eq of grad-cam, on the calibrated subset
        pa.field("status", pa.string(), nullable=False),  # ok, or bad
        pa.field("reason", pa.string()),
        pa.field("seconds", pa.float32()),
    ]
)
MAPS = pa.schema(
    [
        pa.field("id", pa.string(), nullable=False),
        pa.field("height", pa.int32()),  # of the grid
        pa.field("width", pa.int32()),
        pa.field("map", pa.list_(pa.float16())),  # × map_scale
        pa.field("map_scale", pa.float32()),
        pa.field("peum", pa.list_(pa.float16())),
        pa.field("peum_scale", pa.float32()),
        pa.field("planes", pa.list_(pa.float16())),  # every view's plane, as read, not turned back
        pa.field("planes_scale", pa.float32()),
    ]
)
SAMPLE = pa.schema(
    [
        pa.field("id", pa.string(), nullable=False),
        pa.field("path", pa.string()),
        pa.field("label", pa.string()),
        pa.field("part", pa.int32()),
        pa.field("calibrated", pa.bool_()),
    ]
)


class Run:
    """A run to read, and to write by who holds its lock."""

    def __init__(self, folder: Path, moved: Mapping[str, str] | None = None) -> None:
        self.folder = Path(folder)
        self.moved = dict(moved or {})  # where pictures are now, by id, if not where they were

    @property
    def spec(self) -> Spec:
        """The manifest."""
        path = self.folder / "manifest.json"
        if not path.is_file():
            raise EquicamError(
                f"{valid_utf8(str(self.folder))!r}",
                needs="to be a run",
                got="no manifest.json in it" if self.folder.is_dir() else "no such folder",
                fix="equicam audit first",
            )
        return read_spec(path.read_text(encoding="utf-8"), where=valid_utf8(str(self.folder)))

    def path(self, kind: str, part: int) -> Path:
        """Where a part of items or maps is, or will be."""
        return self.folder / kind / f"part-{part:06d}.parquet"

    def refuse_foreign(self) -> None:
        """A folder with files of somebody else's is left alone; what a run killed while it began left is not."""
        if not self.folder.is_dir() or (self.folder / "manifest.json").is_file():
            return
        parts = [*self.folder.glob("items/*"), *self.folder.glob("maps/*")]
        ours = {".lock", "items", "maps", "sample.parquet"}
        strange = [p for p in self.folder.iterdir() if p.name not in ours and not p.name.endswith(".part")]
        if strange or parts:
            raise EquicamError(
                f"{valid_utf8(str(self.folder))!r}", needs="an empty or new folder, or a run", got="other files in it",
                fix="another --out",
            )  # fmt: skip

    def begin(self, spec: Spec, items: Sequence[Item], calibrated: Iterable[str]) -> None:
        """Lay the folder out, or check that what is there is the same run; one without any part may become another."""
        manifest = self.folder / "manifest.json"
        if manifest.is_file() and any(self.folder.glob("*/part-*")):
            before = self.spec
            if (before.data, before.pictures) != (spec.data, spec.pictures):
                self._refuse_other_pictures(items)
            refuse_difference(before, spec, where=valid_utf8(str(self.folder)))
            return
        self.refuse_foreign()
        for kind in ("items", "maps"):
            (self.folder / kind).mkdir(parents=True, exist_ok=True)
        chosen = set(calibrated)
        columns = {
            "id": [item.id for item in items],
            "path": [valid_utf8(str(item.path)) for item in items],
            "label": [None if item.label is None else str(item.label) for item in items],
            "part": [i // spec.part for i in range(len(items))],
            "calibrated": [item.id in chosen for item in items],
        }
        write_table(self.folder / "sample.parquet", pa.table(columns, schema=SAMPLE))
        write_whole(manifest, spec.as_json().encode())  # last: with it the run exists

    def _refuse_other_pictures(self, items: Sequence[Item]) -> None:
        before, now = set(self.sample()["id"].to_pylist()), {item.id for item in items}
        said = [
            f"{len(some)} {word} ({', '.join(map(repr, sorted(some)[:3]))})"
            for word, some in (("gone", before - now), ("new", now - before))
            if some
        ]
        if said:
            raise EquicamError(
                f"resuming {valid_utf8(str(self.folder))}", needs="the pictures it was begun with", got=" and ".join(said),
                fix="another --out, or those pictures",
            )  # fmt: skip

    def pending(self) -> list[int]:
        """The parts that are not there yet, or only in half."""
        return [p for p in range(self.parts) if not self.has(p)]

    def has(self, part: int) -> bool:
        """Whether a part is there, items and maps."""
        return all(self.path(kind, part).is_file() for kind in ("items", "maps"))

    @property
    def parts(self) -> int:
        """How many parts the whole run has."""
        spec = self.spec
        return -(-spec.pictures // spec.part)

    def write_part(self, part: int, items: pa.Table, maps: pa.Table) -> None:
        """A part, whole: its maps, then its items."""
        write_table(self.path("maps", part), maps)
        write_table(self.path("items", part), items)

    def sample(self) -> pa.Table:
        """Every picture the run is of, in order."""
        return read_table(self.folder / "sample.parquet")

    def items(self, columns: Sequence[str] | None = None) -> pa.Table:
        """The rows there are, in the sample's order."""
        there = [self.path("items", p) for p in range(self.parts) if self.path("items", p).is_file()]
        if not there:
            return ITEMS.empty_table() if columns is None else ITEMS.empty_table().select(list(columns))
        found = pa.concat_tables([read_table(p, columns) for p in there])
        if self.moved and "path" in found.column_names:
            path = [
                self.moved.get(i, p)
                for i, p in zip(found["id"].to_pylist(), found["path"].to_pylist(), strict=True)
            ]
            found = found.set_column(
                found.column_names.index("path"), ITEMS.field("path"), pa.array(path, pa.string())
            )
        return found

    def rows(self, ids: Iterable[str]) -> dict[str, dict[str, Any]]:
        """The rows of these pictures by id."""
        return {row["id"]: row for row in _of(self.items(), ids).to_pylist()}

    def maps(self, ids: Iterable[str]) -> dict[str, "Drawn"]:
        """Maps of these pictures by id."""
        wanted = list(ids)
        parts = sorted(set(_of(self.sample(), wanted)["part"].to_pylist()))
        there = [self.path("maps", p) for p in parts if self.path("maps", p).is_file()]
        return {row["id"]: Drawn.of(row) for p in there for row in _of(read_table(p), wanted).to_pylist()}

    def digests(self) -> dict[str, str]:
        """SHA-256 of everything a finished run is made of, by name."""
        names = ["manifest.json", "sample.parquet"]
        names += [f"{kind}/part-{p:06d}.parquet" for kind in ("items", "maps") for p in range(self.parts)]
        return {name: file_digest(self.folder / name) for name in names}

    @contextmanager
    def writing(self) -> Iterator[int]:
        """The only writer; its lock is let go by the system when the process ends, however it ends."""
        self.folder.mkdir(parents=True, exist_ok=True)
        handle = os.open(self.folder / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                holder = os.pread(handle, 20, 0).decode(errors="replace").strip() or "unknown"
                raise EquicamError(
                    f"{valid_utf8(str(self.folder))!r}", needs="one writer at a time", got=f"process {holder} at work on it",
                    fix="waiting for it",
                ) from error  # fmt: skip
            os.truncate(handle, 0)
            os.pwrite(handle, f"{os.getpid()}\n".encode(), 0)
            yield handle
        finally:
            os.close(handle)


@dataclass(frozen=True)
class Drawn:
    """One picture's map, PEUM and views, at layer resolution; views as read, not turned back."""

    map: NDArray[np.float32]  # [h, w]
    peum: NDArray[np.float32]  # [h, w]
    planes: NDArray[np.float32]  # [t, h, w]

    @staticmethod
    def of(row: dict[str, Any]) -> "Drawn":
        """From a row of maps."""
        grid = (row["height"], row["width"])

        def read(name: str) -> NDArray[np.float32]:
            values: NDArray[np.float32] = np.asarray(row[name], dtype=np.float32) * float(
                row[f"{name}_scale"]
            )
            return values

        return Drawn(read("map").reshape(grid), read("peum").reshape(grid), read("planes").reshape(-1, *grid))

    def row(self, name: str) -> dict[str, Any]:
        """As a row of maps: float16 of values scaled to their largest, so that none vanishes or overflows."""
        row: dict[str, Any] = {"id": name, "height": self.map.shape[0], "width": self.map.shape[1]}
        for key in ("map", "peum", "planes"):
            values = getattr(self, key)
            scale = float(np.abs(values).max(initial=0.0)) or 1.0
            row[key], row[f"{key}_scale"] = (values / scale).astype(np.float16).ravel(), scale
        return row


def _of(table: pa.Table, ids: Iterable[str]) -> pa.Table:
    return table.filter(pc.is_in(table["id"], value_set=pa.array(list(ids), pa.string())))


def file_digest(path: AnyPath) -> str:
    """SHA-256 of a file."""
    if isinstance(path, RemotePath):
        return hashlib.sha256(path.read_bytes()).hexdigest()
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
