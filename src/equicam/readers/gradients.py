"""Activations and gradients at one layer, with no graph before it.

For the call the parameters require no gradient, and a hook replaces the layer's output by a detached leaf that
does, so autograd sees only what comes after the layer. Toggling `requires_grad` is not thread-safe: explain one
module from one thread at a time.
"""

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from equicam.errors import EquicamError
from equicam.readers.checks import insist
from equicam.readers.finite import finite
from equicam.readers.layout import Layout, channels_of, infer
from equicam.readers.model import Model
from equicam.readers.objective import logit
from equicam.readers.reading import Aim, Pin, Reading, wide
from equicam.runtime.compiled import compiled_pass
from equicam.runtime.streams import aside

SUM_TO_ONE = 1e-3
"""How near to 1 the scores of every row sum where they are taken for probabilities."""


def tap(
    model: Model,
    x: Float[Tensor, "n c H W"],
    pin: Pin,
    *,
    aim: Aim = logit,
    autocast: torch.dtype | None = None,
) -> Reading:
    """A_n and g_n = ∂(aim · scores)/∂A_n at the model's layer, [n, k, h, w] each."""
    run = _compiled if model.compiled else _pass
    with undisturbed(model.module, eager=not model.compiled), torch.enable_grad():
        output, leaf, wrt = run(model, x, autocast)
        leaf = _first(leaf, len(x))
        layout = layout_of(model, leaf, (x.shape[-2], x.shape[-1]))
        scores, probs = (_first(said, len(x)) for said in class_scores(output, count=len(wrt)))
        target, presented = pin(scores.detach())
        if not scores.requires_grad:
            raise EquicamError(
                f"layer {model.layer!r}", needs="the class scores to depend on it with gradient",
                got="scores cut off from it", fix="a layer outside the model's own no_grad or detach",
            )  # fmt: skip
        direction = aim(scores.detach() if presented is None else presented, target)
        (grad,) = torch.autograd.grad(scores, wrt, direction, materialize_grads=True)
    grad = _first(grad, len(x))
    if layout.prefixed:
        _refuse_dead_patches(model, grad, layout)
    return Reading(
        stage="features",
        value=(wide(layout.planes(leaf.detach())), wide(layout.planes(grad))),
        scores=scores.detach(),
        probs=probs.detach(),
        rectify_weights=layout.prefixed if model.rectify_weights is None else model.rectify_weights,
    )


def _first(rows: Tensor, count: int) -> Tensor:
    """Rows without those that a batch was filled up with; as they are where there are none, for a slice costs a copy."""
    return rows if len(rows) == count else rows[:count]


def _pass(
    model: Model, x: Float[Tensor, "n c H W"], autocast: torch.dtype | None
) -> tuple[Any, Tensor, Tensor]:
    """The module's output, what its layer put out, and the tensor to differentiate by for that."""
    with tapped(model) as caught:
        output = feed(model, x, autocast)
    leaf = caught_leaf(model, caught, x)
    return output, leaf, leaf


def _compiled(
    model: Model, x: Float[Tensor, "n c H W"], autocast: torch.dtype | None
) -> tuple[Any, Tensor, Tensor]:
    """The same by compiled code; what can be told only of an eager pass is told of one picture first."""

    def ask() -> Tensor:
        with torch.compiler.set_stance("force_eager"), tapped(model) as caught:
            output = feed(model, x[:1], autocast)
        leaf = caught_leaf(model, caught, x[:1])
        if len(caught) != 1:
            raise EquicamError(
                f"layer {model.layer!r}", needs="to run once in a forward pass, to be compiled",
                got=f"{len(caught)} calls of it", fix="compiled=False",
            )  # fmt: skip
        class_scores(output, count=1)
        return leaf

    return compiled_pass(model, x, autocast, ask, last=_prefers_channels_last(model.module))


def feed(model: Model, x: Float[Tensor, "n c H W"], autocast: torch.dtype | None) -> Any:
    """The module's output, in the memory format its weights have."""
    x = _ordered(model, x)
    with torch.autocast(x.device.type, dtype=autocast) if autocast else nullcontext():
        return model.module(x)


def caught_features(model: Model, caught: list[Tensor], x: Float[Tensor, "n c H W"]) -> tuple[Tensor, Layout]:
    """What the layer put out when it ran last, and its layout."""
    leaf = caught_leaf(model, caught, x)
    return leaf, layout_of(model, leaf, (x.shape[-2], x.shape[-1]))


def caught_leaf(model: Model, caught: list[Tensor], x: Float[Tensor, "n c H W"]) -> Tensor:
    """What the layer put out when it ran last: one row a picture."""
    if not caught:
        raise EquicamError(
            f"layer {model.layer!r}", needs="to run when the model does", got="no call of it",
            fix="a layer the forward pass calls (scripted modules do not fire hooks)",
        )  # fmt: skip
    if len(caught[-1]) != len(x):
        raise EquicamError(
            f"layer {model.layer!r}", needs=f"one row a picture, {len(x)} in all", got=f"shape {tuple(caught[-1].shape)}",
            fix="a layer that does not fold windows into the batch",
        )  # fmt: skip
    return caught[-1]


def class_scores(output: Any, *, count: int) -> tuple[Float[Tensor, "n y"], Float[Tensor, "n y"]]:
    """Scores and probabilities per class; a single logit z is two classes with scores (−z, z)."""
    found = _logits(output)
    if found is None or found.ndim not in (1, 2) or len(found) != count or not found.is_floating_point():
        shape = f"{type(output).__name__}" if found is None else f"a tensor {tuple(found.shape)}"
        raise EquicamError(
            "the model's output", needs=f"class scores [{count}, classes], alone or in a tuple or dict", got=shape,
            fix="wrapping the model in a module that returns its logits",
        )  # fmt: skip
    scores = wide(found)
    with aside(scores):
        insist(finite(scores.detach()), _not_finite)
        _refuse_probabilities(scores)
    if scores.ndim == 1 or scores.shape[1] == 1:
        z = scores.reshape(-1, 1)
        return torch.cat((-z, z), 1), torch.cat((-z, z), 1).sigmoid()
    return scores, scores.softmax(1)


@contextmanager
def tapped(model: Model) -> Iterator[list[Tensor]]:
    """Catches the layer's output as a leaf; the list holds one for each time the layer ran."""
    caught: list[Tensor] = []

    def cut(_module: nn.Module, _inputs: Any, output: Any) -> Any:
        first = output[0] if isinstance(output, tuple) else output
        if not isinstance(first, Tensor) or not first.is_floating_point():
            raise EquicamError(
                f"layer {model.layer!r}", needs="a floating-point tensor as output", got=type(first).__name__,
                fix="a layer that returns its features",
            )  # fmt: skip
        # copies before and after, so that no in-place operation on what the layer took or gave reaches the leaf
        leaf = first.detach().clone().requires_grad_()
        caught.append(leaf)
        return (leaf.clone(), *output[1:]) if isinstance(output, tuple) else leaf.clone()

    handle = model.module.get_submodule(model.layer).register_forward_hook(cut)
    try:
        yield caught
    finally:
        handle.remove()


@contextmanager
def undisturbed(module: nn.Module, *, eager: bool = True) -> Iterator[None]:
    """Eval mode, no parameter gradients, eager, RNG kept: everything put back, also after an exception.

    Inside itself it does nothing: several passes may share one.
    """
    if id(module) in _quiet:
        yield
        return
    modes = [(m, m.training) for m in module.modules()]
    learning = [p for p in module.parameters() if p.requires_grad]
    devices = sorted({p.device.index or 0 for p in module.parameters() if p.is_cuda})
    # only a process that compiled something can have compiled modules, whose code would skip our hook
    stance = (
        torch.compiler.set_stance("force_eager")
        if eager and "torch._dynamo" in sys.modules
        else nullcontext()
    )
    with stance, torch.random.fork_rng(devices):
        _quiet.add(id(module))
        try:
            for m, _ in modes:
                m.training = False  # not .eval(): modules may override it with side effects
            for p in learning:
                p.requires_grad_(False)
            yield
        finally:
            _quiet.discard(id(module))
            for m, mode in modes:
                m.training = mode
            for p in learning:
                p.requires_grad_(True)


_quiet: set[int] = set()
"""Modules that are undisturbed now."""


def _ordered(model: Model, x: Float[Tensor, "n c H W"]) -> Float[Tensor, "n c H W"]:
    """The pictures in the memory format the module's weights have."""
    return x.contiguous(memory_format=torch.channels_last) if _prefers_channels_last(model.module) else x


def _prefers_channels_last(module: nn.Module) -> bool:
    """Whether the caller keeps the weights channels-last; we follow, for `view` in a model may need the plain order."""
    weights = (p for p in module.parameters() if p.ndim == 4 and not p.is_contiguous())
    return any(p.is_contiguous(memory_format=torch.channels_last) for p in weights)


def layout_of(model: Model, leaf: Tensor, size: tuple[int, int]) -> Layout:
    """The layout of what the model's layer put out, checked; inferred where the model does not name it."""
    shape = tuple(leaf.shape)
    try:
        if model.layout is None:
            layout = infer(shape, size, channels=channels_of(model.module.get_submodule(model.layer)))
        else:
            layout = model.layout.resolve(shape, size)
            if layout.kind != "tokens" and len(shape) != 4:
                raise EquicamError(
                    f"layout {layout.kind!r}",
                    needs="a 4-D output",
                    got=f"shape {shape}",
                    fix='layout="tokens"',
                )
    except EquicamError as error:
        error.add_note(f"while reading layer {model.layer!r}")
        raise
    grid = layout.planes(leaf).shape[-2:]
    if min(grid) < 2:
        raise EquicamError(
            f"layer {model.layer!r}", needs="a feature grid of 2×2 or more", got=f"{grid[0]}×{grid[1]}",
            fix="an earlier layer or a larger picture",
        )  # fmt: skip
    return layout


def _refuse_dead_patches(model: Model, grad: Tensor, layout: Layout) -> None:
    insist(
        grad.any(),
        lambda: EquicamError(
            "the model's head", needs="weights that are not all zero", got="a gradient of exactly zero at every token",
            fix="trained or re-initialised head weights",
        ),
    )  # fmt: skip
    insist(
        grad[:, layout.prefix :].any(),
        lambda: EquicamError(
            f"layer {model.layer!r}", needs="patch tokens that still reach the class score",
            got="a gradient of exactly zero at every patch (after the last attention only the class token does)",
            fix="the last block's first LayerNorm",
        ),
    )  # fmt: skip


def _not_finite() -> EquicamError:
    return EquicamError(
        "the model's output",
        needs="finite class scores",
        got="NaN or infinity",
        fix="dtype=None or other weights",
    )


def _refuse_probabilities(scores: Float[Tensor, "n ..."]) -> None:
    """Rows that sum to 1, or single outputs that a sigmoid made (told by the graph behind them)."""

    def error() -> EquicamError:
        return EquicamError(
            "the model's output", needs="logits", got="probabilities, behind a softmax or sigmoid",
            fix="the module without its last activation",
        )  # fmt: skip

    if scores.ndim == 2 and scores.shape[1] > 1:
        found = scores.detach()
        insist((found < 0).any() | ((found.sum(1) - 1).abs() > SUM_TO_ONE).any(), error)
        return
    node = scores.grad_fn
    while node is not None and node.name().startswith(
        ("Squeeze", "Unsqueeze", "View", "Reshape", "Select", "ToCopy")
    ):
        node = node.next_functions[0][0]
    if node is not None and node.name().startswith("Sigmoid"):
        raise error()


def _logits(output: Any) -> Tensor | None:
    if isinstance(output, Tensor):
        return output
    named = [output[k] for k in ("logits", "out") if k in output] if isinstance(output, Mapping) else []
    named = named or [getattr(output, "logits", None)]
    if isinstance(named[0], Tensor):
        return named[0]
    items = (
        list(output.values())
        if isinstance(output, Mapping)
        else output
        if isinstance(output, tuple | list)
        else []
    )
    tensors = [item for item in items if isinstance(item, Tensor) and item.ndim in (1, 2)]
    tensors = [t for t in tensors if t.ndim == 2] or tensors
    # by convention a tuple has its scores first; a dict has no first
    return tensors[0] if tensors and (len(tensors) == 1 or not isinstance(output, Mapping)) else None
