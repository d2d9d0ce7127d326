"""In what the paper authors' protocol differs from ours: a field for each thing. `Recipe.protocol` names one of them.

Where the paper's text and the authors' released code differ, "paper" is what their code does.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from equicam.core.chain import grad_cam_pp_of_products
from equicam.core.fusion import Fusion
from equicam.core.transforms import Degrees
from equicam.core.uncertainty import Region
from equicam.core.views import Fill, Views
from equicam.core.weights import SoftGate
from equicam.errors import EquicamError
from equicam.readers.gradients import smooth_grad_cam_pp
from equicam.readers.masking import score_cam
from equicam.readers.reading import without_gradient


@dataclass(frozen=True)
class Protocol:
    """How maps are made and measured where the two protocols differ; the defaults are ours."""

    name: str = "ours"
    # How maps are made.
    first_angle: Degrees = 0.0  # of a grid of several views
    fill: Fill | None = None  # of pixels outside the image; None: chosen from the views and their context
    has_context: bool = True  # whether views may be cut from what surrounds the model's input
    variants: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # fields of methods by name
    # How they are measured.
    rotations_only: bool = False  # whether images are presented in rotations alone
    region: Region = "disc"  # where maps are compared, if in one region only
    kept_is_of_any_class: bool = False  # the confidence kept is the largest probability, whatever its class
    views_compared: int | None = None  # how many views, the first, disagreement compares; None: all
    reference_is_rectified_last: bool = False  # that of the rectified plane, after it is transformed
    whole_pixels_per_step: bool = False  # insertion and deletion change ⌊HW/20⌋ pixels in each of 20 steps
    curve_divisor: int = 20  # the width of their trapezoids is 1 / this
    causal_controls: bool = True  # regions of the drift region's shape or saliency are hidden too
    causal_fill: Fill = "reflect"  # of maps and regions that are carried to another frame
    soft_masks: bool = False  # a region that is carried keeps soft edges


_full_image = without_gradient(partial(score_cam, weigh="relu_minus_full_image"))
_of_products = without_gradient(partial(smooth_grad_cam_pp, combine=grad_cam_pp_of_products))
OURS = Protocol()
PAPER = Protocol(
    "paper",
    first_angle=-180.0,
    fill="zeros",
    has_context=False,
    variants={
        "score-cam": {"reader": _full_image},
        "aug-score-cam": {"reader": _full_image},
        "smooth-grad-cam++": {"reader": _of_products},
        "grad-cam++": {"combine": grad_cam_pp_of_products},
        "aug-cam": {"fusion": Fusion(Views.evenly(18), None, "map", SoftGate(1.0))},
        **{name: {"stretched": False} for name in ("rise", "rise-400", "score-cam-80")},
    },
    rotations_only=True,
    region="full",
    kept_is_of_any_class=True,
    views_compared=6,
    reference_is_rectified_last=True,
    whole_pixels_per_step=True,
    curve_divisor=21,
    causal_controls=False,
    causal_fill="zeros",
    soft_masks=True,
)
PROTOCOLS = {one.name: one for one in (OURS, PAPER)}


def find_protocol(name: str) -> Protocol:
    """The protocol of a name."""
    if name not in PROTOCOLS:
        raise EquicamError("protocol", "ours or paper", repr(name), 'Recipe(protocol="ours")')
    return PROTOCOLS[name]
