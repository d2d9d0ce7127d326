"""Blur control: is averaging only smoothing?"""

from collections.abc import Iterator

from equicam_paper.claims import claims
from equicam_paper.context import Context, Evaluation
from equicam_paper.experiment import Experiment
from equicam_paper.rows import Row, compare

SIGMAS = (2, 4, 8, 16, 32, 64)
"""Of the blur, in pixels; the paper stops at 16."""
BLURRED = "grad-cam@blur-{}"
CHANGE = "σ = {} − unblurred"
"""The label of Eq with a blurred map minus Eq with the map as it is."""


def measure(context: Context) -> Iterator[Row]:
    """Grad-CAM blurred, and Grad-CAM times the coverage of 18 views, which the paper does not try."""
    names = {sigma: BLURRED.format(sigma) for sigma in SIGMAS}
    found = context.evaluate_both(["grad-cam", *names.values(), "grad-cam@coverage"])
    yield compare("blur.sigma0", found.map(Evaluation.eq, "grad-cam"), label="grad-cam")
    for sigma, name in names.items():
        known, published = claims().get(f"blur.sigma{sigma}"), "not in the paper"
        if known:
            about = known.is_about(context.backbone, context.domain)
            published = known.text if about else f"{known.text}, of {known.about}"
        yield compare("", found.map(Evaluation.eq, name), label=name, published=published)
    for sigma, name in names.items():
        change = found.map(Evaluation.eq_above, name, "grad-cam")
        yield compare(f"blur.sigma{sigma}", change, label=CHANGE.format(sigma), reason="paired by image")
    yield compare("", found.map(Evaluation.eq, "grad-cam@coverage"), label="grad-cam@coverage")


EXPERIMENT = Experiment("Blur control: is averaging only smoothing?", ("blur.",), measure)
