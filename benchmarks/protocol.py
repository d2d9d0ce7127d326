"""The whole equivariance protocol on one GPU, what fewer views give, and how far low precision is off.

    python benchmarks/protocol.py DATA [--model resnet50] [--weights FILE] [--n 1000] [--parts protocol precision masked]

Every EquiGrad variant, Grad-CAM and the unaligned average at seven angles with their floors, compiled, in TF32 and in
bf16: the first images compile and are timed separately. Then the correlation of every EquiGrad-CAM map, eager and
compiled, with that of float32; the same of maps by RISE and Score-CAM on a few images.
"""

import argparse
import itertools
import json
import time
from pathlib import Path

import torch

import equicam
from equicam.core.uncertainty import pearson
from equicam.images.items import open_item, sample_by_class
from equicam.images.sources import find_items
from equicam.models.images import preprocess_image
from equicam_paper.context import Evaluation

LIMITS = {"TF32": 11, "bf16": 9}
MASKED_IMAGES = 24
DTYPES = {"TF32": None, "bf16": torch.bfloat16}
HALF = {"bf16": torch.bfloat16, "float16": torch.float16}


def protocol(model: equicam.Model, data: str, n: int | None) -> dict[str, dict[str, float]]:
    """Seconds and Eq of every variant, by precision."""
    methods = ["grad-cam", "aug-cam", *(m for m in equicam.methods() if m.startswith("equigrad"))]
    found: dict[str, dict[str, float]] = {}
    for name, dtype in DTYPES.items():
        options = {"methods": methods, "scores": ["eq"], "dtype": dtype, "compiled": True}
        start = time.perf_counter()
        equicam.evaluate(model, data, n=32, **options)
        first, start = time.perf_counter() - start, time.perf_counter()
        rows = equicam.evaluate(model, data, n=n, **options)
        elapsed = time.perf_counter() - start
        print(
            f"{len(methods)} methods, {name}: {elapsed:.1f} s (at most {LIMITS[name]}); first use {first:.1f} s"
        )
        found[name] = {m: Evaluation(rows).eq(m).value for m in methods} | {"seconds": elapsed}
        print("  disc Eq " + ", ".join(f"{m} {found[name][m]:.4f}" for m in methods), flush=True)
    return found


def precision(model: equicam.Model, data: str, n: int | None, batch: int = 50) -> dict[str, list[float]]:
    """Correlation of each map with that of float32, with TF32 off; eager and compiled."""
    items = sample_by_class(find_items(data), n)
    runs = {
        f"{name}, {'compiled' if compiled else 'eager'}": {"dtype": dtype, "compiled": compiled}
        for name, dtype in (DTYPES | HALF).items()
        for compiled in (False, True)
    }
    found: dict[str, list[float]] = {name: [] for name in runs}
    for start in range(0, len(items), batch):
        images = [preprocess_image(model, open_item(i)) for i in items[start : start + batch]]
        x = torch.stack(images).to(model.device)
        torch.backends.cudnn.allow_tf32 = False
        exact = equicam.explain(model, x)
        torch.backends.cudnn.allow_tf32 = True
        for name, how in runs.items():
            other = equicam.explain(model, x, target=exact.target, **how).map
            found[name] += pearson(other[:, None], exact.map[:, None], "full").flatten().tolist()
    for name, r in found.items():
        least = sorted(r)
        below = sum(v < 0.999 for v in r)
        print(
            f"maps in {name} against float32: r mean {sum(r) / len(r):.6f}, 1st percentile {least[len(r) // 100]:.5f}, "
            f"least {least[0]:.5f}, below .999: {below} of {len(r)}",
            flush=True,
        )
    return found


def masked(model: equicam.Model, data: str, n: int | None) -> dict[str, list[float]]:
    """Correlation of maps by masked images in half precision with those of float32, with TF32 off."""
    items = sample_by_class(find_items(data), min(n or MASKED_IMAGES, MASKED_IMAGES))
    x = torch.stack([preprocess_image(model, open_item(i)) for i in items]).to(model.device)
    found: dict[str, list[float]] = {}
    for method in ("rise-400", "score-cam"):
        torch.backends.cudnn.allow_tf32 = False
        exact = equicam.explain(model, x, method=method)
        torch.backends.cudnn.allow_tf32 = True
        for (half, dtype), compiled in itertools.product(HALF.items(), (False, True)):
            other = equicam.explain(
                model, x, method=method, target=exact.target, dtype=dtype, compiled=compiled
            )
            r = pearson(other.map[:, None], exact.map[:, None], "full").flatten().tolist()
            name = f"{method}, {half}, {'compiled' if compiled else 'eager'}"
            found[name] = r
            print(
                f"maps by {name} against float32: r mean {sum(r) / len(r):.6f}, least {min(r):.5f}",
                flush=True,
            )
    return found


PARTS = {"protocol": protocol, "precision": precision, "masked": masked}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("data")
    parser.add_argument("--model", default="resnet50")
    parser.add_argument("--weights")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--n", type=int)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--json", type=Path, help="also keep the figures here")
    given = parser.parse_args()
    model = equicam.load(given.model, weights=given.weights, device=given.device)
    kept = {part: PARTS[part](model, given.data, given.n) for part in given.parts}
    if given.json:
        given.json.write_text(json.dumps(kept, indent=1))


if __name__ == "__main__":
    main()
