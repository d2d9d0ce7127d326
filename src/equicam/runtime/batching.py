"""Pictures through a reader: which class, and how many views a pass."""

from collections.abc import Callable, Sequence
from functools import partial

import torch
from jaxtyping import Float, Int
from torch import Tensor

from equicam.errors import EquicamError
from equicam.readers.checks import insist
from equicam.readers.reading import Pin, Reading, join

Read = Callable[[Float[Tensor, "n c H W"], Pin], Reading]
Target = int | Sequence[int] | Tensor | None


def read_views(
    read: Read,
    x: Float[Tensor, "t b c H W"],
    target: Int[Tensor, " b"] | None,
    chunk: int,
    *,
    originals: int | None = None,
    presented: Float[Tensor, "b y"] | None = None,
) -> tuple[Reading, Int[Tensor, " b"]]:
    """All views through the reader, at most `chunk` a pass, the target fixed by the first (presented) view.

    `presented` are the scores of the presented view where it has been read before and is not among these.
    Where the pictures are `originals` and copies of them, turn by turn, the originals' top-1 is every copy's target.
    """
    b = x.shape[1]

    def pin(
        scores: Float[Tensor, "n y"] | None, count: int
    ) -> tuple[Int[Tensor, " n"], Float[Tensor, "n y"] | None]:
        nonlocal presented, target
        if presented is None and scores is not None:
            presented = scores[:b]
            top = presented[:originals].argmax(1)
            top = top.repeat(b // len(top))
            target = top if target is None else _in_range(target, presented.shape[1])
        if target is None:
            raise EquicamError(
                "an explainer without a model", needs="a target class", got=None, fix="target=0"
            )
        return target.repeat(count), None if presented is None else presented.repeat(count, 1)

    pieces = x.tensor_split(-(-x.shape[0] * b // chunk) if b == 1 else 1)
    reading = join([read(piece.flatten(0, 1), partial(pin, count=len(piece))) for piece in pieces])
    return reading, target  # type: ignore[return-value]  # pin has set it


def as_targets(target: Target, x: Float[Tensor, "b c H W"]) -> Int[Tensor, " b"] | None:
    """One class an image, checked for number and kind; None leaves it to the model's top-1."""
    if target is None:
        return None
    try:
        wanted = torch.as_tensor(target, device=x.device)
    except (TypeError, ValueError, RuntimeError):
        wanted = torch.empty(0)
    if wanted.is_floating_point() or wanted.dtype == torch.bool or wanted.numel() == 0 or wanted.ndim > 1:
        raise EquicamError(
            "target", needs="a class index or one for each image", got=repr(target), fix="target=3"
        )
    if wanted.ndim == 1 and len(wanted) != len(x):
        raise EquicamError(
            "target",
            needs=f"one class for each of {len(x)} images",
            got=f"{len(wanted)}",
            fix="one int for them all",
        )
    return wanted.long().expand(len(x))


def _in_range(target: Int[Tensor, " b"], classes: int) -> Int[Tensor, " b"]:
    insist(
        ((target >= 0) & (target < classes)).all(),
        lambda: EquicamError(
            "target", needs=f"classes from 0 to {classes - 1}", got=target.tolist(), fix="target=None"
        ),
    )
    return target.clamp(0, classes - 1)  # until the check is asked, nothing may look beyond


def views_a_pass(x: Float[Tensor, "b c H W"]) -> int:
    """Views in one pass by memory: a CNN's widest layers hold about 64 times its input."""
    view = 64 * x[0].numel() * 4
    if x.is_cuda:
        free, _ = torch.cuda.mem_get_info(x.device)
        return max(1, int(0.8 * free) // view)  # what is too much after all is halved
    return max(1, 512 * 2**20 // view)  # past half a gibibyte a CPU's caches lose more than batching gains
