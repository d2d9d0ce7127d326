"""The numbers the paper publishes, read from expected.toml, and the names it uses for methods and networks."""

import tomllib
from dataclasses import dataclass
from decimal import Decimal
from functools import cache
from pathlib import Path
from typing import Any

METHODS = {
    "Grad-CAM": "grad-cam",
    "Grad-CAM single view": "grad-cam",
    "Grad-CAM++": "grad-cam++",
    "LayerCAM": "layer-cam",
    "Score-CAM": "score-cam",
    "RISE": "rise",
    "Aug. Score-CAM": "aug-score-cam",
    "Recipro-CAM": "recipro-cam",
    "AugCAM unaligned": "aug-cam",
    "Unaligned output-space": "aug-cam",
    "Aligned output-space": "equigrad-cam-out",
    "Aligned feature-space (EquiGrad-CAM)": "equigrad-cam",
    "EquiGrad-CAM": "equigrad-cam",
    "EquiGrad-CAM+PCF": "equigrad-cam+pcf",
    "Attention Rollout": "rollout",
    "Transformer Attribution": "transformer-attribution",
}
"""The paper's method names and ours."""
METRICS = {"Eq": "eq", "Ins": "insertion", "Del": "deletion"}  # the paper's metric names and ours
NETWORKS = ("resnet50", "vgg16", "vit_b_16")  # the paper's, on ImageNet
TITLES = {
    "resnet50": "ResNet-50",
    "mobilenet_v2": "MobileNetV2",
    "vgg16": "VGG-16",
    "vit_b_16": "ViT-B/16",
    "vit_small": "ViT-S/14",
}


def section_title(folder: str) -> str:
    """The network and the images of a folder of rows: `aerial-vgg16` is "VGG-16, aerial"."""
    data, _, network = folder.removesuffix("-costly").rpartition("-")
    title = f"{TITLES.get(network, network)}, {data or 'ImageNet'}"
    return f"{title}, methods of many passes" if folder.endswith("-costly") else title


LARGE = "vit_l_16"  # of the scale test
DOMAINS = ("PatchCamelyon", "RESISC45")  # besides ImageNet
CUB = "CUB-200"  # images of birds
SAMPLES = {
    "S10k": "ten per class",
    "S2k-spread": "two per class",
    "S2k-prefix": "first 200 classes",
    "S2k-blocks": "20 classes in a row, ten times",
    "S1k-slot0": "one per class",
    "S300-spread": "300 classes",
    "prefix": "first classes",
}
"""How the authors drew the sample of a claim, by its name there."""
FIRST_CLASSES = ("S2k-prefix", "prefix")
"""Samples of the first classes, all of them animals: their Eq is higher than that over all classes."""
IMAGES_OF_PAIRS = {14_000: 2000, 8646: 2000, 7000: 1000}
"""Where a claim's n counts pairs of an image and an angle, the images behind it."""
MIN_IMAGES = 100  # with fewer, an interval is too narrow to decide anything


@dataclass(frozen=True)
class Claim:
    """A number of the paper; one that it states in words has no value."""

    id: str
    values: tuple[float, ...]
    n: int | None
    metric: str
    of: str  # the network or domain
    method: str
    sample: str
    ci95: tuple[float, float] | None
    digits: int = 0  # printed after the point

    @property
    def value(self) -> float | tuple[float, float] | None:
        """The published number, or the range of several."""
        if len(self.values) > 1:
            return min(self.values), max(self.values)
        return self.values[0] if self.values else None

    @property
    def label(self) -> str:
        """Its name in a table."""
        return self.method or self.metric

    @property
    def domain(self) -> str:
        """The first word of what it is about: the domain of a domain table."""
        return self.of.split()[0]

    @property
    def network(self) -> str:
        """The ImageNet network it is about; empty where it is about anything else."""
        first, *more = self.of.split() or [""]
        return first if first in NETWORKS and more in ([], ["(presumed)"]) else ""

    @property
    def of_protocol(self) -> bool:
        """Whether it is about a constant of the protocol, which is the same for every network and image."""
        return self.method == "protocol"

    def is_about(self, backbone: str, domain: str) -> bool:
        """Whether it is about this network on images of this domain, ImageNet's being of none."""
        if self.of_protocol:
            return True
        if self.of.startswith("CLIP"):
            return domain == "RESISC45" and "ViT-B-16" in backbone
        if self.domain in DOMAINS or self.of == "both":
            return backbone == "resnet50" and domain in (DOMAINS if self.of == "both" else (self.domain,))
        if domain:
            return False
        if self.domain == CUB:
            return backbone == "resnet50"
        about = self.network or (LARGE if self.of == LARGE else "")
        return backbone == about if about else backbone in NETWORKS

    @property
    def of_cub(self) -> bool:
        """Whether its images are those of CUB-200-2011."""
        return self.domain == CUB or self.id.startswith("cub.")

    @property
    def about(self) -> str:
        """The network and the images that it is about, in words."""
        if self.of_cub:
            return f"{self.network or 'resnet50'} on CUB-200-2011"
        if self.of in ("all", "ImageNet", "A100"):
            return ", ".join(NETWORKS)
        return f"{' and '.join(DOMAINS)}, resnet50" if self.of == "both" else self.network or self.of

    @property
    def of_first_classes(self) -> bool:
        """Whether its sample is of the first classes, and so of other images than a sample over all classes."""
        return self.sample.startswith(FIRST_CLASSES)

    @property
    def images(self) -> int | None:
        """On how many images it was measured; None where that is not published, or where n counts trainings."""
        n = IMAGES_OF_PAIRS.get(self.n or 0, self.n)
        return n if n is not None and n >= MIN_IMAGES else None

    def printed(self, value: float) -> str:
        """A number with the digits that the paper prints."""
        return f"{value:.{self.digits}f}" if self.digits else f"{value:g}"

    @property
    def text(self) -> str:
        """The published number with its interval, its sample size and how the sample was drawn."""
        if not self.values:
            return "stated in words"
        text = "–".join(self.printed(v) for v in sorted({min(self.values), max(self.values)}))
        if self.ci95 is not None:
            text += f" [{self.printed(self.ci95[0])}, {self.printed(self.ci95[1])}]"
        how = next((words for name, words in SAMPLES.items() if self.sample.startswith(name)), "")
        known = ([] if self.n is None else [f"n = {self.n:,}"]) + [how] * bool(how)
        return f"{text} ({', '.join(known)})" if known else text


@cache
def claims() -> dict[str, Claim]:
    """Every claim by its id."""
    # a Decimal keeps the printed zeros that a float loses
    found = tomllib.loads(Path(__file__).with_name("expected.toml").read_text(), parse_float=Decimal)
    return {name: _claim(name, entry) for name, entry in found.items()}


def _claim(name: str, entry: dict[str, Any]) -> Claim:
    given, ci95 = entry.get("value"), entry.get("ci95")
    values = [v for v in (given if isinstance(given, list) else [given]) if isinstance(v, int | Decimal)]
    texts: Any = {key: str(entry.get(key, "")) for key in ("metric", "of", "method", "sample")}
    interval = (float(ci95[0]), float(ci95[1])) if ci95 else None
    digits = max(map(_digits, values), default=0)
    return Claim(name, tuple(map(float, values)), entry.get("n"), ci95=interval, digits=digits, **texts)


def _digits(value: int | Decimal) -> int:
    """How many digits stand after the point; none in a power of ten."""
    exponent = value.as_tuple().exponent if isinstance(value, Decimal) else 0
    return -exponent if isinstance(exponent, int) and -6 < exponent < 0 else 0
