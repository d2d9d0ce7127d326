"""Table clip: a zero-shot model on aerial tiles."""

from collections.abc import Iterator

from equicam.models.zeroshot import ZeroShot
from equicam.paper.context import NAMES, Bench, Experiment, Line, line, mean_of
from equicam.paper.measure import NO_LABEL, accuracy, both, constant, defined, gain_line, region, rest

METHODS = ("Grad-CAM", "Grad-CAM++", "LayerCAM", "AugCAM unaligned", "EquiGrad-CAM+PCF", "EquiGrad-CAM")
SCORES = {"Eq": "eq", "Ins": "insertion", "Del": "deletion"}
NEEDS = "--domain RESISC45 --model open_clip:ViT-B-16/openai --classes 'airplane,airport,…' (all 45)"


def run(bench: Bench) -> Iterator[Line]:
    """Eq, insertion and deletion; accuracy; how often EquiGrad-CAM's map is constant, and Eq without those."""
    ready = bench.domain == "RESISC45" and isinstance(bench.model.module, ZeroShot)
    done = list(_measured(bench)) if ready else []
    yield from done
    yield from rest(EXPERIMENT.answers, done, lambda _: NEEDS)


def _measured(bench: Bench) -> Iterator[Line]:
    tables = both(bench, [NAMES[words] for words in METHODS], list(SCORES.values()))
    for words in METHODS:
        for short, score in SCORES.items():
            found = {
                p: mean_of(t, score, NAMES[words], region(p) if score == "eq" else None)
                for p, t in tables.items()
            }
            what = f"{NAMES[words]}, {score}"
            yield line(f"clip.{words}.{short}", clean=found[False], as_published=found[True], what=what)
    right = accuracy(tables[False])
    reason = "the prompts are not published: ours are a photo of each class" if right else NO_LABEL
    yield line("clip.acc", clean=right, what="accuracy", tolerance=0.05, reason=reason)
    yield gain_line("clip.gain", tables)
    for claim, share, what in (
        ("const.clip.eg", constant, "equigrad-cam: constant maps"),
        ("clip.eg.cond", defined, "equigrad-cam where its map is not constant"),
    ):
        ours, theirs = (share(tables[p], "equigrad-cam", region(p)) for p in (False, True))
        yield line(claim, clean=ours, as_published=theirs, what=what)


EXPERIMENT = Experiment(
    "Table clip: a zero-shot model on aerial tiles",
    ("clip.", "const.clip"),
    run,
    needs="a zero-shot CLIP and RESISC45",
)
