"""One row of a reproduced table: the published number, the measured ones, and the verdict.

Measured is by the authors' protocol (`as_published`) and by ours (`clean`: the disc, reflection). The verdict is about the
authors' protocol where it was run, because that is the number they claim. If their number comes out but the paired difference by
ours, with its whole interval, has the opposite sign of the claim, it is an artefact.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar

from equicam.evaluate.statistics import MIN_GROUPS, Correlation, Estimate
from equicam.shards import json_ready
from equicam_paper.claims import DOMAINS, MIN_IMAGES, NETWORKS, Claim, claims
from equicam_paper.margins import margin, published_images, published_range, published_text, rounding

T_co = TypeVar("T_co", covariant=True)
U = TypeVar("U")
P = ParamSpec("P")


def _networks_sentence(by_seed: Sequence[float], floor: float, constant: float) -> str:
    """Eq of each network, of unrelated images, and the share of constant maps; parts without a number are left out."""
    parts = [f"by seed {', '.join(f'{eq:.3f}' for eq in by_seed)}"] if by_seed else []
    parts += [] if math.isnan(floor) else [f"unrelated images {floor:.3f}"]
    parts += [f"{constant:.0%} of the maps are constant and count 0"] if constant > 0 else []
    return "; ".join(parts)


VERDICTS = ("matches", "differs", "artefact", "undecided", "by definition", "measured", "not run")
SENTENCES: dict[str, str | Callable[..., str]] = {
    "note": "{text}",
    "off": "off by {distance:.3g}, margin {margin:.3g}",
    "off-range": "off by {distance:.3g} from {low:g} to {high:g}, margin {margin:.3g}",
    "few": "{n} images: {needed} are needed to decide",
    "few-groups": "{groups} groups of images: {needed} are needed to decide",
    "artefact": "{text}: {value:+.3f} [{low:+.3f}, {high:+.3f}] by ours",
    "wide": "the interval reaches across the margin of {margin:.3g}",
    "no-interval": "no interval, so nothing is decided",
    "coarse": "the paper prints too few digits for a margin of {margin:.2g}",
    "other-sample": "published for {sample}, whose Eq is higher: --draw authors",
    "one-training": "one fine-tune here and one there, and how far fine-tunes differ is not published",
    "no-n": "on how many images it was measured is not published, nor how far it may be off",
    "one-network": "the paper's is over its three networks, this is {network} alone",
    "other-input": "this model's input is not the paper's, an image resized to 256 and cropped to 224 pixels",
    "network": "of {network}: --model {network}",
    "images": "of {about}: --data with these images, and --domain only for a domain's",
    "costly": "{passes} forward passes per map: --costly, with --n",
    "command": "of {of}: {command}",
    "control": "drift minus this {mean:+.3f} [{low:+.3f}, {high:+.3f}]; drift costs more on {wins:.0%} of the images",
    "networks": _networks_sentence,
}
"""How a table words each remark: a format, or a function of the values."""


@dataclass(frozen=True)
class Both(Generic[T_co]):
    """The same quantity by our protocol (`clean`) and by the authors' (`as_published`)."""

    clean: T_co
    as_published: T_co

    @staticmethod
    def of(measure: Callable[[str], U]) -> "Both[U]":
        """`measure` of either protocol's name."""
        return Both(measure("ours"), measure("paper"))

    @staticmethod
    def together(several: "Sequence[Both[U]]") -> "Both[list[U]]":
        """Several quantities, a list by either protocol."""
        return Both([one.clean for one in several], [one.as_published for one in several])

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
        words = SENTENCES[self.code]
        return words.format(**self.values) if isinstance(words, str) else words(**self.values)


@dataclass(frozen=True)
class Contradiction:
    """By our protocol, the paired difference that a claim says is above 0: the claim is contradicted if it lies below."""

    difference: Estimate
    text: str

    @property
    def holds(self) -> bool:
        """Whether the whole interval is below 0, over enough images and groups."""
        return too_few(self.difference) is None and self.difference.high < 0

    @property
    def remark(self) -> Remark:
        """The contradiction with its interval."""
        d = self.difference
        return Remark("artefact", {"text": self.text, "value": d.value, "low": d.low, "high": d.high})


@dataclass(frozen=True)
class Row:
    """One claim compared with its measurements."""

    claim: str  # empty: the paper has no such number
    label: str
    published: str
    clean: Estimate | None
    as_published: Estimate | None
    verdict: str  # one of VERDICTS
    reason: Remark | None = None  # what a reader should know of the measurement, or why there is none
    why: Remark | None = None  # what the verdict follows from
    margin: float | None = None  # within which the whole interval of a match lies
    within: tuple[float, float] | None = None  # the published range; one number twice

    @property
    def images(self) -> int:
        """How many the measurement is of that a verdict is about."""
        found = self.as_published or self.clean
        return found.n if found else 0

    @property
    def note(self) -> str:
        """Reason and verdict in words; empty without them."""
        return "; ".join(one.text for one in (self.why, self.reason) if one is not None)

    def unclaimed(self) -> "Row":
        """Its numbers without the claim and its verdict."""
        return replace(self, claim="", verdict="measured", why=None, margin=None, within=None)

    def as_json(self) -> dict[str, Any]:
        """Plain values, null where undefined."""
        found: dict[str, Any] = json_ready(asdict(self) | {"note": self.note})
        return found


def compare(
    claim: str,
    found: Both[Estimate | None],
    *,
    label: str = "",
    artefact: Contradiction | None = None,
    reason: str | Remark = "",
    published: str = "not in the paper",
    of_first_classes: bool = False,
) -> Row:
    """A claim with its measurements and the verdict that follows; without one of the paper's, they stand alone.

    `of_first_classes` says that they are of the first classes, as some published numbers are.
    """
    known = claims().get(claim)
    note = _remark(reason)
    if known is None:
        return Row("", label, published, found.clean, found.as_published, "measured", note)
    label, text = label or known.label, published_text(claim)
    row = Row(claim, label, text, found.clean, found.as_published, "measured", note)
    if (found.as_published or found.clean) is None:
        return replace(row, verdict="not run")
    if not known.values:
        return row
    if known.of_first_classes and not of_first_classes:
        return replace(row, verdict="undecided", why=Remark("other-sample", {"sample": "the first classes"}))
    row = judge_again(replace(row, within=published_range(claim)))
    if artefact is not None and artefact.holds and row.verdict == "matches":
        row = replace(row, verdict="artefact", why=artefact.remark)
    return row


def judge_again(row: Row) -> Row:
    """The row by the present rule; one that no interval decided stays as it is, and so does an artefact."""
    measured = row.as_published or row.clean
    if row.within is None or measured is None:
        return row
    allowed, within = margin(row.claim), published_range(row.claim)
    theirs = published_error(claims()[row.claim], measured)
    verdict, why = judge(within, measured, allowed, theirs=theirs, rounding=rounding(row.claim))
    row = replace(row, published=published_text(row.claim), margin=allowed, within=within)
    if row.verdict == "artefact" and verdict == "matches":
        return row
    return replace(row, verdict=verdict, why=why)


def judge(
    published: tuple[float, float],
    found: Estimate,
    margin: float,
    *,
    theirs: float | Remark = 0.0,
    rounding: float = 0.0,
) -> tuple[str, Remark | None]:
    """Equivalence by interval: whole inside the margin it matches, whole outside it differs, else nothing is decided.

    `theirs` is half of the published number's own interval, or why that is unknown: errors add in quadrature. `rounding` is how
    far the printed number may be from the one behind it, wherever in this range a match or a difference has to hold.
    Two one-sided tests at 5 % would use the narrower 90 % interval; ours has 95 %.
    """
    low, high = published
    if math.isnan(found.value) or math.isnan(found.low) or math.isnan(found.high):
        return "undecided", Remark("no-interval", {})
    if few := too_few(found):
        return "undecided", few
    if isinstance(theirs, Remark):
        return "undecided", theirs
    bottom = found.value - math.hypot(found.value - found.low, theirs)
    top = found.value + math.hypot(found.high - found.value, theirs)
    if top < low - margin - rounding or bottom > high + margin + rounding:
        values = {"distance": max(low - found.value, found.value - high), "margin": margin}
        ends = {"low": low, "high": high}
        return "differs", Remark("off", values) if low == high else Remark("off-range", ends | values)
    if margin <= rounding or math.isclose(margin, rounding):
        return "undecided", Remark("coarse", {"margin": margin})
    if low - (margin - rounding) <= bottom and top <= high + (margin - rounding):
        return "matches", None
    return "undecided", Remark("wide", {"margin": margin})


def published_error(claim: Claim, found: Estimate) -> float | Remark:
    """Half of the published number's 95 % interval, or the reason why nothing says how wide it is.

    Where none is printed, it is ours scaled to their number of images. Both networks of a domain were fine-tuned once, so how
    far fine-tunes differ, which the paper states for Eq and accuracy, counts twice. Costs are printed as a range.
    """
    if claim.of == "A100":
        return 0.0
    theirs = published_images(claim.id)
    if claim.ci95 is not None:
        images = (claim.ci95[1] - claim.ci95[0]) / 2
    elif theirs is not None:
        images = (found.high - found.low) / 2 * math.sqrt(found.n / theirs)
    else:
        return Remark("no-n", {})
    if claim.domain not in DOMAINS:
        return images
    spread = _spread_of_trainings(claim)
    if math.isnan(spread):
        return Remark("one-training", {})
    return math.hypot(images, 1.96 * math.sqrt(2) * spread)


def _spread_of_trainings(claim: Claim) -> float:
    """The published standard deviation over fine-tunes of what a claim is about; NaN where there is none."""
    start = f"app.{claim.domain}"
    if "acc" in claim.metric:
        return claims()[f"{start}.acc_seed_sd"].values[0] / 100  # in percentage points
    if "Eq" not in claim.metric.split():
        return math.nan
    method = "eg" if claim.method.startswith(("EquiGrad-CAM", "EG")) else "gc"
    return claims()[f"{start}.seeds.{method}.sd"].values[0]


def too_few(found: Estimate) -> Remark | None:
    """The remark that there are too few images, or groups of them, for an interval to decide anything."""
    if found.n < MIN_IMAGES:
        return Remark("few", {"n": found.n, "needed": MIN_IMAGES})
    if found.groups is not None and found.groups < MIN_GROUPS:
        return Remark("few-groups", {"groups": found.groups, "needed": MIN_GROUPS})
    return None


def by_definition(
    claim: str,
    value: int | float,
    *,
    label: str,
    reason: str = "",
    near: float = 1e-4,
    unless: Remark | None = None,
) -> Row:
    """A constant of the protocol, checked against the published one."""
    (published,) = claims()[claim].values
    same = math.isclose(value, published, rel_tol=near)
    return checked(claim, Both(number(value), None), same, label=label, reason=reason, unless=unless)


def checked(
    claim: str,
    found: Both[Estimate | None],
    holds: bool,
    *,
    label: str,
    reason: str = "",
    published: str = "",
    unless: Remark | None = None,
) -> Row:
    """A constant or an identity, which does not count as a match; `unless` is why another value decides nothing."""
    verdict = "by definition" if holds else "undecided" if unless else "differs"
    why = None if holds else unless
    return with_verdict(claim, found, verdict, label=label, reason=reason, published=published, why=why)


def with_verdict(
    claim: str,
    found: Both[Estimate | None],
    verdict: str,
    *,
    label: str,
    reason: str = "",
    published: str = "",
    why: Remark | None = None,
) -> Row:
    """A claim whose verdict follows from more than the distance to the published number."""
    shown = published or claims()[claim].text
    return Row(claim, label, shown, found.clean, found.as_published, verdict, _remark(reason), why)


def only_of_the_papers(row: Row, backbone: str, domain: str, *, cub: bool = True) -> tuple[Row, ...]:
    """The row; where its claim is about another network or images, the row without it, and the claim as not run.

    `cub` says that the images may be those of CUB-200-2011.
    """
    known = claims().get(row.claim)
    if known is None or row.verdict == "not run":
        return (row,)
    if known.is_about(backbone, domain) and (cub or not known.of_cub):
        return (row,)
    remark, network = Remark("images", {"about": known.about}), known.network or NETWORKS[0]
    if backbone != network and not domain and not known.of_cub:
        remark = Remark("network", {"network": network})
    alone = replace(row.unclaimed(), published=f"{row.published}, of {known.about}")
    return alone, not_run(row.claim, remark)


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
    return Estimate(c.r, c.low, c.high, c.n, c.groups)


def scaled(e: Estimate, by: int | float, plus: int | float = 0.0) -> Estimate:
    """A number in another unit, with the opposite sign, or (−1, plus 1) the rest of a share."""
    low, high = (e.low, e.high) if by > 0 else (e.high, e.low)
    return replace(e, value=by * e.value + plus, low=by * low + plus, high=by * high + plus)


def _remark(given: str | Remark) -> Remark | None:
    if isinstance(given, Remark):
        return given
    return note(given) if given else None
