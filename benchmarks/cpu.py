"""What an explanation costs on this machine's CPU: ours and the peers, interleaved in one process, one table.

    python benchmarks/cpu.py [--rounds 9] [--threads 2]

Every round times each contender once, in turn; a ratio is the median over rounds of the ratio within a round, so
that a noisy machine disturbs both sides alike. Networks have random weights: time does not depend on them.
"""

import statistics
import time
from collections.abc import Callable

import timm
import torch
import torchvision
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import nn

import equicam
from equicam.readers.forward import views_that_fit
from peers import PEER, Run, parse_rounds, peers, tokens_to_grid


def forward(net: nn.Module, views: torch.Tensor, dtype: torch.dtype | None = None) -> Run:
    """The forward passes alone, in the same batches and memory format as `explain`."""
    pieces = [
        p.contiguous(memory_format=torch.channels_last) if net.channels_last else p
        for p in views.tensor_split(-(-len(views) // views_that_fit(views)))
    ]

    def run() -> None:
        with (
            torch.inference_mode(),
            torch.autocast("cpu", dtype or torch.bfloat16, enabled=dtype is not None),
        ):
            for piece in pieces:
                net(piece)

    return run


def contenders(net: nn.Module, layer: str, x: torch.Tensor, reshape: Callable | None) -> dict[str, Run]:
    """Everything that is timed on one network and one image."""
    others = peers(net, layer, x, reshape)
    net = net.to(memory_format=torch.channels_last) if net.channels_last else net
    model = equicam.wrap(net, layer=layer)
    views = {t: equicam.Views.evenly(t).act(x).flatten(0, 1) for t in (6, 18)}
    rows: dict[str, Run] = {
        "forward of 18 views": forward(net, views[18]),
        "equicam, 18 views + PEUM": lambda: equicam.explain(model, x),
        "equicam, 6 views + PEUM": lambda: equicam.explain(model, x, views=6),
        "equicam, 6 views + PEUM, bf16": lambda: equicam.explain(model, x, views=6, dtype=torch.bfloat16),
        "equicam, 1 view": lambda: equicam.explain(model, x, method="grad-cam"),
    }
    return rows | others


def saved_megabytes(run: Run) -> float:
    """Bytes autograd keeps for the backward pass, each storage counted once; parameters are there anyway."""
    sizes: dict[int, int] = {}

    def keep(t: torch.Tensor) -> torch.Tensor:
        if not isinstance(t, nn.Parameter):
            sizes[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        run()
    return sum(sizes.values()) / 1e6


def measure(rows: dict[str, Run], rounds: int, title: str) -> dict[str, list[float]]:
    for run in rows.values():
        run()
    seconds: dict[str, list[float]] = {name: [] for name in rows}
    for _ in track(range(rounds), title, transient=True):
        for name, run in rows.items():
            start = time.perf_counter()
            run()
            seconds[name].append(time.perf_counter() - start)
    return seconds


# what we promise: (network, what, against what, at most)
PROMISES = (
    ("ResNet-50", "equicam, 18 views + PEUM", "forward of 18 views", 1.10),
    ("ViT-S/16", "equicam, 18 views + PEUM", "forward of 18 views", 1.20),
    ("ResNet-50", "equicam, 6 views + PEUM", PEER, 1.70),
    ("ResNet-50", "equicam, 6 views + PEUM, bf16", PEER, 0.95),
)


def ratio(seconds: dict[str, list[float]], one: str, other: str) -> float:
    return statistics.median(a / b for a, b in zip(seconds[one], seconds[other], strict=True))


def main() -> None:
    rounds = parse_rounds(__doc__, rounds=9)
    console = Console()
    resnet = torchvision.models.resnet50().eval()
    resnet.channels_last = True
    vit = timm.create_model("vit_small_patch16_224", weight_init="").eval()
    vit.channels_last = False
    nn.init.normal_(vit.head.weight, std=0.02)
    x = torch.randn(1, 3, 224, 224)
    cases = {
        "ResNet-50": (resnet, "layer4", None),
        "ViT-S/16": (vit, "blocks.11.norm1", tokens_to_grid),
    }
    table = Table(
        "network", "what", "seconds", "× forward of 18", "× one pytorch-grad-cam", title="one 224² image"
    )
    measured = {}
    for title, (net, layer, reshape) in cases.items():
        measured[title] = seconds = measure(contenders(net, layer, x, reshape), rounds, title)
        for name in seconds:
            table.add_row(
                title,
                name,
                f"{statistics.median(seconds[name]):.3f}",
                f"{ratio(seconds, name, 'forward of 18 views'):.2f}",
                f"{ratio(seconds, name, PEER):.2f}",
            )
        table.add_section()
    console.print(table)
    console.print(memory(resnet, torch.randn(8, 3, 224, 224)))
    promises = Table("promise", "ratio", "at most", "")
    for title, one, other, limit in PROMISES:
        found = ratio(measured[title], one, other)
        promises.add_row(
            f"{title}: {one} / {other}",
            f"{found:.2f}",
            f"{limit:.2f}",
            "kept" if found <= limit else "MISSED",
        )
    console.print(promises)
    console.print(
        f"torch {torch.__version__}, {torch.get_num_threads()} threads, {rounds} rounds, medians; "
        f"bf16 {'in hardware' if torch.ops.mkldnn._is_mkldnn_bf16_supported() else 'not in hardware'}"
    )


def memory(net: nn.Module, x: torch.Tensor) -> Table:
    model = equicam.wrap(net, layer="layer4")
    runs: dict[str, Run] = {
        "equicam": lambda: equicam.explain(model, x, method="grad-cam", max_views_per_forward=8)
    }
    table = Table("one Grad-CAM of 8 images, ResNet-50", "MB saved for backward")
    for name, run in (runs | peers(net, "layer4", x)).items():
        table.add_row(name.removesuffix(", 1 view"), f"{saved_megabytes(run):.1f}")
    return table


if __name__ == "__main__":
    main()
