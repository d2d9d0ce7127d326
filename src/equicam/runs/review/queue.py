"""The review queue: its order, its filters, and the rows behind each item, read one shard at a time.

A reviewer can fetch keys, order and version, so all three come from the run's secret. Under blinding the order is a
shuffle that depends on nothing else; otherwise it is that of rank. Flat maps, which show nothing, come last either way.
"""

import contextlib
import hashlib
import math
import threading
from collections import Counter
from collections.abc import Callable, Mapping
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
from equicam.runs.queue_files import SHA256, read_options, read_order, read_queue, refuse_unranked
from equicam.runs.review_key import ReviewKey, read_review_key
from equicam.runs.signals import FLAT, ranked_by
from equicam.runs.store import RunStore
from equicam.runs.stored_maps import StoredMaps
from equicam.runs.verdicts import VERDICTS, ReviewLog

MAX_ITEMS_PER_RESPONSE = 200
MAX_CACHED_SELECTIONS = 32
WARM_AFTER_S = 1.0  # when the first page is there, what items need is read
FILTERS = ("class", "flag", "verdict", "arm")


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
        return item_key(self.secret, self.id)


@dataclass(frozen=True, slots=True)
class Place:
    """Where a window lies in its raster."""

    raster: str
    x: float  # in pixels of its finest level
    y: float
    side: float


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
    arm_counts: Mapping[str, int]

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
        tiling, place = self.store.manifest.tiling, self._places.get(item.key)
        if tiling is None or place is None:
            return None
        reach = (
            tiling.step * place.side / tiling.tile * (1 + 1e-6)
        )  # to the next window of the grid, or nearer at the border
        found: dict[str, str | None] = {}
        for name, axis, sign in (("above", 1, -1), ("below", 1, 1), ("left", 0, -1), ("right", 0, 1)):
            line = self._lines.get((place.raster, 1 - axis, _thousandths((place.x, place.y)[1 - axis])), [])
            here = (place.x, place.y)[axis]
            ahead = [(sign * (at - here), key) for at, key in line if 1e-3 < sign * (at - here) <= reach]
            found[name] = min(ahead)[1] if ahead else None
        return found

    @cached_property
    def flag_counts(self) -> Mapping[str, int]:
        """How many items have each flag."""
        return Counter(flag for item in self.items for flag in item.flags)

    @cached_property
    def class_counts(self) -> Mapping[str, int]:
        """How many items have a map of each class."""
        return Counter(item.predicted for item in self.items if item.predicted is not None)

    @cached_property
    def _shards(self) -> NDArray[np.int32]:
        """The shard of every row of the triage; 0 for an image that is not of this run."""
        sample = self.store.sample(["id", "shard"])
        found = sample["shard"].take(pc.index_in(self.triage["id"], sample["id"]))
        return np.asarray(found.fill_null(0).to_numpy())

    @cached_property
    def _places(self) -> Mapping[str, Place]:
        """Where the queue's windows lie, by key."""
        if self.store.manifest.tiling is None:
            return {}
        columns = ["id", "x", "y", "side"]
        known = {*columns} <= {*self.triage.column_names}
        table = self.triage.select(columns) if known else self.store.read_items(columns)
        found: dict[str, Place] = {}
        for name, x, y, side in zip(*(column.to_pylist() for column in table.columns), strict=True):
            at = self.position_by_id.get(name)
            if (
                at is not None
                and None not in (x, y, side)
                and all(map(math.isfinite, (x, y, side)))
                and side > 0
            ):
                found[self.items[at].key] = Place(raster_id(name), x, y, side)
        return found

    @cached_property
    def _lines(self) -> Mapping[tuple[str, int, int], list[tuple[float, str]]]:
        """The windows of each column (0, x) and row (1, y) of each raster's grid."""
        found: dict[tuple[str, int, int], list[tuple[float, str]]] = {}
        for key, place in self._places.items():
            found.setdefault((place.raster, 0, _thousandths(place.x)), []).append((place.y, key))
            found.setdefault((place.raster, 1, _thousandths(place.y)), []).append((place.x, key))
        return found

    def _read_row(self, kind: str, item: QueueItem) -> pa.Table:
        number = self.shard(item)
        modified = self.store.path(kind, number).stat().st_mtime_ns
        found = _find_row(self.store, kind, number, modified, item.id)
        if not found.num_rows:
            raise EquicamError(
                f"the queue of {self.store.folder.name}", needs="images of this run", got="one that is not in it",
                fix="equicam triage again",
            )  # fmt: skip
        return found


def _thousandths(value: float) -> int:
    """Ids name places to a thousandth of a pixel."""
    return round(value * 1000)


@lru_cache(maxsize=16)
def _read_shard(store: RunStore, kind: str, number: int, _modified: int) -> pa.Table:
    return store.read_shard(kind, number)


@lru_cache(maxsize=64)  # a page and its images need the same row
def _find_row(store: RunStore, kind: str, number: int, modified: int, name: str) -> pa.Table:
    table = _read_shard(store, kind, number, modified)
    return table.filter(pc.equal(table["id"], name)).slice(0, 1)


class QueueLoader:
    """Loads the queue of a run, and loads it again when triage.parquet changes."""

    def __init__(self, store: RunStore, *, blind: bool, blind_class: bool = False) -> None:
        self.store, self.blind, self.blind_class = store, blind, blind and blind_class
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
        arm_counts=dict(sorted(Counter(arms).items(), reverse=True)),
    )  # fmt: skip


def item_key(secret: ReviewKey, name: str) -> str:
    """The key that stands for an image's id in URLs."""
    return secret.digest("item", name)[:20]


class QueueFilter:
    """Selects the items that pass a reviewer's filters, and caches the last selections."""

    def __init__(self, queues: QueueLoader, log: ReviewLog) -> None:
        self.queues, self.log = queues, log
        self._selections: dict[tuple[Any, ...], tuple[QueueItem, ...]] = {}
        self._remainder: tuple[tuple[str, int, int], str | None] | None = None

    def reviewed(self, queue: Queue, reviewer: str) -> int:
        """The number of items with a verdict of this reviewer."""
        return len(queue.position_by_id.keys() & self.log.standing(reviewer).keys())

    def reveals_arms(self, queue: Queue, reviewer: str) -> bool:
        """Whether this reviewer may see arms: without blinding, or once no verdict is left that they could bias."""
        return not self.queues.blind or self.reviewed(queue, reviewer) == len(queue.items)

    def remainder(self, queue: Queue) -> str | None:
        """What can be stated of the maps nobody opened; None while a triage is being written."""
        # imported here: it loads SciPy, which most pages do not need
        from equicam.runs.bounds import count_verdicts, remainder

        path = queue.store.folder / "triage.json"
        if not path.is_file():
            return None
        written = (queue.version, self.log.last_event, path.stat().st_mtime_ns)
        if self._remainder is None or self._remainder[0] != written:
            triage, sentence = read_options(queue.store), None
            if triage.get(SHA256) == queue.sha256:
                sentence = remainder(count_verdicts(self.log, queue.triage, triage["ok"])).sentence
            self._remainder = (written, sentence)
        return self._remainder[1]

    def select(self, queue: Queue, reviewer: str, filters: Mapping[str, str]) -> tuple[QueueItem, ...]:
        """The items that pass, in order. Under blinding, flags and hidden classes find only items with this reviewer's verdict."""
        filters = {name: value for name, value in filters.items() if value}
        if not filters:
            return queue.items
        if "arm" in filters and not self.reveals_arms(queue, reviewer):
            raise EquicamError(
                "the arm filter", needs="all verdicts given, or a review without blinding", got="images without your verdict",
                fix="reviewing them first",
            )  # fmt: skip
        cached = (queue.version, reviewer, self.log.last_event, *sorted(filters.items()))
        selected = self._selections.get(cached)
        if selected is None:
            selected = queue.items
            for name, value in filters.items():
                selected = tuple(filter(self._test(name, value, self.log.standing(reviewer)), selected))
            if len(self._selections) > MAX_CACHED_SELECTIONS:
                self._selections = {}
            self._selections[cached] = selected
        return selected

    def _test(self, name: str, value: str, own: Mapping[str, Any]) -> Callable[[QueueItem], bool]:
        """Whether an item passes one filter."""
        blind, blind_class = self.queues.blind, self.queues.blind_class
        if name == "flag":
            return lambda item: value in item.flags and (not blind or item.id in own)
        if name == "class":
            return lambda item: item.predicted == value and (not blind_class or item.id in own)
        if name == "arm":
            return lambda item: item.arm == value
        if value == "unreviewed":
            return lambda item: item.id not in own
        if value == "awaits-second":
            return lambda item: item.id not in own and awaits_second(self.log, item.id)
        if value in VERDICTS:
            return lambda item: item.id in own and own[item.id].verdict == value
        return lambda item: value == "reviewed" and item.id in own


def awaits_second(log: ReviewLog, name: str) -> bool:
    """Whether the only reviewer of an image, under whatever names, has requested a second one."""
    found = log.by_reviewer(name)
    requested = [v.reviewer for v in found.values() if v.verdict == "second-reviewer"]
    return bool(requested) and found.keys() <= log.same_person(requested[0])
