"""Distances to prototypes: by hand, and that they suit few images."""

import numpy as np
import pytest
import torch

from dubito.metrics import auroc
from dubito.scores import Prototypes
from dubito.table import Table


def images(per_class: int, c: int = 10, d: int = 32, seed: int = 0, noise: float = 0.6, strange: bool = False) -> Table:
    """Directions around one per class, the same for all seeds; strange: around others."""
    centres = torch.randn(c, d, generator=torch.Generator().manual_seed(7 if strange else 6))
    label = torch.arange(c).repeat(per_class)
    generator = torch.Generator().manual_seed(seed)
    feature = centres[label] + noise * d**0.5 / 3 * torch.randn(len(label), d, generator=generator)
    return Table(feature=feature * (1 + torch.rand(len(label), 1, generator=generator)), label=label)


def by_numpy(train: Table, rows: Table) -> np.ndarray:
    z, q = (one.feature.double().numpy() for one in (train, rows))
    z, q = (one / np.linalg.norm(one, axis=1, keepdims=True) for one in (z, q))
    y, n = train.label.numpy(), len(train)
    groups = [z[y == one] for one in np.unique(y)]
    c, mean, counts = len(groups), z.mean(0), np.array([len(group) for group in groups])
    within = sum(((group - group.mean(0)) ** 2).sum() for group in groups) / (n - c)
    apart = sum(len(group) * ((group.mean(0) - mean) ** 2).sum() for group in groups) / (c - 1)
    between = max(0.0, (apart - within) / ((n - (counts**2).sum() / n) / (c - 1)))
    distances = []
    for group in groups:
        weight = between / (between + within / len(group))
        prototype = mean + weight * (group.mean(0) - mean)
        distances.append(((q - prototype) ** 2).sum(1) / (within * (1 + weight / len(group))))
    return np.min(distances, axis=0)


def test_by_hand():
    # Two classes of two rows, at +-theta from 0 and from 180 degrees, cos theta = 0.8: means +-0.8 on the first axis,
    # squares 0.36 each, W = 4 * 0.36 / 2 = 0.72; B = (4 * 0.64 / 1 - 0.72) / 2 = 0.92, since n_0 = 4 - 8 / 4 = 2.
    # Weight 0.92 / (0.92 + 0.36) = 0.71875, prototypes +-0.575, typical 0.72 * (1 + 0.359375) = 0.97875.
    # A row at 90 degrees is 0.575^2 + 1 = 1.330625 away.
    train = Table(feature=[[0.8, 0.6], [0.8, -0.6], [-0.8, 0.6], [-0.8, -0.6]], label=[0, 0, 1, 1])
    score = Prototypes().fit(train)
    assert score.shrinkage_.tolist() == pytest.approx([0.71875, 0.71875])
    assert score.score(Table(feature=[[0.0, 5.0]])).item() == pytest.approx(1.330625 / 0.97875)


def test_against_numpy_with_unequal_classes():
    train, rows = images(6), images(3, seed=1)
    keep = torch.rand(60, generator=torch.Generator().manual_seed(3)) < 0.6
    train = train.rows(keep)
    assert Prototypes().fit(train).score(rows).numpy() == pytest.approx(by_numpy(train, rows), rel=1e-9)


def test_of_one_image_per_class_it_is_the_nearest_image():
    train, rows = images(1), images(3, seed=1)
    one, other = (torch.nn.functional.normalize(each.feature.double()) for each in (rows, train))
    assert torch.allclose(Prototypes().fit(train).score(rows), torch.cdist(one, other).square().amin(1))


def test_many_images_need_no_shrinkage_and_labels_without_meaning_shrink_to_one_point():
    assert float(Prototypes().fit(images(400)).shrinkage_.min()) > 0.99
    train = images(5)
    label = torch.arange(10).repeat(5)[torch.randperm(50, generator=torch.Generator().manual_seed(1))]
    mixed = Prototypes().fit(Table(feature=train.feature, label=label))
    assert float(mixed.shrinkage_.max()) < 0.35


def test_another_image_of_the_class_is_one_typical_distance_away():
    for per_class in (2, 5):
        score = Prototypes().fit(images(per_class, c=40))
        assert score.score(images(50, c=40, seed=1)).mean().item() == pytest.approx(1.0, abs=0.1)


@pytest.mark.parametrize(("per_class", "least"), [(2, 0.85), (5, 0.9)])
def test_few_images_suffice(per_class, least):
    rows, strange = images(20, seed=1), images(20, seed=2, strange=True)
    truth = torch.arange(400) >= 200
    for seed in range(3):
        score = Prototypes().fit(images(per_class, seed=10 + seed))
        assert auroc(torch.cat([score.score(rows), score.score(strange)]), truth) > least


def test_shrinkage_brings_prototypes_nearer_to_the_true_means():
    truth = Prototypes().fit(images(2000, noise=1.2)).prototypes_
    for seed in range(3):
        train = images(2, seed=20 + seed, noise=1.2)
        unit = torch.nn.functional.normalize(train.feature.double())
        plain = torch.stack([unit[train.label == c].mean(0) for c in range(10)])
        assert (Prototypes().fit(train).prototypes_ - truth).square().sum() < (plain - truth).square().sum()


def test_one_class_is_not_shrunk():
    train = images(5, c=1)
    score = Prototypes().fit(train)
    assert score.shrinkage_.tolist() == [1.0]
    unit = torch.nn.functional.normalize(train.feature.double())
    assert torch.allclose(score.prototypes_[0], unit.mean(0))


def test_equal_images_have_no_spread():
    train = Table(feature=[[1.0, 0.0]] * 2 + [[0.0, 2.0]] * 2, label=[0, 0, 1, 1])
    assert Prototypes().fit(train).score(Table(feature=[[3.0, 0.0], [1.0, 1.0]])).tolist() == pytest.approx(
        [0.0, 2 - 2**0.5]
    )
