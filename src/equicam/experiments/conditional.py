"""The conditional table: does the map drift only where the prediction does?"""

from collections.abc import Iterator

from equicam.experiments.experiment import Bench, Experiment, Line, beside, line, number, others
from equicam.scores import summary

KINDS = {"Eq unconditional": "all", "Eq prediction-stable": "stable", "Eq confidence-weighted": "weighed"}


def run(bench: Bench) -> Iterator[Line]:
    """All pairs, pairs that keep the top-1, pairs weighed by confidence."""
    methods = ["grad-cam", "equigrad-cam"]
    found = {
        published: {m: summary.conditional(rows, m, region="full" if published else "disc") for m in methods}
        for published, rows in ((True, bench.rows(methods, as_published=True)), (False, bench.rows(methods)))
    }
    done = []
    for words, method in (("Grad-CAM", "grad-cam"), ("EquiGrad-CAM", "equigrad-cam")):
        for kind, field in KINDS.items():
            ours, theirs = (getattr(found[p][method], field) for p in (False, True))
            name = f"cond.{bench.backbone}.{words}.{kind}"
            done.append(beside(name, clean=ours, as_published=theirs, what=f"{method}, {field}"))
    rate = found[False]["grad-cam"].stable_rate
    start = f"cond.{bench.backbone}"
    done.append(beside(f"{start}.stable_rate", clean=rate, what="the top-1 survives", tolerance=0.05))
    done.append(
        beside(f"{start}.flip_rate", clean=number(1 - rate.value), what="the top-1 flips", tolerance=0.05)
    )
    yield from done
    gap = found[False]["equigrad-cam"].stable.value - found[False]["grad-cam"].stable.value
    published_gap = found[True]["equigrad-cam"].stable.value - found[True]["grad-cam"].stable.value
    if bench.backbone == "resnet50":
        last = line(
            "cond.gap.resnet50.stable",
            clean=number(gap),
            as_published=number(published_gap),
            what="gap, top-1 kept",
        )
        yield last
        done.append(last)
    yield from others("cond.", done, bench)


EXPERIMENT = Experiment(
    "Conditional table: drift where the prediction holds",
    ("cond.resnet50", "cond.vgg16", "cond.vit_b_16", "cond.intro", "cond.max_move", "cond.gap"),
    run,
)
