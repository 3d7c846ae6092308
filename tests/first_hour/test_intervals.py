"""The interval of an accuracy near 1 holds the truth as often as stated."""

import numpy as np
import torch

import dubito


def test_the_accuracy_of_thirty_right_predictions_is_not_certain() -> None:
    logit = 4 * torch.eye(3).repeat(10, 1) + torch.rand(30, 3, generator=torch.Generator().manual_seed(0))
    table = dubito.Table(logit=logit, label=torch.arange(30) % 3)
    accuracy = dubito.evaluate("entropy", table, resamples=20).model["accuracy"]
    assert accuracy.value == 1.0
    assert (round(accuracy.low, 4), accuracy.high) == (0.8843, 1.0)  # p^30 = 0.025


def test_intervals_of_an_accuracy_near_one_cover_it() -> None:
    truth, rng = 0.97, np.random.default_rng(0)
    samples = [rng.random(30) < truth for _ in range(400)]
    logits = [np.stack([right, ~right], axis=1).astype(float) for right in samples]
    intervals = [dubito.metrics.interval(dubito.metrics.accuracy, one, np.zeros(30, int)) for one in logits]
    assert np.mean([low <= truth <= high for _, low, high, _ in intervals]) >= 0.95
