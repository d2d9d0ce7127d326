"""Signals computed from one image alone that may indicate an unstable map."""

from collections.abc import Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor

from equicam.core.transforms import Element
from equicam.core.uncertainty import Region
from equicam.core.views import Views
from equicam.evaluate.batch import target_probability
from equicam.evaluate.equivariance import consistent
from equicam.evaluate.similarity import spearman


def flip_rate(
    probs: Float[Tensor, "v b y"], target: Int[Tensor, " b"], *, multilabel: bool = False
) -> Float[Tensor, " b"]:
    """Share of the presentations whose prediction is not the presented one's, the first of `probs`."""
    return (~consistent(probs, target, multilabel=multilabel)).double().mean(0)


def confidence_drop(probs: Float[Tensor, "v b y"], target: Int[Tensor, " b"]) -> Float[Tensor, " b"]:
    """Mean over the presentations of 1 − p_c(T x) / p_c(x)."""
    of_target = target_probability(probs, target).double()
    return (1 - of_target[1:] / of_target[0]).mean(0)


def calibration(
    peum: Float[Tensor, "b H W"],
    maps: Float[Tensor, "v b H W"],
    presentations: Sequence[Element],
    region: Region,
) -> Float[Tensor, " b"]:
    """Spearman over pixels of PEUM with the mean squared drift, both in the presented frame; NaN where either is flat."""
    views = Views(presentations)
    drift = ((views.align(maps[1:], "reflect") - maps[0]) ** 2).mean(0)
    pairs = zip(peum, drift, strict=True)
    found = torch.stack([spearman(p[None], d[None], region, views.radius)[0, 0] for p, d in pairs])
    return torch.where(found == 0, torch.nan, found)
