"""The Mahalanobis distance: by hand, against numpy, and what it does not depend on."""

import numpy as np
import pytest
import torch

from dubito.errors import NotFittedError, TableError, ValueRangeError
from dubito.scores import Mahalanobis
from dubito.table import Table


def table(n: int = 120, d: int = 5, seed: int = 0) -> Table:
    generator = torch.Generator().manual_seed(seed)
    label = torch.tensor([3, 7, 11])[torch.randint(3, (n,), generator=generator)]
    mixing = torch.eye(d) + 0.5 * torch.randn(d, d, generator=generator)
    feature = torch.randn(n, d, generator=generator) @ mixing + label[:, None]
    return Table(feature=feature, label=label)


def by_numpy(train: Table, rows: Table, *, relative: bool, regularisation: float) -> np.ndarray:
    z, y, q = train.feature.double().numpy(), train.label.numpy(), rows.feature.double().numpy()
    means = {c: z[y == c].mean(0) for c in np.unique(y)}
    residual = np.stack([row - means[c] for row, c in zip(z, y, strict=True)])
    within = np.linalg.inv(residual.T @ residual / len(z) + regularisation * np.eye(z.shape[1]))
    nearest = np.min([np.einsum("nd,de,ne->n", q - m, within, q - m) for m in means.values()], axis=0)
    if not relative:
        return nearest
    overall = np.linalg.inv(np.cov(z.T, bias=True) + regularisation * np.eye(z.shape[1]))
    return nearest - np.einsum("nd,de,ne->n", q - z.mean(0), overall, q - z.mean(0))


def test_by_hand():
    # Classes at 1 and 11, both with deviations of one: 4 is (4 - 1)^2 = 9 away. All rows: mean 6, variance 25 + 1.
    train = Table(feature=[[0.0], [2.0], [10.0], [12.0]], label=[0, 0, 1, 1])
    plain = Mahalanobis(regularisation=0.0).fit(train)
    assert plain.score(Table(feature=[[4.0], [11.0]])).tolist() == pytest.approx([9.0, 0.0])
    relative = Mahalanobis(relative=True, regularisation=0.0).fit(train)
    assert relative.score(Table(feature=[[4.0]])).item() == pytest.approx(9 - 4 / 26)


@pytest.mark.parametrize("regularisation", [0.0, 0.1])
@pytest.mark.parametrize("relative", [False, True])
def test_against_numpy(relative, regularisation):
    train, rows = table(), table(40, seed=1)
    score = Mahalanobis(relative=relative, regularisation=regularisation).fit(train)
    expected = by_numpy(train, rows, relative=relative, regularisation=regularisation)
    assert score.score(rows).numpy() == pytest.approx(expected, rel=1e-8)


def test_a_linear_map_of_the_features_changes_nothing():
    train, rows = table(), table(40, seed=1)
    turn = torch.randn(5, 5, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    for relative in (False, True):
        score = Mahalanobis(relative=relative, regularisation=0.0)
        plain = score.fit(train).score(rows)
        turned = score.fit(Table(feature=train.feature.double() @ turn + 9, label=train.label))
        assert torch.allclose(turned.score(Table(feature=rows.feature.double() @ turn + 9)), plain, rtol=1e-6)


def test_the_names_of_labels_do_not_matter():
    train, rows = table(), table(40, seed=1)
    renamed = Table(feature=train.feature, label=-train.label)
    assert torch.allclose(Mahalanobis().fit(renamed).score(rows), Mahalanobis().fit(train).score(rows))
    assert Mahalanobis().fit(train).means_.shape == (3, 5)


def test_one_class_is_its_own_background():
    one = table().extended(label=torch.zeros(120, dtype=torch.long))
    assert Mahalanobis(relative=True).fit(one).score(table(seed=1)).abs().max().item() < 1e-9


def test_singular_covariances():
    feature = torch.cat([table().feature, torch.ones(120, 1)], dim=1)
    flat = Table(feature=feature, label=table().label)
    with pytest.raises(
        ValueRangeError, match=r"^mahalanobis\.fit: the covariance within classes is singular, .*Raise regularisation\."
    ):
        Mahalanobis(regularisation=0.0).fit(flat)
    # A feature that never moved in training and moves now: (0.1)^2 / 1e-5 = 1000 further away.
    moved = Table(feature=feature + torch.tensor([0.0] * 5 + [0.1]))
    score = Mahalanobis().fit(flat)
    assert torch.allclose(score.score(moved) - score.score(flat), torch.tensor(1000.0).double(), rtol=1e-4)


def test_a_fit_that_fails_leaves_nothing_behind():
    score = Mahalanobis(regularisation=0.0).fit(table())
    constant = Table(feature=torch.ones(9, 5), label=torch.arange(9) % 3)
    with pytest.raises(ValueRangeError, match="is singular"):
        score.fit(constant)  # after its means are known
    with pytest.raises(NotFittedError, match=r"mahalanobis\.score was called before fit"):
        score.score(table())


def test_what_cannot_be():
    with pytest.raises(ValueRangeError, match=r"mahalanobis: regularisation must be a number, at least 0; got -1\.0\."):
        Mahalanobis(regularisation=-1.0)
    with pytest.raises(TableError, match=r"mahalanobis\.fit needs labelled rows; table in memory has none\."):
        Mahalanobis().fit(table().rows(slice(0, 0)))
    with pytest.raises(TableError, match=r"mahalanobis\.score: features must be 5 wide, as in fit; got 4 in other\."):
        Mahalanobis().fit(table()).score(Table(feature=torch.ones(2, 4), name="other"))
