"""Losses for a backbone: those of classifiers that scikit-learn fits, too, on the other half of the images."""

import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression

import dubito
from dubito import Table
from dubito.errors import TableError
from dubito.heads.linear_probe import fit_linear, with_probe_losses


def clusters(n: int = 120, noise: float = 1.0) -> Table:
    draw = torch.Generator().manual_seed(0)
    label = torch.arange(n) % 3
    feature = 2 * torch.eye(3, 8)[label] + noise * torch.randn(n, 8, generator=draw)
    return Table(feature=feature, label=label, id=[f"{row}.png" for row in range(n)])


def test_weights_are_those_of_scikit_learn():
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(60, 4)), rng.integers(3, size=60)
    result = fit_linear(x, y, np.zeros((4, 3)), 2.0)
    theirs = LogisticRegression(C=0.5, tol=1e-10, max_iter=10_000).fit(x, y)
    np.testing.assert_allclose(result[:-1], theirs.coef_.T, atol=1e-4)
    np.testing.assert_allclose(result[-1] - result[-1].mean(), theirs.intercept_ - theirs.intercept_.mean(), atol=1e-3)


def test_losses_are_of_the_other_half():
    table = clusters()
    loss = with_probe_losses(table).loss
    z, label = table.feature.double().numpy(), table.label.numpy()
    x = (z - z.mean(0)) / np.sqrt(z.var(0).mean())
    image = np.unique(table.id, return_inverse=True)[1]
    half = np.random.default_rng(0).permutation(len(x))[image] % 2
    for one in (0, 1):
        theirs = LogisticRegression(tol=1e-10, max_iter=10_000).fit(x[half != one], label[half != one])
        expected = -theirs.predict_log_proba(x[half == one])[np.arange((half == one).sum()), label[half == one]]
        np.testing.assert_allclose(loss[half == one], expected, atol=1e-3)


def test_rows_are_read_alone_and_crops_of_one_image_stay_together():
    table = clusters()
    twice = Table(
        feature=table.feature.repeat(2, 1),
        label=table.label.repeat(2),
        id=[*table.id, *(f"{name}@1" for name in table.id)],
    )
    probed = with_probe_losses(twice)
    assert torch.equal(probed.loss[:120], probed.loss[120:])
    some = torch.tensor([200, 3, 77])
    assert torch.allclose(probed.rows(some).loss, probed.loss[some])


def test_a_head_for_a_backbone_finds_images_that_linear_classifiers_get_wrong():
    draw = torch.Generator().manual_seed(1)
    table = clusters(600, noise=0.3)
    hard = torch.rand(600, generator=draw) < 0.4  # their features say nothing of the class
    feature = table.feature.clone()
    feature[hard] = torch.randn(int(hard.sum()), 8, generator=draw) * 0.3 + torch.eye(8)[7] * 2
    table = Table(feature=feature, label=table.label)
    recipe = dubito.heads.Recipe(rows=60_000)
    training = dubito.train(table, held_out=0.2, recipe=recipe, width=32, progress=False)
    assert dubito.metrics.auroc(training.head.score(table), hard) > 0.9
    assert training.findings()[0].startswith("The model has no logits: the head has learned the losses of linear")
    assert "order" not in training.histories[0][-1]


@pytest.mark.parametrize("label", [[0] * 8, [0, 1] * 3 + [-1, 1]])
def test_labels_that_do_not_serve_are_named(label):
    with pytest.raises(TableError, match=r"two classes in either half; got labels -?\d to \d of 8 rows\. Leave out"):
        with_probe_losses(Table(feature=torch.randn(8, 3), label=torch.tensor(label)))
