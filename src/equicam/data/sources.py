"""Where pictures come from: a list, a folder, a published data set, a pattern or one file, told apart by what is there."""

from collections.abc import Sequence
from fnmatch import fnmatchcase
from glob import has_magic
from pathlib import Path

from equicam.data.benchmarks import LAYOUTS, patch_camelyon_file
from equicam.data.folders import (
    SUFFIXES,
    has_image_suffix,
    list_images,
    list_items,
    make_item,
    quote_names,
    subfolders,
)
from equicam.data.items import Item
from equicam.data.manifests import find_manifest, read_manifest
from equicam.data.remote import AnyPath, RemotePath, as_path
from equicam.errors import EquicamError

SPLITS = ("train", "training", "val", "valid", "validation", "test", "testing")


def find_items(source: str | Path, *, split: str | None = None) -> list[Item]:
    """The pictures of a source; ids are unique and valid UTF-8, and nothing is opened but lists and labels."""
    path = as_path(source)
    try:
        is_folder, is_file = path.is_dir(), path.is_file()
    except OSError as error:
        raise EquicamError(
            f"source {str(source)[:80]!r}",
            needs="a path one may read",
            got=error.strerror or error,
            fix="another",
        ) from error
    if is_folder:
        return _in_folder(path, split)
    if is_file:
        return _in_file(path, split)
    if has_magic(str(source)):
        return _matching(path, split)
    raise EquicamError(
        f"source {str(source)!r}", needs="an existing file or folder", got="No such file", fix="its full path"
    )


def _in_folder(root: AnyPath, split: str | None) -> list[Item]:
    """What its list says, what its published layout says, or every picture beneath it with its folder as label."""
    if manifest := find_manifest(root):
        return read_manifest(manifest, split=split)
    if isinstance(root, Path):
        for layout in LAYOUTS:
            if (items := layout(root, split)) is not None:
                return items
    folders = subfolders(root)
    if split is not None:
        if split not in folders:
            raise EquicamError(
                f"split {split!r}", needs=f"a folder of that name in {str(root)!r}",
                got=f"folders {quote_names(folders)}", fix="one of these" if folders else "no split",
            )  # fmt: skip
        return _in_folder(root / split, None)
    items = list_items(root)
    if not items:
        raise EquicamError(
            f"source {str(root)!r}", needs=f"pictures ({' '.join(SUFFIXES)}) or a list (items.csv)",
            got="none", fix="a folder of pictures, or a folder a class",
        )  # fmt: skip
    labels = {item.label for item in items}
    if len(labels) > 1 and labels.issubset(SPLITS):  # else every picture would be labelled by its split
        raise EquicamError(
            f"source {str(root)!r}", needs="a split", got=f"folders {quote_names(folders)}",
            fix=f"split={min(map(str, labels))!r}",
        )  # fmt: skip
    return items


def _in_file(path: AnyPath, split: str | None) -> list[Item]:
    suffix = path.suffix.lower()
    if suffix in (".csv", ".parquet"):
        return read_manifest(path, split=split)
    if isinstance(path, Path) and (items := patch_camelyon_file(path, split)) is not None:
        return items
    if not has_image_suffix(path.name):
        raise EquicamError(
            f"source {str(path)!r}", needs=f"a picture ({' '.join(SUFFIXES)}) or a list (.csv .parquet)",
            got=f"a file {suffix or 'without suffix'}", fix="a folder, or a list of the pictures",
        )  # fmt: skip
    _refuse_split(path, split)
    return [make_item((path.name,), path)]


def _matching(pattern: AnyPath, split: str | None) -> list[Item]:
    """Pictures whose path fits the pattern; ids begin where the pattern does."""
    _refuse_split(pattern, split)
    parts = tuple(str(pattern).split("/")) if isinstance(pattern, RemotePath) else pattern.parts
    fixed = next(i for i, part in enumerate(parts) if has_magic(part))
    root = RemotePath("/".join(parts[:fixed])) if isinstance(pattern, RemotePath) else Path(*parts[:fixed])
    wanted = parts[fixed:]
    depth = None if "**" in wanted else len(wanted)
    there = list_images(root, depth=depth) if root.is_dir() else []
    found = [make_item(names, at) for names, at in there if _fits(names, wanted)]
    if not found:
        raise EquicamError(
            f"pattern {str(pattern)!r}", needs=f"pictures ({' '.join(SUFFIXES)}) that fit it",
            got=f"none of {len(there)} in {str(root)!r}", fix="a folder, or ** for folders at any depth",
        )  # fmt: skip
    return sorted(found, key=lambda item: item.id)


def _fits(parts: Sequence[str], pattern: Sequence[str]) -> bool:
    """Name by name as the shell does it; ** stands for any number of folders."""
    if not pattern:
        return not parts
    if pattern[0] == "**":
        return any(_fits(parts[i:], pattern[1:]) for i in range(len(parts) + 1))
    return bool(parts) and fnmatchcase(parts[0], pattern[0]) and _fits(parts[1:], pattern[1:])


def _refuse_split(source: AnyPath, split: str | None) -> None:
    if split is not None:
        raise EquicamError(
            f"split {split!r}", needs="a list or a folder", got=repr(str(source)), fix="no split"
        )
