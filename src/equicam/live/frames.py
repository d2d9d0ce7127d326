"""Maps of an image at any angle. Every one is computed by the model on the rotated image; no map is rotated to be shown.

One thread explains, because a module may be explained from one thread at a time. A newer request ends an older one that
needs several forward passes, so that the page never waits for a map that nobody looks at any more.
"""

import hashlib
import math
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from jaxtyping import Float
from torch import Tensor, nn

from equicam.core.views import rotate
from equicam.drawing.text import FLAGS
from equicam.drawing.view_curve import view_curve
from equicam.errors import EquicamError
from equicam.evaluate.equivariance import equivariance
from equicam.explain import Explanation, explain
from equicam.live.images import OpenedImage
from equicam.methods import METHODS
from equicam.models.images import to_display_images
from equicam.models.layers import spatial_layers
from equicam.overlay import MAX_DEVIATION
from equicam.readers.classes import output_name
from equicam.readers.model import Model
from equicam.reasons import describe
from equicam.runs.review.images import Encoded, encode_input, encode_layer

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

    def single(self) -> "Settings":
        """The same on the presented view alone."""
        return replace(self, method=single_view_method(self.method), views=1)


@dataclass(frozen=True)
class Frame:
    """A map at one angle, as layers to lie over the image, and plain facts about it."""

    key: str
    map: Float[np.ndarray, "H W"] = field(repr=False)
    layers: dict[str, Encoded] = field(repr=False)
    facts: dict[str, Any]


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

    def __init__(self, model: Model) -> None:
        self.model = model
        self._thread = ThreadPoolExecutor(1, "explain")
        self._lock = threading.Lock()
        self._newest = 0
        self._frames: OrderedDict[str, Frame] = OrderedDict()
        self._bytes = 0

    def close(self) -> None:
        """End the work in progress."""
        with self._lock:
            self._newest += 1
        self._thread.shutdown(wait=False, cancel_futures=True)

    def run(self, work: Callable[[], Any]) -> "Future[Any]":
        """Work that needs the model or forks, after what was submitted before; running work of many passes ends."""
        with self._lock:
            self._newest += 1
        return self._thread.submit(work)

    def submit(self, image: OpenedImage, settings: Settings, angle: int) -> "Future[Frame]":
        """The frame at an angle; an older request of several views ends with a SupersededError."""
        with self._lock:
            self._newest += 1
            number = self._newest
        return self._thread.submit(self._frame, image, settings, angle, number)

    def find(self, key: str) -> Frame | None:
        """A frame that is still kept."""
        with self._lock:
            if key in self._frames:
                self._frames.move_to_end(key)
            return self._frames.get(key)

    def layers(self) -> list[str]:
        """The names of the layers that a map can be read from."""
        try:
            found = spatial_layers(self.model.module)
        except EquicamError:  # it does not run on zeros of the usual size
            found = []
        return list(dict.fromkeys([*found, self.model.layer]))

    def top_classes(self, image: OpenedImage) -> list[dict[str, Any]]:
        """The most probable classes of the presented image, none of values; runs the model, so only in its thread."""
        if not self.model.has_probabilities:
            return []
        found = explain_pixels(self.model, pixels_of(image), method="grad-cam", views=1)
        if found.probabilities is None:
            return []
        best = found.probabilities[0].topk(min(TOP_CLASSES, found.probabilities.shape[1]))
        pairs = zip(best.indices.tolist(), best.values.tolist(), strict=True)
        return [{"index": i, "name": class_name(self.model, i), "confidence": p} for i, p in pairs]

    def _frame(self, image: OpenedImage, settings: Settings, angle: int, number: int) -> Frame:
        key = _key(settings, angle)
        if (kept := self.find(key)) is not None:
            return kept
        presented = None if angle == 0 else self._frame(image, settings, 0, number)
        x = pixels_of(image)
        with self._ended_by_newer(number if settings.views > 1 else None):
            found = explain_pixels(
                replace(self.model, layer=settings.layer), x if angle == 0 else rotate(x, angle),
                method=settings.method, views=settings.views, target=settings.target,
            )  # fmt: skip
        made = make_frame(
            self.model, key, settings, angle, found, None if presented is None else presented.map
        )
        self._keep(made)
        return made

    @contextmanager
    def _ended_by_newer(self, number: int | None) -> Iterator[None]:
        """Within it a forward pass of the model raises a SupersededError once a newer request has come."""

        def check(*_: Any) -> None:
            if number is not None and number != self._newest:
                raise SupersededError

        check(None)
        module: nn.Module = self.model.module
        handle = module.register_forward_pre_hook(check)
        try:
            yield
        finally:
            handle.remove()

    def _keep(self, frame: Frame) -> None:
        with self._lock:
            self._frames[frame.key] = frame
            self._bytes += _size(frame)
            while self._bytes > MAX_CACHE_BYTES and len(self._frames) > 1:
                _, dropped = self._frames.popitem(last=False)
                self._bytes -= _size(dropped)


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
    x = pixels_of(image)
    return encode_input(to_display_images(model, x if angle == 0 else rotate(x, angle))[0])


def class_name(model: Model, index: int) -> str:
    """The name of a class or value; its number where it has none."""
    return output_name(index, model.classes, model.task)


def pixels_of(image: OpenedImage) -> Float[Tensor, "1 c H W"]:
    """The model's input."""
    if image.x is None:
        raise EquicamError(
            "an image", needs="to be decoded", got="one that is not yet", fix="opening it first"
        )
    return image.x


def _key(settings: Settings, angle: int) -> str:
    return hashlib.blake2b(repr((settings, angle)).encode(), digest_size=12).hexdigest()


def _size(frame: Frame) -> int:
    return frame.map.nbytes + sum(len(data) for data, _ in frame.layers.values())


def _finite(value: Tensor) -> float | None:
    number = float(value)
    return number if math.isfinite(number) else None
