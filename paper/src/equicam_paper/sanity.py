"""Model randomisation (Adebayo et al. 2018): how much of a map, and of its Eq, survives without the trained weights.

A map that stays the same without the weights shows the image and not the network. An Eq that stays high without them is
evidence that views were aligned, and none that the map is right.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from equicam.core.uncertainty import pearson
from equicam.errors import EquicamError
from equicam.evaluate import statistics, summary
from equicam.evaluate.controls import randomise_weights
from equicam.evaluate.similarity import ssim
from equicam.explain import explain
from equicam.images.items import Item, sample_by_class
from equicam.methods import METHODS
from equicam.progress import progress_bar
from equicam_paper.context import Context, Evaluation
from equicam_paper.measure import constant_share, mean_over
from equicam_paper.rows import Both, Remark, Row, compare

ATTENTION = ("rollout", "transformer-attribution")
SEEDS = (0, 1, 2)  # of the networks without a trained weight
CASCADE = {"head random": 0.0, "last quarter random": 0.25, "last half random": 0.5}
"""The share of the layers that is initialised again, from the head down."""
COMPARED_IMAGES = 16  # whose maps with and without trained weights are compared
MEASURES = {"Pearson": pearson, "SSIM": ssim}


def not_in_float16(context: Context) -> Context:
    """The network's own precision instead of float16, in which all maps of a random MobileNetV2 become constant."""
    half = context.options.get("dtype") == torch.float16
    return replace(context, options=context.options | {"dtype": None}) if half else context


def sanity(context: Context) -> Iterator[Row]:
    """Eq with the weights as given, with the last layers and with all of them random; and how alike the maps are."""
    items = sample_by_class(context.sample, min(COMPARED_IMAGES, len(context.sample)))
    x = context.open(items)
    methods = methods_of(context, x[:1])
    networks = {"all random": [randomise_weights(context.model, seed=seed) for seed in SEEDS]}
    networks |= {name: [randomise_weights(context.model, share=share)] for name, share in CASCADE.items()}
    total = 1 + sum(map(len, networks.values()))
    title = "networks with and without trained weights"
    with progress_bar(title, total, unit="networks", shown=context.progress) as bar:
        context = replace(context, progress=False)
        given = context.evaluate(methods)
        bar.advance(1)
        for method in methods:
            yield _eq_row(f"{method}, weights as given", [given], method)
        target = explain(context.model, x, method="grad-cam").target
        before = _maps(context, methods, x, target)
        for name, models in networks.items():
            found, after = [], []
            for one in (replace(context, model=model) for model in models):
                found.append(one.evaluate(methods))
                after.append(_maps(one, methods, x, target))
                bar.advance(1)
            for method in methods:
                yield _eq_row(f"{method}, {name}", found, method)
                alike = [of[method] for of in after]
                yield from _alike_rows(f"{method}, {name}", items, before[method], alike)


def methods_of(context: Context, x: Float[Tensor, "1 c H W"]) -> list[str]:
    """The methods that work on this network: those of one pass per view, and with --costly all others too."""
    wanted = [n for n, of in METHODS.items() if of.reader.one_pass or n in ATTENTION or context.costly]
    found = []
    for name in context.affordable(wanted):
        try:
            explain(context.model, x, method=name)
        except EquicamError:  # attention of a network that has none
            continue
        found.append(name)
    return found


def _maps(
    context: Context, methods: Sequence[str], x: Float[Tensor, "b c H W"], target: Int[Tensor, " b"]
) -> dict[str, Float[Tensor, "b H W"]]:
    """Each method's maps of these classes."""
    how: dict[str, Any] = {"target": target, "dtype": context.options.get("dtype")}
    return {method: explain(context.model, x, method=method, **how).map for method in methods}


def _eq_row(label: str, found: Sequence[Evaluation], method: str) -> Row:
    """Eq in the disc, averaged over networks; the remark has each network's, and what unrelated images reach."""
    columns = [summary.pick(one.table, "eq", method, one.region) for one in found]
    of_networks = {
        "by_seed": [statistics.mean(column.value) for column in columns] if len(columns) > 1 else [],
        "floor": statistics.mean(np.concatenate([column.floor for column in columns])),
        "constant": statistics.mean(np.array([constant_share(one, method).value for one in found])),
    }
    remark = Remark("networks", of_networks)
    return compare("", Both(mean_over(columns), None), label=f"{label}: Eq", reason=remark)


def _alike_rows(
    label: str, items: Sequence[Item], before: Float[Tensor, "b H W"], after: Sequence[Float[Tensor, "b H W"]]
) -> Iterator[Row]:
    """How alike the maps of one class are before and after, inside the disc, averaged over networks."""
    group = [item.group or item.id for item in items] if any(item.group for item in items) else None
    for name, alike in MEASURES.items():
        values = np.array([
            [float(alike(a[None], b[None], "disc", 1.0)) for a, b in zip(before, maps, strict=True)]
            for maps in after
        ])  # fmt: skip
        found = statistics.bootstrap(statistics.mean, values.mean(0), group=group)
        yield compare("", Both(found, None), label=f"{label}: {name} with the map of the weights as given")


MORE = {"sanity": {"prepare": not_in_float16}}
