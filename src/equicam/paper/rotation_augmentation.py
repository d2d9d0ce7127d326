"""Is training for rotation enough? Plain and rotation-augmented weights on the same images."""

from collections.abc import Iterator

import numpy as np

from equicam.evaluation import statistics, summary
from equicam.evaluation.statistics import Estimate
from equicam.paper.claims import DOMAINS, Claim
from equicam.paper.context import Context, Evaluation
from equicam.paper.experiment import Experiment
from equicam.paper.measure import NO_LABEL, accuracy
from equicam.paper.rows import Both, Remark, Row, compare

WEIGHTS = {"no aug": "plain", "rot aug": "rotated"}
"""The paper's names of the two trainings, and those of --extra."""
METHODS = {"GC": "grad-cam", "EG": "equigrad-cam"}
OfWeights = dict[str, Both[Evaluation]]


def measure(context: Context) -> Iterator[Row]:
    """Eq of Grad-CAM and EquiGrad-CAM, and accuracy, without and with rotated training images."""
    if not context.domain or not has_weights(context):
        return
    tables = evaluate_weights(context)
    for name, found in measure_weights(tables).items():
        reason = "" if found.clean else NO_LABEL
        yield compare(f"rotaug.{context.claimed_domain}.{name}", found, label=name, reason=reason)
    plain, rotated = tables["no aug"], tables["rot aug"]
    ahead = Both(_ahead(plain.clean, rotated.clean), _ahead(plain.as_published, rotated.as_published))
    label, reason = "EG without rotated training − GC with it", "paired by image; above 0: alignment is ahead"
    yield compare("", ahead, label=label, reason=reason)


def has_weights(context: Context) -> bool:
    """Whether both files of weights are given."""
    return all(name in context.extra for name in WEIGHTS.values())


def evaluate_weights(context: Context) -> OfWeights:
    """Evaluations with either file of weights."""
    methods = list(METHODS.values())
    return {
        name: context.with_weights(context.extra[ours]).evaluate_both(methods)
        for name, ours in WEIGHTS.items()
    }


def measure_weights(tables: OfWeights) -> dict[str, Both[Estimate | None]]:
    """Eq and accuracy with either file of weights, by the paper's names."""
    measured: dict[str, Both[Estimate | None]] = {}
    for name, found in tables.items():
        for short, method in METHODS.items():
            measured[f"{short} Eq {name}"] = found.map(Evaluation.eq, method)
        measured[f"acc {name}"] = accuracy(found)
    return measured


def _ahead(plain: Evaluation, rotated: Evaluation) -> Estimate:
    """How far alignment without rotated training is above rotated training without alignment, on the same images."""
    ours, theirs = (
        summary.pick(found.table, "eq", method, found.region)
        for found, method in ((plain, "equigrad-cam"), (rotated, "grad-cam"))
    )
    others = dict(zip(theirs.ids, theirs.value, strict=True))
    pairs = [v - others[i] for i, v in zip(ours.ids, ours.value, strict=True) if i in others]
    return statistics.bootstrap(statistics.mean, np.array(pairs))


def training(claim: Claim, experiment: str) -> Remark:
    """The commands that train both files of weights and compare them."""
    tune = "equicam finetune DATA --arch resnet50 --out models"
    extra = " ".join(f"--extra {name}=models/{name}/weights.safetensors" for name in WEIGHTS.values())
    split = " (DATA with folders train and test)" if claim.domain == "RESISC45" else ""
    domain = f" --domain {claim.domain}" if claim.domain in DOMAINS else ""
    command = (
        f"{tune}/plain; {tune}/rotated --rotation-augment; "
        f"equicam reproduce {experiment} --data DATA --split test{domain} {extra}"
    )
    return Remark("command", {"of": f"{claim.domain}{split}", "command": command})


EXPERIMENT = Experiment(
    "Rotation augmentation against alignment",
    ("rotaug.PatchCamelyon", "rotaug.RESISC45"),
    measure,
    needs="a domain's test images and two fine-tuned files of weights",
    missing=lambda _context, claim: training(claim, "rotation-augmentation"),
)
