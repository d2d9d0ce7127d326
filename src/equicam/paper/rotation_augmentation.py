"""Would training for rotation have been enough? Plain and rotation-augmented weights on the same pictures."""

from collections.abc import Iterator

import numpy as np

from equicam.evaluation import statistics, summary
from equicam.evaluation.statistics import Estimate
from equicam.paper.context import Bench, Claim, Experiment, Line, beside, eq
from equicam.paper.measure import NO_LABEL, Tables, accuracy, both, region, rest

DOMAINS = ("PatchCamelyon", "RESISC45")
WEIGHTS = {"no aug": "plain", "rot aug": "turned"}
METHODS = {"GC": "grad-cam", "EG": "equigrad-cam"}
Pair = tuple[Estimate | None, Estimate | None]
"""By our protocol, and by the authors'."""


def run(bench: Bench) -> Iterator[Line]:
    """Eq of Grad-CAM and EquiGrad-CAM, and accuracy, without and with turned training pictures."""
    done = []
    if bench.domain and all(name in bench.extra for name in WEIGHTS.values()):
        tables = trained(bench)
        for words, (ours, theirs) in found(tables).items():
            claim, why = f"rotaug.{bench.claimed_domain}.{words}", "" if ours else NO_LABEL
            done.append(beside(claim, clean=ours, as_published=theirs, what=words, reason=why))
        ours, theirs = (_ahead(tables, as_published=p) for p in (False, True))
        what = "EG without turned training − GC with it"
        done.append(
            Line(
                "",
                what,
                "not in the paper",
                ours,
                theirs,
                "measured",
                "paired by picture; above 0: alignment",
            )
        )
    yield from done
    yield from rest(EXPERIMENT.answers, done, lambda known: training(known, "rotation-augmentation"))


def trained(bench: Bench) -> dict[str, Tables]:
    """Rows of either file of weights."""
    return {
        words: both(bench.with_weights(bench.extra[name]), list(METHODS.values()))
        for words, name in WEIGHTS.items()
    }


def found(tables: dict[str, Tables]) -> dict[str, Pair]:
    """What is measured of either file of weights, in the paper's words."""
    said: dict[str, Pair] = {}
    for words, mine in tables.items():
        for short, method in METHODS.items():
            ours, theirs = (eq(mine[p], method, as_published=p) for p in (False, True))
            said[f"{short} Eq {words}"] = ours, theirs
        said[f"acc {words}"] = accuracy(mine[False]), None
    return said


def _ahead(tables: dict[str, Tables], *, as_published: bool) -> Estimate:
    """How far alignment without turned training is above turned training without alignment, on the same pictures."""
    sides = (("no aug", "equigrad-cam"), ("rot aug", "grad-cam"))
    picked = [
        summary.pick(tables[words][as_published], "eq", method, region(as_published))
        for words, method in sides
    ]
    ours, theirs = (dict(zip(p.ids, p.value, strict=True)) for p in picked)
    both_sides = [ours[i] - theirs[i] for i in ours if i in theirs]
    return statistics.bootstrap(statistics.mean, np.array(both_sides))


def training(known: Claim, experiment: str) -> str:
    """The commands that make both files of weights and compare them."""
    domain = known.of.split()[0]
    tune = "equicam finetune DATA --arch resnet50 --out models"
    given = " ".join(f"--extra {name}=models/{name}/weights.safetensors" for name in WEIGHTS.values())
    split = " (DATA with folders train and test)" if domain == "RESISC45" else ""
    named = f" --domain {domain}" if domain in DOMAINS else ""
    return (
        f"of {domain}{split}: {tune}/plain; {tune}/turned --rotation-augment; "
        f"equicam reproduce {experiment} --data DATA --split test{named} {given}"
    )


EXPERIMENT = Experiment(
    "Rotation augmentation against alignment",
    ("rotaug.PatchCamelyon", "rotaug.RESISC45"),
    run,
    needs="a domain's test pictures and two fine-tuned files of weights",
)
