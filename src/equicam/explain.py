"""Explain images: read rotated views, align what was read, average, and measure how far the views disagree."""

from collections.abc import Sequence
from functools import partial
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from equicam.core.chain import scale_to_unit, value_range
from equicam.core.fusion import FusedMap, Fusion, flag_names, fuse, health
from equicam.core.transforms import margin_needed
from equicam.core.uncertainty import correlate_views, peum
from equicam.core.views import Fill, Views, Window, crop_centre, select
from equicam.core.weights import uniform
from equicam.errors import EquicamError
from equicam.explanation import Explanation as Explanation
from equicam.methods import Method, resolve, resolve_fill
from equicam.models.images import Images, as_batch, open_images, read_arrays
from equicam.models.layers import wrap
from equicam.models.surround import Surround, preprocess_surround, stack_surrounds
from equicam.readers.model import Model
from equicam.readers.reading import external
from equicam.recipe import CONTEXTS, Recipe
from equicam.runtime.executor import Executor
from equicam.runtime.pending import Pending, join_side_stream, side_stream
from equicam.runtime.view_reader import Target, ViewReader, as_targets


def explain(
    model: Model | nn.Module,
    images: Images | Sequence[Surround],
    *,
    method: str | Fusion | Method = "equigrad-cam",
    views: int | Views | None = None,
    target: Target = None,
    fill: Fill | None = None,
    protocol: str = "ours",
    tau: int | float | None = None,
    gamma: int | float | None = None,
    context: str = "none",
    window: int | tuple[int, int] | None = None,
    dtype: torch.dtype | None = None,
    max_views_per_forward: int | None = None,
    compiled: bool = False,
) -> Explanation:
    """Explain the model's top-1 class (or `target`) on preprocessed tensors, 8-bit pixels, PIL images or paths.

    `target` is a class by number or name, one for all images or a list with one for each; or a function of the model's
    output that returns one value per image. Arrays and tensors of 8-bit pixels are preprocessed like image files.
    `views` is how many or which. `protocol` is "ours" or "paper": its authors' grid, variants of methods, and fill, which
    is "zeros"; ours is "reflect". `context="auto"` cuts views from what the model's preprocessing crops away; `window` is
    the height and width in the middle of a larger tensor that the model sees, the rest being its context. `dtype` runs the
    network under autocast. `compiled` compiles the network for each new batch size, and on CUDA captures calls as graphs.
    """
    images = read_arrays(images)
    if not isinstance(model, Model):
        given = images if window is None or not isinstance(images, Tensor) else _in_window(images, window)[0]
        model = wrap(model, example=as_batch(None, given) if isinstance(given, Tensor) else None)
    if callable(target):
        if compiled:
            raise EquicamError(
                "compiled", "a class as the target: a function may not be captured", "a function", "compiled=False",
            )  # fmt: skip
        model, target = model.explaining(target), None
    with torch.inference_mode(False):
        x, size, margins = _with_context(model, images, context, window)
    recipe = Recipe(
        method=method, views=views, fill=fill, protocol=protocol, tau=tau, gamma=gamma,
        context="none" if size is None else "auto", dtype=_dtype_name(dtype, x.device), compiled=compiled,
    )  # fmt: skip
    shown = None if size is None else Window(size)
    executor = Executor(model, recipe, max_views_per_forward, refuse_unscaled=isinstance(images, Tensor))
    return explain_batch(executor, x, target, shown, margins)


def _with_context(
    model: Model, images: Images | Sequence[Surround], context: str, window: int | tuple[int, int] | None
) -> tuple[Float[Tensor, "b c H W"], tuple[int, int] | None, list[tuple[int, int]]]:
    """The batch; the size of the window in it, if it has context; and the margin that each image has around that."""
    if context not in CONTEXTS:
        raise EquicamError("context", f"one of {', '.join(CONTEXTS)}", repr(context), 'context="auto"')
    if isinstance(images, Tensor):
        if window is None and context != "none":
            raise EquicamError(
                "context", "images, which the model's preprocessing crops, or a window in the tensor", "a tensor",
                "window=224",
            )  # fmt: skip
        if window is None:
            return as_batch(model, images, check=False), None, []
        _, x, size = _in_window(as_batch(model, images, check=False), window)
        margin = ((x.shape[-2] - size[0]) // 2, (x.shape[-1] - size[1]) // 2)
        return x, size, [margin] * len(x)
    if window is not None:
        raise EquicamError("window", "a tensor of preprocessed pixels", "images or paths", 'context="auto"')
    if context == "none":  # surrounds come with context only
        return as_batch(model, images, check=False), None, []  # type: ignore[arg-type]
    given = list(images) if isinstance(images, list | tuple) else []
    found = [one for one in given if isinstance(one, Surround)]
    if not found or len(found) < len(given):
        found = [preprocess_surround(model, image) for image in open_images(images)]
    whole, size = stack_surrounds(found)
    return as_batch(model, whole, check=False), size, [one.margin for one in found]


def _in_window(
    x: Tensor, window: int | tuple[int, int]
) -> tuple[Float[Tensor, "b c h w"], Float[Tensor, "b c H W"], tuple[int, int]]:
    """The window, the images around it (without a last row or column that would shift the centre), and its size."""
    height, width = (window, window) if isinstance(window, int) else window
    if not 2 <= height <= x.shape[-2] or not 2 <= width <= x.shape[-1]:
        raise EquicamError(
            "window", f"at least 2 and at most {x.shape[-2]}×{x.shape[-1]}, the size of the images", f"{height}×{width}",
            "window=224, or no window",
        )  # fmt: skip
    rows, columns = x.shape[-2] - (x.shape[-2] - height) % 2, x.shape[-1] - (x.shape[-1] - width) % 2
    x = x[..., :rows, :columns]
    return crop_centre(x, (height, width)), x, (height, width)


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
    model = executor.model
    _refuse_gate(model, method)
    views = method.fusion.views
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


def _refuse_gate(model: Model | None, method: Method) -> None:
    """Refuse to weigh views by a confidence that values do not have."""
    if model is not None and not model.has_probabilities and method.fusion.weigh is not uniform:
        raise EquicamError(
            "a method that weighs views by confidence", "class probabilities", "a value, which has none",
            'method="equigrad-cam"',
        )  # fmt: skip


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
    return measure(fused)


def measure(fused: FusedMap) -> dict[str, Tensor]:
    """Every tensor of an explanation by its name; `flags` as a table of booleans."""
    readings, order = fused.readings, fused.order
    with side_stream(fused):  # nothing on the way to the map waits for the uncertainty
        planes = readings.chain_of_each_view(fused.combine)
        own = planes["rectified" if "rectified" in planes else readings.stage]
        variance = peum(fused.aligned_maps, fused.alignment)
        correlations = correlate_views(fused.maps_in_presented_frame, radius=fused.views.radius)
        uncertainty = {
            "peum": variance,
            "peum_score": variance.mean((-2, -1)),
            "view_maps": select(own, order).transpose(0, 1),
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


@runtime_checkable
class EquivariantExplainer(Protocol):
    """An explainer averaged over aligned views."""

    def __call__(self, x: Images, target: Target) -> Explanation:
        """Explain the target class of every image."""


def equivariant(
    fn: Any, views: int | Views = 18, *, fill: Fill | None = None, max_views_per_forward: int | None = None
) -> EquivariantExplainer:
    """Any explainer `(x, target) → map` as its aligned average over views, with PEUM.

    Captum attributions, pytorch-grad-cam and torchcam objects are taken as they are. Images that are not preprocessed
    tensors are preprocessed as ImageNet's.
    """
    if not isinstance(views, int | Views):
        raise EquicamError("views", "a number of views or Views", repr(views), "views=18")
    grid = views if isinstance(views, Views) else Views.evenly(views)
    method = Method("an explainer of the caller's", Fusion(grid, "map", "map"), reader=external(fn))

    def explainer(x: Images, target: Target) -> Explanation:
        """fn, averaged over aligned views."""
        with torch.inference_mode(False):
            batch = as_batch(None, read_arrays(x))
        recipe = Recipe(method, fill=fill, dtype=_dtype_name(None, batch.device))
        return explain_batch(Executor(None, recipe, max_views_per_forward), batch, target)

    return explainer


def _dtype_name(dtype: torch.dtype | None, device: torch.device) -> str | None:
    """The name of the type to run the network in: the caller's, or that of an autocast around the call."""
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise EquicamError("dtype", "a floating torch.dtype", repr(dtype), "torch.bfloat16")
    if dtype is None and torch.is_autocast_enabled(device.type):
        dtype = torch.get_autocast_dtype(device.type)
    return None if dtype is None else str(dtype).removeprefix("torch.")
