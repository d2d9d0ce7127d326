"""Statistics over images: the only place that averages them, computes intervals and tests differences.

A column is a 1-D array; NaN is "undefined", and a row with a NaN in any column is left out of that statistic. Intervals
are percentile bootstraps that resample whole images, because the angles of one image are not independent, and whole
groups where images belong to groups, because images of one patient or scene are not independent either.
"""

from equicam.evaluate.statistics.columns import NAN, Column, Floats, Ids, Indices
from equicam.evaluate.statistics.comparisons import Comparison, bonferroni, compare, holm
from equicam.evaluate.statistics.correlations import (
    Correlation,
    paired_difference,
    pearson,
    pearson_r,
    spearman,
    spearman_r,
)
from equicam.evaluate.statistics.detection import (
    HeldOut,
    auroc,
    capture,
    capture_lift,
    held_out_lift,
    mean_ratio,
)
from equicam.evaluate.statistics.intervals import (
    MIN_GROUPS,
    Estimate,
    MeanOverPairs,
    Statistic,
    bootstrap,
    mean,
    means_by_bin,
    pooled_mean,
    skill,
    weighted_mean,
)
from equicam.evaluate.statistics.shares import difference, kappa, proportion, upper_bound

__all__ = [
    "MIN_GROUPS", "NAN", "Column", "Comparison", "Correlation", "Estimate", "Floats", "HeldOut", "Ids", "Indices", "MeanOverPairs", "Statistic", "auroc",
    "bonferroni", "bootstrap", "capture", "capture_lift", "compare", "difference", "held_out_lift", "holm", "kappa",
    "mean", "mean_ratio", "means_by_bin", "paired_difference", "pearson", "pearson_r", "pooled_mean", "proportion",
    "skill", "spearman", "spearman_r", "upper_bound", "weighted_mean",
]  # fmt: skip
