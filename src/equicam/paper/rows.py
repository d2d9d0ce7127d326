"""One row of a reproduced table: the published number, the measured ones, and the verdict.

Every row has three numbers side by side: published, measured by the authors' protocol (`as_published`), and measured by
ours (the disc, reflection, a floor). The verdict compares the authors' protocol where it was run, because that is the
number they claim. If their number comes out but ours contradicts the conclusion, it is an artefact.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar

from equicam.evaluation.statistics import Correlation, Estimate
from equicam.paper.claims import claims
from equicam.paper.margins import margin
from equicam.shards import json_ready

T_co = TypeVar("T_co", covariant=True)
U = TypeVar("U")
P = ParamSpec("P")
MIN_IMAGES = 100
"""With fewer, a bootstrap interval is too narrow to decide anything."""
VERDICTS = ("matches", "differs", "artefact", "undecided", "by definition", "measured", "not run")
SENTENCES = {
    "note": "{text}",
    "off": "off by {distance:.3g}, margin {margin:.3g}",
    "few": "{n} images: {needed} are needed to decide",
    "wide": "the interval reaches across the margin of {margin:.3g}",
    "no-interval": "no interval, so nothing is decided",
    "network": "of {network}: --model {network}",
    "costly": "{passes} forward passes per map: --costly, with --n",
    "command": "of {of}: {command}",
    "control": "drift minus this {mean:+.3f} [{low:+.3f}, {high:+.3f}]; drift costs more on {wins:.0%} of the images",
}
"""How a table words each remark."""
VERDICT_REMARKS = ("off", "few", "wide", "no-interval")
"""Remarks that only explain a verdict."""


@dataclass(frozen=True)
class Both(Generic[T_co]):
    """The same quantity by our protocol (`clean`) and by the authors' (`as_published`)."""

    clean: T_co
    as_published: T_co

    def map(self, measure: Callable[Concatenate[T_co, P], U], *args: P.args, **kwargs: P.kwargs) -> "Both[U]":
        """`measure` applied to either."""
        return Both(measure(self.clean, *args, **kwargs), measure(self.as_published, *args, **kwargs))


@dataclass(frozen=True)
class Remark:
    """A remark on a row: a code that programs compare, and the values of its sentence."""

    code: str
    values: Mapping[str, Any]

    @property
    def text(self) -> str:
        """As a table words it."""
        return SENTENCES[self.code].format(**self.values)


@dataclass(frozen=True)
class Row:
    """One claim compared with its measurements."""

    claim: str  # empty: the paper has no such number
    label: str
    published: str
    clean: Estimate | None
    as_published: Estimate | None
    verdict: str  # one of VERDICTS
    reason: Remark | None = None
    margin: float | None = None  # within which the whole interval of a match lies

    @property
    def note(self) -> str:
        """The reason as a sentence; empty without one."""
        return "" if self.reason is None else self.reason.text

    def as_json(self) -> dict[str, Any]:
        """Plain values, null where undefined."""
        found: dict[str, Any] = json_ready(asdict(self) | {"note": self.note})
        return found


def compare(
    claim: str,
    found: Both[Estimate | None],
    *,
    label: str = "",
    artefact: str = "",
    reason: str | Remark = "",
    within: tuple[float, float] | None = None,
    published: str = "not in the paper",
) -> Row:
    """A claim with its measurements and the verdict that follows; `within` is the range that the claim is one end of.

    Without a claim, or with one that the paper does not make, the measurements stand alone.
    """
    known = claims().get(claim)
    why = _remark(reason)
    if known is None:
        return Row("", label, published, found.clean, found.as_published, "measured", why)
    measured, value = found.as_published or found.clean, within or known.value
    if measured is None or value is None:
        verdict, allowed = "not run" if measured is None else "measured", None
    else:
        allowed = margin(claim)
        verdict, undecided = judge(value, measured, allowed, known.ci95)
        why = why or undecided
    if artefact and verdict == "matches":
        verdict, why = "artefact", _remark(artefact)
    label = label or known.label
    return Row(claim, label, known.text, found.clean, found.as_published, verdict, why, allowed)


def judge(
    published: float | tuple[float, float],
    found: Estimate,
    margin: float,
    ci95: tuple[float, float] | None = None,
) -> tuple[str, Remark | None]:
    """Equivalence by interval: whole inside the margin it matches, whole outside it differs, else nothing is decided.

    A published interval widens ours: their errors add in quadrature. Two one-sided tests at 5 % would use the narrower
    90 % interval; ours has 95 %.
    """
    low, high = published if isinstance(published, tuple) else (published, published)
    if math.isnan(found.value) or math.isnan(found.low) or math.isnan(found.high):
        return "undecided", Remark("no-interval", {})
    if found.n < MIN_IMAGES:
        return "undecided", Remark("few", {"n": found.n, "needed": MIN_IMAGES})
    theirs = 0.0 if ci95 is None else (ci95[1] - ci95[0]) / 2
    bottom = found.value - math.hypot(found.value - found.low, theirs)
    top = found.value + math.hypot(found.high - found.value, theirs)
    if low - margin <= bottom and top <= high + margin:
        return "matches", None
    if top < low - margin or bottom > high + margin:
        distance = max(low - found.value, found.value - high)
        return "differs", Remark("off", {"distance": distance, "margin": margin})
    return "undecided", Remark("wide", {"margin": margin})


def by_definition(claim: str, value: int | float, *, label: str, reason: str = "", near: float = 1e-4) -> Row:
    """A constant of the protocol or an identity: it is checked, and is not counted as a match."""
    known = claims()[claim]
    (published,) = known.values
    verdict = "by definition" if math.isclose(value, published, rel_tol=near) else "differs"
    return Row(claim, label, known.text, number(value), None, verdict, _remark(reason))


def with_verdict(
    claim: str,
    found: Both[Estimate | None],
    verdict: str,
    *,
    label: str,
    reason: str = "",
    published: str = "",
) -> Row:
    """A claim whose verdict follows from more than the distance to the published number."""
    shown = published or claims()[claim].text
    return Row(claim, label, shown, found.clean, found.as_published, verdict, _remark(reason))


def not_run(claim: str, reason: str | Remark) -> Row:
    """A claim that this run does not answer, and the option or command that would."""
    known = claims()[claim]
    return Row(claim, known.label, known.text, None, None, "not run", _remark(reason))


def note(text: str) -> Remark:
    """A remark that no program compares."""
    return Remark("note", {"text": text})


def costly(passes: int | str) -> Remark:
    """A method that runs only with --costly because a map takes this many forward passes."""
    return Remark("costly", {"passes": f"{passes:,}" if isinstance(passes, int) else passes})


def number(value: int | float, n: int = 0) -> Estimate:
    """A value without an interval."""
    return Estimate(float(value), float("nan"), float("nan"), n)


def correlation(c: Correlation) -> Estimate:
    """A correlation as a number with its interval."""
    return Estimate(c.r, c.low, c.high, c.n)


def difference(a: Estimate, b: Estimate) -> Estimate:
    """A difference of two means over different images: their errors add in quadrature."""
    value = a.value - b.value
    down, up = math.hypot(a.value - a.low, b.high - b.value), math.hypot(a.high - a.value, b.value - b.low)
    return Estimate(value, value - down, value + up, min(a.n, b.n))


def _remark(given: str | Remark) -> Remark | None:
    if isinstance(given, Remark):
        return given
    return note(given) if given else None
