"""Histology-like patches with an exact label: drawn tissue in haematoxylin and eosin, no photographs.

As in PatchCamelyon a patch is 96×96 pixels of about 1 µm, and it is positive if and only if its centre third holds
tumour. Scenes of either label come from one distribution: a coin names the label, and scenes are drawn until one
has it. So tumour away from the centre, borderline centres and benign look-alikes are as frequent as they fall, and
nothing but what stands in the centre tells the label. No direction is special.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFilter

SIZE = 96
CENTRE = slice(32, 64)
MIN_TUMOUR_PIXELS = 32
"""Tumour nucleus pixels that make a centre positive: about half a small tumour nucleus."""

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Patch:
    """A drawn patch, whether its centre third holds tumour, and where its tumour nuclei are."""

    image: NDArray[np.uint8]
    label: int
    tumour: NDArray[np.bool_]


def draw(index: int, *, seed: int = 0) -> Patch:
    """The patch of this seed and index: the same bytes whatever else is drawn."""
    rng = np.random.default_rng([seed, index])
    wanted = int(rng.integers(2))
    while True:
        scene = _scene(rng)
        tumour = _tumour(scene.cells)
        if int(tumour[CENTRE, CENTRE].sum() >= MIN_TUMOUR_PIXELS) == wanted:
            return Patch(_image(rng, scene), wanted, tumour)


def draw_many(count: int, *, seed: int = 0, start: int = 0) -> Iterator[Patch]:
    """The patches start, start + 1, … of a seed, one after the other."""
    return (draw(index, seed=seed) for index in range(start, start + count))


@dataclass(frozen=True)
class _Kind:
    """How the nuclei of one kind of cell look; lengths in pixels, densities in stain."""

    radius: float
    spread: float  # of the radius, relative
    longest: float  # axis ratio, from 1 to this
    wobble: float  # of the outline, relative
    density: float
    rim: float  # a vesicular nucleus is pale with a dark membrane
    nucleoli: float  # how many, in the mean
    room: float  # of its radius that no neighbour may enter
    cytoplasm: float  # reach of the cell around it, in radii; 0: not seen


_KINDS = {
    "lymphocyte": _Kind(2.9, 0.08, 1.15, 0.03, 1.15, 0.05, 0.0, 0.95, 0.0),
    "fibroblast": _Kind(2.3, 0.18, 5.0, 0.05, 0.85, 0.0, 0.0, 1.0, 0.0),
    "epithelium": _Kind(3.0, 0.08, 1.6, 0.03, 0.85, 0.1, 0.2, 0.6, 0.0),
    "reactive": _Kind(4.2, 0.16, 1.4, 0.06, 0.54, 0.30, 1.0, 1.0, 1.4),
    "tumour": _Kind(4.7, 0.20, 1.6, 0.10, 0.58, 0.34, 1.3, 0.93, 1.5),
}
_LOOKS = {look: np.array([getattr(kind, look) for kind in _KINDS.values()]) for look in _Kind.__annotations__}
_FIBROBLAST, _EPITHELIUM, _TUMOUR = (list(_KINDS).index(k) for k in ("fibroblast", "epithelium", "tumour"))


@dataclass(frozen=True)
class _Tissue:
    """What one kind of ground is stained like, and which nuclei lie in it, by share of the places tried."""

    eosin: float
    haematoxylin: float
    fibres: float
    cells: dict[str, float]


_TISSUES = {
    "stroma": _Tissue(0.55, 0.04, 1.0, {"fibroblast": 0.06, "lymphocyte": 0.02}),
    "lymphoid": _Tissue(0.33, 0.16, 0.15, {"lymphocyte": 0.95, "reactive": 0.04}),
    "follicle": _Tissue(0.43, 0.13, 0.1, {"reactive": 0.65, "lymphocyte": 0.3}),
    "nest": _Tissue(0.46, 0.13, 0.1, {"tumour": 0.94, "lymphocyte": 0.05}),
    "gland": _Tissue(0.62, 0.10, 0.1, {}),
    "membrane": _Tissue(0.55, 0.08, 0.0, {}),
    "space": _Tissue(0.03, 0.01, 0.0, {}),
}
_GROUND = {name: i for i, name in enumerate(_TISSUES)}
_SHARES = np.cumsum([[t.cells.get(kind, 0.0) for kind in _KINDS] for t in _TISSUES.values()], axis=1)


@dataclass(frozen=True)
class _Cells:
    """Nuclei, one row each: kind, centre, radius and outline [n, vertex, xy]."""

    kind: Ints
    at: Floats
    radius: Floats
    outline: Floats


@dataclass(frozen=True)
class _Scene:
    """Where everything is: the ground, finely drawn, the run of its fibres and the cells on it."""

    ground: Image.Image
    across: Floats  # the coordinate across the fibres, by pixel
    cells: _Cells


_FINE = 3  # drawn this much larger and averaged, so that edges are smooth
_GRAIN = 100  # grey levels of the drawing for one unit of stain
_TRIES = 800  # places where a nucleus is tried
_ROUND = np.linspace(0, 2 * np.pi, 16, endpoint=False)


def _scene(rng: np.random.Generator) -> _Scene:
    """Stroma, with what lies in it painted one over the other, then its cells."""
    ground = Image.new("L", (SIZE * _FINE, SIZE * _FINE), _GROUND["stroma"])
    pen = ImageDraw.Draw(ground)
    for _ in range(rng.integers(0, 3)):
        _fill(pen, _wavy(rng, _anywhere(rng), rng.uniform(18, 50), wobble=0.25), _GROUND["lymphoid"])
    for _ in range(rng.integers(0, 3)):
        _fill(pen, _wavy(rng, _anywhere(rng), rng.uniform(8, 24), wobble=0.2), _GROUND["follicle"])
    for _ in range(rng.integers(0, 5)):
        at, radius = _anywhere(rng), rng.uniform(6, 26)
        _fill(pen, _wavy(rng, at, radius, wobble=0.3), _GROUND["nest"])
        if radius > 18 and rng.random() < 0.3:
            _fill(pen, _wavy(rng, at, rng.uniform(3, 6), wobble=0.2), _GROUND["space"])
    if rng.random() < 0.3:
        _fat(rng, pen)
    ring = _gland(rng, pen) if rng.random() < 0.3 else np.empty((0, 3))
    across = _across(rng)
    return _Scene(ground, across, _cells(rng, np.asarray(ground), across, ring))


def _anywhere(rng: np.random.Generator) -> Floats:
    return rng.uniform(-8, SIZE + 8, 2)


def _wavy(rng: np.random.Generator, at: Floats, radius: int | float, *, wobble: int | float) -> Floats:
    """A round edge that waves [vertex, xy]."""
    turn, bumps = np.linspace(0, 2 * np.pi, 40, endpoint=False), np.arange(2, 6)[:, None]
    waves = rng.normal(0, wobble / bumps) * np.cos(bumps * turn + rng.uniform(0, 2 * np.pi, (4, 1)))
    reach: Floats = radius * np.clip(1 + waves.sum(0), 0.3, 2)
    return at + reach[:, None] * _circle(turn)


def _circle(turn: Floats | float) -> Floats:
    return np.stack((np.cos(turn), np.sin(turn)), axis=-1, dtype=float)


def _fill(pen: ImageDraw.ImageDraw, edge: Floats, value: int | float) -> None:
    pen.polygon((edge * _FINE).ravel().tolist(), fill=int(value))


def _fat(rng: np.random.Generator, pen: ImageDraw.ImageDraw) -> None:
    """A few fat cells side by side: empty, with a thin membrane."""
    at, radius, turn = _anywhere(rng), rng.uniform(9, 15), rng.uniform(0, 2 * np.pi)
    for _ in range(rng.integers(1, 5)):
        edge = _wavy(rng, at, radius, wobble=0.08)
        _fill(pen, edge, _GROUND["membrane"])
        _fill(pen, at + (1 - 1.2 / radius) * (edge - at), _GROUND["space"])
        turn += rng.uniform(-1, 1)  # onwards, not back over the last one
        at = at + 2 * radius * _circle(turn)


def _gland(rng: np.random.Generator, pen: ImageDraw.ImageDraw) -> Floats:
    """A benign duct: a ring of epithelium around a lumen; gives its nuclei's places and tilts [n, xy + tilt]."""
    at, radius = _anywhere(rng), rng.uniform(11, 19)
    _fill(pen, _wavy(rng, at, radius, wobble=0.05), _GROUND["gland"])
    _fill(pen, _wavy(rng, at, radius - rng.uniform(8, 9.5), wobble=0.1), _GROUND["space"])
    count = int(2 * np.pi * radius / 5.2)
    turn = np.arange(count) * (2 * np.pi / count) + rng.normal(0, 0.08, count)
    reach = radius - 3.6 + rng.normal(0, 0.5, count)
    return np.column_stack((at + reach[:, None] * _circle(turn), turn))


def _across(rng: np.random.Generator) -> Floats:
    """The coordinate across wavy fibres that run in one direction through the patch."""
    turn = rng.uniform(0, 2 * np.pi)
    y, x = np.arange(float(SIZE))[:, None], np.arange(float(SIZE))
    straight: Floats = np.cos(turn) * y - np.sin(turn) * x
    return straight + 9 * _noise(rng, 3) + 2 * _noise(rng, 7)


def _noise(rng: np.random.Generator, bumps: int) -> Floats:
    """Smooth noise of about unit deviation, this many bumps across the patch."""
    grid = Image.fromarray(rng.standard_normal((bumps + 1, bumps + 1)).astype(np.float32))
    return np.asarray(grid.resize((SIZE, SIZE), Image.Resampling.BICUBIC), dtype=float)


def _cells(rng: np.random.Generator, ground: NDArray[np.uint8], across: Floats, ring: Floats) -> _Cells:
    """The ring's nuclei, then others thrown at random, each kept if its ground wants it and it finds room."""
    at = rng.uniform(-5, SIZE + 5, (_TRIES, 2))
    x, y = np.clip(at, 0, SIZE - 1).astype(int).T
    kind = (rng.random((_TRIES, 1)) > _SHARES[ground[y * _FINE, x * _FINE]]).sum(1)
    slope_y, slope_x = (np.gradient(across, axis=axis)[y, x] for axis in (0, 1))
    along = np.arctan2(-slope_x, slope_y)
    tilt = np.where(kind == _FIBROBLAST, along, rng.uniform(0, np.pi, _TRIES))

    wanted = kind < len(_KINDS)
    kind = np.concatenate((np.full(len(ring), _EPITHELIUM), kind[wanted]))
    at = np.concatenate((ring[:, :2], at[wanted]))
    tilt = np.concatenate((ring[:, 2], tilt[wanted]))
    radius = _LOOKS["radius"][kind] * np.exp(_LOOKS["spread"][kind] * rng.standard_normal(len(kind)))
    radius[kind == _TUMOUR] *= rng.uniform(0.8, 1.15)  # low grade to high: one tumour is like itself
    kept = _apart(at, radius * _LOOKS["room"][kind])
    kind, at, radius, tilt = kind[kept], at[kept], radius[kept], tilt[kept]
    return _Cells(kind, at, radius, _outlines(rng, kind, at, radius, tilt))


def _apart(at: Floats, room: Floats) -> Ints:
    """Which discs stay when each, in order, drops all later ones that it meets."""
    points = at[:, 0] + 1j * at[:, 1]
    left, kept = np.arange(len(at)), []
    while len(left):
        kept.append(left[0])
        left = left[np.abs(points[left] - points[left[0]]) >= room[left] + room[left[0]]]
    return np.array(kept, dtype=int)


def _outlines(rng: np.random.Generator, kind: Ints, at: Floats, radius: Floats, tilt: Floats) -> Floats:
    """Ellipses of the kind's elongation with a wavy edge [n, vertex, xy]."""
    waves = np.ones((len(kind), len(_ROUND)))
    for bumps in (2, 3, 5):
        size = _LOOKS["wobble"][kind] * rng.standard_normal(len(kind))
        waves += size[:, None] * np.cos(bumps * _ROUND + rng.uniform(0, 2 * np.pi, (len(kind), 1)))
    ratio = np.sqrt(1 + rng.random(len(kind)) * (_LOOKS["longest"][kind] - 1))
    axes = np.stack((radius * ratio, radius / ratio), axis=1)
    long, short = np.moveaxis(axes[:, None] * waves[..., None] * _circle(_ROUND), -1, 0)
    cos, sin = np.cos(tilt)[:, None], np.sin(tilt)[:, None]
    turned: Floats = at[:, None] + np.stack((long * cos - short * sin, long * sin + short * cos), axis=2)
    return turned


def _tumour(cells: _Cells) -> NDArray[np.bool_]:
    """Pixels more than half covered by tumour nuclei."""
    fine = Image.new("L", (SIZE * _FINE, SIZE * _FINE))
    pen = ImageDraw.Draw(fine)
    for edge in cells.outline[cells.kind == _TUMOUR]:
        _fill(pen, edge, 255)
    return np.asarray(fine.reduce(_FINE)) > 127


def _image(rng: np.random.Generator, scene: _Scene) -> NDArray[np.uint8]:
    """Two stains absorb light (Beer and Lambert); dyes, focus and sensor noise are each patch's own."""
    nuclei, bodies = _stained(rng, scene.cells)
    eosin = _ground(scene, "eosin") + bodies
    eosin += 0.28 * _ground(scene, "fibres") * _fibres(rng, scene.across)
    eosin = np.clip(eosin * (1 + 0.08 * _noise(rng, 24)), 0.01, None) * (1 - 0.5 * np.clip(nuclei, 0, 1))
    haematoxylin = _ground(scene, "haematoxylin") + nuclei * (1 + 0.2 * _noise(rng, 60))

    dyes = np.array([[0.60, 0.72, 0.36], [0.12, 0.76, 0.42]]) + rng.normal(0, 0.025, (2, 3))
    amount = np.exp(rng.normal(0, 0.18, 2))
    absorbed = np.stack((haematoxylin, eosin), axis=2) * amount @ dyes
    light = rng.uniform(236, 250) * np.exp(-absorbed)
    picture = Image.fromarray(np.clip(light, 0, 255).astype(np.uint8))
    focused = np.asarray(picture.filter(ImageFilter.GaussianBlur(rng.uniform(0.35, 0.8))), dtype=float)
    noisy = focused + rng.uniform(1.5, 4) * rng.standard_normal(focused.shape)
    return np.clip(noisy.round(), 0, 255).astype(np.uint8)


def _ground(scene: _Scene, stain: str) -> Floats:
    """One property of the ground, by pixel."""
    levels = [int(_GRAIN * getattr(tissue, stain)) for tissue in _TISSUES.values()]
    return _averaged(scene.ground.point(levels + [0] * (256 - len(levels))))


def _averaged(fine: Image.Image) -> Floats:
    return np.asarray(fine.reduce(_FINE), dtype=float) / _GRAIN


def _fibres(rng: np.random.Generator, across: Floats) -> Floats:
    """Collagen: bands of two widths along the fibres, coming and going, and the clefts between them."""
    knots = np.arange(-200, 201)
    wide, thin = (np.interp(across / width, knots, rng.standard_normal(len(knots))) for width in (3.5, 1.4))
    bands = wide * (0.6 + 0.5 * _noise(rng, 5)) + 0.7 * thin * (0.6 + 0.5 * _noise(rng, 6))
    clefts = np.clip(wide + _noise(rng, 4) - 2.0, 0, None)
    return 0.6 * bands - 2.2 * clefts


def _stained(rng: np.random.Generator, cells: _Cells) -> tuple[Floats, Floats]:
    """The haematoxylin of the nuclei, and the eosin of the cell bodies that show."""
    nuclei, bodies = (Image.new("L", (SIZE * _FINE, SIZE * _FINE)) for _ in range(2))
    pen, pale = ImageDraw.Draw(nuclei), ImageDraw.Draw(bodies)
    look = {name: column[cells.kind] for name, column in _LOOKS.items()}
    density = look["density"] * np.exp(rng.normal(0, 0.18, len(cells.kind)))
    nucleoli = rng.poisson(look["nucleoli"])
    for i, (at, radius, edge) in enumerate(zip(cells.at, cells.radius, cells.outline, strict=True)):
        if look["cytoplasm"][i]:
            _fill(pale, at + look["cytoplasm"][i] * (edge - at), _GRAIN * rng.uniform(0.04, 0.22))
        _fill(pen, edge, _GRAIN * (density[i] + look["rim"][i]))
        _fill(pen, at + (1 - 0.7 / radius) * (edge - at), _GRAIN * density[i])
        for _ in range(nucleoli[i]):
            spot = at + radius * rng.normal(0, 0.3, 2) + rng.uniform(0.7, 1.2) * _circle(_ROUND)
            _fill(pen, spot, _GRAIN * (density[i] + 0.85))
    return _averaged(nuclei), _averaged(bodies)
