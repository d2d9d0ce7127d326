"""What verdicts add up to: do reviewers agree, does the queue find more than chance would, what may be stated at the end.

A hit is a map that a reviewer rejects. The majority of an image's reviewers decides; names that shared a browser are one
reviewer, whose first verdict is the earliest under any of them. docs/audit.md ("When to stop") derives the bound: with k
wrong maps among the n reviewed ones of N images outside the queue, P(at most k of n | b) = 1 − confidence, and at most
b N − k of the N − n maps that nobody opened are wrong. Undecided maps count as wrong in every bound.

Controls are reviewed in random order, so those with a verdict are a random sample too, unless some had theirs before this
queue was made: then all must be reviewed first.
"""

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import combinations
from typing import Any

import numpy as np
import pyarrow as pa

from equicam.evaluate import statistics
from equicam.evaluate.statistics import Estimate, upper_bound
from equicam.runs.verdicts import VERDICTS, ReviewLog, Verdict
from equicam.shards import json_ready

HITS = {"shortcut", "wrong-region"}
ByReview = Mapping[tuple[str, str], Verdict]
"""Verdicts by image and reviewer."""


@dataclass(frozen=True)
class _Rates:
    """How often a map was rejected, in the queue and in the control arm."""

    queue: Estimate
    control: Estimate
    difference: Estimate
    open: int  # images reviewed but not decided
    sentence: str


@dataclass(frozen=True)
class _Pair:
    """Two reviewers on the images both reviewed, by the first verdict of each."""

    reviewers: tuple[str, str]
    agreement: Estimate  # share with the same verdict
    kappa: Estimate


@dataclass(frozen=True)
class _ReviewSummary:
    """Counts and rates over all verdicts of a run."""

    counts: dict[str, dict[str, int]]  # standing verdicts by arm
    reviewers: dict[str, int]  # images by reviewer; several names of one are joined by " = "
    reviewed: int
    reviewed_twice: int  # images with two reviewers or more
    changed: int  # verdicts that replaced another
    unblinded: int  # first verdicts that were not blind
    first: _Rates  # of first verdicts
    standing: _Rates
    pairs: tuple[_Pair, ...]

    def to_json(self) -> dict[str, Any]:
        """Plain values, null where undefined."""
        return json_ready(asdict(self))  # type: ignore[no-any-return]


def arms_now(queue: pa.Table) -> dict[str, str]:
    """The arm of every image; a control that an extended queue has reached is of the queue."""
    arms = dict(zip(queue["id"].to_pylist(), queue["arm"].to_pylist(), strict=True))
    rest = dict(zip(arms, queue["represents_rest"].to_pylist(), strict=True))
    return {name: "control" if arm == "control" and rest[name] else "queue" for name, arm in arms.items()}


def summarise_reviews(review_log: ReviewLog, arms: Mapping[str, str]) -> _ReviewSummary | None:
    """The verdicts on the images of these arms; None if there are none."""
    verdicts = _by_person(review_log, arms)
    if not verdicts:
        return None
    last = {(v.item, v.reviewer): v for v in verdicts}
    first = {(v.item, v.reviewer): v for v in reversed(verdicts)}
    counts = {arm: dict.fromkeys(VERDICTS, 0) for arm in ("queue", "control")}
    for v in last.values():
        counts[arms[v.item]][v.verdict] += 1
    reviewers = Counter(reviewer for _, reviewer in last)
    by_item = _by_item(last)
    pairs = (_pair(a, b, first) for a, b in combinations(sorted(reviewers), 2))
    return _ReviewSummary(
        counts=counts,
        reviewers=dict(sorted(reviewers.items())),
        reviewed=len(by_item),
        reviewed_twice=sum(len(some) > 1 for some in by_item.values()),
        changed=sum(v.changes is not None for v in verdicts),
        unblinded=sum(not v.blind for v in first.values()),
        first=_rates(_by_item(first), arms),
        standing=_rates(by_item, arms),
        pairs=tuple(pair for pair in pairs if pair.agreement.n),
    )


def _by_person(review_log: ReviewLog, images: Container[str]) -> list[Verdict]:
    """Verdicts in the order they were given; names that shared a browser are joined."""
    verdicts = [v for v in review_log.verdicts() if v.item in images]
    person = {
        name: " = ".join(sorted(review_log.same_person(name))) for name in {v.reviewer for v in verdicts}
    }
    return [replace(v, reviewer=person[v.reviewer]) for v in verdicts]


def _majority(verdicts: Iterable[str]) -> bool | None:
    """Whether most of its reviewers call it a hit; None: open."""
    votes = [v in HITS for v in verdicts if v != "second-reviewer"]
    hits = sum(votes)
    return None if 2 * hits == len(votes) else 2 * hits > len(votes)


def _by_item(verdicts: ByReview) -> dict[str, list[str]]:
    by_item: dict[str, list[str]] = {}
    for (item, _), v in verdicts.items():
        by_item.setdefault(item, []).append(v.verdict)
    return by_item


def _rates(by_item: Mapping[str, list[str]], arms: Mapping[str, str]) -> _Rates:
    hits: dict[str, list[bool]] = {"queue": [], "control": []}
    still_open = 0
    for item, verdicts in by_item.items():
        hit = _majority(verdicts)
        if hit is None:
            still_open += 1
        else:
            hits[arms[item]].append(hit)
    queue, control = (statistics.proportion(sum(some), len(some)) for some in hits.values())
    difference = statistics.difference(queue, control)
    sentence = _rates_sentence(queue, control, difference, still_open)
    return _Rates(queue, control, difference, still_open, sentence)


def _rates_sentence(queue: Estimate, control: Estimate, more: Estimate, still_open: int) -> str:
    if not queue.n and not control.n:
        return f"no image is decided yet; {still_open} are open"
    rates = f"{_share(queue, 'of the queue')} and {_share(control, 'chosen at random')} were rejected"
    if not (queue.n and control.n):
        return f"{rates}; a comparison needs both"
    finds = "finds more" if more.low > 0 else "finds less" if more.high < 0 else "is not shown to find more"
    difference = f"{100 * more.value:+.0f} points [{100 * more.low:+.0f}, {100 * more.high:+.0f}]"
    still = f"; {still_open} are open" if still_open else ""
    return f"{rates}: {difference}, so the queue {finds} than chance would{still}"


def _share(e: Estimate, which: str) -> str:
    if not e.n:
        return f"none yet of those {which}"
    return f"{100 * e.value:.0f} % [{100 * e.low:.0f}, {100 * e.high:.0f}] of {e.n} {which}"


def _pair(a: str, b: str, first: ByReview) -> _Pair:
    items = sorted(item for item, reviewer in first if reviewer == a and (item, b) in first)
    codes = {verdict: float(i) for i, verdict in enumerate(VERDICTS)}
    x, y = (np.array([codes[first[item, reviewer].verdict] for item in items]) for reviewer in (a, b))
    agreement = statistics.proportion(int((x == y).sum()), len(items))
    return _Pair((a, b), agreement, statistics.bootstrap(statistics.kappa, x, y))


CONFIDENCE = 0.95
SHARES = (0.05, 0.02, 0.01)
"""Shares of wrong maps for which the number of further readings is stated."""


@dataclass(frozen=True)
class _Counts:
    """The verdicts of a review, counted. An image of the control arm that an extended queue has reached is in the queue."""

    outside: int  # images outside the queue
    controls: int  # random ones of them
    reviewed: int  # of the controls, those with a verdict
    wrong: int  # of the reviewed controls
    undecided: int  # of the reviewed controls
    found: int  # wrong maps in both arms
    undecided_everywhere: int  # in both arms
    queue_left: int  # images of the queue without a verdict
    outside_both_samples: int = 0  # images in neither arm that have a verdict, of an earlier queue
    wrong_outside_both_samples: int = 0
    extensions: int = 0  # of the queue
    reviewed_before: int = 0  # controls that had a verdict before this queue was made

    @property
    def may_be_selected(self) -> bool:
        """Whether the reviewed controls may not be a random sample of all controls."""
        return self.reviewed < self.controls and self.reviewed_before > 0


@dataclass(frozen=True)
class UnopenedBound:
    """What is left when a review stops. Shares are from 0 to 1, and None where nothing can be stated."""

    counts: _Counts
    confidence: float
    unopened: int  # images outside the queue without a verdict
    outside_bound: float | None  # wrong maps among all images outside the queue, at most
    unopened_share: float | None  # wrong maps among the unopened, estimated
    unopened_bound: float | None  # and at most
    recall: float | None  # wrong maps found, of all wrong maps: estimated
    recall_bound: float | None  # and at least
    more_reviews: dict[
        str, int | None
    ]  # by share: further controls, none of them wrong, that would support it
    sentence: str

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return json_ready(asdict(self))  # type: ignore[no-any-return]


def count_verdicts(log: ReviewLog, queue: pa.Table, ok: int) -> _Counts:
    """The verdicts on the rows of a triage, which ranked `ok` images."""
    arms = arms_now(queue)
    sample = {name for name, arm in arms.items() if arm == "control"}
    first = {(v.item, v.reviewer): v for v in reversed(_by_person(log, {v.item for v in log.verdicts()}))}
    every = {name: _is_wrong(verdicts) for name, verdicts in _by_item(first).items()}
    outside_both = [wrong for name, wrong in every.items() if name not in arms]
    of_sample = [wrong for name, wrong in every.items() if name in sample]
    began, extensions = _last_triage(log)
    return _Counts(
        outside=ok - len(arms) + len(sample),
        controls=len(sample),
        reviewed=len(of_sample),
        wrong=of_sample.count(True),
        undecided=of_sample.count(None),
        found=[*every.values()].count(True),
        undecided_everywhere=[*every.values()].count(None),
        queue_left=len(arms.keys() - sample - every.keys()),
        outside_both_samples=len(outside_both),
        wrong_outside_both_samples=outside_both.count(True),
        extensions=extensions,
        reviewed_before=len({v.item for v in log.verdicts() if v.item in sample and v.number < began}),
    )


def _last_triage(log: ReviewLog) -> tuple[int, int]:
    """The number of the event that made the queue, and how often it was extended since."""
    began = extensions = 0
    for event in log.log.events("triaged"):
        extended = event.payload.get("options", {}).get("extended") or ()
        extensions = len(extended)
        began = began if extended else event.number
    return began, extensions


def _is_wrong(verdicts: Sequence[str]) -> bool | None:
    """Whether the majority of its reviewers reject a map (True) or say that it supports (False); None: undecided."""
    votes = [v for v in verdicts if v != "second-reviewer"]
    if 2 * sum(v in HITS for v in votes) > len(votes):
        return True
    return False if 2 * votes.count("supports") > len(votes) else None


def bound_unopened(
    counts: _Counts, *, confidence: float = CONFIDENCE, shares: Sequence[float] = SHARES
) -> UnopenedBound:
    """What these verdicts support with this confidence, in one look at them."""
    c, decided = counts, counts.reviewed - counts.undecided
    unopened = c.outside - c.reviewed - c.outside_both_samples
    outside_bound = unopened_share = unopened_bound = recall = recall_bound = None
    if (c.reviewed and not c.may_be_selected) or not unopened:
        outside_bound = _outside_bound(c, c.reviewed, confidence)
        known = c.wrong + c.wrong_outside_both_samples
        missed = min(max(outside_bound * c.outside - known, 0.0), unopened)
        unopened_bound = missed / unopened if unopened else 0.0
        wrong = c.found + c.undecided_everywhere + c.queue_left + missed
        recall_bound = c.found / wrong if wrong else None
    if (decided and not c.may_be_selected) or not unopened:
        unopened_share = c.wrong / decided if unopened else 0.0
        wrong = c.found + unopened_share * unopened
        recall = c.found / wrong if wrong and not c.queue_left else None
    bound = UnopenedBound(
        counts, confidence, unopened, outside_bound, unopened_share, unopened_bound, recall, recall_bound,
        {f"{share:g}": _more_reviews(counts, share, confidence=confidence) for share in shares}, "",
    )  # fmt: skip
    return replace(bound, sentence=_sentence(bound))


def _more_reviews(counts: _Counts, share: float, *, confidence: float = CONFIDENCE) -> int | None:
    """How many further controls, none of them wrong, would support that at most `share` of the unopened are; None: all.

    b(n) N − k ≤ share (N − n) must hold. The difference is convex in n, so the n that satisfy it are an interval.
    """
    c = counts

    known = c.wrong + c.wrong_outside_both_samples

    def excess(n: int) -> float:
        unopened = c.outside - c.outside_both_samples - n
        return _outside_bound(c, n, confidence) * c.outside - known - share * unopened

    if not c.outside - c.reviewed or (excess(c.reviewed) <= 0 and not c.may_be_selected):
        return 0
    least = c.controls if c.may_be_selected else c.reviewed
    # the first n from which the excess no longer falls; before it, it falls
    lowest = least + bisect_left(range(least, c.outside - 1), True, key=lambda n: excess(n) <= excess(n + 1))
    if excess(lowest) > 0:
        return None
    return least + bisect_left(range(least, lowest), True, key=lambda n: excess(n) <= 0) - c.reviewed


def _outside_bound(c: _Counts, n: int, confidence: float) -> float:
    """The largest share of wrong maps outside the queue, by n reviewed controls."""
    if not n:
        return 1.0 if c.outside else 0.0
    if n == c.outside:
        return (c.wrong + c.undecided) / n
    return upper_bound(c.wrong + c.undecided, n, confidence=1 - (1 - confidence) / (c.extensions + 1))


def _sentence(r: UnopenedBound) -> str:
    c = r.counts
    sentences = [_about_unopened(r)]
    undecided = (
        f" ({c.undecided_everywhere:,} undecided, not counted as found)" if c.undecided_everywhere else ""
    )
    if c.found:
        share = ""
        if r.recall_bound is not None:
            share = f", at least {_percent(r.recall_bound, up=False)} of all wrong maps"
        if r.recall_bound == 1:
            share = ", all there are"
        sentences.append(f"The review has found {_count(c.found, 'wrong map')}{share}{undecided}.")
    elif c.reviewed or not c.queue_left:
        sentences.append(f"The review has found no wrong map{undecided}.")
    for left, arm in ((c.controls - c.reviewed if c.reviewed else 0, "control arm"), (c.queue_left, "queue")):
        if left > 0:
            sentences.append(f"{_count(left, 'image')} of the {arm} {_are(left)} not reviewed yet.")
    return " ".join(sentences)


def _about_unopened(r: UnopenedBound) -> str:
    c = r.counts
    undecided = f", counting {c.undecided:,} undecided as wrong" if c.undecided else ""
    wrong = c.wrong + c.undecided
    if not c.outside:
        return "Every map is in the queue."
    if not r.unopened:
        return f"All {c.outside:,} maps outside the queue are reviewed; {wrong:,} of them {_are(wrong)} wrong{undecided}."
    unknown = f"Whether the {_count(c.outside, 'map')} outside the queue {_are(c.outside)} right is not known"
    if not c.controls:
        return f"{unknown}: there is no control arm."
    if c.may_be_selected:
        has = "has" if c.reviewed_before == 1 else "have"
        before = f"{_count(c.reviewed_before, 'image')} of the control arm {has} a verdict from before this queue was made"
        return f"{unknown} yet: {before}, so all {c.controls:,} must be reviewed first."
    if r.unopened_bound is None:
        which, has = (f"none of the {c.controls:,}", "has") if c.controls > 1 else ("the one", "has not")
        return f"{unknown} yet: {which} drawn at random, the control arm, {has} been reviewed."
    which = " outside the queue that" if c.queue_left else ""
    looks = {0: "", 1: " in both looks together"}.get(
        c.extensions, f" in all {c.extensions + 1} looks together"
    )
    sample = f"{wrong:,} of {c.reviewed:,} drawn at random {'was' if wrong == 1 else 'were'}{undecided}"
    share = f"at most {_percent(r.unopened_bound, up=True)} {_are(r.unopened)} wrong"
    confidence = f"{100 * r.confidence:g} % confidence{looks}"
    return f"Of the {_count(r.unopened, 'map')}{which} nobody opened {share} ({confidence}; {sample})."


def _count(count: int, what: str) -> str:
    return f"{count:,} {what}{'' if count == 1 else 's'}"


def _are(count: int) -> str:
    return "is" if count == 1 else "are"


def _percent(share: float, *, up: bool) -> str:
    """Rounded up, so that "at most" stays true, or down, so that "at least" does."""
    if up:
        unit = 100 if share < 0.01 else 10
        return f"{math.ceil(100 * unit * share - 1e-9) / unit:g} %"
    unit = 10 if share < 0.1 else 1
    return f"{math.floor(100 * unit * share + 1e-9) / unit:g} %"
