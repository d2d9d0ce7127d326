"""Every method as data: a reader, a combine, and a fusion of views."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from functools import partial
from itertools import pairwise
from typing import Literal

from equicam.core.chain import STAGES, Stage
from equicam.core.combine import (
    Combine,
    eigen_cam,
    grad_cam,
    grad_cam_pp,
    grad_cam_pp_as_published,
    layer_cam,
    xgrad_cam,
)
from equicam.core.views import Views
from equicam.core.weights import KeepConfident, SoftGate, Weigher, uniform
from equicam.errors import EquicamError
from equicam.readers.attention import rollout, transformer_attribution
from equicam.readers.forward import look
from equicam.readers.gradients import tap
from equicam.readers.masking import rise, score_cam
from equicam.readers.noise import smooth_grad_cam_pp
from equicam.readers.objective import Contrast
from equicam.readers.optimise import opti_cam
from equicam.readers.perturb import ablation_cam, recipro_cam
from equicam.readers.reading import Reading

Reader = Callable[..., Reading]
"""(model, views, pin, *, autocast) → what was read."""


@dataclass(frozen=True)
class Auto:
    """Numbers of views that are tried in turn, each a multiple of the one before, and when the mean is good enough."""

    counts: tuple[int, ...] = (6, 12, 24)
    tolerance: float = 0.11  # of the map's own standard deviation

    def __post_init__(self) -> None:
        nested = all(a > 1 and b % a == 0 and b > a for a, b in pairwise(self.counts))
        if not self.counts or not nested or not self.tolerance > 0:
            raise EquicamError(
                "Auto", needs="numbers of views, each a multiple of the one before, and a tolerance above 0", got=self,
                fix="Auto((6, 12, 24))",
            )  # fmt: skip


@dataclass(frozen=True)
class Fusion:
    """Which views, where they are turned back, where they are averaged, how they are weighed."""

    views: Views
    align_at: Stage | None  # None: never turned back
    mean_at: Stage
    weigh: Weigher = uniform
    auto: "Auto | None" = None  # with it, only as many of the views as a picture needs

    def __post_init__(self) -> None:
        for name, stage in (("align_at", self.align_at), ("mean_at", self.mean_at)):
            if stage not in STAGES and not (name == "align_at" and stage is None):
                raise EquicamError(
                    f"Fusion.{name}", needs=f"one of {', '.join(STAGES)}", got=repr(stage), fix='"map"'
                )
        if self.auto is not None and self.views != Views.evenly(self.auto.counts[-1]):
            raise EquicamError(
                "Fusion", needs="all views that auto may take", got=f"{len(self.views)} views with {self.auto}",
                fix='explain(…, views="auto")',
            )  # fmt: skip
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
    reader: Reader = field(default=tap, repr=False)


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
    "eigen-cam": Method(
        "Eigen-CAM on the presented view: first principal direction, no class", combine=eigen_cam, reader=look
    ),
    "smooth-grad-cam++": Method("mean of Grad-CAM++ maps of 50 noisy copies", reader=smooth_grad_cam_pp),
    "score-cam": Method(
        "Score-CAM: channels weighed by the class probability they let through", reader=score_cam
    ),
    "score-cam-80": Method(
        "80 channels with the largest mean, weighed by probability: the equal-compute row",
        reader=partial(score_cam, weigh="probability", channels=80),
    ),
    "aug-score-cam": Method(
        "Score-CAM on 6 views, finished maps turned back and averaged",
        Fusion(Views.evenly(6), "map", "map"),
        reader=score_cam,
    ),
    "ablation-cam": Method(
        "Ablation-CAM: channels weighed by the score lost without them", reader=ablation_cam
    ),
    "recipro-cam": Method("Recipro-CAM: the class probability with one position left", reader=recipro_cam),
    "opti-cam": Method("Opti-CAM: channel weights that raise the masked picture's score", reader=opti_cam),
    "rise": Method("RISE: class probability under 8,000 random masks", reader=rise),
    "rise-400": Method("RISE with 400 masks: the equal-compute row", reader=partial(rise, masks=400)),
    "rollout": Method("attention rollout of a transformer, no class", reader=rollout),
    "transformer-attribution": Method(
        "gradient × attention of a transformer (without relevance propagation)",
        reader=transformer_attribution,
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
_full_image = partial(score_cam, weigh="relu_minus_full_image")
AS_PUBLISHED: dict[str, Method] = {
    "score-cam": replace(METHODS["score-cam"], reader=_full_image),
    "aug-score-cam": replace(METHODS["aug-score-cam"], reader=_full_image),
    "smooth-grad-cam++": replace(
        METHODS["smooth-grad-cam++"], reader=partial(smooth_grad_cam_pp, combine=grad_cam_pp_as_published)
    ),
    "grad-cam++": replace(METHODS["grad-cam++"], combine=grad_cam_pp_as_published),
    "aug-cam": replace(METHODS["aug-cam"], fusion=Fusion(Views.evenly(18), None, "map", SoftGate(1.0))),
}


def methods() -> tuple[str, ...]:
    """The names `explain` knows."""
    return tuple(METHODS)


def find(
    method: str | Fusion | Method,
    *,
    views: int | Views | Literal["auto"] | None = None,
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
            close = get_close_matches(method, METHODS, n=1, cutoff=0.4) or ["equigrad-cam"]
            raise EquicamError(
                "method", needs=f"one of {', '.join(METHODS)}", got=repr(method), fix=repr(close[0])
            )
        method = (AS_PUBLISHED if as_published else {}).get(method, METHODS[method])
    fusion = method.fusion
    if not isinstance(views, int | Views | None) and views != "auto":
        raise EquicamError(
            "views", needs='a number of views, Views or "auto"', got=repr(views), fix="Views((0, 90))"
        )
    if views == "auto":
        if as_published:
            raise EquicamError(
                "views", needs="the authors' fixed grid", got="'auto'", fix="as_published=False"
            )
        fusion = replace(fusion, views=Views.evenly(Auto.counts[-1]), auto=Auto())
    elif isinstance(views, Views):
        fusion = replace(fusion, views=views, auto=None)
    elif views is not None or (named and as_published):
        count = len(fusion.views) if views is None else views
        # one view is the presented one in the authors' code too
        fusion = replace(
            fusion, views=Views.evenly(count, start=-180.0 if as_published and count > 1 else 0.0), auto=None
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
