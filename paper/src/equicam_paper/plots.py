"""The plot of an experiment, from its rows and kept evaluations: panels with letters, intervals and published numbers."""

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from equicam.evaluate.statistics import Correlation, Estimate, Floats
from equicam_paper import EXPERIMENTS, load_experiment
from equicam_paper.claims import MIN_IMAGES, claims
from equicam_paper.kept import KeptRows
from equicam_paper.rows import Row, number

THEIRS, OURS, PUBLISHED = "#7a8793", "#1f6f8b", "#c2571a"
PROTOCOLS = (("as_published", THEIRS, "by the authors' protocol"), ("clean", OURS, "by ours"))
DRIFT = "drift of the single-view map,\n1 − Eq"
EQ = "Eq (equivariance)\n1: follows the image"
STYLE: Any = {
    "font.size": 9, "axes.spines.top": False, "axes.spines.right": False, "axes.titlesize": 9, "axes.titlelocation": "left",
    "pdf.fonttype": 42, "svg.fonttype": "none", "svg.hashsalt": "equicam", "legend.frameon": False, "legend.fontsize": 8,
}  # fmt: skip
DPI, PAGE_DPI = 200, 110
MANY_BARS = 10  # more of them need the width of two panels
MAX_POINTS = 3000
TEXT_BAND = 0.22  # of a scatter's height, above its marks, for r and p
FIGURES = ("figure-pipeline", "figure-signal-noise", "figure-drift-strip")  # experiments that are figures
ON_PAGE = ("main", "t-sweep", "angles", "causal", "rotation-augmentation", "sanity")
"""Plots of the documentation."""
RANDOM_WEIGHTS = ("weights as given", "head random", "last quarter random", "last half random", "all random")
"""The steps of `sanity`."""
Points = Sequence[tuple[float, Estimate | None]]
Series = tuple[str, str, str, Points]  # name, colour, style and points of a line
Named = Sequence[tuple[str, Row]]


@dataclass(frozen=True)
class Bars:
    """Rows as bars by either protocol, with the published numbers."""

    title: str
    ylabel: str
    rows: Named
    fine_tunes: Named = ()  # by the name of the bar that is their mean

    def draw(self, axes: Axes) -> None:
        """Bars with 95 % intervals, rings for single fine-tunes, diamonds where something is published."""
        protocols = [one for one in PROTOCOLS if any(_known(getattr(row, one[0])) for _, row in self.rows)]
        shifts = (-0.2, 0.2) if len(protocols) == 2 else (0.0,)
        for (protocol, colour, legend), shift in zip(protocols, shifts, strict=True):
            found = [(i + shift, getattr(row, protocol)) for i, (_, row) in enumerate(self.rows)]
            axes.bar(*_coordinates(found), 0.76 / len(protocols), color=colour, label=legend)
            _errors(axes, found, "black")
            places = {name: i + shift for i, (name, _) in enumerate(self.rows)}
            single = [(places[name], getattr(row, protocol)) for name, row in self.fine_tunes]
            rings: Any = {"color": "black", "markerfacecolor": "white", "ms": 3.5}
            axes.plot(*_coordinates(single), "o", label="one fine-tune" if self.fine_tunes else None, **rings)
        _diamonds(axes, [(float(i), row) for i, (_, row) in enumerate(self.rows)])
        names = [name.replace(", by ", ",\nby ") for name, _ in self.rows]
        axes.set_xticks(range(len(names)), names, rotation=25, ha="right", rotation_mode="anchor")
        axes.set_ylabel(self.ylabel)
        axes.axhline(0, color="black", linewidth=0.6)


@dataclass(frozen=True)
class Lines:
    """Series of rows over a number, or over named bins."""

    title: str
    ylabel: str
    xlabel: str
    series: Sequence[Series]
    published: Sequence[tuple[float, Row]] = ()
    ticks: Sequence[tuple[float, str]] = ()
    logarithmic: bool = False

    def draw(self, axes: Axes) -> None:
        """Lines with 95 % intervals."""
        for name, colour, style, points in self.series:
            ordered = sorted(points, key=lambda pair: pair[0])
            axes.plot(*_coordinates(ordered), style, color=colour, marker="o", ms=3.5, lw=1.3, label=name)
            _errors(axes, ordered, colour)
        _diamonds(axes, self.published)
        if self.logarithmic:
            axes.set_xscale("log", base=2)
        if self.ticks:
            axes.set_xticks([x for x, _ in self.ticks], [name for _, name in self.ticks])
            axes.minorticks_off()
        axes.set(xlabel=self.xlabel, ylabel=self.ylabel)


@dataclass(frozen=True)
class Scatter:
    """One mark per image or pair, with the correlation."""

    title: str
    xlabel: str
    ylabel: str
    x: Floats
    y: Floats
    found: Correlation

    def draw(self, axes: Axes) -> None:
        """At most a few thousand marks; r and p are of all."""
        every = -(-len(self.x) // MAX_POINTS) or 1
        size, alpha = (7, 0.35) if len(self.x) > 300 else (14, 0.8)
        axes.scatter(self.x[::every], self.y[::every], size, color=OURS, alpha=alpha, linewidth=0)
        axes.set(xlabel=self.xlabel, ylabel=self.ylabel)
        low, high = axes.get_ylim()
        axes.set_ylim(low, high + TEXT_BAND * (high - low))  # room above all marks
        axes.text(0.02, 0.99, correlation_text(self.found), transform=axes.transAxes, va="top", fontsize=8)


@dataclass(frozen=True)
class Cells:
    """A table of numbers in colour: as many lines or bars could not be distinguished."""

    title: str
    label: str
    limits: tuple[float, float]
    columns: Sequence[str]
    rows: Sequence[tuple[str, Sequence[Estimate | None]]]  # name, and a number for each column
    constant: frozenset[tuple[str, str]] = frozenset()  # rows and columns whose maps are all constant

    @property
    def images(self) -> str:
        """How many images the numbers are of."""
        counts = {e.n for _, row in self.rows for e in row if e is not None and e.n}
        return " or ".join(f"{n:,}" for n in sorted(counts))

    def draw(self, axes: Axes) -> None:
        """Numbers with half of their 95 % interval, and a colour bar."""
        around_zero, middle = self.limits[0] < 0, sum(self.limits) / 2
        colours = "RdBu_r" if around_zero else "viridis"
        shown = [
            [
                e.value if e and (name, c) not in self.constant else math.nan
                for c, e in zip(self.columns, row, strict=True)
            ]
            for name, row in self.rows
        ]
        image = axes.imshow(shown, colours, vmin=self.limits[0], vmax=self.limits[1], aspect="auto")
        axes.set_facecolor("0.92")
        centred: Any = {"ha": "center", "va": "center", "fontsize": 6}
        for i, (name, row) in enumerate(self.rows):
            for j, (column, e) in enumerate(zip(self.columns, row, strict=True)):
                if (name, column) in self.constant:
                    axes.text(j, i, "constant", color="0.45", **centred)
                elif e is not None and _known(e):
                    dark = abs(e.value) > 0.65 if around_zero else e.value < middle
                    text = f"{e.value:.2f} ± {(e.high - e.low) / 2:.2f}".replace("0.", ".")
                    axes.text(j, i, text, color="white" if dark else "black", **centred)
        columns = [name.replace(" ", "\n") for name in self.columns]
        axes.set_xticks(range(len(columns)), columns, fontsize=7)
        place = axes.get_subplotspec()
        first = place is None or place.is_first_col()  # all panels have the same rows
        axes.set_yticks(range(len(self.rows)), [name if first else "" for name, _ in self.rows], fontsize=7)
        axes.tick_params(length=0)
        axes.spines[:].set_visible(False)
        label = f"{self.label}, {self.images} images"
        axes.figure.colorbar(image, ax=axes, location="bottom", label=label, shrink=0.8, aspect=30)


Panel = Bars | Lines | Scatter | Cells


def correlation_text(found: Correlation) -> str:
    """R with its interval, p, and the number of images."""
    text = f"r = {found.r:.2f} [{found.low:.2f}, {found.high:.2f}]"
    # of a few images, p and the interval may contradict each other
    if found.n >= MIN_IMAGES and not math.isnan(found.log10_p):
        p = f"{10**found.log10_p:.2g}" if found.log10_p > -4 else f"$10^{{{found.log10_p:.0f}}}$"
        text += f", p = {p}"
    return f"{text}\nn = {found.n:,} images"


def save_figure(figure: Figure, stem: Path) -> list[Path]:
    """Write a figure as PDF, SVG and PNG."""
    undated: dict[str, Any] = {"pdf": {"CreationDate": None}, "svg": {"Date": None}, "png": None}
    paths = {kind: stem.with_name(f"{stem.name}.{kind}") for kind in undated}
    for kind, path in paths.items():
        figure.savefig(path, dpi=DPI, metadata=undated[kind])
    return [*paths.values()]


def write_plots(kept: KeptRows, stem: Path, more: Sequence[Panel] = ()) -> list[Path]:
    """The experiment's plot in every format; none where there is nothing to draw."""
    panels = [*more, *panels_of(kept)]
    with rc_context(STYLE):
        return save_figure(compose(panels, heading(kept)), stem) if panels else []


def write_page_plot(kept: KeptRows, path: Path) -> None:
    """The plot of the documentation, if the experiment has one."""
    if kept.experiment in ON_PAGE and (panels := panels_of(kept)):
        with rc_context(STYLE):
            compose(panels, heading(kept)).savefig(path, dpi=PAGE_DPI)


def heading(kept: KeptRows) -> str:
    """Experiment, network and images."""
    name = kept.experiment.removesuffix("-rotated")
    n, where = kept.provenance.get("n"), kept.domain or kept.provenance.get("data", "")
    # of rounds, which its panel counts
    count = f", n = {n:,}" if isinstance(n, int) and name != "cost" else ""
    return f"{load_experiment(name).title}\n{kept.backbone}, {where}{count}"


def compose(panels: Sequence[Panel], title: str) -> Figure:
    """Panels with letters, two in a row, and one legend."""
    cells = [panel for panel in panels if isinstance(panel, Cells)]
    columns = len(cells) or min(2, len(panels))
    rows = -(-len(panels) // columns)
    many = any(isinstance(panel, Bars) and len(panel.rows) > MANY_BARS for panel in panels)
    ratios = [len(panel.columns) for panel in cells]
    width = 1.6 + 0.64 * sum(ratios) if cells else 7.6 if columns > 1 or many else 5.8
    height = max(1.6 + 0.22 * len(panel.rows) if isinstance(panel, Cells) else 3.1 for panel in panels)
    figure = Figure(figsize=(width, height * rows + 0.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = list(figure.subplots(rows, columns, squeeze=False, width_ratios=ratios or None).flat)
    handles: dict[str, Any] = {}
    for i, (one, panel) in enumerate(zip(axes, panels, strict=False)):
        panel.draw(one)
        letter = f"({chr(ord('a') + i)}) " if len(panels) > 1 else ""
        one.set_title(letter + panel.title, parse_math=False)
        found, labels = one.get_legend_handles_labels()
        handles |= dict(zip(labels, found, strict=True))
    for one in axes[len(panels) :]:
        one.axis("off")
    figure.suptitle(title, fontsize=10, x=0.01, ha="left", parse_math=False)
    if handles:
        columns = min(len(handles), max(1, int(width * 17 / (max(map(len, handles)) + 8))))
        figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=columns)
    return figure


def panels_of(kept: KeptRows) -> list[Panel]:
    """The panels that an experiment's rows have."""
    name = kept.experiment.removesuffix("-rotated")
    rows = [row for row in kept.ran if _known(row.clean) or _known(row.as_published)]
    if name in FIGURES or not rows:
        return []
    own = PANELS.get(name)
    known = EXPERIMENTS[name].get("panels")
    panels = own(rows) if own else bars(rows, *known) if known is not None else _everything(rows)
    return [panel for panel in panels if not isinstance(panel, Bars) or panel.rows]


def _known(found: Estimate | None) -> bool:
    return found is not None and not math.isnan(found.value)


def _coordinates(points: Points) -> tuple[list[float], list[float]]:
    known = [(x, e.value) for x, e in points if e is not None and _known(e)]
    return [x for x, _ in known], [y for _, y in known]


def _errors(axes: Axes, points: Points, colour: str) -> None:
    for x, found in points:
        if found is not None and not math.isnan(found.low):
            axes.plot([x, x], [found.low, found.high], color=colour, lw=1)


def _diamonds(axes: Axes, points: Sequence[tuple[float, Row]]) -> None:
    """The published numbers, with their intervals where there are any."""
    label = "published"
    for x, row in points:
        known = claims().get(row.claim)
        if known is None or not isinstance(known.value, float):
            continue
        axes.plot([x], [known.value], "D", color=PUBLISHED, ms=4.5, ls="", label=label)
        if known.ci95 is not None:
            axes.plot([x, x], known.ci95, color=PUBLISHED, lw=1.2)
        label = "_again"


def _pick(rows: Sequence[Row], form: str) -> list[tuple[str, Row]]:
    """Rows whose label fits a pattern; its first group is the tick."""
    found = ((re.fullmatch(form, row.label), row) for row in rows)
    return [(match.group(1), row) for match, row in found if match]


def bars(rows: Sequence[Row], *panels: Sequence[str]) -> list[Panel]:
    """A panel of bars for each title, unit, and pattern of labels."""
    return [Bars(title, ylabel, _pick(rows, form)) for title, ylabel, form in panels]


def _everything(rows: Sequence[Row]) -> list[Panel]:
    """All rows between −1.5 and 1.5, which share a scale."""
    of = {row.label: [e.value for e in (row.clean, row.as_published) if e and _known(e)] for row in rows}
    small = [row for row in rows if all(abs(value) <= 1.5 for value in of[row.label])]
    return [Bars("measured and published", "value", [(row.label, row) for row in small])]


def _main(rows: Sequence[Row]) -> list[Panel]:
    found = _pick(rows, r"([^,:]+(?:, first classes|, stretched to \[0, 1\])?)(?::.*)?")
    usual = max((row.images for _, row in found), default=0)
    named = [(name if row.images == usual else f"{name}, n = {row.images:,}", row) for name, row in found]
    return [Bars("equivariance of each method", EQ, named)]


def _of_methods(found: Callable[[str], list[tuple[float, Row]]]) -> list[Series]:
    """A line for either method and protocol through the rows that are found of a method."""
    return [
        (f"{method}, {whose}", colour, style, [(x, getattr(row, protocol)) for x, row in found(method)])
        for method, colour in (("grad-cam", THEIRS), ("equigrad-cam", OURS))
        for protocol, style, whose in (("as_published", "--", "authors' protocol"), ("clean", "-", "ours"))
    ]


def strata(rows: Sequence[Row]) -> list[Panel]:
    """Eq of both methods by confidence."""
    bins = {m: _pick(rows, rf"{m}, p in (.+ \(n = \d+\))") for m in ("grad-cam", "equigrad-cam")}
    series = _of_methods(lambda method: [(float(i), row) for i, (_, row) in enumerate(bins[method])])
    ticks = {float(i): name.replace(" (", "\n(") for of in bins.values() for i, (name, _) in enumerate(of)}
    title, xlabel = "Eq by the confidence of the prediction", "probability of the class (images)"
    return [Lines(title, EQ, xlabel, series, ticks=tuple(ticks.items()))]


def _angles(rows: Sequence[Row]) -> list[Panel]:
    def at(method: str) -> list[tuple[float, Row]]:
        return [(float(angle), row) for angle, row in _pick(rows, rf"{method} at (.+)°")]

    xlabel = "rotation of the image, degrees"
    return [Lines("equivariance by angle", EQ, xlabel, _of_methods(at), at(".+"))]


def _causal(rows: Sequence[Row]) -> list[Panel]:
    lost = "probability of the class lost\nwhen the region is hidden"
    controls = [
        (row.label.removesuffix(" (control)"), Row("", row.label, "", Estimate(v["mean"], v["low"], v["high"], row.images), None, "measured"))
        for row in rows
        if row.reason is not None and row.reason.code == "control" and (v := row.reason.values)
    ]  # fmt: skip
    return [
        Bars("cost of hiding a region", lost, _pick(rows, r"(.+, (?:presented|rotated))")),
        Bars("drift minus each control, in the disc", "difference of\nthe probability lost", controls),
    ]


def _over_number(rows: Sequence[Row], title: str, xlabel: str, form: str, logarithmic: bool = False) -> Panel:
    found = [(float(name), row) for name, row in _pick(rows, form)]
    series = [
        (legend, colour, "-", [(x, getattr(row, protocol)) for x, row in found])
        for protocol, colour, legend in PROTOCOLS
    ]
    ticks = [(x, f"{x:g}") for x in sorted({x for x, _ in found})]
    return Lines(title, EQ, xlabel, series, found, ticks, logarithmic)


def _gate(rows: Sequence[Row]) -> list[Panel]:
    title, xlabel = "equivariance by the strength of the gate", "γ, views weighted by p^γ"
    return [_over_number(rows, title, xlabel, r"γ = ([\d.]+)")]


def _views(rows: Sequence[Row]) -> list[Panel]:
    eq = _over_number(rows, "equivariance", "number of views T", r"T = (\d+)", True)
    share = "share of the gain"
    return [eq, *bars(rows, ("share of the gain of 18 views", share, r"share of the gain at (T = \d+)"))]


def _training(rows: Sequence[Row]) -> list[Panel]:
    def named(form: str) -> list[tuple[str, Row]]:
        return [(_name_of_training(name), row) for name, row in _pick(rows, form)]

    eq, right, of_seed = r"((?:GC|EG) Eq (?:no|rot) aug)", r"(acc (?:no|rot) aug)", r", seed \d+"
    return [
        Bars("equivariance", EQ, named(rf"{eq[:-1]}|EG Eq, .+)"), named(eq + of_seed)),
        Bars("accuracy", "share of test images", named(right), named(right + of_seed)),
    ]


def _name_of_training(name: str) -> str:
    """A method and a training, of which the paper's tables have abbreviations."""
    method, _, training = name.partition(" aug")[0].rpartition(" ")
    methods = {"GC Eq": "Grad-CAM,\n", "EG Eq": "EquiGrad-CAM,\n", "acc": ""}
    if method not in methods:
        return name.replace("EG Eq, ", "EquiGrad-CAM,\n")
    return methods[method] + {"no": "unrotated training", "rot": "rotated training"}[training]


def random_weights_panels(rows: Sequence[Row]) -> list[Cells]:
    """Of `sanity`: a line per method, from the weights as given to all of them random."""
    constant = frozenset(
        (method, weights)
        for weights in RANDOM_WEIGHTS
        for method, row in _pick(rows, rf"(.+), {weights}: Eq")
        if row.reason and row.reason.values.get("constant") == 1
    )
    panels: list[Cells] = []
    for title, label, limits, columns in (
        ("Eq", "Eq", (0.0, 1.0), RANDOM_WEIGHTS),
        ("Pearson r of the maps", "Pearson", (-1.0, 1.0), RANDOM_WEIGHTS[1:]),
        ("SSIM of the maps", "SSIM", (0.0, 1.0), RANDOM_WEIGHTS[1:]),
    ):
        found = {one: dict(_pick(rows, rf"(.+), {one}: {label}(?: with .+)?")) for one in columns}
        methods = dict.fromkeys(name for of in found.values() for name in of)
        cells = {m: [of[m].clean if m in of else None for of in found.values()] for m in methods}
        if cells:
            panels.append(Cells(title, label, limits, columns, [*cells.items()], constant))
    return panels


def _constants(rows: Sequence[Row]) -> list[Panel]:
    """Constants over the published ones, and the two quantities that are measured."""
    ratios = []
    for name, row in _pick(rows, r"(.+) = .+"):
        published = claims()[row.claim].value if row.claim in claims() else None
        if row.clean is not None and isinstance(published, float):
            ratios.append((name, replace(row, claim="", clean=number(row.clean.value / published))))
    return [
        Bars("constants, ours over the published", "ratio\n1: the same", ratios),
        *bars(
            rows,
            ("constant maps", "share of images, at most", r"constant maps at most, (.+)"),
            ("PEUM as the authors' code has it", "Pearson r", r"(r of gated PEUM) .+"),
        ),
    ]


def _cost(rows: Sequence[Row]) -> list[Panel]:
    """One bar for both ends of a published range, which have one measurement."""
    rounds = " or ".join(f"{n:,}" for n in sorted({row.images for row in rows}))
    by_name = {row.label.partition(", ")[0]: row for row in rows}
    return [Bars(f"time of a map, median of {rounds} rounds", "times as long", [*by_name.items()])]


PANELS: dict[str, Callable[[Sequence[Row]], Sequence[Panel]]] = {
    **dict.fromkeys(("main", "equal-compute", "vit-attribution", "vit-l"), _main),
    **dict.fromkeys(("rotation-augmentation", "cub-rotation"), _training),
    "strata": strata, "causal": _causal, "soft-gate": _gate, "t-sweep": _views, "angles": _angles, "cost": _cost,
    "constants": _constants, "sanity": random_weights_panels,
}  # fmt: skip
"""Of experiments whose panels are not bars alone (experiments.toml); one with neither is drawn as all of its rows."""
