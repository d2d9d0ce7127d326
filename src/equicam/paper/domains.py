"""Table application: domains without an upright; PatchCamelyon and RESISC45 are the paper's, others stand alone."""

import math
from collections.abc import Iterator

import pyarrow as pa

from equicam.evaluation import summary
from equicam.paper.context import (
    NAMES,
    Bench,
    Claim,
    Experiment,
    Line,
    beside,
    mean_of,
)
from equicam.paper.measure import (
    NO_LABEL,
    accuracy,
    both,
    constant,
    defined,
    eq_line,
    gain_line,
    p_line,
    region,
    rest,
)

DOMAINS = ("PatchCamelyon", "RESISC45")
METHODS = ("Grad-CAM", "AugCAM unaligned", "EquiGrad-CAM+PCF", "EquiGrad-CAM")
SCORES = {"Eq": "eq", "Ins": "insertion", "Del": "deletion"}
TESTS = {
    "app.p.pcam": ("PatchCamelyon", ["insertion", "deletion"]),
    "app.p.resisc.ins": ("RESISC45", ["insertion"]),
    "app.p.resisc.del": ("RESISC45", ["deletion"]),
}


def run(bench: Bench) -> Iterator[Line]:
    """Eq, insertion and deletion; accuracy; what alignment costs in faithfulness, tested by picture."""
    done = list(_measured(bench)) if bench.domain else []
    yield from done
    yield from rest(EXPERIMENT.answers, done, lambda known: _otherwise(bench, known))


def _measured(bench: Bench) -> Iterator[Line]:
    start = f"app.{bench.claimed_domain}"
    tables = both(bench, [NAMES[words] for words in METHODS], list(SCORES.values()))
    for words in METHODS:
        for short, score in SCORES.items():
            where = {p: region(p) if score == "eq" else None for p in tables}
            ours, theirs = (mean_of(tables[p], score, NAMES[words], where[p]) for p in (False, True))
            what = f"{NAMES[words]}, {score}"
            yield beside(
                f"{start}.{words}.{short}", clean=ours, as_published=theirs, what=what, tolerance=0.05
            )
    right = accuracy(tables[False])
    yield beside(f"{start}.acc", clean=right, what="accuracy", reason="" if right else NO_LABEL)
    yield gain_line(f"app.gain.{bench.claimed_domain}", tables)
    for claim, (domain, scores) in TESTS.items():
        if domain == bench.claimed_domain:
            found = {p: max(_log10_p(rows, score) for score in scores) for p, rows in tables.items()}
            pictures = len(summary.pick(tables[False], "presented-confidence").ids)
            yield p_line(claim, f"log10 p, {' and '.join(scores)}", found, pictures)
    if bench.costly:
        augmented = both(bench, ["aug-score-cam"])
        yield eq_line(f"{start}.Aug. Score-CAM.Eq", augmented, "aug-score-cam")
        for name, share in (("const", constant), ("cond", defined)):
            ours, theirs = (share(augmented[p], "aug-score-cam", region(p)) for p in (False, True))
            yield beside(
                f"{start}.augsc.{name}", clean=ours, as_published=theirs, what=f"aug-score-cam, {name}"
            )


def _log10_p(rows: pa.Table, score: str) -> float:
    """Of a paired test of EquiGrad-CAM against Grad-CAM, two-sided as the authors' is."""
    sides = (("grad-cam", "equigrad-cam"), ("equigrad-cam", "grad-cam"))
    best = min(summary.contrast(rows, a, b, score=score, region=None).log10_p for a, b in sides)
    return min(0.0, best + math.log10(2))


def _otherwise(bench: Bench, known: Claim) -> str:
    domain = known.of.split()[0]
    if known.id.endswith("acc_seed_sd"):
        return f"of {domain}, three fine-tunes: equicam reproduce seeds"
    costly = domain == bench.domain or "Score-CAM" in known.id or ".augsc." in known.id
    return tuned(domain, "domains") + (" --costly --n 500" if costly else "")


def tuned(domain: str, experiment: str) -> str:
    """The commands that fine-tune a network on a domain and run an experiment on it."""
    return (
        f"of {domain}: equicam finetune DATA --arch resnet50 --out models/plain; equicam reproduce {experiment} --data DATA "
        f"--split test --domain {domain} --weights models/plain/weights.safetensors"
    )


EXPERIMENT = Experiment(
    "Table application: two domains without an upright",
    (
        *(f"app.{domain}.{words}" for domain in DOMAINS for words in ("Grad", "Aug", "aug", "Equi", "acc")),
        "app.gain",
        "app.p.",
    ),
    run,
    needs="--domain, its test pictures and fine-tuned --weights",
)
