"""CUB-200-2011: rotation augmentation against alignment."""

from collections.abc import Iterator

from equicam.paper.context import Bench, Experiment, Line, claims, line, number
from equicam.paper.measure import NO_LABEL, rest
from equicam.paper.rotation_augmentation import WEIGHTS, found, trained, training


def run(bench: Bench) -> Iterator[Line]:
    """As in the domains; EquiGrad-CAM on either model is one number in the paper."""
    done = []
    if all(name in bench.extra for name in WEIGHTS.values()):
        said = found(trained(bench))
        for words, (ours, theirs) in said.items():
            if f"rotaug.CUB.{words}" in claims():
                claim = f"rotaug.CUB.{words}"
                done.append(
                    line(claim, clean=ours, as_published=theirs, what=words, reason="" if ours else NO_LABEL)
                )
        either = [said[f"EG Eq {words}"] for words in WEIGHTS]
        values = [[e.value for pair in either if (e := pair[side])] for side in (0, 1)]
        done.append(
            line(
                "rotaug.CUB.EG Eq either model",
                clean=number(min(values[0])),
                as_published=number(min(values[1])),
                what="EG Eq, the lower of both models",
                reason=f"by our protocol {values[0][0]:.3f} plain, {values[0][1]:.3f} turned",
            )
        )
    yield from done
    yield from rest(EXPERIMENT.answers, done, lambda known: training(known, "cub-rotation"))


EXPERIMENT = Experiment(
    "CUB-200-2011: rotation augmentation against alignment",
    ("rotaug.CUB",),
    run,
    needs="CUB-200-2011 and two fine-tuned files of weights",
)
