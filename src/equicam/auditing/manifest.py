"""Everything that makes a run reproducible, as plain data: `manifest.json`."""

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from equicam.auditing.schema1 import translate_manifest
from equicam.errors import EquicamError
from equicam.recipe import Recipe
from equicam.shards import differences, parse_object

SCHEMA_VERSION = 2


MAX_IMAGES = 10**9


def _is_text(value: object) -> bool:
    """Text that can be written in UTF-8: JSON allows halves of characters."""
    return isinstance(value, str) and not any("\ud800" <= letter <= "\udfff" for letter in value)


def _is_text_or_none(value: object) -> bool:
    return value is None or _is_text(value)


def _is_count(value: object) -> bool:
    return type(value) is int and 0 <= value <= MAX_IMAGES


VALID: dict[str, Callable[[Any], bool]] = {
    "recipe": lambda value: isinstance(value, dict),
    **dict.fromkeys(("method_description", "weights", "layer", "layout", "preprocessing", "dtype", "device"), _is_text),
    **dict.fromkeys(("source", "data"), _is_text),
    **dict.fromkeys(("model", "weights_from", "split"), _is_text_or_none),
    **dict.fromkeys(("images", "calibration_size"), _is_count),
    "shard_size": lambda value: _is_count(value) and value > 0,
    "classes": lambda value: value is None or (isinstance(value, list) and all(map(_is_text, value))),
    "versions": lambda value: isinstance(value, list)
    and all(isinstance(pair, list) and len(pair) == 2 and all(map(_is_text, pair)) for pair in value),
}  # fmt: skip
"""What each field of a manifest may be: anybody may have written it."""


@dataclass(frozen=True)
class Manifest:
    """Everything that decides the rows of a run."""

    recipe: Recipe  # how images are explained; its views are the angles, its fill is never None
    method_description: str  # reader, combine, angles, fusion and weights behind the method's name
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
    schema: int = SCHEMA_VERSION

    @property
    def angles(self) -> tuple[float, ...]:
        """The views, in degrees."""
        return tuple(self.recipe.views)

    def to_json(self) -> dict[str, Any]:
        """Plain values that JSON keeps."""
        plain: dict[str, Any] = json.loads(json.dumps(asdict(replace(self, recipe=Recipe()))))
        return {"schema": self.schema} | plain | {"recipe": self.recipe.to_json()}

    def dumps(self) -> str:
        """Indented, and the same text for the same run."""
        return json.dumps(self.to_json(), indent=1, ensure_ascii=False)


def read_manifest(text: str | bytes, *, where: str) -> Manifest:
    """A manifest read back; that of a 0.1.0 run is translated, that of a later version is refused."""
    try:
        found = parse_object(text)
        if found.get("schema") == 1:
            found = translate_manifest(found)
        elif found.get("schema") != SCHEMA_VERSION:
            raise EquicamError(
                f"the run {where}", needs=f"schema version 1 or {SCHEMA_VERSION}", got=found.get("schema"),
                fix="the equicam version that wrote it",
            )  # fmt: skip
        for name, check in VALID.items():
            if not check(found[name]):
                raise ValueError(f"{name} = {_short(found[name])}")
        found["recipe"] = _read_recipe(found["recipe"])
        found["classes"] = None if found["classes"] is None else tuple(found["classes"])
        found["versions"] = tuple((name, version) for name, version in found["versions"])
        return Manifest(**{f.name: found[f.name] for f in fields(Manifest)})
    except (KeyError, TypeError, ValueError) as error:
        if isinstance(error, EquicamError):
            raise
        raise EquicamError(
            f"the run {where}", needs="a manifest.json of ours", got=error, fix="another RUN"
        ) from error


def _read_recipe(found: Mapping[str, Any]) -> Recipe:
    """The recipe of a run: a method by name, and its angles in degrees."""
    recipe = Recipe.from_json(found)
    angles = recipe.views
    if not isinstance(angles, tuple) or not angles or not all(isinstance(a, int | float) for a in angles):
        raise ValueError(f"recipe.views = {_short(angles)}")
    if not isinstance(recipe.method, str):
        raise ValueError(f"recipe.method = {_short(recipe.method)}")
    return recipe


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}…"


def refuse_difference(before: Manifest, now: Manifest, *, where: str) -> None:
    """Another model, method, option or set of images cannot continue this run."""
    if found := differences(_comparable(before), _comparable(now)):
        raise EquicamError(
            f"resuming {where}", needs="the settings it was started with", got="; ".join(found),
            fix="another --out, or those settings",
        )  # fmt: skip


def _comparable(manifest: Manifest) -> dict[str, Any]:
    """Flat, and without where the same weights or images lie."""
    plain = manifest.to_json()
    for free in ("source", "weights_from"):
        plain.pop(free)
    recipe = plain.pop("recipe")
    recipe["angles"] = recipe.pop("views")
    return {f"recipe.{name}" if name in plain else name: value for name, value in recipe.items()} | plain
