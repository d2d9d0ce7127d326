"""The command line. Heavy libraries load inside the commands that need them."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table

from equicam.cli import audit as cli_audit
from equicam.cli import reproduce as cli_reproduce
from equicam.cli import review as cli_review
from equicam.cli.shared import (
    COMPILE,
    as_typed,
    console,
    dtype_named,
    listed,
    plain,
    refused,
    views_named,
    where,
)

if TYPE_CHECKING:
    from torch import Tensor

    from equicam.explain import Explanation
    from equicam.readers.model import Model
    from equicam.report.explanation_files import Explained

app = typer.Typer(no_args_is_help=True, add_completion=False, rich_markup_mode="markdown")
A_BATCH = 8

for command in (
    cli_audit.audit,
    cli_audit.triage,
    cli_audit.report,
    cli_audit.verify,
    cli_review.review,
    cli_reproduce.reproduce,
):
    app.command()(command)


def _version(wanted: bool) -> bool:
    if wanted:
        import equicam

        console.print(f"equicam {equicam.__version__}", highlight=False)
        raise typer.Exit
    return wanted


@app.callback()
def main(
    _: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="print the version")
    ] = False,
) -> None:
    """Rotation-audited saliency: which maps do not move when the image does, and a queue of those that do."""


@app.command()
def explain(
    images: Annotated[list[Path], typer.Argument(help="picture files", show_default=False)],
    model: Annotated[
        str, typer.Option(help="a name `equicam models` lists, or file.py:factory")
    ] = "embedded",
    weights: Annotated[
        str | None, typer.Option(help="a weights file, the name of published weights, or random")
    ] = None,
    out: Annotated[Path, typer.Option(help="where pictures and JSON go")] = Path("explained"),
    method: Annotated[str, typer.Option(help="a name `equicam methods` lists")] = "equigrad-cam",
    views: Annotated[
        str | None, typer.Option(help="how many views, or auto; the method's own if left out")
    ] = None,
    target: Annotated[int | None, typer.Option(help="the class to explain; the top-1 if left out")] = None,
    layer: Annotated[str | None, typer.Option(help="the target layer; chosen if left out")] = None,
    classes: Annotated[str | None, typer.Option(help="class names of a zero-shot model, with commas")] = None,
    fill: Annotated[str | None, typer.Option(help="reflect, zeros or coverage")] = None,
    tau: Annotated[float | None, typer.Option(help="of +pcf methods")] = None,
    gamma: Annotated[float | None, typer.Option(help="of +soft methods")] = None,
    as_published: Annotated[bool, typer.Option(help="the paper authors' grid, fill and variants")] = False,
    device: Annotated[
        str | None, typer.Option(help="cpu, cuda, cuda:1; the best there is if left out")
    ] = None,
) -> None:
    """Explain pictures: overlay, PEUM and view-strip PNGs, and a JSON beside them.

    A picture that cannot be read is named with its reason, the others are done, and the command exits with 1.

    For example: `equicam explain scan.png --model resnet50 --views 6`
    """
    from rich.progress import track

    import equicam
    from equicam.data.image_files import open_picture
    from equicam.errors import EquicamError
    from equicam.models.images import preprocessed, stacked
    from equicam.report.explanation_files import safe_stem, write

    options = {"method": method, "target": target, "fill": fill, "tau": tau, "gamma": gamma}
    table = Table("picture", "class", "p", "PEUM", "flips", "flags", "files")
    table.columns[0].overflow = "fold"
    # nothing we write may replace a picture we were given
    taken = {
        p.name.split(".")[0].lower()
        for p in images
        if p.resolve().parent == out.resolve() and p.name.count(".") > 1
    }
    failed = 0
    try:
        ready = equicam.load(
            model, weights=weights, classes=listed(classes), layer=layer, device=where(device)
        )
        out.mkdir(parents=True, exist_ok=True)
        batches = [images[i : i + A_BATCH] for i in range(0, len(images), A_BATCH)]
        for batch in track(batches, "explaining", console=console, transient=True, disable=len(images) < 2):
            read: list[tuple[Path, Tensor]] = []
            for path in batch:
                try:
                    read.append((path, preprocessed(ready, open_picture(path))))
                except EquicamError as error:
                    failed += 1
                    console.print(f"[red]left out[/red] {escape(plain(error))}", soft_wrap=True)
            if not read:
                continue
            x = stacked([tensor for _, tensor in read])
            found = equicam.explain(ready, x, **options, views=views_named(views), as_published=as_published)  # type: ignore[arg-type]
            for i, (path, _) in enumerate(read):
                done = _explained(ready, x, found, i, {"picture": str(path), "method": method})
                stem = safe_stem(str(path), taken)
                write(done, out, stem)
                table.add_row(*map(escape, _row(path, done.facts, stem)))
    except (EquicamError, OSError) as error:
        console.print(f"[red]{escape(as_typed(error))}[/red]", soft_wrap=True)
        raise typer.Exit(2) from error
    finally:
        if table.row_count:
            console.print(table)
            console.print(f"pictures and JSON are in {escape(plain(out))}", soft_wrap=True)
    console.print(f"layer {ready.layer}")
    if views == "auto" and table.row_count > 1:
        console.print(
            "PEUM over different numbers of views does not rank pictures: give --views a number for that"
        )
    if failed:
        console.print(f"{failed} of {len(images)} pictures left out")
        raise typer.Exit(1)


@app.command()
def demo(
    out: Annotated[Path, typer.Option(help="where the pictures and the run go")] = Path("demo"),
    count: Annotated[int, typer.Option(min=10, help="how many patches to draw")] = 200,
) -> None:
    """The main job on drawn histology-like patches and the embedded model: audit, triage, report.

    Everything is synthetic and in the package: no network, no download. For example: `equicam demo --out demo`
    """
    from PIL import Image

    from equicam.data.synthetic import draw_many

    name = "" if count == 200 else f"-{count}"
    pictures, run = out / f"pictures{name}", out / f"run{name}"
    with refused():
        pictures.mkdir(parents=True, exist_ok=True)
        for i, patch in enumerate(draw_many(count, seed=7)):
            path = pictures / f"patch-{i:03d}.png"
            if not path.is_file():
                Image.fromarray(patch.image).save(path)
    said = {"weights": None, "layer": None, "classes": None, "device": "cpu"}
    cli_audit.audit(
        str(pictures), run, model="embedded", method="equigrad-cam", views=None, calibrate=count // 2, split=None, n=None,
        fill=None, tau=None, gamma=None, as_published=False, dtype=None, seed=0, part=32, workers=None, engine="local", address=None,
        actors=None, compile_=False, **said,
    )  # fmt: skip
    cli_audit.triage(
        run, by="peum", budget="10%", control=0.2, alpha=0.1, unstable=0.5, quotas=True, evidence=20, seed=0, source=None, weights=None,
        device="cpu",
    )  # fmt: skip
    cli_audit.verify(run, sample=5, seed=0, noted=None, source=None, weights=None, device="cpu")
    worst = cli_audit.worst_cases(run, 3)
    console.print(f"\nfirst in the queue, {len(worst)} of them:")
    for row in worst:
        why = "; ".join(row["reasons"])
        console.print(f"  {escape(plain(row['id']))}: {escape(plain(why))}", soft_wrap=True, highlight=False)
    cli_audit.report(run, top=40, source=None)
    console.print("Synthetic patches and a synthetic model: for looking around, not for conclusions.")


@app.command()
def models(
    search: Annotated[str, typer.Argument(help="part of a name", show_default=False)] = "",
) -> None:
    """Where models come from, or the names that contain a text.

    For example: `equicam models vit_small`
    """
    if search:
        from equicam.models.load import names

        found = [name for name in names() if search.lower() in name.lower()]
        console.print("\n".join(found) or f"no name contains {escape(search)!r}", highlight=False)
        return
    table = Table("name", "what", box=None)
    for row in (
        ("embedded", "the small synthetic model in the package"),
        ("resnet50", "torchvision, by its name"),
        ("timm:vit_small_patch16_224", "timm"),
        ("open_clip:ViT-B-16/openai", "open_clip, zero-shot over --classes; needs equicam\\[clip]"),
        (
            "hf:google/vit-base-patch16-224",
            "Hugging Face classifiers, and CLIP over --classes; needs equicam\\[hf]",
        ),
        ("models.py:build", "a function of yours that returns a module or what equicam.wrap returns"),
    ):
        table.add_row(*row)
    console.print(table)
    console.print("\n`equicam models TEXT` lists the torchvision and timm names that contain it.")


@app.command()
def methods() -> None:
    """The explanation methods there are, by the names `explain` takes."""
    from equicam.methods import METHODS

    table = Table("method", "views", "what it does", box=None)
    for name, method in METHODS.items():
        table.add_row(name, str(len(method.fusion.views)), method.about)
    console.print(table)


@app.command()
def evaluate(
    source: Annotated[
        str, typer.Argument(help="a folder, CSV or Parquet manifest, or benchmark", show_default=False)
    ],
    model: Annotated[
        str, typer.Option(help="a name `equicam models` lists, or file.py:factory")
    ] = "embedded",
    weights: Annotated[
        str | None, typer.Option(help="a weights file, the name of published weights, or random")
    ] = None,
    methods: Annotated[
        str, typer.Option(help="names `equicam methods` lists, with commas; controls as grad-cam@blur-16")
    ] = "grad-cam,equigrad-cam",
    scores: Annotated[str, typer.Option(help="names `equicam scores` lists, with commas")] = "eq",
    n: Annotated[int | None, typer.Option("--n", help="how many pictures, spread over the classes")] = None,
    split: Annotated[str | None, typer.Option(help="of the source: train, test, …")] = None,
    out: Annotated[
        Path | None, typer.Option(help="a Parquet file for the rows; resumes what is there")
    ] = None,
    views: Annotated[
        str | None, typer.Option(help="of the methods with several, or auto; theirs if left out")
    ] = None,
    layer: Annotated[str | None, typer.Option(help="the target layer; chosen if left out")] = None,
    classes: Annotated[str | None, typer.Option(help="class names of a zero-shot model, with commas")] = None,
    fill: Annotated[str | None, typer.Option(help="reflect, zeros or coverage")] = None,
    as_published: Annotated[bool, typer.Option(help="the paper authors' protocol to the letter")] = False,
    dtype: Annotated[str | None, typer.Option(help="bfloat16 or float16: run the network in it")] = None,
    compile_: COMPILE = False,
    seed: Annotated[int, typer.Option(help="of random controls")] = 0,
    details: Annotated[
        bool, typer.Option(help="also by angle, by condition, against each other, and what tells bad maps")
    ] = False,
    device: cli_audit.DEVICES = None,
    engine: cli_audit.ENGINE = "local",
    address: cli_audit.ADDRESS = None,
    actors: cli_audit.ACTORS = None,
) -> None:
    """The paper's protocol on your data: every method on the same pictures and views, with intervals and floors.

    Rows go to `--out`; a command that is cut off goes on where it stopped when it is given again. Pictures that
    cannot be read are rows with a reason.

    For example: `equicam evaluate val/ --model resnet50 --n 200 --scores eq,insertion --out eq.parquet`
    """
    from dataclasses import replace

    import equicam
    from equicam.engines.worker import Recipe
    from equicam.errors import EquicamError
    from equicam.report.tables import printed

    try:
        named = None if classes is None else tuple(listed(classes) or ())
        recipe = Recipe(cli_audit.absolute(model), cli_audit.absolute(weights), named, layer, compile_)
        on, chosen = cli_audit.engine_named(engine, address, actors, device, recipe)
        ready = replace(recipe(on), name=model)
        rows = equicam.evaluate(
            ready, source, methods=listed(methods) or [], scores=listed(scores) or [], n=n, split=split,
            views=views_named(views),
            fill=fill,  # type: ignore[arg-type]
            as_published=as_published, dtype=dtype_named(dtype), seed=seed, out=out, engine=chosen,
            progress=console.is_terminal,
        )  # fmt: skip
    except (EquicamError, OSError) as error:
        console.print(f"[red]{escape(as_typed(error))}[/red]", soft_wrap=True)
        raise typer.Exit(2) from error
    except KeyboardInterrupt:
        kept = f"; finished parts are in {out}.parts, and the same command goes on" if out else ""
        console.print(f"stopped{escape(plain(kept))}", soft_wrap=True)
        raise typer.Exit(130) from None
    for part in printed(rows, details=details):
        console.print(part)
    if out:
        console.print(f"{rows.num_rows:,} rows are in {escape(plain(out))}", soft_wrap=True)


@app.command()
def finetune(
    data: Annotated[str, typer.Argument(help="a labelled source with splits", show_default=False)],
    out: Annotated[
        Path, typer.Option(help="where weights, model card and checkpoint go; resumes what is there")
    ],
    arch: Annotated[str, typer.Option(help="a name `equicam models` lists, or file.py:factory")] = "resnet50",
    weights: Annotated[
        str | None, typer.Option(help="a weights file to start from; published ones if left out")
    ] = None,
    train: Annotated[str | None, typer.Option(help="the split to learn from")] = "train",
    test: Annotated[str | None, typer.Option(help="the split to measure on")] = "test",
    epochs: Annotated[int, typer.Option(min=1, help="at most so many")] = 10,
    batch: Annotated[int, typer.Option(min=1, help="pictures a step")] = 32,
    rate: Annotated[float, typer.Option(help="the highest learning rate")] = 1e-4,
    patience: Annotated[int, typer.Option(min=1, help="epochs without gain before it stops")] = 3,
    seed: Annotated[int, typer.Option(help="of head, order and crops")] = 0,
    rotation_augment: Annotated[bool, typer.Option(help="turn training pictures by any angle")] = False,
    workers: Annotated[int, typer.Option(min=0, help="processes that open pictures")] = 2,
    device: Annotated[
        str | None, typer.Option(help="cpu, cuda, cuda:1; the best there is if left out")
    ] = None,
) -> None:
    """Fine-tune a classifier on your domain: weights that `--weights` takes, and a model card beside them.

    For example: `equicam finetune tiles/ --arch resnet50 --rotation-augment --out models/turned`
    """
    from equicam.finetune import finetune as tuned

    with refused():
        path, found = tuned(
            data, arch, out, weights=weights, train=train, test=test, epochs=epochs, batch=batch, rate=rate,
            patience=patience, seed=seed, rotation_augment=rotation_augment, workers=workers, device=where(device),
            progress=lambda line: console.print(line, highlight=False),
        )  # fmt: skip
    console.print(
        f"accuracy {found.accuracy:.3f}, balanced {found.balanced:.3f} on {found.pictures} test pictures"
    )
    console.print(f"weights and card: {escape(plain(path))}", soft_wrap=True, highlight=False)


@app.command()
def scores() -> None:
    """The scores there are, by the names `evaluate` takes, and the controls a method may be given."""
    from equicam.evaluation.controls import CONTROLS
    from equicam.evaluation.metrics import SCORES

    table = Table("score", "of methods with", "what it says", box=None)
    for name, score in SCORES.items():
        table.add_row(name, score.of, score.about)
    console.print(table)
    controls = Table("control", "what it is", box=None)
    controls.add_row(
        "coverage", "a map that never looks at the picture: what 18 zero-filled views have covered"
    )
    for name, about in CONTROLS.items():
        controls.add_row(f"METHOD@{name}", about)
    console.print(controls)


@app.command()
def doctor() -> None:
    """Whether this machine is ready: versions, devices, caches, extras, and what to type for what is missing."""
    from equicam.doctor import findings

    table = Table("what", "found", "to do", box=None)
    for finding in findings():
        table.add_row(
            escape(finding.what),
            escape(finding.found),
            escape(finding.fix),
            style=None if finding.well else "yellow",
        )
    console.print(table)


def _explained(
    model: "Model", x: "Tensor", found: "Explanation", i: int, facts: dict[str, Any]
) -> "Explained":
    """One image of an explanation as arrays and plain values."""
    import equicam
    from equicam.models.images import as_pictures
    from equicam.report.explanation_files import Explained, View

    taken = found.taken[i].nonzero().flatten()
    angles = [found.angles[t] for t in taken.tolist()]
    turned = as_pictures(model, equicam.Views(tuple(angles)).act(x[i : i + 1].float())[:, 0])
    probs, flips, kept = (getattr(found, f)[i, taken].tolist() for f in ("prob", "flips", "kept"))
    planes = found.planes[i, taken].cpu().numpy()
    views = tuple(
        View(angle, turned[t], planes[t], probs[t], flips[t], kept[t]) for t, angle in enumerate(angles)
    )
    target, sure = int(found.target[i]), float(found.sure[i])
    name = model.classes[target] if model.classes else str(target)
    facts |= {
        "model": model.name,
        "layer": model.layer,
        "target": target,
        "class": name,
        "probability": sure,
        "views": len(angles),
        "angles": angles,
        "probability_per_view": probs,
        "flips": flips,
        "kept": kept,
        "peum": float(found.score[i]),
        "flags": sorted(found.flags[i]),
        "equicam": equicam.__version__,
    }
    picture = as_pictures(model, x[i : i + 1])[0]
    title = f"{name} (p = {sure:.2f}), PEUM {float(found.score[i]):.4f}"
    return Explained(picture, found.map[i].cpu().numpy(), found.peum[i].cpu().numpy(), views, title, facts)


def _row(path: Path, facts: dict[str, Any], stem: str) -> tuple[str, ...]:
    flips = f"{sum(facts['flips'])} of {len(facts['flips'])}"
    flags = ", ".join(facts["flags"]) or "none"
    return (
        plain(path.name), facts["class"], f"{facts['probability']:.2f}", f"{facts['peum']:.4f}", flips, flags, f"{stem}.*",
    )  # fmt: skip
