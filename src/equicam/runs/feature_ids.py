"""The ids of a run's images in files for other programs (QuPath, QGIS): UUIDs that name an image of one run only."""

from functools import lru_cache
from pathlib import Path
from uuid import NAMESPACE_URL, UUID, uuid5

from equicam.images.files import file_digest
from equicam.images.items import valid_utf8
from equicam.runs.store import RunStore


def feature_id(store: RunStore, item_id: str) -> str:
    """The UUIDv5 of an image, from manifest.json and its id: features of another run match none of this one."""
    path = store.folder / "manifest.json"
    stat = path.stat()
    return str(uuid5(_namespace(path, stat.st_mtime_ns, stat.st_size), valid_utf8(item_id)))


@lru_cache(maxsize=8)
def _namespace(manifest: Path, _modified: int, _bytes: int) -> UUID:
    """The namespace of a run; the arguments after the path make a changed file another one."""
    return uuid5(NAMESPACE_URL, f"equicam:run:{file_digest(manifest)}")
