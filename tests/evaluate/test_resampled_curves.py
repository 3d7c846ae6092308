"""Figures of resamples: counted at once, they are those of the metrics called on the drawn rows."""

import math

import numpy as np
import pytest

from dubito.evaluate._resampled_curves import FIGURES, Ranked, figures_of
from dubito.metrics import acceptance_curve, aurc, auroc, bucket_curve
from dubito.metrics.bootstrap import draw_counts

LEVELS = np.arange(1, 6) / 5


def order(n: int, seed: int, ties: bool = False) -> Ranked:
    rng = np.random.default_rng(seed)
    u = rng.integers(4, size=n).astype(float) if ties else rng.normal(size=n)
    right = (rng.random(n) < 0.6).astype(float)
    return Ranked(u, right, rng.exponential(size=n), rng.random(n) - right)


def expected(one: Ranked, rows: np.ndarray, by_uncertainty: bool) -> dict[str, float]:
    """By the public metrics and numpy's covariance, on repeated rows."""
    u, right, nll, gap = (column[rows] for column in one)
    x = bucket_curve(u, u, LEVELS.tolist()).numpy() if by_uncertainty else LEVELS
    found = {"auroc": auroc(u, right == 0), "aurc": aurc(u, right == 0)}
    for kind, curve in (("bucket", bucket_curve), ("acceptance", acceptance_curve)):
        for name, values in (("accuracy", right), ("nll", nll), ("calibration_error", gap)):
            y = curve(u, values, LEVELS.tolist()).numpy()
            y = abs(y) if name == "calibration_error" else y
            found[f"neg_{kind}_covariance_{name}"] = -np.cov(x, y, bias=True)[0, 1]
    return found


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("by_uncertainty", [False, True])
def test_counted_is_called(ties: bool, by_uncertainty: bool) -> None:
    one = order(37, 0, ties)
    drawn = np.concatenate([np.ones((1, 37), dtype=np.int64), *draw_counts(37, 4, seed=3)])
    found = figures_of(one, drawn, LEVELS, against_uncertainty=by_uncertainty)
    assert found.shape == (5, len(FIGURES))
    for line, count in zip(found, drawn, strict=True):
        rows = np.repeat(np.arange(37), count)
        assert dict(zip(FIGURES, line.tolist(), strict=True)) == pytest.approx(expected(one, rows, by_uncertainty))


def test_a_covariance_by_hand() -> None:
    # Two levels, 1/2 and 1; accepted accuracies 1 and 1/2, buckets 1 and 0. -cov = -(1/4)((-1)(1) + (1)(y)) / 2.
    one = Ranked(np.array([1.0, 2.0]), np.array([1.0, 0.0]), np.array([0.0, 2.0]), np.array([-0.5, 0.5]))
    found = figures_of(one, np.ones((1, 2), dtype=np.int64), np.array([0.5, 1.0]))
    told = dict(zip(FIGURES, found[0].tolist(), strict=True))
    assert told["neg_acceptance_covariance_accuracy"] == pytest.approx(0.25 * (1 - 0.5) / 2)
    assert told["neg_bucket_covariance_accuracy"] == pytest.approx(0.25 * (1 - 0) / 2)
    assert told["neg_bucket_covariance_nll"] == pytest.approx(0.25 * (0 - 2) / 2)
    # |gap| is 1/2 in both buckets, and 0 over both.
    assert told["neg_bucket_covariance_calibration_error"] == pytest.approx(0)
    assert told["neg_acceptance_covariance_calibration_error"] == pytest.approx(0.25 * (0.5 - 0) / 2)


def test_undefined_is_nan() -> None:
    one = order(8, 1)._replace(correct=np.ones(8))
    found = figures_of(one, np.ones((1, 8), dtype=np.int64), LEVELS)[0]
    assert math.isnan(found[FIGURES.index("auroc")])
    assert found[FIGURES.index("aurc")] == 0


def test_draws_are_seeded_and_of_n_rows() -> None:
    first, again = (np.concatenate(list(draw_counts(2**20, 3, seed=5))) for _ in range(2))
    assert np.array_equal(first, again)
    assert first.shape == (3, 2**20)
    assert (first.sum(1) == 2**20).all()
    assert not np.array_equal(first[0], first[1])
