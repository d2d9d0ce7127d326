"""Write docs/reproduce.md and its plots from the rows that `equicam reproduce` wrote.

python scripts/reproduce_page.py FOLDER…     # each with NAME.json files: a network on ImageNet, or DATA-NETWORK on a domain
"""

import json
import sys
from pathlib import Path
from typing import Any

from reproduce_findings import findings
from reproduce_plots import Rows, write_plot

from equicam.paper import EXPERIMENTS, load_experiment
from equicam.paper.rows import Remark

BEGIN, LAST = "<!-- benchmarks/signals.py writes from here -->", "<!-- to here: context -->"
DOCS = Path(__file__).parents[1] / "docs"
PLOTS = DOCS / "reproduce"
HEAD = """# The paper, regenerated

`equicam reproduce --list` names every table, figure and quantitative claim; `equicam reproduce NAME --data …` runs one and
prints three numbers side by side: published, by the authors' protocol (full square, zero filling, their variants), and by
ours (inscribed disc, reflection).

**How a verdict is found.** Each published number has a margin: half of the published difference to what it is compared with
(Grad-CAM's number for EquiGrad-CAM, and the other way round; T = 3 for T = 4; the random region for the drift region; half of itself where it is a
difference), at least 0.005 and at most a cap for its kind (0.03 for Eq and areas, 0.05 for shares, 0.06 for correlations, 5 points for relative
gains, 0.5 for ratios): `equicam.paper.margins`. A number printed in several tables has one margin. The 95 % interval of our measurement, widened by the
published interval where there is one, then decides: wholly inside the margin it **matches**, wholly outside it **differs**, otherwise it is
**undecided**, and so is every measurement of fewer than 100 images or without an interval. **Artefact**: their number comes out, ours contradicts the conclusion.
**By definition**: constants, identities and quantities compared with themselves, which count as no match. **Measured**: nothing is published. Intervals are
bootstrapped by image.

| option | |
|---|---|
| `--data`, `--split`, `--n` | the images, one split of them, a class-spread sample of this size |
| `--model`, `--weights`, `--classes` | the network, as everywhere ([models.md](models.md)) |
| `--backbone` | the network whose published numbers to compare with, where the model's name does not say: `resnet50`, `vgg16`, `vit_b_16` |
| `--domain` | for the domain tables: `PatchCamelyon` and `RESISC45` are the paper's, any other name stands alone |
| `--extra rotated=FILE` | more weights of the same architecture: `plain`, `rotated`, `seed0` … `seed2` |
| `--costly` | also methods with hundreds of forward passes a map (Score-CAM, RISE) |
| `--dtype`, `--compile`, `--device`, `--out` | precision, compiling, device, the folder that keeps evaluations and is resumed |

With the authors' data and the published weights (`equicam reproduce main --data ILSVRC2012/val --n 10000`, `--model vgg16`,
`--model vit_b_16`, …) the whole paper is regenerated. The rest of this page was run with the weights and data at hand;
`scripts/reproduce_page.py` writes it, plots included, from the rows of those runs.

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
        "ResNet-50 (the original He et al. weights and strides, not torchvision's), 1,000 ImageNet validation images, one a class; one H200, TF32",
        "equicam reproduce NAME --data imagenet-val --model nets.py:original --weights resnet50.safetensors --backbone resnet50 --compile",
    ),
    "mobilenet_v2": (
        "MobileNetV2 (torchvision's V1 weights), the same 1,000 images; one H200, TF32",
        "equicam reproduce NAME --data imagenet-val --model mobilenet_v2 --compile",
    ),
}
DATA = {
    "aerial": "twelve RESISC45 classes, 2,400 training and 600 test tiles",
    "histology": "BreakHis 400×, benign or malignant, 1,113 training and 580 test images, no patient in both",
}
ARCHITECTURES = {"resnet50": "ResNet-50", "vgg16": "VGG-16", "vit_small": "ViT-S/14"}
MODELS = {"resnet50": "nets.py:original", "vgg16": "vgg16", "vit_small": "nets.py:vit_small"}
STARTS = {
    "resnet50": "resnet50.safetensors",
    "vgg16": "vgg16_features.safetensors",
    "vit_small": "vit_small_patch14.safetensors",
}
OTHER_TASK = "The paper's RESISC45 numbers are of all 45 classes and 1,000 tiles, these of twelve classes: the same kind of images, not the same task.\n\n"
ROTATED_SEEDS = "seeds-rotated"
"""The seeds of the networks trained with rotated images: the same experiment on other weights."""


def main() -> None:
    """Findings, then a section a network with a table an experiment, then the claims that were not run."""
    folders = [Path(f) for f in sys.argv[1:]]
    kept = {
        f.name: {
            n: json.loads(_file(f, n).read_text())
            for n in (*EXPERIMENTS, ROTATED_SEEDS)
            if _file(f, n).is_file()
        }
        for f in folders
    }
    PLOTS.mkdir(exist_ok=True)
    page = DOCS / "reproduce.md"
    text = (
        HEAD
        + "## What was found beyond the paper\n\n"
        + "\n".join(
            findings({name: {n: run_rows(found) for n, found in of.items()} for name, of in kept.items()})
        )
        + f"\n\n{signals_section(page.read_text())}\n\n"
    )
    for name, experiments in kept.items():
        title, command = heading(name)
        text += f"## {title}\n\n    {command}\n\n" + (NETS if name == next(iter(kept)) else "")
        text += OTHER_TASK if name == "aerial-resnet50" else ""
        tunes = folders[list(kept).index(name)] / "tunes.json"
        if tunes.is_file():
            text += fine_tunes(json.loads(tunes.read_text()))
        for experiment, found in experiments.items():
            text += section(experiment, found, plot(name, experiment, run_rows(found)))
    page.write_text(text + not_run(kept))


def signals_section(page: str) -> str:
    """What was measured with `benchmarks/signals.py` and `benchmarks/context.py`, which stays."""
    return BEGIN + page.split(BEGIN)[1].split(LAST)[0] + LAST


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
        f"equicam finetune {data} --arch {model} --weights {STARTS[network]} --seed {seed} --out {kind}{seed}{option}"
        for seed in seeds
        for kind, option in (("plain", ""), ("rotated", " --rotation-augment"))
    ]
    extra = "".join(f" --extra {kind}={kind}0/weights.safetensors" for kind in ("plain", "rotated"))
    extra += "".join(
        f" --extra seed{seed}=plain{seed}/weights.safetensors" for seed in seeds if len(seeds) > 1
    )
    run = (
        f"equicam reproduce NAME --data {data} --split test --domain {domain} --model {model} --backbone {network} "
        f"--dtype bfloat16 --weights plain0/weights.safetensors{extra}"
    )
    return title, "\n    ".join([*tunes, run])


def run_rows(found: dict[str, Any]) -> Rows:
    """The rows that were run, by label."""
    return {row["label"]: row for row in found["rows"] if row["verdict"] != "not run"}


def plot(name: str, experiment: str, rows: Rows) -> str:
    """The experiment's plot, if it has one."""
    path = PLOTS / f"{name}-{experiment}.png"
    if not write_plot(experiment, rows, path):
        return ""
    return f"![{load_experiment(experiment).title}](reproduce/{path.name})\n\n"


def fine_tunes(tunes: dict[str, Any]) -> str:
    """The fine-tunes behind a section."""
    rows = "".join(
        f"| {name} | {one['n']} | {one['accuracy']:.3f} | {one['balanced']:.3f} |\n"
        for name, one in tunes.items()
    )
    return f"| training, seed | test images | accuracy | balanced |\n|---|---|---|---|\n{rows}\n"


def section(name: str, kept: dict[str, Any], plot: str) -> str:
    """A table of the rows that were run."""
    table = "| what | published | by their protocol | by ours | verdict |\n|---|---|---|---|---|\n"
    notes = []
    for row in kept["rows"]:
        if row["verdict"] == "not run":
            continue
        verdict = f"**{row['verdict']}**" if row["verdict"] in ("differs", "artefact") else row["verdict"]
        if row["verdict"] == "matches" and row.get("margin"):
            verdict += f" ± {row['margin']:.2g}"
        label, theirs, ours = row["label"].replace("|", "\\|"), row["as_published"], row["clean"]
        table += f"| {label} | {row['published']} | {interval(theirs)} | {interval(ours)} | {verdict} |\n"
        if row["note"]:
            notes.append(f"- {row['label']}: {row['note']}")
    below = "\n".join(dict.fromkeys(notes)) + ("\n\n" if notes else "")
    title = "Three fine-tunes with rotated images" if name == ROTATED_SEEDS else load_experiment(name).title
    legends = {
        "rotation-augmentation": "GC is Grad-CAM, EG EquiGrad-CAM, aug training with rotated images.\n\n",
        "cost": "On two CPU cores, `--device cpu --costly` and not compiled; times on the GPU are in [benchmarks.md](benchmarks.md).\n\n",
        ROTATED_SEEDS: "`equicam reproduce seeds` with `--extra seed0=rotated0/weights.safetensors` and so on.\n\n",
    }
    legend = legends.get(name, "")
    return f"### {title} (`{name}`)\n\n{plot}{legend}{table}\n{below}"


def interval(estimate: dict[str, Any] | None) -> str:
    """A number with its interval."""
    if not estimate or estimate["value"] is None:
        return ""
    if estimate["low"] is None:
        return f"{estimate['value']:.3f}"
    return f"{estimate['value']:.3f} [{estimate['low']:.3f}, {estimate['high']:.3f}]"


def not_run(kept: dict[str, dict[str, Any]]) -> str:
    """Claims that no run here answered, with the command that would."""
    answered = {
        row["claim"]
        for of in kept.values()
        for found in of.values()
        for row in found["rows"]
        if row["verdict"] != "not run"
    }
    counts: dict[tuple[str, str], int] = {}
    for of in kept.values():
        for name, found in of.items():
            for row in found["rows"]:
                if row["claim"] and row["claim"] not in answered:
                    answered.add(row["claim"])
                    key = name, command(name, Remark(**row["reason"]))
                    counts[key] = counts.get(key, 0) + 1
    table = "".join(
        f"| `{name}` | {count} | {text.replace('|', '/')} |\n" for (name, text), count in counts.items()
    )
    for name in EXPERIMENTS:
        if not any(name in of for of in kept.values()):
            needs = load_experiment(name).needs
            table += f"| `{name}` | all | needs {needs}: `equicam reproduce {name} {COMMANDS[name]}` |\n"
    return (
        "## Not run here\n\nWeights of VGG-16 and ViT-B/16 for ImageNet, ViT-L/16 and CLIP, PatchCamelyon, the whole of RESISC45 and CUB-200-2011 were not\n"
        "at hand, and there is one image a class where `matched` needs several. Methods with hundreds of forward passes a map (`--costly`) were\n"
        "left out, except one Score-CAM in `cost`; [explainers.md](explainers.md) has Score-CAM's constant maps on 100 images. Figures show the images,\n"
        "which are not ours to publish. Every experiment is tested on stand-ins of the same layout. These commands run the rest:\n\n"
        f"| experiment | claims | command |\n|---|---|---|\n{table}"
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
    "cub-rotation": "--data CUB_200_2011 --extra plain=models/plain/weights.safetensors --extra rotated=models/rotated/weights.safetensors",
    "figure-pipeline": "--data ILSVRC2012/val --n 4",
    "figure-signal-noise": "--data ILSVRC2012/val --n 4",
    "figure-drift-strip": "--data ILSVRC2012/val --n 4",
}
"""Options of the experiments that no run here has begun."""


def command(name: str, remark: Remark) -> str:
    """The command that runs a claim, as one types it, or the reason why there is none."""
    run, values = f"equicam reproduce {name} --data ILSVRC2012/val", remark.values
    if remark.code == "network":
        return f"of {values['network']}: `{run} --model {values['network']} --n 10000`"
    if remark.code == "costly":
        return f"{values['passes']} forward passes a map: `{run} --costly --n 500`"
    if remark.code == "command":
        return f"of {values['of']}: `{values['command']}`"
    return remark.text


if __name__ == "__main__":
    main()
