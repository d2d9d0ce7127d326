"""Signal or noise, for a model on a set of images: does the network use the pixels whose saliency moves?

The paper's causal test on random images of a run. For each image, and each of seven rotations, the tenth of the disc
where Grad-CAM's map moves is blurred, and so is the same shape rotated about the centre by a random angle; the effect
is the mean difference of the probability lost. The control is the same test on the network with random weights.
"""

import heapq
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from jaxtyping import Float
from torch import Tensor

from equicam.audit.verify import Reloaded
from equicam.core.views import crop_centre
from equicam.errors import EquicamError
from equicam.evaluate import causal, statistics
from equicam.evaluate.controls import item_seed, randomise_weights, without_float16
from equicam.evaluate.equivariance import ANGLES, GROUPS
from equicam.evaluate.faithfulness import blur_out
from equicam.evaluate.maps import MapComputer
from equicam.evaluate.rows import resampled_groups
from equicam.evaluate.spec import EvaluationSpec
from equicam.evaluate.statistics import Floats, Ids
from equicam.images.items import Item, load_item
from equicam.models.images import as_batch, preprocess_image, stack_images
from equicam.models.surround import preprocess_window
from equicam.rasters.windows import WindowPixels
from equicam.readers.forward import frozen
from equicam.readers.model import Model
from equicam.recipe import Recipe
from equicam.runs import CAUSAL_IMAGES
from equicam.runs.causal_result import CausalTest, Costs, read_causal, write_causal
from equicam.runs.store import RunStore

IMAGES_PER_BATCH = 8
Rows = Mapping[str, Mapping[str, Any]]
"""Rows of a run by the id of their image."""
REGIONS = {"drift": "drift", "elsewhere": "drift-elsewhere", "agreement": "agreement"}
"""Our names of the regions that are blurred, and those of `evaluation.causal`."""


def run_causal_test(
    store: RunStore,
    reload: Callable[[], Reloaded],
    *,
    n: int = CAUSAL_IMAGES,
    seed: int = 0,
    tick: Callable[[int], None] = lambda _count: None,
) -> CausalTest:
    """The test on n random images of a run, or on all if it has fewer; one that the run has is not computed again."""
    if n < CAUSAL_IMAGES:
        raise EquicamError("n", f"at least {CAUSAL_IMAGES} images", n, f"n={CAUSAL_IMAGES}")
    if store.manifest.has_values:
        needs = "a model with class probabilities: it measures their loss"
        raise EquicamError("the causal test", needs, "one without", "equicam report without it")
    explained, before = store.explained(), read_causal(store, as_logged=True)
    if before is not None and before.is_of(len(explained), n, seed):
        return before
    context, listed = reload()
    recipe = Recipe("grad-cam", context="none", dtype=context.recipe.dtype, compiled=False, seed=seed)
    chosen = heapq.nsmallest(n, explained, key=lambda name: item_seed(seed, name, "causal test"))
    items = replace(listed, table=listed.table.filter(pc.is_in(listed.ids, pa.array(chosen, pa.string()))))
    rows = {row["id"]: row for row in store.select(chosen, ["id", "sha256"]).to_pylist()}
    ids, trained, random = _measure_both(context.model, items, rows, recipe, tick)
    group_of = {item.id: item.group for item in items}
    groups = resampled_groups(ids, [group_of[name] for name in ids])
    test = CausalTest(
        images=ids,
        left_out=len(chosen) - len(ids),
        explained=len(explained),
        requested=n,
        recipe=recipe.to_json(),
        weights=store.manifest.weights,
        trained=_summarise_costs(trained, groups),
        random=_summarise_costs(random, groups),
    )
    write_causal(store, test)
    return test


def _measure_both(
    model: Model, items: Sequence[Item], rows: Rows, recipe: Recipe, tick: Callable[[int], None]
) -> tuple[tuple[str, ...], dict[str, Floats], dict[str, Floats]]:
    """The images that could be tested, and their costs with the weights as given and with random ones."""
    computers = [_cost_computer(model, recipe)]
    computers.append(_cost_computer(randomise_weights(model, seed=recipe.seed), without_float16(recipe)))
    tested: list[str] = []
    costs: list[list[dict[str, Floats]]] = [[], []]
    for start in range(0, len(items), IMAGES_PER_BATCH):
        some = items[start : start + IMAGES_PER_BATCH]
        ids, images = _unchanged_inputs(model, some, rows)
        if ids:
            x = as_batch(model, stack_images(images))
            tested += ids
            for computer, of_weights in zip(computers, costs, strict=True):
                of_weights.append(_measure_costs(computer, ids, x))
        tick(len(some))
    if not tested:
        raise EquicamError(
            "the causal test", "images that are as they were audited", "none that can be read",
            "--source with their present place",
        )  # fmt: skip
    trained, random = (
        {name: np.concatenate([some[name] for some in batches]) for name in REGIONS} for batches in costs
    )
    return tuple(tested), trained, random


def _unchanged_inputs(model: Model, items: Sequence[Item], rows: Rows) -> tuple[list[str], list[Tensor]]:
    """Ids and model inputs, without their surround, of the images that are as the run's rows have them and can be read."""
    ids, images = [], []
    for item in items:
        with suppress(EquicamError, OSError, ValueError):
            loaded = load_item(item)
            if item.id in rows and loaded.sha256 == rows[item.id].get("sha256"):
                content = loaded.content
                if isinstance(content, WindowPixels):
                    images.append(crop_centre(preprocess_window(model, content), (content.tile,) * 2))
                else:
                    images.append(preprocess_image(model, content.image))
                ids.append(item.id)
    return ids, images


def _cost_computer(model: Model, recipe: Recipe) -> MapComputer:
    """Computes the Grad-CAM maps of the images and of their rotations."""
    return MapComputer.of(model, EvaluationSpec(recipe, ["grad-cam"], ("causal",), GROUPS["rotation"]))


def _measure_costs(
    computer: MapComputer, ids: Sequence[str], x: Float[Tensor, "b c H W"]
) -> dict[str, Floats]:
    """Probability lost without each region, in the mean over the angles of an image; NaN where its map is constant."""
    # frozen once for all passes of the batch
    with computer.context(), frozen(computer.model.module):
        batch = computer.compute(ids, x)
        seeds = [item_seed(batch.seed, name, "causal") for name in ids]
        by_angle = list(causal.regions_by_presentation(batch.methods["grad-cam"].maps, ANGLES, seeds=seeds))
        constant = torch.stack([flat for _, flat in by_angle])
        blurred, predicted = blur_out(batch.x), batch.predictions
        costs = {}
        for name, region in REGIONS.items():
            masks = torch.stack([regions[region] for regions, _ in by_angle])
            before = predicted.of_target[0]
            lost = causal.lost_without(batch.predict, batch.x, blurred, masks, predicted.target, before)
            costs[name] = torch.where(constant, torch.nan, lost).double().nanmean(0).cpu().numpy()
    return costs


def _summarise_costs(costs: Mapping[str, Floats], groups: Ids | None = None) -> Costs:
    """Means over the images with their intervals, by group where images have groups."""
    blank = np.isnan(costs["drift"])
    counted = {name: np.where(blank, 0.0, values) for name, values in costs.items()}
    counted["effect"] = counted["drift"] - counted["elsewhere"]
    mean = partial(statistics.bootstrap, statistics.mean, group=groups)
    return Costs(**{name: mean(values) for name, values in counted.items()}, blank=int(blank.sum()))
