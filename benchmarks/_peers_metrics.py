"""Rows of metrics: scikit-learn's, torchmetrics' and torch-uncertainty's."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from _peers_data import Columns
from _peers_row import Contender, Row, Side, nothing

from dubito import metrics
from dubito.scores import make_score


def figure(function: Callable[..., float], *names: str) -> Side:
    """One number from columns."""

    def contender(columns: Columns) -> Contender:
        values = [columns[name] for name in names]
        return nothing, lambda: {"value": float(function(*values))}

    return contender


def sklearn_metric(name: str) -> Side:
    """One of scikit-learn's, of scores and positives."""

    def contender(columns: Columns) -> Contender:
        from sklearn import metrics as theirs  # noqa: PLC0415

        u, positive = columns["million_score"].numpy(), columns["million_positive"].numpy()
        return nothing, lambda: {"value": float(getattr(theirs, name)(positive, u))}

    return contender


def torchmetrics_metric(name: str) -> Side:
    """One of torchmetrics', of scores and positives."""

    def contender(columns: Columns) -> Contender:
        from torchmetrics.functional import classification as theirs  # noqa: PLC0415

        u, positive = columns["million_score"], columns["million_positive"].int()
        return nothing, lambda: {"value": float(getattr(theirs, name)(u, positive))}

    return contender


def torchmetrics_ece(columns: Columns) -> Contender:
    """Of probabilities, which are made from logits first."""
    from torchmetrics.functional.classification import multiclass_calibration_error  # noqa: PLC0415

    logit, label = columns["logit"], columns["label"]

    def measured() -> dict[str, float]:
        p = logit.softmax(1)
        return {"value": float(multiclass_calibration_error(p, label, num_classes=p.shape[1], n_bins=15))}

    return nothing, measured


def uncertainty_metric(name: str, *names: str, softmax: bool = False, **settings: Any) -> Side:
    """One of torch-uncertainty's, fed once."""

    def contender(columns: Columns) -> Contender:
        from torch_uncertainty.metrics import classification as theirs  # noqa: PLC0415

        values = [columns[one] for one in names]
        options = {key: (values[0].shape[1] if value == "classes" else value) for key, value in settings.items()}

        def measured() -> dict[str, float]:
            one = getattr(theirs, name)(**options)
            first = values[0].softmax(1) if softmax else values[0]
            one.update(first, *(value.int() if value.dtype == torch.bool else value for value in values[1:]))
            return {"value": float(one.compute())}

        return nothing, measured

    return contender


def members(columns: Columns, *, members_first: bool) -> torch.Tensor:
    """Probabilities of ten members, which are the logits with noise, for at most 5,000 images."""
    logit, draw = columns["logit"][:5000], torch.Generator().manual_seed(0)
    noise = torch.randn((10, *logit.shape), generator=draw)
    p = (logit + noise).softmax(2)
    return p if members_first else p.transpose(0, 1).contiguous()


def our_information(columns: Columns) -> Contender:
    """The epistemic part, which ours computes together with the other two."""
    p = members(columns, members_first=True)

    def measured() -> np.ndarray:
        return metrics.decompose(p).epistemic.numpy()

    return nothing, measured


def their_information(columns: Columns) -> Contender:
    """The peer's mutual information."""
    from torch_uncertainty.metrics.classification import MutualInformation  # noqa: PLC0415

    p = members(columns, members_first=False)

    def measured() -> Any:
        one = MutualInformation(reduction="none")
        one.update(p)
        return one.compute().numpy()

    return nothing, measured


def curve(function: Callable[..., float]) -> Side:
    """An area of ours, of logits and labels."""

    def contender(columns: Columns) -> Contender:
        table, logit, label = columns.test("logit"), columns["logit"], columns["label"]
        most = make_score("max_probability")
        return nothing, lambda: {"value": function(most.score(table), ~metrics.correct(logit, label))}

    return contender


def ece_by(function: Callable[..., float]) -> Callable[..., float]:
    """A calibration error of ours, from logits."""
    return lambda logit, label: function(metrics.confidence(logit), metrics.correct(logit, label))


_TU = "torch-uncertainty"
_MILLION, _BOTH = ("million_score", "million_positive"), ("logit", "label")
_PER_CLASS = {"num_classes": "classes"}
METRICS = tuple(
    replace(row, kind="Metrics")
    for row in (
        Row("AUROC", "scikit-learn", figure(metrics.auroc, *_MILLION), sklearn_metric("roc_auc_score")),
        Row("AUROC", "torchmetrics", figure(metrics.auroc, *_MILLION), torchmetrics_metric("binary_auroc")),
        Row(
            "average precision",
            "scikit-learn",
            figure(metrics.average_precision, *_MILLION),
            sklearn_metric("average_precision_score"),
        ),
        Row(
            "average precision",
            "torchmetrics",
            figure(metrics.average_precision, *_MILLION),
            torchmetrics_metric("binary_average_precision"),
        ),
        Row(
            "FPR at 95 % TPR",
            _TU,
            figure(metrics.fpr_at_tpr, *_MILLION),
            uncertainty_metric("FPR95", *_MILLION, pos_label=1),
            why="the peer takes the threshold whose TPR is nearest to 95 %, ours the first that reaches it",
        ),
        Row(
            "AURC",
            _TU,
            curve(metrics.aurc),
            uncertainty_metric("AURC", *_BOTH, softmax=True),
            why="the peer integrates by trapezoids, and leaves tied rows in the order that they happen to have",
        ),
        Row(
            "AUGRC",
            _TU,
            curve(metrics.augrc),
            uncertainty_metric("AUGRC", *_BOTH, softmax=True),
            why="the peer starts its trapezoids at the first row, and leaves tied rows in the order that they have",
        ),
        Row("mutual information of ten members", _TU, our_information, their_information, share=0.1),
        Row(
            "ECE",
            "torchmetrics",
            figure(ece_by(metrics.ece), *_BOTH),
            torchmetrics_ece,
            why="the peer adds up one row after the other in float32",
        ),
        Row(
            "adaptive ECE",
            _TU,
            figure(ece_by(metrics.adaptive_ece), *_BOTH),
            uncertainty_metric(
                "AdaptiveCalibrationError", *_BOTH, softmax=True, task="multiclass", num_bins=15, **_PER_CLASS
            ),
            why="the peer leaves tied rows in the order that they happen to have",
        ),
        Row(
            "class-wise ECE",
            _TU,
            figure(metrics.class_wise_ece, *_BOTH),
            uncertainty_metric("ClasswiseCalibrationError", *_BOTH, softmax=True, **_PER_CLASS),
        ),
        Row(
            "smooth ECE",
            _TU,
            figure(ece_by(metrics.smooth_ece), *_BOTH),
            uncertainty_metric("SmoothCalibrationError", *_BOTH, softmax=True, kernel_type="reflected"),
            why="the peer smooths on another grid, and divides by a density with 0.0001 added",
        ),
        Row(
            "Brier",
            _TU,
            figure(metrics.brier, *_BOTH),
            uncertainty_metric("BrierScore", *_BOTH, softmax=True, **_PER_CLASS),
        ),
        Row("NLL", _TU, figure(metrics.nll, *_BOTH), uncertainty_metric("CategoricalNLL", *_BOTH, softmax=True)),
    )
)
"""On a million scores, or on logits."""
