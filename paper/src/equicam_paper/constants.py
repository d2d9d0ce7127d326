"""The protocol's constants as the code has them, maps that are constant and why, and identities."""

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from equicam.core.transforms import as_transform
from equicam.core.uncertainty import CONSTANT_BELOW
from equicam.core.weights import KeepConfident
from equicam.evaluate import faithfulness, statistics, summary
from equicam.evaluate.equivariance import ANGLES
from equicam.evaluate.statistics import Estimate, Floats
from equicam.explain import explain
from equicam.methods import resolve
from equicam.readers.layout import is_block_norm
from equicam.readers.model import Model
from equicam.recipe import Recipe
from equicam_paper.claims import Claim, claims
from equicam_paper.context import FORWARD_PASSES, Context, Evaluation, another_network
from equicam_paper.measure import SCORE_CAM_WEIGHTS, constant_share, layer_gradient
from equicam_paper.rows import (
    Both,
    Contradiction,
    Remark,
    Row,
    by_definition,
    checked,
    compare,
    correlation,
    costly,
    not_run,
    note,
    number,
    too_few,
    with_verdict,
)

METHODS = ("grad-cam", "grad-cam++", "layer-cam", "aug-cam", "equigrad-cam+pcf", "equigrad-cam")
IMAGES = 8
IMAGES_PER_BATCH = 16
FLAT = {"blank", "constant"}  # flags of a map that shows nothing
INPUT_SIDE = 224  # of the paper's images, in pixels
IDENTICAL = 1e-5  # largest difference of two maps that are the same but for rounding
PLOTTED = "a constant in the authors' figure script, of unknown origin; `equicam-paper reproduce cost` measures cost"
IDENTITY = "an identity where the head pools before a linear layer: the gradient is everywhere the same"
CENTRED = "theirs is centred on the fused map, ours on the mean of the views"
NO_STARS = "no stars here: tests give log10 p, which does not underflow"


def constants(context: Context) -> Iterator[Row]:
    """Published constants and ours, and XGrad-CAM's identity."""
    x = context.open_some(IMAGES)
    yield from _constants(x.shape[-1])
    yield _most_constant(context)
    if context.backbone == "resnet50":
        xgrad, plain = (explain(context.model, x, method=m).map for m in ("xgrad-cam", "grad-cam"))
        apart = number(float((xgrad - plain).abs().max()), len(x))
        yield checked(
            "xgrad.r50.agree", Both(apart, None), apart.value < IDENTICAL, label="largest difference of xgrad-cam and grad-cam",
            reason=f"{apart.value:.0e}, {IDENTITY}", unless=too_few(apart),
        )  # fmt: skip
        yield _readme(context)


def _constants(side: int) -> Iterator[Row]:
    views = resolve(Recipe("equigrad-cam")).fusion.views
    grid = {one.key for one in views.transforms}
    for name, value in (
        ("T", len(views)),
        ("tau", KeepConfident().tau),
        ("insdel_steps", faithfulness.STEPS),
        ("insdel_blur_sigma", _sigma()),
        ("const_std_threshold", CONSTANT_BELOW),
        ("eq_angles_off_grid", sum(as_transform(angle).key not in grid for angle in ANGLES)),
    ):
        yield by_definition(f"const.{name}", value, label=f"{name} = {value:g}")
    published = claims()["const.eq_angles"].values
    theirs, ours = (", ".join(f"{angle:g}" for angle in angles) for angles in (published, ANGLES))
    same, label = ours == theirs, f"angles {ours}"
    yield checked("const.eq_angles", Both(None, None), same, label=label, published=theirs)
    reach, (pad,) = side * (math.sqrt(2) - 1) / 2, claims()["const.pad_px"].values
    yield checked(
        "const.pad_px", Both(number(reach), None), reach <= pad, published=f"{pad:g}",
        label="pixels of their padding that a rotation uses", reason="their padding is enough; ours reflects as far as a rotation reaches",
        unless=None if side == INPUT_SIDE else Remark("other-input", {}),
    )  # fmt: skip
    yield not_run("const.significance_star_p", NO_STARS)


def _sigma() -> float:
    """Width of the blur that hides pixels, from its effect on one bright pixel: k(d)/k(0) = exp(−d²/2σ²)."""
    dot = torch.zeros(1, 1, 65, 65, dtype=torch.float64)
    dot[..., 32, 32] = 1
    row = faithfulness.blur_out(dot)[0, 0, 32]
    return 5 / math.sqrt(2 * math.log(float(row[32] / row[37])))


def _most_constant(context: Context) -> Row:
    """The method whose map is most often constant, the Score-CAMs excluded."""

    def most(found: Evaluation) -> tuple[Estimate, str]:
        return max(((constant_share(found, m), m) for m in METHODS), key=lambda pair: pair[0].value)

    worst = context.evaluate_both(METHODS).map(most)
    label = f"constant maps at most, {worst.as_published[1]}"
    return compare("const.imagenet.other", worst.map(lambda w: w[0]), label=label)


def _readme(context: Context) -> Row:
    """PEUM of the gated method against 1 − Eq at 45° alone."""

    def r(found: Evaluation) -> Estimate:
        eq = summary.pick(found.table, "eq", "grad-cam", found.region, each_angle=True)
        peum = summary.pick(found.table, "peum", "equigrad-cam+pcf", "full")
        return correlation(statistics.pearson(peum.value, 1 - eq.value[eq.angles == 45], group=peum.group))

    found = context.evaluate_both(["grad-cam", "equigrad-cam+pcf"], ["eq", "peum"])
    label = "r of gated PEUM with 1 − Eq at 45°"
    return compare("code.readme.peum_r", found.map(r), label=label, reason=CENTRED)


def _missing(context: Context, claim: Claim) -> Remark:
    return note(PLOTTED) if claim.id.startswith("code.time") else another_network(context, claim)


def constant_maps(context: Context) -> Iterator[Row]:
    """The share of constant Score-CAM maps with the authors' weights and with the original's."""
    claim = f"const.scorecam.{context.backbone}"
    if not context.costly:
        if claim in claims():
            yield not_run(claim, costly(FORWARD_PASSES["score-cam"]))
        return
    with context.masked_scores():
        constant = Both.of(partial(_constant_score_cams, context))
    group = [item.group or item.id for item in context.sample] if context.groups else None
    share = constant.map(lambda c: statistics.proportion(int(c.sum()), len(c)))
    fewer = statistics.compare(constant.clean, constant.as_published, group=group).difference
    yield compare(
        claim, share, label="score-cam: constant maps", reason=SCORE_CAM_WEIGHTS,
        artefact=Contradiction(fewer, "with the original's weights fewer maps are constant"),
    )  # fmt: skip


def _constant_score_cams(context: Context, protocol: str) -> Floats:
    """Which images have a constant map."""
    items, constant = context.sample, []
    how = {name: value for name, value in context.options.items() if name in ("dtype", "compiled")}
    for start in range(0, len(items), IMAGES_PER_BATCH):
        x = context.open(items[start : start + IMAGES_PER_BATCH])
        found = explain(context.model, x, method="score-cam", recipe=Recipe(protocol=protocol), **how)
        constant += [bool(flags & FLAT) for flags in found.flags]
    return np.array(constant, dtype=np.float64)


ZERO = "patch gradients are exactly zero there: only the class token feeds the head, no residual spreads them"


def hooks(context: Context) -> Iterator[Row]:
    """The share of constant Grad-CAM maps at the last block's second norm and at its output."""
    if context.backbone != "vit_b_16":
        return
    module = context.model.module
    norms = [name for name, _ in module.named_modules() if name and is_block_norm(module, name)]
    layers = {"ln_2": norms[-1], "block": norms[-1].rpartition(".")[0]} if norms else {}
    x = context.open_some(IMAGES)
    for name, layer in layers.items():
        share, reason = _constant_at(replace(context.model, layer=layer, layout=None), x)
        claim, found = f"vit.hook.{name}", Both(share, None)
        if reason:  # follows from the architecture, for every image
            yield with_verdict(claim, found, "by definition", label=layer, reason=reason)
        else:
            yield compare(claim, found, label=layer)


def _constant_at(model: Model, x: Float[Tensor, "b c H W"]) -> tuple[Estimate, str]:
    """`explain` refuses a layer whose patches have no gradient: every map of it would be constant."""
    if not layer_gradient(model, x).any():
        return statistics.proportion(len(x), len(x)), ZERO
    flags = explain(model, x, method="grad-cam").flags
    return statistics.proportion(sum(bool(f & FLAT) for f in flags), len(x)), ""


def _missing_hook(context: Context, claim: Claim) -> Remark:
    is_vit = context.backbone == "vit_b_16"
    return note("a transformer of blocks with norms") if is_vit else another_network(context, claim)


MORE = {"constants": {"missing": _missing}, "hooks": {"missing": _missing_hook}}
