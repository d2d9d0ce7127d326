"""ImageNet's boxes: does the map point at the object? The paper asks this of birds only."""

from collections.abc import Iterator

from equicam.data.sources import find_items
from equicam.errors import EquicamError
from equicam.paper.context import Bench, Experiment, Line
from equicam.paper.cub import measured


def run(bench: Bench) -> Iterator[Line]:
    """Pointing game and box overlap, beside what the middle pixel and the whole frame get."""
    if not any(item.boxes for item in find_items(bench.data, split=bench.split)):
        raise EquicamError(
            "localisation",
            needs="pictures with boxes",
            got=f"{bench.data}: none has any",
            fix="a column `boxes`, or annotations",
        )
    yield from measured(bench, "ImageNet boxes")


EXPERIMENT = Experiment(
    "Pointing and box overlap on ImageNet", (), run, needs="an ImageNet classifier, pictures with boxes"
)
