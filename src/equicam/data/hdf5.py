"""Files that hold many pictures, as PatchCamelyon's do: read one at a time, from files that stay open."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from threading import Lock
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from equicam.data.image_files import MAX_PIXELS
from equicam.errors import EquicamError

MAX_OPEN_FILES = 8
_LOCKS: dict[int, Lock] = {}  # by process, for a fork may copy a lock that is held


def read_image(path: Path, index: int) -> NDArray[np.uint8]:
    """Picture `index` of the dataset "x" [n, H, W, 3]; the rest of the file is not read."""
    with _dataset(path, "x") as pictures:
        count = _count(pictures, path)
        if not 0 <= index < count:
            raise _unfit(path, f"a picture {index}", f"pictures 0 to {count - 1}")
        found: NDArray[np.uint8] = pictures[index]
        return found


def count_images(path: Path) -> int:
    """How many pictures the dataset "x" holds."""
    with _dataset(path, "x") as pictures:
        return _count(pictures, path)


def read_labels(path: Path, *, count: int) -> list[int]:
    """The dataset "y": one integer a picture, whatever axes of length 1 are about it."""
    with _dataset(path, "y") as labels:
        if labels.size != count or not np.issubdtype(labels.dtype, np.integer):
            raise _unfit(path, f"{count} integers in 'y'", f"{labels.shape} of {labels.dtype}")
        return [int(v) for v in labels[...].reshape(-1)]


def _count(pictures: Any, path: Path) -> int:
    shape = pictures.shape
    if len(shape) != 4 or shape[3] != 3 or pictures.dtype != np.uint8 or shape[1] * shape[2] > MAX_PIXELS:
        raise _unfit(path, "8-bit pictures [n, H, W, 3] in 'x'", f"{shape} of {pictures.dtype}")
    return int(shape[0])


@contextmanager
def _dataset(path: Path, name: str) -> Iterator[Any]:
    """A dataset, for one thread at a time; whatever fails in the block comes out with a reason."""
    h5py = _h5py()
    with _LOCKS.setdefault(os.getpid(), Lock()):
        try:
            _, dataset = _opened(os.path.abspath(path), name, os.getpid())  # noqa: PTH100  # links stay links
            if not isinstance(dataset, h5py.Dataset):
                raise _unfit(path, f"a dataset {name!r}", f"a {type(dataset).__name__}")
            yield dataset
        except EquicamError:
            raise
        except FileNotFoundError as error:
            raise _unfit(path, "an existing file", "No such file") from error
        except (OSError, KeyError, ValueError, TypeError, RuntimeError) as error:
            raise _unfit(path, f"a whole HDF5 file with a dataset {name!r}", error) from error


@lru_cache(maxsize=MAX_OPEN_FILES)
def _opened(path: str, name: str, pid: int) -> tuple[Any, Any]:  # noqa: ARG001  # a forked process opens its own
    """File and dataset: the dataset keeps the chunk that neighbouring pictures share."""
    file = _h5py().File(path, "r")
    return file, file[name]


def _h5py() -> ModuleType:
    try:
        import h5py
    except ImportError as error:
        raise EquicamError(
            "a source in HDF5 files", needs="h5py", got="no such package", fix="pip install 'equicam[data]'"
        ) from error
    module: ModuleType = h5py
    return module


def _unfit(path: Path, needs: str, got: object) -> EquicamError:
    return EquicamError(f"file {str(path)!r}", needs=needs, got=got, fix="a fresh copy of it")
