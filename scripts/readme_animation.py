"""Draw the README's animation: an aerial scene that rotates, with Grad-CAM and EquiGrad-CAM at every angle.

    python scripts/readme_animation.py [--out docs/drift.webp] [--frames FOLDER]

Scenes and network are made here, from one seed. Aircraft, ships, lorries and pools lie on grass, sand, water or tarmac,
half of them on the ground that is typical of them. The network is small and has seen objects that point up, as photographs
mostly show them. Of forty scenes with a lorry the animation takes the one whose Grad-CAM follows least at eight angles, among
those that keep their class at every angle shown. Every map is computed on the rotated scene. Takes about two minutes on an idle CPU.
"""

import argparse
import math
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Float, UInt8
from matplotlib.font_manager import FontProperties, findfont
from PIL import Image, ImageDraw, ImageFilter, ImageFont
from torch import Tensor, nn

import equicam
from equicam.core.views import rotate
from equicam.evaluate.equivariance import equivariance
from equicam.models.images import standard_preprocessing
from equicam.models.libraries import EmbeddedNet
from equicam.overlay import enlarge, overlay

SEED = 5
CLASSES = ("aircraft", "ship", "lorry", "pool")
LORRY = CLASSES.index("lorry")
INPUT_PX, SCENE_PX = 96, 384
UPRIGHT_DEGREES = 8  # objects point up, within this
TYPICAL_SHARE = 0.5  # of the training scenes: their object lies on its typical ground
TRAINING_SCENES, EPOCHS, BATCH = 800, 4, 32
OBJECT_SHARE = (0.5, 0.6)  # of the side of a scene
CANDIDATES = 40
STEP_DEGREES = 10
FRAME_MS, FIRST_FRAME_MS = 130, 900
MEAN, STD = (0.45, 0.45, 0.45), (0.22, 0.22, 0.22)
PREPROCESS = standard_preprocessing(INPUT_PX, INPUT_PX, MEAN, STD)
WIDTH, HEIGHT, MARGIN, PANEL_PX = 880, 598, 16, 272
PANEL_TOP = 82
LOWEST_EQ = -0.5  # of the curves
PAPER, INK, SOFT, LINE = (255, 255, 255), (34, 31, 42), (98, 92, 109), (223, 219, 229)
METHODS = {
    "grad-cam": ("Grad-CAM", "one view", (194, 87, 26)),
    "equigrad-cam": ("EquiGrad-CAM", "18 views", (43, 122, 120)),
}
CAPTION = "Eq (equivariance): correlation with the map at 0°, rotated by the angle. Every map is computed on the rotated scene."
X_LABEL, Y_LABEL = "angle of rotation (°)", "Eq"
Point = tuple[float, float]
Colour = tuple[int, int, int]


@dataclass(frozen=True)
class Scene:
    """A drawn scene at SCENE_PX, its class, and where its object lies, as shares of the side."""

    image: UInt8[np.ndarray, "H W 3"]
    label: int
    at: Point


def main() -> None:
    """Train, choose the scene, and write one loop of frames."""
    args = parse_out(__doc__, "drift.webp", "--frames", "a folder for the single frames, as PNG")
    _, scene, sweep = train_and_choose()
    frames = draw_frames(scene, sweep)
    durations = [FIRST_FRAME_MS] + [FRAME_MS] * (len(frames) - 1)
    frames[0].save(
        args.out, save_all=True, append_images=frames[1:], duration=durations, loop=0, quality=72, method=6
    )
    print(f"{args.out} {args.out.stat().st_size / 1e6:.2f} MB, {len(frames)} frames")
    for i, frame in enumerate(frames if args.frames else ()):
        args.frames.mkdir(parents=True, exist_ok=True)
        frame.save(args.frames / f"{i:02d}.png")


def parse_out(doc: str | None, name: str, folder: str, about: str) -> argparse.Namespace:
    """The options of a script that writes docs/NAME, and maybe more into a folder."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(__file__).parents[1] / "docs" / name)
    parser.add_argument(folder, type=Path, help=about)
    return parser.parse_args()


def train_and_choose() -> tuple[equicam.Model, Scene, "Sweep"]:
    """The network, the scene and its maps at every angle, from the seed."""
    torch.manual_seed(SEED)
    model = train()
    return model, *choose(model)


def draw_scene(
    rng: np.random.Generator, label: int, reach: Point, grounds: tuple[int, int] | None = None
) -> Scene:
    """One object of the class off the centre, on a ground with roads, houses and trees that say nothing of the class."""
    tilt = rng.uniform(-UPRIGHT_DEGREES, UPRIGHT_DEGREES)
    image = ground(rng, *(grounds or rng.integers(len(COLOURS), size=2)))
    pen = ImageDraw.Draw(image)
    angle, far = rng.uniform(0, 2 * math.pi), rng.uniform(*reach)
    at = (0.5 + far * math.cos(angle), 0.5 + far * math.sin(angle))
    side = rng.uniform(*OBJECT_SHARE)
    clutter(rng, pen, at, side)
    OBJECTS[label](pen, Brush(at, side, tilt))
    image = image.filter(ImageFilter.GaussianBlur(0.8))
    noise = rng.normal(0, 4, (SCENE_PX, SCENE_PX, 1))
    pixels = np.asarray(image, dtype=float) * rng.uniform(0.88, 1.08) + noise
    return Scene(np.clip(pixels, 0, 255).astype(np.uint8), label, at)


@dataclass(frozen=True)
class Brush:
    """Where an object lies: its centre, its size as a share of the side, and its tilt in degrees, clockwise."""

    at: Point
    side: float
    tilt: float

    def points(self, shape: list[Point]) -> list[Point]:
        """A shape in units of half the object's size, right and down, on the scene."""
        cos, sin = math.cos(math.radians(self.tilt)), math.sin(math.radians(self.tilt))
        half = self.side / 2 * SCENE_PX
        return [
            (
                self.at[0] * SCENE_PX + half * (x * cos - y * sin),
                self.at[1] * SCENE_PX + half * (x * sin + y * cos),
            )
            for x, y in shape
        ]

    def polygon(self, pen: ImageDraw.ImageDraw, shape: list[Point], colour: Colour) -> None:
        """Fill the shape and its mirror image, over its shadow."""
        whole = shape + [(-x, y) for x, y in reversed(shape)]
        pen.polygon(self.points(whole), fill=colour)

    def shadow(self, pen: ImageDraw.ImageDraw, shape: list[Point]) -> None:
        """The shape in dark, a little to the lower right."""
        whole = self.points(shape + [(-x, y) for x, y in reversed(shape)])
        pen.polygon([(x + 7, y + 8) for x, y in whole], fill=(52, 60, 52))


def aircraft(pen: ImageDraw.ImageDraw, brush: Brush) -> None:
    """Fuselage, swept wings, tail plane, engines."""
    fuselage = [(0, -1), (0.07, -0.93), (0.11, -0.75), (0.11, 0.55), (0.05, 0.97), (0, 1)]
    wings = [(0.1, -0.22), (0.98, 0.26), (0.98, 0.38), (0.1, 0.18)]
    tail = [(0.06, 0.66), (0.4, 0.88), (0.4, 0.98), (0.04, 0.9)]
    white = (238, 240, 243)
    for shape in (wings, tail, fuselage):
        brush.shadow(pen, shape)
    for x in (0.36, 0.62):
        brush.polygon(
            pen,
            [(x, -0.12 + x / 2), (x + 0.09, -0.12 + x / 2), (x + 0.09, 0.1 + x / 2), (x, 0.1 + x / 2)],
            (120, 126, 138),
        )
    brush.polygon(pen, wings, (214, 218, 225))
    brush.polygon(pen, tail, (200, 60, 55))
    brush.polygon(pen, fuselage, white)
    brush.polygon(pen, [(0, -0.86), (0.06, -0.82), (0.06, -0.76), (0, -0.78)], (60, 70, 90))


def ship(pen: ImageDraw.ImageDraw, brush: Brush) -> None:
    """A hull with a pointed bow, containers, a bridge."""
    hull = [(0, -1), (0.2, -0.7), (0.28, -0.3), (0.28, 0.85), (0.2, 1)]
    brush.shadow(pen, hull)
    brush.polygon(pen, hull, (150, 45, 40))
    brush.polygon(pen, [(0, -0.85), (0.14, -0.62), (0.21, -0.3), (0.21, 0.82)], (126, 132, 138))
    for i, y in enumerate(np.arange(-0.5, 0.4, 0.2)):
        brush.polygon(
            pen,
            [(0, y), (0.18, y), (0.18, y + 0.15), (0, y + 0.15)],
            ((60, 105, 150), (190, 130, 60), (80, 130, 90))[i % 3],
        )
    brush.polygon(pen, [(0, 0.5), (0.19, 0.5), (0.19, 0.74), (0, 0.74)], (240, 240, 238))


def lorry(pen: ImageDraw.ImageDraw, brush: Brush) -> None:
    """A cab and a long box."""
    box = [(0, -0.4), (0.3, -0.4), (0.3, 1), (0, 1)]
    cab = [(0, -0.82), (0.24, -0.8), (0.28, -0.48), (0, -0.48)]
    brush.shadow(pen, box)
    brush.shadow(pen, cab)
    brush.polygon(pen, cab, (225, 178, 40))
    brush.polygon(pen, [(0, -0.7), (0.2, -0.69), (0.22, -0.62), (0, -0.62)], (40, 50, 60))
    brush.polygon(pen, box, (232, 228, 214))
    brush.polygon(pen, [(0, -0.3), (0.24, -0.3), (0.24, 0.9), (0, 0.9)], (206, 201, 186))


def pool(pen: ImageDraw.ImageDraw, brush: Brush) -> None:
    """Blue water in a light rim, with lanes."""
    rim = [(0, -0.9), (0.52, -0.9), (0.52, 0.9), (0, 0.9)]
    brush.polygon(pen, rim, (222, 214, 200))
    brush.polygon(pen, [(0, -0.8), (0.42, -0.8), (0.42, 0.8), (0, 0.8)], (66, 170, 205))
    for x in (0.0, 0.2):
        brush.polygon(pen, [(x, -0.8), (x + 0.03, -0.8), (x + 0.03, 0.8), (x, 0.8)], (150, 215, 232))


OBJECTS = (aircraft, ship, lorry, pool)
GRASS, SAND, WATER, TARMAC = range(4)
COLOURS: tuple[Colour, ...] = ((104, 134, 82), (186, 166, 124), (66, 104, 132), (122, 124, 126))
TYPICAL = (
    ((TARMAC, GRASS), (TARMAC, TARMAC), (GRASS, TARMAC)),
    ((WATER, SAND), (WATER, WATER)),
    ((SAND, SAND), (SAND, TARMAC)),
    ((GRASS, GRASS), (GRASS, SAND)),
)
"""Pairs of grounds on which an object of each class mostly lies."""


def ground(rng: np.random.Generator, first: int, second: int) -> Image.Image:
    """Two kinds of ground, mottled."""
    base, other = (np.array(COLOURS[i], dtype=float) for i in (first, second))
    y, x = np.mgrid[:SCENE_PX, :SCENE_PX] / SCENE_PX - 0.5
    angle = rng.uniform(0, 2 * math.pi)
    border = x * math.cos(angle) + y * math.sin(angle) + 0.05 * smooth(rng, 6) - rng.uniform(0.1, 0.4)
    share = 1 / (1 + np.exp(-border * 90))[..., None]
    mottled = (base * (1 - share) + other * share) * (1 + 0.05 * smooth(rng, 12) + 0.04 * smooth(rng, 48))[
        ..., None
    ]
    return Image.fromarray(np.clip(mottled, 0, 255).astype(np.uint8))


def clutter(rng: np.random.Generator, pen: ImageDraw.ImageDraw, free: Point, side: float) -> None:
    """A road, houses and trees, none where the object will be."""
    if rng.random() < 0.6:
        angle, away = rng.uniform(0, math.pi), rng.uniform(-0.4, 0.4)
        (cx, cy), (dx, dy) = (
            (0.5 - away * math.sin(angle), 0.5 + away * math.cos(angle)),
            (math.cos(angle), math.sin(angle)),
        )
        ends = [((cx + s * dx) * SCENE_PX, (cy + s * dy) * SCENE_PX) for s in (-1, 1)]
        pen.line(ends, fill=(92, 92, 96), width=26)
        pen.line(ends, fill=(214, 208, 180), width=2)
    for _ in range(int(rng.integers(5, 16))):
        at = tuple(rng.uniform(0.02, 0.98, 2))
        if math.dist(at, free) < 0.62 * side + 0.05:
            continue
        if rng.random() < 0.4:
            house = Brush(at, rng.uniform(0.07, 0.13), rng.uniform(0, 180))
            roof = [(0, -0.8), (0.7, -0.8), (0.7, 0.8), (0, 0.8)]
            house.shadow(pen, roof)
            house.polygon(pen, roof, (162, 92, 70) if rng.random() < 0.5 else (140, 138, 140))
            house.polygon(pen, [(0, -0.8), (0.05, -0.8), (0.05, 0.8), (0, 0.8)], (110, 66, 52))
        else:
            radius = rng.uniform(0.018, 0.035) * SCENE_PX
            x, y = at[0] * SCENE_PX, at[1] * SCENE_PX
            pen.ellipse((x - radius + 4, y - radius + 5, x + radius + 4, y + radius + 5), fill=(50, 62, 44))
            pen.ellipse((x - radius, y - radius, x + radius, y + radius), fill=(62, 98, 54))


def smooth(rng: np.random.Generator, cells: int) -> Float[np.ndarray, "H W"]:
    """Noise with so many waves along a side."""
    coarse = Image.fromarray(rng.normal(0, 1, (cells, cells)).astype(np.float32))
    return np.asarray(coarse.resize((SCENE_PX, SCENE_PX), Image.Resampling.BICUBIC), dtype=float)


def as_input(images: list[UInt8[np.ndarray, "H W 3"]]) -> Float[Tensor, "b 3 h w"]:
    """Scenes as the network sees them."""
    return torch.stack([PREPROCESS(Image.fromarray(image)) for image in images])


def train() -> equicam.Model:
    """A small residual network, trained on upright objects."""
    rng = np.random.default_rng(SEED)
    labels = np.arange(TRAINING_SCENES) % len(CLASSES)
    scenes = []
    for label in labels:
        choices = TYPICAL[label]
        usual = choices[rng.integers(len(choices))] if rng.random() < TYPICAL_SHARE else None
        scenes.append(draw_scene(rng, int(label), (0.0, 0.18), usual))
    x, y = as_input([scene.image for scene in scenes]), torch.from_numpy(labels)
    net = EmbeddedNet()
    net.fc = nn.Linear(net.fc.in_features, len(CLASSES))
    optimiser = torch.optim.AdamW(net.parameters(), 2e-3, weight_decay=0.05)
    steps = EPOCHS * (TRAINING_SCENES // BATCH)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, 4e-3, total_steps=steps)
    net.train()
    for epoch in range(EPOCHS):
        losses = []
        for rows in torch.randperm(TRAINING_SCENES).split(BATCH):
            mirrored = x[rows].flip(-1) if torch.rand(()) < 0.5 else x[rows]
            loss = nn.functional.cross_entropy(net(mirrored), y[rows])
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
            schedule.step()
            losses.append(loss.item())
        print(f"epoch {epoch + 1}: loss {np.mean(losses):.3f}")
    return equicam.wrap(net.eval(), "layer4", preprocess=PREPROCESS, classes=CLASSES, mean=MEAN, std=STD)


@dataclass(frozen=True)
class Sweep:
    """Maps of one scene at every angle by both methods, and the Eq and confidence there."""

    maps: dict[str, Float[np.ndarray, "a h w"]]
    eq: dict[str, list[float]]
    confidence: list[float]
    consistent: bool


def sweep_angles(model: equicam.Model, x: Float[Tensor, "1 3 h w"], target: int, step: int) -> Sweep:
    """Rotate the scene, compute both maps on it, compare with the rotated map of the presented scene."""
    angles = list(range(0, 360, step))
    rotated = torch.cat([rotate(x, angle) for angle in angles])
    maps, eq = {}, {}
    for method in ("grad-cam", "equigrad-cam"):
        found = equicam.explain(model, rotated, method=method, target=target)
        maps[method] = found.map.numpy()
        moved = equivariance(found.map[:, None], found.map[:1], angles)
        eq[method] = moved.value[:, 0].tolist()
    with torch.no_grad():
        probabilities = model.module(rotated).softmax(1)
    return Sweep(maps, eq, probabilities[:, target].tolist(), bool((probabilities.argmax(1) == target).all()))


def choose(model: equicam.Model) -> tuple[Scene, Sweep]:
    """Of the scenes with a lorry that keep their class at every angle, the one whose Grad-CAM follows least."""
    rng = np.random.default_rng(SEED + 1)
    found = []
    for _ in range(CANDIDATES):
        scene = draw_scene(rng, LORRY, (0.13, 0.17), (SAND, TARMAC))
        coarse = sweep_angles(model, as_input([scene.image]), LORRY, 45)
        if coarse.consistent:
            found.append((float(np.mean(coarse.eq["grad-cam"])), scene))
    print(f"{len(found)} of {CANDIDATES} scenes keep their class at eight angles")
    for _, scene in sorted(found, key=lambda pair: pair[0]):
        sweep = sweep_angles(model, as_input([scene.image]), LORRY, STEP_DEGREES)
        if sweep.consistent:
            print(
                f"Grad-CAM Eq {np.mean(sweep.eq['grad-cam'][1:]):.2f}, EquiGrad-CAM {np.mean(sweep.eq['equigrad-cam'][1:]):.2f}"
            )
            return scene, sweep
    raise SystemExit("no scene keeps its class at every angle")


def draw_frames(scene: Scene, sweep: Sweep) -> list[Image.Image]:
    """A frame for every angle."""
    sharp = torch.from_numpy(scene.image).permute(2, 0, 1).float()
    frames = []
    for index in range(len(sweep.confidence)):
        rotated = rotate(sharp, index * STEP_DEGREES).permute(1, 2, 0).round().byte().numpy()
        frames.append(draw_frame(rotated, sweep, index))
    return frames


def draw_frame(rotated: UInt8[np.ndarray, "H W 3"], sweep: Sweep, index: int) -> Image.Image:
    """The rotated scene, both maps over it, their Eq at this angle and so far, and its curve up to here."""
    frame = Image.new("RGB", (WIDTH, HEIGHT), PAPER)
    pen = ImageDraw.Draw(frame)
    angle = index * STEP_DEGREES
    pen.text((MARGIN, 12), "The image rotates. Does its map?", INK, font(24, bold=True))
    paste_panel(frame, 0, rotated, f"rotated by {angle}°", "", INK)
    pen.text((MARGIN, PANEL_TOP + PANEL_PX + 10), f"predicted: {CLASSES[LORRY]}", INK, font(19, bold=True))
    pen.text((MARGIN, PANEL_TOP + PANEL_PX + 36), f"p = {sweep.confidence[index]:.2f}", SOFT, font(15))
    for column, (method, (name, views, colour)) in enumerate(METHODS.items(), 1):
        values = enlarge(sweep.maps[method][index], (SCENE_PX, SCENE_PX)).astype(np.float64)
        left = paste_panel(frame, column, overlay(rotated, values), name, views, colour)
        eq, so_far = sweep.eq[method][index], sweep.eq[method][1 : index + 1]
        pen.text((left, PANEL_TOP + PANEL_PX + 6), f"Eq {eq:.2f}", colour, font(25, bold=True))
        mean = f"mean so far {np.mean(so_far):.2f}" if so_far else "0° is the reference"
        pen.text((left, PANEL_TOP + PANEL_PX + 36), mean, SOFT, font(15))
    draw_curves(pen, sweep, index)
    return frame


def paste_panel(
    frame: Image.Image, column: int, image: UInt8[np.ndarray, "H W 3"], name: str, views: str, colour: Colour
) -> int:
    """An image with its name above and the circle inside which Eq is measured; returns its left edge."""
    left, pen = MARGIN + column * (PANEL_PX + MARGIN), ImageDraw.Draw(frame)
    pen.rectangle((left, 54, left + 4, 74), fill=colour)
    pen.text((left + 12, 53), name, INK, font(17, bold=True))
    pen.text((left + PANEL_PX, 55), views, SOFT, font(14), anchor="ra")
    small = Image.fromarray(image).resize((PANEL_PX, PANEL_PX), Image.Resampling.LANCZOS)
    frame.paste(small, (left, PANEL_TOP))
    pen.ellipse((left, PANEL_TOP, left + PANEL_PX - 1, PANEL_TOP + PANEL_PX - 1), outline=PAPER, width=1)
    return left


def draw_curves(pen: ImageDraw.ImageDraw, sweep: Sweep, index: int) -> None:
    """Eq of both methods by angle, up to this one."""
    left, right, top, bottom = MARGIN + 58, WIDTH - MARGIN - 4, 436, 524

    def place(angle: int | float, eq: float) -> Point:
        return left + (right - left) * angle / 360, bottom - (bottom - top) * (
            max(eq, LOWEST_EQ) - LOWEST_EQ
        ) / (1 - LOWEST_EQ)

    for eq in (0, 0.5, 1):
        (x0, y), (x1, _) = place(0, eq), place(360, eq)
        pen.line((x0, y, x1, y), LINE, 1)
        pen.text((left - 8, y), f"{eq:g}", SOFT, font(14), anchor="rm")
    for angle in range(0, 361, 90):
        pen.text(
            (place(angle, 0)[0], bottom + 4),
            f"{angle}°",
            SOFT,
            font(14),
            anchor="ma" if angle < 360 else "ra",
        )
    for method, (_, _, colour) in METHODS.items():
        points = [place(i * STEP_DEGREES, sweep.eq[method][i]) for i in range(index + 1)]
        if index:
            pen.line(points, colour, 3, joint="curve")
        x, y = points[-1]
        pen.ellipse((x - 5, y - 5, x + 5, y + 5), fill=colour)
    pen.text(((left + right) / 2, bottom + 22), X_LABEL, SOFT, font(14), anchor="ma")
    pen.text((MARGIN, (top + bottom) / 2), Y_LABEL, SOFT, font(14, bold=True), anchor="lm")
    pen.text((MARGIN, bottom + 48), CAPTION, SOFT, font(14))


@cache
def font(size: int, *, bold: bool = False) -> ImageFont.FreeTypeFont:
    """DejaVu Sans, which comes with matplotlib."""
    return ImageFont.truetype(
        findfont(FontProperties(family="DejaVu Sans", weight="bold" if bold else "normal")), size
    )


if __name__ == "__main__":
    main()
