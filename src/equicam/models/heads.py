"""The last linear layer of a classifier."""

from torch import nn

from equicam.errors import EquicamError


def head_name(module: nn.Module) -> str:
    """The name of the last linear layer in the order of `named_modules`."""
    linear: list[str] = [name for name, child in module.named_modules() if isinstance(child, nn.Linear)]
    if not linear:
        raise EquicamError(
            f"{type(module).__name__}",
            needs="a linear layer at its end",
            got="none",
            fix="a factory with its own head",
        )
    return linear[-1]


def resize_head(module: nn.Module, classes: int) -> nn.Module:
    """Replace the last layer, in place, unless it already has this number of classes."""
    name = head_name(module)
    old = module.get_submodule(name)
    assert isinstance(old, nn.Linear)  # noqa: S101  # head_name returns a linear layer
    if old.out_features != classes:
        parent, _, child = name.rpartition(".")
        replacement = nn.Linear(
            old.in_features,
            classes,
            bias=old.bias is not None,
            dtype=old.weight.dtype,
            device=old.weight.device,
        )
        setattr(module.get_submodule(parent), child, replacement)
    return module
