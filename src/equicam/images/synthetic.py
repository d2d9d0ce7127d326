"""Histology-like patches with an exact label: synthetic tissue in haematoxylin and eosin, no photographs.

As in PatchCamelyon a patch is 96×96 pixels of about 1 µm, and it is positive if and only if its centre third contains
tumour. Scenes of both labels come from one distribution: a coin picks the label, and scenes are sampled until one
has it. So tumour outside the centre, borderline centres and benign look-alikes occur at their natural frequency, and
only the content of the centre decides the label. No direction is special.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFilter

from equicam.images.synthetic_tissue import (
    ANGLES,
    GREY_LEVELS,
    OVERSAMPLING,
    PROPERTIES,
    SIZE,
    TISSUES,
    Cells,
    Floats,
    Scene,
    fill_polygon,
    sample_scene,
    smooth_noise,
    tumour_mask,
    unit_circle,
)

CENTRE = slice(32, 64)
MIN_TUMOUR_PIXELS = 32
"""Tumour nucleus pixels that make a centre positive: about half a small tumour nucleus."""


@dataclass(frozen=True)
class Patch:
    """A synthetic patch, whether its centre third contains tumour, and a mask of its tumour nuclei."""

    image: NDArray[np.uint8]
    label: int
    tumour: NDArray[np.bool_]


def draw(index: int, *, seed: int = 0) -> Patch:
    """The patch of this seed and index; its bytes depend on nothing else."""
    rng = np.random.default_rng([seed, index])
    wanted = int(rng.integers(2))
    while True:
        scene = sample_scene(rng)
        tumour = tumour_mask(scene.cells)
        if int(tumour[CENTRE, CENTRE].sum() >= MIN_TUMOUR_PIXELS) == wanted:
            return Patch(_stain(rng, scene), wanted, tumour)


def draw_many(count: int, *, seed: int = 0, start: int = 0) -> Iterator[Patch]:
    """The patches start, start + 1, … of a seed."""
    return (draw(index, seed=seed) for index in range(start, start + count))


def _stain(rng: np.random.Generator, scene: Scene) -> NDArray[np.uint8]:
    """The image: two stains absorb light (Beer and Lambert); dyes, focus and sensor noise vary per patch."""
    nuclei, bodies = _stain_cells(rng, scene.cells)
    eosin = _ground_property(scene, "eosin") + bodies
    eosin += 0.28 * _ground_property(scene, "fibres") * _fibres(rng, scene.across)
    eosin = np.clip(eosin * (1 + 0.08 * smooth_noise(rng, 24)), 0.01, None) * (
        1 - 0.5 * np.clip(nuclei, 0, 1)
    )
    haematoxylin = _ground_property(scene, "haematoxylin") + nuclei * (1 + 0.2 * smooth_noise(rng, 60))

    dyes = np.array([[0.60, 0.72, 0.36], [0.12, 0.76, 0.42]]) + rng.normal(0, 0.025, (2, 3))
    amount = np.exp(rng.normal(0, 0.18, 2))
    absorbed = np.stack((haematoxylin, eosin), axis=2) * amount @ dyes
    light = rng.uniform(236, 250) * np.exp(-absorbed)
    sharp = Image.fromarray(np.clip(light, 0, 255).astype(np.uint8))
    focused = np.asarray(sharp.filter(ImageFilter.GaussianBlur(rng.uniform(0.35, 0.8))), dtype=float)
    noisy = focused + rng.uniform(1.5, 4) * rng.standard_normal(focused.shape)
    return np.clip(noisy.round(), 0, 255).astype(np.uint8)


def _ground_property(scene: Scene, stain: str) -> Floats:
    """One property of the tissue, per pixel."""
    levels = [int(GREY_LEVELS * getattr(tissue, stain)) for tissue in TISSUES.values()]
    return _downsample(scene.ground.point(levels + [0] * (256 - len(levels))))


def _downsample(fine: Image.Image) -> Floats:
    return np.asarray(fine.reduce(OVERSAMPLING), dtype=float) / GREY_LEVELS


def _fibres(rng: np.random.Generator, across: Floats) -> Floats:
    """Collagen: bands of two widths along the fibres, of varying strength, and clefts between them."""
    knots = np.arange(-200, 201)
    wide, thin = (np.interp(across / width, knots, rng.standard_normal(len(knots))) for width in (3.5, 1.4))
    bands = wide * (0.6 + 0.5 * smooth_noise(rng, 5)) + 0.7 * thin * (0.6 + 0.5 * smooth_noise(rng, 6))
    clefts = np.clip(wide + smooth_noise(rng, 4) - 2.0, 0, None)
    return 0.6 * bands - 2.2 * clefts


def _stain_cells(rng: np.random.Generator, cells: Cells) -> tuple[Floats, Floats]:
    """The haematoxylin of the nuclei, and the eosin of the visible cell bodies."""
    nuclei, bodies = (Image.new("L", (SIZE * OVERSAMPLING, SIZE * OVERSAMPLING)) for _ in range(2))
    pen, pale = ImageDraw.Draw(nuclei), ImageDraw.Draw(bodies)
    value = {name: column[cells.kind] for name, column in PROPERTIES.items()}
    density = value["density"] * np.exp(rng.normal(0, 0.18, len(cells.kind)))
    nucleoli = rng.poisson(value["nucleoli"])
    for i, (at, radius, edge) in enumerate(zip(cells.at, cells.radius, cells.outline, strict=True)):
        if value["cytoplasm"][i]:
            fill_polygon(
                pale, at + value["cytoplasm"][i] * (edge - at), GREY_LEVELS * rng.uniform(0.04, 0.22)
            )
        fill_polygon(pen, edge, GREY_LEVELS * (density[i] + value["rim"][i]))
        fill_polygon(pen, at + (1 - 0.7 / radius) * (edge - at), GREY_LEVELS * density[i])
        for _ in range(nucleoli[i]):
            spot = at + radius * rng.normal(0, 0.3, 2) + rng.uniform(0.7, 1.2) * unit_circle(ANGLES)
            fill_polygon(pen, spot, GREY_LEVELS * (density[i] + 0.85))
    return _downsample(nuclei), _downsample(bodies)
