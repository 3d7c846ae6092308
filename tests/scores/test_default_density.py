"""Which density suits a table: by rows, width, classes and cost; and how it is called."""

import pytest
import torch

from dubito.errors import MissingColumnError
from dubito.scores.default_density import default_density, told
from dubito.scores.density import Density
from dubito.scores.softmax import Entropy
from dubito.table import Table


@pytest.mark.parametrize(
    ("rows", "width", "classes", "expected"),
    [
        (4000, 16, 10, ("class", "full", 100)),  # 4000 >= 5 x 10 x 16
        (700, 16, 10, ("class", "tied", 100)),
        (100, 64, 10, ("class", "diagonal", 100)),
        (1500, 4, 150, ("class", "tied", 0)),  # more than a hundred: in closed form
        (400, 8, 100, ("free", "full", 100)),  # four rows a class: 400 / 50 clusters, 400 >= 5 x 8 x 8
    ],
)
def test_default_density(rows, width, classes, expected):
    table = Table(feature=torch.randn(rows, width), label=torch.arange(rows) % classes)
    density = default_density(table)
    assert (density.start, density.covariance, density.max_iterations) == expected
    assert default_density(table, "spherical").covariance == "spherical"


def test_default_density_without_labels_and_its_words():
    table = Table(feature=torch.randn(120, 4), logit=torch.randn(120, 10))
    density = default_density(table)
    assert (density.components, density.start) == (2, "free")
    assert told(density, table) == "2 Gaussians (found by k-means), full covariances of 4 features, by EM, 0.0 MB"
    many = Table(feature=torch.zeros(2000, 100), label=torch.arange(2000) % 200)
    assert told(default_density(many), many) == (
        "200 Gaussians (one a class), tied covariances of 100 features, in closed form, 0.2 MB"
    )
    assert told(Entropy(), table) == "entropy"
    free = Density(start="free", covariance="diagonal", max_iterations=0)
    assert (
        told(free, table)
        == "10 Gaussians (found by k-means), diagonal covariances of 4 features, in closed form, 0.0 MB"
    )
    fitted = Density(components=3, start="free", covariance="tied", neurons=2).fit(table)
    assert told(fitted, None) == "3 Gaussians (found by k-means), tied covariances of 2 features, by EM, 0.0 MB"
    assert told(Density(), None) == "density"


@pytest.mark.parametrize(
    ("covariance", "cost"),
    [("full", 600 * 3 * 8 * 8), ("tied", 600 * 8 * (8 + 3)), ("diagonal", 600 * 3 * 8), ("spherical", 600 * 3 * 8)],
)
def test_em_is_left_out_where_an_iteration_costs_too_much(covariance, cost):
    table = Table(feature=torch.randn(600, 8), label=torch.arange(600) % 3)
    for most, iterations in ((cost, 100), (cost - 1, 0)):
        density = default_density(table, covariance, most=float(most))
        assert (density.covariance, density.max_iterations) == (covariance, iterations)


def test_without_features_it_says_who_needs_them():
    with pytest.raises(MissingColumnError, match=r"^diagnose needs column 'feature'; table in memory has label\."):
        default_density(Table(label=[0, 1]), by="diagnose")
