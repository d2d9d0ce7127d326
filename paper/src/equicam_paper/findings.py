"""What was found beyond the paper: each finding with its numbers, from kept rows.

A finding says that one number is above another where the interval of their paired difference is, or, unpaired, where
their intervals do not overlap. Networks measured on too few images, or groups of images, are left out, and so are differences
that were not measured.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

from equicam.evaluate.statistics import Estimate
from equicam_paper.claims import TITLES
from equicam_paper.equivariance import (
    CHANGE_BY_BLUR,
    CHANGE_BY_GATE,
    CHANGE_ON_FIRST,
    COVERAGE,
    DIP,
    SKILL,
    UNALIGNED,
)
from equicam_paper.kept import KeptRows
from equicam_paper.margins import published_range
from equicam_paper.measure import STRETCHED
from equicam_paper.rows import Row, too_few
from equicam_paper.signals import CONSTANT, OFF_GRID_LABEL
from equicam_paper.tables import interval
from equicam_paper.trainings import ALIGNED_ABOVE_TRAINED, ALIGNED_AND_TRAINED, TRAINED_ABOVE_PLAIN

CHANCE = 0.1
"""The share of the worst tenth that a signal without information finds in a tenth."""
MANY_CONSTANT = 0.1
"""The share of constant maps above which the worst tenth is a part of them."""
PROTOCOLS = {"as_published": "zeros, full square", "clean": "reflection, disc"}


@dataclass(frozen=True)
class Rows:
    """An experiment's rows that were run, by label."""

    rows: Mapping[str, Row]

    def estimate(self, label: str, protocol: str = "clean") -> Estimate | None:
        """A number with its interval; None where it was not measured."""
        row = self.rows.get(label)
        return getattr(row, protocol) if row else None

    def value(self, label: str, protocol: str = "clean") -> float:
        """A number by either protocol; NaN where it was not measured."""
        found = self.estimate(label, protocol)
        return found.value if found else math.nan

    def shown(self, labels: Iterable[str], protocol: str = "clean") -> list[str]:
        """Numbers as a table has them."""
        return [_number(self.value(label, protocol)) for label in labels]

    def changes(self, labels: Iterable[str]) -> list[str]:
        """Differences by both protocols, with their intervals."""
        found = (self.estimate(label, protocol) for label in labels for protocol in PROTOCOLS)
        return [_signed(one.value, one.low, one.high) if one else "" for one in found]

    def sign(self, label: str, protocol: str = "clean") -> int | None:
        """1 if a difference is above 0 with its whole interval, −1 if below, 0 if its interval holds 0; None where none is known."""
        found = self.estimate(label, protocol)
        if found is None or math.isnan(found.low) or too_few(found) is not None:
            return None
        return (found.low > 0) - (found.high < 0)

    def is_above(self, label: str, other: str, protocol: str = "clean") -> bool:
        """Whether one number's interval is wholly above another's."""
        a, b = self.estimate(label, protocol), self.estimate(other, protocol)
        return a is not None and b is not None and a.low > b.high

    def seeds(self, label: str) -> list[str]:
        """The labels of single fine-tunes, where there are several."""
        return [name for name in self.rows if name.startswith(f"{label}, seed ")]

    def fine_tunes(self, label: str) -> int:
        """How many fine-tunes a number is the mean of."""
        return len(self.seeds(label)) or 1

    def sign_of_seeds(self, label: str) -> int | None:
        """The sign of a difference if every fine-tune has it with its whole interval, 0 if they do not agree; None for one fine-tune."""
        signs = [self.sign(name) for name in self.seeds(label)]
        if len(signs) < 2 or None in signs:
            return None
        return signs[0] if len({*signs}) == 1 else 0


Networks = Mapping[str, Rows]
"""The rows of an experiment by the network, and the data, that they are of."""


def findings(kept: Mapping[str, Mapping[str, KeptRows]]) -> Iterator[str]:
    """Every finding that the rows, by folder and experiment, support."""
    networks, everywhere, costly = {}, {}, {}
    for folder, experiments in kept.items():
        rows = {
            name: Rows({row.label: row for row in one.ran})
            for name, one in experiments.items()
            if _enough(one)
        }
        if folder.endswith("-costly"):
            network = folder.removesuffix("-costly")
            costly[TITLES.get(network, network)] = rows
            continue
        data, _, network = folder.rpartition("-")
        title = TITLES.get(network, network)
        everywhere[f"{title}, {data or 'ImageNet'}"] = rows
        if not data:
            networks[title] = rows
    none = Rows({})
    constant = {name: of.get("triage", none).value(CONSTANT) for name, of in everywhere.items()}
    gains = {name: _gain(of.get("main", none)) for name, of in networks.items()}
    made: tuple[tuple[str, Mapping[str, Mapping[str, Rows]], Callable[[Networks], str]], ...] = (
        ("main", networks, _coverage),
        ("main", costly, _offset),
        ("t-sweep", networks, _four_views),
        ("alignment", networks, _above_floor),
        ("causal", networks, _drift),
        ("blur", networks, lambda of: _blur(of, gains)),
        ("soft-gate", networks, _gate),
        ("rotation-augmentation", everywhere, lambda of: _rotated_training(of, constant)),
        ("triage", everywhere, lambda of: _signals(of, constant)),
        ("sanity", everywhere, _sanity),
    )
    for experiment, sources, finding in made:
        found = {name: of[experiment] for name, of in sources.items() if experiment in of}
        if found and (text := finding(found)):
            yield text


def _enough(kept: KeptRows) -> bool:
    """Whether any number is of enough images, and of enough groups of them."""
    found = (of for row in kept.ran for of in (row.clean, row.as_published))
    return any(of is not None and too_few(of) is None for of in found)


def _table(head: Iterable[str], rows: Iterable[list[str]]) -> str:
    """Markdown, indented for a list."""
    titles = list(head)
    text = [f"| {' | '.join(row)} |" for row in (titles, ["---"] * len(titles), *rows)]
    return "\n\n" + "\n".join(f"  {row}" for row in text) + "\n"


def _gain(rows: Rows) -> float:
    """Eq of EquiGrad-CAM minus that of Grad-CAM by the authors' protocol."""
    return rows.value("equigrad-cam", "as_published") - rows.value("grad-cam", "as_published")


def _listed(names: Iterable[str]) -> str:
    """Names that have commas themselves."""
    return "; ".join(names)


def _uncounted(names: Iterable[str], constant: Mapping[str, float]) -> str:
    """The sentence about networks of which nobody counted constant maps; empty where all were counted."""
    missing = [name for name in names if math.isnan(constant[name])]
    return f"Constant maps were not counted in these tables on {_listed(missing)}." if missing else ""


def _number(found: float) -> str:
    return "" if math.isnan(found) else f"{found:.3f}"


def _signed(mean: int | float, low: int | float, high: int | float) -> str:
    """A difference with its interval."""
    return f"{mean:+.3f} [{low:+.3f}, {high:+.3f}]"


def _coverage(of: Networks) -> str:
    labels = (COVERAGE, "grad-cam", "equigrad-cam")
    theirs, ours = (
        sum(rows.is_above(*labels[:2], protocol) for rows in of.values()) for protocol in PROTOCOLS
    )
    methods = ("ignores the image", "Grad-CAM", "EquiGrad-CAM")
    head = ["Eq", *(f"{method}, {by}" for by in PROTOCOLS.values() for method in methods)]
    lines = (
        [name, *(one for by in PROTOCOLS for one in rows.shown(labels, by))] for name, rows in of.items()
    )
    title = "rewards" if theirs else "does not reward"
    return (
        f"- **The zero-filled full square {title} ignoring the image.** A map that ignores the image, the vignette of 18 zero-filled rotations, "
        f"is above Grad-CAM with {theirs} of {len(of)} networks by the authors' protocol, and with {ours or 'none'} by ours, inside the disc with reflection."
        + _table(head, lines)
    )


def _offset(of: Networks) -> str:
    """RISE rotated as it is, and stretched as most other maps are."""
    pair = ("rise", STRETCHED.format("rise"))
    known = {name: rows for name, rows in of.items() if {*pair} <= rows.rows.keys()}
    if not known:
        return ""
    higher = [name for name, rows in known.items() if rows.is_above(pair[1], pair[0], "as_published")]
    lower = [name for name, rows in known.items() if rows.is_above(*pair, "as_published")]
    remark = "".join(
        f" Stretched, its Eq by their protocol is {word} with {' and '.join(names)}, by intervals that do not overlap."
        for word, names in (("higher", higher), ("lower", lower))
        if names
    )
    if higher:
        remark += " So part of what is published as drift of RISE is the step between the map and the zeros in its corners."
    head = ["Eq of RISE", "as it is, zeros, full square", "stretched, zeros, full square", "reflection, disc"]
    lines = ([name, *rows.shown(pair, "as_published"), *rows.shown(pair[1:])] for name, rows in known.items())
    return (
        "- **RISE in a frame of zeros.** The authors' code stretches most maps to [0, 1] before it rotates them and fills the corners with zeros, but not those of RISE, RISE-400 and Score-CAM-80. Maps of RISE are mean probabilities, far above 0."
        f"{remark or ' Stretching changes its Eq with no network beyond the intervals.'}"
        + _table(head, lines)
    )


def _four_views(of: Networks) -> str:
    pair, remarks = ("T = 3", "T = 4"), []
    for network, rows in of.items():
        theirs, ours = (rows.sign(DIP, protocol) for protocol in PROTOCOLS)
        if theirs != -1:
            continue
        if ours == 1:
            remarks.append(f"with {network} the dip disappears with reflection in the disc")
        elif ours == -1:
            share = rows.value(DIP) / rows.value(DIP, "as_published")
            remarks.append(f"with {network} {share:.0%} of the dip is left with reflection in the disc")
        else:
            remarks.append(
                f"with {network} whether any of the dip is left with reflection in the disc is undecided"
            )
    head = ["Eq", "T = 3, zeros", "T = 4, zeros", "T = 3, disc", "T = 4, disc"]
    lines = ([name, *rows.shown(pair, "as_published"), *rows.shown(pair)] for name, rows in of.items())
    return (
        "- **T = 4 against T = 3.** Rotations by multiples of 90° keep every corner filled and others do not, so zero filling compares maps in "
        f"vignettes of two shapes: {'; '.join(remarks) or 'here there is no dip'}." + _table(head, lines)
    )


def _above_floor(of: Networks) -> str:
    methods = ("grad-cam", "aug-cam", "equigrad-cam", "equigrad-cam-out")
    skill = [SKILL.format(method) for method in methods]
    above = [name for name, rows in of.items() if rows.sign(UNALIGNED) == 1]
    below = [name for name, rows in of.items() if rows.is_above(*skill[:2])]
    remark = ""
    if above:
        remark += f"By raw Eq, averaging without alignment is above Grad-CAM with {' and '.join(above)}. "
    if below:
        remark += f"By skill it is worse than not averaging with {' and '.join(below)}."
    lines = (
        [f"{name}, {kind}", *rows.shown(labels)]
        for name, rows in of.items()
        for kind, labels in (("Eq", methods), ("skill", skill))
    )
    return (
        "- **The gain of alignment above the floor of unrelated images.** Maps of unrelated images correlate too; skill is the share of the range "
        f"above that floor, in the disc. {remark}" + _table(["", *methods], lines)
    )


def _drift(of: Networks) -> str:
    regions = {
        "drift-elsewhere": "its own shape, elsewhere in the image",
        "drift-of-another": "the drift region of another image",
        "scattered": "scattered pixels",
        "same-saliency": "pixels of the same saliency",
    }
    lines = (
        [words, *(_control(rows.rows.get(f"{region} (control)")) for rows in of.values())]
        for region, words in regions.items()
    )
    return (
        "- **Where the drift verdict stands.** Published: occluding drifting pixels costs less than random ones, so drift is noise. Inside the disc, "
        "against regions of the same size: the cost of occluding drift minus the cost of occluding each control. Above 0 against the same shape "
        "elsewhere means that the model uses drifting pixels; above 0 against pixels of the same saliency, that it uses them more than their "
        "saliency says." + _table(["drift minus", *of], lines)
    )


def _control(row: Row | None) -> str:
    values = row.reason.values if row and row.reason else None
    return _signed(values["mean"], values["low"], values["high"]) if values else ""


def _blur(of: Networks, gains: Mapping[str, float]) -> str:
    """What a blur of the map changes; `gains` is how far EquiGrad-CAM is above Grad-CAM by the authors' protocol."""
    labels = {f"σ = {sigma}": CHANGE_BY_BLUR.format(sigma) for sigma in (4, 16, 32)}
    if not any(label in rows.rows for rows in of.values() for label in labels.values()):
        return ""
    _, flat = published_range("blur.sigma16")
    moved = " and ".join(_networks_beyond(of, labels["σ = 16"], flat)) or "no network"
    lines = ([name, *rows.changes(labels.values()), _number(gains[name])] for name, rows in of.items())
    return (
        f"- **Is averaging only smoothing?** Published: a blur of up to 16 pixels leaves Grad-CAM's Eq flat, within {flat:.3f}. Paired by image, by their protocol, σ = 16 changes it by more than "
        f"that, with the whole interval, with {moved}. EquiGrad-CAM's gain, by their protocol, is in the last column."
        + _table(["change of Eq", *_by_protocol(labels), "EquiGrad-CAM"], lines)
    )


def _gate(of: Networks) -> str:
    low, high = published_range("softgate.range")
    labels = {"first classes": CHANGE_ON_FIRST, "all classes": CHANGE_BY_GATE}
    where = {CHANGE_ON_FIRST: "on the first fifth of the classes", CHANGE_BY_GATE: "on all classes"}
    known = [label for label in where if any(label in rows.rows for rows in of.values())]
    if not known:
        return ""
    moved = {label: " and ".join(_networks_beyond(of, label, high - low)) for label in known}
    shown = ", and ".join(f"with {moved[label] or 'no network'} {where[label]}" for label in known)
    answer = ""
    if (every := moved.get(CHANGE_BY_GATE)) is not None:
        found = f"load-bearing with {every}" if every else "not shown to be load-bearing"
        answer = f" So on all classes gating is {found}."
    lines = ([name, *rows.changes(labels.values())] for name, rows in of.items())
    return (
        f"- **Does the soft gate matter?** Published: weighting views by p^γ moves Eq by at most {high - low:.3f} on the first 200 classes, so gating is not load-bearing. Paired by image, by their "
        f"protocol, γ = 2 moves it by more than that, with the whole interval, {shown}.{answer}"
        + _table(["change of Eq at γ = 2", *_by_protocol(labels)], lines)
    )


def _networks_beyond(of: Networks, label: str, published: float) -> list[str]:
    """The networks whose change is larger than the published one in either direction, with its whole interval, by the authors' protocol."""
    found = {name: rows.estimate(label, "as_published") for name, rows in of.items()}
    return [
        name
        for name, e in found.items()
        if e and too_few(e) is None and (e.high < -published or e.low > published)
    ]


def _by_protocol(titles: Iterable[str]) -> list[str]:
    return [f"{title}, {by}" for title in titles for by in PROTOCOLS.values()]


def _rotated_training(of: Networks, constant: Mapping[str, float]) -> str:
    """Eq of both trainings; `constant` is the share of constant maps by Grad-CAM with unrotated training."""
    labels = ("GC Eq no aug", "GC Eq rot aug", "EG Eq no aug", "EG Eq rot aug")
    ahead, adds, raises = (
        {name: sign for name, rows in of.items() if (sign := rows.sign_of_seeds(label)) is not None}
        for label in (ALIGNED_ABOVE_TRAINED, ALIGNED_AND_TRAINED, TRAINED_ABOVE_PLAIN)
    )
    remark = ""
    if ahead and adds and raises:
        holds = [sum(sign == 1 for sign in found.values()) for found in (ahead, adds, raises)]
        others = [name for name, sign in ahead.items() if sign != 1]
        remark = (
            f" With several fine-tunes, Grad-CAM after rotated training stays below EquiGrad-CAM without it in {holds[0]} of {len(ahead)}"
            f"{f' (not on {_listed(others)})' * bool(others)}. EquiGrad-CAM adds to rotated training in {holds[1]} of {len(adds)}; rotated training raises Grad-CAM's own Eq in {holds[2]} of "
            f"{len(raises)}. Each is counted only if the whole interval of the difference, paired by image, is above 0 for every fine-tune."
        )
        many = [f"{name}: {constant[name]:.0%}" for name in ahead if constant[name] > MANY_CONSTANT]
        if many:
            remark += f" Constant maps count 0, so part of these differences may be that fine-tunes differ in how many maps are constant (of Grad-CAM's without rotated training, {_listed(many)})."
        if uncounted := _uncounted(ahead, constant):
            remark += f" {uncounted}"
    alone = [name for name, rows in of.items() if rows.fine_tunes(labels[0]) == 1]
    if alone:
        remark += f" Networks with one fine-tune of each kind are listed and not counted: fine-tunes differ by more than the interval of one says ({_listed(alone)})."
    head = ["disc Eq", "fine-tunes", "Grad-CAM", "with rotated training", "EquiGrad-CAM", "both"]
    lines = (
        [name, str(rows.fine_tunes(labels[0])), *(_with_range(rows, label) for label in labels)]
        for name, rows in of.items()
    )
    return f"- **Is training for rotation enough?**{remark}" + _table(head, lines)


def _with_range(rows: Rows, label: str) -> str:
    """A mean over fine-tunes, with the least and the largest of them."""
    mean, known = _number(rows.value(label)), [rows.value(seed) for seed in rows.seeds(label)]
    return f"{mean} ({min(known):.3f}–{max(known):.3f})" if len(known) > 1 else mean


def _signals(of: Networks, constant: Mapping[str, float]) -> str:
    label = "worst tenth found in a tenth"
    signals = (label, f"{label}, by disagreement of the views", f"{label}, by 1 − stability")
    columns = (*signals, *map(OFF_GRID_LABEL.format, signals))
    lines: list[list[str]] = []
    chance: list[str] = []
    blank = False
    for name, rows in of.items():
        found = (rows.value(one) for one in columns)
        shares = ["" if math.isnan(share) else f"{share:.0%}" for share in found]
        tunes = "" if name.endswith("ImageNet") else str(rows.fine_tunes(label))
        lines.append([name, tunes, f"{rows.value('r of PEUM with 1 − Eq'):.2f}", *shares])
        own = [label] if label in rows.rows else []
        each = [one for seed in rows.seeds(label) or own if (one := rows.estimate(seed)) is not None]
        above, below = (sum(one.low > CHANCE for one in each), sum(one.high < CHANCE for one in each))
        if above < len(each):
            chance.append(name + _of_fine_tunes(above, below, len(each)))
            blank = blank or constant[name] > 0
    tied = [f"{name}: {constant[name]:.0%} are" for name in of if constant[name] > MANY_CONSTANT]
    remark = ""
    if chance:
        remark += f"PEUM is not above chance with its whole interval, or not with every fine-tune, on {_listed(chance)}. "
    if blank:
        remark += "Constant maps, whose Eq counts 0 and whose PEUM is 0, lower what PEUM finds where there are any; `equicam triage` ranks them first. "
    if tied:
        remark += (
            "Where more than a tenth of the maps are constant, the worst tenth is a random part of them, of which even a perfect signal finds only a part "
            f"({_listed(tied)}, as the mean over fine-tunes where there are several). "
        )
    if uncounted := _uncounted(of, constant):
        remark += f"{uncounted} "
    names = ("PEUM finds", "disagreement finds", "1 − stability finds")
    return (
        "- **Which signal finds unstable maps.** The share of the worst tenth found in a tenth of the images (chance is 10 %), by PEUM, by the "
        "disagreement of all pairs of views and by 1 − stability, as the mean over fine-tunes where there are several; r is PEUM's with 1 − Eq of Grad-CAM. Stability and disagreement have the form of the "
        "target, a correlation of maps; off the grid, the target is Eq at angles that no view has. "
        f"{remark}One fine-tune is no more than an example: another one may differ by more than its interval says. `equicam triage` measures all three signals on your calibration images; `--by` chooses one."
        + _table(["", "fine-tunes", "r of PEUM", *names, *map(OFF_GRID_LABEL.format, names)], lines)
    )


def _of_fine_tunes(above: int, below: int, of: int) -> str:
    """How many fine-tunes find more than chance, and how many less, each with its whole interval."""
    if of == 1:
        return " (below chance)" if below else ""
    return f" (above with {above} of {of}{f', below with {below}' if below else ''})"


def _sanity(of: Networks) -> str:
    """Eq without trained weights, from `equicam-paper reproduce sanity`."""
    labels = [
        f"{method}, {weights}: Eq"
        for method in ("grad-cam", "equigrad-cam")
        for weights in ("weights as given", "all random")
    ]
    alike = "equigrad-cam, all random: Pearson with the map of the weights as given"
    given, random = labels[2:]
    known = {name: rows.value(random) for name, rows in of.items() if not math.isnan(rows.value(random))}
    if not known:
        return ""
    higher = [name for name in known if of[name].is_above(random, given)]
    highest = max(higher or known, key=lambda name: known[name])
    facts = [row.reason.values for rows in of.values() if (row := rows.rows.get(random)) and row.reason]
    seeds = max((len(one["by_seed"]) for one in facts), default=0)
    several = f"It is the mean of {seeds} random networks" if seeds > 1 else "It is of one random network"
    if any(one["constant"] > 0 for one in facts):
        several += "; some maps are constant, which count 0"
    head = [
        "disc Eq", "Grad-CAM", "with random weights", "EquiGrad-CAM", "with random weights", "its random networks",
        "r of its maps with the trained ones",
    ]  # fmt: skip
    lines = (
        [
            name,
            *rows.shown(labels),
            rows.rows[random].note if random in rows.rows else "",
            _with_n(rows.estimate(alike)),
        ]
        for name, rows in of.items()
    )
    return (
        f"- **Consistency without training.** With all weights random, EquiGrad-CAM's Eq is above that of the trained network, by intervals that do not overlap, in {len(higher) or 'none'} of {len(known)}, "
        f"{'up to' if higher else 'at most'} {_number(known[highest])} ({highest}, trained {_number(of[highest].value(given))}): that much comes from aligning and averaging, and needs nothing that the network has learnt. "
        f"{several}. The trained network of a domain is the first of its fine-tunes, which differ."
        + _table(head, lines)
    )


def _with_n(found: Estimate | None) -> str:
    """A measured number with its interval and number of images."""
    return f"{interval(found, 2)}, n = {found.n}" if found else ""
