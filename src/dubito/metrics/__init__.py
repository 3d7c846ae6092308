"""Metrics of uncertainties and predictions: one definition each; ties, bins and thresholds are stated.

They take tensors, numpy arrays or lists and count in float64. Higher is more uncertain; NaN and infinity are errors.
"""

from dubito.metrics._arrays import Array
from dubito.metrics.bootstrap import (
    GapToBest,
    MedianSpread,
    RankedScore,
    balanced_auroc,
    gap_to_best,
    interval,
    mean,
    median_spread,
    paired_draws,
    paired_errors,
    rank_scores,
)
from dubito.metrics.calibration import bucket_calibration_error, ece
from dubito.metrics.classification import (
    accuracy,
    brier,
    brier_per_row,
    confidence,
    correct,
    labelled_logits,
    nll,
    nll_per_row,
    table_accuracy,
    wrong_predictions,
)
from dubito.metrics.information import (
    ChainRule,
    Decomposition,
    chain_rule,
    decompose,
    decompose_variance,
    member_weights,
    partitioned,
    sub_ensembles,
    variation_ratio,
)
from dubito.metrics.proportions import Interval, proportion, proportion_bound
from dubito.metrics.ranking import auroc, average_precision, fpr_at_tpr, join_ood, spearman
from dubito.metrics.rejection import (
    RiskCoverage,
    acceptance_curve,
    augrc,
    aurc,
    bucket_curve,
    excess_aurc,
    risk_coverage,
)
from dubito.metrics.retrieval import nearest, neighbour_matches, r_auroc, recall_at_1
from dubito.metrics.streaming import SUMMARY, MemberStream, VarianceStream

__all__ = [
    "SUMMARY",
    "Array",
    "ChainRule",
    "Decomposition",
    "GapToBest",
    "Interval",
    "MedianSpread",
    "MemberStream",
    "RankedScore",
    "RiskCoverage",
    "VarianceStream",
    "acceptance_curve",
    "accuracy",
    "augrc",
    "aurc",
    "auroc",
    "average_precision",
    "balanced_auroc",
    "brier",
    "brier_per_row",
    "bucket_calibration_error",
    "bucket_curve",
    "chain_rule",
    "confidence",
    "correct",
    "decompose",
    "decompose_variance",
    "ece",
    "excess_aurc",
    "fpr_at_tpr",
    "gap_to_best",
    "interval",
    "join_ood",
    "labelled_logits",
    "mean",
    "median_spread",
    "member_weights",
    "nearest",
    "neighbour_matches",
    "nll",
    "nll_per_row",
    "paired_draws",
    "paired_errors",
    "partitioned",
    "proportion",
    "proportion_bound",
    "r_auroc",
    "rank_scores",
    "recall_at_1",
    "risk_coverage",
    "spearman",
    "sub_ensembles",
    "table_accuracy",
    "variation_ratio",
    "wrong_predictions",
]
