"""The images of the live look: named on the command line or sent by the page, decoded in a process of their own."""

import secrets
import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from jaxtyping import Float
from torch import Tensor

from equicam.audit.compute import preprocess_to_array
from equicam.drawing.text import visible
from equicam.errors import EquicamError
from equicam.images.decoding import decode_upload
from equicam.images.files import MAX_IMAGE_BYTES, read_file
from equicam.images.items import Box
from equicam.readers.model import Model
from equicam.reasons import describe

MAX_UPLOAD_BYTES = 32 << 20
MAX_UPLOADS = 16  # kept, the last ones, of images sent by the page


@dataclass(frozen=True)
class OpenedImage:
    """An image as the model's input; without pixels until it is shown for the first time."""

    id: str
    name: str
    path: Path | None = None
    x: Float[Tensor, "1 c H W"] | None = None
    size: tuple[int, int] | None = None  # width and height of the file's image

    @property
    def pixels(self) -> Float[Tensor, "1 c H W"]:
        """The model's input."""
        if self.x is None:
            raise EquicamError("an image", "to be decoded", "one that is not yet", "opening it first")
        return self.x


class OpenedImages:
    """The images of one start, in memory alone."""

    def __init__(self, model: Model, paths: Sequence[Path]) -> None:
        self._model, self._lock = model, threading.Lock()
        named = [OpenedImage(secrets.token_hex(8), path.name, path) for path in paths]
        self._kept = {one.id: one for one in named}

    def listed(self) -> list[dict[str, str]]:
        """Id and name of every image, those of the command line first."""
        with self._lock:
            return [{"id": one.id, "name": visible(one.name, 120)} for one in self._kept.values()]

    def add(self, name: str, data: bytes) -> OpenedImage:
        """Decode and keep the bytes of an image file; an EquicamError says why they are none."""
        added = self._decode(OpenedImage(secrets.token_hex(8), name), data)
        with self._lock:
            self._kept[added.id] = added
            sent = [one.id for one in self._kept.values() if one.path is None]
            for id_ in sent[:-MAX_UPLOADS]:
                del self._kept[id_]
        return added

    def find(self, id_: str) -> OpenedImage:
        """The image, perhaps without pixels yet."""
        with self._lock:
            found = self._kept.get(id_)
        if found is None:
            got = "one that is no longer kept"
            raise EquicamError("an image", "to be open", got, "dropping it on the page again")
        return found

    def open(self, id_: str) -> OpenedImage:
        """The image with its pixels, read and decoded if they are needed for the first time."""
        found = self.find(id_)
        if found.x is None and found.path is not None:
            data, _ = read_file(found.path, what=f"image {str(found.path)!r}", limit=MAX_IMAGE_BYTES)
            found = self._decode(found, data)
            with self._lock:
                self._kept[id_] = found
        return found

    def _decode(self, image: OpenedImage, data: bytes) -> OpenedImage:
        preprocess = partial(preprocess_to_array, self._model)
        found = decode_upload(data, image.name, preprocess, _whole_box)
        if found.x is None or found.width is None or found.height is None:
            reason = describe(found.reason) if found.reason else "no pixels"
            raise EquicamError(
                f"image {visible(image.name, 120)!r}", "to be one that can be decoded and preprocessed", visible(reason),
                "a PNG, JPEG or TIFF file",
            )  # fmt: skip
        x = torch.from_numpy(found.x)[None].to(self._model.device)
        return replace(image, x=x, size=(found.width, found.height))


def _whole_box(size: tuple[int, int]) -> Box:
    return 0.0, 0.0, float(size[0]), float(size[1])
