"""Balanced draws and paired resamples."""

import numpy as np

from dubito.explain._balanced import balanced


def test_resamples_are_paired():
    rng = np.random.default_rng(0)
    known, foreign = rng.normal(size=(1, 80)), rng.normal(1, size=(1, 50))
    twice = balanced(np.repeat(known, 2, 0), np.repeat(foreign, 2, 0), draws=3, resamples=30, seed=0)
    assert (twice.resampled[:, 0] == twice.resampled[:, 1]).all()
    assert len(set(twice.resampled[:, 0].tolist())) > 10
    assert (twice.drawn[:, 0] == twice.drawn[:, 1]).all()


def test_known_rows_are_drawn_alike_for_every_foreign_table():
    rng = np.random.default_rng(0)
    known, same = rng.normal(size=(1, 80)), np.zeros((1, 50))  # all foreign rows alike: only known ones matter
    first, second = (balanced(known, same, draws=3, resamples=30, seed=0, number=number) for number in (0, 1))
    assert (first.resampled == second.resampled).all()
    foreign = rng.normal(size=(1, 50))
    first, second = (balanced(known, foreign, draws=3, resamples=30, seed=0, number=number) for number in (0, 1))
    assert (first.resampled != second.resampled).any()


def test_resampled_values_count_ties():
    known, foreign = np.array([[0.0, 0.0, 1.0]]), np.array([[1.0, 0.0]])
    values = set(balanced(known, foreign, draws=1, resamples=200, seed=0).resampled[:, 0].round(4).tolist())
    # Two of either side: every pair is won, tied or lost, so the AUROC is a multiple of one eighth.
    assert values <= {0.0, 0.25, 0.5, 0.75, 1.0}
    assert len(values) == 5
