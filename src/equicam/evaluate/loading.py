"""The images of an evaluation: which ones, in which order, and how each is loaded with its ground truth."""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from PIL import Image
from torch import Tensor

from equicam.errors import EquicamError
from equicam.evaluate.batch import GroundTruth
from equicam.evaluate.controls import item_seed
from equicam.images.arrow_streams import refuse_in_memory
from equicam.images.decoding import failure_reason
from equicam.images.files import as_path
from equicam.images.formats import to_rgb, warn_if_as_stored
from equicam.images.items import Item, digest_files, load_item, sample_by_class, upright_box, valid_utf8
from equicam.images.sources import find_items
from equicam.models.images import as_batch, as_list, box_mask
from equicam.models.surround import preprocess_pixels
from equicam.readers.failures import not_scaled, unscaled
from equicam.readers.model import Model
from equicam.reasons import describe

Load = Callable[[Item], tuple[Float[Tensor, "c H W"], GroundTruth]]
"""Loads one image as the model's input, with its ground truth."""
LOADING_THREADS = 8


@dataclass(frozen=True)
class LoadedImage:
    """An image as the model's input with its ground truth, or the reason why it could not be loaded."""

    item: Item
    x: Float[Tensor, "c H W"] | None
    truth: GroundTruth
    reason: str = ""


@dataclass(frozen=True)
class Sample:
    """The images of an evaluation in its order, and the function that loads one."""

    items: list[Item]
    load: Load
    label_names: tuple[str, ...] = ()  # the labels of the whole source, where they are words
    in_memory: Sequence[Any] | Tensor = ()  # PIL images or a batch, if the caller passed no files

    def shuffled(self, seed: int) -> "Sample":
        """The same images in an order that a hash of seed and id decides: the neighbours of a class are not neighbours here."""
        return replace(self, items=sorted(self.items, key=lambda item: item_seed(seed, item.id, "order")))

    def content_digest(self) -> str:
        """Distinguishes these images from others of the same names: by size and time of files, or by pixels."""
        if not len(self.in_memory):
            return digest_files(self.items)
        digest = hashlib.sha256()
        for item in self.items:
            one = self.in_memory[item.index or 0]
            one = one.cpu().contiguous().numpy() if isinstance(one, Tensor) else one
            digest.update(one.tobytes())
        return digest.hexdigest()


def make_sample(
    model: Model,
    images: Any,
    n: int | None,
    split: str | None,
    *,
    with_regions: bool,
    context: str = "none",
    group_by: str | None = None,
) -> Sample:
    """The sample of a folder, manifest, items, paths, PIL images or preprocessed batch."""
    load_file = partial(load_image, model, with_regions=with_regions, context=context)
    listed = isinstance(images, list | tuple) and len(images) > 0 and isinstance(images[0], Item)
    if listed or isinstance(images, str | Path):
        found = list(images) if listed else find_items(images, split=split, group_by=group_by)
        names = tuple(sorted({i.label for i in found if isinstance(i.label, str)}))
        return Sample(_take(found, n), load_file, names)
    for option, value in (("split", split), ("group_by", group_by)):
        if value is not None:
            raise EquicamError(option, "a folder or manifest", type(images).__name__, f"{option}=None")
    given: Any
    if isinstance(images, Tensor):
        if context != "none":
            needs = "images, which the model's preprocessing crops"
            raise EquicamError("context", needs, "a tensor", 'context="none"')
        given = as_batch(model, images)
        if unscaled(given, model.mean, model.std):
            raise not_scaled()
        return _in_memory(given, n, lambda i: given[i])
    refuse_in_memory(images, "images")
    given = [images] if isinstance(images, Image.Image) else as_list(images)
    if given and all(isinstance(one, str | Path) for one in given):
        items = [Item(id=valid_utf8(str(path)), path=as_path(path)) for path in given]
        refuse_duplicates("images", [item.id for item in items])
        return Sample(_take(items, n), load_file)
    if not given or not all(isinstance(one, Image.Image) for one in given):
        needs = "a folder, a manifest, PIL images, paths, items or a batch"
        kinds = sorted({type(one).__name__ for one in given}) or "nothing"
        raise EquicamError("images", needs, kinds, '"folder/"')
    pixels = [to_rgb(image) for image in given]
    return _in_memory(pixels, n, lambda i: preprocess_pixels(model, given[i], context))


def _in_memory(images: Any, n: int | None, load: Callable[[int], Tensor]) -> Sample:
    """A sample of images that are no files: their numbers are their ids."""
    digits = len(str(len(images) - 1))
    items = [Item(id=f"{i:0{digits}d}", path=Path(), index=i) for i in range(len(images))]
    return Sample(_take(items, n), lambda item: (load(item.index or 0), GroundTruth()), in_memory=images)


def load_image(
    model: Model, item: Item, *, with_regions: bool = True, context: str = "none"
) -> tuple[Float[Tensor, "c H W"], GroundTruth]:
    """An image as the model's input and, for metrics that need them, its boxes and label region in the same frame.

    With context, the input is in the middle of its surround.
    """
    upright = load_item(item).upright
    image = warn_if_as_stored(upright, f"image {item.id!r}")
    if not with_regions:
        return preprocess_pixels(model, image, context), GroundTruth()
    size, orientation = (image.width, image.height), upright.orientation
    by_area = sorted(item.boxes, key=lambda b: -(b[2] - b[0]) * (b[3] - b[1]))
    masks = [box_mask(model, size, upright_box(orientation, size, b)) >= 0.5 for b in by_area]
    boxes = [mask for mask in masks if mask.any()]
    region = (
        None if item.region is None else box_mask(model, size, upright_box(orientation, size, item.region))
    )
    region = None if region is None or region.sum() < 1 else region
    cropped = (bool(item.boxes) and not boxes) or (item.region is not None and region is None)
    truth = GroundTruth(boxes=torch.stack(boxes) if boxes else None, region=region, cropped=cropped)
    return preprocess_pixels(model, image, context), truth


def load_or_reason(load: Load, item: Item) -> LoadedImage:
    """Load an image; a bad one becomes a row with a reason instead of ending the evaluation."""
    try:
        x, truth = load(item)
    except Exception as error:  # noqa: BLE001  # a bad image never ends an evaluation
        return LoadedImage(item, None, GroundTruth(), describe(failure_reason(error)))
    return LoadedImage(item, x, truth)


def load_ahead(shards: Sequence[Sequence[Item]], load: Load) -> Iterator[list[LoadedImage]]:
    """Shards with their images loaded by threads, the next shard while the caller works on this one."""
    waiting: list[list[Future[LoadedImage]]] = []
    with ThreadPoolExecutor(LOADING_THREADS) as pool:
        for shard in shards:
            waiting.append([pool.submit(load_or_reason, load, item) for item in shard])
            if len(waiting) > 1:
                yield [one.result() for one in waiting.pop(0)]
        for rest in waiting:
            yield [one.result() for one in rest]


def refuse_duplicates(what: str, given: Sequence[Any]) -> None:
    """Raise an error that names the first value given twice."""
    twice = [one for i, one in enumerate(given) if one in given[:i]]
    if twice:
        raise EquicamError(what, "each one once", f"{twice[0]!r} twice", "leaving one out")


def _take(items: Sequence[Item], n: int | None) -> list[Item]:
    """A sample spread over classes, in the caller's order."""
    taken = {item.id for item in sample_by_class(items, n)}
    return [item for item in items if item.id in taken]
