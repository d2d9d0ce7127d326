"""Several methods fused from one set of views: the work an executor runs for an evaluation."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import reduce

import torch
from jaxtyping import Float, Int
from torch import Tensor

from equicam.core.combine import Combine, grad_cam_rectified
from equicam.core.correlation import Region
from equicam.core.fusion import FusedMap, fuse
from equicam.core.uncertainty import correlate_views, peum
from equicam.core.views import Fill, Views, select
from equicam.evaluate.stages import LayerTrace
from equicam.methods import Method
from equicam.runtime.graphs import Tensors
from equicam.runtime.view_reader import ViewReader


@dataclass(frozen=True)
class KeptTensors:
    """Which tensors metrics need in addition to the maps."""

    trace: bool  # activations and gradients of methods of one view
    uncertainty: bool  # PEUM, disagreement and stability of methods of several views
    views_compared: int | None  # by disagreement: the first ones; None: all
    region: Region  # of disagreement


def views_read(methods: Mapping[str, Method]) -> int:
    """The views of an image in one call."""
    return len(_union(methods))


def fuse_methods(
    reader: ViewReader,
    x: Float[Tensor, "b c H W"],
    target: Int[Tensor, " b"] | None,
    *,
    methods: Mapping[str, Method],
    fills: Mapping[str, Fill],
    kept: KeptTensors,
) -> Tensors:
    """Every method's tensors as `METHOD.NAME`, and the probabilities of the presented view."""
    readings = reader.read(x, _union(methods), target)
    found: Tensors = {"target": readings.target}
    if readings.probabilities is not None:
        found["probabilities"] = readings.probabilities
    for name, method in methods.items():
        fused = fuse(readings, method.combine, method.fusion, fills[name])
        tensors = _measure(fused, method=method, kept=kept)
        found |= {f"{name}.{key}": tensor for key, tensor in tensors.items()}
    return found


def trace_of(found: Tensors, name: str) -> tuple[LayerTrace, Combine | None]:
    """A method's trace, and the combine that replaced its own, if one did."""
    trace = LayerTrace(*(found[f"{name}.{key}"] for key in ("activations", "gradients", "logits")))
    return trace, grad_cam_rectified if found[f"{name}.rectified"].any() else None


def _measure(fused: FusedMap, *, method: Method, kept: KeptTensors) -> Tensors:
    readings, order = fused.readings, fused.order
    found = {"map": fused.map}
    if not method.stretched:
        found["raw"] = fused.raw
    if kept.uncertainty and len(order) > 1:
        maps = select(fused.aligned_maps, order[: kept.views_compared])
        found["peum"] = peum(fused.aligned_maps, fused.alignment)
        radius = fused.views.radius
        found["disagreement"] = correlate_views(maps, kept.region, radius).disagreement
        found["stability"] = correlate_views(fused.maps_in_presented_frame, radius=radius).stability
    if kept.trace and len(order) == 1 and readings.stage == "features" and readings.logits is not None:
        activations, gradients = (value[0] for value in readings.values)
        rectified = torch.full_like(readings.target, fused.combine is grad_cam_rectified, dtype=torch.bool)
        found |= {
            "activations": activations,
            "gradients": gradients,
            "logits": readings.logits,
            "rectified": rectified,
        }
    return found


def _union(methods: Mapping[str, Method]) -> Views:
    """The views of all methods once, the presented view first."""
    each = [method.fusion.views.presented_first()[0] for method in methods.values()]
    return reduce(Views.union, each, Views((0.0,)))
