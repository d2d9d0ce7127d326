"""Two runs on the same images compared: paired differences, second run minus first, and which maps changed."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from equicam.errors import EquicamError
from equicam.evaluate import statistics
from equicam.evaluate.statistics import Estimate, Floats
from equicam.runs.manifest import Manifest
from equicam.runs.signals import ranking_scores, signal_values
from equicam.runs.store import RunStore
from equicam.steadiness import WORDS

MIN_PAIRS = 20
"""Images below which no interval is trusted: the bootstrap's is too narrow for a handful."""
LEVEL = 0.95
"""Of the intervals."""
DECIDING_OPTIONS = ("method", "views", "fill", "protocol", "context", "tau", "gamma")
"""Options of a recipe that decide the numbers compared; the others say how it ran."""
DECIDING_FIELDS = ("target", "tiling", "voi")
NOTED_FIELDS = ("model", "layer", "preprocessing", "classes", "task", "dtype")
"""Fields of a manifest that may differ between two networks, and that the reader should know of."""
COLUMNS = [
    "id", "sha256", "status", "target", "stability", "peum_score", "flip_rate", "views_kept", "flags", "steadiness",
]  # fmt: skip
Direction = Literal["steadier", "less steady", "no difference shown", "does not compare"]


@dataclass(frozen=True)
class Difference:
    """One number of both runs: the means over the images where both define it, and the paired difference second − first."""

    first: float
    second: float
    difference: Estimate
    corrected: Estimate  # with an interval of 97.5 %: two of them decide together


@dataclass(frozen=True)
class Change:
    """One image in both runs."""

    id: str
    first: float  # stability
    second: float
    words: tuple[str, str]  # steady, unsteady or cannot say
    targets: tuple[str, str]  # the classes explained

    @property
    def difference(self) -> float:
        """Stability gained."""
        return self.second - self.first


@dataclass(frozen=True)
class Pairs:
    """The images explained in both runs, row by row, and those that are not."""

    first: pa.Table
    second: pa.Table
    only_first: tuple[str, ...]
    only_second: tuple[str, ...]
    other_content: tuple[str, ...]  # the same id, but another image
    # ids that the second run could not explain, with their word in the first
    lost: tuple[tuple[str, str], ...]
    gained: tuple[tuple[str, str], ...]  # and the other way round


def refuse_other_recipe(first: Manifest, second: Manifest) -> None:
    """Refuse runs that measured something else than each other."""
    pairs = {name: (getattr(first.recipe, name), getattr(second.recipe, name)) for name in DECIDING_OPTIONS}
    pairs |= {name: (getattr(first, name), getattr(second, name)) for name in DECIDING_FIELDS}
    views, other_views = (frozenset(view.key for view in m.transforms) for m in (first, second))
    pairs["views"] = (views, other_views)  # in whatever order
    pairs["target"] = (_class_name(first.target, first), _class_name(second.target, second))
    for name, (a, b) in pairs.items():
        if a != b:
            shown = [f"{len(v)} of them" for v in (a, b)] if name == "views" else [str(a), str(b)]
            got = "others" if shown[0] == shown[1] else f"{shown[0]} and {shown[1]}"
            raise EquicamError(
                "two runs to compare", f"the same {name}", got, f"auditing both with one {name}"
            )


def differing_fields(first: Manifest, second: Manifest) -> dict[str, tuple[str, str]]:
    """What else differs between the networks, as text."""
    pairs = {name: (getattr(first, name), getattr(second, name)) for name in NOTED_FIELDS}
    return {name: (str(a), str(b)) for name, (a, b) in pairs.items() if a != b}


def pair_rows(first: RunStore, second: RunStore) -> Pairs:
    """Match the explained images by id; an id that stands for another image in the second run does not match."""
    every = [store.read_items(COLUMNS) for store in (first, second)]
    tables = [table.filter(pc.equal(table["status"], "ok")).sort_by("id") for table in every]
    here, there = (
        dict(zip(table["id"].to_pylist(), table["sha256"].to_pylist(), strict=True)) for table in tables
    )
    other = tuple(name for name in here if name in there and here[name] != there[name])
    kept = pa.array(here.keys() & there.keys() - set(other), pa.string())
    lost, gained = _explained_once(tables[0], every[1]), _explained_once(tables[1], every[0])
    in_first, in_second = here.keys() | dict(gained), there.keys() | dict(lost)
    first_rows, second_rows = (table.filter(pc.is_in(table["id"], kept)) for table in tables)
    return Pairs(
        first_rows,
        second_rows,
        only_first=tuple(name for name in here if name not in in_second),
        only_second=tuple(name for name in there if name not in in_first),
        other_content=other,
        lost=lost,
        gained=gained,
    )


def _explained_once(explained: pa.Table, other: pa.Table) -> tuple[tuple[str, str], ...]:
    """Images that one run explained and the other has, but could not explain, with their word."""
    failed = set(other.filter(pc.not_equal(other["status"], "ok"))["id"].to_pylist())
    pairs = zip(explained["id"].to_pylist(), _words(explained), strict=True)
    return tuple((name, word) for name, word in pairs if name in failed)


def differences(pairs: Pairs) -> dict[str, Difference]:
    """By name: stability, peum, flip_rate, and the share of steady maps.

    An image that only one run could explain has no steady map in the other.
    """
    tables = pairs.first, pairs.second
    values = {name: [_values(table, name) for table in tables] for name in METRICS}
    lost, gained = (
        np.array([word == "steady" for _, word in some], float) for some in (pairs.lost, pairs.gained)
    )
    first, second = values["steady"]
    values["steady"] = [
        np.concatenate([first, lost, np.zeros(len(gained))]),
        np.concatenate([second, np.zeros(len(lost)), gained]),
    ]
    return {name: _difference(*both) for name, both in values.items()}


METRICS = ("stability", "peum", "flip_rate", "steady")


def direction(found: dict[str, Difference], *, other_targets: int = 0, images: int = 0) -> Direction:
    """What the intervals of the mean differences in stability and in the share of steady maps show, corrected for being two.

    Either below 0 is less steady, whatever the other shows: maps that became blank have no stability to compare, and
    images that cannot be explained any more have no map. Maps of other classes in most images do not compare.
    """
    if 2 * other_targets > images:
        return "does not compare"
    estimates = [found[name].corrected for name in ("stability", "steady")]
    decided = [estimate for estimate in estimates if estimate.n >= MIN_PAIRS]
    if any(estimate.high < 0 for estimate in decided):
        return "less steady"
    return "steadier" if any(estimate.low > 0 for estimate in decided) else "no difference shown"


def word_changes(pairs: Pairs) -> dict[str, dict[str, int]]:
    """How many images have each word in the first run, and of those each word in the second."""
    counted = Counter(zip(_words(pairs.first), _words(pairs.second), strict=True))
    return {a: {b: counted[a, b] for b in WORDS} for a in WORDS}


def most_changed(pairs: Pairs, manifests: Sequence[Manifest], count: int) -> list[Change]:
    """The images whose stability differs most, the largest difference first."""
    first, second = stabilities(pairs)
    moved = np.abs(second - first)
    order = [int(i) for i in np.argsort(-moved, kind="stable") if np.isfinite(moved[i])][:count]
    tables = [table.take(order) for table in (pairs.first, pairs.second)]
    targets = map(_class_names, tables, manifests)
    ids, values = tables[0]["id"].to_pylist(), zip(first[order].tolist(), second[order].tolist(), strict=True)
    columns = zip(
        ids, values, zip(*map(_words, tables), strict=True), zip(*targets, strict=True), strict=True
    )
    return [Change(name, *stability, words, classes) for name, stability, words, classes in columns]


def stabilities(pairs: Pairs) -> tuple[Floats, Floats]:
    """The stability of every pair in both runs, NaN where it is undefined."""
    return _values(pairs.first, "stability"), _values(pairs.second, "stability")


def other_targets(pairs: Pairs, first: Manifest, second: Manifest) -> int:
    """How many pairs explain another class."""
    names = _class_names(pairs.first, first), _class_names(pairs.second, second)
    return sum(a != b for a, b in zip(*names, strict=True))


def _class_names(items: pa.Table, manifest: Manifest) -> list[str]:
    return [_class_name(target, manifest) for target in items["target"].to_pylist()]


def _class_name(target: int | None, manifest: Manifest) -> str:
    classes = manifest.classes or ()
    return classes[target] if target is not None and 0 <= target < len(classes) else str(target)


def _values(items: pa.Table, name: str) -> Floats:
    """A metric of every row, NaN where it is undefined."""
    if name == "stability":
        return signal_values(items, "stability")
    if name == "peum":
        scores = ranking_scores(items, "peum")
        return np.where(np.isfinite(scores), scores, np.nan)
    if name == "steady":
        return np.array([word == "steady" for word in _words(items)], dtype=np.float64)
    return np.asarray(items[name].cast(pa.float64()).fill_null(np.nan).to_numpy())


def _words(items: pa.Table) -> list[str]:
    return items["steadiness"].fill_null("cannot say").to_pylist()  # type: ignore[no-any-return]


def _difference(first: Floats, second: Floats) -> Difference:
    defined: NDArray[np.bool_] = np.isfinite(first) & np.isfinite(second)
    first, second = first[defined], second[defined]
    shown, corrected = (
        statistics.bootstrap(statistics.mean, second - first, level=level)
        for level in (LEVEL, 1 - (1 - LEVEL) / 2)
    )
    return Difference(statistics.mean(first), statistics.mean(second), shown, corrected)
