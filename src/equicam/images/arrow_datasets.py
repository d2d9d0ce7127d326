"""Folders that Hugging Face `datasets` writes with `save_to_disk`, listed without that library."""

import json
from pathlib import Path
from typing import Any

from equicam.errors import EquicamError
from equicam.images.arrow_streams import invalid, read_labels
from equicam.images.files import MAX_LIST_BYTES, read_file
from equicam.images.folders import quote_names
from equicam.images.items import Item, valid_utf8

STATE, SPLITS = "state.json", "dataset_dict.json"
KINDS = ("Dataset", "DatasetDict")
"""How the types of its data sets end, streamed ones too."""
LABELS = "label"
"""The column of labels, unless another one is the only column of classes."""


def refuse_in_memory(given: object, what: str) -> None:
    """Refuse an object of that library, by its type: a run records a folder, from which it can be computed again."""
    if type(given).__module__.partition(".")[0] == "datasets" and type(given).__name__.endswith(KINDS):
        raise EquicamError(
            what, needs="files, or images in memory", got=f"a {type(given).__name__} of Hugging Face",
            fix='data.save_to_disk("folder") and then "folder", or for explain its images, as in data[:8]["image"]',
        )  # fmt: skip


def arrow_dataset(root: Path, split: str | None) -> list[Item] | None:
    """The images of a saved data set in its order; labels are its numbers of classes, or texts."""
    if (root / SPLITS).is_file():
        return _in_split(root, split)
    if not (root / STATE).is_file() or not (root / "dataset_info.json").is_file():
        return None
    if split is not None:
        raise EquicamError(
            f"split {split!r}", needs=f"a data set with splits ({SPLITS})", got=str(root), fix="no split"
        )
    column = _label_column(root / "dataset_info.json")
    found: list[Item] = []
    for path in _data_files(root / STATE):
        first = len(found)
        labels = enumerate(read_labels(path, column), first)
        found += (Item(f"{i:08}", path, _label(value), index=i - first) for i, value in labels)
    if not found:
        raise invalid(root / STATE, "at least one row", "none")
    return found


def _in_split(root: Path, split: str | None) -> list[Item]:
    names = _json(root / SPLITS).get("splits")
    known = [name for name in names if isinstance(name, str)] if isinstance(names, list) else []
    wanted = known[0] if split is None and len(known) == 1 else split
    if wanted not in known:
        raise EquicamError(
            f"source {str(root)!r}", needs="a split", got="none" if split is None else repr(split),
            fix=quote_names(known),
        )  # fmt: skip
    folder = root / _plain_name(wanted, root / SPLITS)
    found = None if (folder / SPLITS).is_file() else arrow_dataset(folder, None)
    if found is None:
        raise invalid(folder, f"a {STATE}", "none")
    return found


def _label_column(info: Path) -> str:
    features = _json(info).get("features")
    known = features.items() if isinstance(features, dict) else ()
    classes = [name for name, one in known if isinstance(one, dict) and one.get("_type") == "ClassLabel"]
    return classes[0] if len(classes) == 1 else LABELS


def _label(value: int | str | None) -> int | str | None:
    """-1 is the library's number for a missing label."""
    if isinstance(value, str):
        return valid_utf8(value.strip()) or None
    return value if value is not None and value >= 0 else None


def _data_files(state: Path) -> list[Path]:
    entries = _json(state).get("_data_files")
    given = (
        [one.get("filename") for one in entries if isinstance(one, dict)] if isinstance(entries, list) else []
    )
    names = [_plain_name(name, state) for name in given]
    if len(set(names)) < len(names):
        raise invalid(state, "every file once", quote_names(names))
    return [state.parent / name for name in names]


def _plain_name(name: object, file: Path) -> str:
    """The name of a file or folder next to `file`; one that leads elsewhere is refused."""
    if not isinstance(name, str) or name in ("", ".", "..") or "/" in name or "\0" in name:
        raise invalid(file, "plain names of files", repr(name)[:80])
    return name


def _json(path: Path) -> dict[str, Any]:
    data, _ = read_file(path, what=f"file {str(path)!r}", limit=MAX_LIST_BYTES)
    try:
        found = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise invalid(path, "JSON", error) from error
    if not isinstance(found, dict):
        raise invalid(path, "a JSON object", type(found).__name__)
    return found
