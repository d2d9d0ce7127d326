"""Explanations from altered features: only what follows the layer is run again, on many variants at once."""

from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from equicam.combine import weighted
from equicam.models.model import Model
from equicam.readers.ask import ask_at, ask_head
from equicam.readers.reading import Pin, Reading

_AT_ONCE = 256  # variants of a picture's features in one run of the head


def ablation_cam(
    model: Model, x: Float[Tensor, "n c H W"], pin: Pin, *, autocast: torch.dtype | None = None
) -> Reading:
    """Σ_k w_k A_k with w_k = (y_c − y_c without channel k) / y_c."""
    acts, layout, scores, probs = ask_at(model, x, autocast)
    target, _ = pin(scores)
    layer = model.module.get_submodule(model.layer)
    axis = 1 if layout.kind == "nchw" else acts.ndim - 1 if layout.kind == "nhwc" else 2
    rows = []
    for i in range(len(x)):
        without = []
        for part in torch.split(torch.arange(acts.shape[1], device=x.device), _AT_ONCE):

            def ablated(features: Tensor, part: Tensor = part) -> Tensor:
                keep = torch.ones(
                    (len(part), features.shape[axis]), dtype=features.dtype, device=features.device
                )
                keep[torch.arange(len(part)), part] = 0
                shape = [len(part), *(1 for _ in features.shape[1:])]
                shape[axis] = features.shape[axis]
                return features * keep.view(shape)

            said, _ = ask_head(model, x[i : i + 1], layer, ablated, autocast)
            without.append(said[:, target[i]])
        score = scores[i, target[i]]
        rows.append((score - torch.cat(without)) / score)
    return Reading("combined", (weighted(acts, torch.stack(rows).to(acts.dtype)),), scores, probs)


def recipro_cam(
    model: Model,
    x: Float[Tensor, "n c H W"],
    pin: Pin,
    *,
    mask: Literal["one-hot", "gaussian"] = "one-hot",
    autocast: torch.dtype | None = None,
) -> Reading:
    """The target's probability when only one position of the features is left, for every position.

    On tokens behind a class token the class and prefix tokens stay and the features are those that enter the layer's
    block, so that the last attention still looks at the position left. `gaussian` leaves a 3×3 neighbourhood with
    weights (1 2 1)ᵀ(1 2 1)/4.
    """
    acts, layout, scores, probs = ask_at(model, x, autocast)
    target, _ = pin(scores)
    h, w = acts.shape[-2:]
    tokens = layout.kind == "tokens"
    name = model.layer.rpartition(".")[0] if tokens else model.layer
    place = model.module.get_submodule(name)
    left = _left(h, w, mask).to(x.device)
    rows = []
    for i in range(len(x)):
        said = []
        for part in torch.split(left, _AT_ONCE):

            def masked(features: Tensor, part: Tensor = part) -> Tensor:
                if tokens:
                    prefix = torch.ones((len(part), layout.prefix or 0), dtype=part.dtype, device=part.device)
                    keep = torch.cat((prefix, part.flatten(1)), 1)[:, :, None]
                else:
                    keep = part[:, None] if layout.kind == "nchw" else part[..., None]
                return features * keep.to(features.dtype)

            _, prob = ask_head(model, x[i : i + 1], place, masked, autocast, before=tokens)
            said.append(prob[:, target[i]])
        rows.append(torch.cat(said).view(h, w))
    return Reading("rectified", (torch.stack(rows),), scores, probs)


def _left(h: int, w: int, mask: Literal["one-hot", "gaussian"]) -> Float[Tensor, "m h w"]:
    """One mask a position, row by row."""
    one_hot = torch.eye(h * w).view(h * w, 1, h, w)
    if mask == "one-hot":
        return one_hot[:, 0]
    line = torch.tensor([1.0, 2.0, 1.0])
    kernel = torch.outer(line, line)[None, None] / 4
    return torch.nn.functional.conv2d(one_hot, kernel, padding=1)[:, 0]
