"""Where channels and positions stand in a layer's output, whatever the family: one way to [n, k, h, w]."""

from dataclasses import dataclass
from typing import Literal

from jaxtyping import Float
from torch import Tensor, nn

from equicam.errors import EquicamError

Kind = Literal["nchw", "nhwc", "tokens"]
_MOST_PREFIX_TOKENS = 16


@dataclass(frozen=True)
class Layout:
    """`nchw`, `nhwc`, or `tokens` [n, prefix + h·w, k] in row-major order."""

    kind: Kind
    prefix: int | None = None
    grid: tuple[int, int] | None = None

    def planes(self, output: Float[Tensor, "n ..."]) -> Float[Tensor, "n k h w"]:
        """The spatial part of the output, channels first; a view where memory allows."""
        if self.kind == "nchw":
            return output
        if self.kind == "nhwc":
            return output.permute(0, 3, 1, 2)
        if self.grid is None or self.prefix is None:
            raise EquicamError("a token layout", "prefix and grid", self, "Layout.resolve on its output")
        return output[:, self.prefix :].transpose(1, 2).reshape(len(output), -1, *self.grid)

    @property
    def prefixed(self) -> bool:
        """Whether prefix tokens (a class token, registers) stand before the patches."""
        return self.kind == "tokens" and bool(self.prefix)

    def resolve(self, shape: tuple[int, ...], size: tuple[int, int]) -> "Layout":
        """The layout with prefix and grid filled in for an output of this shape from an image of this size."""
        if self.kind != "tokens":
            return self
        if len(shape) != 3:
            raise EquicamError("a token layout", "an output [n, tokens, k]", shape, 'layout="nchw"')
        prefix, grid = self.prefix, self.grid
        if grid is None:
            found = _token_grid(shape[1], size, prefix)
            if found is None:
                needs = f"patches that tile an image of {size[0]}×{size[1]}"
                fix = 'layout=Layout("tokens", prefix=1, grid=(14, 14)) with your numbers'
                raise EquicamError(
                    f"the grid of {shape[1]} tokens", needs, f"an output of shape {shape}", fix
                )
            prefix, grid = found
        if prefix is None:
            prefix = shape[1] - grid[0] * grid[1]
        tokens = prefix + grid[0] * grid[1]
        if prefix < 0 or tokens != shape[1]:
            what = f"a grid of {grid[0]}×{grid[1]} behind {prefix} prefix tokens"
            raise EquicamError(what, f"{tokens} tokens", shape[1], "another prefix or grid")
        return Layout("tokens", prefix, grid)


def infer(shape: tuple[int, ...], size: tuple[int, int], *, channels: int | None = None) -> Layout:
    """The layout an output of this shape must have; `channels`, where the layer states them, decide between two."""
    if len(shape) == 4:
        if channels is not None and (shape[1] == channels) != (shape[3] == channels):
            return Layout("nchw" if shape[1] == channels else "nhwc")
        last = not _fits(shape[2:], size) and _fits(shape[1:3], size)
        return Layout("nhwc" if last else "nchw")
    if len(shape) == 3:
        return Layout("tokens").resolve(shape, size)
    raise EquicamError(
        "the target layer", "an output [n, k, h, w], [n, h, w, k] or [n, tokens, k]", f"shape {shape}",
        "an earlier layer, before pooling or flattening",
    )  # fmt: skip


def channels_of(layer: nn.Module) -> int | None:
    """The number of output channels a layer states, if it does."""
    if isinstance(layer, nn.LayerNorm):
        return int(layer.normalized_shape[-1])
    found = getattr(layer, "out_channels", None) or getattr(layer, "num_features", None)
    return found if isinstance(found, int) else None


def is_block_norm(module: nn.Module, name: str) -> bool:
    """Whether a layer is a norm inside a block of a sequence of blocks."""
    block = name.rpartition(".")[0]
    row = block.rpartition(".")[0]
    blocks = bool(row) and isinstance(module.get_submodule(row), nn.ModuleList | nn.Sequential)
    return blocks and "Norm" in type(module.get_submodule(name)).__name__


def _fits(grid: tuple[int, ...], size: tuple[int, int]) -> bool:
    """Whether a grid has the image's proportions, to about a cell where rounding leaves room."""
    room = 0.0 if size[0] == size[1] else 1.5
    return abs(grid[0] - grid[1] * size[0] / size[1]) <= room


def _token_grid(tokens: int, size: tuple[int, int], prefix: int | None) -> tuple[int, tuple[int, int]] | None:
    """The fewest prefix tokens that leave a whole grid of square patches."""
    grids = ((size[0] // patch, size[1] // patch) for patch in range(1, min(size) + 1))
    fits = [(tokens - h * w, (h, w)) for h, w in grids if 0 <= tokens - h * w <= _MOST_PREFIX_TOKENS]
    return min((fit for fit in fits if prefix in (None, fit[0])), default=None)
