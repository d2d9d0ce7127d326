"""Do the words hold at other angles? Steady, unsteady and cannot say against Eq measured off the grid of views.

    python benchmarks/steadiness.py --source imagenet-val --model mobilenet_v2 --weights mobilenet_v2.safetensors --n 1000

For each word: how many maps have it, Grad-CAM's mean Eq at 15°, 30°, 45°, 75° and 135° (none is a view of 18), and which share
of those maps is below 0.5.
"""

import argparse

import numpy as np
import torch

import equicam
from equicam.core.views import transform_all
from equicam.evaluate.equivariance import equivariance
from equicam.images.items import open_item, sample_by_class
from equicam.images.sources import find_items
from equicam.models.images import as_batch, preprocess_image, stack_images
from equicam.steadiness import WORDS

ANGLES = (15, 30, 45, 75, 135)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--source", required=True)
    parser.add_argument("--model", default="resnet50")
    parser.add_argument("--weights")
    parser.add_argument("--n", type=int)
    parser.add_argument("--batch", type=int, default=16)
    given = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = equicam.load(given.model, weights=given.weights, device=device)
    items = sample_by_class(find_items(given.source), given.n)
    words: list[str] = []
    reasons: list[str] = []
    eq: list[float] = []
    for start in range(0, len(items), given.batch):
        some = [preprocess_image(model, open_item(item)) for item in items[start : start + given.batch]]
        x = as_batch(model, stack_images(some))
        found = equicam.explain(model, x)
        words += [one.word for one in found.steadiness]
        reasons += [one.reason.code for one in found.steadiness]
        rotated = transform_all(x, (0, *ANGLES)).flatten(0, 1)
        maps = equicam.explain(
            model, rotated, method="grad-cam", target=found.target.repeat(len(ANGLES) + 1)
        ).map
        maps = maps.reshape(len(ANGLES) + 1, len(x), *maps.shape[-2:])
        eq += equivariance(maps[1:], maps[0], ANGLES).value.mean(0).tolist()
    values, named = np.array(eq), np.array(words)
    for word in reversed(WORDS):
        of = named == word
        if of.any():
            low, high = (values[of] < 0.5).mean(), (values[of] >= 0.7).mean()
            print(
                f"{word}: {of.sum()} of {len(named)}, Eq {values[of].mean():.3f}, least {values[of].min():.3f}, below 0.5 {low:.1%}, from 0.7 {high:.1%}"
            )
            for code in sorted(set(np.array(reasons)[of])):
                some = values[of & (np.array(reasons) == code)]
                print(f"  {code}: {len(some)}, Eq {some.mean():.3f}")


if __name__ == "__main__":
    main()
