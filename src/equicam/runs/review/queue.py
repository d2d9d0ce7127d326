"""The review queue: its order, and the rows behind each item, read one shard at a time.

A reviewer can fetch keys, order and version, so all three come from the run's secret. Under blinding the order is a
shuffle that depends on nothing else; otherwise it is that of rank. Flat maps, which show nothing, come last either way.
"""

import contextlib
import hashlib
import threading
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from equicam.errors import EquicamError
from equicam.rasters.options import raster_id
from equicam.runs.queue_files import read_order, read_queue, refuse_unranked
from equicam.runs.signals import FLAT, ranked_by
from equicam.runs.store import RunStore, StoredMaps
from equicam.runs.verdicts import ReviewKey, read_review_key

WARM_AFTER_S = 1.0  # when the first page is there, what items need is read


@dataclass(frozen=True, slots=True)
class QueueItem:
    """One image to review. URLs name it by `key`, because an id is a file name and may hold anything."""

    id: str
    position: int  # from 0
    triage_row: int
    arm: str
    predicted: str | None  # the class that the map is of: the predicted one, or the target of the run
    flags: tuple[str, ...]
    flat: bool  # its map marks nothing, as the map itself shows
    secret: ReviewKey

    @property
    def key(self) -> str:
        """Its name in URLs."""
        return self.secret.digest("item", self.id)[:20]


@dataclass(frozen=True)
class Queue:
    """The review queue as one triage ranked it."""

    store: RunStore
    version: str  # another triage.parquet is another version and, under blinding, another order
    sha256: str  # of triage.parquet
    data: bytes  # triage.parquet
    ranked_by: str
    items: tuple[QueueItem, ...]  # in review order
    position_by_id: Mapping[str, int]

    @cached_property
    def position(self) -> Mapping[str, int]:
        """The position of every item, by key."""
        return {item.key: item.position for item in self.items}

    @cached_property
    def triage(self) -> pa.Table:
        """The triage table; most of it is only needed for single items."""
        return read_queue(self.store, self.data)

    def find(self, key: str) -> QueueItem | None:
        """The item with this key."""
        position = self.position.get(key)
        return None if position is None else self.items[position]

    def triage_facts(self, item: QueueItem) -> dict[str, Any]:
        """The item's row in the triage."""
        found: dict[str, Any] = self.triage.slice(item.triage_row, 1).to_pylist()[0]
        return found

    def row(self, item: QueueItem) -> dict[str, Any]:
        """The item's row in the run."""
        found: dict[str, Any] = self._read_row("items", item).to_pylist()[0]
        if self.store.moved:
            found["path"] = self.store.moved.get(raster_id(item.id), found["path"])
        return found

    def shard(self, item: QueueItem) -> int:
        """The shard that holds the item."""
        return int(self._shards[item.triage_row])

    def maps(self, item: QueueItem) -> StoredMaps | None:
        """The item's stored maps."""
        if not self.store.path("maps", self.shard(item)).is_file():
            return None
        return StoredMaps.from_table(self._read_row("maps", item))[item.id]

    def adjacent(self, item: QueueItem) -> dict[str, str | None] | None:
        """The keys of the windows above, below, left and right of a window, if they are in the queue; None for an image."""
        tiling = self.store.manifest.tiling
        if tiling is None:
            return None
        rasters, places, sides = self._windows
        at = item.position
        reach = (
            tiling.step * sides[at] / tiling.tile * (1 + 1e-6)
        )  # the grid's windows are nearer at the border
        found: dict[str, str | None] = {}
        for name, axis, sign in (("above", 1, -1), ("below", 1, 1), ("left", 0, -1), ("right", 0, 1)):
            ahead = sign * (places[axis] - places[axis][at])
            across = np.abs(places[1 - axis] - places[1 - axis][at])  # ids name places to a thousandth
            near = (rasters == rasters[at]) & (across < 1e-3) & (ahead > 1e-3) & (ahead <= reach)
            found[name] = self.items[np.where(near, ahead, np.inf).argmin()].key if near.any() else None
        return found

    @cached_property
    def counts(self) -> dict[str, Counter[str]]:
        """How many items have each flag, a map of each class, and are of each arm."""
        return {
            "flags": Counter(flag for item in self.items for flag in item.flags),
            "classes": Counter(item.predicted for item in self.items if item.predicted is not None),
            "arms": Counter(item.arm for item in self.items),
        }

    @cached_property
    def _shards(self) -> NDArray[np.int32]:
        """The shard of every row of the triage; 0 for an image that is not of this run."""
        sample = self.store.sample(["id", "shard"])
        found = sample["shard"].take(pc.index_in(self.triage["id"], sample["id"]))
        return np.asarray(found.fill_null(0).to_numpy())

    @cached_property
    def _windows(self) -> tuple[NDArray[Any], tuple[NDArray[Any], NDArray[Any]], NDArray[Any]]:
        """The raster of every item, as a number, x and y of its window, and its side."""
        table = self.triage.select(["id", "x", "y", "side"]).take([item.triage_row for item in self.items])
        _, rasters = np.unique([raster_id(name) for name in table["id"].to_pylist()], return_inverse=True)
        x, y, side = (table[name].to_numpy() for name in ("x", "y", "side"))
        return rasters, (x, y), side

    def _read_row(self, kind: str, item: QueueItem) -> pa.Table:
        number = self.shard(item)
        modified = self.store.path(kind, number).stat().st_mtime_ns
        table = _read_shard(self.store, kind, number, modified)
        found = table.filter(pc.equal(table["id"], item.id)).slice(0, 1)
        if not found.num_rows:
            raise EquicamError(
                f"the queue of {self.store.folder.name}", "images of this run", "one that is not in it",
                "equicam triage again",
            )  # fmt: skip
        return found


@lru_cache(maxsize=16)
def _read_shard(store: RunStore, kind: str, number: int, _modified: int) -> pa.Table:
    return store.read_shard(kind, number)


class QueueLoader:
    """Loads the queue of a run, and loads it again when triage.parquet changes."""

    def __init__(self, store: RunStore, *, blind: bool) -> None:
        self.store, self.blind = store, blind
        self.secret = read_review_key(store.folder)
        self._lock = threading.Lock()
        self._loaded: tuple[tuple[int, int], Queue] | None = None

    def current(self) -> Queue:
        """The queue as triage.parquet has it now."""
        path = self.store.folder / "triage.parquet"
        refuse_unranked(self.store)
        with self._lock:
            stat = path.stat()
            version = (stat.st_mtime_ns, stat.st_ino)
            if self._loaded is None or self._loaded[0] != version:
                queue = _load_queue(self.store, path, self.secret, blind=self.blind)
                self._loaded = (version, queue)
                warming = threading.Timer(WARM_AFTER_S, _warm, (queue,))
                warming.daemon = True
                warming.start()
            return self._loaded[1]


def _warm(queue: Queue) -> None:
    with contextlib.suppress(EquicamError, OSError):  # an item that is opened says so
        queue.position, queue.triage, queue._shards  # noqa: B018  # cached


def _load_queue(store: RunStore, path: Path, secret: ReviewKey, *, blind: bool) -> Queue:
    data = path.read_bytes()
    sha256 = hashlib.sha256(data).hexdigest()
    version = secret.digest("version", sha256)[:16]
    triage = read_order(store, data)
    names, arms, classes, flags = (triage[name].to_pylist() for name in ("id", "arm", "class", "flags"))
    flat = [not FLAT.isdisjoint(some or ()) for some in flags]
    place = [secret.digest("order", version, name) for name in names] if blind else triage["rank"].to_pylist()
    order = sorted(range(len(names)), key=lambda i: (flat[i], place[i]))
    items = tuple(
        QueueItem(names[i], position, i, arms[i], classes[i], tuple(flags[i] or ()), flat[i], secret)
        for position, i in enumerate(order)
    )
    return Queue(
        store, version, sha256, data, ranked_by(triage), items,
        position_by_id={item.id: item.position for item in items},
    )  # fmt: skip
