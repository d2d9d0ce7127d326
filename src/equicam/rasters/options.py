"""What a model's input is made of and how rasters are cut into windows: plain data, stated by people and never guessed."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

from equicam.errors import EquicamError

MAX_TILE = 4096
LARGEST = 1e12
"""Of any number: a manifest may have been written by anybody."""


@dataclass(frozen=True)
class Input:
    """What the channels of a model are, where rasters have more than 8-bit RGB; a None is filled in by the model or the file.

    Bands may be given as "4,3,2" or as a list, and are kept as a tuple of text; mean and std as a tuple of numbers.
    """

    bands: Any = None  # by name, or by number from 1; None: the file's, which must be red, green, blue
    scale: int | float | None = None  # divides values before mean and std; None: 255, of 8-bit files only
    mean: Any = None
    std: Any = None
    mpp: int | float | None = None  # micrometres a pixel of slides, units a pixel of maps; None: as stored
    display: Any = None  # one or three bands for people; None: the first three of `bands`

    def __post_init__(self) -> None:
        for name in ("bands", "display"):
            value = getattr(self, name)
            if isinstance(value, str):
                value = [part.strip() for part in value.split(",")]
            found = None if value is None else tuple(str(one) for one in value)
            if found is not None and (not found or not all(found) or len(found) > 4096):
                raise EquicamError(name, "names or numbers of bands", repr(value)[:80], "4,3,2")
            object.__setattr__(self, name, found)
        if self.display is not None and len(self.display) not in (1, 3):
            raise EquicamError("display", "one or three bands", len(self.display), "4,3,2")
        for name in ("mean", "std"):
            value = getattr(self, name)
            numbers = None if value is None else tuple(map(float, value))
            object.__setattr__(self, name, numbers)
            if not all(map(math.isfinite, numbers or ())):
                raise EquicamError(name, "finite numbers", value, "one for each band")
        if self.std is not None and min(self.std, default=1) <= 0:
            raise EquicamError("std", "numbers above 0", self.std, "one for each band")
        for name in ("scale", "mpp"):
            _positive(name, getattr(self, name))

    def or_else(self, other: "Input | None") -> "Input":
        """Itself, with what it leaves open taken from another."""
        if other is None:
            return self
        open_ = {f.name: getattr(other, f.name) for f in fields(self) if getattr(self, f.name) is None}
        return replace(self, **open_)


@dataclass(frozen=True)
class Tiling:
    """How rasters become windows: their size in the model's pixels, where they lie, and which are left out."""

    tile: int  # pixels a side of what the model sees
    stride: int | str = "tile"  # model pixels to the next window; disc: the inscribed discs cover the plane
    tissue: int | float = 0.0  # least share of a slide's window that is tissue
    valid: int | float = 0.5  # least share of a window that has data
    mpp_is: int | float | None = None  # of rasters that do not say theirs
    regions: str | None = None  # GeoJSON file: windows whose centre lies in one of its areas
    input: Input = field(default_factory=Input)

    def __post_init__(self) -> None:
        if not isinstance(self.tile, int) or not 2 <= self.tile <= MAX_TILE:
            raise EquicamError("tile", f"2 to {MAX_TILE} pixels", self.tile, "tile=224")
        in_pixels = isinstance(self.stride, int) and 1 <= self.stride <= MAX_TILE
        if self.stride not in ("tile", "disc") and not in_pixels:
            raise EquicamError("stride", "disc, or a number of pixels", repr(self.stride), 'stride="disc"')
        for name in ("tissue", "valid"):
            if not 0 <= getattr(self, name) <= 1:
                raise EquicamError(name, "a share from 0 to 1", getattr(self, name), f"{name}=0.1")
        _positive("mpp_is", self.mpp_is)

    @property
    def step(self) -> int:
        """Model pixels from one window to the next."""
        if self.stride == "disc":
            return int(self.tile / math.sqrt(2))
        return self.tile if self.stride == "tile" else int(self.stride)

    def to_json(self) -> dict[str, Any]:
        """Plain values that JSON keeps."""
        return asdict(self)

    @staticmethod
    def from_json(found: Mapping[str, Any]) -> "Tiling":
        """The tiling that `to_json` wrote; any other value is refused."""
        given = Input(**found["input"])
        return Tiling(**{**{f.name: found[f.name] for f in fields(Tiling)}, "input": given})


@dataclass(frozen=True)
class RasterWindow:
    """A square of a raster that a model sees, with all that is needed to read it again."""

    x: int | float  # its left and top in pixels of level 0
    y: int | float
    side: int | float  # in pixels of level 0; 0: the raster could not be opened, and reading says why
    tiling: Tiling
    margin: int = 0  # model pixels around it that rotated views need


def window_id(raster: str, window: RasterWindow) -> str:
    """The id of a window: raster, place, size and resolution."""
    mpp = window.tiling.input.mpp
    resolution = "" if mpp is None else f",mpp={mpp:g}"
    return f"{raster}#x={_number(window.x)},y={_number(window.y)},s={window.tiling.tile}{resolution}"


def raster_id(item_id: str) -> str:
    """The id of the raster that a window is of; of an image, its own."""
    return item_id.rpartition("#x=")[0] or item_id


def _number(value: int | float) -> str:
    """To a thousandth of a pixel."""
    return f"{value:.3f}".rstrip("0").rstrip(".")


def _positive(name: str, value: int | float | None) -> None:
    if value is not None and not 0 < value < LARGEST:
        raise EquicamError(name, "a number above 0", value, f"{name}=0.5")
