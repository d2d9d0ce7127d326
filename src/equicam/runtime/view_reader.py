"""Views of images through a network: the target class is chosen on the presented view and held fixed for the others."""

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from equicam.core.fusion import ViewReadings
from equicam.core.views import Views, Window
from equicam.errors import EquicamError
from equicam.readers.failures import Check
from equicam.readers.forward import Forward, Network, no_gradient
from equicam.readers.logits import LABEL_PREDICTED_FROM
from equicam.readers.model import OutputFunction
from equicam.readers.names import class_index
from equicam.readers.reading import Reader, Reading, Targets
from equicam.runtime.pending import DeferredChecks

Target = int | str | Sequence[int | str] | Tensor | OutputFunction | None
"""A class by number or name, for all images or one for each; a function of the model's output; None: the top-1."""


@dataclass
class ViewReader:
    """Reads views in passes of at most `max_views_per_forward`; `checks` collects what the values must pass."""

    network: Network | None  # None: the reader sees no model
    reader: Reader
    max_views_per_forward: int
    autocast: torch.dtype | None = None
    window: Window | None = None  # the part of the images that is presented; None: all of them
    checks: DeferredChecks = field(default_factory=DeferredChecks)

    def read(
        self, x: Float[Tensor, "b c H W"], views: Views, target: Int[Tensor, " b"] | None = None
    ) -> ViewReadings:
        """Every view of the images, the presented view first. It gives the target, unless the caller names one."""
        views, _ = views.presented_first()
        presented: Float[Tensor, "b y"] | None = None
        b = len(x)
        views_of_x = views.act(x, self.window)
        # only the views of a single image are split: a group of several images already fits one pass
        pieces = views_of_x.tensor_split(-(-len(views) * b // self.max_views_per_forward) if b == 1 else 1)
        predictions: list[Forward] = []
        readings: list[Reading] = []
        with nullcontext() if self.network is None else self.network.frozen():
            for piece in pieces:
                batch = piece.flatten(0, 1)
                forward = self._forward(batch)
                if forward is not None:
                    if presented is None:
                        presented = forward.logits[:b]
                        target = self._choose_target(presented, target)
                    # without what it captured and the autograd graph behind its gradient
                    predictions.append(replace(forward, captured=(), gradient=no_gradient))
                if target is None:
                    raise EquicamError("an explainer without a model", "a target class", None, "target=0")
                logits = None if presented is None else presented.repeat(len(piece), 1)
                targets = Targets(target.repeat(len(piece)), logits)
                if forward is None:
                    dtype, device = self.autocast, batch.device.type
                    autocast = torch.autocast(device, dtype=dtype) if dtype else nullcontext()
                    with autocast:
                        readings.append(self.reader.read(batch, targets))
                else:
                    readings.append(self.reader.read(forward, targets))
                self.checks.add(readings[-1].checks)
                del forward  # before the next pass, so that only one pass's features are alive
        assert target is not None  # noqa: S101  # set by the first piece
        size = (views_of_x.shape[-2], views_of_x.shape[-1])
        return self._join(predictions, readings, views, target, size)

    def _forward(self, batch: Float[Tensor, "n c H W"]) -> Forward | None:
        if self.reader.forward is None or self.network is None:
            return None
        model = self.network.model
        forward = self.reader.forward(self.network, batch.to(model.dtype))
        if model.classes is not None and forward.logits.shape[1] != len(model.classes):
            raise EquicamError(
                "class names", f"one for each of {forward.logits.shape[1]} classes", len(model.classes), "classes=None",
            )  # fmt: skip
        self.checks.add(forward.checks)
        return forward

    def _choose_target(self, presented: Tensor, wanted: Int[Tensor, " b"] | None) -> Int[Tensor, " b"]:
        """The presented view's top-1 class, or the caller's class, checked to exist; by the logits [b, y]."""
        classes = presented.shape[1]
        if wanted is None:
            if classes > 1 and self.network is not None and not self.network.model.has_probabilities:
                needs = f"one of {classes} outputs: values have no top-1"
                raise EquicamError("target", needs, None, "target=0")
            return presented.argmax(1)
        needs = f"classes from 0 to {classes - 1}"
        exists = Check(
            lambda: ((wanted >= 0) & (wanted < classes)).all(),
            lambda: EquicamError("target", needs, wanted.tolist(), "target=None"),
        )
        self.checks.add([exists])
        return wanted.clamp(0, classes - 1)  # until the check is evaluated, no index may be out of range

    def _join(
        self,
        predictions: list[Forward],
        readings: list[Reading],
        views: Views,
        target: Int[Tensor, " b"],
        size: tuple[int, int],
    ) -> ViewReadings:
        """Passes of the same images as one, [views, images, …]."""
        t, b = len(views), len(target)
        columns = zip(*(r.values for r in readings), strict=True)
        values = tuple(_cat(list(column)).view(t, b, *column[0].shape[1:]) for column in columns)
        everywhere, logits, probabilities = target.expand(t, -1), None, None
        if predictions:
            logits = _cat([p.logits for p in predictions])
            known = [p.probabilities for p in predictions if p.probabilities is not None]
            probabilities = _cat(known) if known else None
        if probabilities is None:  # no model, or values: confidence is unknown, and the top-1 the target
            like = values[0] if logits is None else logits
            top1, confidence = everywhere, torch.full((t, b), torch.nan, dtype=like.dtype, device=like.device)
        else:
            confidence = probabilities.gather(1, everywhere.reshape(-1, 1)).view(t, b)
            if self.network is not None and self.network.model.is_multilabel:
                # Labels do not exclude each other: the top-1 is the target where that is predicted, and elsewhere the
                # presented view's most probable other label, so that a flip is a change of that.
                other = predictions[0].logits[:b].scatter(1, everywhere[:1].T, -torch.inf).argmax(1)
                top1 = torch.where(confidence >= LABEL_PREDICTED_FROM, everywhere, other)
            else:
                top1 = probabilities.argmax(1).view(t, b)
        return ViewReadings(
            views=views, stage=readings[0].stage, values=values, confidence=confidence, top1=top1, target=target,
            logits=None if logits is None else logits[:b],
            probabilities=None if probabilities is None else probabilities[:b],
            size=size, rectify_weights=bool(predictions) and predictions[0].rectify_weights,
        )  # fmt: skip


def as_targets(
    target: Target, x: Float[Tensor, "b c H W"], classes: Sequence[str] | None = None
) -> Int[Tensor, " b"] | None:
    """One class per image, checked for number and kind; None leaves it to the model's top-1."""
    if target is None:
        return None
    if callable(target):
        raise EquicamError(
            "target", "a class here: a function of the model's output has none", "a function",
            "equicam.explain(model, images, target=function)",
        )  # fmt: skip
    if isinstance(target, str):
        target = class_index(target, classes)
    elif isinstance(target, list | tuple):
        numbers: list[Any] = [class_index(one, classes) if isinstance(one, str) else one for one in target]
        target = numbers
    try:
        wanted = torch.as_tensor(target, device=x.device)
    except (TypeError, ValueError, RuntimeError):
        wanted = torch.empty(0)
    if wanted.is_floating_point() or wanted.dtype == torch.bool or wanted.numel() == 0 or wanted.ndim > 1:
        needs = "a class by number or name, or one for each image"
        raise EquicamError("target", needs, repr(target), "target=3")
    if wanted.ndim == 1 and len(wanted) != len(x):
        needs = f"one class for each of {len(x)} images"
        raise EquicamError("target", needs, f"{len(wanted)}", "one int for them all")
    return wanted.long().expand(len(x))


def _cat(tensors: list[Tensor]) -> Tensor:
    return tensors[0] if len(tensors) == 1 else torch.cat(tensors)
