"""Class logits and probabilities, or values, from whatever a model returns."""

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from equicam.errors import EquicamError
from equicam.readers.failures import Check, finite, named_failure
from equicam.readers.model import Model, OutputFunction

SUMS_TO_ONE_WITHIN = 1e-3
"""Rows of outputs that sum to 1 within this are taken for probabilities."""

LABEL_PREDICTED_FROM = 0.5
"""The probability from which a label of a multi-label model counts as predicted."""


@dataclass(frozen=True)
class Logits:
    """Logits and probabilities per class, and the checks they must pass; of values there are no probabilities."""

    logits: Float[Tensor, "n y"]
    probabilities: Float[Tensor, "n y"] | None
    checks: tuple[Check, ...]


def at_least_float32(x: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
    """Float32 or wider: half-precision networks are explained in full precision."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def require_probabilities(found: Float[Tensor, "*n y"] | None, what: str) -> Float[Tensor, "*n y"]:
    """The probabilities, or an error where outputs are values."""
    if found is None:
        raise EquicamError(
            what, "class probabilities", "a value, which has none", 'a method of gradients, as "equigrad-cam"'
        )
    return found


def read_output(model: Model, output: Any, *, count: int) -> Logits:
    """What is explained, from a module's output: logits of classes or labels, values, or the caller's function of it.

    A single logit z is two classes with logits (−z, z), unless the model's task is regression.
    """
    if model.value is not None:
        return _read_value(model.value, output, count)
    found = _find(output)
    if found is None or found.ndim not in (1, 2) or len(found) != count or not found.is_floating_point():
        shape = type(output).__name__ if found is None else f"a tensor {tuple(found.shape)}"
        raise EquicamError(
            "the model's output", f"class logits [{count}, classes], alone or in a tuple or dict", shape,
            "target=lambda y: …, a value per image of what the model returns, or a module that returns its logits",
        )  # fmt: skip
    logits = at_least_float32(found).reshape(count, -1)
    if model.task == "regression":
        return Logits(logits, None, _check_finite(logits))
    checks = _check_finite(logits) + _check_not_probabilities(logits, labels=model.is_multilabel)
    _refuse_number_of_outputs(model, logits.shape[1])
    if logits.shape[1] == 1:
        pair = torch.cat((-logits, logits), 1)
        return Logits(pair, pair.sigmoid(), checks)
    return Logits(logits, logits.sigmoid() if model.is_multilabel else logits.softmax(1), checks)


def _read_value(value: OutputFunction, output: Any, count: int) -> Logits:
    """The caller's function of the output, as a regression with one output."""
    with named_failure("target", needs="a function that runs on what the model returns"):
        found = value(output)
    is_floating = isinstance(found, Tensor) and found.is_floating_point()
    if not is_floating or found.shape not in ((count,), (count, 1)):
        got = type(found).__name__
        if isinstance(found, Tensor):
            got = f"a {str(found.dtype).removeprefix('torch.')} tensor {tuple(found.shape)}"
        raise EquicamError(
            "target", f"a function that returns one floating-point value per image, [{count}]", got,
            "a mean over the other axes, as in target=lambda y: y[:, 3].mean((1, 2))",
        )  # fmt: skip
    logits = at_least_float32(found).reshape(count, 1)
    return Logits(logits, None, _check_finite(logits))


def _refuse_number_of_outputs(model: Model, outputs: int) -> None:
    """Refuse a task that does not go with the number of outputs; one output without a task is not read silently."""
    if getattr(model.module, "num_classes", None) == 0:  # timm's backbones say so
        raise EquicamError(
            "a backbone without classes", "a function of its features as the target", "a class, or none",
            "target=lambda y: …, a value per image",
        )  # fmt: skip
    one = outputs == 1
    if (one and model.task in ("multiclass", "multilabel")) or (not one and model.task == "binary"):
        raise EquicamError(
            f"task={model.task!r}", "one output" if model.task == "binary" else "two outputs or more", outputs,
            'task="binary" or "regression"' if one else 'task="multiclass" or "multilabel"',
        )  # fmt: skip
    if one and model.task is None and model.classes is None:
        warnings.warn(
            'one output is read as the logit of two classes; equicam.wrap(network, task="regression") explains its value, also in the '
            'factory of a file, and task="binary" confirms that it is a logit',
            stacklevel=2,
        )


def _check_not_probabilities(logits: Float[Tensor, "n y"], *, labels: bool = False) -> tuple[Check, ...]:
    """Refuse rows that sum to 1, and single outputs or labels whose autograd node is a sigmoid."""
    if logits.shape[1] > 1 and not labels:
        values = logits.detach()

        def passes() -> Tensor:
            return (values < 0).any() | ((values.sum(1) - 1).abs() > SUMS_TO_ONE_WITHIN).any()

        return (Check(passes, _probabilities),)
    node, copies = logits.grad_fn, ("Squeeze", "Unsqueeze", "View", "Reshape", "Select", "ToCopy")
    while node is not None and node.name().startswith(copies):
        node = node.next_functions[0][0]
    if node is not None and node.name().startswith("Sigmoid"):
        raise _probabilities()
    return ()


def _check_finite(logits: Float[Tensor, "n y"]) -> tuple[Check, ...]:
    values, needs, fix = logits.detach(), "finite class logits", "dtype=None or other weights"
    refuse = partial(EquicamError, "the model's output", needs, "NaN or infinity", fix)
    return (Check(lambda: finite(values), refuse),)


def _probabilities() -> EquicamError:
    return EquicamError(
        "the model's output", "logits", "probabilities, behind a softmax or sigmoid",
        "the module without its last activation",
    )  # fmt: skip


def _find(output: Any) -> Tensor | None:
    """The tensor of logits in a module's output, if there is exactly one candidate."""
    named = output if isinstance(output, Mapping) else {}
    found = named.get("logits", named.get("out", getattr(output, "logits", output)))
    if isinstance(found, Tensor):
        return found
    items = output if isinstance(output, tuple | list) else named.values()
    tensors = [item for item in items if isinstance(item, Tensor) and item.ndim in (1, 2)]
    tensors = [t for t in tensors if t.ndim == 2] or tensors
    # by convention a tuple has its logits first; a dict has no first
    return tensors[0] if tensors and (len(tensors) == 1 or not named) else None
