"""Is training for rotation enough? Plain and rotation-augmented weights on the same images."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from equicam.evaluate import summary
from equicam.evaluate.rows import MetricColumn
from equicam.evaluate.statistics import Estimate
from equicam_paper.claims import DOMAINS, Claim
from equicam_paper.context import Context, Evaluation
from equicam_paper.experiment import Experiment
from equicam_paper.measure import NO_LABEL, describe_seeds, mean_over, paired
from equicam_paper.rows import Both, Remark, Row, compare

WEIGHTS = {"no aug": "plain", "rot aug": "rotated"}
"""The paper's names of the two trainings, and those of --extra."""
TRAININGS = ("", "1", "2")
"""What follows those names in --extra: nothing for the first seed, then the number of each further one."""
METHODS = {"GC": "grad-cam", "EG": "equigrad-cam"}
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


def measure(context: Context) -> Iterator[Row]:
    """Eq of Grad-CAM and EquiGrad-CAM, and accuracy, without and with rotated training images, over all seeds."""
    if not context.domain or not has_weights(context):
        return
    seeds = evaluate_weights(context)
    for name, found in measure_weights(seeds).items():
        yield compare(f"rotaug.{context.claimed_domain}.{name}", found.mean, label=name, reason=found.reason)
        yield from found.seed_rows(name)
    for label, (one, other, above) in DIFFERENCES.items():
        difference = OverSeeds.of([_difference(tables, one, other) for tables in seeds])
        reason = "; ".join(filter(None, (f"paired by image; above 0: {above}", difference.reason)))
        yield compare("", difference.mean, label=label, reason=reason)
        yield from difference.seed_rows(label)


@dataclass(frozen=True)
class OverSeeds:
    """A quantity of every seed by both protocols, and its mean over the seeds with an interval over images or groups of them."""

    mean: Both[Estimate | None]
    seeds: Sequence[Both[Estimate | None]]

    @staticmethod
    def of(columns: Sequence[Both[MetricColumn]]) -> "OverSeeds":
        """Of one column for each seed; None where nothing is defined."""
        both = [[c.clean for c in columns], [c.as_published for c in columns]]
        ours, theirs = (_defined(mean_over(of)) for of in both)
        each = [c.map(summary.mean_of).map(_defined) for c in columns]
        return OverSeeds(Both(ours, theirs), each)

    @property
    def reason(self) -> str:
        """The range over the seeds by our protocol, or why nothing is measured."""
        known = [one.clean for one in self.seeds if one.clean is not None]
        if not known:
            return NO_LABEL
        return describe_seeds(known) if len(known) > 1 else ""

    def seed_rows(self, label: str) -> Iterator[Row]:
        """A row for every seed, where there are several."""
        if len(self.seeds) > 1:
            yield from (compare("", found, label=f"{label}, seed {i}") for i, found in enumerate(self.seeds))


def has_weights(context: Context) -> bool:
    """Whether both files of weights of the first seed are given."""
    return all(name in context.extra for name in WEIGHTS.values())


def evaluate_weights(context: Context) -> list[OfWeights]:
    """Evaluations with either file of weights, for every seed that has both."""
    methods = list(METHODS.values())
    return [
        {
            name: context.with_weights(context.extra[f"{ours}{seed}"]).evaluate_both(methods)
            for name, ours in WEIGHTS.items()
        }
        for seed in TRAININGS
        if all(f"{ours}{seed}" in context.extra for ours in WEIGHTS.values())
    ]


def measure_weights(seeds: Sequence[OfWeights]) -> dict[str, OverSeeds]:
    """Eq and accuracy with either kind of weights, by the paper's names."""
    measured: dict[str, OverSeeds] = {}
    for name in WEIGHTS:
        for short, method in METHODS.items():
            columns = [tables[name].map(_eq, method) for tables in seeds]
            measured[f"{short} Eq {name}"] = OverSeeds.of(columns)
        right = OverSeeds.of([tables[name].map(_right) for tables in seeds])
        measured[f"acc {name}"] = replace(
            right, mean=Both(right.mean.clean, None), seeds=[Both(one.clean, None) for one in right.seeds]
        )
    return measured


def _eq(found: Evaluation, method: str) -> MetricColumn:
    return summary.pick(found.table, "eq", method, found.region)


def _right(found: Evaluation) -> MetricColumn:
    """1 for an image classified as labelled; NaN where its label is none of the model's classes."""
    wrong = summary.pick(found.table, "misclassified")
    return replace(wrong, value=1 - wrong.value)


def _defined(found: Estimate) -> Estimate | None:
    return found if found.n else None


def _difference(tables: OfWeights, one: tuple[str, str], other: tuple[str, str]) -> Both[MetricColumn]:
    """Eq with some weights and method minus that with others, on the same images."""
    a, b = (tables[weights].map(_eq, method) for weights, method in (one, other))
    return Both(paired(a.clean, b.clean), paired(a.as_published, b.as_published))


def training(claim: Claim, experiment: str) -> Remark:
    """The commands that train both files of weights and compare them."""
    tune = "equicam-paper finetune DATA --arch resnet50 --out models"
    extra = " ".join(f"--extra {name}=models/{name}/weights.safetensors" for name in WEIGHTS.values())
    split = " (DATA with folders train and test)" if claim.domain == "RESISC45" else ""
    domain = f" --domain {claim.domain}" if claim.domain in DOMAINS else ""
    command = (
        f"{tune}/plain; {tune}/rotated --rotation-augment; "
        f"equicam-paper reproduce {experiment} --data DATA --split test{domain} {extra}"
    )
    return Remark("command", {"of": f"{claim.domain}{split}", "command": command})


EXPERIMENT = Experiment(
    "Rotation augmentation against alignment",
    ("rotaug.PatchCamelyon", "rotaug.RESISC45"),
    measure,
    needs="a domain's test images and two fine-tuned files of weights",
    missing=lambda _context, claim: training(claim, "rotation-augmentation"),
)
