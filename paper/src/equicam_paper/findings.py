"""What was found beyond the paper: each finding with its numbers, from kept rows.

A finding says that one number is above another where the interval of their paired difference is, or, unpaired, where
their intervals do not overlap. Networks measured on too few images, or groups of them, are left out, and so are differences
that were not measured.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

from equicam.evaluate.statistics import Estimate
from equicam_paper.claims import TITLES, section_title
from equicam_paper.equivariance import (
    CHANGE_BY_BLUR,
    CHANGE_BY_GATE,
    CHANGE_ON_FIRST,
    COVERAGE,
    DIP,
    SKILL,
    UNALIGNED,
)
from equicam_paper.kept import Kept, KeptRows
from equicam_paper.margins import published_range
from equicam_paper.measure import STRETCHED
from equicam_paper.rows import Row, too_few
from equicam_paper.signals import CONSTANT, OFF_GRID_LABEL
from equicam_paper.tables import interval, markdown
from equicam_paper.trainings import ALIGNED_ABOVE_TRAINED, ALIGNED_AND_TRAINED, TRAINED_ABOVE_PLAIN

CHANCE = 0.1  # the share of the worst tenth that a signal without information finds in a tenth
MANY_CONSTANT = 0.1  # the share of constant maps above which the worst tenth is a part of them
PROTOCOLS = {"as_published": "theirs", "clean": "ours"}


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
        """1 if a difference is above 0 with its whole interval, −1 if below, 0 if neither; None where it is not known."""
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
        """The sign that a difference has with every fine-tune, 0 if they do not agree; None for one fine-tune."""
        signs = [self.sign(name) for name in self.seeds(label)]
        if len(signs) < 2 or None in signs:
            return None
        return signs[0] if len({*signs}) == 1 else 0


Networks = Mapping[str, Rows]  # the rows of an experiment by the network, and the data, that they are of


def findings(kept: Kept) -> Iterator[str]:
    """Every finding that the rows, by folder and experiment, support."""
    networks, everywhere, costly = {}, {}, {}
    for folder, experiments in kept.items():
        enough = {name: one for name, one in experiments.items() if _enough(one)}
        rows = {name: Rows({row.label: row for row in one.ran}) for name, one in enough.items()}
        data, _, network = folder.removesuffix("-costly").rpartition("-")
        title = TITLES.get(network, network)
        if folder.endswith("-costly"):
            costly[title] = rows
            continue
        everywhere[section_title(folder)] = rows
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


def _finding(title: str, text: str, head: Iterable[str], lines: Iterable[list[str]]) -> str:
    """An item of a list in Markdown: what was found, and a table."""
    table = "".join(f"  {line}\n" for line in markdown([*head], lines).strip().split("\n"))
    return f"- **{title}** {text.strip()}\n\n{table}"


def _gain(rows: Rows) -> float:
    """Eq of EquiGrad-CAM minus that of Grad-CAM by the authors' protocol."""
    return rows.value("equigrad-cam", "as_published") - rows.value("grad-cam", "as_published")


def _uncounted(names: Iterable[str], constant: Mapping[str, float]) -> str:
    """The sentence about networks of which nobody counted constant maps; empty where all were counted."""
    missing = [name for name in names if math.isnan(constant[name])]
    return f" Constant maps were not counted in these tables on {'; '.join(missing)}." if missing else ""


def _number(found: float) -> str:
    return "" if math.isnan(found) else f"{found:.3f}"


def _signed(mean: int | float, low: int | float, high: int | float) -> str:
    """A difference with its interval."""
    return f"{mean:+.3f} [{low:+.3f}, {high:+.3f}]"


def _coverage(of: Networks) -> str:
    labels = {COVERAGE: "ignores the image", "grad-cam": "Grad-CAM", "equigrad-cam": "EquiGrad-CAM"}
    theirs, ours = (sum(rows.is_above(COVERAGE, "grad-cam", by) for rows in of.values()) for by in PROTOCOLS)
    return _finding(
        f"The zero-filled full square {'rewards' if theirs else 'does not reward'} ignoring the image.",
        f"The vignette of 18 zero-filled rotations, a map that ignores the image, is above Grad-CAM with {theirs} of "
        f"{len(of)} networks by the authors' protocol, and with {ours or 'none'} by ours.",
        ["Eq", *(f"{method}, {by}" for by in PROTOCOLS.values() for method in labels.values())],
        ([name, *(one for by in PROTOCOLS for one in rows.shown(labels, by))] for name, rows in of.items()),
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
        remark += " So part of what is published as drift of RISE is the step to the corners."
    return _finding(
        "RISE in a frame of zeros.",
        "The authors' code stretches most maps to [0, 1] before it rotates them and fills the corners with zeros, but not those of "
        "RISE, mean probabilities far above 0, nor of RISE-400 and Score-CAM-80."
        f"{remark or ' Stretching changes its Eq with no network beyond the intervals.'}",
        ["Eq of RISE", "as it is, theirs", "stretched, theirs", "ours"],
        ([name, *rows.shown(pair, "as_published"), *rows.shown(pair[1:])] for name, rows in known.items()),
    )


def _four_views(of: Networks) -> str:
    pair, remarks = ("T = 3", "T = 4"), []
    for network, rows in of.items():
        theirs, ours = (rows.sign(DIP, protocol) for protocol in PROTOCOLS)
        left = rows.value(DIP) / rows.value(DIP, "as_published") if ours == -1 else 0.0
        answers = {1: "the dip disappears", -1: f"{left:.0%} of the dip is left"}
        if theirs == -1:
            answer = answers.get(ours or 0, "whether any of the dip is left is undecided")
            remarks.append(f"with {network} {answer} with reflection in the disc")
    return _finding(
        "T = 4 against T = 3.",
        "Rotations by multiples of 90° keep every corner filled and others do not, so zero filling compares maps in vignettes "
        f"of two shapes: {'; '.join(remarks) or 'here there is no dip'}.",
        ["Eq", *(f"{t}, {by}" for by in PROTOCOLS.values() for t in pair)],
        ([name, *rows.shown(pair, "as_published"), *rows.shown(pair)] for name, rows in of.items()),
    )


def _above_floor(of: Networks) -> str:
    methods = ("grad-cam", "aug-cam", "equigrad-cam", "equigrad-cam-out")
    skill = [SKILL.format(method) for method in methods]
    remark = ""
    if above := [name for name, rows in of.items() if rows.sign(UNALIGNED) == 1]:
        remark += f" By raw Eq, averaging without alignment is above Grad-CAM with {' and '.join(above)}."
    if below := [name for name, rows in of.items() if rows.is_above(*skill[:2])]:
        remark += f" By skill it is worse than not averaging with {' and '.join(below)}."
    return _finding(
        "The gain of alignment above the floor of unrelated images.",
        "Maps of unrelated images correlate too; skill is the share of the range above that floor, in the disc."
        + remark,
        ["", *methods],
        (
            [f"{name}, {kind}", *rows.shown(labels)]
            for name, rows in of.items()
            for kind, labels in (("Eq", methods), ("skill", skill))
        ),
    )


def _drift(of: Networks) -> str:
    regions = {
        "drift-elsewhere": "its own shape, elsewhere in the image",
        "drift-of-another": "the drift region of another image",
        "scattered": "scattered pixels",
        "same-saliency": "pixels of the same saliency",
    }
    return _finding(
        "Where the drift verdict stands.",
        "Published: occluding drifting pixels costs less than random ones, so drift is noise. Here is the cost of occluding drift "
        "minus that of a control of the same size, in the disc. Above 0 against the same shape elsewhere: the model uses drifting "
        "pixels; above 0 against pixels of the same saliency: more than their saliency says.",
        ["drift minus", *of],
        (
            [words, *(_control(rows.rows.get(f"{region} (control)")) for rows in of.values())]
            for region, words in regions.items()
        ),
    )


def _control(row: Row | None) -> str:
    values = row.reason.values if row and row.reason else None
    return _signed(values["mean"], values["low"], values["high"]) if values else ""


def _blur(of: Networks, gains: Mapping[str, float]) -> str:
    """What a blur of the map changes; `gains` is how far EquiGrad-CAM is above Grad-CAM by the authors' protocol."""
    labels = {f"σ = {sigma}": CHANGE_BY_BLUR.format(sigma) for sigma in (16, 32)}
    if not any(label in rows.rows for rows in of.values() for label in labels.values()):
        return ""
    _, flat = published_range("blur.sigma16")
    moved = " and ".join(_networks_beyond(of, labels["σ = 16"], flat)) or "no network"
    return _finding(
        "Is averaging only smoothing?",
        f"Published: a blur of up to 16 pixels leaves Grad-CAM's Eq flat, within {flat:.3f}. Paired by image, by their protocol, "
        f"σ = 16 changes it by more than that, with the whole interval, with {moved}. The last column is EquiGrad-CAM's gain.",
        ["change of Eq", *_by_protocol(labels), "EquiGrad-CAM"],
        ([name, *rows.changes(labels.values()), _number(gains[name])] for name, rows in of.items()),
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
    return _finding(
        "Does the soft gate matter?",
        f"Published: weighting views by p^γ moves Eq by at most {high - low:.3f} on the first 200 classes, so gating is not load-bearing. "
        f"Paired by image, by their protocol, γ = 2 moves it by more than that, with the whole interval, {shown}.{answer}",
        ["change of Eq at γ = 2", *_by_protocol(labels)],
        ([name, *rows.changes(labels.values())] for name, rows in of.items()),
    )


def _networks_beyond(of: Networks, label: str, published: float) -> list[str]:
    """The networks whose whole interval of a change is beyond the published one, either way, by the authors' protocol."""
    found = {name: rows.estimate(label, "as_published") for name, rows in of.items()}
    known = {name: e for name, e in found.items() if e and too_few(e) is None}
    return [name for name, e in known.items() if e.high < -published or e.low > published]


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
        signs = ([*found.values()] for found in (ahead, adds, raises))
        holds = [f"{found.count(1)} of {len(found)}" for found in signs]
        others = "; ".join(name for name, sign in ahead.items() if sign != 1)
        remark = (
            f"With several fine-tunes, Grad-CAM after rotated training stays below EquiGrad-CAM without it in {holds[0]}"
            f"{f' (not on {others})' * bool(others)}. EquiGrad-CAM adds to rotated training in {holds[1]}; rotated training "
            f"raises Grad-CAM's own Eq in {holds[2]}. Each is counted if the whole interval, paired by image, is above 0 for every fine-tune."
        )
        if many := [f"{name}: {constant[name]:.0%}" for name in ahead if constant[name] > MANY_CONSTANT]:
            remark += f" Constant maps count 0, and fine-tunes may differ in how many there are (of Grad-CAM's without rotated training, {'; '.join(many)})."
        remark += _uncounted(ahead, constant)
    if alone := [name for name, rows in of.items() if rows.fine_tunes(labels[0]) == 1]:
        remark += f" One fine-tune of each kind is listed and not counted: fine-tunes differ by more than its interval says ({'; '.join(alone)})."
    return _finding(
        "Is training for rotation enough?",
        remark,
        ["disc Eq", "fine-tunes", "Grad-CAM", "with rotated training", "EquiGrad-CAM", "both"],
        (
            [name, str(rows.fine_tunes(labels[0])), *(_with_range(rows, label) for label in labels)]
            for name, rows in of.items()
        ),
    )


def _with_range(rows: Rows, label: str) -> str:
    """A mean over fine-tunes, with the least and the largest of them."""
    mean, known = _number(rows.value(label)), [rows.value(seed) for seed in rows.seeds(label)]
    return f"{mean} ({min(known):.3f}–{max(known):.3f})" if len(known) > 1 else mean


def _signals(of: Networks, constant: Mapping[str, float]) -> str:
    label = "worst tenth found in a tenth"
    signals = (label, f"{label}, by disagreement of the views", f"{label}, by 1 − stability")
    columns = (*signals, *map(OFF_GRID_LABEL.format, signals))
    lines: list[list[str]] = []
    chance: dict[str, str] = {}
    for name, rows in of.items():
        shares = ["" if math.isnan(share) else f"{share:.0%}" for share in map(rows.value, columns)]
        tunes = "" if name.endswith("ImageNet") else str(rows.fine_tunes(label))
        lines.append([name, tunes, f"{rows.value('r of PEUM with 1 − Eq'):.2f}", *shares])
        each = [one for seed in rows.seeds(label) or [label] if (one := rows.estimate(seed)) is not None]
        above, below = (sum(one.low > CHANCE for one in each), sum(one.high < CHANCE for one in each))
        if above < len(each):
            chance[name] = _of_fine_tunes(above, below, len(each))
    remark = ""
    if chance:
        listed = "; ".join(name + found for name, found in chance.items())
        why = "with its whole interval, or not with every fine-tune"
        remark += f" PEUM is not above chance {why}, on {listed}."
    if any(constant[name] > 0 for name in chance):
        remark += " Constant maps, whose Eq counts 0 and whose PEUM is 0, lower what PEUM finds; `equicam triage` ranks them first."
    if tied := [f"{name}: {constant[name]:.0%} are" for name in of if constant[name] > MANY_CONSTANT]:
        remark += f" Where more than a tenth of the maps are constant, the worst tenth is a random part of them, of which even a perfect signal finds only a part ({'; '.join(tied)})."
    names = ("PEUM finds", "disagreement finds", "1 − stability finds")
    return _finding(
        "Which signal finds unstable maps.",
        "The share of the worst tenth found in a tenth of the images (chance is 10 %), by PEUM, by the disagreement of all pairs of views and "
        "by 1 − stability, as the mean over fine-tunes where there are several; r is PEUM's with 1 − Eq of Grad-CAM. Off the grid, the target is Eq at angles that no "
        f"view has.{remark}{_uncounted(of, constant)} Another fine-tune may differ by more than the interval of one says.",
        ["", "fine-tunes", "r of PEUM", *names, *map(OFF_GRID_LABEL.format, names)],
        lines,
    )


def _of_fine_tunes(above: int, below: int, of: int) -> str:
    """How many fine-tunes find more than chance, and how many less, each with its whole interval."""
    if of == 1:
        return " (below chance)" if below else ""
    return f" (above with {above} of {of}{f', below with {below}' if below else ''})"


def _sanity(of: Networks) -> str:
    """Eq without trained weights, from `equicam-paper reproduce sanity`."""
    given, random = "equigrad-cam, weights as given: Eq", "equigrad-cam, all random: Eq"
    alike = "equigrad-cam, all random: Pearson with the map of the weights as given"
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
    labels = (given.removeprefix("equi"), random.removeprefix("equi"), given, random)
    return _finding(
        "Consistency without training.",
        f"With all weights random, EquiGrad-CAM's Eq is above that of the trained network, by intervals that do not overlap, in {len(higher) or 'none'} of {len(known)}, "
        f"{'up to' if higher else 'at most'} {_number(known[highest])} ({highest}, trained {_number(of[highest].value(given))}): "
        f"that much comes from aligning and averaging alone. {several}. The trained network of a domain is the first of its fine-tunes.",
        ["disc Eq", "Grad-CAM", "random", "EquiGrad-CAM", "random", "r of its maps with the trained ones"],
        ([name, *rows.shown(labels), interval(rows.estimate(alike), 2)] for name, rows in of.items()),
    )
