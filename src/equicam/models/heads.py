"""The last linear layer of a classifier: found, and exchanged for one of another number of classes."""

from torch import nn

from equicam.errors import EquicamError


def head_name(module: nn.Module) -> str:
    """The name of the last linear layer, in the order a network lists its parts."""
    found: list[str] = [name for name, part in module.named_modules() if isinstance(part, nn.Linear)]
    if not found:
        raise EquicamError(
            f"{type(module).__name__}",
            needs="a linear layer at its end",
            got="none",
            fix="a factory with its own head",
        )
    return found[-1]


def resize_head(module: nn.Module, classes: int) -> nn.Module:
    """The same network with a fresh last layer for so many classes, unless it has as many already."""
    name = head_name(module)
    old = module.get_submodule(name)
    assert isinstance(old, nn.Linear)  # noqa: S101  # head_name looked for one
    if old.out_features != classes:
        parent, _, child = name.rpartition(".")
        fresh = nn.Linear(
            old.in_features,
            classes,
            bias=old.bias is not None,
            dtype=old.weight.dtype,
            device=old.weight.device,
        )
        setattr(module.get_submodule(parent), child, fresh)
    return module
