"""ViT-L/16: does the gain hold at scale?"""

from collections.abc import Iterator

from equicam.paper.context import Bench, Experiment, Line, others
from equicam.paper.measure import both, eq_line, gain_line


def run(bench: Bench) -> Iterator[Line]:
    """Grad-CAM, EquiGrad-CAM and the relative gain."""
    done = []
    if bench.backbone == "vit_l_16":
        tables = both(bench, ["grad-cam", "equigrad-cam"])
        done = [eq_line("vitl.gc", tables, "grad-cam"), eq_line("vitl.eg", tables, "equigrad-cam")]
        done.append(gain_line("vitl.gain", tables))
    yield from done
    yield from others("vitl.", done, bench)


EXPERIMENT = Experiment(
    "ViT-L/16: the gain at scale", ("vitl.",), run, needs="--model vit_l_16 and ImageNet pictures"
)
