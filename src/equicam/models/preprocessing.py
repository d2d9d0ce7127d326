"""Preprocessing as data: what a model's own does to an image, read once from its steps, and another in its place."""

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache, cached_property, partial
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from equicam.errors import EquicamError, not_one_of
from equicam.images.formats import LevelPixels
from equicam.models.images import preprocess_image, preprocessing_of, standard_preprocessing, visible_box
from equicam.rasters.options import Tiling
from equicam.readers.failures import describe_failure, out_of_memory
from equicam.readers.forward import frozen
from equicam.readers.model import Model

INTERPOLATIONS = ("nearest", "bilinear", "bicubic", "lanczos", "box", "hamming")
LARGEST_SIDE = 4096
LARGEST_VALUE = 1e6
"""Of mean and std: a manifest may have been written by anybody."""
Size = tuple[int, int]
"""Height and width."""
TRIED = ((640, 480), (375, 500), (256, 256), (1024, 333))
"""Widths and heights of the images on which the table must give what the preprocessing gives."""


@dataclass(frozen=True)
class Preprocessing:
    """Resize the short side, crop the centre, scale to [0, 1], normalise."""

    size: int  # of the short side
    crop: int
    mean: Any
    std: Any
    interpolation: str = "bilinear"

    def __post_init__(self) -> None:
        for name in ("size", "crop"):
            value = getattr(self, name)
            if type(value) is not int or not 1 <= value <= LARGEST_SIDE:
                raise EquicamError(name, f"1 to {LARGEST_SIDE} pixels", repr(value), f"{name}=224")
        if self.crop > self.size:
            raise EquicamError(
                "crop", f"at most the size, {self.size}", self.crop, f"size={self.crop} as well"
            )
        for name in ("mean", "std"):
            object.__setattr__(self, name, _channel_values(name, getattr(self, name)))
        if self.interpolation not in INTERPOLATIONS:
            raise not_one_of("interpolation", INTERPOLATIONS, self.interpolation, "bilinear")

    @property
    def transforms(self) -> list[Any]:
        """Its steps, among which the centre crop is found."""
        return cast(list[Any], self._steps.transforms)

    @property
    def _steps(self) -> Any:
        return standard_preprocessing(self.size, self.crop, self.mean, self.std, self.interpolation)

    def __call__(self, image: Image.Image) -> Tensor:
        """An image as the model's input."""
        return cast(Tensor, self._steps(image))

    def to_json(self) -> dict[str, Any]:
        """Plain values that JSON keeps."""
        return asdict(self) | {"mean": list(self.mean), "std": list(self.std)}

    @staticmethod
    def from_json(found: Mapping[str, Any]) -> "Preprocessing":
        """The one that `to_json` wrote; any other value is refused."""
        try:
            return Preprocessing(**found)
        except TypeError as error:
            raise EquicamError(
                "preprocessing", "size, crop, mean, std and interpolation", error, "restoring manifest.json"
            ) from error

    def of(self, model: Model) -> Model:
        """The model with this preprocessing."""
        return replace(model, preprocess=self, mean=self.mean, std=self.std)


def _channel_values(name: str, given: Sequence[Any]) -> tuple[float, ...]:
    values = tuple(given) * (3 if len(given) == 1 else 1)
    numbers = all(type(v) in (int, float) and abs(v) <= LARGEST_VALUE for v in values)
    if len(values) != 3 or not numbers or (name == "std" and min(values) <= 0):
        needs = "three numbers, of red, green and blue" + (", above 0" if name == "std" else "")
        raise EquicamError(name, needs, list(given), f"{name}=0.5,0.5,0.5")
    return tuple(float(v) for v in values)


@dataclass(frozen=True, eq=False)
class Steps:
    """A preprocessing of torchvision, timm or open_clip, read: how it resizes and crops, and what it does before and after.

    What a preprocessing does is found out here, once: see `read_steps`.
    """

    whole: Any  # the preprocessing
    is_known: bool = False  # False: a function, or it resizes or crops in more ways than one
    size: int | Size | None = None  # an int: of the short side; None: no resize
    crop: Size | None = None  # of the one centre crop; None: none, or several
    interpolation: str = "bilinear"
    before: tuple[Callable[[Any], Any], ...] = ()
    after: tuple[Callable[[Any], Any], ...] = ()

    def without_crop(self, image: Image.Image) -> Tensor | None:
        """The preprocessed image before the centre crop; None where there is no such step, or it would pad."""
        if self.crop is None:
            return None
        value: Any = image
        for step in self.before:
            value = step(value)
        if not isinstance(value, Image.Image | Tensor) or not _fits(self.crop, value):
            return None
        for step in self.after:
            value = step(value)
        return value if isinstance(value, Tensor) and value.ndim == 3 else None

    @cached_property
    def has_margin(self) -> bool:
        """Whether a crop of the preprocessed whole is the preprocessed crop: no later step depends on the crop."""
        rng = np.random.default_rng(0)
        for size in ((640, 512), (512, 701)):
            image = Image.fromarray(rng.integers(0, 256, (*size, 3), dtype=np.uint8))
            try:
                uncropped = self.without_crop(image)
                plain = self.whole(image)
            except (Exception, SystemExit):  # noqa: BLE001  # a custom preprocessing may refuse the test image with any exception
                return False
            if uncropped is None or self.crop is None or self.crop != tuple(plain.shape[-2:]):
                return False
            # where torchvision's centre crop begins
            top, left = (round((uncropped.shape[axis] - self.crop[axis]) / 2) for axis in (-2, -1))
            if not torch.equal(uncropped[..., top:, left:][..., : self.crop[0], : self.crop[1]], plain):
                return False
        return True

    @cached_property
    def levels(self) -> "LevelTable | None":
        """Its table of levels; None where its steps are others, or change a pixel by more than its level."""
        if not self.is_known or self.crop is None:
            return None
        rng, size = np.random.default_rng(0), self.size or self.crop
        unresized = (
            (size, size) if isinstance(size, int) else size[::-1]
        )  # noise that stays, with all its levels
        sizes = (unresized, *TRIED)
        images = [Image.fromarray(rng.integers(0, 256, (h, w, 3), dtype=np.uint8)) for w, h in sizes]
        numbers = np.full((3, 256), np.nan, np.float32)
        table = LevelTable(self.size, self.crop, self.interpolation, numbers)
        try:
            expected = [self.whole(image) for image in images]
            for channel, levels in enumerate(table(images[0]).levels):
                numbers[channel][levels] = expected[0][channel].numpy()
            found = [torch.from_numpy(table(image).to_numbers()) for image in images]
            same = all(map(torch.equal, found, expected))
        except (Exception, SystemExit):  # noqa: BLE001  # a custom preprocessing may refuse the images with any exception
            return None
        return table if same and not np.isnan(numbers).any() else None


def read_steps(preprocess: Any) -> Steps:
    """A preprocessing, read; nothing is known of a function, or of anything else than steps in a row."""
    try:
        return _read_steps(preprocess)
    except TypeError:  # it cannot be a key
        return _read_steps.__wrapped__(preprocess)


@cache
def _read_steps(preprocess: Any) -> Steps:
    if hasattr(preprocess, "crop_size") and hasattr(preprocess, "resize_size"):  # torchvision's presets
        before, after = partial(_resize_by_preset, preprocess), partial(_finish_preset, preprocess)
        size, crop = _one_or_pair(preprocess.resize_size), _pair(preprocess.crop_size)
        return Steps(preprocess, True, size, crop, _interpolation(preprocess), (before,), (after,))
    steps = getattr(preprocess, "transforms", None)
    if not isinstance(steps, list | tuple):
        return Steps(preprocess)
    resizes = [step for step in steps if type(step).__name__ == "Resize"]
    crops = [i for i, step in enumerate(steps) if type(step).__name__ == "CenterCrop"]
    other = [step for step in steps if "Crop" in type(step).__name__ or "Pad" in type(step).__name__]
    found = Steps(preprocess, len(resizes) <= 1 and len(crops) <= 1 and len(other) == len(crops))
    if found.is_known and resizes:
        found = replace(found, size=_one_or_pair(resizes[0].size), interpolation=_interpolation(resizes[0]))
    if len(crops) != 1:
        return found
    at = crops[0]
    return replace(found, crop=_pair(steps[at].size), before=tuple(steps[:at]), after=tuple(steps[at + 1 :]))


def _resize_by_preset(preset: Any, image: Image.Image) -> Any:
    from torchvision.transforms import functional

    return functional.resize(image, preset.resize_size, preset.interpolation, antialias=preset.antialias)


def _finish_preset(preset: Any, resized: Image.Image) -> Any:
    uncropped = copy.copy(preset)
    uncropped.crop_size = [resized.height, resized.width]
    return uncropped(resized)


def _fits(crop: Size, image: Image.Image | Tensor) -> bool:
    height, width = image.shape[-2:] if isinstance(image, Tensor) else (image.height, image.width)
    return bool(crop[0] <= height and crop[1] <= width)


def _one_or_pair(size: Any) -> int | Size:
    values = [size] if isinstance(size, int) else list(size)
    return int(values[0]) if len(values) == 1 else (int(values[0]), int(values[1]))


def _pair(size: Any) -> Size:
    found = _one_or_pair(size)
    return (found, found) if isinstance(found, int) else found


def _interpolation(step: Any) -> str:
    found = getattr(step, "interpolation", "bilinear")
    return str(getattr(found, "value", found))


def with_preprocessing(
    model: Model,
    *,
    size: int | None = None,
    crop: int | None = None,
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
) -> Model:
    """The model with another size, crop, mean or std; what is not given stays as it is. It runs once, to show that it can."""
    if (size, crop, mean, std) == (None, None, None, None):
        return model
    own = read_steps(preprocessing_of(model))
    # of inputs of many sizes, a crop must be given
    known = own.is_known and not (isinstance(own.size, int) and own.crop is None and crop is None)
    if size is None:
        size = _square(own.size) if known else crop
    if crop is None and known:
        crop = _square(own.crop or own.size)
    if size is None or crop is None:
        raise EquicamError(
            "preprocessing", "size and crop, because the model's own cannot be read", "one of them or none",
            "size=256 and crop=224",
        )  # fmt: skip
    if crop > size and known and _square(own.crop) == crop:
        raise EquicamError("size", f"at least the model's crop, {crop}", size, f"crop={size} as well")
    interpolation = own.interpolation if known and own.interpolation in INTERPOLATIONS else "bilinear"
    mean, std = (model.mean if mean is None else tuple(mean)), (model.std if std is None else tuple(std))
    changed = Preprocessing(size, crop, mean, std, interpolation).of(model)
    x = preprocess_image(changed, Image.new("RGB", (size, size)))[None]
    try:
        with frozen(model.module), torch.no_grad():
            model.module(x.to(model.device, model.dtype))
    except (Exception, SystemExit) as error:
        if out_of_memory(error):
            raise
        raise EquicamError(
            "crop", "a size of input that the model takes", f"{crop}: {describe_failure(error)}",
            f"crop={own.crop[0]}" if own.is_known and own.crop else "its own, without crop",
        ) from error  # fmt: skip
    return changed


def _square(size: int | Size | None) -> int | None:
    return min(size) if isinstance(size, tuple) else size


def preprocessing_facts(model: Model, tiling: Tiling | None = None) -> dict[str, Any]:
    """Size, crop, mean and std, and the share that the model sees of a square image and of one of 4:3; None where unknown."""
    own, mean, std = read_steps(preprocessing_of(model)), model.mean, model.std
    size, crop = own.size, own.crop if own.is_known and own.crop else None
    if tiling is None:
        crop = crop or _input_size(model)
        sees = _visible_share(model, (512, 512)), _visible_share(model, (640, 480))
    else:
        size, crop, sees = None, (tiling.tile, tiling.tile), (1.0, None)
        mean, std = tiling.input.mean or mean, tiling.input.std or std
    facts = {"size": list(size) if isinstance(size, tuple) else size, "crop": crop and list(crop)}
    return facts | {"mean": list(mean), "std": list(std), "sees_square": sees[0], "sees_4_3": sees[1]}


def preprocessing_sentence(facts: Mapping[str, Any], *, tiles: bool = False) -> str:
    """The same in one line."""
    size, crop = facts["size"], facts["crop"]
    steps = []
    if isinstance(size, list):
        steps.append(f"resized to {size[0]}×{size[1]}")
    elif size is not None:
        steps.append(f"short side resized to {size}")
    if crop is not None and crop != size:
        steps.append(f"{'windows of' if tiles else 'centre crop' if size else 'input'} {crop[0]}×{crop[1]}")
    steps += [f"{name} {','.join(f'{value:.4g}' for value in facts[name])}" for name in ("mean", "std")]
    square, wide = facts["sees_square"], facts["sees_4_3"]
    if tiles:
        steps.append("the model sees all of a window")
    elif square is not None and wide is not None:
        steps.append(
            f"the model sees {square:.0%} of a square image, {wide:.0%} of one of 4:3".replace("%", " %")
        )
    return f"preprocessing: {'; '.join(steps)}"


def _input_size(model: Model) -> Size | None:
    try:
        height, width = preprocess_image(model, Image.new("RGB", (512, 512))).shape[-2:]
    except Exception:  # noqa: BLE001  # a custom preprocessing may refuse the test image with any exception
        return None
    return int(height), int(width)


def _visible_share(model: Model, size: tuple[int, int]) -> float | None:
    """Of an image of this width and height, the share inside the model's input."""
    own, (width, height) = read_steps(preprocessing_of(model)), size
    if own.size is not None:
        rows, columns = map(float, own.size if isinstance(own.size, tuple) else (height, width))
        if isinstance(own.size, int):
            rows, columns = (side * own.size / min(size) for side in (rows, columns))
        crop = own.crop or (rows, columns)
        return round(min(crop[0], rows) * min(crop[1], columns) / (rows * columns), 3)
    try:
        x0, y0, x1, y1 = visible_box(model, size)
    except Exception:  # noqa: BLE001  # as above
        return None
    share = (min(x1, width) - max(x0, 0)) * (min(y1, height) - max(y0, 0)) / (width * height)
    return round(share, 3) if math.isfinite(share) else None


@dataclass(frozen=True, eq=False)
class LevelTable:
    """Resize and crop as torchvision does, then a look-up."""

    size: Any  # of the short side, or height and width; None: as they are
    crop: tuple[int, int]
    interpolation: str
    numbers: NDArray[np.float32]  # [channel, level]

    def __call__(self, image: Image.Image) -> LevelPixels:
        """An RGB image as the model's input."""
        from torchvision.transforms import InterpolationMode, functional

        if self.size is not None:
            size = [self.size] if isinstance(self.size, int) else list(self.size)
            image = functional.resize(image, size, InterpolationMode(self.interpolation))
        pixels = np.asarray(functional.center_crop(image, list(self.crop)))
        return LevelPixels(np.ascontiguousarray(pixels.transpose(2, 0, 1)), self.numbers)
