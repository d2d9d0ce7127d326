"""Recipe files: how images are cut, explained and computed, in TOML; what is typed on the command line wins."""

import json
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from equicam.errors import EquicamError, not_one_of
from equicam.recipe import MAX_VIEWS, Recipe

if TYPE_CHECKING:
    from equicam.core.views import Views
    from equicam.rasters.options import Tiling
    from equicam.readers.model import Model

MAX_BYTES = 1 << 16
LARGEST = 1e12  # of any number
NAMED_VIEWS = {"dihedral": "dihedral:18", "scales": "scales:0.8,1,1.25", "shifts": "shifts:0.05"}
"""Sets of views that have a name, as they are typed."""


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and -LARGEST < value < LARGEST


_INTEGER, _COUNT, _NUMBER = "a whole number", "a whole number from 1 on", "a number"
_TEXT, _SWITCH = "text", "true or false"
_NUMBERS, _NAMES = "a list of numbers", "a list of names"
_KINDS: dict[str, Callable[[Any], bool]] = {
    _INTEGER: lambda value: type(value) is int and _is_number(value),
    _COUNT: lambda value: type(value) is int and 1 <= value < LARGEST,
    _NUMBER: _is_number,
    _TEXT: lambda value: isinstance(value, str),
    _SWITCH: lambda value: isinstance(value, bool),
    _NUMBERS: lambda value: isinstance(value, list) and all(map(_is_number, value)),
    _NAMES: lambda value: isinstance(value, list) and all(isinstance(one, str) for one in value),
}
SECTIONS: dict[str, dict[str, tuple[str, ...]]] = {
    "recipe": {
        "method": (_TEXT,), "views": (_INTEGER, _TEXT, _NUMBERS), "fill": (_TEXT,), "protocol": (_TEXT,), "context": (_TEXT,),
        "tau": (_NUMBER,), "gamma": (_NUMBER,), "dtype": (_TEXT,), "compiled": (_SWITCH,), "seed": (_INTEGER,),
    },
    "tiling": {
        "tile": (_INTEGER,), "stride": (_INTEGER, _TEXT), "mpp": (_NUMBER,), "mpp_is": (_NUMBER,), "bands": (_TEXT, _NAMES),
        "scale": (_NUMBER,), "display": (_TEXT, _NAMES), "tissue": (_NUMBER,), "valid": (_NUMBER,), "regions": (_TEXT,),
    },
    "preprocessing": {
        "size": (_COUNT,), "crop": (_COUNT,), "mean": (_NUMBER, _NUMBERS), "std": (_NUMBER, _NUMBERS), "voi": (_NUMBERS,),
    },
    "model": {"layer": (_TEXT,), "classes": (_NAMES,)},
    "run": {
        "split": (_TEXT,), "calibrate": (_INTEGER,), "shard_size": (_COUNT,), "workers": (_COUNT,), "engine": (_TEXT,),
        "address": (_TEXT,), "actors": (_COUNT,),
    },
}  # fmt: skip
"""What each name may be; a command takes those it can use."""
NAMES = frozenset(name for section in SECTIONS.values() for name in section)


@dataclass(frozen=True)
class Settings:
    """What a recipe file and the command line say together, by section."""

    sections: Mapping[str, Mapping[str, Any]]

    @staticmethod
    def of(file: Path | None, **typed: Mapping[str, Any]) -> "Settings":
        """Those of a file, and over them those that were typed: by section, None where an option was not."""
        found = {} if file is None else _read(file)
        for section, values in typed.items():
            given = {name: value for name, value in values.items() if value is not None}
            for name in {"views", "stride"} & {name for name in given if str(given[name]).isdecimal()}:
                given[name] = int(given[name])
            found[section] = found.get(section, {}) | given
        return Settings({name: found.get(name, {}) for name in SECTIONS})

    @cached_property
    def recipe(self) -> Recipe:
        """What decides a map."""
        given = self.sections["recipe"]
        return Recipe(**{**given, "views": parse_views(given.get("views"))})

    @cached_property
    def tiling(self) -> "Tiling | None":
        """How rasters are cut; None without tile."""
        from equicam.rasters.options import Input, Tiling

        given, own = dict(self.sections["tiling"]), self.sections["preprocessing"]
        if not given:
            return None
        if "tile" not in given:
            raise EquicamError(next(iter(given)), "tile, the size of windows", "none", "tile=224")
        if "size" in own or "crop" in own:
            fix = "tile for the size of windows, and mpp for their resolution"
            raise EquicamError("size and crop", "images", "tile", fix)
        of_input = {name: given.pop(name, None) for name in ("bands", "scale", "mpp", "display")}
        return Tiling(**given, input=Input(**of_input, **self._mean_and_std))

    @property
    def voi(self) -> tuple[float, float] | None:
        """Centre and width of the window of DICOM images."""
        voi = self.sections["preprocessing"].get("voi")
        if voi is None:
            return None
        if len(voi) != 2:
            raise EquicamError("voi", "CENTER and WIDTH, two numbers", voi, "voi=40,400")
        return float(voi[0]), float(voi[1])

    def preprocess(self, model: "Model") -> "Model":
        """The model with the preprocessing given."""
        from equicam.models.preprocessing import with_preprocessing

        own = self.sections["preprocessing"]
        return with_preprocessing(model, size=own.get("size"), crop=own.get("crop"), **self._mean_and_std)

    @property
    def _mean_and_std(self) -> dict[str, Any]:
        own = self.sections["preprocessing"]
        given = {name: own[name] for name in ("mean", "std") if name in own}
        return {
            name: tuple(map(float, one if isinstance(one, list) else [one])) for name, one in given.items()
        }

    def save(self, file: Path | None) -> None:
        """Write them as a recipe file, with what the recipe decides by default; another file of that name stays."""
        if file is None:
            return
        from equicam.shards import write_atomic

        recipe = {name: value for name, value in self.recipe.to_json().items() if value is not None}
        sections = {**self.sections, "recipe": recipe | dict(self.sections["recipe"])}
        text = "\n".join(
            f"[{section}]\n" + "".join(f"{name} = {_toml(value)}\n" for name, value in values.items())
            for section, values in sections.items()
            if values
        ).encode(errors="replace")
        if file.exists() and (not file.is_file() or file.read_bytes() != text):
            raise EquicamError("--save-recipe", "a new file", repr(str(file)), "another name")
        write_atomic(file, text)


def _read(file: Path) -> dict[str, dict[str, Any]]:
    """The sections of a recipe file: known names, of known kinds."""
    from equicam.images.files import read_file

    what = f"recipe file {str(file)!r}"
    if not file.is_file():
        raise EquicamError(what, "an existing file", "none", "its full path")
    data, _ = read_file(file, what=what, limit=MAX_BYTES)
    try:
        found: dict[str, dict[str, Any]] = tomllib.loads(data.decode())
    except (ValueError, RecursionError) as error:
        fix = "equicam audit --save-recipe, which writes one"
        raise EquicamError(what, "TOML", str(error)[:200], fix) from error
    for section, values in found.items():
        if section not in SECTIONS or not isinstance(values, dict):
            raise not_one_of(f"a section of {what}", SECTIONS, section[:80], f"[{next(iter(SECTIONS))}]")
        for name, value in values.items():
            kinds = SECTIONS[section].get(name)
            if kinds is None:
                raise not_one_of(f"[{section}] of {what}", SECTIONS[section], name[:80], "no other name")
            if not any(_KINDS[kind](value) for kind in kinds):
                raise EquicamError(f"{name} in {what}", " or ".join(kinds), _shown(value), f"no {name}")
    return found


def parse_views(given: int | str | list[int | float] | None) -> "int | Views | None":
    """A number of views, degrees, or a set of views by name."""
    if given is None:
        return None
    from equicam.core.views import Views

    if isinstance(given, list):
        return Views(tuple(given))
    text = str(given)
    name, _, values = text.partition(":")
    try:
        if text.isdecimal() or name == "dihedral":
            count = int(values or text)
            if not 0 < count <= MAX_VIEWS:
                raise ValueError(text)
            return Views.dihedral(count) if values else count
        numbers = tuple(map(float, values.split(",")))
        if name == "scales":
            return Views.scales(*numbers)
        (share,) = numbers
        if name != "shifts" or not 0 < share < 0.5:
            raise ValueError(text)
        return Views.shifts((0, 0), (share, 0), (-share, 0), (0, share), (0, -share))
    except ValueError as error:
        raise EquicamError(
            "views",
            f"a number from 1 to {MAX_VIEWS:,}, dihedral: and an even number, scales: and factors above 0, or shifts: and a share below 0.5",
            repr(text), f"views={NAMED_VIEWS.get(name, '18')}",
        ) from error  # fmt: skip


def _shown(value: Any) -> str:
    try:
        return repr(value)[:80]
    except (ValueError, RecursionError):  # Python writes no number of more than 4,300 digits
        return "more than can be shown"


def _toml(value: Any) -> str:
    if isinstance(value, list):
        return f"[{', '.join(map(_toml, value))}]"
    if isinstance(value, str | bool):  # TOML's text and switches are JSON's, but for one control character
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    return repr(value)
