"""Maps of an image at any angle. Every one is computed by the model on the rotated image; no map is rotated to be shown.

One thread explains, because a module may be explained from one thread at a time. A newer request ends an older one that
needs several forward passes, so that the page never waits for a map that nobody looks at any more.
"""

import hashlib
import math
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from jaxtyping import Float
from torch import Tensor

from equicam.core.views import rotate
from equicam.drawing.text import FLAGS, visible
from equicam.drawing.view_curve import view_curve
from equicam.errors import EquicamError
from equicam.evaluate.equivariance import equivariance
from equicam.explain import Explanation, explain
from equicam.live.images import OpenedImage, OpenedImages
from equicam.methods import METHODS
from equicam.models.images import denormalise
from equicam.models.layers import spatial_layers
from equicam.overlay import MAX_DEVIATION
from equicam.readers.model import Model
from equicam.readers.names import output_name
from equicam.reasons import describe
from equicam.runs.review.images import Encoded, encode_input, encode_layer

T = TypeVar("T")
LIVE_METHODS = tuple(name for name, method in METHODS.items() if method.reader.one_pass)
"""Methods that read a view in one pass: others take too long to follow a dial."""
MAX_VIEWS = 72
MAX_CACHE_BYTES = 128 << 20
TOP_CLASSES = 5
CPU_VIEWS_PER_FORWARD = 3
"""Small passes can be ended early, and on a CPU they are as fast as large ones."""


class SupersededError(EquicamError):
    """A newer request has come."""

    def __init__(self) -> None:
        super().__init__("a map", needs="the newest request", got="an older one", fix="the newest")


@dataclass(frozen=True)
class Settings:
    """What is explained, and how; everything but the angle."""

    image: str
    target: int
    layer: str
    method: str
    views: int


@dataclass(frozen=True)
class Frame:
    """A map at one angle, as layers to lie over the image, and plain facts about it."""

    key: str
    map: Float[np.ndarray, "H W"] = field(repr=False)
    layers: dict[str, Encoded] = field(repr=False)
    facts: dict[str, Any]

    @property
    def bytes(self) -> int:
        """Its size in memory."""
        return self.map.nbytes + sum(len(data) for data, _ in self.layers.values())


def single_view_method(method: str) -> str:
    """The method that reads the presented view as this one reads each of its views."""
    row = METHODS[method]
    return next(
        name
        for name, one in METHODS.items()
        if len(one.fusion.views) == 1 and one.reader is row.reader and one.combine is row.combine
    )


class FrameComputer:
    """Explains images at angles in a thread of its own, and keeps what it computed."""

    def __init__(self, model: Model, paths: Sequence[Path] = ()) -> None:
        self.model, self.images = model, OpenedImages(model, paths)
        self.layers = _find_layers(model)
        self._thread = ThreadPoolExecutor(1, "explain")
        self._newest = 0  # the number of the newest request; they come from one thread, that of the server
        self._lock = threading.Lock()
        self._frames: OrderedDict[str, Frame] = OrderedDict()
        self._bytes = 0

    def close(self) -> None:
        """End the work in progress."""
        self._newest += 1
        self._thread.shutdown(wait=False, cancel_futures=True)

    def run(self, work: Callable[..., T], *arguments: Any) -> "Future[T]":
        """Work that needs the model or forks, after what was submitted before; running work of many passes ends."""
        self._newest += 1
        return self._thread.submit(work, *arguments)

    def submit(self, settings: Settings, angle: int) -> "Future[Frame]":
        """The frame at an angle; an older request of several views ends with a SupersededError."""
        return self.run(self._frame, settings, angle, self._newest + 1)

    def find(self, key: str) -> Frame | None:
        """A frame that is still kept."""
        with self._lock:
            if key in self._frames:
                self._frames.move_to_end(key)
            return self._frames.get(key)

    def describe_image(self, id_: str) -> dict[str, Any]:
        """An image, decoded now if need be, and its most probable classes, none of values; only in the model's thread."""
        image, top, found = self.images.open(id_), [], None
        if self.model.has_probabilities:
            found = explain_pixels(self.model, image.pixels, method="grad-cam", views=1).probabilities
        if found is not None:
            best = found[0].topk(min(TOP_CLASSES, found.shape[1]))
            for index, confidence in zip(best.indices.tolist(), best.values.tolist(), strict=True):
                top.append({"index": index, "name": class_name(self.model, index), "confidence": confidence})
        height, width = image.pixels.shape[-2:]
        return {
            "id": id_, "name": visible(image.name, 120), "size": image.size, "input": [width, height], "top": top
        }  # fmt: skip

    def _frame(self, settings: Settings, angle: int, number: int) -> Frame:
        key = hashlib.blake2b(repr((settings, angle)).encode(), digest_size=12).hexdigest()
        if (kept := self.find(key)) is not None:
            return kept
        presented = None if angle == 0 else self._frame(settings, 0, number).map
        x = rotate(self.images.open(settings.image).pixels, angle)
        with self._ended_by_newer(number) if settings.views > 1 else nullcontext():
            found = explain_pixels(
                replace(self.model, layer=settings.layer), x, method=settings.method, views=settings.views,
                target=settings.target,
            )  # fmt: skip
        made = make_frame(self.model, key, settings, angle, found, presented)
        with self._lock:
            self._frames[key] = made
            self._bytes += made.bytes
            while self._bytes > MAX_CACHE_BYTES and len(self._frames) > 1:
                _, dropped = self._frames.popitem(last=False)
                self._bytes -= dropped.bytes
        return made

    @contextmanager
    def _ended_by_newer(self, number: int) -> Iterator[None]:
        """Within it a forward pass of the model raises a SupersededError once a newer request has come."""

        def check(*_: Any) -> None:
            if number != self._newest:
                raise SupersededError

        check()
        handle = self.model.module.register_forward_pre_hook(check)
        try:
            yield
        finally:
            handle.remove()


def _find_layers(model: Model) -> list[str]:
    """The names of the layers that a map can be read from."""
    try:
        found = spatial_layers(model.module)
    except EquicamError:  # it does not run on zeros of the usual size
        found = []
    return list(dict.fromkeys([*found, model.layer]))


def explain_pixels(model: Model, x: Float[Tensor, "1 c H W"], **options: Any) -> Explanation:
    """Explain one image, in passes that can be ended early."""
    passes = CPU_VIEWS_PER_FORWARD if model.device.type == "cpu" else None
    return explain(model, x, max_views_per_forward=passes, **options)


def make_frame(
    model: Model,
    key: str,
    settings: Settings,
    angle: int,
    found: Explanation,
    presented: Float[np.ndarray, "H W"] | None,
) -> Frame:
    """The layers and facts of an explanation; `presented` is the map at 0°, None if this is the one."""
    values = found.map[0].float().cpu().numpy()
    layers = {"map": encode_layer(values)}
    top1 = int(found.probabilities[0].argmax()) if found.probabilities is not None else settings.target
    facts: dict[str, Any] = {
        "key": key,
        "angle": angle,
        "method": settings.method,
        "eq": 1.0 if presented is None else compute_eq(found.map, presented, angle),
        "confidence": _finite(found.confidence[0]),
        "value": None if model.has_probabilities or found.output is None else _finite(found.output[0]),
        "top1": {"index": top1, "name": class_name(model, top1)},
        "flags": {name: FLAGS.get(name, "") for name in sorted(found.flags[0])},
    }
    if settings.views > 1:
        deviation = np.sqrt(np.maximum(found.peum[0].float().cpu().numpy(), 0)) / MAX_DEVIATION
        layers["peum"] = encode_layer(np.clip(deviation, 0, 1))
        steadiness = found.steadiness[0]
        by_view = [value if math.isfinite(value) else None for value in found.stability_by_view[0].tolist()]
        facts |= {
            "peum_score": _finite(found.peum_score[0]) if found.has_peum[0] else None,
            "stability": _finite(found.stability[0]),
            "flips": int(found.view_flips[0].sum()),
            "views": len(found.views),
            "steadiness": {"word": steadiness.word, "reason": describe(steadiness.reason)},
            "curve": str(view_curve(found.views.transforms, by_view)),
        }
    return Frame(key, values, layers, facts)


def compute_eq(
    rotated: Float[Tensor, "1 H W"], presented: Float[np.ndarray, "H W"], angle: int
) -> float | None:
    """Eq: Pearson of the map of the rotated image with the rotated map of the presented one; None for a constant map."""
    reference = rotated.new_tensor(presented)[None]
    eq = equivariance(rotated[None], reference, [angle])
    return None if bool(eq.constant[0, 0]) else _finite(eq.value[0, 0])


def render_input(model: Model, image: OpenedImage, angle: int) -> Encoded:
    """The image that the model sees at this angle."""
    return encode_input(denormalise(rotate(image.pixels, angle), model.mean, model.std)[0])


def class_name(model: Model, index: int) -> str:
    """The name of a class or value; its number where it has none."""
    return output_name(index, model.classes, model.task)


def _finite(value: Tensor) -> float | None:
    number = float(value)
    return number if math.isfinite(number) else None
