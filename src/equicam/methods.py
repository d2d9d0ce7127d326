"""Every method as data: a reader, a combine, and a fusion of views."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial

from equicam.chain import STAGES, Stage
from equicam.combine import (
    Combine,
    grad_cam,
    grad_cam_pp,
    grad_cam_pp_as_published,
    layer_cam,
    xgrad_cam,
)
from equicam.errors import EquicamError
from equicam.geometry import Views
from equicam.readers.aim import Contrast
from equicam.readers.reading import Reading
from equicam.readers.tap import tap
from equicam.weigh import KeepConfident, SoftGate, Weigher, uniform


@dataclass(frozen=True)
class Fusion:
    """Which views, where they are turned back, where they are averaged, how they are weighed."""

    views: Views
    align_at: Stage | None  # None: never turned back
    mean_at: Stage
    weigh: Weigher = uniform

    def __post_init__(self) -> None:
        for name, stage in (("align_at", self.align_at), ("mean_at", self.mean_at)):
            if stage not in STAGES and not (name == "align_at" and stage is None):
                raise EquicamError(
                    f"Fusion.{name}", needs=f"one of {', '.join(STAGES)}", got=repr(stage), fix='"map"'
                )
        if self.align_at is not None and STAGES.index(self.align_at) > STAGES.index(self.mean_at):
            raise EquicamError(
                "Fusion", needs="align_at no later than mean_at",
                got=f"align_at={self.align_at!r}, mean_at={self.mean_at!r}", fix=f"mean_at={self.align_at!r}",
            )  # fmt: skip


_ONE = Views((0.0,))
# One view, kept where its magnitudes still mean something; with views=6 they are aligned at pixel size.
_single = Fusion(_ONE, "upsampled", "upsampled")
_feature = Fusion(Views.evenly(18), "features", "features")


@dataclass(frozen=True)
class Method:
    """One row of the table."""

    about: str
    fusion: Fusion = _single
    combine: Combine = grad_cam
    reader: Callable[..., Reading] = field(default=tap, repr=False)


METHODS: dict[str, Method] = {
    "grad-cam": Method("Grad-CAM on the presented view: mean-gradient channel weights"),
    "grad-cam++": Method("Grad-CAM++ on the presented view, eq. 19", combine=grad_cam_pp),
    "xgrad-cam": Method("XGrad-CAM on the presented view: activation-weighted gradients", combine=xgrad_cam),
    "layer-cam": Method(
        "LayerCAM on the presented view: rectified gradient at each position", combine=layer_cam
    ),
    "finer-cam": Method(
        "Finer-CAM on the presented view: Grad-CAM of the score above the three nearest classes",
        reader=partial(tap, aim=Contrast()),
    ),
    "equigrad-cam": Method(
        "EquiGrad-CAM: features and gradients turned back, averaged, one Grad-CAM", _feature
    ),
    "equigrad-cam+pcf": Method(
        "EquiGrad-CAM over views that keep the class with p ≥ tau, weighed by p",
        replace(_feature, weigh=KeepConfident()),
    ),
    "equigrad-cam+soft": Method(
        "EquiGrad-CAM with views weighed by p^gamma", replace(_feature, weigh=SoftGate())
    ),
    "equigrad-cam-combined": Method(
        "each view's signed plane turned back at layer resolution, averaged",
        Fusion(Views.evenly(18), "combined", "combined"),
    ),
    "equigrad-cam-fine": Method(
        "each view's rectified plane turned back at pixel resolution, averaged",
        Fusion(Views.evenly(18), "upsampled", "upsampled"),
    ),
    "equigrad-cam-out": Method(
        "output space: each view's finished map turned back, averaged", Fusion(Views.evenly(18), "map", "map")
    ),
    "aug-cam": Method(
        "each view's finished map averaged without turning back", Fusion(Views.evenly(18), None, "map")
    ),
}

# What the paper's authors' code does differently, beyond the view grid and the fill.
AS_PUBLISHED: dict[str, Method] = {
    "grad-cam++": replace(METHODS["grad-cam++"], combine=grad_cam_pp_as_published),
    "aug-cam": replace(METHODS["aug-cam"], fusion=Fusion(Views.evenly(18), None, "map", SoftGate(1.0))),
}


def methods() -> tuple[str, ...]:
    """The names `explain` knows."""
    return tuple(METHODS)


def find(
    method: str | Fusion | Method,
    *,
    views: int | Views | None = None,
    as_published: bool = False,
    tau: int | float | None = None,
    gamma: int | float | None = None,
) -> Method:
    """The method a caller asked for, with its options set."""
    named = isinstance(method, str)
    if isinstance(method, Fusion):
        method = Method("a fusion of the caller's", method)
    elif isinstance(method, str):
        if method not in METHODS:
            raise EquicamError(
                "method", needs=f"one of {', '.join(METHODS)}", got=repr(method), fix='"equigrad-cam"'
            )
        method = (AS_PUBLISHED if as_published else {}).get(method, METHODS[method])
    fusion = method.fusion
    if isinstance(views, Views):
        fusion = replace(fusion, views=views)
    elif views is not None or (named and as_published):
        count = len(fusion.views) if views is None else views
        # one view is the presented one in the authors' code too
        fusion = replace(
            fusion, views=Views.evenly(count, start=-180.0 if as_published and count > 1 else 0.0)
        )
    for option, value, gate in (("tau", tau, KeepConfident), ("gamma", gamma, SoftGate)):
        if value is not None:
            if not isinstance(fusion.weigh, gate):
                raise EquicamError(
                    option, needs=f"a method weighed by {gate.__name__}", got=f"{option}={value} with another",
                    fix='"equigrad-cam+pcf"' if gate is KeepConfident else '"equigrad-cam+soft"',
                )  # fmt: skip
            fusion = replace(fusion, weigh=gate(value))
    return replace(method, fusion=fusion)
