"""The paper's negative results about baselines, measured: which hold, and which follow from how a baseline was weighted.

    python scripts/negative_results.py --weights DIR --images DIR [--only resnet50|vgg16|vit] [--n 50] [--device cuda]

DIR of weights: resnet50.safetensors (the original He et al. weights and strides), vgg16_features.safetensors (the
convolutions of VGG-16), vit_small_patch14.safetensors (a ViT-S/14 backbone). DIR of images: imagenet-val/ and
aerial/, each with items.csv (path, label, …). VGG-16 and the ViT get a linear head trained on the aerial images.
"""

import argparse
import csv
from pathlib import Path

import timm
import torch
import torchvision
from rich.console import Console
from rich.progress import track
from rich.table import Table
from safetensors.torch import load_file
from torch import Tensor, nn
from torchvision.transforms import v2

import equicam
from equicam.images.items import open_image
from equicam.readers.model import IMAGENET_MEAN, IMAGENET_STD, Model

CROP = v2.Compose(
    [
        v2.CenterCrop(224),
        v2.PILToTensor(),
        v2.ToDtype(torch.float32, scale=True),
        v2.Normalize(IMAGENET_MEAN, IMAGENET_STD),
    ]
)
IMAGES_PER_BATCH = 20


def items(folder: Path, split: str | None = None) -> list[tuple[Path, str]]:
    """Paths and labels of a listing, or of one split of it."""
    with (folder / "items.csv").open() as f:
        rows = [r for r in csv.DictReader(f) if split is None or r["split"] == split]
    return [(folder / r["path"], r["label"]) for r in rows]


def spread(rows: list[tuple[Path, str]], count: int) -> list[tuple[Path, str]]:
    """At most `count` of them, evenly over the listing."""
    count = min(count, len(rows))
    return [rows[i * len(rows) // count] for i in range(count)]


def batch(rows: list[tuple[Path, str]]) -> Tensor:
    """Images of 256×256, centre cropped and normalised."""
    return torch.stack([CROP(open_image(path)) for path, _ in rows])


def with_linear_head(backbone: nn.Module, images: Path, device: str, console: Console) -> nn.Module:
    """The backbone with a linear head for the aerial classes, by logistic regression on its frozen features."""
    train, test = (spread(items(images / "aerial", split), 600) for split in ("train", "test"))
    names = sorted({label for _, label in train})
    backbone.to(device).eval()

    @torch.no_grad()
    def features(rows: list[tuple[Path, str]]) -> tuple[Tensor, Tensor]:
        batches = [
            backbone(batch(rows[i : i + IMAGES_PER_BATCH]).to(device))
            for i in track(range(0, len(rows), IMAGES_PER_BATCH), "features")
        ]
        return torch.cat(batches), torch.tensor([names.index(label) for _, label in rows], device=device)

    (x, y), (x_test, y_test) = features(train), features(test)
    mean, std = x.mean(0), x.std(0) + 1e-6
    head = nn.Linear(x.shape[1], len(names), device=device)
    descent = torch.optim.LBFGS(head.parameters(), max_iter=200)

    def loss() -> Tensor:
        descent.zero_grad()
        value = nn.functional.cross_entropy(head((x - mean) / std), y) + 1e-3 * head.weight.square().sum()
        value.backward()
        return value

    descent.step(loss)
    with torch.no_grad():
        head.bias -= (head.weight * (mean / std)).sum(1)
        head.weight /= std
        accuracy = (head(x_test).argmax(1) == y_test).float().mean().item()
    console.print(f"linear head on {len(train)} aerial images: test accuracy {accuracy:.3f} on {len(test)}")
    return nn.Sequential(backbone, head).eval()


def constants(model: Model, rows: list[tuple[Path, str]], device: str) -> dict[str, float]:
    """How often Score-CAM's map is constant, by its original definition and as the paper weights it."""
    count = {"canonical": 0, "as published": 0}
    for i in track(range(0, len(rows), IMAGES_PER_BATCH), "score-cam"):
        x = batch(rows[i : i + IMAGES_PER_BATCH]).to(device)
        for name, protocol in (("canonical", "ours"), ("as published", "paper")):
            found = equicam.explain(model, x, method="score-cam", recipe=equicam.Recipe(protocol=protocol))
            count[name] += sum(bool(f & {"blank", "constant"}) for f in found.flags)
    return {name: hits / len(rows) for name, hits in count.items()}


def pearson(a: Tensor, b: Tensor) -> Tensor:
    """Correlation of maps, image by image; NaN where one is constant."""
    a, b = (m.flatten(1) - m.flatten(1).mean(1, keepdim=True) for m in (a, b))
    return (a * b).sum(1) / (a.norm(dim=1) * b.norm(dim=1))


def compare_xgrad(model: Model, rows: list[tuple[Path, str]], device: str) -> tuple[float, float]:
    """XGrad-CAM against Grad-CAM: the largest difference and the mean correlation of their maps."""
    differences, correlations = [], []
    for i in range(0, len(rows), IMAGES_PER_BATCH):
        x = batch(rows[i : i + IMAGES_PER_BATCH]).to(device)
        one, two = (equicam.explain(model, x, method=m).map for m in ("grad-cam", "xgrad-cam"))
        differences.append((one - two).abs().amax((1, 2)))
        correlations.append(pearson(one, two))
    return torch.cat(differences).max().item(), torch.cat(correlations).nanmean().item()


def main() -> None:
    """Measure the chosen networks, and print one table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--weights", type=Path, required=True)
    parser.add_argument("--images", type=Path, required=True)
    parser.add_argument(
        "--only", choices=["resnet50", "vgg16", "vit"], nargs="+", default=["resnet50", "vgg16", "vit"]
    )
    parser.add_argument("--n", type=int, default=50)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    console = Console()
    table = Table("claim", "network", "measured", "n")
    aerial = args.images / "aerial"
    if "resnet50" in args.only:
        net = torchvision.models.resnet50()
        for stage in (net.layer2, net.layer3, net.layer4):
            stage[0].conv1.stride, stage[0].conv2.stride = (2, 2), (1, 1)
        net.load_state_dict(load_file(args.weights / "resnet50.safetensors"), strict=False)
        model = equicam.wrap(net.to(args.device).eval(), "layer4")
        rows = spread(items(args.images / "imagenet-val"), args.n)
        largest, mean = compare_xgrad(model, rows, args.device)
        table.add_row(
            "xgrad-cam equals grad-cam", "ResNet-50", f"largest difference {largest:.1e}", str(len(rows))
        )
        found = constants(model, rows, args.device)
        table.add_row("score-cam maps are constant", "ResNet-50", f"{found}", str(len(rows)))
    if "vgg16" in args.only:
        features = torchvision.models.vgg16().features
        features.load_state_dict(
            {k[9:]: v for k, v in load_file(args.weights / "vgg16_features.safetensors").items()}
        )
        pooled = nn.Sequential(features, nn.AdaptiveAvgPool2d(1), nn.Flatten())
        model = equicam.wrap(with_linear_head(pooled, args.images, args.device, console), "0.0.29")
        rows = spread(items(aerial, "test"), args.n)
        found = constants(model, rows, args.device)
        table.add_row("score-cam maps are constant", "VGG-16, aerial head", f"{found}", str(len(rows)))
    if "vit" in args.only:
        vit = timm.create_model("vit_small_patch14_dinov2", num_classes=0, dynamic_img_size=True)
        vit.load_state_dict(load_file(args.weights / "vit_small_patch14.safetensors"), strict=False)
        net = with_linear_head(vit, args.images, args.device, console)
        rows = spread(items(aerial, "test"), args.n)
        for rectify in (False, True):
            model = equicam.wrap(net, "0.blocks.11.norm1", rectify_weights=rectify)
            _, mean = compare_xgrad(model, rows, args.device)
            weights = "rectified" if rectify else "plain"
            table.add_row(
                "xgrad-cam against grad-cam",
                f"ViT-S/14, aerial head, {weights} weights",
                f"mean correlation {mean:.3f}",
                str(len(rows)),
            )
        try:
            equicam.explain(equicam.wrap(net, "0.blocks.11.norm2"), batch(rows[:4]).to(args.device), views=1)
            table.add_row("after the last attention", "ViT-S/14", "patch gradients are not zero", "4")
        except equicam.EquicamError as error:
            table.add_row("after the last attention", "ViT-S/14", str(error), "4")
    console.print(table)


if __name__ == "__main__":
    main()
