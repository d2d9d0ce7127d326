"""Write docs/reproduce.md from the lines `equicam reproduce` has kept.

python scripts/reproduce_page.py FOLDER…     # each with NAME.json files, one folder a network
"""

import json
import sys
from pathlib import Path

from equicam.experiments import NAMES, named

PAGE = Path(__file__).parents[1] / "docs" / "reproduce.md"
HEAD = """# The paper, regenerated

`equicam reproduce --list` names every table, figure and quantitative claim; `equicam reproduce NAME --data …` runs one and
prints three numbers side by side: published, by the authors' protocol (full square, zero filling, their variants), and by
ours (inscribed disc, reflection). Verdicts: **matches** (within the stated tolerance, or inside the interval of at least 100
pictures), **differs**, **artefact** (their number comes out, ours contradicts what is concluded from it), **undecided**
(too few pictures), **measured** (nothing published), not run. Intervals are 95 %, bootstrapped by picture.

With the authors' data and the published weights (`equicam reproduce main --data ILSVRC2012/val --n 10000`, `--model vgg16`,
`--model vit_b_16`, …) the whole paper is regenerated; claims a run does not answer are in its JSON with the command that
would. The tables below are what was run so far, made by `scripts/reproduce_page.py` from the kept lines.

"""
NETWORKS = {
    "resnet50": "ResNet-50 (the original He et al. weights and strides, not torchvision's), 1,000 ImageNet validation pictures, one a class; one H200, TF32",
    "mobilenet_v2": "MobileNetV2 (torchvision's V1 weights), the same 1,000 pictures; one H200, TF32",
}


def main() -> None:
    """One section a network, one table an experiment."""
    text = HEAD
    for folder in map(Path, sys.argv[1:]):
        text += f"## {NETWORKS.get(folder.name, folder.name)}\n\n"
        for name in NAMES:
            kept = folder / f"{name}.json"
            if kept.is_file():
                text += section(name, json.loads(kept.read_text()))
    PAGE.write_text(text)


def section(name: str, kept: dict) -> str:
    """A table of the lines that were run, and how many were not."""
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
    rest = sum(line["verdict"] == "not run" for line in kept["lines"])
    last = f"\n{rest} claims of other networks or costlier methods were not run.\n" if rest else ""
    return f"### {named(name).title}\n\n{rows}\n" + "\n".join(notes) + ("\n" if notes else "") + last + "\n"


def shown(estimate: dict | None) -> str:
    """A number with its interval."""
    if not estimate or estimate["value"] is None:
        return ""
    if estimate["low"] is None:
        return f"{estimate['value']:.3f}"
    return f"{estimate['value']:.3f} [{estimate['low']:.3f}, {estimate['high']:.3f}]"


if __name__ == "__main__":
    main()
