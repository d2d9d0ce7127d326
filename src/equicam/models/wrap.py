"""`wrap`: a model from any module."""

import logging
from collections.abc import Callable, Sequence

from PIL import Image
from torch import Tensor, nn

from equicam.errors import EquicamError
from equicam.models.layers import choose_layer
from equicam.rasters.options import Input
from equicam.readers.layout import Layout
from equicam.readers.model import IMAGENET_MEAN, IMAGENET_STD, Model, as_layout, layer_name, original
from equicam.readers.names import Task

LOG = logging.getLogger(__name__)


def wrap(
    module: nn.Module,
    layer: str | nn.Module | None = None,
    *,
    example: Tensor | None = None,
    layout: Layout | str | None = None,
    rectify_weights: bool | None = None,
    preprocess: Callable[[Image.Image], Tensor] | None = None,
    mean: Sequence[float] = IMAGENET_MEAN,
    std: Sequence[float] = IMAGENET_STD,
    classes: Sequence[str] | None = None,
    input: Input | None = None,  # noqa: A002  # the word of the field
    task: Task | None = None,
) -> Model:
    """Your own module, ready to explain; the target layer is a name, a submodule, or chosen automatically.

    `task` says what its outputs are: "multiclass" (softmax), "binary" (one logit), "multilabel" (a sigmoid for each) or
    "regression" (values). Without it they are multiclass, or binary where there is one.
    `input` says what its channels are, for windows of rasters: bands, scale, resolution.
    Without `layer`, the module runs once, on the first image of `example` or on zeros of its stated input size.
    """
    if not isinstance(module, nn.Module):
        raise EquicamError(
            "wrap",
            needs="a torch.nn.Module",
            got=type(module).__name__,
            fix=f"equicam.load({module!r})" if isinstance(module, str) else "the network itself",
        )
    if isinstance(classes, str):
        raise EquicamError(
            "classes", needs="a list of names", got=repr(classes), fix=f"classes=[{classes!r}, …]"
        )
    module = original(module)
    if layer is None:
        layer = choose_layer(module, example)
        LOG.info("layer %s chosen from %s", layer, type(module).__name__)
    return Model(
        module=module,
        layer=layer_name(module, layer),
        layout=as_layout(layout),
        rectify_weights=rectify_weights,
        preprocess=preprocess,
        mean=tuple(mean),
        std=tuple(std),
        classes=None if classes is None else tuple(classes),
        input=input,
        task=task,
    )
