"""Three fine-tunes: does the gap depend on the seed?"""

from collections.abc import Iterator, Sequence
from statistics import mean, stdev

from equicam_paper.claims import DOMAINS, Claim
from equicam_paper.context import Context, Evaluation
from equicam_paper.experiment import Experiment
from equicam_paper.measure import NO_LABEL, accuracy
from equicam_paper.rows import Both, Remark, Row, compare, number

SEEDS = ("seed0", "seed1", "seed2")
METHODS = {"gc": "grad-cam", "eg": "equigrad-cam"}
SPREAD = "three seeds decide nothing; standard deviation, and the paper does not say what its ± is"


def measure(context: Context) -> Iterator[Row]:
    """Every one of three files of weights, their mean, range and standard deviation."""
    if not context.domain or not all(seed in context.extra for seed in SEEDS):
        return
    start = f"app.{context.claimed_domain}"
    methods = list(METHODS.values())
    runs = [context.with_weights(context.extra[seed]).evaluate_both(methods) for seed in SEEDS]
    for short, method in METHODS.items():
        ours, theirs = (
            [e.eq(method).value for e in found]
            for found in ([r.clean for r in runs], [r.as_published for r in runs])
        )
        eq = Both(ours, theirs)
        for i, run in enumerate(runs):
            yield compare("", run.map(Evaluation.eq, method), label=f"{method}, seed {i}")
        average = eq.map(lambda values: number(mean(values)))
        deviation = eq.map(lambda values: number(stdev(values)))
        yield compare(f"{start}.seeds.{short}", average, label=f"{method}, mean", reason=_range(ours))
        yield compare(f"{start}.seeds.{short}.sd", deviation, label=f"{method}, spread", reason=SPREAD)
    right = [100 * found.value for found in (accuracy(run).clean for run in runs) if found]
    deviation_of_accuracy = number(stdev(right)) if len(right) == len(SEEDS) else None
    yield compare(
        f"{start}.acc_seed_sd", Both(deviation_of_accuracy, None), label="accuracy, spread in points",
        reason=SPREAD if right else NO_LABEL,
    )  # fmt: skip


def _range(values: Sequence[float]) -> str:
    return f"from {min(values):.3f} to {max(values):.3f} by ours; {SPREAD}"


def three_fine_tunes(claim: Claim) -> Remark:
    """The commands that train three files of weights and compare them."""
    tune = "; ".join(
        f"equicam-paper finetune DATA --arch resnet50 --seed {i} --out models/{seed}"
        for i, seed in enumerate(SEEDS)
    )
    extra = " ".join(f"--extra {seed}=models/{seed}/weights.safetensors" for seed in SEEDS)
    run = f"equicam-paper reproduce seeds --data DATA --split test --domain {claim.domain} {extra}"
    return Remark("command", {"of": claim.domain, "command": f"{tune}; {run}"})


EXPERIMENT = Experiment(
    "Three fine-tunes: does the gap depend on the seed?",
    tuple(f"app.{domain}.{kind}" for domain in DOMAINS for kind in ("seeds", "acc_seed")),
    measure,
    needs="a domain's test images and three fine-tuned files of weights",
    missing=lambda _context, claim: three_fine_tunes(claim),
)
