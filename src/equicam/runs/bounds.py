"""What a review may state when it stops: how many of the maps that nobody opened can be wrong at most.

The control arm is a random sample of the images outside the queue. With k wrong maps among the n reviewed ones of N
images outside it, b is the Clopper–Pearson bound of their share: P(at most k of n | b) = 1 − confidence. At most
b N − k of the N − n maps that nobody opened are then wrong. A map is wrong if the majority of its reviewers reject it,
and right if the majority say that it supports; any other is undecided and counts as wrong in every bound, and so does an
image of the queue without a verdict in the bound of recall. First verdicts count, because they were given under blinding.

An auditor who extends the queue until the statement pleases looks at it several times: with m extensions each look has
1 − (1 − confidence) / (m + 1), so that all of them together hold. Controls are reviewed in random order, so those with a
verdict are a random sample too, unless some had theirs before this queue was made: then all must be reviewed first.
"""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import pyarrow as pa

from equicam.evaluate.statistics import upper_bound
from equicam.runs.review_statistics import HITS, arms_now, first_verdicts
from equicam.runs.verdicts import ReviewLog
from equicam.shards import json_ready

CONFIDENCE = 0.95
SHARES = (0.05, 0.02, 0.01)
"""Shares of wrong maps for which the number of further readings is stated."""


@dataclass(frozen=True)
class Counts:
    """The verdicts of a review, counted. An image of the control arm that an extended queue has reached is in the queue."""

    outside: int  # images outside the queue
    controls: int  # random ones of them
    reviewed: int  # of the controls, those with a verdict
    wrong: int  # of the reviewed controls
    undecided: int  # of the reviewed controls
    found: int  # wrong maps in both arms
    undecided_everywhere: int  # in both arms
    queue_left: int  # images of the queue without a verdict
    elsewhere: int = 0  # images in neither arm that have a verdict, of an earlier queue
    wrong_elsewhere: int = 0
    extensions: int = 0  # of the queue
    reviewed_before: int = 0  # controls that had a verdict before this queue was made

    @property
    def may_be_selected(self) -> bool:
        """Whether the reviewed controls may not be a random sample of all controls."""
        return self.reviewed < self.controls and self.reviewed_before > 0


@dataclass(frozen=True)
class Remainder:
    """What is left when a review stops. Shares are from 0 to 1, and None where nothing can be stated."""

    counts: Counts
    confidence: float
    unopened: int  # images outside the queue without a verdict
    outside_bound: float | None  # wrong maps among all images outside the queue, at most
    unopened_share: float | None  # wrong maps among the unopened, estimated
    unopened_bound: float | None  # and at most
    recall: float | None  # wrong maps found, of all wrong maps: estimated
    recall_bound: float | None  # and at least
    more_readings: dict[
        str, int | None
    ]  # by share: further controls without a wrong map that would support it
    sentence: str

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        found: dict[str, Any] = json_ready(asdict(self))
        return found


def count_verdicts(log: ReviewLog, queue: pa.Table, ok: int) -> Counts:
    """The verdicts on the rows of a triage, which ranked `ok` images."""
    arms = arms_now(queue)
    sample = {name for name, arm in arms.items() if arm == "control"}
    every = {name: is_wrong(verdicts) for name, verdicts in first_verdicts(log).items()}
    wrong = {name: decided for name, decided in every.items() if name in arms}
    elsewhere = [decided for name, decided in every.items() if name not in arms]
    of_sample = [decided for name, decided in wrong.items() if name in sample]
    began, extensions = _last_triage(log)
    return Counts(
        outside=ok - len(arms) + len(sample),
        controls=len(sample),
        reviewed=len(of_sample),
        wrong=of_sample.count(True),
        undecided=of_sample.count(None),
        found=sum(decided is True for decided in every.values()),
        undecided_everywhere=sum(decided is None for decided in every.values()),
        queue_left=len(arms.keys() - sample - wrong.keys()),
        elsewhere=len(elsewhere),
        wrong_elsewhere=elsewhere.count(True),
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


def is_wrong(verdicts: Sequence[str]) -> bool | None:
    """Whether the majority of its reviewers reject a map (True) or say that it supports (False); None: undecided."""
    votes = [v for v in verdicts if v != "second-reviewer"]
    if 2 * sum(v in HITS for v in votes) > len(votes):
        return True
    return False if 2 * votes.count("supports") > len(votes) else None


def remainder(
    counts: Counts, *, confidence: float = CONFIDENCE, shares: Sequence[float] = SHARES
) -> Remainder:
    """What these verdicts support with this confidence, in one look at them."""
    c, decided = counts, counts.reviewed - counts.undecided
    unopened = c.outside - c.reviewed - c.elsewhere
    outside_bound = unopened_share = unopened_bound = recall = recall_bound = None
    if (c.reviewed and not c.may_be_selected) or not unopened:
        outside_bound = _outside_bound(c, c.reviewed, confidence)
        missed = max(outside_bound * c.outside - c.wrong - c.wrong_elsewhere, 0.0) if unopened else 0.0
        unopened_bound = min(missed / unopened, 1.0) if unopened else 0.0
        wrong = c.found + c.undecided_everywhere + c.queue_left + min(missed, unopened)
        recall_bound = c.found / wrong if wrong else None
    if (decided and not c.may_be_selected) or not unopened:
        unopened_share = c.wrong / decided if unopened else 0.0
        wrong = c.found + unopened_share * unopened
        recall = c.found / wrong if wrong and not c.queue_left else None
    found = Remainder(
        counts, confidence, unopened, outside_bound, unopened_share, unopened_bound, recall, recall_bound,
        {f"{share:g}": more_readings(counts, share, confidence=confidence) for share in shares}, "",
    )  # fmt: skip
    return replace(found, sentence=_sentence(found))


def more_readings(counts: Counts, share: float, *, confidence: float = CONFIDENCE) -> int | None:
    """How many further controls, none of them wrong, would support that at most `share` of the unopened are; None: all.

    b(n) N − k ≤ share (N − n) must hold. The difference is convex in n, so the n that satisfy it are an interval.
    """
    c = counts

    def excess(n: int) -> float:
        known = c.wrong + c.wrong_elsewhere
        return _outside_bound(c, n, confidence) * c.outside - known - share * (c.outside - c.elsewhere - n)

    if not c.outside - c.reviewed or (excess(c.reviewed) <= 0 and not c.may_be_selected):
        return 0
    low, high = c.controls if c.may_be_selected else c.reviewed, c.outside - 1
    while low < high:  # the first n from which the excess no longer falls
        middle = (low + high) // 2
        low, high = (low, middle) if excess(middle) <= excess(middle + 1) else (middle + 1, high)
    if excess(low) > 0:
        return None
    first, last = c.controls - 1 if c.may_be_selected else c.reviewed, low
    while first + 1 < last:
        middle = (first + last) // 2
        first, last = (first, middle) if excess(middle) <= 0 else (middle, last)
    return last - c.reviewed


def _outside_bound(c: Counts, n: int, confidence: float) -> float:
    """The largest share of wrong maps outside the queue, by n reviewed controls."""
    if not n:
        return 1.0 if c.outside else 0.0
    if n == c.outside:
        return (c.wrong + c.undecided) / n
    return upper_bound(c.wrong + c.undecided, n, confidence=1 - (1 - confidence) / (c.extensions + 1))


def _sentence(r: Remainder) -> str:
    c = r.counts
    sentences = [_about_unopened(r)]
    undecided = (
        f" ({c.undecided_everywhere:,} undecided, not counted as found)" if c.undecided_everywhere else ""
    )
    if r.recall_bound is not None and c.found:
        share = (
            "all there are"
            if r.recall_bound == 1
            else f"at least {_percent_down(r.recall_bound)} of all wrong maps"
        )
        sentences.append(f"The review has found {_count(c.found, 'wrong map')}, {share}{undecided}.")
    elif c.found:
        sentences.append(f"The review has found {_count(c.found, 'wrong map')}{undecided}.")
    elif c.reviewed or not c.queue_left:
        sentences.append(f"The review has found no wrong map{undecided}.")
    if c.reviewed and c.reviewed < c.controls:
        left = c.controls - c.reviewed
        sentences.append(f"{_count(left, 'image')} of the control arm {_are(left)} not reviewed yet.")
    if c.queue_left:
        sentences.append(
            f"{_count(c.queue_left, 'image')} of the queue {_are(c.queue_left)} not reviewed yet."
        )
    return " ".join(sentences)


def _about_unopened(r: Remainder) -> str:
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
        return (
            f"{unknown} yet: {_count(c.reviewed_before, 'image')} of the control arm {_had(c.reviewed_before)} a verdict from "
            f"before this queue was made, so all {c.controls:,} must be reviewed first."
        )
    if r.unopened_bound is None:
        which = f"none of the {c.controls:,}" if c.controls > 1 else "the one"
        return f"{unknown} yet: {which} drawn at random, the control arm, has {'' if c.controls > 1 else 'not '}been reviewed."
    which = " outside the queue that" if c.queue_left else ""
    looks = {0: "", 1: " in both looks together"}.get(
        c.extensions, f" in all {c.extensions + 1} looks together"
    )
    return (
        f"Of the {_count(r.unopened, 'map')}{which} nobody opened at most {_percent_up(r.unopened_bound)} "
        f"{_are(r.unopened)} wrong ({100 * r.confidence:g} % confidence{looks}; {wrong:,} of {c.reviewed:,} drawn at random "
        f"{_were(wrong)}{undecided})."
    )


def _count(count: int, what: str) -> str:
    return f"{count:,} {what}{'' if count == 1 else 's'}"


def _are(count: int) -> str:
    return "is" if count == 1 else "are"


def _had(count: int) -> str:
    return "has" if count == 1 else "have"


def _were(count: int) -> str:
    return "was" if count == 1 else "were"


def _percent_up(share: float) -> str:
    """Rounded up, so that "at most" stays true."""
    unit = 100 if share < 0.01 else 10
    return f"{math.ceil(100 * unit * share - 1e-9) / unit:g} %"


def _percent_down(share: float) -> str:
    """Rounded down, so that "at least" stays true."""
    unit = 10 if share < 0.1 else 1
    return f"{math.floor(100 * unit * share + 1e-9) / unit:g} %"
