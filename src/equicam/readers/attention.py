"""Explanations from a transformer's attention, recorded while it runs, whatever library and kernel computes it."""

from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from equicam.errors import EquicamError
from equicam.readers.gradients import class_scores, feed, undisturbed
from equicam.readers.layout import Layout
from equicam.readers.model import Model
from equicam.readers.reading import Pin, Reading, wide

Attention = Float[Tensor, "n heads N N"]
_SOFTMAX = (functional.softmax, torch.softmax, Tensor.softmax)


class Recorder(TorchFunctionMode):
    """Inside `with`, every square attention that is computed is kept, on the graph; all is put back after.

    Fused kernels hide their attention, so calls to them are answered with the same formula written out;
    `nn.MultiheadAttention` is led to that call. Attention written as a softmax is seen as it passes.
    """

    def __init__(self) -> None:
        super().__init__()
        self.kept: list[Tensor] = []
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
        if func is self._fused:  # bound by name before we came
            return self._attend(*args, **kwargs)
        if func is functional.multi_head_attention_forward and kwargs.get("need_weights", True):
            output, _ = func(*args, **kwargs | {"need_weights": False})
            if self._last is None or not kwargs.get("average_attn_weights", True):
                return output, self._last
            return output, self._last.mean(1)
        found = func(*args, **kwargs)
        if func in _SOFTMAX:
            self._keep(found)
        return found

    def _keep(self, attention: Tensor) -> None:
        if attention.ndim >= 3 and attention.shape[-1] == attention.shape[-2]:
            self.kept.append(attention)

    def _attend(
        self, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
        is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
    ) -> Tensor:  # fmt: skip
        if is_causal or enable_gqa or dropout_p:
            raise EquicamError(
                "recording attention", needs="plain bidirectional attention", got="a causal, grouped or dropped one",
                fix="a vision transformer in eval mode",
            )  # fmt: skip
        logits = query @ key.transpose(-2, -1) * (query.shape[-1] ** -0.5 if scale is None else scale)
        if attn_mask is not None:
            logits = (
                logits.masked_fill(~attn_mask, -torch.inf)
                if attn_mask.dtype == torch.bool
                else logits + attn_mask
            )
        with torch._C.DisableTorchFunction():  # this softmax is kept here, not on its way past
            attention = logits.softmax(-1)
        self._last = attention
        self._keep(attention)
        return attention @ value


def rollout(
    model: Model, x: Float[Tensor, "n c H W"], pin: Pin, *, autocast: torch.dtype | None = None
) -> Reading:
    """Attention rollout: the class token's row of Π_l rows((Ā_l + I)/2), later blocks on the left; no class in it."""
    layers, scores, probs, _ = _recorded(model, x, pin, autocast, gradients=False)
    size = layers[0].shape[-1]
    eye = torch.eye(size, dtype=layers[0].dtype, device=x.device)
    flow = eye.expand(len(x), -1, -1)
    for attention in layers:
        mixed = (attention.mean(1) + eye) / 2
        flow = mixed / mixed.sum(-1, keepdim=True) @ flow
    return Reading("rectified", (_patches(model, flow, x),), scores, probs)


def transformer_attribution(
    model: Model, x: Float[Tensor, "n c H W"], pin: Pin, *, autocast: torch.dtype | None = None
) -> Reading:
    """Gradient × attention: C_l = mean_heads (∂y_c/∂A_l ⊙ A_l)⁺, R ← R + C_l R from R = I; the class token's row.

    The rule of the later, generic method, without relevance propagation, which is what the paper ran. The original
    relevance-propagation method needs every operation of the network rewritten with its own rule, and is not offered.
    """
    layers, scores, probs, gradients = _recorded(model, x, pin, autocast, gradients=True)
    size = layers[0].shape[-1]
    relevance = torch.eye(size, dtype=layers[0].dtype, device=x.device).expand(len(x), -1, -1)
    for attention, gradient in zip(layers, gradients, strict=True):
        relevance = relevance + (attention * gradient).relu().mean(1) @ relevance
    return Reading("rectified", (_patches(model, relevance, x),), scores, probs)


def _recorded(
    model: Model, x: Tensor, pin: Pin, autocast: torch.dtype | None, *, gradients: bool
) -> tuple[list[Attention], Tensor, Tensor, list[Attention]]:
    """Every block's attention [n, heads, N, N], in order, and its gradient for the target if asked."""
    with undisturbed(model.module), torch.set_grad_enabled(gradients):
        with Recorder() as recorder:
            output = feed(model, x.detach().clone().requires_grad_(gradients), autocast)
        scores, probs = class_scores(output, count=len(x))
        target, _ = pin(scores.detach())
        kept = recorder.kept
        sizes = {a.shape[-1] for a in kept}
        whole = all(len(a) == len(x) if a.ndim == 4 else len(a) % len(x) == 0 for a in kept)
        if len(sizes) != 1 or not whole:
            raise EquicamError(
                "attention", needs="a transformer whose blocks all attend over all tokens",
                got=f"attention over {sorted(sizes)} tokens, in windows" if kept else "none in this model",
                fix="grad-cam or another method that reads features",
            )  # fmt: skip
        (tokens,) = sizes
        chosen = scores.gather(1, target[:, None]).sum()
        grads = torch.autograd.grad(chosen, kept, materialize_grads=True) if gradients else ()

    def by_head(attention: Tensor) -> Tensor:
        return wide(attention.detach()).reshape(len(x), -1, tokens, tokens)

    return [by_head(a) for a in kept], scores.detach(), probs.detach(), [by_head(g) for g in grads]


def _patches(model: Model, flow: Float[Tensor, "n N N"], x: Tensor) -> Float[Tensor, "n h w"]:
    """The class token's row over the patches, as a grid."""
    wanted = model.layout if model.layout is not None and model.layout.kind == "tokens" else Layout("tokens")
    layout = wanted.resolve((len(x), flow.shape[-1], 1), (x.shape[-2], x.shape[-1]))
    row = flow[:, 0] if layout.prefix else flow.mean(1)
    return layout.planes(row[..., None])[:, 0]
