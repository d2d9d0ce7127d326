"""A table or claim of the paper as data: what it says, what measures it here, and what is concluded.

Every line has three numbers side by side: published, measured by the authors' protocol (`as_published`), and measured
by ours (the disc, reflection, a floor). The verdict is on the authors' protocol where there is one: that is the number
they claim. Where theirs comes out as published but ours contradicts what is concluded from it, it is an artefact.
"""

import hashlib
import json
import math
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from equicam.core.views import Views
from equicam.data.items import digest_files, digest_items
from equicam.data.sources import find_items
from equicam.evaluation import statistics, summary
from equicam.evaluation.evaluate import evaluate
from equicam.evaluation.statistics import Correlation, Estimate
from equicam.models.load import load
from equicam.models.weights import fingerprint
from equicam.readers.model import Model
from equicam.shards import json_ready, write_atomic

NAMES = {
    "Grad-CAM": "grad-cam",
    "Grad-CAM single view": "grad-cam",
    "Grad-CAM++": "grad-cam++",
    "LayerCAM": "layer-cam",
    "Score-CAM": "score-cam",
    "RISE": "rise",
    "Aug. Score-CAM": "aug-score-cam",
    "Recipro-CAM": "recipro-cam",
    "AugCAM unaligned": "aug-cam",
    "Unaligned output-space": "aug-cam",
    "Aligned output-space": "equigrad-cam-out",
    "Aligned feature-space (EquiGrad-CAM)": "equigrad-cam",
    "EquiGrad-CAM": "equigrad-cam",
    "EquiGrad-CAM+PCF": "equigrad-cam+pcf",
    "Attention Rollout": "rollout",
    "Transformer Attribution": "transformer-attribution",
}
"""The paper's names and ours."""
COSTLY = {"score-cam": 2048, "aug-score-cam": 6 * 2048, "rise": 8000, "recipro-cam": 50}
"""Methods with many forward passes a map, which run on request only."""
BACKBONES = ("resnet50", "vgg16", "vit_b_16")
"""The paper's networks on ImageNet."""
TOLERANCE = 0.03
ENOUGH = 100
"""Pictures from which on an interval that holds the published number counts as a match."""


@dataclass(frozen=True)
class Claim:
    """A number of the paper."""

    id: str
    value: float | tuple[float, float] | None
    n: int | None = None
    metric: str = ""
    of: str = ""
    method: str = ""
    sample: str = ""


@cache
def claims() -> dict[str, Claim]:
    """Every claim by name."""
    found = tomllib.loads(Path(__file__).with_name("expected.toml").read_text())
    return {name: _claim(name, entry) for name, entry in found.items()}


def _claim(name: str, entry: dict[str, Any]) -> Claim:
    given, n = entry.get("value"), entry.get("n")
    value: float | tuple[float, float] | None = None  # a claim in words ("n.s.") has no number
    if isinstance(given, list):
        value = (float(min(given)), float(max(given)))
    elif isinstance(given, int | float):
        value = float(given)
    words = (str(entry.get(key, "")) for key in ("metric", "of", "method", "sample"))
    return Claim(name, value, n if isinstance(n, int) else None, *words)


@dataclass(frozen=True)
class Line:
    """One claim beside what was measured."""

    claim: str
    what: str
    published: str
    clean: Estimate | None
    as_published: Estimate | None
    verdict: str  # matches, differs, artefact, undecided (too few, or of several networks), measured, not run
    reason: str = ""
    allowed: float | None = None  # how far a match may be off

    def as_json(self) -> dict[str, Any]:
        """Plain values, null where undefined."""
        found: dict[str, Any] = json_ready(asdict(self))
        return found


@dataclass(frozen=True)
class Experiment:
    """A table, figure or claim: which published numbers it answers, what it needs, and how it is run."""

    title: str
    answers: tuple[str, ...]  # how the names of its claims begin
    run: Callable[["Bench"], Iterator[Line]] = field(repr=False)
    needs: str = "an ImageNet classifier and validation pictures"

    def lines(self, bench: "Bench") -> Iterator[Line]:
        """What `run` finds; a number that was published of one network is no claim about another."""
        for one in self.run(bench):
            network = _network(one.claim)
            if one.verdict == "not run" or network in ("", bench.backbone):
                yield one
            else:
                said = f"{one.published}, of {network}"
                why = "" if one.reason.startswith("off by") else one.reason
                yield replace(one, claim="", published=said, verdict="measured", reason=why, allowed=None)
                yield not_run(one.claim, f"of {network}: --model {network}")


@dataclass(frozen=True)
class Bench:
    """What the caller gave: a network standing for one of the paper's, pictures, and where rows are kept."""

    model: Model
    data: str | Path
    out: Path
    backbone: str = "resnet50"  # whose published numbers stand beside
    domain: str = ""  # PatchCamelyon or RESISC45, where the pictures are of one
    n: int | None = None
    split: str | None = None
    costly: bool = False
    progress: bool = False
    options: dict[str, Any] = field(default_factory=dict)  # dtype, chunk: to `evaluate`
    extra: dict[str, Path] = field(
        default_factory=dict
    )  # other weights of the same architecture, by what they are

    @property
    def claimed_domain(self) -> str:
        """The domain as claims name it: theirs are of ResNet-50, another network's lines stand alone."""
        return self.domain if self.backbone == "resnet50" else f"{self.domain} by {self.backbone}"

    def with_weights(self, weights: Path) -> "Bench":
        """The same with other weights, rows in a folder of their own."""
        mine = self.model
        model = load(
            mine.name or "", weights=weights, classes=mine.classes, layer=mine.layer, device=mine.device
        )
        return replace(self, model=model, out=self.out / f"{weights.parent.name}-{weights.stem}")

    def rows(
        self,
        methods: Sequence[str] | Mapping[str, Any],
        scores: Sequence[str] = ("eq",),
        *,
        as_published: bool = False,
        views: int | Views | None = None,
        n: int | None = None,
    ) -> pa.Table:
        """An evaluation, kept in a file of its own; one that holds more is taken as it is."""
        same = {"as_published": as_published, "views": str(views), "n": n or self.n, "model": self.model.name}
        same |= {"data": str(self.data), "split": self.split, "weights": fingerprint(self.model.module)}
        items = find_items(self.data, split=self.split)
        same["pictures"] = [digest_items(items), digest_files(items)]
        same |= {"layer": self.model.layer, "options": str(self.options)}
        self.out.mkdir(parents=True, exist_ok=True)
        index = self.out / "rows.json"
        known: dict[str, Any] = json.loads(index.read_text()) if index.is_file() else {}
        for key, entry in known.items():
            enough = set(methods) <= set(entry["methods"]) and set(scores) <= set(entry["scores"])
            if enough and entry["same"] == same and not isinstance(methods, Mapping):
                return _of_methods(pq.read_table(self.out / f"rows-{key}.parquet"), methods)
        asked = {"same": same, "methods": list(methods), "scores": list(scores)}
        key = hashlib.sha256(json.dumps(asked, sort_keys=True).encode()).hexdigest()[:12]
        found = evaluate(
            self.model, self.data, methods=methods, scores=scores, as_published=as_published, views=views, n=n or self.n,
            split=self.split, out=self.out / f"rows-{key}.parquet", progress=self.progress, **self.options,
        )  # fmt: skip
        write_atomic(index, json.dumps(known | {key: asked}, indent=1).encode())
        return found

    def affordable(self, methods: Sequence[str]) -> list[str]:
        """Those of the methods that run without being asked for expressly."""
        return [m for m in dict.fromkeys(methods) if self.costly or m not in COSTLY]


def _of_methods(rows: pa.Table, methods: Sequence[str]) -> pa.Table:
    mine = pc.is_in(rows["method"], value_set=pa.array(list(methods)))
    return rows.filter(pc.or_(pc.is_null(rows["method"]), mine))


def mean_of(rows: pa.Table, score: str, method: str | None, region: str | None) -> Estimate:
    """The mean over pictures with its interval."""
    found = summary.pick(rows, score, method, region)
    return statistics.bootstrap(statistics.mean, found.value, cluster=found.ids)


def eq(rows: pa.Table, method: str, *, as_published: bool) -> Estimate:
    """Eq as the authors take it, or as we do."""
    return mean_of(rows, "eq", method, "full" if as_published else "disc")


def line(
    claim: str,
    *,
    clean: Estimate | None = None,
    as_published: Estimate | None = None,
    what: str = "",
    tolerance: int | float = TOLERANCE,
    artefact: str = "",
    reason: str = "",
    within: tuple[float, float] | None = None,
) -> Line:
    """A claim beside what was measured, with the verdict that follows; `within` is the range that it is one end of."""
    known = claims()[claim]
    found, value = as_published or clean, within or known.value
    verdict = "not run" if found is None else _verdict(value, found, tolerance)
    if artefact and verdict == "matches":
        verdict, reason = "artefact", artefact
    if verdict == "differs" and not reason:
        assert found is not None  # noqa: S101  # it has been compared
        reason = f"off by {_distance(value, found.value):.3f}, allowed {tolerance:g}"
    about = what or known.method or known.metric
    allowed = float(tolerance) if verdict in ("matches", "differs", "artefact") else None
    return Line(claim, about, _shown(known), clean, as_published, verdict, reason, allowed)


def beside(
    claim: str,
    *,
    clean: Estimate | None,
    as_published: Estimate | None = None,
    what: str,
    tolerance: int | float = TOLERANCE,
    artefact: str = "",
    reason: str = "",
) -> Line:
    """`line`, or the measured numbers alone where the paper has none of this network."""
    if claim not in claims():
        return Line("", what, "not in the paper", clean, as_published, "measured", reason)
    return line(
        claim,
        clean=clean,
        as_published=as_published,
        what=what,
        tolerance=tolerance,
        artefact=artefact,
        reason=reason,
    )


def _network(claim: str) -> str:
    """The network that a claim is of, where it is one of the three on ImageNet."""
    words = claims()[claim].of.split() if claim else []
    whole = bool(words) and words[0] in BACKBONES and words[1:] in ([], ["(presumed)"])
    return words[0] if whole else ""


def not_run(claim: str, reason: str) -> Line:
    """A claim that this run does not answer, and what would."""
    known = claims()[claim]
    return Line(claim, known.method or known.metric, _shown(known), None, None, "not run", reason)


def number(value: int | float, n: int = 0) -> Estimate:
    """A value without an interval."""
    return Estimate(float(value), float("nan"), float("nan"), n)


def correlated(c: Correlation) -> Estimate:
    """A correlation as a number with its interval."""
    return Estimate(c.r, c.low, c.high, c.n)


def difference(a: Estimate, b: Estimate) -> Estimate:
    """A difference of two means, without an interval."""
    return number(a.value - b.value, min(a.n, b.n))


def others(prefix: str, done: Sequence[Line], bench: Bench) -> Iterator[Line]:
    """The claims of an experiment that are about other networks or domains, with what would run them."""
    answered = {one.claim for one in done}
    for name, known in claims().items():
        if name.startswith(prefix) and name not in answered:
            about = next((b for b in BACKBONES if b in name), known.of)
            if about and about not in (bench.backbone, bench.domain, "all"):
                yield not_run(name, f"of {about}: --model {about}")
            else:
                yield not_run(name, "not answered by this run")


def _verdict(published: float | tuple[float, float] | None, found: Estimate, tolerance: int | float) -> str:
    if published is None:
        return "measured"
    if math.isnan(found.value):
        return "undecided"
    low, high = published if isinstance(published, tuple) else (published, published)
    if _distance(published, found.value) <= tolerance:
        return "matches"
    inside = not math.isnan(found.low) and found.low <= high and low <= found.high
    return ("matches" if found.n >= ENOUGH else "undecided") if inside else "differs"


def _distance(published: float | tuple[float, float] | None, value: float) -> float:
    if published is None or np.isnan(value):
        return math.inf
    low, high = published if isinstance(published, tuple) else (published, published)
    return max(low - value, value - high, 0.0)


def shown_of(claim: str) -> str:
    """A claim's number as tables show it."""
    return _shown(claims()[claim])


def _shown(known: Claim) -> str:
    if known.value is None:
        return "stated in words"
    text = f"{known.value[0]:g}–{known.value[1]:g}" if isinstance(known.value, tuple) else f"{known.value:g}"
    return text if known.n is None else f"{text} (n = {known.n:,})"
