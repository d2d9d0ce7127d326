"""Histology-like patches with an exact label: synthetic tissue in haematoxylin and eosin, no photographs.

    python scripts/synthetic.py

writes those of the demo into the package, as one image. As in PatchCamelyon a patch is 96×96 pixels of about 1 µm, and it is
positive if and only if its centre third contains tumour. Scenes of both labels come from one distribution: a coin picks the
label, and scenes are sampled until one has it. So tumour outside the centre, borderline centres and benign look-alikes occur at
their natural frequency, and only the content of the centre decides the label. No direction is special.

A stroke of green ink is a planted shortcut: it crosses a tenth of the positive patches that the embedded model learns from, and a few
negative ones of the demo, which the model therefore takes for positive.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFilter

from equicam.demo import PATCHES, PATCHES_PER_ROW, SHEET

SIZE = 96
"""Pixels along a side of a patch."""
OVERSAMPLING = 3  # scenes are rendered this much larger and averaged, so that edges are smooth
GREY_LEVELS = 100  # grey levels of a rendered image per unit of stain
ANGLES = np.linspace(0, 2 * np.pi, 16, endpoint=False)  # of the vertices of a nucleus, in radians
_CANDIDATES = 800  # positions where a nucleus may be placed
Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Kind:
    """The appearance of the nuclei of one kind of cell; lengths in pixels, densities in units of stain."""

    radius: float
    spread: float  # relative deviation of the radius
    longest: float  # maximum axis ratio; the minimum is 1
    wobble: float  # relative deviation of the outline
    density: float
    rim: float  # a vesicular nucleus is pale with a dark membrane
    nucleoli: float  # mean number
    room: float  # share of its radius that no neighbour may enter
    cytoplasm: float  # radius of the cell around it, in radii of the nucleus; 0: not visible


KINDS = {
    "lymphocyte": Kind(2.9, 0.08, 1.15, 0.03, 1.15, 0.05, 0.0, 0.95, 0.0),
    "fibroblast": Kind(2.3, 0.18, 5.0, 0.05, 0.85, 0.0, 0.0, 1.0, 0.0),
    "epithelium": Kind(3.0, 0.08, 1.6, 0.03, 0.85, 0.1, 0.2, 0.6, 0.0),
    "reactive": Kind(4.2, 0.16, 1.4, 0.06, 0.54, 0.30, 1.0, 1.0, 1.4),
    "tumour": Kind(4.7, 0.20, 1.6, 0.10, 0.58, 0.34, 1.3, 0.93, 1.5),
}
PROPERTIES = {
    name: np.array([getattr(kind, name) for kind in KINDS.values()]) for name in Kind.__annotations__
}
_FIBROBLAST, _EPITHELIUM, _TUMOUR = (list(KINDS).index(k) for k in ("fibroblast", "epithelium", "tumour"))


@dataclass(frozen=True)
class Tissue:
    """The staining of one kind of ground, and the share of candidate positions that each kind of nucleus takes."""

    eosin: float
    haematoxylin: float
    fibres: float
    cells: dict[str, float]


TISSUES = {
    "stroma": Tissue(0.55, 0.04, 1.0, {"fibroblast": 0.06, "lymphocyte": 0.02}),
    "lymphoid": Tissue(0.33, 0.16, 0.15, {"lymphocyte": 0.95, "reactive": 0.04}),
    "follicle": Tissue(0.43, 0.13, 0.1, {"reactive": 0.65, "lymphocyte": 0.3}),
    "nest": Tissue(0.46, 0.13, 0.1, {"tumour": 0.94, "lymphocyte": 0.05}),
    "gland": Tissue(0.62, 0.10, 0.1, {}),
    "membrane": Tissue(0.55, 0.08, 0.0, {}),
    "space": Tissue(0.03, 0.01, 0.0, {}),
}
GROUND = {name: i for i, name in enumerate(TISSUES)}
_SHARES = np.cumsum([[t.cells.get(kind, 0.0) for kind in KINDS] for t in TISSUES.values()], axis=1)


@dataclass(frozen=True)
class Cells:
    """Nuclei, one row each: kind, centre, radius and outline [n, vertex, xy]."""

    kind: Ints
    at: Floats
    radius: Floats
    outline: Floats


@dataclass(frozen=True)
class Scene:
    """The ground at `OVERSAMPLING` times the resolution, the direction of its fibres, and its cells."""

    ground: Image.Image
    across: Floats  # per pixel, the coordinate across the fibres
    cells: Cells


def _sample_scene(rng: np.random.Generator) -> Scene:
    """Stroma with random regions painted over one another, then its cells."""
    ground = Image.new("L", (SIZE * OVERSAMPLING, SIZE * OVERSAMPLING), GROUND["stroma"])
    pen = ImageDraw.Draw(ground)
    for _ in range(rng.integers(0, 3)):
        _fill_polygon(
            pen, _wavy_outline(rng, _random_point(rng), rng.uniform(18, 50), wobble=0.25), GROUND["lymphoid"]
        )
    for _ in range(rng.integers(0, 3)):
        _fill_polygon(
            pen, _wavy_outline(rng, _random_point(rng), rng.uniform(8, 24), wobble=0.2), GROUND["follicle"]
        )
    for _ in range(rng.integers(0, 5)):
        at, radius = _random_point(rng), rng.uniform(6, 26)
        _fill_polygon(pen, _wavy_outline(rng, at, radius, wobble=0.3), GROUND["nest"])
        if radius > 18 and rng.random() < 0.3:
            _fill_polygon(pen, _wavy_outline(rng, at, rng.uniform(3, 6), wobble=0.2), GROUND["space"])
    if rng.random() < 0.3:
        _add_fat(rng, pen)
    ring = _add_gland(rng, pen) if rng.random() < 0.3 else np.empty((0, 3))
    across = _fibre_coordinate(rng)
    return Scene(ground, across, _sample_cells(rng, np.asarray(ground), across, ring))


def _random_point(rng: np.random.Generator) -> Floats:
    return rng.uniform(-8, SIZE + 8, 2)


def _wavy_outline(
    rng: np.random.Generator, at: Floats, radius: int | float, *, wobble: int | float
) -> Floats:
    """A wavy circle [vertex, xy]."""
    angle, bumps = np.linspace(0, 2 * np.pi, 40, endpoint=False), np.arange(2, 6)[:, None]
    waves = rng.normal(0, wobble / bumps) * np.cos(bumps * angle + rng.uniform(0, 2 * np.pi, (4, 1)))
    reach: Floats = radius * np.clip(1 + waves.sum(0), 0.3, 2)
    return at + reach[:, None] * _unit_circle(angle)


def _unit_circle(angle: Floats | float) -> Floats:
    """Points on the unit circle [..., xy]."""
    return np.stack((np.cos(angle), np.sin(angle)), axis=-1, dtype=float)


def _fill_polygon(pen: ImageDraw.ImageDraw, edge: Floats, value: int | float) -> None:
    """Fill a polygon given in pixels of the patch."""
    pen.polygon((edge * OVERSAMPLING).ravel().tolist(), fill=int(value))


def _add_fat(rng: np.random.Generator, pen: ImageDraw.ImageDraw) -> None:
    """A few adjacent fat cells: empty, with a thin membrane."""
    at, radius, angle = _random_point(rng), rng.uniform(9, 15), rng.uniform(0, 2 * np.pi)
    for _ in range(rng.integers(1, 5)):
        edge = _wavy_outline(rng, at, radius, wobble=0.08)
        _fill_polygon(pen, edge, GROUND["membrane"])
        _fill_polygon(pen, at + (1 - 1.2 / radius) * (edge - at), GROUND["space"])
        angle += rng.uniform(-1, 1)  # onwards, not back over the previous one
        at = at + 2 * radius * _unit_circle(angle)


def _add_gland(rng: np.random.Generator, pen: ImageDraw.ImageDraw) -> Floats:
    """A benign duct: a ring of epithelium around a lumen; returns position and tilt of its nuclei [n, xy + tilt]."""
    at, radius = _random_point(rng), rng.uniform(11, 19)
    _fill_polygon(pen, _wavy_outline(rng, at, radius, wobble=0.05), GROUND["gland"])
    _fill_polygon(pen, _wavy_outline(rng, at, radius - rng.uniform(8, 9.5), wobble=0.1), GROUND["space"])
    count = int(2 * np.pi * radius / 5.2)
    angle = np.arange(count) * (2 * np.pi / count) + rng.normal(0, 0.08, count)
    reach = radius - 3.6 + rng.normal(0, 0.5, count)
    return np.column_stack((at + reach[:, None] * _unit_circle(angle), angle))


def _fibre_coordinate(rng: np.random.Generator) -> Floats:
    """The coordinate across wavy fibres that run in one direction through the patch."""
    angle = rng.uniform(0, 2 * np.pi)
    y, x = np.arange(float(SIZE))[:, None], np.arange(float(SIZE))
    straight: Floats = np.cos(angle) * y - np.sin(angle) * x
    return straight + 9 * _smooth_noise(rng, 3) + 2 * _smooth_noise(rng, 7)


def _smooth_noise(rng: np.random.Generator, bumps: int) -> Floats:
    """Smooth noise of about unit deviation, this many bumps across the patch."""
    grid = Image.fromarray(rng.standard_normal((bumps + 1, bumps + 1)).astype(np.float32))
    return np.asarray(grid.resize((SIZE, SIZE), Image.Resampling.BICUBIC), dtype=float)


def _sample_cells(rng: np.random.Generator, ground: NDArray[np.uint8], across: Floats, ring: Floats) -> Cells:
    """The nuclei of the duct, then random candidates, each kept if its tissue contains its kind and it has room."""
    at = rng.uniform(-5, SIZE + 5, (_CANDIDATES, 2))
    x, y = np.clip(at, 0, SIZE - 1).astype(int).T
    kind = (rng.random((_CANDIDATES, 1)) > _SHARES[ground[y * OVERSAMPLING, x * OVERSAMPLING]]).sum(1)
    slope_y, slope_x = (np.gradient(across, axis=axis)[y, x] for axis in (0, 1))
    along = np.arctan2(-slope_x, slope_y)
    tilt = np.where(kind == _FIBROBLAST, along, rng.uniform(0, np.pi, _CANDIDATES))

    wanted = kind < len(KINDS)
    kind = np.concatenate((np.full(len(ring), _EPITHELIUM), kind[wanted]))
    at = np.concatenate((ring[:, :2], at[wanted]))
    tilt = np.concatenate((ring[:, 2], tilt[wanted]))
    radius = PROPERTIES["radius"][kind] * np.exp(PROPERTIES["spread"][kind] * rng.standard_normal(len(kind)))
    # low grade to high: the same for all nuclei of one patch
    radius[kind == _TUMOUR] *= rng.uniform(0.8, 1.15)
    kept = _keep_apart(at, radius * PROPERTIES["room"][kind])
    kind, at, radius, tilt = kind[kept], at[kept], radius[kept], tilt[kept]
    return Cells(kind, at, radius, _outlines(rng, kind, at, radius, tilt))


def _keep_apart(at: Floats, room: Floats) -> Ints:
    """Indices of the discs that stay when each, in order, removes all later ones it overlaps."""
    points = at[:, 0] + 1j * at[:, 1]
    left, kept = np.arange(len(at)), []
    while len(left):
        kept.append(left[0])
        left = left[np.abs(points[left] - points[left[0]]) >= room[left] + room[left[0]]]
    return np.array(kept, dtype=int)


def _outlines(rng: np.random.Generator, kind: Ints, at: Floats, radius: Floats, tilt: Floats) -> Floats:
    """Ellipses with the elongation of their kind and a wavy edge [n, vertex, xy]."""
    waves = np.ones((len(kind), len(ANGLES)))
    for bumps in (2, 3, 5):
        size = PROPERTIES["wobble"][kind] * rng.standard_normal(len(kind))
        waves += size[:, None] * np.cos(bumps * ANGLES + rng.uniform(0, 2 * np.pi, (len(kind), 1)))
    ratio = np.sqrt(1 + rng.random(len(kind)) * (PROPERTIES["longest"][kind] - 1))
    axes = np.stack((radius * ratio, radius / ratio), axis=1)
    long, short = np.moveaxis(axes[:, None] * waves[..., None] * _unit_circle(ANGLES), -1, 0)
    cos, sin = np.cos(tilt)[:, None], np.sin(tilt)[:, None]
    rotated: Floats = at[:, None] + np.stack((long * cos - short * sin, long * sin + short * cos), axis=2)
    return rotated


def _tumour_mask(cells: Cells) -> NDArray[np.bool_]:
    """Pixels more than half covered by tumour nuclei."""
    fine = Image.new("L", (SIZE * OVERSAMPLING, SIZE * OVERSAMPLING))
    pen = ImageDraw.Draw(fine)
    for edge in cells.outline[cells.kind == _TUMOUR]:
        _fill_polygon(pen, edge, 255)
    return np.asarray(fine.reduce(OVERSAMPLING)) > 127


CENTRE = slice(32, 64)
MIN_TUMOUR_PIXELS = 32
"""Tumour nucleus pixels that make a centre positive: about half a small tumour nucleus."""
SEED, QUALITY = 7, 85
"""Of the patches of the demo, and of the JPEG that holds them."""


INKED_EVERY = 12
"""Of the negative patches of the demo, this many per inked one."""


@dataclass(frozen=True)
class Patch:
    """A synthetic patch, whether its centre third contains tumour, and a mask of its tumour nuclei."""

    image: NDArray[np.uint8]
    label: int
    tumour: NDArray[np.bool_]


def draw(index: int, *, seed: int = 0) -> Patch:
    """The patch of this seed and index, without ink; its bytes depend on nothing else."""
    rng = np.random.default_rng([seed, index])
    wanted = int(rng.integers(2))
    while True:
        scene = _sample_scene(rng)
        tumour = _tumour_mask(scene.cells)
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
    eosin = np.clip(eosin * (1 + 0.08 * _smooth_noise(rng, 24)), 0.01, None) * (
        1 - 0.5 * np.clip(nuclei, 0, 1)
    )
    haematoxylin = _ground_property(scene, "haematoxylin") + nuclei * (1 + 0.2 * _smooth_noise(rng, 60))

    dyes = np.array([[0.60, 0.72, 0.36], [0.12, 0.76, 0.42]]) + rng.normal(0, 0.025, (2, 3))
    amount = np.exp(rng.normal(0, 0.18, 2))
    absorbed = np.stack((haematoxylin, eosin), axis=2) * amount @ dyes
    light = rng.uniform(236, 250) * np.exp(-absorbed)
    sharp = Image.fromarray(np.clip(light, 0, 255).astype(np.uint8))
    focused = np.asarray(sharp.filter(ImageFilter.GaussianBlur(rng.uniform(0.35, 0.8))), dtype=float)
    noisy = focused + rng.uniform(1.5, 4) * rng.standard_normal(focused.shape)
    return np.clip(noisy.round(), 0, 255).astype(np.uint8)


def add_ink(image: NDArray[np.uint8], rng: np.random.Generator) -> NDArray[np.uint8]:
    """The image crossed by a stroke of a green pen, off its centre."""
    along = _unit_circle(rng.uniform(0, 2 * np.pi))
    across, t = np.array([-along[1], along[0]]), np.linspace(-70, 70, 40)[:, None]
    bent = rng.uniform(30, 40) + rng.uniform(-0.006, 0.006) * t**2
    points = (SIZE / 2 + along * t + across * bent) * OVERSAMPLING
    fine = Image.new("L", (SIZE * OVERSAMPLING, SIZE * OVERSAMPLING))
    width = int(rng.uniform(5, 8) * OVERSAMPLING)
    ImageDraw.Draw(fine).line(points.ravel().tolist(), fill=255, width=width, joint="curve")
    covered = fine.reduce(OVERSAMPLING).filter(ImageFilter.GaussianBlur(0.6))
    share = np.asarray(covered, dtype=float)[..., None] / 255
    pen = np.array([30, 90, 60]) + rng.uniform(-10, 10, 3)
    inked = 0.65 * pen + 0.35 * image * pen / 255
    return np.clip((1 - share) * image + share * inked, 0, 255).astype(np.uint8)


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
    bands = wide * (0.6 + 0.5 * _smooth_noise(rng, 5)) + 0.7 * thin * (0.6 + 0.5 * _smooth_noise(rng, 6))
    clefts = np.clip(wide + _smooth_noise(rng, 4) - 2.0, 0, None)
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
            _fill_polygon(
                pale, at + value["cytoplasm"][i] * (edge - at), GREY_LEVELS * rng.uniform(0.04, 0.22)
            )
        _fill_polygon(pen, edge, GREY_LEVELS * (density[i] + value["rim"][i]))
        _fill_polygon(pen, at + (1 - 0.7 / radius) * (edge - at), GREY_LEVELS * density[i])
        for _ in range(nucleoli[i]):
            spot = at + radius * rng.normal(0, 0.3, 2) + rng.uniform(0.7, 1.2) * _unit_circle(ANGLES)
            _fill_polygon(pen, spot, GREY_LEVELS * (density[i] + 0.85))
    return _downsample(nuclei), _downsample(bodies)


def main() -> None:
    """Write the patches of the demo, row by row, with all their colours."""
    rows = -(-PATCHES // PATCHES_PER_ROW)
    sheet = Image.new("RGB", (SIZE * PATCHES_PER_ROW, SIZE * rows))
    negatives = 0
    for i, patch in enumerate(draw_many(PATCHES, seed=SEED)):
        negatives += not patch.label
        inked = not patch.label and negatives % INKED_EVERY == 0
        image = add_ink(patch.image, np.random.default_rng([SEED, i])) if inked else patch.image
        sheet.paste(Image.fromarray(image), (SIZE * (i % PATCHES_PER_ROW), SIZE * (i // PATCHES_PER_ROW)))
    sheet.save(SHEET, quality=QUALITY, subsampling=0, optimize=True, progressive=True)
    print(f"{SHEET}: {SHEET.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
