"""`equicam evidence`."""

import shlex
from collections import Counter
from typing import Annotated

import typer

from equicam.cli import options
from equicam.cli.shared import count_progress
from equicam.console import FAILED, answer, exit_on_error, note, plural, say

IN_WORDS = {
    "leans to signal": ["signal"],
    "leans to noise": ["noise"],
    "undecided": ["undecided"],
    "cannot be judged": ["no-effect", "constant"],
}
"""Leanings in the words of the report, with their codes."""


def evidence(
    run: options.RunFolder,
    top: Annotated[int, typer.Option(min=1, help="Images at the head of the queue to test.")] = 40,
    model: options.TrustedModel = None,
    source: options.MovedSource = None,
    weights: options.MovedWeights = None,
    device: options.Device = None,
) -> None:
    """Signal or noise: does the model use the pixels where a map moves? A causal test of the head of the queue.

    Writes `evidence.json` as it goes; the same command continues after an interruption. The report and, after the
    verdict, the review page show it.

    Example: `equicam evidence run --top 40`
    """
    interrupted = "; finished images are kept, and the same command resumes"
    with exit_on_error(interrupted=interrupted):
        import equicam

        opened = equicam.open_run(run)
        head = opened.queue()[:top]
        with count_progress("signal or noise", len(head)) as tick:
            found = opened.evidence(
                top, model=model, source=source, weights=weights, device=device, tick=tick
            )
    leanings = Counter(str(one.get("leaning")) for one in found.values())
    without = [row["id"] for row in head if row["id"] not in found]
    images = [
        {"id": name, "leaning": one.get("leaning"), "verdict": one["verdict"]} for name, one in found.items()
    ]
    answer("evidence", {"run": str(run), "leanings": dict(leanings), "images": images, "without": without})
    counts = {
        words: sum(leanings[code] for code in codes)
        for words, codes in IN_WORDS.items()
        if leanings.keys() & {*codes}
    }
    each = "; ".join(f"{words}: {count:,}" for words, count in counts.items())
    say(f"evidence on {len(found):,} of {plural(len(head), 'image')}{f': {each}' if each else ''}")
    random = opened.random_weights
    if random is not None and random.as_steady and opened.manifest.weights_from != "random":
        note(
            f"on a sample of {plural(random.images, 'image')}, with random weights {random.random_steady} of {random.random_maps} maps are steady, with the trained ones {random.steady} of {random.images}: "
            "on this run a steady map does not show that the network has learnt anything",
            style="yellow",
        )
    if len(head) < top:
        note(f"the queue has {plural(len(head), 'image')}, fewer than --top {top}")
    if without:
        note(f"no evidence on {plural(len(without), 'image')} that changed since the audit or cannot be read")
    if not found:
        raise typer.Exit(FAILED)
    note(f"next: equicam report {shlex.quote(str(run))}")
