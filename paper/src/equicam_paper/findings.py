"""What was found beyond the paper: each finding with its numbers, from kept rows.

A finding says that one number is above another where the interval of their paired difference is, or, unpaired, where
their intervals do not overlap. Networks measured on too few images, or groups of images, are left out, and so are differences
that were not measured.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from equicam.evaluate.statistics import Estimate
from equicam_paper import alignment, blur, rotation_augmentation, soft_gate, t_sweep, tables, triage
from equicam_paper.claims import TITLES
from equicam_paper.kept import KeptRows
from equicam_paper.margins import published_range
from equicam_paper.measure import STRETCHED
from equicam_paper.rows import Row, too_few

CHANCE = 0.1
"""The share of the worst tenth that a signal without information finds in a tenth."""
MANY_CONSTANT = 0.1
"""The share of constant maps above which the worst tenth is a part of them."""
PROTOCOLS = ("as_published", "clean")
Rows = dict[str, Row]
"""An experiment's rows that were run, by label."""


def findings(kept: Mapping[str, Mapping[str, KeptRows]]) -> Iterator[str]:
    """Every finding that the rows, by folder and experiment, support."""
    networks, everywhere, costly = {}, {}, {}
    for folder, experiments in kept.items():
        rows = {
            name: {row.label: row for row in one.ran} for name, one in experiments.items() if _enough(one)
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
    constant = {
        name: value(of.get("triage", {}).get(triage.CONSTANT), "clean") for name, of in everywhere.items()
    }
    gains = {name: _gain(of.get("main", {})) for name, of in networks.items()}
    made: tuple[tuple[str, Mapping[str, dict[str, Rows]], Callable[[dict[str, Rows]], str]], ...] = (
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
        found = {name: of[experiment] for name, of in sources.items() if of.get(experiment)}
        if found and (text := finding(found)):
            yield text


def _enough(kept: KeptRows) -> bool:
    """Whether any number is of enough images, and of enough groups of them."""
    return any(
        of is not None and too_few(of) is None for row in kept.ran for of in (row.clean, row.as_published)
    )


def sign(row: Row | None, protocol: str = "clean") -> int | None:
    """1 if a difference is above 0 with its whole interval, −1 if below, 0 if its interval holds 0; None where none is known."""
    found: Estimate | None = getattr(row, protocol) if row else None
    if found is None or math.isnan(found.low) or too_few(found) is not None:
        return None
    return (found.low > 0) - (found.high < 0)


def is_above(row: Row | None, other: Row | None, protocol: str = "clean") -> bool:
    """Whether one number's interval is wholly above another's."""
    a, b = (getattr(one, protocol) if one else None for one in (row, other))
    return a is not None and b is not None and a.low > b.high


def value(row: Row | None, protocol: str) -> float:
    """A row's number by either protocol; NaN where it has none."""
    found: Estimate | None = getattr(row, protocol) if row else None
    return found.value if found else math.nan


def table(head: list[str], rows: list[list[str]]) -> str:
    """Markdown, indented for a list."""
    text = [f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rows)]
    return "\n\n" + "\n".join(f"  {row}" for row in text) + "\n"


def _gain(rows: Rows) -> float:
    """Eq of EquiGrad-CAM minus that of Grad-CAM by the authors' protocol."""
    return value(rows.get("equigrad-cam"), "as_published") - value(rows.get("grad-cam"), "as_published")


def _listed(names: Iterable[str]) -> str:
    """Names that have commas themselves."""
    return "; ".join(names)


def _uncounted(names: Iterable[str], constant: Mapping[str, float]) -> list[str]:
    """The sentence about networks of which nobody counted constant maps; none where all were counted."""
    missing = [name for name in names if math.isnan(constant[name])]
    return [f"Constant maps were not counted in these tables on {_listed(missing)}."] if missing else []


def _number(found: float) -> str:
    return "" if math.isnan(found) else f"{found:.3f}"


def _coverage(of: dict[str, Rows]) -> str:
    ignores, single = "coverage: a map that ignores the image", "grad-cam"
    numbers = {
        network: [
            value(rows.get(label), protocol)
            for protocol in PROTOCOLS
            for label in (ignores, single, "equigrad-cam")
        ]
        for network, rows in of.items()
    }
    theirs, ours = (
        sum(is_above(rows.get(ignores), rows.get(single), protocol) for rows in of.values())
        for protocol in PROTOCOLS
    )
    methods = ("ignores the image", "Grad-CAM", "EquiGrad-CAM")
    head = [f"{method}, {by}" for by in ("zeros, full square", "reflection, disc") for method in methods]
    title = "rewards" if theirs else "does not reward"
    return (
        f"- **The zero-filled full square {title} ignoring the image.** A map that ignores the image, the vignette of 18 zero-filled rotations, "
        f"is above Grad-CAM with {theirs} of {len(of)} networks by the authors' protocol, and with {ours or 'none'} by ours, inside the disc with reflection."
        + table(["Eq", *head], [[name, *map(_number, values)] for name, values in numbers.items()])
    )


def _offset(of: dict[str, Rows]) -> str:
    """RISE rotated as it is, and stretched as most other maps are."""
    stretched = STRETCHED.format("rise")
    known = {
        name: (rows["rise"], rows[stretched]) for name, rows in of.items() if {"rise", stretched} <= {*rows}
    }
    if not known:
        return ""
    higher = [name for name, (alone, other) in known.items() if is_above(other, alone, "as_published")]
    lower = [name for name, (alone, other) in known.items() if is_above(alone, other, "as_published")]
    remark = "".join(
        f" Stretched, its Eq by their protocol is {word} with {' and '.join(names)}, by intervals that do not overlap."
        for word, names in (("higher", higher), ("lower", lower))
        if names
    )
    if higher:
        remark += " So part of what is published as drift of RISE is the step between the map and the zeros in its corners."
    head = ["Eq of RISE", "as it is, zeros, full square", "stretched, zeros, full square", "reflection, disc"]
    lines = []
    for name, (alone, other) in known.items():
        numbers = value(alone, "as_published"), value(other, "as_published"), value(other, "clean")
        lines.append([name, *map(_number, numbers)])
    return (
        "- **RISE in a frame of zeros.** The authors' code stretches most maps to [0, 1] before it rotates them and fills the corners with zeros, but not those of RISE, RISE-400 and Score-CAM-80. Maps of RISE are mean probabilities, far above 0."
        f"{remark or ' Stretching changes its Eq with no network beyond the intervals.'}" + table(head, lines)
    )


def _four_views(of: dict[str, Rows]) -> str:
    lines, remarks = [], []
    for network, rows in of.items():
        numbers = [[value(rows.get(f"T = {t}"), protocol) for t in (3, 4)] for protocol in PROTOCOLS]
        lines.append([network, *(_number(v) for pair in numbers for v in pair)])
        dip = rows.get(t_sweep.DIP)
        theirs, ours = (sign(dip, protocol) for protocol in PROTOCOLS)
        if theirs != -1:
            continue
        if ours == 1:
            remarks.append(f"with {network} the dip disappears with reflection in the disc")
        elif ours == -1:
            share = value(dip, "clean") / value(dip, "as_published")
            remarks.append(f"with {network} {share:.0%} of the dip is left with reflection in the disc")
        else:
            remarks.append(
                f"with {network} whether any of the dip is left with reflection in the disc is undecided"
            )
    head = ["Eq", "T = 3, zeros", "T = 4, zeros", "T = 3, disc", "T = 4, disc"]
    return (
        "- **T = 4 against T = 3.** Rotations by multiples of 90° keep every corner filled and others do not, so zero filling compares maps in "
        f"vignettes of two shapes: {'; '.join(remarks) or 'here there is no dip'}." + table(head, lines)
    )


def _above_floor(of: dict[str, Rows]) -> str:
    methods = ("grad-cam", "aug-cam", "equigrad-cam", "equigrad-cam-out")
    raw = {name: [value(rows.get(m), "clean") for m in methods] for name, rows in of.items()}
    skill = {
        name: [value(rows.get(f"{m}: skill above the floor"), "clean") for m in methods]
        for name, rows in of.items()
    }
    above = [name for name, rows in of.items() if sign(rows.get(alignment.UNALIGNED)) == 1]
    by_skill = "{}: skill above the floor".format
    below = [
        n
        for n, rows in of.items()
        if is_above(rows.get(by_skill(methods[0])), rows.get(by_skill(methods[1])))
    ]
    remark = (
        f"By raw Eq, averaging without alignment is above Grad-CAM with {' and '.join(above)}. "
        if above
        else ""
    )
    remark += f"By skill it is worse than not averaging with {' and '.join(below)}." if below else ""
    lines = [
        [f"{name}, {kind}", *map(_number, of_kind[name])]
        for name in of
        for kind, of_kind in (("Eq", raw), ("skill", skill))
    ]
    return (
        "- **The gain of alignment above the floor of unrelated images.** Maps of unrelated images correlate too; skill is the share of the range "
        f"above that floor, in the disc. {remark}" + table(["", *methods], lines)
    )


def _drift(of: dict[str, Rows]) -> str:
    regions = {
        "drift-elsewhere": "its own shape, elsewhere in the image",
        "drift-of-another": "the drift region of another image",
        "scattered": "scattered pixels",
        "same-saliency": "pixels of the same saliency",
    }
    lines = [
        [words, *(_difference(rows.get(f"{region} (control)")) for rows in of.values())]
        for region, words in regions.items()
    ]
    return (
        "- **Where the drift verdict stands.** Published: occluding drifting pixels costs less than random ones, so drift is noise. Inside the disc, "
        "against regions of the same size: the cost of occluding drift minus the cost of occluding each control. Above 0 against the same shape "
        "elsewhere means that the model uses drifting pixels; above 0 against pixels of the same saliency, that it uses them more than their "
        "saliency says." + table(["drift minus", *of], lines)
    )


def _difference(row: Row | None) -> str:
    return "{mean:+.3f} [{low:+.3f}, {high:+.3f}]".format(**row.reason.values) if row and row.reason else ""


def _blur(of: dict[str, Rows], gains: Mapping[str, float]) -> str:
    """What a blur of the map changes; `gains` is how far EquiGrad-CAM is above Grad-CAM by the authors' protocol."""
    labels = {f"σ = {sigma}": blur.CHANGE.format(sigma) for sigma in (4, 16, 32)}
    if not any(label in rows for rows in of.values() for label in labels.values()):
        return ""
    _, flat = published_range("blur.sigma16")
    moved = " and ".join(_networks_beyond(of, labels["σ = 16"], flat)) or "no network"
    head, lines = _changes_by_protocol(of, labels)
    for name, line in zip(of, lines, strict=True):
        line.append(_number(gains[name]))
    return (
        f"- **Is averaging only smoothing?** Published: a blur of up to 16 pixels leaves Grad-CAM's Eq flat, within {flat:.3f}. Paired by image, by their protocol, σ = 16 changes it by more than "
        f"that, with the whole interval, with {moved}. EquiGrad-CAM's gain, by their protocol, is in the last column."
        + table(["change of Eq", *head, "EquiGrad-CAM"], lines)
    )


def _gate(of: dict[str, Rows]) -> str:
    low, high = published_range("softgate.range")
    labels = {"first classes": soft_gate.CHANGE_FIRST, "all classes": soft_gate.CHANGE}
    where = ("on the first fifth of the classes", "on all classes")
    known = [label for label in labels.values() if any(label in rows for rows in of.values())]
    if not known:
        return ""
    moved = {label: " and ".join(_networks_beyond(of, label, high - low)) for label in known}
    shown = [
        f"with {moved[label] or 'no network'} {place}"
        for label, place in zip(labels.values(), where, strict=True)
        if label in known
    ]
    every = moved.get(soft_gate.CHANGE)
    answer = f"load-bearing with {every}" if every else "not shown to be load-bearing"
    head, lines = _changes_by_protocol(of, labels)
    return (
        f"- **Does the soft gate matter?** Published: weighting views by p^γ moves Eq by at most {high - low:.3f} on the first 200 classes, so gating is not load-bearing. Paired by image, by their "
        f"protocol, γ = 2 moves it by more than that, with the whole interval, {', and '.join(shown)}."
        + f" So on all classes gating is {answer}." * (every is not None)
        + table(["change of Eq at γ = 2", *head], lines)
    )


def _networks_beyond(of: Mapping[str, Rows], label: str, published: float) -> list[str]:
    """The networks whose change is larger than the published one in either direction, with its whole interval, by the authors' protocol."""
    found = {name: rows[label].as_published for name, rows in of.items() if label in rows}
    return [
        name
        for name, e in found.items()
        if e and too_few(e) is None and (e.high < -published or e.low > published)
    ]


def _changes_by_protocol(
    of: Mapping[str, Rows], labels: Mapping[str, str]
) -> tuple[list[str], list[list[str]]]:
    """Differences by both protocols: the head of a table, and a line for every network."""
    protocols = {"as_published": "zeros, full square", "clean": "reflection, disc"}
    head = [f"{title}, {by}" for title in labels for by in protocols.values()]
    lines = [
        [
            name,
            *(
                _with_interval(rows.get(label), protocol)
                for label in labels.values()
                for protocol in protocols
            ),
        ]
        for name, rows in of.items()
    ]
    return head, lines


def _with_interval(row: Row | None, protocol: str) -> str:
    """A difference with its interval by one protocol; empty where it was not measured."""
    found: Estimate | None = getattr(row, protocol) if row else None
    return interval(found) if found else ""


def interval(found: Estimate) -> str:
    """A difference with its interval."""
    return f"{found.value:+.3f} [{found.low:+.3f}, {found.high:+.3f}]"


def _rotated_training(of: dict[str, Rows], constant: Mapping[str, float]) -> str:
    """Eq of both trainings; `constant` is the share of constant maps by Grad-CAM with unrotated training."""
    labels = ("GC Eq no aug", "GC Eq rot aug", "EG Eq no aug", "EG Eq rot aug")
    eq = {name: [value(rows.get(label), "clean") for label in labels] for name, rows in of.items()}
    ahead, adds, raises = (
        {name: one for name, rows in of.items() if (one := sign_of_seeds(rows, label)) is not None}
        for label in (
            rotation_augmentation.ALIGNED_ABOVE_TRAINED,
            rotation_augmentation.ALIGNED_AND_TRAINED,
            rotation_augmentation.TRAINED_ABOVE_PLAIN,
        )
    )
    holds = [[name for name, one in found.items() if one == 1] for found in (ahead, adds, raises)]
    remark = ""
    if ahead and adds and raises:
        others = [name for name in ahead if name not in holds[0]]
        remark = (
            f" With several fine-tunes, Grad-CAM after rotated training stays below EquiGrad-CAM without it in {len(holds[0])} of {len(ahead)}"
            f"{f' (not on {_listed(others)})' * bool(others)}. EquiGrad-CAM adds to rotated training in {len(holds[1])} of {len(adds)}; rotated training raises Grad-CAM's own Eq in {len(holds[2])} of "
            f"{len(raises)}. Each is counted only if the whole interval of the difference, paired by image, is above 0 for every fine-tune."
        )
        many = [f"{name}: {constant[name]:.0%}" for name in ahead if constant[name] > MANY_CONSTANT]
        if many:
            remark += f" Constant maps count 0, so part of these differences may be that fine-tunes differ in how many maps are constant (of Grad-CAM's without rotated training, {_listed(many)})."
        remark = " ".join([remark, *_uncounted(ahead, constant)])
    alone = [name for name, rows in of.items() if fine_tunes(rows, labels[0]) == 1]
    if alone:
        remark += f" Networks with one fine-tune of each kind are listed and not counted: fine-tunes differ by more than the interval of one says ({_listed(alone)})."
    head = ["disc Eq", "fine-tunes", "Grad-CAM", "with rotated training", "EquiGrad-CAM", "both"]
    lines = [
        [
            name,
            str(fine_tunes(of[name], labels[0])),
            *(_with_range(v, of_seeds(of[name], label)) for v, label in zip(values, labels, strict=True)),
        ]
        for name, values in eq.items()
    ]
    return f"- **Is training for rotation enough?**{remark}" + table(head, lines)


def _with_range(mean: float, seeds: Sequence[Row]) -> str:
    """A mean over fine-tunes, with the least and the largest of them."""
    known = [value(row, "clean") for row in seeds]
    return f"{_number(mean)} ({min(known):.3f}–{max(known):.3f})" if len(known) > 1 else _number(mean)


def of_seeds(rows: Rows, label: str) -> list[Row]:
    """The rows of single fine-tunes, where there are several."""
    return [row for name, row in rows.items() if name.startswith(f"{label}, seed ")]


def fine_tunes(rows: Rows, label: str) -> int:
    """How many fine-tunes a number is the mean of."""
    return len(of_seeds(rows, label)) or 1


def sign_of_seeds(rows: Rows, label: str) -> int | None:
    """The sign of a difference if every fine-tune has it with its whole interval, 0 if they do not agree; None for one fine-tune."""
    signs = [sign(row) for row in of_seeds(rows, label)]
    if len(signs) < 2 or None in signs:
        return None
    return signs[0] if len({*signs}) == 1 else 0


def _signals(of: dict[str, Rows], constant: Mapping[str, float]) -> str:
    label = "worst tenth found in a tenth"
    signals = (label, f"{label}, by disagreement of the views", f"{label}, by 1 − stability")
    lines: list[list[str]] = []
    chance: list[str] = []
    tied: list[str] = []
    blank = False
    for name, rows in of.items():
        r = value(rows.get("r of PEUM with 1 − Eq"), "clean")
        found = [value(rows.get(one), "clean") for one in signals]
        off = [value(rows.get(triage.OFF_GRID_LABEL.format(one)), "clean") for one in signals]
        shares = ["" if math.isnan(share) else f"{share:.0%}" for share in (*found, *off)]
        tunes = "" if name.endswith("ImageNet") else str(fine_tunes(rows, label))
        lines.append([name, tunes, f"{r:.2f}", *shares])
        own = [rows[label]] if label in rows else []
        each = [row.clean for row in of_seeds(rows, label) or own if row.clean is not None]
        above, below = (sum(one.low > CHANCE for one in each), sum(one.high < CHANCE for one in each))
        if above < len(each):
            chance.append(name + _of_fine_tunes(above, below, len(each)))
            blank = blank or constant[name] > 0
        if constant[name] > MANY_CONSTANT:
            tied.append(f"{name}: {constant[name]:.0%} are")
    remark = (
        f"PEUM is not above chance with its whole interval, or not with every fine-tune, on {_listed(chance)}. "
        if chance
        else ""
    )
    if blank:
        remark += "Constant maps, whose Eq counts 0 and whose PEUM is 0, lower what PEUM finds where there are any; `equicam triage` ranks them first. "
    if tied:
        remark += (
            "Where more than a tenth of the maps are constant, the worst tenth is a random part of them, of which even a perfect signal finds only a part "
            f"({_listed(tied)}, as the mean over fine-tunes where there are several). "
        )
    remark += "".join(f"{sentence} " for sentence in _uncounted(of, constant))
    names = ("PEUM finds", "disagreement finds", "1 − stability finds")
    return (
        "- **Which signal finds unstable maps.** The share of the worst tenth found in a tenth of the images (chance is 10 %), by PEUM, by the "
        "disagreement of all pairs of views and by 1 − stability, as the mean over fine-tunes where there are several; r is PEUM's with 1 − Eq of Grad-CAM. Stability and disagreement have the form of the "
        "target, a correlation of maps; off the grid, the target is Eq at angles that no view has. "
        f"{remark}One fine-tune is no more than an example: another one may differ by more than its interval says. `equicam triage` measures all three signals on your calibration images; `--by` chooses one."
        + table(["", "fine-tunes", "r of PEUM", *names, *(f"{name}, off the grid" for name in names)], lines)
    )


def _of_fine_tunes(above: int, below: int, of: int) -> str:
    """How many fine-tunes find more than chance, and how many less, each with its whole interval."""
    if of == 1:
        return " (below chance)" if below else ""
    return f" (above with {above} of {of}{f', below with {below}' if below else ''})"


def _sanity(of: dict[str, Rows]) -> str:
    """Eq without trained weights, from `equicam-paper reproduce sanity`."""
    labels = [
        f"{method}, {weights}: Eq"
        for method in ("grad-cam", "equigrad-cam")
        for weights in ("weights as given", "all random")
    ]
    alike = "equigrad-cam, all random: Pearson with the map of the weights as given"
    given, random = labels[2:]
    numbers = {name: [value(rows.get(label), "clean") for label in labels] for name, rows in of.items()}
    known = {name: values for name, values in numbers.items() if not math.isnan(values[3])}
    if not known:
        return ""
    head = [
        "disc Eq",
        "Grad-CAM",
        "with random weights",
        "EquiGrad-CAM",
        "with random weights",
        "its random networks",
        "r of its maps with the trained ones",
    ]
    higher = [name for name in known if is_above(of[name].get(random), of[name].get(given))]
    highest = max(higher or known, key=lambda name: known[name][3])
    facts = [row.reason.values for rows in of.values() if (row := rows.get(random)) and row.reason]
    seeds = max((len(one["by_seed"]) for one in facts), default=0)
    several = f"It is the mean of {seeds} random networks" if seeds > 1 else "It is of one random network"
    if any(one["constant"] > 0 for one in facts):
        several += "; some maps are constant, which count 0"
    lines = [
        [
            name,
            *map(_number, numbers[name]),
            rows[random].note if random in rows else "",
            _with_n(rows.get(alike)),
        ]
        for name, rows in of.items()
    ]
    return (
        f"- **Consistency without training.** With all weights random, EquiGrad-CAM's Eq is above that of the trained network, by intervals that do not overlap, in {len(higher) or 'none'} of {len(known)}, "
        f"{'up to' if higher else 'at most'} {_number(numbers[highest][3])} ({highest}, trained {_number(numbers[highest][2])}): that much comes from aligning and averaging, and needs nothing that the network has learnt. "
        f"{several}. The trained network of a domain is the first of its fine-tunes, which differ."
        + table(head, lines)
    )


def _with_n(row: Row | None) -> str:
    """A measured number with its interval and number of images."""
    return f"{tables.interval(row.clean, 2)}, n = {row.clean.n}" if row and row.clean else ""
