"""What an explanation costs on one GPU: ours, the compiled forward passes alone, and the peers, in one run.

    python benchmarks/gpu.py [--networks resnet50 vgg16 vit_b_16] [--batches 64 1] [--rounds 9]

18 views of 224×224 with PEUM, bf16 under autocast; the peers run one view of the same images as their users do, in
float32 with TF32 convolutions. Every round times each contender once, in turn; figures are medians. Networks have random
weights: time does not depend on them. The first use of a size compiles, which is timed and printed apart.
"""

import argparse
import json
import statistics
import time
from pathlib import Path

import torch
import torchvision
from captum.attr import LayerGradCam
from torch import nn

import equicam
from peers import PEER, Run, peers, tokens_to_grid

VIEWS = 18
LAYERS = {"resnet50": "layer4", "vgg16": "features.29", "vit_b_16": None, "mobilenet_v2": "features.18"}
FORWARD, OURS = "forward of 18 views, compiled", "equicam, 18 views + PEUM, compiled"
# what we promise: (network, images, what, against what, at most); milliseconds where there is no second
PROMISES = (
    *(
        (network, 64, OURS, FORWARD, most)
        for network, most in (("resnet50", 1.08), ("vgg16", 1.10), ("vit_b_16", 1.12))
    ),
    *((network, 1, OURS, FORWARD, 1.05) for network in ("resnet50", "vgg16", "vit_b_16")),
    ("resnet50", 64, OURS, PEER, 1.0),
    ("resnet50", 1, OURS, PEER, 1.0),
)


def network(name: str) -> tuple[nn.Module, str]:
    torch.manual_seed(0)
    net = getattr(torchvision.models, name)().eval().cuda()
    if name == "vit_b_16":
        nn.init.normal_(net.heads.head.weight, std=0.02)  # torchvision's starts at zero
        return net, equicam.wrap(net, example=torch.zeros(1, 3, 224, 224)).layer
    return net.to(memory_format=torch.channels_last), LAYERS[name]


def contenders(name: str, images: int) -> dict[str, Run]:
    net, layer = network(name)
    x = torch.randn(images, 3, 224, 224, device="cuda")
    model = equicam.wrap(net, layer=layer)
    views = equicam.Views.evenly(VIEWS).act(x).flatten(0, 1)
    if name != "vit_b_16":
        views = views.contiguous(memory_format=torch.channels_last)
    # small batches are captured as a graph, as ours are
    compiled = torch.compile(net, dynamic=False, mode="reduce-overhead" if images == 1 else None)

    def forward() -> object:
        with torch.inference_mode(), torch.autocast("cuda", torch.bfloat16):
            return compiled(views)

    return {
        FORWARD: forward,
        OURS: lambda: equicam.explain(model, x, dtype=torch.bfloat16, compiled=True),
        "equicam, 18 views + PEUM, eager": lambda: equicam.explain(model, x, dtype=torch.bfloat16),
    } | peers(net, layer, x, tokens_to_grid if name == "vit_b_16" else None)


def seconds(run: Run) -> float:
    torch.cuda.synchronize()
    start = time.perf_counter()
    run()
    torch.cuda.synchronize()
    return time.perf_counter() - start


def peak_megabytes(run: Run) -> float:
    """The most memory a run takes above what was there before it."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 1e6


def memory(name: str, images: int = 16) -> dict[str, tuple[float, float]]:
    """Peaks at the same number of views, and what they take: ours, and captum's on the views as a batch."""
    net, layer = network(name)
    x = torch.randn(images, 3, 224, 224, device="cuda")
    views = equicam.Views.evenly(VIEWS).act(x).flatten(0, 1)
    model = equicam.wrap(net, layer=layer)
    captum = LayerGradCam(net, net.get_submodule(layer))
    runs: dict[str, Run] = {
        "equicam": lambda: equicam.explain(model, x),
        "equicam, all views in one forward pass": lambda: equicam.explain(
            model, x, max_views_per_forward=VIEWS * images
        ),
        "captum": lambda: captum.attribute(views, 0),
    }
    for run in runs.values():
        run()
    times = {who: statistics.median(seconds(run) for _ in range(5)) for who, run in runs.items()}
    return {who: (peak_megabytes(run), 1000 * times[who]) for who, run in runs.items()}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--networks", nargs="+", default=["resnet50", "vgg16", "vit_b_16"])
    parser.add_argument("--batches", nargs="+", type=int, default=[64, 1])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", type=Path, help="also keep the figures here")
    args = parser.parse_args()
    kept: dict[str, object] = {"device": torch.cuda.get_device_name(), "torch": torch.__version__}
    for name in args.networks:
        for images in args.batches:
            rows = contenders(name, images)
            first = {what: seconds(run) for what, run in rows.items()}
            for run in rows.values():
                run()
            times: dict[str, list[float]] = {what: [] for what in rows}
            for _ in range(args.rounds if images > 1 else 5 * args.rounds):
                for what, run in rows.items():
                    times[what].append(seconds(run))
            found = {what: 1000 * statistics.median(t) for what, t in times.items()}
            print(f"\n{name}, {images} × {VIEWS} views, {kept['device']}, torch {kept['torch']}")
            for what, ms in found.items():
                one = ms / images / (VIEWS if "18" in what else 1)
                print(f"  {what:40s} {ms:9.2f} ms  {one:8.4f} ms a view  (first use {first[what]:5.1f} s)")
            for network_, count, what, against, most in PROMISES:
                if (network_, count) == (name, images):
                    value = found[what] / found[against] if against else found[what]
                    print(
                        f"  {what} over {against or 'nothing, ms'}: {value:.3f} (at most {most})", flush=True
                    )
            kept[f"{name}-{images}"] = found | {"first": first}
            del rows
            torch.cuda.empty_cache()
        if args.json:
            args.json.write_text(json.dumps(kept, indent=1))
    for name in ("resnet50", "vgg16", "mobilenet_v2"):
        peaks = memory(name)
        print(f"\n{name}, peak memory at 16 × {VIEWS} views, eager, float32")
        for who, (megabytes, ms) in peaks.items():
            share, longer = (
                megabytes / peaks["captum"][0],
                ms / peaks["equicam, all views in one forward pass"][1],
            )
            print(
                f"  {who:40s} {megabytes:8.0f} MB, {share:.3f} of captum's (ours at most 0.2), {ms:7.1f} ms, "
                f"{longer:.3f} of all at once (MobileNetV2 at most 1.05)",
                flush=True,
            )
        kept[f"{name}-memory"] = peaks
        torch.cuda.empty_cache()
    if args.json:
        args.json.write_text(json.dumps(kept, indent=1))


if __name__ == "__main__":
    main()
