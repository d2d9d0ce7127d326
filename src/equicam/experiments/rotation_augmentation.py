"""Would training for rotation have been enough? Plain and rotation-augmented weights on the same pictures."""

from collections.abc import Iterator

from equicam.experiments.experiment import Bench, Claim, Experiment, Line, eq, line
from equicam.experiments.measure import NO_LABEL, accuracy, both, rest
from equicam.scores.stats import Estimate

DOMAINS = ("PatchCamelyon", "RESISC45")
WEIGHTS = {"no aug": "plain", "rot aug": "turned"}
METHODS = {"GC": "grad-cam", "EG": "equigrad-cam"}
Pair = tuple[Estimate | None, Estimate | None]
"""By our protocol, and by the authors'."""


def run(bench: Bench) -> Iterator[Line]:
    """Eq of Grad-CAM and EquiGrad-CAM, and accuracy, without and with turned training pictures."""
    done = []
    if bench.domain in DOMAINS and all(name in bench.extra for name in WEIGHTS.values()):
        for words, (ours, theirs) in trained(bench).items():
            claim = f"rotaug.{bench.domain}.{words}"
            done.append(
                line(claim, clean=ours, as_published=theirs, what=words, reason="" if ours else NO_LABEL)
            )
    yield from done
    yield from rest(EXPERIMENT.answers, done, lambda known: training(known, "rotation-augmentation"))


def trained(bench: Bench) -> dict[str, Pair]:
    """What is measured of either file of weights, in the paper's words."""
    found: dict[str, Pair] = {}
    for words, name in WEIGHTS.items():
        tables = both(bench.with_weights(bench.extra[name]), list(METHODS.values()))
        for short, method in METHODS.items():
            ours, theirs = (eq(tables[p], method, as_published=p) for p in (False, True))
            found[f"{short} Eq {words}"] = ours, theirs
        found[f"acc {words}"] = accuracy(tables[False]), None
    return found


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
