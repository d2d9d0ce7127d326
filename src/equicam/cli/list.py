"""Commands that list names and check the machine: models, methods, scores, doctor."""

from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Annotated, Any

from rich.markup import escape
from rich.table import Table
from typer import Argument

from equicam.console import answer, console, note

MODELS = {
    "embedded": "the small synthetic model in the package",
    "resnet50": "torchvision, by its name",
    "timm:vit_small_patch16_224": "timm",
    "open_clip:ViT-B-16/openai": "open_clip, zero-shot over class names; needs equicam[clip]",
    "hf:google/vit-base-patch16-224": "Hugging Face classifiers, and CLIP over class names; needs equicam[hf]",
    "models.py:build": "your own function that returns a module or the result of equicam.wrap",
}


def models(search: Annotated[str, Argument(help="Text in a name.", show_default=False)] = "") -> None:
    """List where models come from, or the names that contain a text.

    Example: `equicam models vit_small`
    """
    if not search:
        _list("models", ("name", "source"), MODELS.items())
        note("`equicam models TEXT` lists the torchvision and timm names that contain TEXT.")
        return
    from equicam.models.load import list_names

    found = [name for name in list_names() if search.lower() in name.lower()]
    answer("models", {"models": [{"name": name, "source": None} for name in found]})
    if found:
        console.print("\n".join(found), highlight=False)
    else:
        note(f"no name contains {search!r}")


def methods() -> None:
    """List the explanation methods by the names `explain`, `evaluate` and `audit` take.

    Example: `equicam methods`
    """
    from equicam.methods import METHODS

    rows = [(name, len(method.fusion.views), method.about) for name, method in METHODS.items()]
    _list("methods", ("name", "views", "description"), rows)


def scores() -> None:
    """List the scores by the names `evaluate` takes, and the controls a method can be compared with.

    Example: `equicam scores`
    """
    from equicam.evaluate.controls import CONTROLS
    from equicam.evaluate.metrics import METRICS

    coverage = "a map that ignores the image: the area that 18 zero-filled views cover"
    controls = {"coverage": coverage} | {f"METHOD@{name}": about for name, about in CONTROLS.items()}
    listed = [{"name": name, "description": about} for name, about in controls.items()]
    rows = [(name, metric.applies_to, metric.about) for name, metric in METRICS.items()]
    _list("scores", ("name", "applies_to", "description"), rows, controls=listed)
    _print_table(("control", "description"), controls.items())


def doctor() -> None:
    """Check this machine: versions, devices, caches, extras, and the command that installs what is missing.

    Example: `equicam doctor`
    """
    from equicam.doctor import findings

    table = Table("checked", "found", "to do", box=None)
    found = list(findings())
    answer("doctor", {"findings": [asdict(finding) for finding in found]})
    for finding in found:
        row = map(escape, (finding.name, finding.found, finding.fix))
        table.add_row(*row, style="yellow" if finding.fix else None)
    console.print(table)


def _list(command: str, names: Sequence[str], rows: Iterable[Sequence[Any]], **more: Any) -> None:
    """Answer with rows under the command's name, and print them."""
    rows = list(rows)
    answer(command, {command: [dict(zip(names, row, strict=True)) for row in rows]} | more)
    heads = {"applies_to": "of methods with"} | (
        {} if command == "models" else {"name": command.removesuffix("s")}
    )
    _print_table([heads.get(name, name) for name in names], rows)


def _print_table(columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    table = Table(*columns, box=None)
    for row in rows:
        table.add_row(*(escape(str(cell)) for cell in row))
    console.print(table)
