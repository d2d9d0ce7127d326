"""Write docs/reproduce.md and its plots from the lines `equicam reproduce` has kept.

python scripts/reproduce_page.py FOLDER…     # each with NAME.json files: a network on ImageNet, or DATA-NETWORK on a domain
"""

import json
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure

from equicam.experiments import NAMES, named

DOCS = Path(__file__).parents[1] / "docs"
PLOTS = DOCS / "reproduce"
Lines = dict[str, dict[str, Any]]
"""An experiment's lines by what they are of."""
HEAD = """# The paper, regenerated

`equicam reproduce --list` names every table, figure and quantitative claim; `equicam reproduce NAME --data …` runs one and
prints three numbers side by side: published, by the authors' protocol (full square, zero filling, their variants), and by
ours (inscribed disc, reflection). Verdicts: **matches** (within the stated tolerance, or inside the interval of at least 100
pictures), **differs**, **artefact** (their number comes out, ours contradicts what is concluded from it), **undecided**
(too few pictures), **measured** (nothing published), not run. Intervals are 95 %, bootstrapped by picture.

| option | |
|---|---|
| `--data`, `--split`, `--n` | the pictures, one split of them, a class-spread sample of so many |
| `--model`, `--weights`, `--classes` | the network, as everywhere ([models.md](models.md)) |
| `--backbone` | whose published numbers stand beside, where the name of the model does not say: `resnet50`, `vgg16`, `vit_b_16` |
| `--domain` | of the domain tables: `PatchCamelyon` and `RESISC45` are the paper's, any other name stands alone |
| `--extra turned=FILE` | more weights of the same architecture: `plain`, `turned`, `seed0` … `seed2` |
| `--costly` | also methods of hundreds of passes a map (Score-CAM, RISE) |
| `--dtype`, `--compile`, `--device`, `--out` | precision, compiling, device, where rows are kept and resumed |

With the authors' data and the published weights (`equicam reproduce main --data ILSVRC2012/val --n 10000`, `--model vgg16`,
`--model vit_b_16`, …) the whole paper is regenerated. What follows was run with what was at hand, and is written by
`scripts/reproduce_page.py` from the kept lines, plots and all.

"""
SECTIONS = {
    "resnet50": (
        "ResNet-50 (the original He et al. weights and strides, not torchvision's), 1,000 ImageNet validation pictures, one a class; one H200, TF32",
        "equicam reproduce NAME --data imagenet-val --model nets.py:original --weights resnet50.safetensors --backbone resnet50",
    ),
    "mobilenet_v2": (
        "MobileNetV2 (torchvision's V1 weights), the same 1,000 pictures; one H200, TF32",
        "equicam reproduce NAME --data imagenet-val --model mobilenet_v2",
    ),
}
DATA = {
    "aerial": "twelve RESISC45 classes, 2,400 training and 600 test tiles",
    "histology": "BreakHis 400×, benign or malignant, 1,113 training and 580 test pictures, no patient in both",
}
ARCHITECTURES = {"resnet50": "ResNet-50", "vgg16": "VGG-16", "vit_small": "ViT-S/14"}


def main() -> None:
    """Findings, then one section a network, one table an experiment, then what was not run."""
    folders = [Path(f) for f in sys.argv[1:]]
    kept = {
        f.name: {n: json.loads(_file(f, n).read_text()) for n in NAMES if _file(f, n).is_file()}
        for f in folders
    }
    PLOTS.mkdir(exist_ok=True)
    text = HEAD + "## What was found beyond the paper\n\n" + "\n".join(findings(kept)) + "\n\n"
    for name, experiments in kept.items():
        title, command = heading(name)
        text += f"## {title}\n\n    {command}\n\n"
        tunes = folders[list(kept).index(name)] / "tunes.json"
        if tunes.is_file():
            text += trained(json.loads(tunes.read_text()))
        for experiment, found in experiments.items():
            text += section(experiment, found, plot(name, experiment, lines(found)))
    (DOCS / "reproduce.md").write_text(text + not_run(kept))


def _file(folder: Path, name: str) -> Path:
    return folder / f"{name}.json"


def heading(name: str) -> tuple[str, str]:
    """A section's title, and the command that makes its tables."""
    if name in SECTIONS:
        return SECTIONS[name]
    data, _, network = name.partition("-")
    title = f"{ARCHITECTURES[network]} fine-tuned on {data}: {DATA[data]}; one H200"
    domain = "RESISC45" if data == "aerial" else data
    tune = f"equicam finetune {data} --arch {network} --weights START --seed 0 --out plain   # and with --rotation-augment: turned"
    run = f"equicam reproduce NAME --data {data} --split test --domain {domain} --model {network} --weights plain/weights.safetensors --extra plain=… --extra turned=…"
    return title, f"{tune}\n    {run}"


def lines(found: dict[str, Any]) -> Lines:
    """Lines that were run, by what they are of."""
    return {one["what"]: one for one in found["lines"] if one["verdict"] != "not run"}


def value(one: dict[str, Any] | None, side: str) -> float:
    """A line's number by either protocol."""
    return (
        float("nan") if not one or not one[side] or one[side]["value"] is None else float(one[side]["value"])
    )


def findings(kept: dict[str, dict[str, Any]]) -> Iterator[str]:
    """What the tables say that the paper does not, each with its numbers."""
    for name in ("resnet50", "mobilenet_v2"):
        of = {experiment: lines(found) for experiment, found in kept.get(name, {}).items()}
        network = "ResNet-50" if name == "resnet50" else "MobileNetV2"
        if "main" in of:
            blind = next((one for what, one in of["main"].items() if what.startswith("coverage")), None)
            best = of["main"].get("equigrad-cam")
            yield (
                f"- **The zero-filled full square rewards not looking** ({network}). A map that never looks at the picture, the vignette that "
                f"18 zero-filled turns leave, gets Eq {value(blind, 'as_published'):.3f}; Grad-CAM gets {value(of['main'].get('grad-cam'), 'as_published'):.3f} "
                f"and EquiGrad-CAM {value(best, 'as_published'):.3f}. In the disc with reflection it gets {value(blind, 'clean'):.3f} and EquiGrad-CAM "
                f"{value(best, 'clean'):.3f}."
            )
        if "t-sweep" in of:
            three, four = (of["t-sweep"].get(f"T = {t}") for t in (3, 4))
            yield (
                f"- **Four views are not worse than three** ({network}). Zero filling says {value(four, 'as_published'):.3f} against {value(three, 'as_published'):.3f}; "
                f"in the disc it is {value(four, 'clean'):.3f} against {value(three, 'clean'):.3f}. Quarter turns leave every corner full, other turns do not: "
                "the published dip is the vignette changing shape."
            )
        if "alignment" in of:
            skills = {
                m: of["alignment"].get(f"{m}: skill, the share of what is above the floor")
                for m in ("grad-cam", "aug-cam", "equigrad-cam", "equigrad-cam-out")
            }
            if skills["grad-cam"]:
                said = ", ".join(f"{m} {value(one, 'clean'):.3f}" for m, one in skills.items())
                yield (
                    f"- **What alignment buys above the floor** ({network}). Maps of unrelated pictures correlate; of what is above that, in the disc: {said}. "
                    "Averaging without turning back buys nothing, and its floor is the highest of all."
                )
        if "causal" in of:
            above = {
                what.removesuffix(" (control)"): one
                for what, one in of["causal"].items()
                if what.endswith("(control)")
            }
            said = "; ".join(
                f"{region}: {above[region]['reason']}"
                for region in ("drift-elsewhere", "drift-of-another", "same-saliency", "scattered")
                if region in above
            )
            yield (
                f"- **Drift is neither noise nor more than its saliency** ({network}). Published: occluding drifting pixels costs less than random ones. "
                f"Inside the disc, against other regions of the same size: {said}."
            )
    yield from domain_findings(kept)


def domain_findings(kept: dict[str, dict[str, Any]]) -> Iterator[str]:
    """Whether training for rotation was enough, and what finds unstable maps."""
    turned = []
    for name, experiments in kept.items():
        if "rotation-augmentation" in experiments and "-" in name:
            of = lines(experiments["rotation-augmentation"])
            numbers = [value(of.get(w), "clean") for w in ("GC Eq no aug", "GC Eq rot aug", "EG Eq no aug")]
            turned.append(
                f"{name.replace('-', ' ')} {numbers[0]:.3f} → {numbers[1]:.3f}, aligned {numbers[2]:.3f}"
            )
    if turned:
        yield (
            "- **Training on turned pictures is not enough.** Disc Eq of Grad-CAM without → with turned training, and of EquiGrad-CAM without: "
            + "; ".join(turned)
            + "."
        )
    found = []
    for name, experiments in kept.items():
        if "triage" in experiments:
            of = lines(experiments["triage"])
            mine = of.get("worst tenth found in a tenth")
            other = of.get("worst tenth found in a tenth, by disagreement of the views")
            found.append(
                f"{name.replace('-', ' ')} {value(mine, 'clean'):.0%} and {value(other, 'clean'):.0%}"
            )
    if found:
        yield (
            "- **How many unstable maps PEUM finds, and disagreement over all pairs of views.** Of the worst tenth, in a tenth of the pictures: "
            + "; ".join(found)
            + ". Chance is 10 %."
        )


def trained(tunes: dict[str, Any]) -> str:
    """The fine-tunes behind a section."""
    rows = "".join(
        f"| {name} | {one['n']} | {one['accuracy']:.3f} | {one['balanced']:.3f} |\n"
        for name, one in tunes.items()
    )
    return f"| training, seed | test pictures | accuracy | balanced |\n|---|---|---|---|\n{rows}\n"


def section(name: str, kept: dict[str, Any], picture: str) -> str:
    """A table of the lines that were run."""
    rows = "| what | published | by their protocol | by ours | verdict |\n|---|---|---|---|---|\n"
    notes = []
    for line in kept["lines"]:
        if line["verdict"] == "not run":
            continue
        verdict = f"**{line['verdict']}**" if line["verdict"] in ("differs", "artefact") else line["verdict"]
        what = line["what"].replace("|", "\\|")
        rows += f"| {what} | {line['published']} | {shown(line['as_published'])} | {shown(line['clean'])} | {verdict} |\n"
        if line["reason"]:
            notes.append(f"- {line['what']}: {line['reason']}")
    below = "\n".join(dict.fromkeys(notes)) + ("\n\n" if notes else "")
    return f"### {named(name).title} (`{name}`)\n\n{picture}{rows}\n{below}"


def shown(estimate: dict[str, Any] | None) -> str:
    """A number with its interval."""
    if not estimate or estimate["value"] is None:
        return ""
    if estimate["low"] is None:
        return f"{estimate['value']:.3f}"
    return f"{estimate['value']:.3f} [{estimate['low']:.3f}, {estimate['high']:.3f}]"


def not_run(kept: dict[str, dict[str, Any]]) -> str:
    """Claims that no run here answered, with what would."""
    answered = {
        one["claim"]
        for of in kept.values()
        for found in of.values()
        for one in found["lines"]
        if one["verdict"] != "not run"
    }
    left: dict[tuple[str, str], list[str]] = {}
    for of in kept.values():
        for name, found in of.items():
            for one in found["lines"]:
                if one["claim"] and one["claim"] not in answered:
                    names = left.setdefault((name, one["reason"]), [])
                    if one["claim"] not in names:
                        names.append(one["claim"])
    seen: set[str] = set()
    rows = ""
    for (name, reason), claims in left.items():
        fresh = [c for c in claims if c not in seen]
        seen |= set(fresh)
        if fresh:
            rows += f"| `{name}` | {len(fresh)} | {command(name, reason).replace('|', '/')} |\n"
    whole = [n for n in NAMES if not any(n in of for of in kept.values())]
    for name in whole:
        rows += f"| `{name}` | all | needs {named(name).needs}: `equicam reproduce {name} --data …` |\n"
    return (
        "## Not run here\n\nWeights of VGG-16, ViT-B/16, ViT-L/16 and CLIP, PatchCamelyon, the whole of RESISC45, CUB-200-2011 and the\n"
        "ImageNet originals were not at hand. What else is listed has not been run yet. Every path is tested on stand-ins of the same layout:\n\n"
        f"| experiment | claims | what would |\n|---|---|---|\n{rows}"
    )


def command(name: str, reason: str) -> str:
    """What would run a claim, as one types it."""
    run = f"equicam reproduce {name} --data ILSVRC2012/val"
    if model := re.fullmatch(r"of (\w+): --model (\w+)", reason):
        return f"of {model[1]}: `{run} --model {model[2]} --n 10000`"
    if reason.endswith("--costly, with --n"):
        return f"{reason.removesuffix(': --costly, with --n')}: `{run} --costly --n 500`"
    return reason


Plot = Callable[[Lines, Any], None]


def plot(name: str, experiment: str, of: Lines) -> str:
    """The experiment's picture, if it has one."""
    drawn = {
        "main": _methods,
        "t-sweep": _views,
        "angles": _angles,
        "causal": _regions,
        "rotation-augmentation": _training,
    }
    if experiment not in drawn or not of:
        return ""
    with mpl.rc_context({"font.size": 9, "axes.spines.top": False, "axes.spines.right": False}):
        figure = Figure(figsize=(6.4, 2.6), layout="constrained")
        drawn[experiment](of, figure.subplots())
        path = PLOTS / f"{name}-{experiment}.png"
        figure.savefig(path, dpi=110)
    return f"![{named(experiment).title}](reproduce/{path.name})\n\n"


THEIRS, OURS, SAID = "#7a8793", "#1f6f8b", "#c2571a"


def _published(one: dict[str, Any]) -> float:
    try:
        return float(one["published"].split()[0])
    except ValueError:
        return float("nan")


def _bars(axes: Any, of: Lines, names: list[str], labels: list[str] | None = None) -> None:
    for side, colour, shift, label in (
        ("as_published", THEIRS, -0.2, "by their protocol"),
        ("clean", OURS, 0.2, "by ours"),
    ):
        at = [i + shift for i in range(len(names))]
        axes.bar(at, [value(of[n], side) for n in names], 0.38, color=colour, label=label)
        for x, n in zip(at, names, strict=True):
            if of[n][side] and of[n][side]["low"] is not None:
                axes.plot([x, x], [of[n][side]["low"], of[n][side]["high"]], color="black", lw=1)
    axes.plot(
        range(len(names)), [_published(of[n]) for n in names], "D", color=SAID, ms=5, label="published", ls=""
    )
    axes.set_xticks(range(len(names)), labels or names, rotation=18, ha="right")
    axes.legend(frameon=False, fontsize=8, loc="upper left", bbox_to_anchor=(1, 1))


def _methods(of: Lines, axes: Any) -> None:
    names = [n for n in of if n != "relative gain, %"]
    _bars(axes, of, names, [n.split(":")[0] for n in names])
    axes.set_ylabel("Eq")


def _regions(of: Lines, axes: Any) -> None:
    names = [n for n in of if n.endswith((", presented", ", turned"))]
    _bars(axes, of, names)
    axes.set_ylabel("probability lost")


def _training(of: Lines, axes: Any) -> None:
    _bars(axes, of, [n for n in of if n[:2] in ("GC", "EG") and "−" not in n])
    axes.set_ylabel("Eq")


def _views(of: Lines, axes: Any) -> None:
    names = [n for n in of if n.startswith("T = ")]
    views = [int(n[4:]) for n in names]
    for side, colour, label in (("as_published", THEIRS, "by their protocol"), ("clean", OURS, "by ours")):
        axes.plot(views, [value(of[n], side) for n in names], "o-", color=colour, ms=4, label=label)
    axes.plot(views, [_published(of[n]) for n in names], "D", color=SAID, ms=5, ls="", label="published")
    axes.set_xscale("log", base=2)
    axes.set_xticks(views, [str(v) for v in views])
    axes.set_xlabel("views")
    axes.set_ylabel("Eq")
    axes.legend(frameon=False, fontsize=8)


def _angles(of: Lines, axes: Any) -> None:
    for method, colour in (("grad-cam", THEIRS), ("equigrad-cam", OURS)):
        names = [n for n in of if n.startswith(f"{method} at")]
        angles = [float(n.split()[-1].rstrip("°")) for n in names]
        for side, style in (("as_published", "--"), ("clean", "-")):
            label = f"{method}, {'theirs' if side == 'as_published' else 'ours'}"
            axes.plot(
                angles,
                [value(of[n], side) for n in names],
                style,
                marker="o",
                ms=3,
                color=colour,
                label=label,
            )
    axes.set_xlabel("degrees")
    axes.set_ylabel("Eq")
    axes.legend(frameon=False, fontsize=8, loc="upper left", bbox_to_anchor=(1, 1))


if __name__ == "__main__":
    main()
