"""Signals computed from one image alone that may indicate an unstable map."""

from collections.abc import Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor

from equicam.core.correlation import Region
from equicam.core.transforms import Degrees
from equicam.core.views import rotate
from equicam.evaluation.batch import target_probability
from equicam.evaluation.similarity import spearman


def flip_rate(probs: Float[Tensor, "v b y"], target: Int[Tensor, " b"]) -> Float[Tensor, " b"]:
    """Share of the evaluation angles whose top-1 is not the target; the first of `probs` is presented."""
    return (probs[1:].argmax(-1) != target).double().mean(0)


def confidence_drop(probs: Float[Tensor, "v b y"], target: Int[Tensor, " b"]) -> Float[Tensor, " b"]:
    """Mean over the evaluation angles of 1 − p_c(R_θ x) / p_c(x)."""
    of_target = target_probability(probs, target).double()
    return (1 - of_target[1:] / of_target[0]).mean(0)


def calibration(
    peum: Float[Tensor, "b H W"],
    maps: Float[Tensor, "v b H W"],
    angles: Sequence[Degrees],
    region: Region,
) -> Float[Tensor, " b"]:
    """Spearman over pixels of PEUM with the mean squared drift, both in the presented frame; NaN where either is flat."""
    squared = [(rotate(m, -angle) - maps[0]) ** 2 for m, angle in zip(maps[1:], angles, strict=True)]
    drift = torch.stack(squared).mean(0)
    found = torch.stack([spearman(p[None], d[None], region)[0, 0] for p, d in zip(peum, drift, strict=True)])
    return torch.where(found == 0, torch.nan, found)
