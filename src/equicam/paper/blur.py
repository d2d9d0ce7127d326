"""The blur control: is averaging only smoothing?"""

from collections.abc import Iterator

from equicam.paper.context import Context
from equicam.paper.experiment import Experiment
from equicam.paper.measure import eq_row
from equicam.paper.rows import Row

SIGMAS = (2, 4, 8, 16, 32, 64)
"""Of the blur, in pixels; the paper stops at 16."""


def measure(context: Context) -> Iterator[Row]:
    """Grad-CAM blurred, and Grad-CAM times the coverage of 18 views, which the paper does not try."""
    claims = {"grad-cam": "blur.sigma0"} | {f"grad-cam@blur-{s}": f"blur.sigma{s}" for s in SIGMAS}
    claims |= {"grad-cam@coverage": ""}
    found = context.evaluate_both(list(claims))
    for method, claim in claims.items():
        yield eq_row(claim, found, method)


EXPERIMENT = Experiment("Blur control: is averaging only smoothing?", ("blur.",), measure)
