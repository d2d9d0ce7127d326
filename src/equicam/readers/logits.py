"""Class logits and probabilities from whatever a model returns."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from equicam.errors import EquicamError
from equicam.readers.checks import Check
from equicam.readers.finite import finite

SUMS_TO_ONE_WITHIN = 1e-3
"""Rows of outputs that sum to 1 within this are taken for probabilities."""


@dataclass(frozen=True)
class Logits:
    """Logits and probabilities per class, and the checks they must pass."""

    logits: Float[Tensor, "n y"]
    probabilities: Float[Tensor, "n y"]
    checks: tuple[Check, ...]


def at_least_float32(x: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
    """Float32 or wider: half-precision networks are explained in full precision."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def class_logits(output: Any, *, count: int) -> Logits:
    """Logits per class from a module's output; a single logit z is two classes with logits (−z, z)."""
    found = _find(output)
    if found is None or found.ndim not in (1, 2) or len(found) != count or not found.is_floating_point():
        shape = f"{type(output).__name__}" if found is None else f"a tensor {tuple(found.shape)}"
        raise EquicamError(
            "the model's output", needs=f"class logits [{count}, classes], alone or in a tuple or dict", got=shape,
            fix="wrapping the model in a module that returns its logits",
        )  # fmt: skip
    logits = at_least_float32(found)
    values = logits.detach()
    checks = (Check(lambda: finite(values), _not_finite), *_check_not_probabilities(logits))
    if logits.ndim == 1 or logits.shape[1] == 1:
        z = logits.reshape(-1, 1)
        pair = torch.cat((-z, z), 1)
        return Logits(pair, pair.sigmoid(), checks)
    return Logits(logits, logits.softmax(1), checks)


def _check_not_probabilities(logits: Float[Tensor, "n ..."]) -> tuple[Check, ...]:
    """Refuse rows that sum to 1, and single outputs whose autograd node is a sigmoid."""
    if logits.ndim == 2 and logits.shape[1] > 1:
        values = logits.detach()

        def passes() -> Tensor:
            return (values < 0).any() | ((values.sum(1) - 1).abs() > SUMS_TO_ONE_WITHIN).any()

        return (Check(passes, _probabilities),)
    node = logits.grad_fn
    while node is not None and node.name().startswith(
        ("Squeeze", "Unsqueeze", "View", "Reshape", "Select", "ToCopy")
    ):
        node = node.next_functions[0][0]
    if node is not None and node.name().startswith("Sigmoid"):
        raise _probabilities()
    return ()


def _not_finite() -> EquicamError:
    return EquicamError(
        "the model's output", needs="finite class logits", got="NaN or infinity", fix="dtype=None or other weights"
    )  # fmt: skip


def _probabilities() -> EquicamError:
    return EquicamError(
        "the model's output", needs="logits", got="probabilities, behind a softmax or sigmoid",
        fix="the module without its last activation",
    )  # fmt: skip


def _find(output: Any) -> Tensor | None:
    """The tensor of logits in a module's output, if there is exactly one candidate."""
    if isinstance(output, Tensor):
        return output
    named = [output[k] for k in ("logits", "out") if k in output] if isinstance(output, Mapping) else []
    named = named or [getattr(output, "logits", None)]
    if isinstance(named[0], Tensor):
        return named[0]
    items: list[Any] = []
    if isinstance(output, Mapping):
        items = list(output.values())
    elif isinstance(output, tuple | list):
        items = list(output)
    tensors = [item for item in items if isinstance(item, Tensor) and item.ndim in (1, 2)]
    tensors = [t for t in tensors if t.ndim == 2] or tensors
    # by convention a tuple has its logits first; a dict has no first
    return tensors[0] if tensors and (len(tensors) == 1 or not isinstance(output, Mapping)) else None
