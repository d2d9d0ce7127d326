"""Gradient-free methods on this machine's CPU: ours, the passes they need, and the peer, in one process.

    python benchmarks/gradient_free.py [--rounds 3] [--threads 2]

The peer's Ablation-CAM and Score-CAM run the whole network once a channel; each is timed once.
"""

import statistics
import subprocess
import sys
import time
from collections.abc import Callable

import torch
import torchvision
from pytorch_grad_cam import AblationCAM, ScoreCAM
from pytorch_grad_cam.utils.model_targets import ClassifierOutputTarget
from rich.console import Console
from rich.table import Table
from torch import nn

import equicam
from equicam.readers.forward import views_that_fit
from peers import parse_rounds

X = torch.randn(1, 3, 224, 224, generator=torch.Generator().manual_seed(0))


def seconds(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def interleaved(rounds: int, *runs: Callable[[], object]) -> list[list[float]]:
    for run in runs:
        run()
    rows = [[seconds(run) for run in runs] for _ in range(rounds)]
    return [list(column) for column in zip(*rows, strict=True)]


def ratio(one: list[float], other: list[float]) -> float:
    return statistics.median(a / b for a, b in zip(one, other, strict=True))


def peer_once(peer: type, net: nn.Module) -> float:
    with peer(net, [net.layer4]) as cam:
        return seconds(lambda: cam(X, targets=[ClassifierOutputTarget(0)]))


def bare_passes(net: nn.Module, count: int) -> Callable[[], None]:
    """So many forward passes of one image's size, in the batches we use."""
    batches = torch.split(X.expand(count, -1, -1, -1).contiguous(), views_that_fit(X))

    @torch.inference_mode()
    def run() -> None:
        net(X)
        for batch in batches:
            net(batch)

    return run


def trunk_and_head(trunk: Callable, head: Callable, count: int) -> Callable[[], None]:
    """One pass of the trunk, and the head on so many feature maps."""

    @torch.inference_mode()
    def run() -> None:
        features = trunk(X)
        head(features.expand(count + 1, -1, -1, -1).contiguous())

    return run


def peak_megabytes(ours: bool) -> float:
    """The most memory a fresh process takes for one Score-CAM of ResNet-18."""
    code = (
        "import re, torch, torchvision, equicam; from pytorch_grad_cam import ScoreCAM\n"
        "net, x = torchvision.models.resnet18().eval(), torch.randn(1, 3, 224, 224)\n"
        + (
            "equicam.explain(equicam.wrap(net, layer='layer4'), x, method='score-cam')\n"
            if ours
            else "ScoreCAM(net, [net.layer4])(x, targets=[lambda y: y[..., 0]])\n"
        )
        # not ru_maxrss, which a process inherits from the one that started it
        + "print(int(re.search(r'VmHWM:\\s+(\\d+)', open('/proc/self/status').read())[1]) / 1024)"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    return float(done.stdout)


def main() -> None:
    rounds = parse_rounds(__doc__, rounds=3)
    net = torchvision.models.resnet18().eval()
    model = equicam.wrap(net, layer="layer4")
    table = Table("method", "ours, s", "against, s", "against what", "ratio", "promise", "")

    def row(name: str, ours: float, other: float, what: str, found: float, promise: str, kept: bool) -> None:
        table.add_row(
            name, f"{ours:.3f}", f"{other:.3f}", what, f"{found:.2f}", promise, "kept" if kept else "MISSED"
        )

    ours, bare = interleaved(
        rounds, lambda: equicam.explain(model, X, method="score-cam"), bare_passes(net, 512)
    )
    found = ratio(ours, bare)
    row(
        "score-cam, ResNet-18",
        statistics.median(ours),
        statistics.median(bare),
        "its 513 forward passes",
        found,
        "≤ 1.10",
        found <= 1.10,
    )

    def head(features: torch.Tensor) -> torch.Tensor:
        return net.fc(net.avgpool(features).flatten(1))

    def trunk(x: torch.Tensor) -> torch.Tensor:
        return net.layer4(net.layer3(net.layer2(net.layer1(net.maxpool(net.relu(net.bn1(net.conv1(x))))))))

    vgg = torchvision.models.vgg16().eval()
    cases = {
        "recipro-cam, ResNet-18": (model, trunk_and_head(trunk, head, 49)),
        "recipro-cam, VGG-16": (
            equicam.wrap(vgg, layer="features.29"),
            trunk_and_head(
                vgg.features[:30], lambda f: vgg.classifier(vgg.avgpool(vgg.features[30](f)).flatten(1)), 196
            ),
        ),
    }
    for name, (subject, bare_run) in cases.items():
        ours, bare = interleaved(
            5 * rounds, lambda m=subject: equicam.explain(m, X, method="recipro-cam"), bare_run
        )
        found = ratio(ours, bare)
        what = "one pass of the trunk, and the head on every variant"
        row(name, statistics.median(ours), statistics.median(bare), what, found, "≤ 1.50", found <= 1.50)

    (ours,) = interleaved(rounds, lambda: equicam.explain(model, X, method="ablation-cam"))
    theirs = peer_once(AblationCAM, net)
    found = theirs / statistics.median(ours)
    row(
        "ablation-cam, ResNet-18",
        statistics.median(ours),
        theirs,
        "pytorch-grad-cam, times slower",
        found,
        "≥ 100",
        found >= 100,
    )
    (ours,) = interleaved(1, lambda: equicam.explain(model, X, method="score-cam"))
    theirs = peer_once(ScoreCAM, net)
    table.add_row(
        "score-cam, ResNet-18",
        f"{ours[0]:.3f}",
        f"{theirs:.3f}",
        "pytorch-grad-cam, times slower",
        f"{theirs / ours[0]:.2f}",
        "",
        "",
    )
    console = Console()
    console.print(table)
    console.print(
        f"peak memory of a process for one score-cam: ours {peak_megabytes(ours=True):.0f} MB, "
        f"pytorch-grad-cam's {peak_megabytes(ours=False):.0f} MB. torch {torch.__version__}, {torch.get_num_threads()} threads"
    )


if __name__ == "__main__":
    main()
