"""Two runs on the same images compared: paired differences, second run minus first, and which maps changed."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

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

    @property
    def explained(self) -> tuple[pa.Table, pa.Table]:
        """The images explained in both, as either run has them."""
        return self.first, self.second


def compare_rows(first: RunStore, second: RunStore, most: int) -> dict[str, Any]:
    """The facts of a comparison; runs that measured something else than each other are refused."""
    manifests = first.manifest, second.manifest
    for name, values in _deciding(*manifests).items():
        if values[0] != values[1]:
            shown = [f"{len(value)} of them" if name == "views" else str(value) for value in values]
            got = "others" if shown[0] == shown[1] else f"{shown[0]} and {shown[1]}"
            fix = f"auditing both with one {name}"
            raise EquicamError("two runs to compare", f"the same {name}", got, fix)
    pairs = _pair_rows(first, second)
    differences = _differences(pairs)
    targets = (
        _class_names(items, manifest) for items, manifest in zip(pairs.explained, manifests, strict=True)
    )
    others = sum(a != b for a, b in zip(*targets, strict=True))
    counted = Counter(zip(*map(_words, pairs.explained), strict=True))
    noted = {name: tuple(str(getattr(manifest, name)) for manifest in manifests) for name in NOTED_FIELDS}
    return {
        "direction": _direction(differences, other_targets=others, images=pairs.first.num_rows),
        "differences": differences,
        "words": {a: {b: counted[a, b] for b in WORDS} for a in WORDS},
        "changes": tuple(_most_changed(pairs, manifests, most)),
        "other_targets": others,
        "differing": {name: both for name, both in noted.items() if both[0] != both[1]},
        "pairs": pairs,
    }


def _deciding(*manifests: Manifest) -> dict[str, list[Any]]:
    """What decides the numbers of two runs."""
    values = {name: [getattr(m.recipe, name) for m in manifests] for name in DECIDING_OPTIONS}
    values |= {name: [getattr(m, name) for m in manifests] for name in DECIDING_FIELDS}
    values["views"] = [frozenset(view.key for view in m.transforms) for m in manifests]  # in whatever order
    return values | {"target": [_class_name(m.target, m) for m in manifests]}


def _pair_rows(first: RunStore, second: RunStore) -> Pairs:
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


def _differences(pairs: Pairs) -> dict[str, Difference]:
    """By name: stability, peum, flip_rate, and the share of steady maps.

    An image that only one run could explain has no steady map in the other.
    """
    values = {name: [_values(table, name) for table in pairs.explained] for name in METRICS}
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


def _direction(differences: dict[str, Difference], *, other_targets: int = 0, images: int = 0) -> Direction:
    """What the intervals of the mean differences in stability and in the share of steady maps show, corrected for being two.

    Either below 0 is less steady, whatever the other shows: maps that became blank have no stability to compare, and
    images that cannot be explained any more have no map. Maps of other classes in most images do not compare.
    """
    if 2 * other_targets > images:
        return "does not compare"
    estimates = [differences[name].corrected for name in ("stability", "steady")]
    decided = [estimate for estimate in estimates if estimate.n >= MIN_PAIRS]
    if any(estimate.high < 0 for estimate in decided):
        return "less steady"
    return "steadier" if any(estimate.low > 0 for estimate in decided) else "no difference shown"


def _most_changed(pairs: Pairs, manifests: Sequence[Manifest], count: int) -> Iterator[Change]:
    """The images whose stability differs most, the largest difference first."""
    values = np.stack(stabilities(pairs))
    moved = np.abs(values[1] - values[0])
    order = np.argsort(-moved, kind="stable")
    order = order[np.isfinite(moved[order])][:count]
    tables = [table.take(pa.array(order)) for table in pairs.explained]
    words, classes = map(_words, tables), map(_class_names, tables, manifests)
    columns = (
        tables[0]["id"].to_pylist(),
        values.T[order].tolist(),
        zip(*words, strict=True),
        zip(*classes, strict=True),
    )
    for name, (before, after), both_words, both_classes in zip(*columns, strict=True):
        yield Change(name, before, after, both_words, both_classes)


def stabilities(pairs: Pairs) -> tuple[Floats, Floats]:
    """The stability of every pair in both runs, NaN where it is undefined."""
    first, second = (_values(items, "stability") for items in pairs.explained)
    return first, second


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
