"""What the same network with random weights reaches on images of a run: steady maps alone are no evidence."""

from dataclasses import asdict, replace

import torch
from jaxtyping import Float
from torch import Tensor

from equicam.auditing.audit import calibration_subset
from equicam.auditing.log import Log
from equicam.auditing.random_weights import EVENT, RandomWeights
from equicam.auditing.reload import Reloaded, unchanged_inputs
from equicam.auditing.store import RunStore
from equicam.evaluation.controls import randomise_weights, without_float16
from equicam.explain import explain_batch
from equicam.explanation import Explanation
from equicam.models.images import as_batch, stack_images
from equicam.runtime.executor import Executor

IMAGES, SEEDS = 8, 3


def log_sanity(store: RunStore, reloaded: Reloaded) -> None:
    """Log the mean stability of a few maps, and how many are steady, with the run's weights and with random ones; once for each run.

    Views are of the model's input alone: a run with context has other ones.
    """
    log = Log(store.folder)
    model, recipe = reloaded.context.model, replace(reloaded.context.recipe, context="none", compiled=False)
    if log.events(EVENT) or len(recipe.views) < 2:
        return
    chosen = set(calibration_subset(reloaded.items, IMAGES, recipe.seed))
    items = [item for item in reloaded.items if item.id in chosen]
    _, images = unchanged_inputs(model, items, store.rows(chosen))
    if not images:
        return
    with torch.inference_mode(False):
        x = as_batch(model, stack_images(images))
        given = explain_batch(Executor(model, recipe), x)
        networks = (randomise_weights(model, seed=recipe.seed + number) for number in range(SEEDS))
        random = [explain_batch(Executor(one, without_float16(recipe)), x) for one in networks]
    found = RandomWeights(
        images=len(images),
        stability=mean_stability(given.stability),
        steady=_steady(given),
        random_networks=SEEDS,
        random_stability=mean_stability(torch.cat([one.stability for one in random])),
        random_steady=sum(map(_steady, random)),
    )
    log.add(EVENT, asdict(found))


def mean_stability(stability: Float[Tensor, " b"]) -> float:
    """Over all maps; a blank one, which has none, counts 0."""
    return stability.nan_to_num(0.0).mean().item()


def _steady(found: Explanation) -> int:
    return sum(one.word == "steady" for one in found.steadiness)
