"""Views of images through a network: the target class is chosen on the presented view and held fixed for the others."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
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
    with_gradient: bool = False  # the caller's grad mode, for an explainer of the caller's
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
                targets = Targets(
                    target.repeat(len(piece)), None if presented is None else presented.repeat(len(piece), 1)
                )
                readings.append(self._read_piece(batch, forward, targets))
                del forward  # before the next pass, so that only one pass's features are alive
        assert target is not None  # noqa: S101  # set by the first piece
        size = (views_of_x.shape[-2], views_of_x.shape[-1])
        return self._join(predictions, readings, views, target, presented, size)

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

    def _choose_target(
        self, presented: Float[Tensor, "b y"], target: Int[Tensor, " b"] | None
    ) -> Int[Tensor, " b"]:
        """The presented view's top-1 class, or the caller's class, checked to exist."""
        wanted, classes = target, presented.shape[1]
        if wanted is None:
            if classes > 1 and self.network is not None and not self.network.model.has_probabilities:
                raise EquicamError(
                    "target", f"one of {classes} outputs: values have no top-1", None, "target=0"
                )
            return presented.argmax(1)

        def passes() -> Tensor:
            return ((wanted >= 0) & (wanted < classes)).all()

        def error() -> EquicamError:
            return EquicamError("target", f"classes from 0 to {classes - 1}", wanted.tolist(), "target=None")

        self.checks.add([Check(passes, error)])
        return wanted.clamp(0, classes - 1)  # until the check is evaluated, no index may be out of range

    def _read_piece(
        self, batch: Float[Tensor, "n c H W"], forward: Forward | None, targets: Targets
    ) -> Reading:
        if forward is None:
            with (
                autocast_context(batch.device.type, self.autocast),
                torch.set_grad_enabled(self.with_gradient),
            ):
                reading = self.reader.read(batch, targets)
        else:
            reading = self.reader.read(forward, targets)
        self.checks.add(reading.checks)
        return reading

    def _join(
        self,
        predictions: list[Forward],
        readings: list[Reading],
        views: Views,
        target: Int[Tensor, " b"],
        presented: Float[Tensor, "b y"] | None,
        size: tuple[int, int],
    ) -> ViewReadings:
        """Passes of the same images as one, [views, images, …]."""
        t, b = len(views), len(target)
        columns = zip(*(r.values for r in readings), strict=True)
        values = tuple(_cat(list(column)).view(t, b, *column[0].shape[1:]) for column in columns)
        everywhere = target.expand(t, -1)
        if not predictions:  # without a model: unknown confidence, and the target everywhere
            unknown = torch.full((t, b), torch.nan, dtype=values[0].dtype, device=values[0].device)
            return ViewReadings(
                views, readings[0].stage, values, unknown, everywhere, target, None, None, size
            )
        logits = _cat([p.logits for p in predictions])
        known = [p.probabilities for p in predictions if p.probabilities is not None]
        probabilities = _cat(known) if known else None
        confidence, top1 = self._predictions(probabilities, logits, everywhere, presented)
        return ViewReadings(
            views=views,
            stage=readings[0].stage,
            values=values,
            confidence=confidence,
            top1=top1,
            target=target,
            logits=logits[:b],
            probabilities=None if probabilities is None else probabilities[:b],
            size=size,
            rectify_weights=predictions[0].rectify_weights,
        )

    def _predictions(
        self,
        probabilities: Float[Tensor, "n y"] | None,
        logits: Float[Tensor, "n y"],
        target: Int[Tensor, "t b"],
        presented: Float[Tensor, "b y"] | None,
    ) -> tuple[Float[Tensor, "t b"], Int[Tensor, "t b"]]:
        """The target's probability and the top-1 of every view.

        A value has no probability, and is its own top-1. Labels do not exclude each other, so that the top-1 is the target
        where that is predicted, and elsewhere the presented view's most probable other label: a flip is a change of that.
        """
        if probabilities is None:
            return torch.full(target.shape, torch.nan, dtype=logits.dtype, device=logits.device), target
        confidence = probabilities.gather(1, target.reshape(-1, 1)).view(target.shape)
        if self.network is None or not self.network.model.is_multilabel or presented is None:
            return confidence, probabilities.argmax(1).view(target.shape)
        other = presented.scatter(1, target[:1].T, -torch.inf).argmax(1)
        return confidence, torch.where(confidence >= LABEL_PREDICTED_FROM, target, other)


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
        raise EquicamError(
            "target", "a class by number or name, or one for each image", repr(target), "target=3"
        )
    if wanted.ndim == 1 and len(wanted) != len(x):
        raise EquicamError(
            "target", f"one class for each of {len(x)} images", f"{len(wanted)}", "one int for them all"
        )
    return wanted.long().expand(len(x))


def _cat(tensors: list[Tensor]) -> Tensor:
    return tensors[0] if len(tensors) == 1 else torch.cat(tensors)


def autocast_context(device: str, dtype: torch.dtype | None) -> AbstractContextManager[None]:
    """Autocast to this type; None: no autocast."""
    return torch.autocast(device, dtype=dtype) if dtype else nullcontext()
