"""The blur control: is averaging only smoothing?"""

from collections.abc import Iterator

from equicam.paper.context import Bench, Experiment, Line, eq, line

SIGMAS = (2, 4, 8, 16, 32, 64)


def run(bench: Bench) -> Iterator[Line]:
    """Grad-CAM blurred, beside the map times the coverage of 18 views, which the paper does not try."""
    names = ["grad-cam", *(f"grad-cam@blur-{s}" for s in SIGMAS), "grad-cam@coverage"]
    published, clean = bench.rows(names, as_published=True), bench.rows(names)
    for method in names:
        ours, theirs = eq(clean, method, as_published=False), eq(published, method, as_published=True)
        sigma = method.removeprefix("grad-cam@blur-") if "blur" in method else "0"
        if method != "grad-cam@coverage" and int(sigma) <= 16:
            yield line(f"blur.sigma{sigma}", clean=ours, as_published=theirs, what=method)
        else:
            yield Line("", method, "not in the paper", ours, theirs, "measured")


EXPERIMENT = Experiment("Blur control: is averaging only smoothing?", ("blur.",), run)
