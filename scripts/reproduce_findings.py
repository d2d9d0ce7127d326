"""The section "What was found beyond the paper" of docs/reproduce.md: each finding with its numbers."""

import math
from collections.abc import Iterator
from typing import Any

from reproduce_plots import Rows, value

NEAR_CHANCE = 0.15
"""A signal that finds at most this share of the worst tenth in a tenth is called hardly better than chance."""
PROTOCOLS = ("as_published", "clean")


def findings(kept: dict[str, dict[str, Rows]]) -> Iterator[str]:
    """Every finding the rows of NETWORK, EXPERIMENT support."""
    names = (("resnet50", "ResNet-50"), ("mobilenet_v2", "MobileNetV2"))
    networks = {title: kept[name] for name, title in names if name in kept}
    domains = {name.replace("-", ", "): experiments for name, experiments in kept.items()}
    for experiment, sources, finding in (
        ("main", networks, _coverage),
        ("t-sweep", networks, _four_views),
        ("alignment", networks, _above_floor),
        ("causal", networks, _drift),
        ("rotation-augmentation", domains, _rotated_training),
        ("triage", domains, _signals),
    ):
        rows = {name: of[experiment] for name, of in sources.items() if experiment in of}
        if rows:
            yield finding(rows)


def table(head: list[str], rows: list[list[str]]) -> str:
    """Markdown, indented for a list."""
    text = [f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rows)]
    return "\n\n" + "\n".join(f"  {row}" for row in text) + "\n"


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
    theirs, ours = (sum(values[i] > values[i + 1] for values in numbers.values()) for i in (0, 3))
    methods = ("ignores the image", "Grad-CAM", "EquiGrad-CAM")
    head = [f"{method}, {by}" for by in ("zeros, full square", "reflection, disc") for method in methods]
    return (
        "- **The zero-filled full square rewards ignoring the image.** A map that ignores the image, the vignette of 18 zero-filled rotations, "
        f"is above Grad-CAM with {theirs} of {len(of)} networks by the authors' protocol, and with {ours} inside the disc with reflection."
        + table(["Eq", *head], [[name, *(f"{v:.3f}" for v in values)] for name, values in numbers.items()])
    )


def _four_views(of: dict[str, Rows]) -> str:
    lines, remarks = [], []
    for network, rows in of.items():
        numbers = [[value(rows.get(f"T = {t}"), protocol) for t in (3, 4)] for protocol in PROTOCOLS]
        lines.append([network, *(f"{v:.3f}" for pair in numbers for v in pair)])
        theirs, ours = (four - three for three, four in numbers)
        if theirs < 0 <= ours:
            remarks.append(f"with {network} the published dip is all vignette")
        elif theirs < ours < 0:
            remarks.append(f"with {network} {ours / theirs:.0%} of it is left where nothing is filled")
    head = ["Eq", "T = 3, zeros", "T = 4, zeros", "T = 3, disc", "T = 4, disc"]
    return (
        "- **T = 4 against T = 3.** Rotations by multiples of 90° keep every corner filled and others do not, so zero filling compares maps in "
        f"vignettes of two shapes: {'; '.join(remarks) or 'here there is no dip'}." + table(head, lines)
    )


def _above_floor(of: dict[str, Rows]) -> str:
    methods = ("grad-cam", "aug-cam", "equigrad-cam", "equigrad-cam-out")
    skill = {
        network: [value(rows.get(f"{m}: skill above the floor"), "clean") for m in methods]
        for network, rows in of.items()
    }
    skill = {network: values for network, values in skill.items() if not math.isnan(values[0])}
    remark = ""
    if skill and all(unaligned < single for single, unaligned, *_ in skill.values()):
        remark = f"By this measure averaging without alignment is worse than not averaging ({' and '.join(skill)})."
    return (
        "- **The gain of alignment above the floor of unrelated images.** Maps of unrelated images correlate too; skill is the share of the range "
        f"above that floor, in the disc. {remark}"
        + table(
            ["skill", *methods], [[name, *(f"{v:.3f}" for v in values)] for name, values in skill.items()]
        )
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


def _difference(row: dict[str, Any] | None) -> str:
    return "{mean:+.3f} [{low:+.3f}, {high:+.3f}]".format(**row["reason"]["values"]) if row else ""


def _rotated_training(of: dict[str, Rows]) -> str:
    labels = ("GC Eq no aug", "GC Eq rot aug", "EG Eq no aug", "EG Eq rot aug")
    eq = {name: [value(rows.get(label), "clean") for label in labels] for name, rows in of.items()}
    below = sum(rotated < aligned for _, rotated, aligned, _ in eq.values())
    adds = sum(both > rotated for _, rotated, _, both in eq.values())
    head = ["disc Eq", "Grad-CAM", "with rotated training", "EquiGrad-CAM", "both"]
    return (
        f"- **Is training for rotation enough?** No: alone it stays below alignment alone in {below} of {len(eq)}, and alignment adds to it in "
        f"{adds} of {len(eq)}."
        + table(head, [[name, *(f"{v:.3f}" for v in values)] for name, values in eq.items()])
    )


def _signals(of: dict[str, Rows]) -> str:
    label = "worst tenth found in a tenth"
    lines, chance = [], []
    for name, rows in of.items():
        r = value(rows.get("r of PEUM with 1 − Eq"), "clean")
        peum, other = (
            value(rows.get(one), "clean") for one in (label, f"{label}, by disagreement of the views")
        )
        lines.append([name, f"{r:.2f}", f"{peum:.0%}", f"{other:.0%}"])
        chance += [name] if peum <= NEAR_CHANCE else []
    remark = f"PEUM finds hardly more than chance on {' and '.join(chance)}. " if chance else ""
    return (
        "- **Which signal finds unstable maps.** The share of the worst tenth found in a tenth of the images (chance is 10 %), by PEUM and by the "
        f"disagreement of all pairs of views; r is PEUM's with 1 − Eq of Grad-CAM. {remark}`equicam triage` measures both on the calibration subset "
        "and ranks by either (`--by`)." + table(["", "r of PEUM", "PEUM finds", "disagreement finds"], lines)
    )
