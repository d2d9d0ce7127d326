"""CLIP-like models as zero-shot classifiers: logits are similarities of an image to the text of class names."""

from collections.abc import Callable, Sequence

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.functional import normalize

from equicam.errors import EquicamError

TEMPLATES = ("a photo of a {}.",)


class ZeroShot(nn.Module):
    """Logits scale · cos(image, text of class) + bias, with text features computed once."""

    text: Tensor
    scale: Tensor
    bias: Tensor

    def __init__(
        self, vision: nn.Module, text: Float[Tensor, "y d"], *, scale: Tensor, bias: Tensor | None = None
    ) -> None:
        super().__init__()
        self.vision = vision
        self.register_buffer("text", text)
        self.register_buffer("scale", scale.detach().clone())
        self.register_buffer("bias", torch.zeros_like(self.scale) if bias is None else bias.detach().clone())

    def forward(self, x: Float[Tensor, "n c H W"]) -> Float[Tensor, "m y"]:
        """Class logits with the scale the model was trained with."""
        image = normalize(self.vision(x), dim=-1)
        logits: Tensor = self.scale * image @ self.text.T + self.bias
        return logits


def text_features(
    encode: Callable[[list[str]], Float[Tensor, "m d"]], classes: Sequence[str], templates: Sequence[str]
) -> Float[Tensor, "y d"]:
    """One unit vector per class: the normalised mean of its normalised prompts; `_` in a name reads as a space."""
    wrong = [t for t in templates if "{}" not in t]
    if wrong or not templates:
        raise EquicamError(
            "templates", needs="a {} for the class name", got=wrong or templates, fix=repr(TEMPLATES[0])
        )
    with torch.no_grad():
        words = [name.replace("_", " ") for name in classes]
        prompts = [normalize(encode([t.format(name) for t in templates]), dim=-1).mean(0) for name in words]
    return normalize(torch.stack(prompts), dim=-1)


def require_classes(name: str, classes: Sequence[str] | None) -> tuple[str, ...]:
    """The class names, which a zero-shot model needs."""
    if classes is None or isinstance(classes, str) or len(classes) < 2:
        raise EquicamError(
            f"the zero-shot model {name!r}",
            needs="two class names or more",
            got=classes,
            fix='classes=["forest", "river"]',
        )
    return tuple(classes)
