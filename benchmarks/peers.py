"""What the benchmarks share: the peers' Grad-CAM of one view, and the options of a run on a CPU."""

import argparse
import copy
from collections.abc import Callable

import torch
from captum.attr import LayerGradCam
from pytorch_grad_cam import GradCAM
from pytorch_grad_cam.utils.model_targets import ClassifierOutputTarget
from torch import nn
from torchcam.methods import GradCAM as TorchcamGradCAM

Run = Callable[[], object]
PEER = "pytorch-grad-cam, 1 view"


def peers(net: nn.Module, layer: str, x: torch.Tensor, reshape: Callable | None = None) -> dict[str, Run]:
    """Their Grad-CAM of class 0, in the default memory format; of tokens, which `reshape` makes a grid, one peer's alone."""
    plain = copy.deepcopy(net).to(memory_format=torch.contiguous_format)
    target = plain.get_submodule(layer)
    cam = GradCAM(plain, [target], reshape_transform=reshape)
    rows: dict[str, Run] = {PEER: lambda: cam(x, targets=[ClassifierOutputTarget(0)] * len(x))}
    if reshape is None:
        captum = LayerGradCam(plain, target)
        rows["captum, 1 view"] = lambda: captum.attribute(x, 0)
        rows["torchcam, 1 view"] = lambda: _torchcam(plain, layer, x)
    return rows


def _torchcam(net: nn.Module, layer: str, x: torch.Tensor) -> object:
    with TorchcamGradCAM(net, layer) as extractor:
        return extractor([0] * len(x), net(x))


def tokens_to_grid(values: torch.Tensor) -> torch.Tensor:
    """[n, 1 + 14 · 14, k] → [n, k, 14, 14]."""
    return values[:, 1:].transpose(1, 2).reshape(len(values), -1, 14, 14)


def parse_rounds(doc: str | None, rounds: int) -> int:
    """The number of rounds of the command line; sets its number of threads, and the seed."""
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=doc, formatter_class=form)
    parser.add_argument("--rounds", type=int, default=rounds)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    return int(args.rounds)
