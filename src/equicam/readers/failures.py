"""Exceptions out of the caller's code, named: which one it is, and where in that code it was raised."""

import sysconfig
import traceback
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import torch
from torch import nn

from equicam.errors import EquicamError, ModelError, error_text
from equicam.readers.model import Model

PACKAGE = Path(__file__).parents[1]
OURS_AND_TORCH = (f"{PACKAGE}/", f"{Path(torch.__file__).parent}/", "<")
INSTALLED = tuple(f"{sysconfig.get_path(name)}/" for name in ("stdlib", "purelib", "platlib"))


@contextmanager
def named_failure(what: str, *, needs: str) -> Iterator[None]:
    """Any exception becomes a ModelError that names it and the line of code; running out of memory stays what it is."""
    try:
        yield
    except EquicamError:
        raise
    except (Exception, SystemExit) as error:  # not KeyboardInterrupt
        if out_of_memory(error):
            raise
        raise _named(error, what, needs) from error


def model_failure(model: Model, shape: tuple[int, ...]) -> AbstractContextManager[None]:
    """The same for a pass of the model on inputs of this shape; an input with other channels than its own is named as that."""
    return module_failure(model.module, shape, model.name)


@contextmanager
def module_failure(
    module: nn.Module, shape: tuple[int, ...], name: str | None = None, *, or_else: str = ""
) -> Iterator[None]:
    """The same for a module that may have no name; `or_else` is something else to try."""
    name = name or type(module).__name__
    try:
        yield
    except EquicamError:
        raise
    except (Exception, SystemExit) as error:  # not KeyboardInterrupt
        if out_of_memory(error):
            raise
        channels = input_channels(module)
        if channels is not None and channels != shape[1]:
            raise EquicamError(
                f"the model {name!r}", needs=f"inputs with {_count(channels)}", got=f"{_count(shape[1])} (images are read as RGB)",
                fix="preprocess= of equicam.wrap that makes them, or --tile with --bands for rasters",
            ) from error  # fmt: skip
        raise _named(error, f"the model {name!r}", f"to run on inputs {shape}", or_else) from error


def input_channels(module: nn.Module) -> int | None:
    """Channels of the first convolution; None where there is none."""
    return next((m.in_channels for m in module.modules() if isinstance(m, nn.Conv2d)), None)


def describe_failure(error: BaseException) -> str:
    """Type, first lines and place of an exception."""
    text = " ".join(error_text(error).split())
    place = failure_place(error)
    return f"{type(error).__name__}{f': {text[:300]}' if text else ''}{f' ({place})' if place else ''}"


def failure_place(error: BaseException) -> str | None:
    """FILE:LINE of the innermost call in the caller's code, or else in a library's that is neither ours nor torch."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{_relative(error.filename)}:{error.lineno}"
    frames = [
        f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith(OURS_AND_TORCH)
    ]
    own = [frame for frame in frames if not frame.filename.startswith(INSTALLED)]
    if not frames:
        return None
    frame = (own or frames)[-1]
    return f"{_relative(frame.filename)}:{frame.lineno}, in {frame.name}"


def out_of_memory(error: BaseException) -> bool:
    """Whether memory ran out. Ending a broken capture raises another error, whose `__context__` is the real cause."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, torch.OutOfMemoryError | MemoryError):
        cause = cause.__context__
    return cause is not None


def _named(error: BaseException, what: str, needs: str, or_else: str = "") -> ModelError:
    fix = "mending it there" if failure_place(error) else "mending its cause"
    fix += f", or {or_else}" if or_else else ""
    return ModelError(what, needs=needs, got=describe_failure(error), fix=fix)


def _relative(path: str) -> str:
    try:
        return str(Path(path).relative_to(Path.cwd()))
    except (ValueError, OSError):
        return path


def _count(channels: int) -> str:
    return f"{channels} channel{'s' if channels != 1 else ''}"
