"""CUB-200-2011: does the map point at the bird?"""

from collections.abc import Iterator
from dataclasses import replace

from equicam.data.sources import find_items
from equicam.evaluation import statistics, summary
from equicam.paper.context import Bench, Experiment, Line, beside, mean_of, others
from equicam.paper.measure import both, rest

METHODS = {"eg": "equigrad-cam+pcf", "gc": "grad-cam", "gcpp": "grad-cam++"}
TRIVIAL = {"pointing": "the middle pixel", "box-iou": "the whole frame"}


def run(bench: Bench) -> Iterator[Line]:
    """Pointing game and box overlap; the paper's method here is PCF."""
    done = []
    if any(item.boxes for item in find_items(bench.data, split=bench.split)):
        done = list(measured(bench, bench.backbone))
        yield from done
        yield from others("cub.", done, bench)
    else:
        yield from rest(("cub.",), done, lambda _: "pictures with boxes: --data CUB_200_2011")


def measured(bench: Bench, of: str) -> Iterator[Line]:
    """Both scores of every method beside what needs no map; `of` names the network as the claims do."""
    # only the presented maps are scored: one exact turn instead of seven
    once = replace(bench, options=bench.options | {"angles": (180,)})
    tables = both(once, [*METHODS.values(), "equigrad-cam"], list(TRIVIAL))
    for score, trivial in TRIVIAL.items():
        for short, method in (*METHODS.items(), ("", "equigrad-cam")):
            claim = f"cub.iou.{of}.{short}"
            if score == "pointing":
                claim = f"cub.pg.{of}" if short == "eg" else ""
            ours, theirs = (mean_of(tables[p], score, method, "boxes") for p in (False, True))
            floor = statistics.mean(summary.pick(tables[False], score, method, "boxes").floor)
            what, reason = f"{method}, {score}", f"{trivial} gets {floor:.3f}"
            yield beside(claim, clean=ours, as_published=theirs, what=what, reason=reason)


EXPERIMENT = Experiment(
    "CUB-200-2011: does the map point at the bird?",
    ("cub.",),
    run,
    needs="an ImageNet classifier and CUB-200-2011",
)
