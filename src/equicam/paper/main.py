"""Table main: equivariance of every method."""

from collections.abc import Iterator

from equicam.paper.context import (
    COSTLY,
    NAMES,
    Bench,
    Experiment,
    Line,
    beside,
    claims,
    eq,
    not_run,
    number,
    others,
)

METHODS = {w: m for w, m in NAMES.items() if any(c.startswith(f"main.{w}.") for c in claims())}


def run(bench: Bench) -> Iterator[Line]:
    """Eq of each method by both protocols, and the relative gain of EquiGrad-CAM."""
    ours = {f"main.{words}.{bench.backbone}.eq": method for words, method in METHODS.items()}
    methods = bench.affordable([*ours.values(), "coverage"])
    published, clean = bench.rows(methods, as_published=True), bench.rows(methods)
    done = []
    for name, method in ours.items():
        if method in methods:
            both = eq(clean, method, as_published=False), eq(published, method, as_published=True)
            done.append(beside(name, clean=both[0], as_published=both[1], what=method))
        elif name in claims():
            done.append(not_run(name, f"{COSTLY[method]:,} forward passes a map: --costly, with --n"))
    yield from done
    gain = f"gain.{bench.backbone}"
    found = [
        100 * (eq(t, "equigrad-cam", as_published=a).value / eq(t, "grad-cam", as_published=a).value - 1)
        for t, a in ((clean, False), (published, True))
    ]
    rise = beside(
        gain, clean=number(found[0]), as_published=number(found[1]), what="relative gain, %", tolerance=5
    )
    yield rise
    cover = eq(published, "coverage", as_published=True)
    yield Line(
        "",
        "coverage: a map that never looks at the picture",
        "not in the paper",
        eq(clean, "coverage", as_published=False),
        cover,
        "measured",
        "what the zero-filled full square rewards",
    )
    yield from others("main.", done, bench)
    yield from others("gain.", [rise], bench)


EXPERIMENT = Experiment("Table main: equivariance of every method", ("main.", "gain."), run)
