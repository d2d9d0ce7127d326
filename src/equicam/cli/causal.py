"""`equicam causal`."""

import shlex
from typing import TYPE_CHECKING, Annotated

import typer

from equicam.cli import options
from equicam.cli.shared import count_progress
from equicam.console import answer, exit_on_error, note, output, plural, say
from equicam.runs import CAUSAL_IMAGES

if TYPE_CHECKING:
    from equicam.evaluate.statistics import Estimate
    from equicam.runs.causal_result import CausalTest

LINES = {
    "drift": "lost by blurring what drifts",
    "elsewhere": "lost by blurring as much elsewhere",
    "agreement": "lost by blurring what stays",
    "effect": "what drifts − as much elsewhere",
}
"""The numbers of --verbose, by their names in the result."""


def causal(
    run: options.RunFolder,
    n: Annotated[
        int, typer.Option("--n", min=CAUSAL_IMAGES, help="Random images to test; all if the run has fewer.")
    ] = CAUSAL_IMAGES,
    seed: options.Seed = 0,
    model: options.TrustedModel = None,
    source: options.MovedSource = None,
    weights: options.MovedWeights = None,
    device: options.Device = None,
) -> None:
    """Signal or noise: does the network use the pixels where a map drifts? A causal test on random images of a run.

    It answers in one sentence, next to the same test with random weights; --verbose prints the numbers. `causal.json` in
    the run keeps the result, and the report shows it.

    Example: `equicam causal run`
    """
    with exit_on_error():
        import equicam

        opened = equicam.open_run(run)
        with count_progress("signal or noise", min(n, opened.manifest.images)) as tick:
            found = opened.causal(
                n, seed=seed, model=model, source=source, weights=weights, device=device, tick=tick
            )
    answer("causal", {"run": str(run), "sentence": found.sentence} | found.to_json())
    say(found.sentence)
    if output.verbose:
        _print_numbers(found)
    if found.left_out:
        note(f"{plural(found.left_out, 'image')} left out: changed since the audit, or unreadable")
    note(f"next: equicam report {shlex.quote(str(run))}")


def _print_numbers(found: "CausalTest") -> None:
    """Print what both networks lose of the probability, a line for each number."""
    wide = max(map(len, LINES.values()))
    say(f"{'probability':<{wide}}  {'trained weights':<23}  random weights")
    for name, words in LINES.items():
        trained, random = (_interval(getattr(one, name)) for one in (found.trained, found.random))
        say(f"{words:<{wide}}  {trained:<23}  {random}")
    say(f"{'blank maps, counted 0':<{wide}}  {found.trained.blank:<23,}  {found.random.blank:,}")
    groups = found.trained.effect.groups
    say(
        f"{len(found.images):,} of {plural(found.explained, 'explained image')}"
        + (f" from {plural(groups, 'group')}" if groups else "")
        + f", seed {found.recipe['seed']}"
    )


def _interval(one: "Estimate") -> str:
    return f"{one.value:.3f} [{one.low:.3f}, {one.high:.3f}]"
