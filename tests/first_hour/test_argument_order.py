"""Metrics take scores or logits first and the truth second, and recognise arguments that were swapped."""

import inspect
from collections.abc import Callable

import numpy as np
import pytest
import torch

from dubito import metrics
from dubito.errors import TableError

PREDICTED = {"scores", "logits", "confidence"}
TRUTH = {"labels", "positives", "errors", "correct"}
FUNCTIONS = [getattr(metrics, name) for name in metrics.__all__ if inspect.isfunction(getattr(metrics, name))]


def positional(function: Callable[..., object]) -> list[str]:
    kinds = inspect.signature(function).parameters.items()
    return [name for name, one in kinds if one.kind is one.POSITIONAL_OR_KEYWORD]


PAIRED = [one for one in FUNCTIONS if PREDICTED & {*positional(one)} and TRUTH & {*positional(one)}]


def test_what_is_predicted_comes_before_the_truth() -> None:
    assert {"auroc", "aurc", "ece", "accuracy", "r_auroc"} <= {one.__name__ for one in PAIRED}
    for function in PAIRED:
        names = [name for name in positional(function) if name != "metric"]
        assert names[0] in PREDICTED, function.__name__
        assert max(names.index(one) for one in PREDICTED & {*names}) < min(names.index(one) for one in TRUTH & {*names})


@pytest.mark.parametrize(
    "metric", [metrics.auroc, metrics.average_precision, metrics.fpr_at_tpr, metrics.aurc, metrics.augrc, metrics.ece]
)
def test_swapped_arguments_are_recognised(metric) -> None:
    scores, truth = [0.1, 0.4, 0.35, 0.8], [0, 1, 0, 1]
    metric(scores, truth)
    for first in (truth, torch.tensor(truth), np.array(truth, dtype=bool)):
        with pytest.raises(TableError, match=rf"{metric.__name__} takes .* first and .* second; these look swapped"):
            metric(first, scores)


@pytest.mark.parametrize("metric", [metrics.accuracy, metrics.nll, metrics.brier])
def test_labels_before_logits_are_recognised(metric) -> None:
    with pytest.raises(TableError, match="takes logits first and labels second; these look swapped"):
        metric([0, 1], [[2.0, 0.0], [0.0, 1.0]])


def test_features_before_scores_are_recognised() -> None:
    with pytest.raises(TableError, match="r_auroc takes scores first, then features and labels; these look swapped"):
        metrics.r_auroc([[1.0], [2.0]], [0, 1], [0.3, 0.7])
