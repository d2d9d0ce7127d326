"""Three fine-tunes: does the gap depend on the seed?"""

from collections.abc import Iterator
from statistics import mean, stdev

from equicam.paper.context import Bench, Claim, Experiment, Line, beside, eq, number
from equicam.paper.domains import DOMAINS
from equicam.paper.measure import NO_LABEL, accuracy, both, rest

SEEDS = ("seed0", "seed1", "seed2")
METHODS = {"gc": "grad-cam", "eg": "equigrad-cam"}
SPREAD = "standard deviation; the paper does not say what its ± is"


def run(bench: Bench) -> Iterator[Line]:
    """Mean and standard deviation over three files of weights."""
    ready = bench.domain and all(seed in bench.extra for seed in SEEDS)
    done = list(_measured(bench)) if ready else []
    yield from done
    yield from rest(EXPERIMENT.answers, done, _training)


def _measured(bench: Bench) -> Iterator[Line]:
    start = f"app.{bench.claimed_domain}"
    runs = [both(bench.with_weights(bench.extra[seed]), list(METHODS.values())) for seed in SEEDS]
    for short, method in METHODS.items():
        found = {p: [eq(r[p], method, as_published=p).value for r in runs] for p in (False, True)}
        ours, theirs = (number(mean(found[p]), len(SEEDS)) for p in (False, True))
        yield beside(f"{start}.seeds.{short}", clean=ours, as_published=theirs, what=f"{method}, mean")
        ours, theirs = (number(stdev(found[p]), len(SEEDS)) for p in (False, True))
        yield beside(
            f"{start}.seeds.{short}.sd", clean=ours, as_published=theirs, what=f"{method}, spread",
            tolerance=0.01, reason=SPREAD,
        )  # fmt: skip
    right = [100 * found.value for found in (accuracy(r[False]) for r in runs) if found]
    yield beside(
        f"{start}.acc_seed_sd",
        clean=number(stdev(right), len(right)) if len(right) == len(SEEDS) else None,
        what="accuracy, spread in points",
        tolerance=1.0,
        reason=SPREAD if right else NO_LABEL,
    )


def _training(known: Claim) -> str:
    domain = known.of.split()[0]
    tune = "; ".join(
        f"equicam finetune DATA --arch resnet50 --seed {i} --out models/{seed}"
        for i, seed in enumerate(SEEDS)
    )
    given = " ".join(f"--extra {seed}=models/{seed}/weights.safetensors" for seed in SEEDS)
    return f"of {domain}: {tune}; equicam reproduce seeds --data DATA --split test --domain {domain} {given}"


EXPERIMENT = Experiment(
    "Three fine-tunes: does the gap depend on the seed?",
    tuple(f"app.{domain}.{kind}" for domain in DOMAINS for kind in ("seeds", "acc_seed")),
    run,
    needs="a domain's test pictures and three fine-tuned files of weights",
)
