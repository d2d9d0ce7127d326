"""What reviewers' verdicts measure: do two readers agree, and does the queue find more than chance would.

A hit is a map found wanting: a shortcut or artefact, or the wrong region. A picture's readers settle it by majority;
where they are even, or all ask for a second reader, it is open and in no rate.
"""

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from itertools import combinations
from typing import Any

import numpy as np

from equicam.auditing.review_log import VERDICTS, Readings, Verdict
from equicam.evaluation import statistics
from equicam.evaluation.statistics import Estimate
from equicam.shards import json_ready

HITS = {"shortcut", "wrong-region"}


@dataclass(frozen=True)
class Rates:
    """How often a map was found wanting, in the queue and in the random arm."""

    queue: Estimate
    control: Estimate
    difference: Estimate
    open: int  # pictures read but not settled
    sentence: str


@dataclass(frozen=True)
class Pair:
    """Two readers on the pictures both read, by the first verdict of each."""

    readers: tuple[str, str]
    alike: Estimate  # share with the same verdict
    kappa: Estimate


@dataclass(frozen=True)
class Review:
    """All that the verdicts of a run say together."""

    counts: dict[str, dict[str, int]]  # standing verdicts by arm
    readers: dict[str, int]  # pictures by reader
    read: int
    twice: int  # pictures with two readers or more
    changed: int  # verdicts that took the place of another
    in_sight: int  # first verdicts that were not blind
    first: Rates  # of first verdicts
    standing: Rates
    pairs: tuple[Pair, ...]

    def as_json(self) -> dict[str, Any]:
        """Plain values, null where undefined."""
        found: dict[str, Any] = json_ready(asdict(self))
        return found


def review(readings: Readings, arms: Mapping[str, str]) -> Review | None:
    """What was found on the pictures of these arms; None: nothing was read."""
    given = [v for v in readings.verdicts() if v.item in arms]
    if not given:
        return None
    last = {(v.item, v.reviewer): v for v in given}
    first = {(v.item, v.reviewer): v for v in reversed(given)}
    counts = {arm: dict.fromkeys(VERDICTS, 0) for arm in ("queue", "control")}
    for v in last.values():
        counts[arms[v.item]][v.verdict] += 1
    readers: dict[str, int] = {}
    for _, who in last:
        readers[who] = readers.get(who, 0) + 1
    by_item = _by_item(last.values())
    return Review(
        counts=counts,
        readers=dict(sorted(readers.items())),
        read=len(by_item),
        twice=sum(len(some) > 1 for some in by_item.values()),
        changed=sum(v.changes is not None for v in given),
        in_sight=sum(not v.blind for v in first.values()),
        first=_rates(_by_item(first.values()), arms),
        standing=_rates(by_item, arms),
        pairs=tuple(_pair(a, b, first) for a, b in combinations(sorted(readers), 2) if _both(a, b, first)),
    )


def settled(verdicts: Iterable[str]) -> bool | None:
    """Is it a hit, by the majority of its readers? None: open."""
    said = [v in HITS for v in verdicts if v != "second-reader"]
    yes = sum(said)
    return None if 2 * yes == len(said) else 2 * yes > len(said)


def _by_item(verdicts: Iterable[Verdict]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for v in verdicts:
        found.setdefault(v.item, []).append(v.verdict)
    return found


def _rates(by_item: Mapping[str, list[str]], arms: Mapping[str, str]) -> Rates:
    said = {item: settled(verdicts) for item, verdicts in by_item.items()}
    found = {
        arm: statistics.proportion(
            sum(hit is True and arms[item] == arm for item, hit in said.items()),
            sum(hit is not None and arms[item] == arm for item, hit in said.items()),
        )
        for arm in ("queue", "control")
    }
    more = statistics.difference(found["queue"], found["control"])
    still = sum(hit is None for hit in said.values())
    return Rates(
        found["queue"],
        found["control"],
        more,
        still,
        _sentence(found["queue"], found["control"], more, still),
    )


def _sentence(queue: Estimate, control: Estimate, more: Estimate, still: int) -> str:
    if not queue.n and not control.n:
        return f"no picture is settled yet; {still} are open"
    told = f"{_share(queue, 'of the queue')} and {_share(control, 'drawn at random')} were found wanting"
    if not (queue.n and control.n):
        return f"{told}; a comparison needs both"
    if more.low > 0:
        means = "the queue finds more than chance would"
    elif more.high < 0:
        means = "the queue finds less than chance would"
    else:
        means = "the queue is not shown to find more than chance would"
    difference = f"{100 * more.value:+.0f} points [{100 * more.low:+.0f}, {100 * more.high:+.0f}]"
    return f"{told}: {difference}, so {means}" + (f"; {still} are open" if still else "")


def _share(e: Estimate, which: str) -> str:
    if not e.n:
        return f"none yet of those {which}"
    return f"{100 * e.value:.0f} % [{100 * e.low:.0f}, {100 * e.high:.0f}] of {e.n} {which}"


def _both(a: str, b: str, first: Mapping[tuple[str, str], Verdict]) -> list[str]:
    return sorted(item for item, who in first if who == a and (item, b) in first)


def _pair(a: str, b: str, first: Mapping[tuple[str, str], Verdict]) -> Pair:
    codes = {name: float(i) for i, name in enumerate(VERDICTS)}
    items = _both(a, b, first)
    x, y = (np.array([codes[first[item, who].verdict] for item in items]) for who in (a, b))
    alike = statistics.proportion(int((x == y).sum()), len(items))
    return Pair((a, b), alike, statistics.bootstrap(statistics.kappa, x, y))
