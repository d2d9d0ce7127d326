"""Every method as data: a reader, a combine, and a fusion of views."""

from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from functools import partial

from equicam.core import chain
from equicam.core.chain import Combine, grad_cam
from equicam.core.fusion import Fusion
from equicam.core.views import Fill, Views, as_fill
from equicam.core.weights import KeepConfident, SoftGate, uniform
from equicam.errors import EquicamError, not_one_of
from equicam.protocol import Protocol, find_protocol
from equicam.readers.attention import ROLLOUT, TRANSFORMER_ATTRIBUTION
from equicam.readers.gradients import (
    FEATURES,
    GRADIENTS,
    Contrast,
    gradients_of,
    opti_cam,
    smooth_grad_cam_pp,
)
from equicam.readers.masking import rise, score_cam
from equicam.readers.perturb import ablation_cam, recipro_cam
from equicam.readers.reading import Read, Reader, without_gradient
from equicam.recipe import Recipe

# One view, averaged where its magnitudes still mean something; with views=6 it is aligned at pixel size.
_single = Fusion(Views((0.0,)), "upsampled", "upsampled")
_feature = Fusion(Views.evenly(18), "features", "features")


@dataclass(frozen=True)
class Method:
    """One row of the table."""

    about: str
    fusion: Fusion = _single
    combine: Combine = grad_cam
    reader: Reader = field(default=GRADIENTS, repr=False)
    stretched: bool = True  # whether Eq (equivariance) compares maps stretched to [0, 1], and not as they are

    def capturable(self, fill: Fill) -> bool:
        """Whether it can run as a CUDA graph.

        A custom combine or weigher may synchronise with the device, which capture forbids; coverage with weights that
        depend on the image does.
        """
        fusion = self.fusion
        gated = isinstance(fusion.weigh, _GATES) and fill != "coverage"
        ours = self.combine in _COMBINES and (fusion.weigh is uniform or gated)
        return self.reader is GRADIENTS and ours


_COMBINES = (grad_cam, chain.grad_cam_pp, chain.grad_cam_pp_of_products, chain.xgrad_cam, chain.layer_cam)
_GATES = (KeepConfident, SoftGate)


def _of_features(about: str, read: Read, fusion: Fusion = _single) -> Method:
    return Method(about, fusion, reader=without_gradient(read))


METHODS: dict[str, Method] = {
    "grad-cam": Method("Grad-CAM on the presented view: mean-gradient channel weights"),
    "grad-cam++": Method("Grad-CAM++ on the presented view, eq. 19", combine=chain.grad_cam_pp),
    "xgrad-cam": Method(
        "XGrad-CAM on the presented view: activation-weighted gradients", combine=chain.xgrad_cam
    ),
    "layer-cam": Method(
        "LayerCAM on the presented view: rectified gradient at each position", combine=chain.layer_cam
    ),
    "finer-cam": Method(
        "Finer-CAM on the presented view: Grad-CAM of the logit above the three nearest classes",
        reader=gradients_of(Contrast()),
    ),
    "eigen-cam": Method(
        "Eigen-CAM on the presented view: first principal direction, no class",
        combine=chain.eigen_cam,
        reader=FEATURES,
    ),
    "smooth-grad-cam++": _of_features("mean of Grad-CAM++ maps of 50 noisy copies", smooth_grad_cam_pp),
    "score-cam": _of_features(
        "Score-CAM: channels weighted by the class probability they let through", score_cam
    ),
    "score-cam-80": _of_features(
        "80 channels with the largest mean, weighted by probability: the equal-compute row",
        partial(score_cam, weigh="probability", channels=80),
    ),
    "aug-score-cam": _of_features(
        "Score-CAM on 6 views, finished maps aligned and averaged",
        score_cam,
        Fusion(Views.evenly(6), "map", "map"),
    ),
    "ablation-cam": _of_features(
        "Ablation-CAM: channels weighted by the logit lost without them", ablation_cam
    ),
    "recipro-cam": _of_features("Recipro-CAM: the class probability with one position kept", recipro_cam),
    "opti-cam": _of_features("Opti-CAM: channel weights that raise the masked image's logit", opti_cam),
    "rise": _of_features("RISE: class probability under 8,000 random masks", rise),
    "rise-400": _of_features("RISE with 400 masks: the equal-compute row", partial(rise, masks=400)),
    "rollout": Method("attention rollout of a transformer, no class", reader=ROLLOUT),
    "transformer-attribution": Method(
        "gradient × attention of a transformer (without relevance propagation)",
        reader=TRANSFORMER_ATTRIBUTION,
    ),
    "equigrad-cam": Method("EquiGrad-CAM: features and gradients aligned, averaged, one Grad-CAM", _feature),
    "equigrad-cam+pcf": Method(
        "EquiGrad-CAM over views that keep the class with p ≥ tau, weighted by p",
        replace(_feature, weigh=KeepConfident()),
    ),
    "equigrad-cam+soft": Method(
        "EquiGrad-CAM with views weighted by p^gamma", replace(_feature, weigh=SoftGate())
    ),
    "equigrad-cam-combined": Method(
        "each view's signed plane aligned at layer resolution, averaged",
        Fusion(Views.evenly(18), "combined", "combined"),
    ),
    "equigrad-cam-fine": Method(
        "each view's rectified plane aligned at pixel resolution, averaged",
        Fusion(Views.evenly(18), "upsampled", "upsampled"),
    ),
    "equigrad-cam-out": Method(
        "output space: each view's finished map aligned, averaged", Fusion(Views.evenly(18), "map", "map")
    ),
    "aug-cam": Method(
        "each view's finished map averaged without alignment", Fusion(Views.evenly(18), None, "map")
    ),
}


def methods() -> tuple[str, ...]:
    """The names `explain` knows."""
    return tuple(METHODS)


def resolve(recipe: Recipe) -> Method:
    """The method a recipe names, with its options set."""
    method = _find(recipe)
    if recipe.views is recipe.tau is recipe.gamma is None and not _has_own_grid(recipe):
        return method
    fusion = replace(method.fusion, views=_views(recipe, method.fusion))
    for option, value, gate in (("tau", recipe.tau, KeepConfident), ("gamma", recipe.gamma, SoftGate)):
        if value is not None:
            if not isinstance(fusion.weigh, gate):
                raise EquicamError(
                    option, f"a method weighted by {gate.__name__}", f"{option}={value} with another",
                    '"equigrad-cam+pcf"' if gate is KeepConfident else '"equigrad-cam+soft"',
                )  # fmt: skip
            fusion = replace(fusion, weigh=gate(value))
    return replace(method, fusion=fusion)


def resolve_fill(recipe: Recipe) -> Fill:
    """The fill a recipe names; its default depends on the protocol and the views.

    By ours it is coverage where views have context or see less than all, and reflect otherwise.
    """
    protocol = find_protocol(recipe.protocol)
    if recipe.context == "auto" and not protocol.has_context:
        raise EquicamError(
            "context", "none: the authors' views are of the input alone", repr(recipe.context), 'Recipe(protocol="ours")',
        )  # fmt: skip
    if recipe.fill:
        return as_fill(recipe.fill)
    if protocol.fill is not None:
        return protocol.fill
    if recipe.context == "auto":
        return "coverage"
    return "coverage" if _views(recipe, _find(recipe).fusion).radius < 1 else "reflect"


def _find(recipe: Recipe) -> Method:
    method = recipe.method
    if isinstance(method, Method):
        return method
    if isinstance(method, Fusion):
        return Method("a fusion of the caller's", method)
    if not isinstance(method, str):
        got = f"an explainer ({type(method).__name__})"
        raise EquicamError(
            "method", "a name, a Method or a Fusion", got, "equicam.equivariant(fn)(images, target)"
        )
    return find_method(method, find_protocol(recipe.protocol))


def find_method(name: str, protocol: Protocol) -> Method:
    """The method of a name, as a protocol has it."""
    if name not in METHODS:
        close = get_close_matches(name, METHODS, n=1, cutoff=0.4) or ["equigrad-cam"]
        raise not_one_of("method", METHODS, name, repr(close[0]))
    return replace(METHODS[name], **protocol.variants.get(name, {}))


def _views(recipe: Recipe, fusion: Fusion) -> Views:
    views = recipe.views
    if isinstance(views, tuple):
        return Views(views)
    if views is None and not _has_own_grid(recipe):
        return fusion.views
    if not isinstance(views, int | None) or isinstance(views, bool):
        raise EquicamError("views", "a number of views or Views", repr(views), "Views((0, 90))")
    count = len(fusion.views) if views is None else views
    # one view is the presented one, whatever the grid
    return Views.evenly(count, start=find_protocol(recipe.protocol).first_angle if count > 1 else 0.0)


def _has_own_grid(recipe: Recipe) -> bool:
    """Whether the protocol's view grid replaces that of a named method; a method of the caller's keeps its own."""
    return isinstance(recipe.method, str) and find_protocol(recipe.protocol).first_angle != 0
