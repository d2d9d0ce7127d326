"""SHA-256 of files and of images."""

import hashlib
from pathlib import Path

from equicam.images.files import open_regular
from equicam.images.items import Item, item_digest


def file_digest(path: Path) -> str:
    """SHA-256 of a file."""
    with open_regular(path, str(path)) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def content_digest(item: Item) -> str | None:
    """SHA-256 of an image's file, or of its pixels if the file holds several images; None if it cannot be read."""
    try:
        return item_digest(item)
    except (OSError, ValueError):
        return None
