"""The data that metrics are computed from: images, predictions and every method's maps of one batch."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from equicam.core.chain import Combine
from equicam.core.transforms import Transform
from equicam.core.uncertainty import Region
from equicam.core.views import Fill
from equicam.evaluate.equivariance import LayerTrace
from equicam.evaluate.rows import ReasonCode
from equicam.protocol import OURS, Protocol
from equicam.readers.logits import LABEL_PREDICTED_FROM

Predict = Callable[[Float[Tensor, "n c H W"]], Float[Tensor, "n y"]]
"""Class probabilities of a batch."""


@dataclass(frozen=True)
class GroundTruth:
    """Label, boxes and label region of an image, in the model's frame."""

    label: int | None = None
    no_label: str = ReasonCode.NO_LABEL  # why there is no label
    boxes: Bool[Tensor, "r H W"] | None = None  # the largest first
    region: Float[Tensor, "H W"] | None = None  # the region that makes the label, soft at its edge
    cropped: bool = False  # it has boxes or a region, but none inside the model's frame


def target_probability(probs: Float[Tensor, "*v b y"], target: Int[Tensor, " b"]) -> Float[Tensor, "*v b"]:
    """p_c: the probability of each image's explained class."""
    return probs.gather(-1, target[:, None].expand(*probs.shape[:-1], 1))[..., 0]


@dataclass(frozen=True)
class Predictions:
    """A model's predictions for the presented images and for the images in every presentation."""

    probs: Float[Tensor, "v b y"]  # presented first, then every presentation
    target: Int[Tensor, " b"]
    multilabel: bool = False  # labels do not exclude each other
    kept_is_of_any_class: bool = False  # the confidence kept is the largest probability, whatever its class

    @property
    def of_target(self) -> Float[Tensor, "v b"]:
        """p_c of the presented images, then in every presentation."""
        return target_probability(self.probs, self.target)

    @property
    def consistent(self) -> Bool[Tensor, "a b"]:
        """Where the top-1 in a presentation is the presented one's; of a label, whether it is predicted as there."""
        if self.multilabel:
            predicted = self.of_target >= LABEL_PREDICTED_FROM
            return predicted[1:] == predicted[0]
        return self.of_target[1:] == self.probs[1:].amax(-1)

    @property
    def confidence_kept(self) -> Float[Tensor, "a b"]:
        """min(1, p_c(T x) / p_c(x))."""
        if self.kept_is_of_any_class:
            return self.probs[1:].amax(-1)
        return (self.of_target[1:] / self.of_target[0]).clamp(max=1)

    @property
    def flip_rate(self) -> Float[Tensor, " b"]:
        """Share of the presentations whose prediction is not the presented one's."""
        return (~self.consistent).double().mean(0)

    @property
    def confidence_drop(self) -> Float[Tensor, " b"]:
        """Mean over the presentations of 1 − p_c(T x) / p_c(x)."""
        of_target = self.of_target.double()
        return (1 - of_target[1:] / of_target[0]).mean(0)


@dataclass(frozen=True)
class MethodMaps:
    """One method's maps of the images and, where the method has them, its views and its chain."""

    maps: Float[Tensor, "v b H W"]  # presented first, then every presentation
    predictions: Predictions
    null_map: Float[Tensor, "H W"]  # its map when no view shows anything
    of_views: Mapping[str, Tensor] = field(default_factory=dict)  # PEUM, disagreement and stability of images
    traces: Sequence[LayerTrace] = ()
    combine: Combine | None = None
    raw: Float[Tensor, "v b H W"] | None = None  # maps as they are, where Eq compares those


@dataclass(frozen=True)
class EvaluatedBatch:
    """Every method's maps of some images, the input of every metric."""

    ids: Sequence[str]
    x: Float[Tensor, "b c H W"]
    presentations: tuple[Transform, ...]
    predictions: Predictions
    methods: Mapping[str, MethodMaps]
    truth: Sequence[GroundTruth]
    predict: Predict
    fill: Fill
    protocol: Protocol = OURS
    seed: int = 0
    groups: Sequence[str | None] = ()  # of the images: their patient, slide or scene

    @property
    def region(self) -> Region:
        """The region of metrics that are computed over one region only."""
        return self.protocol.region

    @property
    def unrelated(self) -> Bool[Tensor, "b b"]:
        """Which images may stand for an unrelated one: never the image itself, nor one of its group."""
        groups = list(enumerate(self.groups or [None] * len(self.ids)))
        apart = [[i != j and (a is None or a != b) for j, b in groups] for i, a in groups]
        return torch.tensor(apart, dtype=torch.bool).to(self.x.device, non_blocking=True)
