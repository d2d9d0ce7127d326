"""Is the outline found again by other views? The agreement of 18 (and 6) views against the map of 18 other ones.

    python benchmarks/agreement.py 'ResNet-50, ImageNet=scripts/nets.py:original,resnet50.safetensors,imagenet-val' \
        'ViT-S/14, histology=scripts/nets.py:vit_small,tuned/weights.safetensors,histology,test,patient' --figures agreement.json

The other views are the same number of rotations 10° off, so none is in both sets (6 views are compared with 18 others). Of each network: the share
of outlined pixels that lie in the hottest fifth of the other views' map (mean, and in the worst twentieth of images), the same for another image's
outline, for a centred disc of the same area, and for the network with random weights; the correlation of maps. Intervals are 95 %, by image or by group.
Networks that are in the file of figures are not measured again.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn.functional import adaptive_avg_pool2d

import equicam
from equicam import Fusion, Views
from equicam.core import agreement
from equicam.core.agreement import LEAST_AREA, OUTLINE_FROM, ROUNDING, coarse_grid
from equicam.core.uncertainty import pearson
from equicam.core.views import disc
from equicam.evaluate import statistics
from equicam.evaluate.controls import randomise_weights
from equicam.images.items import open_item, sample_by_class
from equicam.images.sources import find_items
from equicam.models.images import as_batch, preprocess_image, stack_images

OTHER = Fusion(Views.evenly(18, start=10), "features", "features")
LIMITS = (0.65, 0.7, OUTLINE_FROM, 0.8, 0.85)
AREAS = (0.0, 0.005, LEAST_AREA, 0.02)


def measure(
    spec: str, views: tuple[int, ...], device: str, n: int | None, batch: int, random: bool
) -> dict[str, Any]:
    """Per-image columns of one network, by the number of views."""
    architecture, weights, data, *rest = spec.split(",")
    split, group_by = (*rest, None, None)[:2]
    model = equicam.load(architecture, weights=weights or None, device=device)
    if random:
        model = randomise_weights(model)
    items = sample_by_class(find_items(data, split=split, group_by=group_by), n)
    columns: dict[str, Any] = {str(count): {} for count in views}
    previous: dict[int, torch.Tensor] = {}
    for start in range(0, len(items), batch):
        some = [preprocess_image(model, open_item(item)) for item in items[start : start + batch]]
        x = as_batch(model, stack_images(some))
        other = equicam.explain(model, x, method=OTHER)
        alone = equicam.explain(model, x, method="grad-cam", target=other.target)
        for count in views:
            e = equicam.explain(model, x, views=count, target=other.target)
            last = previous.get(count)
            for name, values in compare(e, other, alone, last).items():
                columns[str(count)].setdefault(name, []).extend(values.double().cpu().tolist())
            previous[count] = e.coarse_outline[-1:]
    return {"groups": [item.group or item.id for item in items] if group_by else None, "views": columns}


def compare(
    e: equicam.Explanation, other: equicam.Explanation, alone: equicam.Explanation, last: torch.Tensor | None
) -> dict[str, torch.Tensor]:
    """Each image's figures; `last` is the outline of the image before the first."""
    grid = coarse_grid((e.map.shape[-2], e.map.shape[-1]))
    inside = disc(grid, e.map.device)
    maps = {
        name: adaptive_avg_pool2d(one.map, grid)[:, inside]
        for name, one in (("own", e), ("other", other), ("alone", alone))
    }
    hot = maps["other"] > maps["other"].quantile(0.8, dim=1, keepdim=True)
    shown = maps["own"] > maps["own"].quantile(0.8, dim=1, keepdim=True)
    share = e.agreement[:, inside]
    before = torch.cat((e.coarse_outline[-1:] if last is None else last, e.coarse_outline[:-1]))[:, inside]
    rows, columns = (torch.arange(s, device=e.map.device, dtype=torch.float64) - (s - 1) / 2 for s in grid)
    away = (rows[:, None] ** 2 + columns[None, :] ** 2)[inside]
    found = {
        "map v other": r(maps["own"], maps["other"]),
        "grad-cam v other": r(maps["alone"], maps["other"]),
        "repeatability": e.repeatability,
        "stability": e.stability,
        "agreed_area": e.agreed_area,
        "other_constant": (maps["other"].std(1) < 1e-12).double(),
    }
    for limit in LIMITS:
        outlined = (share >= limit - ROUNDING) & shown
        found[f"area {limit}"] = outlined.double().mean(1)
        found[f"found again {limit}"] = inside_share(outlined, hot)
    outlined = (share >= OUTLINE_FROM - ROUNDING) & shown
    found["of another image"] = inside_share(before, hot)
    nearest = away.argsort().argsort()[None] < outlined.sum(1, keepdim=True)
    found["centred disc"] = inside_share(nearest, hot)
    return found


def inside_share(outlined: torch.Tensor, hot: torch.Tensor) -> torch.Tensor:
    """Of outlined pixels, those that are hot; NaN without an outline."""
    return (outlined & hot).double().sum(1) / outlined.double().sum(1)


def r(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return pearson(a[:, None, None], b[:, None, None], "full")[:, 0, 0]


def pixel_words(spec: str, device: str, n: int | None, batch: int) -> float:
    """The share of images whose word differs between the coarse grid and pixel size."""
    architecture, weights, data, *rest = spec.split(",")
    split = (*rest, None)[0]
    model = equicam.load(architecture, weights=weights or None, device=device)
    items = sample_by_class(find_items(data, split=split), n)
    differ: list[bool] = []
    for start in range(0, len(items), batch):
        some = [preprocess_image(model, open_item(item)) for item in items[start : start + batch]]
        x = as_batch(model, stack_images(some))
        coarse = equicam.explain(model, x).agreed_area
        side, agreement.LONGER_SIDE = agreement.LONGER_SIDE, 4096
        fine = equicam.explain(model, x).agreed_area
        agreement.LONGER_SIDE = side
        differ += ((coarse >= LEAST_AREA) != (fine >= LEAST_AREA)).tolist()
    return float(np.mean(differ))


def report(name: str, found: dict[str, Any]) -> None:
    """The table of one network."""
    for count, columns in found["views"].items():
        c = {key: np.array(values, dtype=np.float64) for key, values in columns.items()}
        usable = c["other_constant"] == 0
        c = {key: values[usable] for key, values in c.items()}
        again = c[f"found again {OUTLINE_FROM}"]
        agreed = c[f"area {OUTLINE_FROM}"] >= LEAST_AREA
        kept = again[agreed]
        groups = None if found["groups"] is None else np.array(found["groups"], dtype=object)[usable][agreed]
        weighted = float(
            (kept * c[f"area {OUTLINE_FROM}"][agreed]).sum() / c[f"area {OUTLINE_FROM}"][agreed].sum()
        )
        mean = statistics.bootstrap(statistics.mean, kept, cluster=groups)
        worst = float(np.quantile(kept, 0.05))
        print(f"{name}, {count} views, {len(agreed)} images")
        print(
            f"  agreed {agreed.mean():.3f}   outlined pixels found again {weighted:.4f}, mean {mean.value:.4f} [{mean.low:.4f}, {mean.high:.4f}], worst twentieth {worst:.3f}, mean area {c[f'area {OUTLINE_FROM}'][agreed].mean():.3f}"
        )
        print(
            f"  another image's outline {np.nanmean(c['of another image'][agreed]):.3f}   centred disc {np.nanmean(c['centred disc'][agreed]):.3f}"
        )
        print(
            f"  map v other {np.nanmean(c['map v other']):.4f}   half v half {np.nanmean(c['repeatability']):.4f}   grad-cam v other {np.nanmean(c['grad-cam v other']):.4f}   stability {np.nanmean(c['stability']):.4f}"
        )
        for limit in LIMITS:
            for area in AREAS:
                has = c[f"area {limit}"] > area if area == 0 else c[f"area {limit}"] >= area
                values = c[f"found again {limit}"][has]
                if len(values):
                    pixels = (values * c[f"area {limit}"][has]).sum() / c[f"area {limit}"][has].sum()
                    print(
                        f"    from {limit:.2f}, area {area:.3f}: outlined {has.mean():.3f}, found again {pixels:.4f}, worst twentieth {np.quantile(values, 0.05):.3f}"
                    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("networks", nargs="+", help="NAME=MODEL,WEIGHTS,IMAGES[,SPLIT[,GROUP]]")
    parser.add_argument("--views", type=int, nargs="+", default=(18, 6))
    parser.add_argument("--n", type=int)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--figures", type=Path)
    parser.add_argument("--random", action="store_true", help="measure each network with random weights too")
    parser.add_argument("--pixels", action="store_true", help="how often the word differs at pixel size")
    given = parser.parse_args()
    kept = json.loads(given.figures.read_text()) if given.figures and given.figures.is_file() else {}
    for network in given.networks:
        name, spec = network.split("=", 1)
        for random in (False, True) if given.random else (False,):
            key = f"{name}, random weights" if random else name
            if key not in kept:
                kept[key] = measure(spec, tuple(given.views), given.device, given.n, given.batch, random)
                if given.figures:
                    given.figures.write_text(json.dumps(kept))
            report(key, kept[key])
        if given.pixels:
            print(
                f"  word differs at pixel size: {pixel_words(spec, given.device, given.n, given.batch):.2%}"
            )


if __name__ == "__main__":
    main()
