"""One shard of a run: decoded images in, their rows and maps out; in this process, or as work for others and other machines."""

import logging
import math
import platform
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import closing
from dataclasses import dataclass, replace
from functools import cached_property, partial
from importlib import metadata
from typing import Any

import numpy as np
import PIL
import pyarrow as pa
import torch
from jaxtyping import Float, Int
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor
from torch.nn.functional import adaptive_avg_pool2d

from equicam import __version__
from equicam.core.transforms import Transform, canvas_size
from equicam.core.uncertainty import pearson
from equicam.core.views import Views, Window, transform_all
from equicam.engines.worker import ModelSource, Shard, SharedFolder, load_checked, load_preprocessing
from equicam.errors import EquicamError
from equicam.evaluate.equivariance import ANGLES, equivariance
from equicam.explain import explain_batch, start_explaining
from equicam.images.decoding import DecodedImage, DecoderPool, Preprocess, need_network
from equicam.images.files import file_digest
from equicam.images.formats import LevelPixels, to_rgb
from equicam.images.items import valid_utf8
from equicam.methods import resolve
from equicam.models.images import VisibleBoxes, as_batch, preprocessing_of
from equicam.models.preprocessing import LevelTable, read_steps
from equicam.models.surround import input_size, preprocess_pixels, window_levels
from equicam.rasters.windows import WindowPixels
from equicam.readers.model import Model
from equicam.reasons import Reason, describe
from equicam.recipe import Recipe
from equicam.runs.manifest import Manifest
from equicam.runs.store import ITEMS, MAPS, RunStore, StoredMaps
from equicam.runtime.executor import Executor
from equicam.runtime.pending import finish_in_order, numbers_of_levels, send_to_host, to_device
from equicam.shards import differences
from equicam.steadiness import judge

LOG = logging.getLogger(__name__)
Facts = dict[str, dict[str, Any]]
"""Columns of rows, by the id of the image."""


@dataclass(frozen=True)
class AuditContext:
    """What computes shards: the model on its device, the recipe, and the ids of the calibration subset."""

    model: Model
    recipe: Recipe
    calibration: frozenset[str]
    tile: int | None = None  # pixels a side of the windows of rasters
    target: int | None = None  # the class to explain; None: each image's top-1
    shard_size: int | None = None  # images that compiled calls are filled up to

    @staticmethod
    def of(manifest: Manifest, model: Model, calibration: frozenset[str]) -> "AuditContext":
        """The context of a run."""
        facts = manifest.tile, manifest.target, manifest.shard_size
        return AuditContext(model, manifest.recipe, calibration, *facts)

    @cached_property
    def executor(self) -> Executor:
        """Runs the recipe."""
        return Executor(self.model, self.recipe)

    @cached_property
    def views(self) -> Views:
        """The recipe's views."""
        return resolve(self.recipe).fusion.views

    @cached_property
    def grad_cam_executor(self) -> Executor:
        """Runs Grad-CAM, whose Eq is measured on the calibration subset: too few images to compile for."""
        return Executor(self.model, Recipe("grad-cam", dtype=self.recipe.dtype))

    @cached_property
    def window(self) -> Window | None:
        """The model's input in images with context."""
        if self.recipe.context != "auto":
            return None
        return Window((self.tile, self.tile) if self.tile else input_size(self.model))

    @cached_property
    def has_margin(self) -> bool:
        """Whether the model's preprocessing crops something away that can be used."""
        return read_steps(preprocessing_of(self.model)).has_margin

    def margin(self, image: DecodedImage) -> tuple[int, int]:
        """Rows and columns around the model's input that an image has, at the input's resolution."""
        if image.margin is not None:
            return image.margin
        box, rows, columns = image.input_box, image.height, image.width
        if self.window is None or not self.has_margin or box is None or rows is None or columns is None:
            return 0, 0
        (x0, y0, x1, y1), (height, width) = box, self.window.size
        canvas_rows, canvas_columns = canvas_size((height, width))
        most = ((canvas_rows - height) // 2, (canvas_columns - width) // 2)
        sides = (min(y0, rows - y1) * height / (y1 - y0), min(x0, columns - x1) * width / (x1 - x0))
        above, left = (max(0, min(round(side), kept)) for side, kept in zip(sides, most, strict=True))
        return above, left


def preprocess_to_array(model: Model, image: Any, context: str = "none") -> NDArray[np.float32]:
    """The model's input as an array, which other processes can be sent; with context, in its surround."""
    return np.ascontiguousarray(preprocess_pixels(model, image, context).float().numpy())


def compact_preprocessing(model: Model, context: str) -> Preprocess:
    """The same numbers as `preprocess_to_array`, as levels where that is possible."""
    table = read_steps(preprocessing_of(model)).levels if context == "none" else None
    return partial(_preprocess_compactly, model, context=context, table=table)


def _preprocess_compactly(
    model: Model, image: Image.Image | WindowPixels, context: str, table: LevelTable | None
) -> NDArray[np.float32] | LevelPixels:
    levels = None
    if isinstance(image, WindowPixels):
        levels = window_levels(model, image)
    elif table is not None:
        levels = table(to_rgb(image))
    return preprocess_to_array(model, image, context) if levels is None else levels


Tables = tuple[pa.Table, pa.Table]
"""Rows and maps of a shard."""


def compute_shard(context: AuditContext, decoded: Sequence[DecodedImage]) -> Tables:
    """Rows and maps of a shard; a bad image is a row in its place."""
    return start_shard(context, decoded)()


def compute_ahead(
    context: AuditContext, shards: Iterable[tuple[int, Sequence[DecodedImage]]]
) -> Iterator[tuple[int, Tables]]:
    """Each shard's number, rows and maps; a GPU computes the next shard while the rows of one are made."""
    started = ((number, start_shard(context, decoded)) for number, decoded in shards)
    return finish_in_order(started, context.executor.ahead)


def start_shard(context: AuditContext, decoded: Sequence[DecodedImage]) -> Callable[[], Tables]:
    """Start the device on a shard; the function returned waits for it and gives the rows and maps.

    The pixels of the images are on the device when this returns.
    """
    begun = time.perf_counter()
    good = [d for d in decoded if d.x is not None and d.reason is None]
    shapes = {d.x.shape for d in good if d.x is not None}
    if len(shapes) > 1:
        raise EquicamError(
            "preprocessing", "to bring every image to one size", sorted(shapes), "a crop or resize in it"
        )
    ids, margins = [d.item.id for d in good], [context.margin(d) for d in good]
    started: Callable[[], Explained] | None = None
    device, running = context.model.device, context.executor.context
    with running(device):  # it keeps constants: making one waits for the device
        if good:
            x = as_batch(context.model, _send(good, device), check=False)
            started = _start_each(context, x, ids, margins)
    spent = time.perf_counter() - begun

    def finish() -> Tables:
        begun = time.perf_counter()
        facts: Facts = {}
        maps: dict[str, StoredMaps] = {}
        reasons: dict[str, Reason] = {}
        if started is not None:
            with running(device):
                facts, maps, reasons = started()
        for d in decoded:
            if reason := d.reason or reasons.get(d.item.id):
                LOG.info("%r could not be explained: %s", d.item.id, describe(reason))
        seconds = (spent + time.perf_counter() - begun) / max(1, len(good))
        rows = [_row(d, facts.get(d.item.id, {}), reasons.get(d.item.id), seconds) for d in decoded]
        stored = [planes.to_row(name) for name, planes in maps.items()]
        return pa.Table.from_pylist(rows, schema=ITEMS), pa.Table.from_pylist(stored, schema=MAPS)

    return finish


def _send(images: Sequence[DecodedImage], device: torch.device) -> Float[Tensor, "b c H W"]:
    """The pixels of the images as a batch on a device: as levels that are looked up there, if all have the same table."""
    pixels = [d.x for d in images if d.x is not None]
    tables = [d.numbers for d in images]
    numbers = tables[0]
    if numbers is not None and all(table is not None and np.array_equal(table, numbers) for table in tables):
        return numbers_of_levels(to_device(pixels, device), numbers)
    converted = (
        x if table is None else LevelPixels(x, table).to_numbers()
        for x, table in zip(pixels, tables, strict=True)
    )
    return to_device([*converted], device)


Explained = tuple[Facts, dict[str, StoredMaps], dict[str, Reason]]
"""Columns and maps of images by id, and why others have none."""


def _start_each(
    context: AuditContext, x: Float[Tensor, "b c H W"], ids: Sequence[str], margins: Sequence[tuple[int, int]]
) -> Callable[[], Explained]:
    """Explain all in one batch; if the model refuses some image, explain each alone and give the refused a reason."""
    refused: EquicamError | None = None
    try:
        started = _start(context, x, ids, margins)
    except EquicamError as error:
        refused = error

    def finish() -> Explained:
        nonlocal refused
        if refused is None:
            try:
                return *started(), {}
            except EquicamError as error:
                refused = error
        facts: Facts = {}
        maps: dict[str, StoredMaps] = {}
        reasons: dict[str, Reason] = {}
        for i, name in enumerate(ids):
            try:
                some, stored = _start(context, x[i : i + 1], [name], margins[i : i + 1])()
                facts |= some
                maps |= stored
            except EquicamError as error:
                reasons[name] = Reason("refused", error.to_plain())
        if not maps:  # no single image is to blame
            raise refused
        return facts, maps, reasons

    return finish


def _row(d: DecodedImage, facts: dict[str, Any], refused: Reason | None, seconds: float) -> dict[str, Any]:
    reason, item = d.reason or refused, d.item
    row: dict[str, Any] = {"id": item.id, "path": valid_utf8(str(item.path.absolute())), "index": item.index}
    row["label"] = None if item.label is None else str(item.label)
    copied = ("sha256", "bytes", "mtime_ns", "width", "height", "input_box")
    row |= {name: getattr(d, name) for name in copied}
    row |= {**facts, "status": "bad" if reason else "ok", "seconds": d.seconds + (0 if reason else seconds)}
    if item.window is not None:
        row |= {name: getattr(item.window, name) for name in ("x", "y", "side")}
    if reason:
        return row | {"reason": reason.code, "reason_values": reason.to_row()["values"]}
    more = {"orientation-unread": d.as_stored, "nodata": d.nodata}
    row["flags"] = sorted([*row["flags"], *(flag for flag, is_set in more.items() if is_set)])
    return row


def _start(
    context: AuditContext, x: Float[Tensor, "b c H W"], ids: Sequence[str], margins: Sequence[tuple[int, int]]
) -> Callable[[], tuple[Facts, dict[str, StoredMaps]]]:
    started = start_explaining(
        context.executor, x, context.target, context.window, margins, pad_to=context.shard_size
    )
    # everything that is stored is computed on the device and sent for now; only `finish` waits for it
    tensors = {name: value for name, value in started.tensors.items() if name != "flags"}
    wanted = [i for i, name in enumerate(ids) if name in context.calibration]
    if wanted:
        tensors["eq"] = _single_view_eq(context, x[wanted], tensors["target"][wanted])
    size = (tensors["view_maps"].shape[-2], tensors["view_maps"].shape[-1])
    maps = (tensors["layer_map"], adaptive_avg_pool2d(tensors["peum"], size), tensors["view_maps"])
    tensors |= {f"stored_{i}": plane.float() for i, plane in enumerate(maps)}
    tensors["view_agreement"] = view_agreement(context.views, tensors["view_maps"])
    if "probabilities" in tensors:
        top = tensors["probabilities"].topk(min(5, tensors["probabilities"].shape[1]), dim=1)
        tensors |= {"top5": top.indices, "top5_confidence": top.values}
    arrived = send_to_host({name: value for name, value in tensors.items() if name not in NOT_STORED})

    def finish() -> tuple[Facts, dict[str, StoredMaps]]:
        e, host = started.finish(), arrived()
        facts = _facts(host, e.flags, context.views, ids)
        for row, i in enumerate(wanted):
            facts[ids[i]]["eq"] = float(host["eq"][row])
        arrays = [host[f"stored_{i}"].numpy() for i in range(len(maps))]
        return facts, {name: StoredMaps(*(a[i] for a in arrays)) for i, name in enumerate(ids)}

    return finish


NOT_STORED = {"map", "raw", "peum", "probabilities", "layer_map", "view_maps"}
"""Tensors of an explanation that are large, or stored in another form."""


def _facts(host: Mapping[str, Tensor], flags: Sequence[Set[str]], views: Views, ids: Sequence[str]) -> Facts:
    lists = {name: value.tolist() for name, value in host.items() if not name.startswith("stored_")}
    presented, labels = views.presented, views.labels
    by_view = zip(lists["stability_by_view"], lists["view_top1"], flags, strict=True)
    judged = [judge(values, top1, labels, flagged, presented) for values, top1, flagged in by_view]
    copied = ("target", "peum_score", "stability_by_view", "view_top1", "view_agreement")
    absent: dict[str, Any] = {"output": None, "top5": [], "top5_confidence": []}
    columns: dict[str, list[Any]] = {name: lists[name] for name in copied}
    columns |= {name: lists.get(name, [value] * len(ids)) for name, value in absent.items()}
    columns |= {
        "confidence": _nulls(lists["confidence"]),
        "stability": _nulls(lists["stability"]),
        "flip_rate": host["view_flips"].double().mean(1).tolist(),
        "views_kept": host["view_kept"].sum(1).tolist(),
        "view_confidence": list(map(_nulls, lists["view_confidence"])),
        "flags": list(map(sorted, flags)),
        "steadiness": [judgement.word for judgement in judged],
        "steadiness_reason": [judgement.reason.code for judgement in judged],
    }
    return {name: {key: values[i] for key, values in columns.items()} for i, name in enumerate(ids)}


def _nulls(values: Sequence[float]) -> list[float | None]:
    """Null where undefined, as for a single view or the confidence of a value."""
    return [None if math.isnan(value) else value for value in values]


def view_agreement(views: Views, view_maps: Float[Tensor, "b t h w"]) -> Float[Tensor, "b t"]:
    """Pearson of each view's aligned map with the mean of the others, at layer resolution inside the disc.

    It is 0 where either is flat, and 1 for a lone view.
    """
    aligned = views.align(view_maps.transpose(0, 1), "reflect").transpose(0, 1)
    count = aligned.shape[1]
    if count == 1:
        return torch.ones(aligned.shape[:2], dtype=torch.float64, device=aligned.device)
    others = (aligned.sum(1, keepdim=True) - aligned) / (count - 1)
    return pearson(aligned, others, "disc", views.radius).diagonal(dim1=-2, dim2=-1)


def _single_view_eq(
    context: AuditContext, x: Float[Tensor, "b c H W"], target: Int[Tensor, " b"]
) -> Float[Tensor, " b"]:
    """Disc Eq of Grad-CAM over the seven angles: the measurement that signals are compared with."""
    angles = (0, *ANGLES)
    if context.window is None:
        presented = transform_all(x, angles).flatten(0, 1)
    else:  # one look at the surround for each angle
        windows = (Window(context.window.size, Transform(angle)) for angle in angles)
        presented = torch.cat([Views([0]).act(x, window)[0] for window in windows])
    maps = explain_batch(context.grad_cam_executor, presented, target.repeat(len(angles))).map
    maps = maps.reshape(len(angles), len(x), *maps.shape[-2:])
    return equivariance(maps[1:], maps[0], ANGLES).value.mean(0)


@dataclass(frozen=True)
class AuditJob:
    """The recipe of a run and everything a worker needs to compute shards of it."""

    folder: SharedFolder
    manifest: Manifest
    calibration: frozenset[str]
    model_source: ModelSource
    preprocessing: Model | None  # the model without weights; None: each worker loads it
    workers: int  # decoding processes
    image_bytes: int  # of one preprocessed image

    @property
    def shard_bytes(self) -> int:
        """Approximate memory of the decoded images of a shard."""
        return self.manifest.shard_size * self.image_bytes

    def decode(self, shard: Shard) -> list[DecodedImage]:
        """The images of a shard, decoded by a child process: its limits and its death are not this process's."""
        _, items = shard
        network = need_network([items])
        if network not in self._lone_decoders:
            self._lone_decoders[network] = self._decoders(1, network=network)
        (decoded,) = self._lone_decoders[network].decode_shards([items])
        # copied, because the next shard's pixels take their place
        return [d if d.x is None else replace(d, x=d.x.copy()) for d in decoded]

    def decode_ahead(self, shards: Sequence[Shard]) -> Iterator[list[DecodedImage]]:
        """Shards decoded by child processes, ahead of the caller."""
        network = need_network(items for _, items in shards)
        with closing(self._decoders(self.workers, network=network)) as decoders:
            yield from decoders.decode_shards([items for _, items in shards])

    def prepare(self, device: str) -> Callable[[int, list[DecodedImage]], dict[str, str]]:
        """Load the model, refuse versions or weights that would give other rows, and return the computation."""
        store = RunStore(self.folder.enter())
        manifest, recorded = self.manifest, dict(self.manifest.versions)
        here = dict(versions(rasters=manifest.tiling is not None, dicom="pydicom" in recorded))
        if others := differences(recorded, here):
            raise EquicamError(
                "a worker", "the versions the run was started with", "; ".join(others), "the same everywhere"
            )
        model = load_checked(self.model_source, device, manifest.weights)
        model = replace(model, task=manifest.task)  # a name alone does not say it
        context = AuditContext.of(manifest, model, self.calibration)

        def compute(number: int, decoded: list[DecodedImage]) -> dict[str, str]:
            # another worker may have written this shard after being presumed dead; keep it
            if not store.has_shard(number):
                items, maps = compute_shard(context, decoded)
                if not store.has_shard(number):
                    return store.write_shard(number, items, maps)
            return {kind: file_digest(store.path(kind, number)) for kind in ("items", "maps")}

        return compute

    @cached_property
    def _lone_decoders(self) -> dict[bool, DecoderPool]:
        """One child process for all shards that this process decodes, and one for those at URLs; they end with this process."""
        return {}

    def _decoders(self, workers: int, *, network: bool) -> DecoderPool:
        model = self.preprocessing or load_preprocessing(self.model_source)
        preprocess = compact_preprocessing(model, self.manifest.recipe.context)
        sizes = {"image_bytes": self.image_bytes, "shard_size": self.manifest.shard_size}
        return DecoderPool(preprocess, VisibleBoxes(model), workers=workers, network=network, **sizes)


READERS = ("openslide-python", "openslide-bin", "tifffile", "imagecodecs", "rasterio")
"""The libraries that read rasters."""


def versions(*, rasters: bool = False, dicom: bool = False) -> tuple[tuple[str, str], ...]:
    """The versions that decide rows; those of readers only where there are rasters or DICOM images."""
    readers = (READERS if rasters else ()) + (("pydicom",) if dicom else ())
    return (
        *((name, _version(name)) for name in readers),
        ("equicam", __version__),
        ("python", platform.python_version()),
        ("torch", torch.__version__),
        ("torchvision", metadata.version("torchvision")),
        ("numpy", np.__version__),
        ("pillow", PIL.__version__),
    )


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "not installed"
