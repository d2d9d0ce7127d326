"""The embedded model: a small residual network for the synthetic patches of `equicam.images.synthetic`.

`scripts/embedded_model.py` trains it on synthetic images alone. It is for demonstrations and tests, not for
clinical use.
"""

from pathlib import Path

from jaxtyping import Float
from safetensors.torch import load_file
from torch import Tensor, nn

CLASSES = ("no tumour in the centre", "tumour in the centre")
MEAN = (0.77, 0.56, 0.71)
"""Channel means of the synthetic patches in [0, 1]: preprocessing subtracts them, then divides by `STD`."""
STD = (0.15, 0.13, 0.09)
LAYER = "layer4"
"""The layer that `choose_layer` finds; stating it saves a forward pass in every `load`."""
WEIGHTS = Path(__file__).with_name("embedded.safetensors")


def embedded() -> "EmbeddedNet":
    """The trained network, in evaluation mode."""
    net = EmbeddedNet()
    net.load_state_dict(load_file(WEIGHTS))
    return net.eval()


class EmbeddedNet(nn.Module):
    """A residual network of four stages; the last has a 12×12 grid for a 96×96 patch."""

    image_size = 96

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, 16, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU()
        )
        self.layer1 = _stage(16, 16, stride=1)
        self.layer2 = _stage(16, 32, stride=2)
        self.layer3 = _stage(32, 48, stride=2)
        self.layer4 = _stage(48, 64, stride=1)  # stride 1 keeps the grid fine
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(64, len(CLASSES))

    def forward(self, x: Float[Tensor, "b 3 H W"]) -> Float[Tensor, "m 2"]:
        """Logits of `CLASSES`."""
        x = self.layer4(self.layer3(self.layer2(self.layer1(self.stem(x)))))
        logits: Tensor = self.fc(self.avgpool(x).flatten(1))
        return logits


class BasicBlock(nn.Module):
    """Two 3×3 convolutions with a shortcut: the identity, or a 1×1 convolution where the shape changes."""

    def __init__(self, width_in: int, width: int, *, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(width_in, width, 3, stride=stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU()
        self.downsample: nn.Module = nn.Identity()
        if stride > 1 or width_in != width:
            self.downsample = nn.Sequential(
                nn.Conv2d(width_in, width, 1, stride=stride, bias=False), nn.BatchNorm2d(width)
            )

    def forward(self, x: Float[Tensor, "b k h w"]) -> Float[Tensor, "b l i j"]:
        """ReLU(F(x) + shortcut(x))."""
        out = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        summed: Tensor = self.relu(out + self.downsample(x))
        return summed


def _stage(width_in: int, width: int, *, stride: int) -> nn.Sequential:
    return nn.Sequential(BasicBlock(width_in, width, stride=stride), BasicBlock(width, width, stride=1))
