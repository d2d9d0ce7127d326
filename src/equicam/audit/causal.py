"""Signal or noise, for a model on a set of images: does the network use the pixels whose saliency moves?

The paper's causal test on random images of a run. For each image, and each of seven rotations, the tenth of the disc
where Grad-CAM's map moves is blurred, and so is the same shape rotated about the centre by a random angle; the effect
is the mean difference of the probability lost. The control is the same test on the network with random weights.
"""

import heapq
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from jaxtyping import Float
from torch import Tensor

from equicam.audit.verify import Reloaded, unchanged_inputs
from equicam.errors import EquicamError
from equicam.evaluate import causal, statistics
from equicam.evaluate.controls import item_seed, randomise_weights, without_float16
from equicam.evaluate.equivariance import ANGLES, GROUPS
from equicam.evaluate.faithfulness import blur_out
from equicam.evaluate.maps import MapComputer
from equicam.evaluate.rows import resampled_groups
from equicam.evaluate.spec import EvaluationSpec
from equicam.evaluate.statistics import Floats, Ids
from equicam.images.items import Item
from equicam.models.images import as_batch, stack_images
from equicam.readers.forward import frozen
from equicam.readers.model import Model
from equicam.recipe import Recipe
from equicam.runs import CAUSAL_IMAGES
from equicam.runs.causal_result import CausalTest, Costs, logged_causal, write_causal
from equicam.runs.store import RunStore

IMAGES_PER_BATCH = 8
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
        raise EquicamError(
            "the causal test",
            "a model with class probabilities: it measures their loss",
            "one without",
            "equicam report without it",
        )
    statuses = store.read_items(["id", "status"])
    explained = statuses.filter(pc.equal(statuses["status"], "ok"))["id"].to_pylist()
    before = logged_causal(store)
    if before is not None and before.is_of(len(explained), n, seed):
        return before
    reloaded = reload()
    model = reloaded.context.model
    recipe = Recipe(
        "grad-cam", context="none", dtype=reloaded.context.recipe.dtype, compiled=False, seed=seed
    )
    chosen = heapq.nsmallest(n, explained, key=lambda name: item_seed(seed, name, "causal test"))
    listed = reloaded.items
    items = replace(listed, table=listed.table.filter(pc.is_in(listed.ids, pa.array(chosen, pa.string()))))
    rows = {row["id"]: row for row in store.select(chosen, ["id", "sha256"]).to_pylist()}
    ids, trained, random = _measure_both(model, items, rows, recipe, tick)
    group_of = {item.id: item.group for item in items}
    groups = resampled_groups(ids, [group_of[name] for name in ids])
    found = CausalTest(
        images=ids,
        left_out=len(chosen) - len(ids),
        explained=len(explained),
        requested=n,
        recipe=recipe.to_json(),
        weights=store.manifest.weights,
        trained=summarise_costs(trained, groups),
        random=summarise_costs(random, groups),
    )
    write_causal(store, found)
    return found


def _measure_both(
    model: Model,
    items: Sequence[Item],
    rows: Mapping[str, Mapping[str, Any]],
    recipe: Recipe,
    tick: Callable[[int], None],
) -> tuple[tuple[str, ...], dict[str, Floats], dict[str, Floats]]:
    """The images that could be tested, and their costs with the weights as given and with random ones."""
    computers = [cost_computer(model, recipe)]
    computers.append(cost_computer(randomise_weights(model, seed=recipe.seed), without_float16(recipe)))
    tested: list[str] = []
    costs: list[list[dict[str, Floats]]] = [[], []]
    for start in range(0, len(items), IMAGES_PER_BATCH):
        some = items[start : start + IMAGES_PER_BATCH]
        ids, images = unchanged_inputs(model, some, rows)
        if ids:
            x = as_batch(model, stack_images(images))
            tested += ids
            for computer, found in zip(computers, costs, strict=True):
                found.append(measure_costs(computer, ids, x))
        tick(len(some))
    if not tested:
        raise EquicamError(
            "the causal test",
            "images that are as they were audited",
            "none that can be read",
            "--source with their present place",
        )
    trained, random = (
        {name: np.concatenate([one[name] for one in found]) for name in REGIONS} for found in costs
    )
    return tuple(tested), trained, random


def cost_computer(model: Model, recipe: Recipe) -> MapComputer:
    """Computes the Grad-CAM maps of the images and of their rotations."""
    return MapComputer.of(model, EvaluationSpec(recipe, ["grad-cam"], ("causal",), GROUPS["rotation"]))


def measure_costs(
    computer: MapComputer, ids: Sequence[str], x: Float[Tensor, "b c H W"]
) -> dict[str, Floats]:
    """Probability lost without each region, in the mean over the angles of an image; NaN where its map is constant."""
    # frozen once for all passes of the batch
    with computer.context(), frozen(computer.model.module):
        found = computer.compute(ids, x)
        seeds = [item_seed(found.seed, name, "causal") for name in ids]
        by_angle = list(causal.regions_by_presentation(found.methods["grad-cam"].maps, ANGLES, seeds=seeds))
        constant = torch.stack([flat for _, flat in by_angle])
        blurred, before = blur_out(found.x), found.predictions.of_target[0]
        costs = {}
        for name, region in REGIONS.items():
            masks = torch.stack([regions[region] for regions, _ in by_angle])
            lost = causal.lost_without(
                found.predict, found.x, blurred, masks, found.predictions.target, before
            )
            costs[name] = torch.where(constant, torch.nan, lost).double().nanmean(0).cpu().numpy()
    return costs


def summarise_costs(costs: Mapping[str, Floats], groups: Ids | None = None) -> Costs:
    """Means over the images with their intervals, by group where images have groups."""
    blank = np.isnan(costs["drift"])
    counted = {name: np.where(blank, 0.0, values) for name, values in costs.items()}
    counted["effect"] = counted["drift"] - counted["elsewhere"]
    means = {
        name: statistics.bootstrap(statistics.mean, values, group=groups) for name, values in counted.items()
    }
    return Costs(**means, blank=int(blank.sum()))
