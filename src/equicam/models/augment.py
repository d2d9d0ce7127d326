"""Pictures for training: the standard crop and mirror, and as the model sees them for measuring."""

from typing import Any

import torch

from equicam.readers.model import Model


def training_steps(model: Model, size: int) -> Any:
    """A random resized crop and a mirror, then scaled and normalised as the model's own preprocessing does."""
    from torchvision.transforms import v2

    return v2.Compose(
        [
            v2.RandomResizedCrop(size, scale=(0.5, 1.0)),
            v2.RandomHorizontalFlip(),
            v2.PILToTensor(),
            v2.ToDtype(torch.float32, scale=True),
            v2.Normalize(model.mean, model.std),
        ]
    )
