"""Panels of single images or pairs, which an experiment's rows do not have: read from its kept evaluation."""

import numpy as np

from equicam.evaluate import statistics, summary
from equicam.evaluate.rows import pick_prediction
from equicam_paper.context import Context
from equicam_paper.plots import Scatter

DRIFT = "drift of the single-view map,\n1 − Eq"
SIGNALS = ("eq", "peum", "disagreement", "stability")


def scatters(experiment: str, context: Context) -> list[Scatter]:
    """The correlations of an experiment, image by image."""
    if experiment in ("peum-audit", "triage"):
        return _signals(context)
    return _confidence(context) if experiment == "drift-confidence" else []


def _signals(context: Context) -> list[Scatter]:
    """PEUM and 1 − stability against 1 − Eq of Grad-CAM, in the disc."""
    table = context.evaluate(["grad-cam", "equigrad-cam"], SIGNALS).table
    eq = summary.pick(table, "eq", "grad-cam", "disc")
    peum = summary.pick(table, "peum", "equigrad-cam", "full").by_id(eq.ids)
    moved = 1 - summary.pick(table, "stability", "equigrad-cam", "disc").by_id(eq.ids)
    return [
        Scatter(title, label, DRIFT, x, 1 - eq.value, statistics.pearson(x, 1 - eq.value, group=eq.group))
        for title, label, x in (
            ("PEUM", "PEUM, variance of the aligned maps", peum),
            ("stability", "1 − stability, over 18 views", moved),
        )
    ]


def _confidence(context: Context) -> list[Scatter]:
    """Pairs that keep their top-1: drift against the probability lost, and against the authors' quantity; no p, pairs are dependent."""
    table = context.evaluate(["grad-cam"]).table
    eq = summary.pick(table, "eq", "grad-cam", "disc", each_angle=True)
    rotated, keeps = (
        pick_prediction(table, name, "grad-cam", each_angle=True).at_pairs_of(eq)
        for name in ("confidence", "consistent")
    )
    presented = pick_prediction(table, "presented-confidence", "grad-cam").by_id(eq.ids)
    lost, _, theirs = summary.drift_and_confidence(table, "grad-cam")
    kept = keeps == 1
    drift = np.asarray(1 - eq.value[kept])
    return [
        Scatter(
            "with the probability lost",
            "probability lost in the rotation",
            DRIFT,
            (presented - rotated)[kept],
            drift,
            lost,
        ),
        Scatter(
            "as the authors compute it",
            "1 − probability of the rotated image",
            DRIFT,
            1 - rotated[kept],
            drift,
            theirs,
        ),
    ]
