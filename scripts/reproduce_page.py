"""Write docs/reproduce.md and its plots from the lines `equicam reproduce` has kept.

python scripts/reproduce_page.py FOLDER…     # each with NAME.json files: a network on ImageNet, or DATA-NETWORK on a domain
"""

import json
import math
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure

from equicam.paper import NAMES, named

DOCS = Path(__file__).parents[1] / "docs"
PLOTS = DOCS / "reproduce"
Lines = dict[str, dict[str, Any]]
"""An experiment's lines by what they are of."""
HEAD = """# The paper, regenerated

`equicam reproduce --list` names every table, figure and quantitative claim; `equicam reproduce NAME --data …` runs one and
prints three numbers side by side: published, by the authors' protocol (full square, zero filling, their variants), and by
ours (inscribed disc, reflection). Verdicts: **matches** (within the experiment's tolerance, behind ± but for lines kept before it was, or inside the interval of
at least 100 pictures), **differs**, **artefact** (their number comes out, ours contradicts what is concluded from it), **undecided**
(too few pictures, or published of several networks at once), **measured** (nothing published), not run. Intervals are 95 %, bootstrapped by picture.

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
NETS = """```python
# nets.py: the strides that the original ResNet-50 weights were trained with, and the ViT as timm has it
import timm, torchvision

def original():
    net = torchvision.models.resnet50()
    for stage in (net.layer2, net.layer3, net.layer4):
        stage[0].conv1.stride, stage[0].conv2.stride = (2, 2), (1, 1)
    return net

def vit_small():
    return timm.create_model("vit_small_patch14_dinov2", num_classes=2, dynamic_img_size=True)
```

"""
SECTIONS = {
    "resnet50": (
        "ResNet-50 (the original He et al. weights and strides, not torchvision's), 1,000 ImageNet validation pictures, one a class; one H200, TF32",
        "equicam reproduce NAME --data imagenet-val --model nets.py:original --weights resnet50.safetensors --backbone resnet50 --compile",
    ),
    "mobilenet_v2": (
        "MobileNetV2 (torchvision's V1 weights), the same 1,000 pictures; one H200, TF32",
        "equicam reproduce NAME --data imagenet-val --model mobilenet_v2 --compile",
    ),
}
DATA = {
    "aerial": "twelve RESISC45 classes, 2,400 training and 600 test tiles",
    "histology": "BreakHis 400×, benign or malignant, 1,113 training and 580 test pictures, no patient in both",
}
ARCHITECTURES = {"resnet50": "ResNet-50", "vgg16": "VGG-16", "vit_small": "ViT-S/14"}
MODELS = {"resnet50": "nets.py:original", "vgg16": "vgg16", "vit_small": "nets.py:vit_small"}
STARTS = {
    "resnet50": "resnet50.safetensors",
    "vgg16": "vgg16_features.safetensors",
    "vit_small": "vit_small_patch14.safetensors",
}
OTHER_TASK = "The paper's RESISC45 numbers are of all 45 classes and 1,000 tiles, these of twelve classes: the same kind of pictures, not the same task.\n\n"
HARDLY = 0.15
"""The share of the worst tenth in a tenth up to which a signal is as good as none."""
TURNED = "seeds-turned"
"""The seeds of the networks trained with turned pictures: the same experiment on other weights."""


def main() -> None:
    """Findings, then one section a network, one table an experiment, then what was not run."""
    folders = [Path(f) for f in sys.argv[1:]]
    kept = {
        f.name: {n: json.loads(_file(f, n).read_text()) for n in (*NAMES, TURNED) if _file(f, n).is_file()}
        for f in folders
    }
    PLOTS.mkdir(exist_ok=True)
    text = HEAD + "## What was found beyond the paper\n\n" + "\n".join(findings(kept)) + "\n\n"
    for name, experiments in kept.items():
        title, command = heading(name)
        text += f"## {title}\n\n    {command}\n\n" + (NETS if name == next(iter(kept)) else "")
        text += OTHER_TASK if name == "aerial-resnet50" else ""
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
    title = f"{ARCHITECTURES[network]} fine-tuned on {data}: {DATA[data]}; one H200, evaluated in bf16"
    domain = "RESISC45" if data == "aerial" else data
    model = MODELS[network]
    seeds = (0, 1, 2) if network == "resnet50" else (0,)
    tunes = [
        f"equicam finetune {data} --arch {model} --weights {STARTS[network]} --seed {seed} --out {kind}{seed}{turned}"
        for seed in seeds
        for kind, turned in (("plain", ""), ("turned", " --rotation-augment"))
    ]
    extra = "".join(f" --extra {kind}={kind}0/weights.safetensors" for kind in ("plain", "turned"))
    extra += "".join(
        f" --extra seed{seed}=plain{seed}/weights.safetensors" for seed in seeds if len(seeds) > 1
    )
    run = (
        f"equicam reproduce NAME --data {data} --split test --domain {domain} --model {model} --backbone {network} "
        f"--dtype bfloat16 --weights plain0/weights.safetensors{extra}"
    )
    return title, "\n    ".join([*tunes, run])


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
    networks = {
        words: {experiment: lines(found) for experiment, found in kept[name].items()}
        for name, words in (("resnet50", "ResNet-50"), ("mobilenet_v2", "MobileNetV2"))
        if name in kept
    }
    yield from _not_looking({n: of["main"] for n, of in networks.items() if "main" in of})
    yield from _four_views({n: of["t-sweep"] for n, of in networks.items() if "t-sweep" in of})
    yield from _above_floor({n: of["alignment"] for n, of in networks.items() if "alignment" in of})
    yield from _drift({n: of["causal"] for n, of in networks.items() if "causal" in of})
    domains = {name.replace("-", ", "): of for name, of in kept.items()}
    yield from _turned_training(
        {n: lines(of["rotation-augmentation"]) for n, of in domains.items() if "rotation-augmentation" in of}
    )
    yield from _signals({n: lines(of["triage"]) for n, of in domains.items() if "triage" in of})


def table(head: list[str], rows: list[list[str]]) -> str:
    """Markdown, as part of a list."""
    text = [f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rows)]
    return "\n\n" + "\n".join(f"  {row}" for row in text) + "\n"


def _not_looking(of: dict[str, Lines]) -> Iterator[str]:
    blind = "coverage: a map that never looks at the picture"
    rows = [
        [
            network,
            *(
                f"{value(one.get(what), side):.3f}"
                for side in ("as_published", "clean")
                for what in (blind, "grad-cam", "equigrad-cam")
            ),
        ]
        for network, one in of.items()
    ]
    above = [
        sum(value(one.get(blind), side) > value(one.get("grad-cam"), side) for one in of.values())
        for side in ("as_published", "clean")
    ]
    if rows:
        head = [
            "Eq",
            *(
                f"{what}, {by}"
                for by in ("zeros, full square", "reflection, disc")
                for what in ("never looks", "Grad-CAM", "EquiGrad-CAM")
            ),
        ]
        yield (
            "- **The zero-filled full square rewards not looking.** A map that never looks at the picture, the vignette that 18 zero-filled turns leave, "
            f"is above Grad-CAM with {above[0]} of {len(rows)} networks by the authors' protocol, and with {above[1]} inside the disc with reflection."
            + table(head, rows)
        )


def _four_views(of: dict[str, Lines]) -> Iterator[str]:
    rows, said = [], []
    for network, one in of.items():
        numbers = {
            side: [value(one.get(f"T = {t}"), side) for t in (3, 4)] for side in ("as_published", "clean")
        }
        rows.append([network, *(f"{v:.3f}" for pair in numbers.values() for v in pair)])
        theirs, ours = (four - three for three, four in numbers.values())
        if theirs < 0 <= ours:
            said.append(f"with {network} the published dip is all vignette")
        elif theirs < ours < 0:
            said.append(f"with {network} {ours / theirs:.0%} of it is left where nothing is filled")
    if rows:
        head = ["Eq", "T = 3, zeros", "T = 4, zeros", "T = 3, disc", "T = 4, disc"]
        yield (
            "- **T = 4 against T = 3.** Quarter turns leave every corner full and other turns do not, so that zero filling compares maps in vignettes of "
            f"two shapes: {'; '.join(said) or 'here there is no dip'}." + table(head, rows)
        )


def _above_floor(of: dict[str, Lines]) -> Iterator[str]:
    methods = ("grad-cam", "aug-cam", "equigrad-cam", "equigrad-cam-out")
    found = {
        network: [
            value(one.get(f"{m}: skill, the share of what is above the floor"), "clean") for m in methods
        ]
        for network, one in of.items()
    }
    rows = [
        [network, *(f"{v:.3f}" for v in values)]
        for network, values in found.items()
        if not math.isnan(values[0])
    ]
    if rows:
        worse = all(values[1] < values[0] for values in found.values() if not math.isnan(values[0]))
        said = (
            f"By this measure averaging without turning back is worse than not averaging ({' and '.join(row[0] for row in rows)})."
            if worse
            else ""
        )
        yield (
            "- **What alignment buys above the unrelated-image floor.** Maps of unrelated pictures correlate too; the share of what is above that, in the disc. "
            f"{said}" + table(["skill", *methods], rows)
        )


def _drift(of: dict[str, Lines]) -> Iterator[str]:
    regions = {
        "drift-elsewhere": "its own shape, elsewhere in the picture",
        "drift-of-another": "the drift region of another picture",
        "scattered": "scattered pixels",
        "same-saliency": "pixels of the same saliency",
    }
    rows = [
        [words, *(_difference(one.get(f"{region} (control)")) for one in of.values())]
        for region, words in regions.items()
    ]
    if of:
        yield (
            "- **Where the drift verdict stands.** Published: occluding drifting pixels costs less than random ones, so drift is noise. Inside the disc, against "
            "regions of the same size: what occluding drift costs, minus what occluding this costs. Above 0 against the same shape elsewhere means "
            "that drifting pixels are used; above 0 against pixels of the same saliency, that they are used more than their saliency says."
            + table(["drift minus", *of], rows)
        )


def _difference(one: dict[str, Any] | None) -> str:
    found = re.search(r"drift minus this ([^;]+);", one["reason"]) if one else None
    return found[1] if found else ""


def _turned_training(of: dict[str, Lines]) -> Iterator[str]:
    words = ("GC Eq no aug", "GC Eq rot aug", "EG Eq no aug", "EG Eq rot aug")
    found = {name: [value(one.get(w), "clean") for w in words] for name, one in of.items()}
    below = sum(turned < aligned for _, turned, aligned, _ in found.values())
    adds = sum(both > turned for _, turned, _, both in found.values())
    if found:
        head = ["disc Eq", "Grad-CAM", "with turned training", "EquiGrad-CAM", "both"]
        yield (
            f"- **Was training for rotation enough?** No: alone it stays below alignment alone in {below} of {len(found)}, and alignment adds to it in {adds} of {len(found)}."
            + table(head, [[name, *(f"{v:.3f}" for v in values)] for name, values in found.items()])
        )


def _signals(of: dict[str, Lines]) -> Iterator[str]:
    what = "worst tenth found in a tenth"
    rows, blind = [], []
    for name, one in of.items():
        r = value(one.get("r of PEUM with 1 − Eq"), "clean")
        mine, other = (value(one.get(w), "clean") for w in (what, f"{what}, by disagreement of the views"))
        rows.append([name, f"{r:.2f}", f"{mine:.0%}", f"{other:.0%}"])
        blind += [name] if mine <= HARDLY else []
    if rows:
        said = f"PEUM finds hardly more than chance on {' and '.join(blind)}. " if blind else ""
        yield (
            "- **Which signal finds unstable maps.** Of the worst tenth, in a tenth of the pictures (chance is 10 %), by PEUM and by the disagreement "
            f"of all pairs of views; r is PEUM's with 1 − Eq of Grad-CAM. {said}`equicam triage` measures both on calibrated pictures and "
            "ranks by either (`--by`)." + table(["", "r of PEUM", "PEUM finds", "disagreement finds"], rows)
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
        if line["verdict"] == "matches" and line.get("allowed"):
            verdict += f" ± {line['allowed']:g}"
        what = line["what"].replace("|", "\\|")
        rows += f"| {what} | {line['published']} | {shown(line['as_published'])} | {shown(line['clean'])} | {verdict} |\n"
        if line["reason"]:
            notes.append(f"- {line['what']}: {line['reason']}")
    below = "\n".join(dict.fromkeys(notes)) + ("\n\n" if notes else "")
    title = "Three fine-tunes with turned pictures" if name == TURNED else named(name).title
    legends = {
        "rotation-augmentation": "GC is Grad-CAM, EG EquiGrad-CAM, aug training with turned pictures.\n\n",
        "cost": "On two CPU cores, `--device cpu --costly` and not compiled; times on the GPU are in [benchmarks.md](benchmarks.md).\n\n",
        TURNED: "`equicam reproduce seeds` with `--extra seed0=turned0/weights.safetensors` and so on.\n\n",
    }
    legend = legends.get(name, "")
    return f"### {title} (`{name}`)\n\n{picture}{legend}{rows}\n{below}"


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
        rows += (
            f"| `{name}` | all | needs {named(name).needs}: `equicam reproduce {name} {COMMANDS[name]}` |\n"
        )
    return (
        "## Not run here\n\nWeights of VGG-16 and ViT-B/16 for ImageNet, ViT-L/16 and CLIP, PatchCamelyon, the whole of RESISC45 and CUB-200-2011 were not\n"
        "at hand, and there is one picture a class where `matched` needs several. What takes hundreds of passes a map (`--costly`) was\n"
        "left out, but for one Score-CAM in `cost`; [explainers.md](explainers.md) has Score-CAM's constant maps on 100 pictures. Figures show the pictures, which are not\n"
        "ours to publish. Every path is tested on stand-ins of the same layout, and this is what would run each:\n\n"
        f"| experiment | claims | what would |\n|---|---|---|\n{rows}"
    )


COMMANDS = {
    "cost": "--data ILSVRC2012/val",
    "equal-compute": "--data ILSVRC2012/val --costly --n 500",
    "matched": "--data ILSVRC2012/val",
    "constants": "--data ILSVRC2012/val --n 200",
    "constant-maps": "--data ILSVRC2012/val --costly --n 500",
    "hooks": "--data ILSVRC2012/val --model vit_b_16 --n 100",
    "vit-attribution": "--data ILSVRC2012/val --model vit_b_16 --n 1000",
    "vit-l": "--data ILSVRC2012/val --model vit_l_16 --n 1000",
    "clip": "--data resisc45 --split test --model open_clip:ViT-B-16/openai --classes airplane,airport,…",
    "label-region": "--data pcam --split test --domain PatchCamelyon --weights models/plain/weights.safetensors",
    "cub": "--data CUB_200_2011",
    "cub-rotation": "--data CUB_200_2011 --extra plain=models/plain/weights.safetensors --extra turned=models/turned/weights.safetensors",
    "figure-pipeline": "--data ILSVRC2012/val --n 4",
    "figure-signal-noise": "--data ILSVRC2012/val --n 4",
    "figure-drift-strip": "--data ILSVRC2012/val --n 4",
}
"""Of what no run here has begun."""


def command(name: str, reason: str) -> str:
    """What would run a claim, as one types it."""
    run = f"equicam reproduce {name} --data ILSVRC2012/val"
    if model := re.fullmatch(r"of (\w+): --model (\w+)", reason):
        return f"of {model[1]}: `{run} --model {model[2]} --n 10000`"
    if reason.endswith("--costly, with --n"):
        return f"{reason.removesuffix(': --costly, with --n')}: `{run} --costly --n 500`"
    before, colon, typed = reason.partition(": ")
    return f"{before}: `{typed}`" if colon and typed.startswith("equicam ") else reason


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


def _diamonds(axes: Any, at: list[int], ones: list[dict[str, Any]]) -> None:
    """What was published, if anything was."""
    said = [_published(one) for one in ones]
    if not all(map(math.isnan, said)):
        axes.plot(at, said, "D", color=SAID, ms=5, label="published", ls="")


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
    _diamonds(axes, list(range(len(names))), [of[n] for n in names])
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
    _diamonds(axes, views, [of[n] for n in names])
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
