"""Which layer of a transformer can be explained: behind the last attention no patch reaches the class score."""

from collections.abc import Iterator
from dataclasses import replace

from jaxtyping import Float
from torch import Tensor

from equicam.errors import EquicamError
from equicam.evaluation import statistics
from equicam.evaluation.statistics import Estimate
from equicam.explain import explain
from equicam.paper.context import Bench, Experiment, Line, line, not_run, others
from equicam.paper.measure import pictures
from equicam.readers.layout import is_block_norm
from equicam.readers.model import Model

A_FEW = 8
WHY = "patch gradients are exactly zero there: only the class token feeds the head, no residual spreads them"


def run(bench: Bench) -> Iterator[Line]:
    """The share of constant Grad-CAM maps at the last block's second norm and at its output."""
    done = []
    if bench.backbone == "vit_b_16":
        norms = [
            n for n, _ in bench.model.module.named_modules() if n and is_block_norm(bench.model.module, n)
        ]
        layers = {"ln_2": norms[-1], "block": norms[-1].rpartition(".")[0]} if norms else {}
        x = pictures(bench, A_FEW)
        for name, layer in layers.items():
            share, why = _constant(replace(bench.model, layer=layer, layout=None), x)
            done.append(line(f"vit.hook.{name}", clean=share, what=layer, reason=why))
        done = done or [
            not_run(f"vit.hook.{n}", "a transformer of blocks with norms") for n in ("ln_2", "block")
        ]
    yield from done
    yield from others("vit.hook.", done, bench)


def _constant(model: Model, x: Float[Tensor, "b c H W"]) -> tuple[Estimate, str]:
    """A layer whose patches have no gradient is refused: every map of it would be constant."""
    try:
        flags = explain(model, x, method="grad-cam").flags
    except EquicamError as error:
        if "zero at every patch" not in str(error):
            raise
        return statistics.proportion(len(x), len(x)), WHY
    return statistics.proportion(sum(bool(f & {"blank", "constant"}) for f in flags), len(x)), ""


EXPERIMENT = Experiment(
    "Which layer of a transformer can be explained",
    ("vit.hook.",),
    run,
    needs="a ViT-B/16 and a few pictures",
)
