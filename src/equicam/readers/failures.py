"""What a reader refuses: exceptions out of the caller's code, named with the line that raised them, and values on a device.

Checks of values are returned as data: each evaluation synchronises, so the caller evaluates all of them at once.
"""

import sysconfig
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from equicam.errors import EquicamError, ModelError, error_text

PACKAGE = Path(__file__).parents[1]
OURS_AND_TORCH = (f"{PACKAGE}/", f"{Path(torch.__file__).parent}/", "<")
INSTALLED = tuple(f"{sysconfig.get_path(name)}/" for name in ("stdlib", "purelib", "platlib"))


@contextmanager
def named_failure(what: str, *, needs: str, or_else: str = "") -> Iterator[None]:
    """Any exception becomes a ModelError that names it and the line of code; running out of memory stays what it is.

    `or_else` is something else to try.
    """
    try:
        yield
    except EquicamError:
        raise
    except (Exception, SystemExit) as error:  # not KeyboardInterrupt
        if out_of_memory(error):
            raise
        fix = "mending it there" if _failure_place(error) else "mending its cause"
        fix += f", or {or_else}" if or_else else ""
        raise ModelError(what, needs, describe_failure(error), fix) from error


@contextmanager
def module_failure(
    module: nn.Module, shape: tuple[int, ...], name: str | None = None, *, or_else: str = ""
) -> Iterator[None]:
    """The same for a pass of a module on inputs of this shape; other channels than its own are named as that."""
    what, channels = f"the model {name or type(module).__name__!r}", input_channels(module)
    try:
        with named_failure(what, needs=f"to run on inputs {shape}", or_else=or_else):
            yield
    except ModelError as error:
        if channels in (None, shape[1]):
            raise
        raise EquicamError(
            what, f"inputs with {_count(channels)}", f"{_count(shape[1])} (images are read as RGB)",
            "preprocess= of equicam.wrap that makes them, or --tile with --bands for rasters",
        ) from error.__cause__  # fmt: skip


def input_channels(module: nn.Module) -> int | None:
    """Channels of the first convolution; None where there is none."""
    return next((m.in_channels for m in module.modules() if isinstance(m, nn.Conv2d)), None)


def describe_failure(error: BaseException) -> str:
    """Type, first lines and place of an exception."""
    text = " ".join(error_text(error).split())
    place = _failure_place(error)
    return f"{type(error).__name__}{f': {text[:300]}' if text else ''}{f' ({place})' if place else ''}"


def _failure_place(error: BaseException) -> str | None:
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


def _relative(path: str) -> str:
    try:
        return str(Path(path).relative_to(Path.cwd()))
    except (ValueError, OSError):
        return path


def _count(channels: int | None) -> str:
    return f"{channels} channel{'s' if channels != 1 else ''}"


@dataclass(frozen=True)
class Check:
    """A condition on tensors, and the error to raise where it fails."""

    passes: Callable[[], Bool[Tensor, ""]]
    error: Callable[[], EquicamError]


def raise_failed(checks: Sequence[Check]) -> None:
    """Evaluate all checks with one synchronisation; raise the error of the first that fails."""
    if checks:
        raise_first(torch.stack([check.passes() for check in checks]).tolist(), checks)


def raise_first(passed: Sequence[bool], checks: Sequence[Check]) -> None:
    """Raise the error of the first check that did not pass."""
    for ok, check in zip(passed, checks, strict=True):
        if not ok:
            raise check.error()


def finite(x: Float[Tensor, "..."]) -> Bool[Tensor, ""]:
    """Whether every value is finite; one reduction over magnitudes is faster than `isfinite().all()`."""
    return x.abs().amax() < torch.inf


def finite_images(x: Float[Tensor, "b c H W"]) -> Bool[Tensor, " b"]:
    """Which images are finite."""
    return x.abs().flatten(1).amax(1) < torch.inf


def not_finite(passed: Bool[Tensor, " b"]) -> EquicamError:
    """The error for a batch with NaN or infinity, by which images are finite."""
    bad = (~passed).nonzero().flatten().tolist()
    return EquicamError("images", "finite pixels", f"NaN or infinity in image {bad}", "leaving it out")


LARGEST_PIXEL = 255
TIMES_WHITE = 8
"""How far above a white pixel of the model's normalisation a batch must reach to be taken for pixels."""


def unscaled(x: Float[Tensor, "b c H W"], mean: Sequence[float], std: Sequence[float]) -> Bool[Tensor, ""]:
    """Whether a batch holds grey or RGB pixels from 0 to 255, by the normalisation that the model states.

    Preprocessed images have negative values, or reach little above white. A model that takes such pixels states so:
    a mean of 0 and a standard deviation of 1/255. Other numbers of channels have scales of their own.
    """
    white = max(((1 - m) / s for m, s in zip(mean, std, strict=False) if s > 0), default=1.0)
    if x.shape[1] not in (1, 3) or TIMES_WHITE * white >= LARGEST_PIXEL:
        return torch.zeros((), dtype=torch.bool, device=x.device)
    low, high = x.aminmax()
    return (low >= 0) & (high > TIMES_WHITE * white) & (high <= LARGEST_PIXEL)


def not_scaled() -> EquicamError:
    """The error for a batch of such pixels."""
    return EquicamError(
        "images", "preprocessed values: a tensor of floats counts as the model's input", "pixels from 0 to 255",
        "x.byte() of a tensor or x.astype(np.uint8) of an array, which are preprocessed like image files; wrap(…, mean=(0, 0, 0), std=(1/255,) * 3) for a model that takes such pixels",
    )  # fmt: skip
