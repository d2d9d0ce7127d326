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
from equicam.shards import json_ready

T_co = TypeVar("T_co", covariant=True)
U = TypeVar("U")
P = ParamSpec("P")
Value = float | tuple[float, float] | None
TOLERANCE = 0.03
MIN_IMAGES_FOR_INTERVAL = 100
"""From this sample size on, an interval that contains the published number counts as a match."""
SENTENCES = {
    "note": "{text}",
    "off": "off by {distance:.3f}, allowed {allowed:g}",
    "network": "of {network}: --model {network}",
    "costly": "{passes} forward passes per map: --costly, with --n",
    "command": "of {of}: {command}",
    "control": "drift minus this {mean:+.3f} [{low:+.3f}, {high:+.3f}]; drift costs more on {wins:.0%} of the images",
}
"""How a table words each remark."""


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
    verdict: str  # matches, differs, artefact, undecided (few images, or several networks), measured, not run
    reason: Remark | None = None
    allowed: float | None = None  # how far a match may be off

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
    tolerance: int | float = TOLERANCE,
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
    verdict = "not run" if measured is None else _verdict(value, measured, tolerance)
    if artefact and verdict == "matches":
        verdict, why = "artefact", _remark(artefact)
    if measured is not None and verdict == "differs" and why is None:
        distance = {"distance": _distance(value, measured.value), "allowed": tolerance}
        why = Remark("off", distance)
    allowed = float(tolerance) if verdict in ("matches", "differs", "artefact") else None
    label = label or known.label
    return Row(claim, label, known.text, found.clean, found.as_published, verdict, why, allowed)


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
    """A difference of two means, without an interval."""
    return number(a.value - b.value, min(a.n, b.n))


def _remark(given: str | Remark) -> Remark | None:
    if isinstance(given, Remark):
        return given
    return note(given) if given else None


def _verdict(published: Value, found: Estimate, tolerance: int | float) -> str:
    if published is None:
        return "measured"
    if math.isnan(found.value):
        return "undecided"
    if _distance(published, found.value) <= tolerance:
        return "matches"
    low, high = published if isinstance(published, tuple) else (published, published)
    inside = not math.isnan(found.low) and found.low <= high and low <= found.high
    return ("matches" if found.n >= MIN_IMAGES_FOR_INTERVAL else "undecided") if inside else "differs"


def _distance(published: Value, value: float) -> float:
    if published is None or math.isnan(value):
        return math.inf
    low, high = published if isinstance(published, tuple) else (published, published)
    return max(low - value, value - high, 0.0)
