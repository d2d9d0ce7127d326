"""Which layer of a transformer can be explained: after the last attention no patch reaches the class logit."""

from collections.abc import Iterator
from dataclasses import replace

from jaxtyping import Float
from torch import Tensor

from equicam.evaluate import statistics
from equicam.evaluate.statistics import Estimate
from equicam.explain import explain
from equicam.readers.layout import is_block_norm
from equicam.readers.model import Model
from equicam_paper.claims import Claim
from equicam_paper.context import Context
from equicam_paper.experiment import Experiment, another_network
from equicam_paper.measure import layer_gradient
from equicam_paper.rows import Both, Remark, Row, compare, note, with_verdict

IMAGES = 8
ZERO = "patch gradients are exactly zero there: only the class token feeds the head, no residual spreads them"


def measure(context: Context) -> Iterator[Row]:
    """The share of constant Grad-CAM maps at the last block's second norm and at its output."""
    if context.backbone != "vit_b_16":
        return
    module = context.model.module
    norms = [name for name, _ in module.named_modules() if name and is_block_norm(module, name)]
    layers = {"ln_2": norms[-1], "block": norms[-1].rpartition(".")[0]} if norms else {}
    x = context.open_some(IMAGES)
    for name, layer in layers.items():
        share, reason = _constant_share(replace(context.model, layer=layer, layout=None), x)
        found = Both(share, None)
        if reason:  # follows from the architecture, for every image
            yield with_verdict(f"vit.hook.{name}", found, "by definition", label=layer, reason=reason)
        else:
            yield compare(f"vit.hook.{name}", found, label=layer)


def _constant_share(model: Model, x: Float[Tensor, "b c H W"]) -> tuple[Estimate, str]:
    """`explain` refuses a layer whose patches have no gradient: every map of it would be constant."""
    if not layer_gradient(model, x).any():
        return statistics.proportion(len(x), len(x)), ZERO
    flags = explain(model, x, method="grad-cam").flags
    return statistics.proportion(sum(bool(f & {"blank", "constant"}) for f in flags), len(x)), ""


def _missing(context: Context, claim: Claim) -> Remark:
    if context.backbone == "vit_b_16":
        return note("a transformer of blocks with norms")
    return another_network(context, claim)


EXPERIMENT = Experiment(
    "Which layer of a transformer can be explained",
    ("vit.hook.",),
    measure,
    needs="a ViT-B/16 and a few images",
    missing=_missing,
)
