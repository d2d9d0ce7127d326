"""HDF5 files with many images (PatchCamelyon): images are read one at a time, and files stay open."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from threading import Lock
from typing import Any

import h5py
import numpy as np
from numpy.typing import NDArray

from equicam.errors import EquicamError
from equicam.images.files import refuse_irregular
from equicam.images.formats import refuse_size

MAX_OPEN_FILES = 8
MAX_IMAGES = 10_000_000  # in one file; PatchCamelyon's largest has 262,144
_LOCKS: dict[int, Lock] = {}  # by process id: a fork may copy a lock that is held


def read_image(path: Path, index: int) -> NDArray[np.uint8]:
    """Image `index` of the dataset "x" [n, H, W, 3]; only its chunk of the file is read."""
    with _dataset(path, "x") as images:
        count = _count(images, path)
        if not 0 <= index < count:
            raise _invalid(path, f"an image {index}", f"images 0 to {count - 1}")
        image: NDArray[np.uint8] = images[index]
        return image


def count_images(path: Path) -> int:
    """The number of images in the dataset "x"."""
    with _dataset(path, "x") as images:
        return _count(images, path)


def read_labels(path: Path, *, count: int) -> list[int]:
    """The dataset "y": one integer per image; axes of length 1 are ignored."""
    with _dataset(path, "y") as labels:
        if labels.size != count or not np.issubdtype(labels.dtype, np.integer):
            raise _invalid(path, f"{count} integers in 'y'", f"{labels.shape} of {labels.dtype}")
        return [int(v) for v in labels[...].reshape(-1)]


def _count(images: Any, path: Path) -> int:
    shape = images.shape
    if shape is None or len(shape) != 4 or shape[3] != 3 or images.dtype != np.uint8:
        raise _invalid(path, "8-bit images [n, H, W, 3] in 'x'", f"{shape} of {images.dtype}")
    if shape[0] > MAX_IMAGES:
        raise _invalid(path, f"at most {MAX_IMAGES:,} images", f"{shape[0]:,}")
    refuse_size(shape[2], shape[1], f"file {str(path)!r}")
    return int(shape[0])


@contextmanager
def _dataset(path: Path, name: str) -> Iterator[Any]:
    """A dataset, for one thread at a time; failures inside the block become EquicamErrors."""
    with _LOCKS.setdefault(os.getpid(), Lock()):
        try:
            dataset = _open(os.path.abspath(path), name, os.getpid())  # noqa: PTH100  # links stay links
            if not isinstance(dataset, h5py.Dataset):
                raise _invalid(path, f"a dataset {name!r}", f"a {type(dataset).__name__}")
            if dataset.external or dataset.is_virtual:
                raise _invalid(path, f"the data of {name!r} in it", "a reference to another place")
            yield dataset
        except EquicamError:
            raise
        except FileNotFoundError as error:
            raise _invalid(path, "an existing file", "No such file") from error
        except Exception as error:  # h5py has no exceptions of its own
            raise _invalid(path, f"a whole HDF5 file with a dataset {name!r}", error) from error


@lru_cache(maxsize=MAX_OPEN_FILES)
def _open(path: str, name: str, pid: int) -> Any:  # noqa: ARG001  # a forked process opens its own files
    """The dataset, which caches the chunk that neighbouring images share."""
    refuse_irregular(os.stat(path), f"file {path!r}")  # noqa: PTH116
    file = h5py.File(path, "r")
    link = file.get(name, getlink=True)
    if link is not None and not isinstance(link, h5py.HardLink):  # following it may open another file
        raise _invalid(Path(path), f"the data of {name!r} in it", "a reference to another place")
    return file[name]


def _invalid(path: Path, needs: str, got: object) -> EquicamError:
    return EquicamError(f"file {str(path)!r}", needs, got, "a fresh copy of it")
