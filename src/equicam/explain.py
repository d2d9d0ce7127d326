"""Explain images: read rotated views, align what was read, average, and measure how far the views disagree."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from equicam.core.agreement import measure_agreement, repeatability
from equicam.core.chain import scale_to_unit, value_range
from equicam.core.fusion import FusedMap, Fusion, flag_names, fuse, health
from equicam.core.transforms import margin_needed
from equicam.core.uncertainty import correlate_views, peum
from equicam.core.views import Fill, Views, Window, crop_centre, select
from equicam.core.weights import uniform
from equicam.errors import EquicamError
from equicam.explanation import Explanation as Explanation
from equicam.methods import Method, resolve, resolve_fill
from equicam.models.images import Images, as_batch, read_arrays
from equicam.models.layers import wrap
from equicam.models.surround import Surround, crop_to_window, open_with_surround
from equicam.readers.model import Model
from equicam.readers.reading import external
from equicam.recipe import Recipe
from equicam.runtime.executor import Executor
from equicam.runtime.pending import Pending, join_side_stream, side_stream
from equicam.runtime.view_reader import Target, ViewReader, as_targets


def explain(
    model: Model | nn.Module,
    images: Images | Sequence[Surround],
    *,
    recipe: Recipe | None = None,
    method: str | Fusion | Method | None = None,
    views: int | Views | None = None,
    target: Target = None,
    context: str | None = None,
    window: int | tuple[int, int] | None = None,
    dtype: torch.dtype | None = None,
    compiled: bool | None = None,
    max_views_per_forward: int | None = None,
) -> Explanation:
    """Explain the model's top-1 class (or `target`) on preprocessed tensors, 8-bit pixels, PIL images or paths.

    `target` is a class by number or name, one for all images or a list with one for each; or a function of the model's
    output that returns one value per image. Arrays and tensors of 8-bit pixels are preprocessed like image files.
    `recipe` holds every option that decides a map (fill, protocol, tau, gamma … too); the keywords `method`, `views`,
    `context`, `dtype` and `compiled` win. `context="auto"` cuts views from what the model's preprocessing crops away; `window` is
    the height and width in the middle of a larger tensor that the model sees, the rest being its context. `dtype` runs the
    network under autocast. `compiled` compiles the network for each new batch size, and on CUDA captures calls as graphs.
    """
    images = read_arrays(images)
    recipe = Recipe.of(recipe, method=method, views=views, context=context, dtype=dtype, compiled=compiled)
    if not isinstance(model, Model):
        given = (
            images if window is None or not isinstance(images, Tensor) else crop_to_window(images, window)[0]
        )
        model = wrap(model, example=as_batch(None, given) if isinstance(given, Tensor) else None)
    if callable(target):
        if recipe.compiled:
            raise EquicamError(
                "compiled", "a class as the target: a function may not be captured", "a function", "compiled=False",
            )  # fmt: skip
        model, target = model.explaining(target), None
    with torch.inference_mode(False):
        x, size, margins = open_with_surround(model, images, recipe.context == "auto", window)
    recipe = _under_autocast(replace(recipe, context="none" if size is None else "auto"), x.device)
    shown = None if size is None else Window(size)
    executor = Executor(model, recipe, max_views_per_forward, refuse_unscaled=isinstance(images, Tensor))
    return explain_batch(executor, x, target, shown, margins)


def explain_batch(
    executor: Executor,
    x: Float[Tensor, "b c H W"],
    target: Target = None,
    window: Window | None = None,
    margins: Sequence[tuple[int, int]] = (),
) -> Explanation:
    """Explain a preprocessed batch by the executor's recipe, or a window in it, with the margin each image has."""
    return start_explaining(executor, x, target, window, margins).finish()


def start_explaining(
    executor: Executor,
    x: Float[Tensor, "b c H W"],
    target: Target = None,
    window: Window | None = None,
    margins: Sequence[tuple[int, int]] = (),
    pad_to: int | None = None,
) -> Pending[Explanation]:
    """`explain_batch` without waiting for the device, where the recipe is compiled; `pad_to` as the executor has it."""
    method, fill = resolve(executor.recipe), resolve_fill(executor.recipe)
    model, views = executor.model, method.fusion.views
    if model is not None and not model.has_probabilities and method.fusion.weigh is not uniform:
        raise EquicamError(
            "a method that weighs views by confidence", "class probabilities", "a value, which has none",
            'method="equigrad-cam"',
        )  # fmt: skip
    started = executor.start(
        method.reader,
        partial(explain_group, method=method, fill=fill),
        x,
        as_targets(target, x, None if model is None else model.classes),
        views_per_image=views.count_with_presented,
        key=("explain", method, fill) if method.capturable(fill) else None,
        window=window,
        pad_to=pad_to,
    )

    # the caller's tensor, not a captured graph's, which the next call overwrites
    presented = x if window is None else crop_centre(x, window.size)
    facts: dict[str, Any] = {"inputs": presented, "views": views}
    if model is not None:
        facts |= {name: getattr(model, name) for name in ("layer", "mean", "std", "classes", "task")}
        # of several values, one must be named
        facts["is_only_output"] = not model.has_probabilities and target is None

    def finish() -> Explanation:
        found = started.finish()  # the one wait for the device comes after all other work
        flags = flag_names(found["flags"])
        if window is not None:
            rows, columns = margin_needed(views.transforms, window.size)
            flags = tuple(
                named | {"edge"} if margin[0] < rows or margin[1] < columns else named
                for named, margin in zip(flags, margins, strict=True)
            )
        return Explanation(**facts | found | {"flags": flags})

    return Pending(started.tensors, finish, started.check)


def explain_group(
    reader: ViewReader,
    x: Float[Tensor, "b c H W"],
    target: Int[Tensor, " b"] | None,
    *,
    method: Method,
    fill: Fill,
) -> dict[str, Tensor]:
    """The paper's procedure, on images whose views fit one forward pass."""
    fusion = method.fusion
    # Read every view. The presented view's top-1 class is the target, unless one is given, and is fixed for all views.
    readings = reader.read(x, fusion.views, target)
    # Weigh the views, align them, average them, and finish the chain once.
    fused = fuse(readings, method.combine, fusion, fill)
    # Measure how far the views disagree, and whether the map is healthy.
    return measure(fused, in_window=reader.window is not None)


def measure(fused: FusedMap, *, in_window: bool = False) -> dict[str, Tensor]:
    """Every tensor of an explanation by its name; `flags` as a table of booleans."""
    readings, order = fused.readings, fused.order
    with side_stream(fused):  # nothing on the way to the map waits for the uncertainty
        planes = readings.chain_of_each_view(fused.combine)
        own = planes["rectified" if "rectified" in planes else readings.stage]
        agreed = measure_agreement(fused, in_window=in_window)
        variance = peum(fused.aligned_maps, fused.alignment)
        correlations = correlate_views(fused.maps_in_presented_frame, radius=fused.fusion.views.radius)
        uncertainty = {
            "peum": variance,
            "peum_score": variance.mean((-2, -1)),
            "view_maps": select(own, order).transpose(0, 1),
            "agreement": agreed.share,
            "coarse_outline": agreed.outline,
            "agreed_area": agreed.area,
            "repeatability": repeatability(fused),
            "stability": correlations.stability,
            "stability_by_view": select(correlations.with_presented, order).T,
        }
    top1 = select(readings.top1, order)
    kept, flips = fused.gate > 0, top1 != readings.top1[0]
    low, width = value_range(fused.raw)
    found = {
        "map": scale_to_unit(fused.raw, low, width),
        "raw": fused.raw,
        "target": readings.target,
        "confidence": readings.confidence[0],
        "view_confidence": select(readings.confidence, order).T,
        "view_top1": top1.T,
        "view_flips": flips.T,
        "view_kept": kept.T,
        "layer_map": fused.layer_map,
        "flags": health(fused, low, width == torch.inf, flips),
    }
    if readings.probabilities is not None:
        found["probabilities"] = readings.probabilities
    if readings.logits is not None:
        found["output"] = readings.logits.gather(1, readings.target[:, None])[:, 0]
    join_side_stream()
    return found | uncertainty


def equivariant(
    fn: Any,
    views: int | Views | None = None,
    *,
    recipe: Recipe | None = None,
    max_views_per_forward: int | None = None,
) -> Callable[[Images, Target], Explanation]:
    """Any explainer `(x, target) → map` as its aligned average over 18 views, or others, with PEUM.

    Captum attributions, pytorch-grad-cam and torchcam objects are taken as they are; images that are no tensors are
    preprocessed as ImageNet's. Of `recipe`, views, fill, protocol and dtype apply.
    """
    method = Method(
        "an explainer of the caller's", Fusion(Views.evenly(18), "map", "map"), reader=external(fn)
    )
    chosen = Recipe.of(recipe, views=views)
    chosen = replace(chosen, method=method, context="none", compiled=False, tau=None, gamma=None)
    resolve(chosen)  # refuses views that are none, before anything is explained

    def explainer(x: Images, target: Target) -> Explanation:
        """fn, averaged over aligned views."""
        with torch.inference_mode(False):
            batch = as_batch(None, read_arrays(x))
        executor = Executor(None, _under_autocast(chosen, batch.device), max_views_per_forward)
        return explain_batch(executor, batch, target)

    return explainer


def _under_autocast(recipe: Recipe, device: torch.device) -> Recipe:
    """The recipe with the type of an autocast around the call, where it names none."""
    if recipe.dtype is None and torch.is_autocast_enabled(device.type):
        return replace(recipe, dtype=torch.get_autocast_dtype(device.type))
    return recipe
