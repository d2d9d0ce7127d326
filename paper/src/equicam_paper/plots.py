"""The plot of an experiment, from its rows and kept evaluations: panels with letters, intervals and published numbers."""

import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from equicam.evaluate.statistics import Correlation, Estimate, Floats
from equicam_paper import load_experiment
from equicam_paper.claims import MIN_IMAGES, claims
from equicam_paper.kept import KeptRows
from equicam_paper.rows import Row, number

THEIRS, OURS, PUBLISHED = "#7a8793", "#1f6f8b", "#c2571a"
PROTOCOLS = (("as_published", THEIRS, "by the authors' protocol"), ("clean", OURS, "by ours"))
EQ = "Eq (equivariance)\n1: follows the image"
STYLE: Any = {
    "font.size": 9, "axes.spines.top": False, "axes.spines.right": False, "axes.titlesize": 9, "axes.titlelocation": "left",
    "pdf.fonttype": 42, "svg.fonttype": "none", "svg.hashsalt": "equicam", "legend.frameon": False, "legend.fontsize": 8,
}  # fmt: skip
FORMATS = ("pdf", "svg", "png")
DPI, PAGE_DPI = 200, 110
PANELS_PER_ROW = 2
MANY_BARS = 10
"""More of them need the width of two panels."""
MAX_POINTS = 3000
TEXT_BAND = 0.22
"""Of a scatter's height, above its marks, for r and p."""
FIGURES = ("figure-pipeline", "figure-signal-noise", "figure-drift-strip")
"""Experiments that are figures."""
ON_PAGE = ("main", "t-sweep", "angles", "causal", "rotation-augmentation", "sanity")
"""Plots of the documentation."""
RANDOM_WEIGHTS = ("weights as given", "head random", "last quarter random", "last half random", "all random")
"""The steps of `sanity`."""


@dataclass(frozen=True)
class Bars:
    """Rows as bars by either protocol, with the published numbers."""

    title: str
    ylabel: str
    rows: Sequence[tuple[str, Row]]
    fine_tunes: Sequence[tuple[str, Row]] = ()  # by the name of the bar that is their mean

    def draw(self, axes: Axes) -> None:
        """Bars with 95 % intervals, rings for single fine-tunes, diamonds where something is published."""
        protocols = [one for one in PROTOCOLS if any(_known(getattr(row, one[0])) for _, row in self.rows)]
        shifts = (-0.2, 0.2) if len(protocols) == 2 else (0.0,)
        for (protocol, colour, legend), shift in zip(protocols, shifts, strict=True):
            found = [(i + shift, getattr(row, protocol)) for i, (_, row) in enumerate(self.rows)]
            found = [(x, e) for x, e in found if _known(e)]
            axes.bar(
                [x for x, _ in found],
                [e.value for _, e in found],
                0.76 / len(protocols),
                color=colour,
                label=legend,
            )
            _errors(axes, found, "black")
            places = {name: i + shift for i, (name, _) in enumerate(self.rows)}
            single = [(places[name], getattr(row, protocol)) for name, row in self.fine_tunes]
            axes.plot(
                [x for x, e in single if _known(e)],
                [e.value for _, e in single if _known(e)],
                "o",
                color="black",
                markerfacecolor="white",
                ms=3.5,
                label="one fine-tune" if single else None,
            )
        _diamonds(axes, [(float(i), row) for i, (_, row) in enumerate(self.rows)])
        axes.set_xticks(
            range(len(self.rows)),
            [name.replace(", by ", ",\nby ") for name, _ in self.rows],
            rotation=25,
            ha="right",
            rotation_mode="anchor",
        )
        axes.set_ylabel(self.ylabel)
        axes.axhline(0, color="black", linewidth=0.6)


@dataclass(frozen=True)
class Lines:
    """Series of rows over a number, or over named bins."""

    title: str
    ylabel: str
    xlabel: str
    series: Sequence[tuple[str, str, str, Sequence[tuple[float, Estimate]]]]  # name, colour, style, points
    published: Sequence[tuple[float, Row]] = ()
    ticks: Sequence[tuple[float, str]] = ()
    logarithmic: bool = False

    def draw(self, axes: Axes) -> None:
        """Lines with 95 % intervals."""
        for name, colour, style, points in self.series:
            kept = sorted(((x, e) for x, e in points if _known(e)), key=lambda pair: pair[0])
            axes.plot(
                [x for x, _ in kept],
                [e.value for _, e in kept],
                style,
                color=colour,
                marker="o",
                ms=3.5,
                lw=1.3,
                label=name,
            )
            _errors(axes, kept, colour)
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
        many = len(self.x) > 300
        axes.scatter(
            self.x[::every],
            self.y[::every],
            7 if many else 14,
            color=OURS,
            alpha=0.35 if many else 0.8,
            linewidth=0,
        )
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
        return " or ".join(
            f"{n:,}" for n in sorted({e.n for _, row in self.rows for e in row if e is not None and e.n})
        )

    def draw(self, axes: Axes) -> None:
        """Numbers with half of their 95 % interval, and a colour bar."""
        around_zero = self.limits[0] < 0
        blank = {
            (i, j)
            for i, (name, _) in enumerate(self.rows)
            for j, column in enumerate(self.columns)
            if (name, column) in self.constant
        }
        shown = [
            [
                e.value if e is not None and _known(e) and (i, j) not in blank else math.nan
                for j, e in enumerate(row)
            ]
            for i, (_, row) in enumerate(self.rows)
        ]
        image = axes.imshow(
            shown,
            cmap="RdBu_r" if around_zero else "viridis",
            vmin=self.limits[0],
            vmax=self.limits[1],
            aspect="auto",
        )
        axes.set_facecolor("0.92")
        middle = sum(self.limits) / 2
        for i, (_, row) in enumerate(self.rows):
            for j, e in enumerate(row):
                if (i, j) in blank:
                    axes.text(j, i, "constant", ha="center", va="center", fontsize=6, color="0.45")
                elif e is not None and _known(e):
                    dark = abs(e.value) > 0.65 if around_zero else e.value < middle
                    text = f"{e.value:.2f} ± {(e.high - e.low) / 2:.2f}".replace("0.", ".")
                    axes.text(
                        j, i, text, ha="center", va="center", fontsize=6, color="white" if dark else "black"
                    )
        axes.set_xticks(
            range(len(self.columns)), [name.replace(" ", "\n") for name in self.columns], fontsize=7
        )
        place = axes.get_subplotspec()
        first = place is None or place.is_first_col()  # all panels have the same rows
        axes.set_yticks(range(len(self.rows)), [name if first else "" for name, _ in self.rows], fontsize=7)
        axes.tick_params(length=0)
        axes.spines[:].set_visible(False)
        axes.figure.colorbar(
            image,
            ax=axes,
            location="bottom",
            label=f"{self.label}, {self.images} images",
            shrink=0.8,
            aspect=30,
        )


Panel = Bars | Lines | Scatter | Cells


def correlation_text(found: Correlation) -> str:
    """R with its interval, p, and the number of images."""
    text = f"r = {found.r:.2f} [{found.low:.2f}, {found.high:.2f}]"
    # of a few images, p and the interval may contradict each other
    if found.n >= MIN_IMAGES and not math.isnan(found.log10_p):
        text += (
            f", p = {10**found.log10_p:.2g}" if found.log10_p > -4 else f", p = $10^{{{found.log10_p:.0f}}}$"
        )
    return f"{text}\nn = {found.n:,} images"


def save_figure(figure: Figure, stem: Path) -> list[Path]:
    """Write a figure as PDF, SVG and PNG."""
    paths = [stem.with_name(f"{stem.name}.{kind}") for kind in FORMATS]
    for path in paths:
        dated = (
            {"Date": None}
            if path.suffix == ".svg"
            else {"CreationDate": None}
            if path.suffix == ".pdf"
            else None
        )
        figure.savefig(path, dpi=DPI, metadata=dated)
    return paths


def write_plots(kept: KeptRows, stem: Path, more: Sequence[Panel] = ()) -> list[Path]:
    """The experiment's plot in every format; none where there is nothing to draw."""
    panels = [*more, *panels_of(kept)]
    if not panels:
        return []
    with rc_context(STYLE):
        return save_figure(compose(panels, heading(kept)), stem)


def write_page_plot(kept: KeptRows, path: Path) -> Path | None:
    """The plot of the documentation, if the experiment has one."""
    panels = panels_of(kept) if kept.experiment in ON_PAGE else []
    if not panels:
        return None
    with rc_context(STYLE):
        compose(panels, heading(kept)).savefig(path, dpi=PAGE_DPI)
    return path


def heading(kept: KeptRows) -> str:
    """Experiment, network and images."""
    name = kept.experiment.removesuffix("-rotated")
    n, where = kept.provenance.get("n"), kept.domain or kept.provenance.get("data", "")
    if name == "cost":  # of rounds, which its panel counts
        n = None
    return f"{load_experiment(name).title}\n{kept.backbone}, {where}" + (
        f", n = {n:,}" if isinstance(n, int) else ""
    )


def compose(panels: Sequence[Panel], title: str) -> Figure:
    """Panels with letters, two in a row, and one legend."""
    cells = [panel for panel in panels if isinstance(panel, Cells)]
    columns = len(cells) or min(PANELS_PER_ROW, len(panels))
    rows = -(-len(panels) // columns)
    many = max((len(panel.rows) for panel in panels if isinstance(panel, Bars)), default=0) > MANY_BARS
    width = 7.6 if columns > 1 or many else 5.8
    ratios = None
    if cells:
        ratios = [len(panel.columns) for panel in cells]
        width = 1.6 + 0.64 * sum(ratios)
    height = max(1.6 + 0.22 * len(panel.rows) if isinstance(panel, Cells) else 3.1 for panel in panels)
    figure = Figure(figsize=(width, height * rows + 0.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = list(figure.subplots(rows, columns, squeeze=False, width_ratios=ratios).flat)
    handles: dict[str, Any] = {}
    for i, (one, panel) in enumerate(zip(axes, panels, strict=False)):
        panel.draw(one)
        letter = f"({chr(ord('a') + i)}) " if len(panels) > 1 else ""
        one.set_title(letter + panel.title, parse_math=False)
        handles |= {
            str(label): handle for handle, label in zip(*one.get_legend_handles_labels(), strict=True)
        }
    for one in axes[len(panels) :]:
        one.axis("off")
    figure.suptitle(title, fontsize=10, x=0.01, ha="left", parse_math=False)
    if handles:
        columns = max(1, int(width * 17 / (max(map(len, handles)) + 8)))
        figure.legend(
            handles.values(), handles.keys(), loc="outside lower center", ncols=min(columns, len(handles))
        )
    return figure


def panels_of(kept: KeptRows) -> list[Panel]:
    """The panels that an experiment's rows have."""
    name = kept.experiment.removesuffix("-rotated")
    rows = [row for row in kept.ran if _known(row.clean) or _known(row.as_published)]
    if name in FIGURES or not rows:
        return []
    panels = PLOTS.get(name, _everything)(rows)
    return [panel for panel in panels if not isinstance(panel, Bars) or panel.rows]


def _known(found: Estimate | None) -> bool:
    return found is not None and not math.isnan(found.value)


def _errors(axes: Axes, points: Iterable[tuple[float, Estimate]], colour: str) -> None:
    for x, found in points:
        if not math.isnan(found.low):
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


def _everything(rows: Sequence[Row]) -> list[Panel]:
    """All rows between −1.5 and 1.5, which share a scale."""
    small = [
        row
        for row in rows
        if all(abs(e.value) <= 1.5 for e in (row.clean, row.as_published) if e and _known(e))
    ]
    return [Bars("measured and published", "value", [(row.label, row) for row in small])]


def _main(rows: Sequence[Row]) -> list[Panel]:
    found = _pick(rows, r"([^,:]+(?:, first classes|, stretched to \[0, 1\])?)(?::.*)?")
    usual = max((row.images for _, row in found), default=0)
    names = {name: name if row.images == usual else f"{name}, n = {row.images:,}" for name, row in found}
    return [Bars("equivariance of each method", EQ, [(names[name], row) for name, row in found])]


def _alignment(rows: Sequence[Row]) -> list[Panel]:
    return [
        Bars("equivariance", EQ, _pick(rows, r"([\w+-]+)")),
        Bars(
            "above the floor of unrelated images",
            "skill\n(Eq − floor) / (1 − floor)",
            _pick(rows, r"(.+): skill above the floor"),
        ),
    ]


def decomposition(rows: Sequence[Row]) -> list[Panel]:
    """Stages of Grad-CAM, and cosines of pooled features and logits."""
    stages = r"(activations|gradients|weights|weights-cosine|combined|rectified|map)"
    return [
        Bars(
            "each stage of Grad-CAM under rotation",
            "similarity of rotated\nand presented, Pearson r",
            _pick(rows, stages),
        ),
        Bars(
            "pooled features and logits",
            "cosine similarity",
            _pick(rows, r"((?:feature|logit), (?:rotated|unrelated))"),
        ),
    ]


def _conditional(rows: Sequence[Row]) -> list[Panel]:
    return [
        Bars("Eq where the prediction holds", EQ, _pick(rows, r"((?:equi)?grad-cam, .+)")),
        Bars(
            "predictions under rotation",
            "share of image-angle pairs",
            _pick(rows, r"(the top-1 (?:is kept|flips))"),
        ),
    ]


def strata(rows: Sequence[Row]) -> list[Panel]:
    """Eq of both methods by confidence."""
    series: list[tuple[str, str, str, list[tuple[float, Estimate]]]] = []
    ticks: dict[float, str] = {}
    for method, colour in (("grad-cam", THEIRS), ("equigrad-cam", OURS)):
        bins = _pick(rows, rf"{method}, p in (.+ \(n = \d+\))")
        for protocol, style, whose in (("as_published", "--", "authors' protocol"), ("clean", "-", "ours")):
            points = [(float(i), getattr(row, protocol)) for i, (_, row) in enumerate(bins)]
            series.append((f"{method}, {whose}", colour, style, points))
        ticks |= {float(i): name.replace(" (", "\n(") for i, (name, _) in enumerate(bins)}
    return [
        Lines(
            "Eq by the confidence of the prediction",
            EQ,
            "probability of the class (images)",
            series,
            ticks=tuple(ticks.items()),
        )
    ]


def _causal(rows: Sequence[Row]) -> list[Panel]:
    lost = "probability of the class lost\nwhen the region is hidden"
    controls = [
        (row.label.removesuffix(" (control)"), Row("", row.label, "", Estimate(v["mean"], v["low"], v["high"], row.clean.n if row.clean else 0), None, "measured"))
        for row in rows
        if row.reason is not None and row.reason.code == "control" and (v := row.reason.values)
    ]  # fmt: skip
    return [
        Bars("cost of hiding a region", lost, _pick(rows, r"(.+, (?:presented|rotated))")),
        Bars("drift minus each control, in the disc", "difference of\nthe probability lost", controls),
    ]


def _over_number(
    title: str, xlabel: str, form: str, *, logarithmic: bool = False
) -> Callable[[Sequence[Row]], Sequence[Panel]]:
    def panels(rows: Sequence[Row]) -> list[Panel]:
        found = [(float(name), row) for name, row in _pick(rows, form)]
        series = [
            (legend, colour, "-", [(x, getattr(row, protocol)) for x, row in found])
            for protocol, colour, legend in PROTOCOLS
        ]
        ticks = [(x, f"{x:g}") for x in sorted({x for x, _ in found})]
        return [Lines(title, EQ, xlabel, series, found, ticks, logarithmic)]

    return panels


def _views(rows: Sequence[Row]) -> list[Panel]:
    eq = _over_number("equivariance", "number of views T", r"T = (\d+)", logarithmic=True)(rows)
    return [
        *eq,
        Bars(
            "share of the gain of 18 views",
            "share of the gain",
            _pick(rows, r"share of the gain at (T = \d+)"),
        ),
    ]


def _angles(rows: Sequence[Row]) -> list[Panel]:
    series = []
    for method, colour in (("grad-cam", THEIRS), ("equigrad-cam", OURS)):
        found = [(float(angle), row) for angle, row in _pick(rows, rf"{re.escape(method)} at (.+)°")]
        for protocol, style, whose in (("as_published", "--", "authors' protocol"), ("clean", "-", "ours")):
            series.append(
                (f"{method}, {whose}", colour, style, [(x, getattr(row, protocol)) for x, row in found])
            )
    published = [(float(angle), row) for angle, row in _pick(rows, r".+ at (.+)°")]
    return [Lines("equivariance by angle", EQ, "rotation of the image, degrees", series, published)]


def _by_metric(**ylabels: str) -> Callable[[Sequence[Row]], Sequence[Panel]]:
    """A panel per metric; labels are `method, metric`."""

    def panels(rows: Sequence[Row]) -> list[Panel]:
        return [
            Bars(name.replace("_", "-"), label, _pick(rows, rf"([\w+@-]+), {name.replace('_', '-')}"))
            for name, label in ylabels.items()
        ]

    return panels


def _training(rows: Sequence[Row]) -> list[Panel]:
    def named(form: str) -> list[tuple[str, Row]]:
        return [(_name_of_training(name), row) for name, row in _pick(rows, form)]

    eq, right = r"((?:GC|EG) Eq (?:no|rot) aug)", r"(acc (?:no|rot) aug)"
    of_seed = r", seed \d+"
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


def _audit(rows: Sequence[Row]) -> list[Panel]:
    return [
        Bars("which signal finds unstable maps", "r with 1 − Eq of Grad-CAM", _pick(rows, r"r of (.+)")),
        Bars(
            "which signal finds wrong predictions",
            "AUROC, 0.5: chance",
            _pick(rows, r"(.+): AUROC for wrong predictions"),
        ),
    ]


def _triage(rows: Sequence[Row]) -> list[Panel]:
    return [
        Bars(
            f"worst tenth found{where}",
            "share found\n0.1: chance in a tenth",
            _pick(rows, rf"(?:worst tenth )(found in (?:(?!, seed|, off).)+){where}"),
        )
        for where in ("", ", off the grid")
    ]


def random_weights_panels(rows: Sequence[Row]) -> list[Cells]:
    """Of `sanity`: a line per method, from the weights as given to all of them random."""
    kinds = (
        ("Eq", "Eq", (0.0, 1.0), RANDOM_WEIGHTS),
        ("Pearson r of the maps", "Pearson", (-1.0, 1.0), RANDOM_WEIGHTS[1:]),
        ("SSIM of the maps", "SSIM", (0.0, 1.0), RANDOM_WEIGHTS[1:]),
    )
    constant = frozenset(
        (method, weights)
        for weights in RANDOM_WEIGHTS
        for method, row in _pick(rows, rf"(.+), {weights}: Eq")
        if row.reason and row.reason.values.get("constant") == 1
    )
    panels: list[Cells] = []
    for title, label, limits, columns in kinds:
        found = {weights: dict(_pick(rows, rf"(.+), {weights}: {label}(?: with .+)?")) for weights in columns}
        methods = dict.fromkeys(name for of in found.values() for name in of)
        cells = [
            (
                method,
                [found[weights][method].clean if method in found[weights] else None for weights in columns],
            )
            for method in methods
        ]
        if cells:
            panels.append(Cells(title, label, limits, columns, cells, constant))
    return panels


def _constants(rows: Sequence[Row]) -> list[Panel]:
    """Constants over the published ones, and the two quantities that are measured."""
    ratios = []
    for name, row in _pick(rows, r"(.+) = .+"):
        published = claims()[row.claim].value if row.claim in claims() else None
        if row.clean is not None and isinstance(published, float):
            ratio = number(row.clean.value / published)
            ratios.append((name, replace(row, claim="", clean=ratio)))
    return [
        Bars("constants, ours over the published", "ratio\n1: the same", ratios),
        Bars("constant maps", "share of images, at most", _pick(rows, r"constant maps at most, (.+)")),
        Bars("PEUM as the authors' code has it", "Pearson r", _pick(rows, r"(r of gated PEUM) .+")),
    ]


def _label_region(rows: Sequence[Row]) -> list[Panel]:
    sides = {
        "mass in disc 0deg": "presented",
        "mass in disc rotated mean": "mean over rotations",
        "drop": "presented − rotated",
    }
    return [
        Bars(title, "share of saliency in the label region", _pick(rows, rf"(.+), {side}"))
        for side, title in sides.items()
    ]


def _blur(rows: Sequence[Row]) -> list[Panel]:
    return [
        Bars("Grad-CAM, blurred by σ pixels", EQ, _pick(rows, r"(?:grad-cam@)?([\w-]+)")),
        Bars("change by the blur", "Eq − Eq unblurred", _pick(rows, r"(.+) − unblurred")),
    ]


def _cost(rows: Sequence[Row]) -> list[Panel]:
    """One bar for both ends of a published range, which have one measurement."""
    rounds = " or ".join(f"{n:,}" for n in sorted({row.images for row in rows}))
    by_name = {row.label.partition(", ")[0]: row for row in rows}
    return [Bars(f"time of a map, median of {rounds} rounds", "times as long", [*by_name.items()])]


def _seeds(rows: Sequence[Row]) -> list[Panel]:
    return [
        Bars("equivariance of each fine-tune, and the mean", EQ, _pick(rows, r"(.+, (?:seed \d+|mean))")),
        Bars("spread over fine-tunes", "standard deviation of Eq", _pick(rows, r"(.+), spread")),
    ]


PLOTS: dict[str, Callable[[Sequence[Row]], Sequence[Panel]]] = {
    "main": _main,
    "alignment": _alignment,
    "decomposition": decomposition,
    "conditional": _conditional,
    "strata": strata,
    "drift-confidence": lambda _rows: [],
    "causal": _causal,
    "blur": _blur,
    "soft-gate": _over_number("equivariance by the strength of the gate", "γ, views weighted by p^γ", r"γ = ([\d.]+)"),
    "t-sweep": _views,
    "angles": _angles,
    "faithfulness": _by_metric(insertion="area under the curve\nhigher is better", deletion="area under the curve\nlower is better"),
    "domains": _by_metric(eq=EQ, insertion="area under the curve\nhigher is better", deletion="area under the curve\nlower is better"),
    "clip": _by_metric(eq=EQ, insertion="area under the curve\nhigher is better", deletion="area under the curve\nlower is better"),
    "localisation": _by_metric(pointing="share of images", box_iou="intersection over union"),
    "cub": _by_metric(pointing="share of images", box_iou="intersection over union"),
    "equal-compute": _main,
    "vit-attribution": _main,
    "vit-l": _main,
    "matched": lambda rows: [Bars("samples", "Eq, or share of pairs\nthat keep the top-1", [(row.label, row) for row in rows])],
    "cost": _cost,
    "seeds": _seeds,
    "rotation-augmentation": _training,
    "cub-rotation": _training,
    "peum-audit": _audit,
    "triage": _triage,
    "label-region": _label_region,
    "constants": _constants,
    "hooks": lambda rows: [Bars("constant Grad-CAM maps", "share of images", [(row.label, row) for row in rows])],
    "sanity": random_weights_panels,
}  # fmt: skip
