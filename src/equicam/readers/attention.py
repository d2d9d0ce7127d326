"""Explanations from a transformer's attention, recorded while it runs, whichever library and kernel compute it."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from equicam.errors import EquicamError
from equicam.readers.failures import Check, module_failure
from equicam.readers.forward import Captured, Forward, Network, frozen, run_module
from equicam.readers.gradients import class_logit
from equicam.readers.layout import Layout
from equicam.readers.logits import at_least_float32, read_output
from equicam.readers.reading import Reader, Reading, Targets

Attention = Float[Tensor, "n heads N N"]
_SOFTMAX = (functional.softmax, torch.softmax, Tensor.softmax)


class Recorder(TorchFunctionMode):
    """Inside `with`, records every square attention that is computed, on the autograd graph; patches are removed after.

    Fused kernels hide their attention, so calls to them run the same formula written out, and
    `nn.MultiheadAttention` is routed to that call. Attention written as a softmax is recorded as it is computed.
    """

    def __init__(self) -> None:
        super().__init__()
        self.recorded: list[Tensor] = []
        self._last: Tensor | None = None
        self._fused = functional.scaled_dot_product_attention

    def __enter__(self) -> "Recorder":
        functional.scaled_dot_product_attention = self._attend
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        functional.scaled_dot_product_attention = self._fused
        super().__exit__(*error)  # type: ignore[no-untyped-call]

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func is self._fused:  # a name bound before the patch
            return self._attend(*args, **kwargs)
        if func is functional.multi_head_attention_forward and kwargs.get("need_weights", True):
            output, _ = func(*args, **kwargs | {"need_weights": False})
            if self._last is None or not kwargs.get("average_attn_weights", True):
                return output, self._last
            return output, self._last.mean(1)
        found = func(*args, **kwargs)
        if func in _SOFTMAX:
            self._record(found)
        return found

    def _record(self, attention: Tensor) -> None:
        if attention.ndim >= 3 and attention.shape[-1] == attention.shape[-2]:
            self.recorded.append(attention)

    def _attend(
        self, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
        is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
    ) -> Tensor:  # fmt: skip
        if is_causal or enable_gqa or dropout_p:
            raise EquicamError(
                "recording attention", "plain bidirectional attention", "a causal, grouped or dropped one",
                "a vision transformer in eval mode",
            )  # fmt: skip
        logits = query @ key.transpose(-2, -1) * (query.shape[-1] ** -0.5 if scale is None else scale)
        if attn_mask is not None:
            is_bool = attn_mask.dtype == torch.bool
            logits = logits.masked_fill(~attn_mask, -torch.inf) if is_bool else logits + attn_mask
        with torch._C.DisableTorchFunction():  # recorded below, not by __torch_function__
            attention = logits.softmax(-1)
        self._last = attention
        self._record(attention)
        return attention @ value


def _record_attention(network: Network, x: Float[Tensor, "n c H W"], *, gradients: bool) -> Forward:
    """Every block's attention [n, heads, N, N], in order, and its gradient on request."""
    with frozen(network.model.module), torch.set_grad_enabled(gradients):
        with Recorder() as recorder:
            output = run_module(network, x.detach().clone().requires_grad_(gradients))
        found = read_output(network.model, output, count=len(x))
    recorded = recorder.recorded
    sizes = {a.shape[-1] for a in recorded}
    whole = all(len(a) == len(x) if a.ndim == 4 else len(a) % len(x) == 0 for a in recorded)
    if len(sizes) != 1 or not whole:
        raise EquicamError(
            "attention", "a transformer whose blocks all attend over all tokens",
            f"attention over {sorted(sizes)} tokens, in windows" if recorded else "none in this model",
            "grad-cam or another method that reads features",
        )  # fmt: skip
    (tokens,) = sizes

    def by_head(attention: Tensor) -> Tensor:
        return at_least_float32(attention.detach()).reshape(len(x), -1, tokens, tokens)

    def gradient(direction: Float[Tensor, "n y"]) -> tuple[Captured, tuple[Check, ...]]:
        with module_failure(network.model.module, tuple(x.shape), network.model.name):
            grads = torch.autograd.grad(found.logits, recorded, direction, materialize_grads=True)
        return tuple(by_head(g) for g in grads), ()

    return Forward(
        network=network,
        x=x,
        captured=tuple(by_head(a) for a in recorded),
        logits=found.logits.detach(),
        probabilities=None if found.probabilities is None else found.probabilities.detach(),
        gradient=gradient,
        checks=found.checks,
    )


def _read_rollout(forward: Forward, _targets: Targets) -> Reading:
    """Attention rollout: the class token's row of Π_l rows((Ā_l + I)/2), later blocks on the left; no class in it."""
    blocks = forward.captured
    eye = torch.eye(blocks[0].shape[-1], dtype=blocks[0].dtype, device=blocks[0].device)
    flow = eye.expand(len(forward.x), -1, -1)
    for attention in blocks:
        mixed = (attention.mean(1) + eye) / 2
        flow = mixed / mixed.sum(-1, keepdim=True) @ flow
    return Reading("rectified", (_patches(forward, flow),))


def _read_transformer_attribution(forward: Forward, targets: Targets) -> Reading:
    """Gradient × attention: C_l = mean_heads (∂y_c/∂A_l ⊙ A_l)⁺, R ← R + C_l R from R = I; the class token's row.

    This is the later, generic method without relevance propagation, which is what the paper ran. The original method
    needs every operation of the network rewritten with its own propagation rule, and is not offered.
    """
    blocks = forward.captured
    gradients, checks = forward.gradient(class_logit(forward.logits, targets.classes))
    eye = torch.eye(blocks[0].shape[-1], dtype=blocks[0].dtype, device=blocks[0].device)
    relevance = eye.expand(len(forward.x), -1, -1)
    for attention, gradient in zip(blocks, gradients, strict=True):
        relevance = relevance + (attention * gradient).relu().mean(1) @ relevance
    return Reading("rectified", (_patches(forward, relevance),), checks)


ROLLOUT = Reader(_read_rollout, partial(_record_attention, gradients=False))
TRANSFORMER_ATTRIBUTION = Reader(_read_transformer_attribution, partial(_record_attention, gradients=True))


def _patches(forward: Forward, flow: Float[Tensor, "n N N"]) -> Float[Tensor, "n h w"]:
    """The class token's row over the patches, as a grid."""
    model, x = forward.network.model, forward.x
    wanted = model.layout if model.layout is not None and model.layout.kind == "tokens" else Layout("tokens")
    layout = wanted.resolve((len(x), flow.shape[-1], 1), (x.shape[-2], x.shape[-1]))
    row = flow[:, 0] if layout.prefix else flow.mean(1)
    return layout.planes(row[..., None])[:, 0]
