"""Mahalanobis on features of length one: by hand, against numpy, and what it does not depend on."""

import math

import numpy as np
import pytest
import torch

from dubito.errors import TableError, ValueRangeError
from dubito.scores import Mahalanobis, MahalanobisPP
from dubito.table import Table


def table(n: int = 200, d: int = 5, seed: int = 0) -> Table:
    """Three classes by direction, with lengths from 1 to about 10."""
    generator = torch.Generator().manual_seed(seed)
    label = torch.randint(3, (n,), generator=generator)
    direction = 3 * torch.eye(3, d)[label] + torch.randn(n, d, generator=generator)
    return Table(feature=direction * (1 + 3 * torch.rand(n, 1, generator=generator)), label=label)


def by_numpy(train: Table, rows: Table, *, power: float, relative: bool, regularisation: float) -> np.ndarray:
    lengths = np.linalg.norm(train.feature.double().numpy(), axis=1)
    s = np.exp(np.log(lengths).mean())

    def scaled(features: torch.Tensor) -> np.ndarray:
        z = features.double().numpy()
        return z * (s / np.linalg.norm(z, axis=1, keepdims=True)) ** power

    z, y, q = scaled(train.feature), train.label.numpy(), scaled(rows.feature)
    means = [z[y == c].mean(0) for c in np.unique(y)]
    residual = np.stack([row - means[c] for row, c in zip(z, y, strict=True)])
    within = np.linalg.inv(residual.T @ residual / len(z) + regularisation * np.eye(z.shape[1]))
    nearest = np.min([np.einsum("nd,de,ne->n", q - m, within, q - m) for m in means], axis=0)
    if not relative:
        return nearest
    overall = np.linalg.inv(np.cov(z.T, bias=True) + regularisation * np.eye(z.shape[1]))
    return nearest - np.einsum("nd,de,ne->n", q - z.mean(0), overall, q - z.mean(0))


def test_by_hand():
    # One class at 0 and 90 degrees, at lengths 1 and 4, so s = 2: rows (2, 0) and (0, 2), mean (1, 1), covariance
    # [[1, -1], [-1, 1]] + 1, whose inverse is [[2, 1], [1, 2]] / 3. A row at 180 degrees becomes (-2, 0), (-3, -1) from
    # the mean: (2 * 9 + 2 * 3 + 2 * 1) / 3 = 26 / 3.
    train = Table(feature=[[1.0, 0.0], [0.0, 4.0]], label=[0, 0])
    score = MahalanobisPP(regularisation=1.0).fit(train)
    assert score.length_ == pytest.approx(2.0)
    assert score.score(Table(feature=[[-7.0, 0.0]])).item() == pytest.approx(26 / 3)


@pytest.mark.parametrize("power", [0.0, 0.4, 1.0])
@pytest.mark.parametrize("relative", [False, True])
def test_against_numpy(power, relative):
    train, rows = table(), table(40, seed=1)
    score = MahalanobisPP(power, relative, 0.1).fit(train)
    expected = by_numpy(train, rows, power=power, relative=relative, regularisation=0.1)
    assert score.score(rows).numpy() == pytest.approx(expected, rel=1e-8)


@pytest.mark.parametrize("relative", [False, True])
def test_power_zero_is_the_classical_distance(relative):
    train, rows = table(), table(40, seed=1)
    classical = Mahalanobis(relative=relative).fit(train).score(rows)
    assert torch.allclose(MahalanobisPP(0.0, relative).fit(train).score(rows), classical, rtol=1e-12)


def test_at_power_one_lengths_do_not_count_and_units_only_in_the_regularisation():
    train, rows = table(), table(40, seed=1)
    u = MahalanobisPP().fit(train).score(rows)
    longer = Table(feature=rows.feature * torch.linspace(0.5, 20, 40)[:, None])
    assert torch.allclose(MahalanobisPP().fit(train).score(longer), u, rtol=1e-5)
    free = MahalanobisPP(regularisation=0.0)
    thousand = Table(feature=1000 * train.feature.double(), label=train.label)
    assert torch.allclose(free.fit(thousand).score(rows), free.fit(train).score(rows), rtol=1e-6)


def test_choose_takes_the_power_that_suits():
    # Classes by direction, with any length: lengths are noise.
    assert MahalanobisPP("choose").fit(table(2000)).power_ >= 0.75
    # Classes by length alone, on one side of the origin: without it nothing is left.
    generator = torch.Generator().manual_seed(0)
    label = torch.randint(2, (2000,), generator=generator)
    feature = (1 + 3 * label[:, None]) * torch.ones(1, 3) + 0.3 * torch.randn(2000, 3, generator=generator)
    assert MahalanobisPP("choose").fit(Table(feature=feature, label=label)).power_ < 1


def test_choose_does_not_depend_on_the_batches_and_is_the_same_again(monkeypatch):
    train, rows = table(), table(40, seed=1)
    first = MahalanobisPP("choose").fit(train)
    batches = Table.batches
    monkeypatch.setattr(Table, "batches", lambda self, *columns, **_: batches(self, *columns, size=7))
    second = MahalanobisPP("choose").fit(train)
    assert first.power_ == second.power_
    assert torch.allclose(first.score(rows), second.score(rows))


def test_a_class_whose_only_row_is_held_out():
    train = table(10)
    for place in range(10):
        label = train.label.clone()
        label[place] = 9
        assert math.isfinite(MahalanobisPP("choose").fit(Table(feature=train.feature, label=label)).power_)


def test_what_cannot_be():
    with pytest.raises(ValueRangeError, match=r"mahalanobis_pp: power must be .*; got 1\.5\. .*1 is the paper's"):
        MahalanobisPP(1.5)
    with pytest.raises(TableError, match=r"mahalanobis_pp\.fit: table needs at least 5 images.* has 4"):
        MahalanobisPP("choose").fit(table(4))
    zero = table()
    zero.feature[3] = 0
    with pytest.raises(ValueRangeError, match=r"mahalanobis_pp\.fit: features must be finite and not all zero; row 3"):
        MahalanobisPP().fit(zero)
