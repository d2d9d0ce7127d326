"""Everything that makes a run reproducible, as plain data: `manifest.json`."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from equicam.core.transforms import Transform, as_transform, canvas_size, presented_index
from equicam.errors import EquicamError
from equicam.images.dicom import MAX_VALUE
from equicam.images.files import AnyPath, is_url, may_open
from equicam.images.items import Item
from equicam.rasters.options import RasterWindow, Tiling
from equicam.readers.names import Task, is_library_model, output_name, weights_file
from equicam.recipe import MAX_VIEWS, Recipe
from equicam.shards import differences, from_plain, parse_object, shorten

SCHEMA_VERSION = 2
LARGEST = 1e6  # of a view's numbers


@dataclass(frozen=True)
class Manifest:
    """Everything that decides the rows of a run."""

    recipe: Recipe  # how images are explained; its views are those of the run, its fill is never None
    method_description: str  # reader, combine, views, fusion and weights behind the method's name
    model: str | None  # the name given to `load`; None: a module of the caller's
    weights: str  # SHA-256 over its tensors
    weights_from: str | None  # the file or name they came from
    layer: str
    layout: str
    preprocessing: str
    classes: tuple[str, ...] | None
    dtype: str  # the type the network runs in
    device: str  # its kind: cpu or cuda
    shard_size: int  # images in a shard
    calibration_size: int  # images on which Eq is measured
    source: str
    split: str | None
    images: int
    data: str  # digest of ids, labels, boxes and order
    versions: tuple[tuple[str, str], ...]
    voi: tuple[float, float] | None = None  # the window (centre, width) of DICOM images, instead of their own
    tiling: Tiling | None = None  # how rasters were cut into windows
    target: int | None = None  # the class explained in every image; None: each image's top-1
    task: Task | None = None  # what the model's outputs are; None: multiclass, or binary where there is one
    # size, crop, mean and std, instead of the model's own
    given_preprocessing: Mapping[str, Any] | None = None

    @cached_property
    def transforms(self) -> tuple[Transform, ...]:
        """The views."""
        return tuple(map(as_transform, self.recipe.views))

    @property
    def labels(self) -> tuple[str, ...]:
        """The views for people."""
        return tuple(view.label for view in self.transforms)

    @property
    def tile(self) -> int | None:
        """Model pixels a side of the windows of rasters."""
        return self.tiling.tile if self.tiling else None

    @property
    def margin(self) -> int:
        """Model pixels around a window that were read with it."""
        return 0 if self.tiling is None else margin_of(self.tiling, self.recipe.context)

    def item_of(self, row: Mapping[str, Any], path: AnyPath) -> Item:
        """The item that a row is of."""
        window = None
        if self.tiling is not None and row.get("side") is not None:
            window = RasterWindow(row["x"], row["y"], row["side"], self.tiling, self.margin)
        return Item(row["id"], path, index=row.get("index"), window=window, voi=self.voi)

    @property
    def has_values(self) -> bool:
        """Whether values are explained, which have no confidence, and not classes."""
        return self.task == "regression"

    def output_name(self, target: int | None) -> str:
        """The name of a class or value that was explained; without a target there is only one value to explain."""
        return output_name(target, self.classes, self.task, is_only=self.target is None)

    @property
    def presented(self) -> int | None:
        """The index of the presented view, if it is among them."""
        return presented_index(self.transforms)

    def reload_options(self) -> dict[str, str] | None:
        """What a command must name to load model, weights and images again; None: only Python has the model.

        They are the files, code and addresses that the run names and nothing opens unless the user names them.
        """
        if self.model is None:
            return None
        named = {
            "--model": None if is_library_model(self.model) else self.model,
            "--weights": None if weights_file(self.weights_from) is None else self.weights_from,
            "--source": self.source if is_url(self.source) and not may_open(self.source, Path()) else None,
        }
        return {option: value for option, value in named.items() if value is not None}

    def to_json(self) -> dict[str, Any]:
        """Plain values that JSON keeps."""
        plain: dict[str, Any] = json.loads(json.dumps(asdict(replace(self, recipe=Recipe()))))
        return {"schema": SCHEMA_VERSION} | plain | {"recipe": self.recipe.to_json()}

    def dumps(self) -> str:
        """Indented, and the same text for the same run."""
        return json.dumps(self.to_json(), indent=1, ensure_ascii=False)


def margin_of(tiling: Tiling, context: str) -> int:
    """Model pixels around a window that views of this context need."""
    return 0 if context == "none" else (canvas_size((tiling.tile, tiling.tile))[0] - tiling.tile) // 2


def parse_manifest(text: str | bytes, *, where: str) -> Manifest:
    """A manifest read back; that of a version with another layout is refused."""
    try:
        plain = parse_object(text)
        if plain.get("schema") != SCHEMA_VERSION:
            raise EquicamError(
                f"the run {where}", f"schema version {SCHEMA_VERSION}", plain.get("schema"),
                "equicam audit again with another --out, or the equicam version that wrote it",
            )  # fmt: skip
        manifest: Manifest = from_plain(Manifest, plain)
        if not manifest.shard_size or not _is_voi(manifest.voi):
            raise ValueError(f"shard_size = {manifest.shard_size}, voi = {manifest.voi}")
        if not are_views(manifest.recipe.views) or not isinstance(manifest.recipe.method, str):
            raise ValueError(f"recipe = {shorten(plain['recipe'])}")
        return manifest
    except EquicamError:
        raise
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise EquicamError(f"the run {where}", "a manifest.json of ours", error, "another RUN") from error


def are_views(value: object) -> bool:
    """Whether a manifest may hold these plain values of views: numbers are bounded, so that pixels stay finite."""
    return isinstance(value, tuple) and 1 <= len(value) <= MAX_VIEWS and all(map(_is_view, value))


def _is_view(value: object) -> bool:
    """An angle, or angle, mirrored, scale and shift."""
    angle, mirrored, scale, *shift = (
        value if isinstance(value, tuple) and len(value) == 5 else (value, False, 1, 0, 0)
    )
    numbers = all(
        isinstance(v, int | float) and not isinstance(v, bool) and -LARGEST <= v <= LARGEST
        for v in (angle, scale, *shift)
    )
    return numbers and isinstance(mirrored, bool) and scale >= 1 / LARGEST


def _is_voi(voi: tuple[float, float] | None) -> bool:
    """Centre and width of a window of DICOM images, or none."""
    return voi is None or (all(-MAX_VALUE <= number <= MAX_VALUE for number in voi) and voi[1] >= 1)


DERIVED = ("method_description ", "transforms ")
"""Fields that follow from the method and the views a user chose."""


def refuse_difference(before: Manifest, now: Manifest, *, where: str) -> None:
    """Another model, method, option or set of images cannot continue this run."""
    changes = differences(_comparable(before), _comparable(now))
    if changes:
        chosen = [change for change in changes if not change.startswith(DERIVED)]
        raise EquicamError(
            f"resuming {where}", "the settings it was started with", "; ".join(chosen or changes), "another --out, or those settings",
        )  # fmt: skip


def _comparable(manifest: Manifest) -> dict[str, Any]:
    """Flat, and without where the same weights or images lie."""
    plain = manifest.to_json()
    recipe = plain.pop("recipe")
    del plain["source"], plain["weights_from"]
    return {f"recipe.{name}" if name in plain else name: value for name, value in recipe.items()} | plain
