"""Networks fine-tuned on domains without an upright, with and without rotated images; PatchCamelyon and RESISC45 are the paper's."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from statistics import mean, stdev

from equicam.evaluate import summary
from equicam.evaluate.rows import MetricColumn
from equicam.evaluate.statistics import Estimate
from equicam.models.libraries import ZeroShot
from equicam_paper.claims import DOMAINS, METHODS, METRICS, Claim, claims
from equicam_paper.context import Context, Evaluation
from equicam_paper.measure import (
    NO_LABEL,
    accuracy,
    constant_share,
    eq_row,
    eq_where_defined,
    gain_row,
    mean_over,
    p_row,
    paired,
    seed_rows,
)
from equicam_paper.rows import Both, Remark, Row, compare, note, number

PUBLISHED = ("Grad-CAM", "AugCAM unaligned", "EquiGrad-CAM+PCF", "EquiGrad-CAM")
TESTS = {
    "app.p.pcam": ("PatchCamelyon", ["insertion", "deletion"]),
    "app.p.resisc.ins": ("RESISC45", ["insertion"]),
    "app.p.resisc.del": ("RESISC45", ["deletion"]),
}


def domains(context: Context) -> Iterator[Row]:
    """Table application: Eq, insertion and deletion; accuracy; the cost of alignment in faithfulness, tested by image."""
    if not context.domain:
        return
    start = f"app.{context.claimed_domain}"
    found = context.evaluate_both([METHODS[name] for name in PUBLISHED], list(METRICS.values()))
    yield from _metric_rows(start, found, PUBLISHED)
    right = accuracy(found)
    yield compare(f"{start}.acc", right, label="accuracy", reason="" if right.clean else NO_LABEL)
    yield gain_row(f"app.gain.{context.claimed_domain}", found)
    for claim, (domain, metrics) in TESTS.items():
        if domain == context.claimed_domain:
            log10_p = found.map(lambda e, metrics: max(_log10_p(e, m) for m in metrics), metrics)
            opposite = min(_log10_p(found.as_published, m, worse=False) for m in metrics)
            images = len(summary.pick(found.clean.table, metrics[0], "grad-cam").ids)
            label = "log10 p that it falls"
            if not claims()[claim].values:  # published as not significant, in either direction
                log10_p, label = log10_p.map(min, opposite), "log10 p"
            yield p_row(claim, f"{label}, {' and '.join(metrics)}", log10_p, images, opposite=opposite)
    if context.affordable(["aug-score-cam"]):
        augmented = context.evaluate_both(["aug-score-cam"])
        yield eq_row(f"{start}.Aug. Score-CAM.Eq", augmented, "aug-score-cam")
        for name, value in (("const", constant_share), ("cond", eq_where_defined)):
            both = augmented.map(value, "aug-score-cam")
            yield compare(f"{start}.augsc.{name}", both, label=f"aug-score-cam, {name}")


def _metric_rows(start: str, found: Both[Evaluation], published: Sequence[str]) -> Iterator[Row]:
    """Eq, insertion and deletion of every method; claims are START.METHOD.METRIC in the paper's names."""
    for name in published:
        for short, metric in METRICS.items():
            measured = found.map(_mean, metric, METHODS[name])
            yield compare(f"{start}.{name}.{short}", measured, label=f"{METHODS[name]}, {metric}")


def _mean(found: Evaluation, metric: str, method: str) -> Estimate:
    return found.mean(metric, method, found.region if metric == "eq" else None)


def _log10_p(found: Evaluation, metric: str, *, worse: bool = True) -> float:
    """Of a test, two-sided as theirs is, that EquiGrad-CAM is less faithful than Grad-CAM, as published, or more."""
    pair = ("grad-cam", "equigrad-cam") if worse else ("equigrad-cam", "grad-cam")
    return min(0.0, summary.contrast(found.table, *pair, score=metric, region=None).log10_p + math.log10(2))


def missing_domain(context: Context, claim: Claim) -> Remark:
    """Why a claim about a domain is not answered: the commands that would."""
    if claim.id.endswith("acc_seed_sd"):
        return _three_fine_tunes(claim)
    costly = claim.domain == context.domain or "Score-CAM" in claim.id or ".augsc." in claim.id
    return fine_tuning(claim.domain, "domains", " --costly --n 500" if costly else "")


def fine_tuning(domain: str, experiment: str, options: str = "") -> Remark:
    """The commands that fine-tune a network on a domain and run an experiment with it."""
    run = f" --domain {domain} --weights models/plain/weights.safetensors{options}"
    return _commands(domain, ["--out models/plain"], experiment, run)


def _commands(of: str, trainings: Sequence[str], experiment: str, options: str) -> Remark:
    """The commands that fine-tune networks, each with its options, and run an experiment with them."""
    tune = [f"equicam-paper finetune DATA --arch resnet50 {how}" for how in trainings]
    run = f"equicam-paper reproduce {experiment} --data DATA --split test{options}"
    return Remark("command", {"of": of, "command": "; ".join([*tune, run])})


ZERO_SHOT = ("Grad-CAM", "Grad-CAM++", "LayerCAM", "AugCAM unaligned", "EquiGrad-CAM+PCF", "EquiGrad-CAM")
ZERO_SHOT_COMMAND = (
    "a zero-shot CLIP: equicam-paper reproduce clip --data FOLDER (with NWPU-RESISC45, as unpacked) --domain RESISC45 --n 1000 "
    "--model open_clip:ViT-B-16/openai, or offline --model open_clip:ViT-B-16 --weights FILE of the same weights"
)
PROMPTS = "the prompts are not published: ours are `a photo of a CLASS.`, with the folders' names as classes"


def clip(context: Context) -> Iterator[Row]:
    """Table clip: Eq, insertion and deletion; accuracy; the share of EquiGrad-CAM's constant maps, and Eq without."""
    if context.domain != "RESISC45" or not isinstance(context.model.module, ZeroShot):
        return
    found = context.evaluate_both([METHODS[name] for name in ZERO_SHOT], list(METRICS.values()))
    yield from _metric_rows("clip", found, ZERO_SHOT)
    right = accuracy(found)
    yield compare("clip.acc", right, label="accuracy", reason=PROMPTS if right.clean else NO_LABEL)
    yield gain_row("clip.gain", found)
    constant, defined = (found.map(of, "equigrad-cam") for of in (constant_share, eq_where_defined))
    yield compare("const.clip.eg", constant, label="equigrad-cam: constant maps")
    yield compare("clip.eg.cond", defined, label="equigrad-cam where its map is not constant")


SHORT = {"gc": "grad-cam", "eg": "equigrad-cam"}
SEEDS = ("seed0", "seed1", "seed2")
SPREAD = "three seeds decide nothing; standard deviation, and the paper does not say what its ± is"


def seeds(context: Context) -> Iterator[Row]:
    """Every one of three files of weights, their mean, range and standard deviation."""
    if not context.domain or not all(seed in context.extra for seed in SEEDS):
        return
    start = f"app.{context.claimed_domain}"
    runs = [context.with_weights(context.extra[seed]).evaluate_both(list(SHORT.values())) for seed in SEEDS]
    for short, method in SHORT.items():
        each = [run.map(Evaluation.eq, method) for run in runs]
        yield from (compare("", found, label=f"{method}, seed {i}") for i, found in enumerate(each))
        eq = Both.together(each).map(lambda of: [one.value for one in of])
        reason = f"from {min(eq.clean):.3f} to {max(eq.clean):.3f} by ours; {SPREAD}"
        average, deviation = (eq.map(of).map(number) for of in (mean, stdev))
        yield compare(f"{start}.seeds.{short}", average, label=f"{method}, mean", reason=reason)
        yield compare(f"{start}.seeds.{short}.sd", deviation, label=f"{method}, spread", reason=SPREAD)
    right = [100 * found.value for found in (accuracy(run).clean for run in runs) if found]
    spread = Both(number(stdev(right)) if len(right) == len(SEEDS) else None, None)
    reason = SPREAD if right else NO_LABEL
    yield compare(f"{start}.acc_seed_sd", spread, label="accuracy, spread in points", reason=reason)


def _three_fine_tunes(claim: Claim) -> Remark:
    extra = " ".join(f"--extra {seed}=models/{seed}/weights.safetensors" for seed in SEEDS)
    tune = [f"--seed {i} --out models/{seed}" for i, seed in enumerate(SEEDS)]
    return _commands(claim.domain, tune, "seeds", f" --domain {claim.domain} {extra}")


WEIGHTS = {"no aug": "plain", "rot aug": "rotated"}
"""The paper's names of the two trainings, and those of --extra."""
TRAININGS = ("", "1", "2")
"""What follows those names in --extra: nothing for the first seed, then the number of each further one."""
ALIGNED_ABOVE_TRAINED, ALIGNED_AND_TRAINED, TRAINED_ABOVE_PLAIN = (
    "EG without rotated training − GC with it",
    "EG with rotated training − GC with it",
    "GC with rotated training − GC without",
)
DIFFERENCES = {
    ALIGNED_ABOVE_TRAINED: (("no aug", "equigrad-cam"), ("rot aug", "grad-cam"), "alignment is ahead"),
    ALIGNED_AND_TRAINED: (("rot aug", "equigrad-cam"), ("rot aug", "grad-cam"), "alignment adds to rotated training"),
    TRAINED_ABOVE_PLAIN: (("rot aug", "grad-cam"), ("no aug", "grad-cam"), "rotated training raises Eq"),
}  # fmt: skip
"""Differences paired by image: what is compared with what, and what a number above 0 means."""
OfWeights = dict[str, Both[Evaluation]]


def rotation_augmentation(context: Context) -> Iterator[Row]:
    """Eq of Grad-CAM and EquiGrad-CAM, and accuracy, without and with rotated training images, over all seeds."""
    if not context.domain or not _has_weights(context):
        return
    seeds = _evaluate_weights(context)
    for name, columns in _measure_weights(seeds).items():
        yield from _rows(f"rotaug.{context.claimed_domain}.{name}", name, columns)
    for label, (one, other, above) in DIFFERENCES.items():
        columns = [_difference(of, one, other) for of in seeds]
        yield from _rows("", label, columns, f"paired by image; above 0: {above}")


def cub_rotation(context: Context) -> Iterator[Row]:
    """The same on birds; the paper gives one number for EquiGrad-CAM on either model."""
    if not _has_weights(context):
        return
    measured = _measure_weights(_evaluate_weights(context))
    for name, columns in measured.items():
        if not name.startswith("EG"):
            yield from _rows(f"rotaug.CUB.{name}", name, columns)
    either = Both.together([_mean_of_seeds(measured[f"EG Eq {name}"]) for name in WEIGHTS])
    plain, rotated = (one.value for one in either.clean if one)
    lower = either.map(lambda of: min((e for e in of if e), key=lambda e: e.value))
    reason = f"by our protocol {plain:.3f} plain, {rotated:.3f} rotated"
    label = "EG Eq, the lower of both models"
    yield compare("rotaug.CUB.EG Eq either model", lower, label=label, reason=reason)


Column = Both[MetricColumn | None]
"""A value for every image, by both protocols; None where a quantity has no other one."""


def _rows(claim: str, label: str, seeds: Sequence[Column], reason: str = "") -> Iterator[Row]:
    """The mean over the seeds and every one of them, of one column for each."""
    each = [column.map(lambda one: _defined([one])) for column in seeds]
    yield from seed_rows(claim, label, _mean_of_seeds(seeds), each, reason)


def _mean_of_seeds(seeds: Sequence[Column]) -> Both[Estimate | None]:
    return Both.together(seeds).map(_defined)


def _defined(columns: Sequence[MetricColumn | None]) -> Estimate | None:
    """The mean over columns; None where nothing is defined."""
    found = mean_over([one for one in columns if one is not None]) if None not in columns else None
    return found if found and found.n else None


def _has_weights(context: Context) -> bool:
    """Whether both files of weights of the first seed are given."""
    return all(name in context.extra for name in WEIGHTS.values())


def _evaluate_weights(context: Context) -> list[OfWeights]:
    """Evaluations with either file of weights, for every seed that has both."""
    return [
        {
            name: context.with_weights(context.extra[f"{ours}{seed}"]).evaluate_both(list(SHORT.values()))
            for name, ours in WEIGHTS.items()
        }
        for seed in TRAININGS
        if all(f"{ours}{seed}" in context.extra for ours in WEIGHTS.values())
    ]


def _measure_weights(seeds: Sequence[OfWeights]) -> dict[str, list[Column]]:
    """Eq and accuracy with either kind of weights, a column for each seed, by the paper's names."""
    measured: dict[str, list[Column]] = {}
    for name in WEIGHTS:
        for short, method in SHORT.items():
            columns = [tables[name].map(Evaluation.column, "eq", method) for tables in seeds]
            measured[f"{short.upper()} Eq {name}"] = [*columns]
        measured[f"acc {name}"] = [Both(_right(tables[name].clean), None) for tables in seeds]
    return measured


def _right(found: Evaluation) -> MetricColumn:
    """1 for an image classified as labelled; NaN where its label is none of the model's classes."""
    wrong = summary.pick(found.table, "misclassified")
    return replace(wrong, value=1 - wrong.value)


def _difference(tables: OfWeights, one: tuple[str, str], other: tuple[str, str]) -> Column:
    """Eq with some weights and method minus that with others, on the same images."""
    a, b = (tables[weights].map(Evaluation.column, "eq", method) for weights, method in (one, other))
    return Both(paired(a.clean, b.clean), paired(a.as_published, b.as_published))


def _two_trainings(claim: Claim, experiment: str) -> Remark:
    extra = " ".join(f"--extra {name}=models/{name}/weights.safetensors" for name in WEIGHTS.values())
    split = " (DATA with folders train and test)" if claim.domain == "RESISC45" else ""
    domain = f" --domain {claim.domain}" if claim.domain in DOMAINS else ""
    tune = ["--out models/plain", "--out models/rotated --rotation-augment"]
    return _commands(f"{claim.domain}{split}", tune, experiment, f"{domain} {extra}")


MORE = {
    "clip": {"missing": lambda *_: note(ZERO_SHOT_COMMAND)},
    "domains": {"missing": missing_domain},
    "seeds": {"missing": lambda _, claim: _three_fine_tunes(claim)},
    "rotation-augmentation": {"missing": lambda _, claim: _two_trainings(claim, "rotation-augmentation")},
    "cub-rotation": {"missing": lambda _, claim: _two_trainings(claim, "cub-rotation")},
}
