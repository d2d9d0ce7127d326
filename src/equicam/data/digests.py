"""SHA-256 of files and of images."""

import hashlib

from equicam.data.items import Item, open_item
from equicam.data.remote import AnyPath, RemotePath


def file_digest(path: AnyPath) -> str:
    """SHA-256 of a file."""
    if isinstance(path, RemotePath):
        return hashlib.sha256(path.read_bytes()).hexdigest()
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def content_digest(item: Item) -> str | None:
    """SHA-256 of an image's file, or of its pixels if the file holds several images; None if it cannot be read."""
    try:
        if item.index is None:
            return file_digest(item.path)
        return hashlib.sha256(open_item(item).tobytes()).hexdigest()
    except (OSError, ValueError):
        return None
