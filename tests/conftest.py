"""Tiny seeded networks in float64, and what every comparison asks first."""

import os
import tempfile
from dataclasses import replace
from functools import cache, partial
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import equicam
from equicam.methods import METHODS, Method
from equicam.readers.gradients import opti_cam, smooth_grad_cam_pp
from equicam.readers.masking import rise
from equicam.readers.reading import without_gradient

# readline exports the terminal's width of 80 to the processes that pytest starts, and rich would keep it for good
os.environ.pop("COLUMNS", None)
if "PYTEST_XDIST_WORKER" in os.environ:
    # one thread in each process, and in those it starts: the other core is taken
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    torch.set_num_threads(1)
else:
    torch.set_num_threads(2)


RECIPES = tempfile.TemporaryDirectory()


@cache
def recipe(*lines: str) -> tuple[str, str]:
    """The options of a command that takes these lines as its recipe file, such as run.workers = 1."""
    file = Path(RECIPES.name) / f"{len(list(Path(RECIPES.name).iterdir()))}.toml"
    file.write_text("\n".join(lines))
    return "--recipe", str(file)


class Cnn(nn.Module):
    """A strided network with in-place ReLUs and a head whose gradient varies over the grid."""

    def __init__(self, classes: int = 5, channels: int = 6) -> None:
        super().__init__()
        self.trunk = nn.Sequential(
            nn.Conv2d(3, channels, 3, stride=2, padding=1),
            nn.BatchNorm2d(channels),
            nn.ReLU(inplace=True),
            nn.Conv2d(channels, channels, 3, stride=2, padding=1),
            nn.ReLU(inplace=True),
        )
        self.last = nn.Conv2d(channels, channels, 3, padding=1)
        self.after = nn.Sequential(nn.ReLU(inplace=True), nn.AdaptiveAvgPool2d(1), nn.Flatten())
        self.head = nn.Linear(channels, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.after(self.last(self.trunk(x))))

    def rest(self, acts: Tensor) -> Tensor:
        """What comes after the trunk, for the slow twins."""
        return self.head(self.after(self.last(acts)))


class ChannelsLast(nn.Module):
    """A network that keeps its features [n, h, w, k], as Swin does."""

    def __init__(self, classes: int = 5, channels: int = 6) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, channels, 4, stride=4)
        self.norm = nn.LayerNorm(channels)
        self.mix = nn.Linear(channels, channels)
        self.head = nn.Linear(channels, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.rest(self.norm(self.stem(x).permute(0, 2, 3, 1)))

    def rest(self, acts: Tensor) -> Tensor:
        return self.head(self.mix(acts).relu().mean((1, 2)))


class Block(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.attn = nn.MultiheadAttention(dim, 2, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))

    def attend(self, y: Tensor) -> Tensor:
        return self.attn(y, y, y, need_weights=False)[0]

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attend(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Vit(nn.Module):
    """A vision transformer with any number of prefix tokens; pooled over patches when there are none."""

    def __init__(
        self, size: tuple[int, int] = (32, 32), prefix: int = 1, classes: int = 5, dim: int = 12
    ) -> None:
        super().__init__()
        self.prefix = prefix
        self.patch = nn.Conv2d(3, dim, 4, stride=4)
        self.tokens = nn.Parameter(torch.randn(1, prefix, dim))
        self.place = nn.Parameter(torch.randn(1, prefix + size[0] // 4 * (size[1] // 4), dim) / 2)
        self.blocks = nn.Sequential(Block(dim), Block(dim))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, classes)

    def forward(self, x: Tensor) -> Tensor:
        patches = self.patch(x).flatten(2).transpose(1, 2)
        x = torch.cat((self.tokens.expand(len(x), -1, -1), patches), 1) + self.place
        return self.pool(self.norm(self.blocks(x)))

    def pool(self, x: Tensor) -> Tensor:
        return self.head(x[:, 0] if self.prefix else x.mean(1))


def seeded(build, seed: int = 1) -> nn.Module:
    """A float64 network with weights that matter: live heads, batch statistics that are not 0 and 1."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        net = build()
        for part in net.modules():
            if isinstance(part, nn.BatchNorm2d):
                part.running_mean.normal_(0, 0.1)
                part.running_var.uniform_(0.5, 1.5)
            if isinstance(part, nn.Linear):
                nn.init.normal_(part.weight, std=0.7)
        return net.double().eval()


def pictures(count: int = 2, height: int = 32, width: int = 32, seed: int = 1) -> Tensor:
    """Smooth random pictures: blobs with an up and a down."""
    made = torch.Generator().manual_seed(seed)
    coarse = torch.randn(count, 3, 6, 6, generator=made, dtype=torch.float64)
    fine = torch.randn(count, 3, height, width, generator=made, dtype=torch.float64)
    smooth = nn.functional.interpolate(coarse, (height, width), mode="bicubic", align_corners=True)
    return 2 * smooth + 0.2 * fine


def assert_alive(*maps: Tensor) -> None:
    """Two all-zero maps agree perfectly: a comparison counts only when there is something to compare."""
    for m in maps:
        assert m.isfinite().all()
        assert (m.flatten(1).std(1) > 0.01).all(), f"degenerate maps: std {m.flatten(1).std(1).tolist()}"


CHEAP = {
    "rise": without_gradient(partial(rise, masks=24)),
    "rise-400": without_gradient(partial(rise, masks=12)),
    "smooth-grad-cam++": without_gradient(partial(smooth_grad_cam_pp, copies=3)),
    "opti-cam": without_gradient(partial(opti_cam, steps=4)),
}
TRANSFORMERS_ONLY = ("rollout", "transformer-attribution")


def light(name: str) -> Method:
    """The method of that name with fewer masks, copies or steps."""
    return replace(METHODS[name], reader=CHEAP.get(name, METHODS[name].reader))


def method_of(read, **options) -> Method:
    """A method that reads features with this function and these options."""
    return Method("", reader=without_gradient(partial(read, **options)))


def explained(net: nn.Module, x: Tensor, layer: str = "trunk", **options) -> equicam.Explanation:
    return equicam.explain(equicam.wrap(net, layer=layer), x, **options)


def methods_for(kind: str) -> list[str]:
    return [name for name in METHODS if kind == "vit" or name not in TRANSFORMERS_ONLY]


@pytest.fixture
def cnn() -> equicam.Model:
    return equicam.wrap(seeded(Cnn), layer="trunk")


@pytest.fixture
def vit() -> equicam.Model:
    return equicam.wrap(seeded(Vit), layer="blocks.1.norm1")


@pytest.fixture
def x() -> Tensor:
    return pictures()
