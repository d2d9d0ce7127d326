"""The text of docs/reproduce.md, and of the pages with all rows, that no run changes."""

from equicam_paper.margins import CAPS

AUTHORS_CODE = "https://github.com/Khawaja-Murad/EquiGrad-CAM"
HEAD = f"""# The paper, regenerated

The paper is *Signal or Noise? Auditing Rotation-Induced Saliency Drift in Medical and Aerial Imaging*; its authors publish their
code at [Khawaja-Murad/EquiGrad-CAM]({AUTHORS_CODE}). This page compares each of its quantitative claims with a measurement.

"""
COUNTED = {
    "matches": ("matches", "match"),
    "differs": ("differs", "differ"),
    "artefact": ("is an artefact", "are artefacts"),
    "undecided": ("is undecided", "are undecided"),
    "by definition": ("is a constant or an identity", "are constants or identities"),
    "measured": ("is stated in words", "are stated in words"),
    "not run": ("was not run", "were not run"),
}
"""How one claim of a verdict, and several, are counted."""
UNDECIDED = {
    "few": "too few images",
    "few-groups": "too few groups of images",
    "wide": "the interval reaches across the margin",
    "coarse": "the paper prints too few digits",
    "no-interval": "a number without an interval",
    "one-network": "published for three networks together",
    "other-sample": "published for the first classes alone",
    "one-training": "one fine-tune each, and how far fine-tunes differ is not published",
    "no-n": "published without an interval or a number of images",
    "other-input": "another input than the paper's",
}
"""Why nothing is decided, by the code of the remark."""
_KINDS = {
    "eq": "Eq and areas", "share": "shares", "correlation": "correlations and AUROC", "percent": "relative gains in %",
    "points": "percentage points", "ratio": "ratios", "lift": "the lift of a triage", "mass": "shares of saliency in a region",
}  # fmt: skip
HOW = """`equicam-paper reproduce --list` names every table and figure, `equicam-paper reproduce NAME --list` the claims of one, and
`equicam-paper reproduce NAME --data …` runs one. It prints three numbers side by side: published, by the authors' protocol (full square,
zero filling, their variants), and by ours (inscribed disc, reflection); and writes rows, tables and a plot into `--out`.
`equicam-paper reproduce all` runs every experiment of a network. `--help` has every option.

**How a verdict is found** (`equicam_paper.margins`, `equicam_paper.rows`). It is about the number *by their protocol*, and about that
*by ours* only where there is no other. Each published number has a margin, the smallest of

- half of the published difference to the number it is compared with (Grad-CAM's for EquiGrad-CAM and the other way round, T = 3 for T = 4,
  the random region for the drift region …), or of the range that is called as good as no change (blur, soft gate); half of itself where
  it is a difference;
- half of the way to 1, for Eq and shares;
- a cap for its kind: CAPS.

A range published as hardly different from a number is compared with our change from one to the other, paired by image. A quantity that
several tables print has one margin, the smallest, and is compared with the range of what they print. The 95 % interval of the
measurement is widened by the published one or, where none is printed, by ours scaled to their number of images; for a fine-tuned
network also by the published spread over seeds, once for their fine-tune and once for ours. Then it

- **matches** if it is wholly inside the margin, less half a unit of the last printed digit (a whole unit for a change between two printed numbers);
- **differs** if it is wholly outside the margin and that half unit;
- is **undecided** otherwise, and whenever there are fewer than 100 images or 20 groups of images, there is no interval, or nothing says how
  far the published number may be off: neither an interval nor a number of images, or no spread over seeds.

**Artefact**: their number comes out, but by ours the paired difference that the claim is about has the opposite sign, with its whole
interval. **By definition**: constants, identities and quantities compared with themselves, which test nothing. **Measured**: nothing is
published, or for another network, domain or device.

Numbers published for the first 200 classes are compared with our images of the first fifth of the classes, those of ImageNet's networks
only with ImageNet's images, and those of birds with CUB-200-2011. Intervals are bootstrapped by image, or by group of images
(`--group-by patient`).

**Which images.** The paper's "full validation set" is ten images of each class: its loader keeps the first 15 and draws ten with seed 42, and
`--draw authors` draws the same. Several published numbers are of other samples of these, named after n. Without `--draw`, `--n` takes a
class-spread sample. Neither the domain tables nor CUB-200-2011 have a published list of images.

**Where numbers come from.** `docs/reproduce/rows` has every row with version, commit, SHA-256 of weights and of images, device, precision
and date. They were measured with the weights and data at hand by `scripts/reproduce_all.py`. The site (`make docs`) has a page of all rows
for each network, and the commands for what was not run. `equicam-paper reproduce --page docs/reproduce.md --rows docs/reproduce/rows`
writes this page.

PCF is the paper's Predictive Confidence Filtering: views count if they predict the class with a confidence of at least τ = 0.10, and are
weighted by that confidence.

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
