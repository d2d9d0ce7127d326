"""A transformer's own attributions: attention rollout and gradient × attention."""

from collections.abc import Iterator

from equicam.paper.context import NAMES, Bench, Experiment, Line, claims, others
from equicam.paper.measure import both, eq_line

UNLIKE = {"transformer-attribution": "gradient × attention, without the relevance propagation of its paper"}


def run(bench: Bench) -> Iterator[Line]:
    """Eq of both, beside EquiGrad-CAM."""
    done = []
    if bench.backbone == "vit_b_16":
        ours = {
            name: NAMES[name.removeprefix("vitbase.")] for name in claims() if name.startswith("vitbase.")
        }
        tables = both(bench, [*ours.values(), "equigrad-cam"])
        done = [eq_line(name, tables, method, reason=UNLIKE.get(method, "")) for name, method in ours.items()]
        yield from done
        yield eq_line("", tables, "equigrad-cam")
    yield from others("vitbase.", done, bench)


EXPERIMENT = Experiment(
    "A transformer's own attributions", ("vitbase.",), run, needs="a ViT-B/16 and ImageNet pictures"
)
