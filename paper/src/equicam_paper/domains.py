"""Table application: domains whose images have no upright; PatchCamelyon and RESISC45 are the paper's."""

import math
from collections.abc import Iterator, Sequence

from equicam.evaluate import summary
from equicam.evaluate.statistics import Estimate
from equicam_paper.claims import DOMAINS, METHODS, METRICS, Claim, claims
from equicam_paper.context import Context, Evaluation
from equicam_paper.experiment import Experiment
from equicam_paper.measure import (
    NO_LABEL,
    accuracy,
    constant_share,
    eq_row,
    eq_where_defined,
    gain_row,
    p_row,
)
from equicam_paper.rows import Both, Remark, Row, compare
from equicam_paper.seeds import three_fine_tunes

PUBLISHED = ("Grad-CAM", "AugCAM unaligned", "EquiGrad-CAM+PCF", "EquiGrad-CAM")
TESTS = {
    "app.p.pcam": ("PatchCamelyon", ["insertion", "deletion"]),
    "app.p.resisc.ins": ("RESISC45", ["insertion"]),
    "app.p.resisc.del": ("RESISC45", ["deletion"]),
}


def measure(context: Context) -> Iterator[Row]:
    """Eq, insertion and deletion; accuracy; the cost of alignment in faithfulness, tested by image."""
    if not context.domain:
        return
    start = f"app.{context.claimed_domain}"
    found = context.evaluate_both([METHODS[name] for name in PUBLISHED], list(METRICS.values()))
    yield from metric_rows(start, found, PUBLISHED)
    right = accuracy(found)
    yield compare(f"{start}.acc", right, label="accuracy", reason="" if right.clean else NO_LABEL)
    yield gain_row(f"app.gain.{context.claimed_domain}", found)
    for claim, (domain, metrics) in TESTS.items():
        if domain == context.claimed_domain:
            log10_p = found.map(lambda e, metrics: max(_log10_p(e, m) for m in metrics), metrics)
            opposite = min(_log10_p(found.as_published, m, worse=False) for m in metrics)
            images = len(summary.pick(found.clean.table, metrics[0], "grad-cam").ids)
            if claims()[claim].values:
                label = f"log10 p that it falls, {' and '.join(metrics)}"
            else:  # published as not significant, in either direction
                log10_p, label = log10_p.map(min, opposite), f"log10 p, {' and '.join(metrics)}"
            yield p_row(claim, label, log10_p, images, opposite=opposite)
    if context.affordable(["aug-score-cam"]):
        augmented = context.evaluate_both(["aug-score-cam"])
        yield eq_row(f"{start}.Aug. Score-CAM.Eq", augmented, "aug-score-cam")
        for name, value in (("const", constant_share), ("cond", eq_where_defined)):
            both = augmented.map(value, "aug-score-cam")
            yield compare(f"{start}.augsc.{name}", both, label=f"aug-score-cam, {name}")


def metric_rows(start: str, found: Both[Evaluation], published: Sequence[str]) -> Iterator[Row]:
    """Eq, insertion and deletion of every method; claims are START.METHOD.METRIC in the paper's names."""
    for name in published:
        for short, metric in METRICS.items():
            mean = found.map(_mean, metric, METHODS[name])
            label = f"{METHODS[name]}, {metric}"
            yield compare(f"{start}.{name}.{short}", mean, label=label)


def _mean(found: Evaluation, metric: str, method: str) -> Estimate:
    return found.mean(metric, method, found.region if metric == "eq" else None)


def _log10_p(found: Evaluation, metric: str, *, worse: bool = True) -> float:
    """Of a paired test that EquiGrad-CAM is less faithful than Grad-CAM, as published, or more; two-sided as the authors' is."""
    pair = ("grad-cam", "equigrad-cam") if worse else ("equigrad-cam", "grad-cam")
    return min(0.0, summary.contrast(found.table, *pair, score=metric, region=None).log10_p + math.log10(2))


def _missing(context: Context, claim: Claim) -> Remark:
    if claim.id.endswith("acc_seed_sd"):
        return three_fine_tunes(claim)
    costly = claim.domain == context.domain or "Score-CAM" in claim.id or ".augsc." in claim.id
    return fine_tuning(claim.domain, "domains", " --costly --n 500" if costly else "")


def fine_tuning(domain: str, experiment: str, options: str = "") -> Remark:
    """The commands that fine-tune a network on a domain and run an experiment with it."""
    command = (
        f"equicam-paper finetune DATA --arch resnet50 --out models/plain; equicam-paper reproduce {experiment} --data DATA "
        f"--split test --domain {domain} --weights models/plain/weights.safetensors{options}"
    )
    return Remark("command", {"of": domain, "command": command})


EXPERIMENT = Experiment(
    "Table application: two domains without an upright",
    (
        *(f"app.{domain}.{name}" for domain in DOMAINS for name in ("Grad", "Aug", "aug", "Equi", "acc")),
        "app.gain",
        "app.p.",
    ),
    measure,
    needs="--domain, its test images and fine-tuned --weights",
    missing=_missing,
)
