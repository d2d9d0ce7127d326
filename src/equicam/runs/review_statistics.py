"""Statistics of verdicts: do two reviewers agree, and does the queue find more than chance would.

A hit is a map that a reviewer rejects: a shortcut or artefact, or the wrong region. The majority of its reviewers decides
an image; if they are even, or all request a second reviewer, it is open and counts in no rate. Names that shared a
browser are one reviewer, whose first verdict on an image is the earliest under any of them.
"""

from collections.abc import Container, Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from itertools import combinations
from typing import Any

import numpy as np
import pyarrow as pa

from equicam.evaluate import statistics
from equicam.evaluate.statistics import Estimate
from equicam.runs.verdicts import VERDICTS, ReviewLog, Verdict
from equicam.shards import json_ready

HITS = {"shortcut", "wrong-region"}


@dataclass(frozen=True)
class Rates:
    """How often a map was rejected, in the queue and in the control arm."""

    queue: Estimate
    control: Estimate
    difference: Estimate
    open: int  # images reviewed but not decided
    sentence: str


@dataclass(frozen=True)
class Pair:
    """Two reviewers on the images both reviewed, by the first verdict of each."""

    reviewers: tuple[str, str]
    agreement: Estimate  # share with the same verdict
    kappa: Estimate


@dataclass(frozen=True)
class ReviewSummary:
    """Counts and rates over all verdicts of a run."""

    counts: dict[str, dict[str, int]]  # standing verdicts by arm
    reviewers: dict[str, int]  # images by reviewer; several names of one are joined by " = "
    reviewed: int
    reviewed_twice: int  # images with two reviewers or more
    changed: int  # verdicts that replaced another
    unblinded: int  # first verdicts that were not blind
    first: Rates  # of first verdicts
    standing: Rates
    pairs: tuple[Pair, ...]

    def to_json(self) -> dict[str, Any]:
        """Plain values, null where undefined."""
        found: dict[str, Any] = json_ready(asdict(self))
        return found


def arms_now(queue: pa.Table) -> dict[str, str]:
    """The arm of every image; a control that an extended queue has reached is of the queue."""
    arms = dict(zip(queue["id"].to_pylist(), queue["arm"].to_pylist(), strict=True))
    rest = dict(zip(arms, queue["represents_rest"].to_pylist(), strict=True))
    return {name: "control" if arm == "control" and rest[name] else "queue" for name, arm in arms.items()}


def summarise_reviews(review_log: ReviewLog, arms: Mapping[str, str]) -> ReviewSummary | None:
    """The verdicts on the images of these arms; None if there are none."""
    given = _by_person(review_log, arms)
    if not given:
        return None
    last = {(v.item, v.reviewer): v for v in given}
    first = {(v.item, v.reviewer): v for v in reversed(given)}
    counts = {arm: dict.fromkeys(VERDICTS, 0) for arm in ("queue", "control")}
    for v in last.values():
        counts[arms[v.item]][v.verdict] += 1
    reviewers: dict[str, int] = {}
    for _, who in last:
        reviewers[who] = reviewers.get(who, 0) + 1
    by_item = _by_item(last.values())
    return ReviewSummary(
        counts=counts,
        reviewers=dict(sorted(reviewers.items())),
        reviewed=len(by_item),
        reviewed_twice=sum(len(some) > 1 for some in by_item.values()),
        changed=sum(v.changes is not None for v in given),
        unblinded=sum(not v.blind for v in first.values()),
        first=_rates(_by_item(first.values()), arms),
        standing=_rates(by_item, arms),
        pairs=tuple(_pair(a, b, first) for a, b in combinations(sorted(reviewers), 2) if _both(a, b, first)),
    )


def first_verdicts(review_log: ReviewLog) -> dict[str, list[str]]:
    """The first verdict of each reviewer on each image that has one."""
    given = _by_person(review_log, {v.item for v in review_log.verdicts()})
    return _by_item({(v.item, v.reviewer): v for v in reversed(given)}.values())


def _by_person(review_log: ReviewLog, images: Container[str]) -> list[Verdict]:
    """Verdicts in the order they were given; names that shared a browser are joined."""
    given = [v for v in review_log.verdicts() if v.item in images]
    person = {name: " = ".join(sorted(review_log.same_person(name))) for name in {v.reviewer for v in given}}
    return [replace(v, reviewer=person[v.reviewer]) for v in given]


def majority(verdicts: Iterable[str]) -> bool | None:
    """Whether most of its reviewers call it a hit; None: open."""
    votes = [v in HITS for v in verdicts if v != "second-reviewer"]
    hits = sum(votes)
    return None if 2 * hits == len(votes) else 2 * hits > len(votes)


def _by_item(verdicts: Iterable[Verdict]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for v in verdicts:
        found.setdefault(v.item, []).append(v.verdict)
    return found


def _rates(by_item: Mapping[str, list[str]], arms: Mapping[str, str]) -> Rates:
    decided = {item: majority(verdicts) for item, verdicts in by_item.items()}
    found = {
        arm: statistics.proportion(
            sum(hit is True and arms[item] == arm for item, hit in decided.items()),
            sum(hit is not None and arms[item] == arm for item, hit in decided.items()),
        )
        for arm in ("queue", "control")
    }
    difference = statistics.difference(found["queue"], found["control"])
    still_open = sum(hit is None for hit in decided.values())
    return Rates(
        found["queue"],
        found["control"],
        difference,
        still_open,
        _sentence(found["queue"], found["control"], difference, still_open),
    )


def _sentence(queue: Estimate, control: Estimate, more: Estimate, still_open: int) -> str:
    if not queue.n and not control.n:
        return f"no image is decided yet; {still_open} are open"
    rates = f"{_share(queue, 'of the queue')} and {_share(control, 'chosen at random')} were rejected"
    if not (queue.n and control.n):
        return f"{rates}; a comparison needs both"
    if more.low > 0:
        means = "the queue finds more than chance would"
    elif more.high < 0:
        means = "the queue finds less than chance would"
    else:
        means = "the queue is not shown to find more than chance would"
    difference = f"{100 * more.value:+.0f} points [{100 * more.low:+.0f}, {100 * more.high:+.0f}]"
    return f"{rates}: {difference}, so {means}" + (f"; {still_open} are open" if still_open else "")


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
    agreement = statistics.proportion(int((x == y).sum()), len(items))
    return Pair((a, b), agreement, statistics.bootstrap(statistics.kappa, x, y))
