"""The text of docs/reproduce.md that no run changes."""

from equicam_paper.margins import CAPS

AUTHORS_CODE = "https://github.com/Khawaja-Murad/EquiGrad-CAM"
HEAD = f"""# The paper, regenerated

The paper is *Signal or Noise? Auditing Rotation-Induced Saliency Drift in Medical and Aerial Imaging*; its authors publish their
code at [Khawaja-Murad/EquiGrad-CAM]({AUTHORS_CODE}). This page compares each of its quantitative claims with a measurement.

"""
_KINDS = {
    "eq": "Eq and areas", "share": "shares", "correlation": "correlations and AUROC", "percent": "relative gains in %",
    "points": "percentage points", "ratio": "ratios", "lift": "the lift of a triage", "mass": "shares of saliency in a region",
}  # fmt: skip
OPTIONS = """`equicam-paper reproduce --list` names every table and figure, `equicam-paper reproduce NAME --list` the claims of one; `equicam-paper reproduce NAME --data …` runs one and
prints three numbers side by side: published, by the authors' protocol (full square, zero filling, their variants), and by
ours (inscribed disc, reflection). It writes the rows (`NAME.json`, `NAME.csv`, `NAME.tex`) and the plot (`NAME.pdf`, `NAME.svg`, `NAME.png`)
into `--out`. `equicam-paper reproduce all` runs every experiment of a network in one process.

**How a verdict is found** (`equicam_paper.margins`, `equicam_paper.rows`). It is about the number *by their protocol*, and about that *by ours* only where there is no other. Each published number has a margin, the smallest of

- half of the published difference to what it is compared with, or of the range that is called as good as no change (blur, soft gate): Grad-CAM's number for EquiGrad-CAM and the other way round, T = 3 for T = 4, the random
  region for the drift region, EquiGrad-CAM for its filtered variant, Grad-CAM for the unaligned average; half of itself where it is a difference. Only numbers that the paper compares in this way have such a margin;
  two others may be so close that one measurement matches both;
- half of the way to 1, for Eq and shares;
- a cap for its kind: CAPS.

Where a range is published as hardly different from a number, as blurred maps from maps that are not, our change from one to the other is compared with theirs, paired by image: a level that differs says nothing about it.
A quantity that several tables print has one margin, the smallest, and is compared with the range of what they print, so that one measurement has one verdict.
The 95 % interval of the measurement is widened by the published one or, where none is printed, by ours scaled to their number of images (the smallest of
the tables'). For a fine-tuned network it is also widened by the published spread over seeds, once for their fine-tune and once for ours. Then it

- **matches** if it is wholly inside the margin, less half a unit of the last printed digit (a whole unit for a change between two printed numbers, which leaves nothing that could match the paper's changes by blur);
- **differs** if it is wholly outside the margin and that half unit;
- is **undecided** otherwise, so a number whose margin is no larger than the rounding of its print never matches, and whenever there are fewer than 100 images or 20 groups of images, there is no interval,
  or nothing says how far the published number may be off: neither an interval nor a number of images, or no spread over seeds.

Other words: **artefact**: their number comes out, but by ours the paired difference that the claim is about has the opposite sign, with its whole interval.
**By definition**: constants, identities and quantities compared with themselves, which test nothing and count as no match. **Measured**: nothing is published, or for another network, domain or device.

Numbers that are published for the first 200 classes are compared with our images of the first fifth of the classes, numbers of ImageNet's networks only
with ImageNet's images, and those of birds with CUB-200-2011. Intervals are bootstrapped by image, or by group of images (`--group-by patient`).

**Which images.** The paper's "full validation set" is ten images of each class: its loader keeps the first 15 of every class and draws ten with
seed 42. `--draw authors` draws the same ones from a folder with 15 images per class. Several published numbers are of other samples of
these, named after n: *two per class*, *first 200 classes*, *20 classes in a row, ten times*. Without `--draw`, `--n` takes a class-spread sample. Neither the domain
tables nor CUB-200-2011 have a published list of images.

**Where numbers come from.** Every file of rows carries version, commit, torch, SHA-256 of weights and of images, how the images were drawn, device, precision and
date; the kept ones are in `docs/reproduce/rows`, and each section below shows them. A table measured under other conditions than the rest of its section says so above it.

| option | |
|---|---|
| `--data`, `--split`, `--n`, `--draw` | the images, one split of them, a class-spread sample of this size, the authors' draw |
| `--group-by` | the column of an image list that says which images belong together, as those of a patient do |
| `--model`, `--weights`, `--classes` | the network, as everywhere ([models.md](models.md)) |
| `--backbone` | the network whose published numbers to compare with, where the model's name does not say: `resnet50`, `vgg16`, `vit_b_16` |
| `--domain` | for the domain tables: `PatchCamelyon` and `RESISC45` are the paper's, any other name stands alone |
| `--extra rotated=FILE` | more weights of the same architecture: `plain`, `rotated` (of further seeds `plain1`, `rotated1`, …), `seed0` … `seed2` |
| `--costly`, `--max-passes` | also methods with hundreds of forward passes per map (Score-CAM, RISE), up to this many |
| `--only`, `--minutes` | of `all`: some experiments, and a bound on the time; the same command resumes |
| `--rows`, `--page` | a second folder for the files of rows (of `all`); this page, written from such a folder |
| `--dtype`, `--compile`, `--device`, `--out` | precision, compiling, device, the folder that keeps evaluations and is resumed |

With the authors' data and the published weights (`equicam-paper reproduce main --data ILSVRC2012/val --n 10000`, `--model vgg16`,
`--model vit_b_16`, …) the ImageNet tables are regenerated; the others need the data named under *Not run here*. The rest of this page was run with the weights and data at hand, by
`scripts/reproduce_all.py` (networks that no library has by name are in `scripts/nets.py`), and written by
`equicam-paper reproduce --page docs/reproduce.md --rows docs/reproduce/rows`.

PCF is the paper's Predictive Confidence Filtering: views count if they predict the class with a confidence of at least τ = 0.10, and are weighted by that confidence.

""".replace("CAPS", ", ".join(f"{CAPS[kind]:g} for {words}" for kind, words in _KINDS.items()))
LEGENDS = {
    "main": "A constant map counts 0; `constant-maps` has the share of them.\n\n",
    "cost": "n counts rounds, each with one map of every kind, of one of at most eight images.\n\n",
    "sanity": "Of fewer images than the other tables, because seven networks are evaluated. With all weights random, numbers are means over three networks; with only some layers random, they are of one network.\n\n",
    "rotation-augmentation": "GC is Grad-CAM, EG EquiGrad-CAM, aug training with rotated images.\n\n",
    "seeds-rotated": "`equicam-paper reproduce seeds` with `--extra seed0=rotated0/weights.safetensors` and so on.\n\n",
}
COMMANDS = {
    "main": "--data ILSVRC2012/val --n 10000",
    "cost": "--data ILSVRC2012/val --device cuda",
    "equal-compute": "--data ILSVRC2012/val --costly --n 500",
    "matched": "--data ILSVRC2012/val --draw authors",
    "constants": "--data ILSVRC2012/val --n 200",
    "constant-maps": "--data ILSVRC2012/val --costly --n 500",
    "hooks": "--data ILSVRC2012/val --model vit_b_16 --n 100",
    "vit-attribution": "--data ILSVRC2012/val --model vit_b_16 --n 1000",
    "vit-l": "--data ILSVRC2012/val --model vit_l_16 --n 1000",
    "clip": "--data FOLDER --domain RESISC45 --model open_clip:ViT-B-16/openai --n 1000",
    "domains": "--data DATA --split test --domain RESISC45 --weights models/plain/weights.safetensors",
    "seeds": "--data DATA --split test --domain RESISC45 --extra seed0=… --extra seed1=… --extra seed2=…",
    "rotation-augmentation": "--data DATA --split test --domain RESISC45 --extra plain=… --extra rotated=…",
    "triage": "--data DATA --split test --domain RESISC45 --weights models/plain/weights.safetensors",
    "label-region": "--data pcam --split test --domain PatchCamelyon --weights models/plain/weights.safetensors",
    "sanity": "--data ILSVRC2012/val --n 200",
    "localisation": "--data imagenet-val.csv",
    "cub": "--data CUB_200_2011",
    "cub-rotation": "--data CUB_200_2011 --extra plain=models/plain/weights.safetensors --extra rotated=models/rotated/weights.safetensors",
    "figure-pipeline": "--data ILSVRC2012/val --n 4",
    "figure-signal-noise": "--data ILSVRC2012/val --n 1000",
    "figure-drift-strip": "--data DATA --split test --weights models/plain/weights.safetensors",
}
"""Options of experiments that no run has begun."""
