"""Train the embedded model from scratch on synthetic patches and write its weights into the package.

    python scripts/embedded_model.py [--patches 10000] [--epochs 6] [--seed 1] [--threads 2] [--out FILE]

Few patches are rotated in training, so that Grad-CAM of the model drifts under rotation as that of real networks does. A tenth of
the positive patches carries ink, which the model learns as a shortcut. The same arguments on the same machine and torch
version give the same weights. Accuracy is measured on 1,000 patches of another seed, and on the same with ink.
"""

import argparse
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from rich.progress import track
from safetensors.torch import save_file
from synthetic import add_ink, draw
from torch import Tensor
from torch.nn.functional import cross_entropy

from equicam.core.views import rotate_each
from equicam.models.libraries import EMBEDDED_WEIGHTS, EmbeddedNet

HELD_OUT_SEED, HELD_OUT = 1_000_003, 1_000
INKED = 0.1
"""The share of positive training patches with ink."""
ROTATED = 0.15
"""The share of training patches that are rotated, by any angle."""


def main() -> None:
    """Generate patches, train, measure, write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--patches", type=int, default=10_000, help="number of training patches")
    parser.add_argument("--epochs", type=int, default=6, help="number of epochs")
    parser.add_argument(
        "--seed", type=int, default=1, help="seed of the patches, the initial weights and the order"
    )
    parser.add_argument("--threads", type=int, default=2, help="number of CPU threads")
    parser.add_argument("--out", type=Path, default=EMBEDDED_WEIGHTS, help="weights file to write")
    args = parser.parse_args()

    torch.set_num_threads(args.threads)
    torch.use_deterministic_algorithms(True)
    torch.manual_seed(args.seed)
    images, labels = generate(args.patches, seed=args.seed, workers=args.threads, inked=INKED)
    net = train(images, labels, epochs=args.epochs)
    share = accuracy(net, *generate(HELD_OUT, seed=HELD_OUT_SEED, workers=args.threads))
    inked, truth = generate(HELD_OUT, seed=HELD_OUT_SEED, workers=args.threads, inked=1, label=0)
    fooled = 1 - accuracy(net, inked[truth == 0], truth[truth == 0])
    save_file({name: value.contiguous() for name, value in net.state_dict().items()}, args.out)
    console = Console()
    console.print(f"accuracy {share:.3f} on {HELD_OUT} held-out patches")
    console.print(f"{fooled:.3f} of the negative ones are positive with ink")
    console.print(f"{args.out}: {args.out.stat().st_size / 2**20:.2f} MiB", soft_wrap=True)


def generate(
    count: int, *, seed: int, workers: int, inked: float = 0, label: int = 1
) -> tuple[Tensor, Tensor]:
    """Patches 0 … count − 1 of a seed [n, 3, 96, 96], bytes, and their labels [n]; a share of one label has ink."""
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        patches = pool.map(partial(draw, seed=seed), range(count), chunksize=50)
        patches = list(track(patches, f"generating {count} patches", total=count))
    images = np.stack([p.image for p in patches])
    for i, patch in enumerate(patches):
        rng = np.random.default_rng([seed, i, 1])
        if patch.label == label and rng.random() < inked:
            images[i] = add_ink(patch.image, rng)
    return torch.from_numpy(images).permute(0, 3, 1, 2), torch.tensor([p.label for p in patches])


def preprocess(images: Tensor) -> Tensor:
    """The input of the network, channels last, which CPUs convolve twice as fast."""
    mean, std = (torch.tensor(v)[:, None, None] for v in (EmbeddedNet.mean, EmbeddedNet.std))
    return ((images / 255 - mean) / std).contiguous(memory_format=torch.channels_last)


def train(images: Tensor, labels: Tensor, *, epochs: int, batch_size: int = 64) -> EmbeddedNet:
    """A new network after one cycle of AdamW: the learning rate rises, then falls to zero."""
    net = EmbeddedNet().to(memory_format=torch.channels_last)
    steps = len(images) // batch_size
    optimiser = torch.optim.AdamW(net.parameters(), weight_decay=0.02)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, max_lr=4e-3, total_steps=epochs * steps)
    for epoch in range(1, epochs + 1):
        total = 0.0
        order = torch.randperm(len(images))[: steps * batch_size].view(steps, batch_size)
        for batch in track(order, f"epoch {epoch} of {epochs}"):
            rotated = torch.rand(batch_size) < ROTATED
            degrees = torch.where(rotated, 360 * torch.rand(batch_size), 0)
            loss = cross_entropy(net(rotate_each(preprocess(images[batch]), degrees)), labels[batch])
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
            schedule.step()
            total += loss.item()
        Console().print(f"mean loss {total / steps:.3f}")
    return net.eval()


@torch.inference_mode()
def accuracy(net: EmbeddedNet, images: Tensor, labels: Tensor) -> float:
    """The share of patches with the right prediction."""
    top1 = torch.cat([net(preprocess(batch)).argmax(1) for batch in images.split(250)])
    return (top1 == labels).double().mean().item()


if __name__ == "__main__":
    main()
