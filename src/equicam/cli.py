"""The command line. Heavy libraries load inside the commands that need them."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

app = typer.Typer(no_args_is_help=True, add_completion=False, rich_markup_mode="markdown")
console = Console()


@app.callback()
def main() -> None:
    """Rotation-audited saliency: which maps do not move when the image does, and a queue of those that do."""


@app.command()
def methods() -> None:
    """The explanation methods there are, by the names `explain` takes."""
    from equicam.methods import METHODS

    table = Table("method", "views", "what it does", box=None)
    for name, method in METHODS.items():
        table.add_row(name, str(len(method.fusion.views)), method.about)
    console.print(table)


@app.command()
def demo(
    out: Annotated[Path, typer.Option(help="where the pictures go")] = Path("demo"),
    count: Annotated[int, typer.Option(min=1, help="how many patches to draw")] = 6,
) -> None:
    """Explain drawn histology-like patches with the embedded model and write overlays.

    Everything is synthetic and in the package: no network, no download. For example: `equicam demo --out demo`
    """
    import numpy as np
    import torch
    from rich.progress import track

    import equicam
    from equicam.data.synthetic import draw_many
    from equicam.models.embedded import CLASSES, MEAN, STD, embedded
    from equicam.report.overlay import heat, overlay, panel

    out.mkdir(parents=True, exist_ok=True)
    patches = list(draw_many(count, seed=7))
    pixels = torch.from_numpy(np.stack([p.image for p in patches])).permute(0, 3, 1, 2) / 255
    x = (pixels - torch.tensor(MEAN)[:, None, None]) / torch.tensor(STD)[:, None, None]
    model = equicam.wrap(embedded(), layer="layer4", classes=CLASSES)
    one = equicam.explain(model, x, method="grad-cam")
    all_round = equicam.explain(model, x, method="equigrad-cam", target=one.target)

    table = Table("patch", "drawn as", "predicted", "PEUM", "views that flip", "picture", title="least certain first")
    highest = float(all_round.peum.max())
    for i in track(all_round.score.argsort(descending=True).tolist(), "drawing", console=console, transient=True):
        picture, path = patches[i].image, out / f"patch-{i:03d}.png"
        entries = [
            ("picture", picture),
            ("Grad-CAM, one view", overlay(picture, one.map[i].numpy())),
            ("EquiGrad-CAM, 18 views", overlay(picture, all_round.map[i].numpy())),
            ("PEUM: where views disagree", heat((all_round.peum[i] / highest).numpy())),
        ]
        panel([entries], path, title=f"{CLASSES[int(one.target[i])]} (p = {float(one.prob[i, 0]):.2f})")
        table.add_row(
            str(i),
            CLASSES[patches[i].label],
            CLASSES[int(one.target[i])],
            f"{float(all_round.score[i]):.4f}",
            f"{int(all_round.flips[i].sum())} of {all_round.flips.shape[1]}",
            str(path),
        )
    console.print(table)
    console.print(f"Synthetic patches, synthetic model. Overlays are in {out.resolve()}")
