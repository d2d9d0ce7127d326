"""The cost of the equivariance protocol over its forward passes, and of one more fusion of the same views.

    python benchmarks/evaluate.py [--rounds 3] [--images 1]

ResNet-50, random weights, Grad-CAM and every EquiGrad variant at T = 18: 8 × 18 views per image. Contenders are timed
one after another within a round, and a ratio is the median over rounds of the ratio within a round.
"""

import argparse
import statistics
import time

import torch
import torchvision
from rich.console import Console
from rich.table import Table

import equicam
from equicam.evaluate.equivariance import ANGLES
from equicam.readers.forward import views_that_fit

VARIANTS = ["grad-cam", "aug-cam", *(m for m in equicam.methods() if m.startswith("equigrad"))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--images", type=int, default=1)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    net = torchvision.models.resnet50().eval().to(memory_format=torch.channels_last)
    model = equicam.wrap(net, layer="layer4")
    x = torch.randn(options.images, 3, 224, 224)
    views = equicam.Views.evenly(18)
    rotated = torch.cat([views.act(equicam.rotate(x, a)).flatten(0, 1) for a in (0, *ANGLES)])
    passes_per_image = -(-18 // views_that_fit(x))  # `evaluate` splits each image's views into as many passes
    pieces = [
        p.contiguous(memory_format=torch.channels_last)
        for p in rotated.tensor_split(8 * options.images * passes_per_image)
    ]

    def forward() -> None:
        with torch.inference_mode():
            for piece in pieces:
                net(piece)

    runs = {
        f"forward of {len(rotated)} views": forward,
        "evaluate, equigrad-cam": lambda: equicam.evaluate(model, x, methods=["equigrad-cam"]),
        "evaluate, equigrad-cam and +pcf": lambda: equicam.evaluate(
            model, x, methods=["equigrad-cam", "equigrad-cam+pcf"]
        ),
        f"evaluate, {len(VARIANTS)} methods": lambda: equicam.evaluate(model, x, methods=VARIANTS),
    }
    forward()
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(options.rounds):
        for name, run in runs.items():
            start = time.perf_counter()
            run()
            seconds[name].append(time.perf_counter() - start)
    names = list(runs)
    table = Table("ResNet-50", "seconds", "of the forward passes", "limit")
    limits = {names[3]: "1.30"}
    for name in names:
        ratio = statistics.median(a / b for a, b in zip(seconds[name], seconds[names[0]], strict=True))
        table.add_row(name, f"{statistics.median(seconds[name]):.2f}", f"{ratio:.3f}", limits.get(name, ""))
    more = statistics.median(b / a - 1 for a, b in zip(seconds[names[1]], seconds[names[2]], strict=True))
    table.add_row("one more fusion of the same views", "", f"{more:+.1%}", "+5 %")
    Console().print(table)


if __name__ == "__main__":
    main()
