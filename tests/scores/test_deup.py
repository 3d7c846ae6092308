"""DEUP: its inputs by numpy, what it predicts, and what it refuses."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from dubito.errors import DubitoWarning, MissingColumnError, TableError, ValueRangeError
from dubito.heads import Recipe
from dubito.metrics import nll_per_row, spearman
from dubito.scores import DEUP, SCORES, Entropy, UncertaintyHead, available_scores
from dubito.table import Provenance, Table
from dubito.table.folds import folds_of

C, D = 3, 5
QUICK = {"width": 16, "depth": 1}


def recipe(loss: str = "l2") -> Recipe:
    return Recipe(loss=loss, batch=50, rows=10_000)


def table(n: int = 300, seed: int = 0) -> Table:
    """Losses that grow with the last feature, which no logit depends on."""
    generator = torch.Generator().manual_seed(seed)
    label = torch.randint(C, (n,), generator=generator)
    feature = 2 * torch.eye(C, D)[label] + torch.randn(n, D, generator=generator)
    logit, noise = feature[:, :C] + 0.5, torch.rand(n, generator=generator)
    return Table(feature=feature, logit=logit, label=label, loss=feature[:, -1].exp() * noise)


def numbers(rows: Table, train: Table) -> np.ndarray:
    """The logarithms of the Mahalanobis distance and of the information by a diagonalised Kronecker posterior."""
    z, q, y = train.feature.double().numpy(), rows.feature.double().numpy(), train.label.numpy()
    means = np.stack([z[y == k].mean(0) for k in range(C)])
    within = (z - means[y]).T @ (z - means[y]) / len(z) + 1e-5 * np.eye(D)
    away = q[:, None] - means
    distance = np.einsum("nkd,de,nke->nk", away, np.linalg.inv(within), away).min(1)
    x, p = np.hstack([z, np.ones((len(z), 1))]), train.logit.double().softmax(1).numpy()
    fisher = np.mean([np.diag(one) - np.outer(one, one) for one in p], axis=0)
    weight = np.linalg.lstsq(x, train.logit.double().numpy(), rcond=None)[0]
    curvature = len(z) * np.kron(fisher, x.T @ x / len(z))
    eigenvalues, tau = np.linalg.eigvalsh(curvature), 1.0
    for _ in range(500):  # MacKay's fixed point
        tau = (eigenvalues / (eigenvalues + tau)).sum() / np.square(weight).sum()
    covariance = np.linalg.inv(curvature + tau * np.eye(len(curvature)))
    u = []
    for one, logit in zip(np.hstack([q, np.ones((len(q), 1))]), rows.logit.double().softmax(1).numpy(), strict=True):
        jacobian = np.kron(np.eye(C), one)
        u.append(0.5 * np.trace((np.diag(logit) - np.outer(logit, logit)) @ jacobian @ covariance @ jacobian.T))
    return np.log(np.stack([distance, np.array(u)], axis=1))


def test_it_is_a_head_on_standardised_inputs_that_are_out_of_fold():
    train, rows = table(), table(40, seed=1)
    score = DEUP(**QUICK, recipe=recipe()).fit(train)
    fold = folds_of(train, 5, seed=score.seed)
    two = np.empty((len(train), 2))
    for one in range(5):
        two[fold == one] = numbers(train.rows(fold == one), train.rows(fold != one))
    own = np.hstack([train.feature.numpy(), two])
    new = np.hstack([rows.feature.numpy(), numbers(rows, train.rows(fold != 0))])
    mean, deviation = own.mean(0), own.std(0)
    fit = Table(feature=((own - mean) / deviation).astype(np.float32), loss=train.loss)
    head = UncertaintyHead(**QUICK, recipe=recipe()).fit(fit)
    expected = head.score(Table(feature=((new - mean) / deviation).astype(np.float32)))
    assert torch.allclose(score.score(rows), expected, rtol=0.01, atol=1e-3)
    # Nothing but these inputs matters: without the features, the two numbers are left.
    alone = DEUP(inputs=("density", "variance"), **QUICK, recipe=recipe()).fit(train)
    assert alone.shift_.numpy() == pytest.approx(mean[D:], rel=1e-4)
    assert alone.scale_.numpy() == pytest.approx(deviation[D:], rel=1e-4)


def wide(n: int, seed: int, d: int) -> Table:
    """Ten classes in many features, and a loss for every row, of mean about 0.4."""
    generator, weight = torch.Generator().manual_seed(seed), torch.randn(10, d, generator=torch.Generator())
    label = torch.randint(10, (n,), generator=generator)
    feature = weight[label] * (8 / d) ** 0.5 + torch.randn(n, d, generator=generator)
    return Table(feature=feature, logit=feature @ weight.T * (8 / d) ** 0.5, label=label)


@pytest.mark.parametrize("n", [256, 120])  # twice as many rows as features, and fewer
def test_new_rows_are_like_those_that_it_has_learned_from(n):
    train, rows = wide(n, 0, 128), wide(1000, 1, 128)
    score = DEUP(recipe=Recipe(loss="l2", episodes=100, warmup=10)).fit(train)
    loss = nll_per_row(rows.logit, rows.label).mean().item()
    assert loss / 1.5 < score.score(rows).mean().item() < 1.5 * loss
    posterior = score._restored()[1]
    inputs = (score._numbers(rows.feature, rows.logit, posterior) - score.shift_[-2:]) / score.scale_[-2:]
    assert inputs.mean(0).abs().max().item() < 0.3
    assert inputs.std(0).numpy() == pytest.approx(1.0, rel=0.2)


def test_crops_of_one_image_are_in_one_fold():
    few = wide(60, 0, 32)
    image = torch.arange(60).repeat(4)
    copies = few.rows(image).extended(image_index=image)
    density = {"inputs": ("density",), **QUICK, "recipe": recipe()}
    once, four = DEUP(**density).fit(few), DEUP(**density).fit(copies)
    # With rows apart, a copy is always among those that the Gaussians are fitted on, and the distances are far smaller.
    apart = DEUP(**density).fit(copies.select("feature", "logit", "label"))
    assert four.shift_.item() == pytest.approx(once.shift_.item(), abs=0.4)
    assert apart.shift_.item() < once.shift_.item() - 1


def test_losses_are_cross_entropies_where_there_are_none():
    train, rows = table(), table(20, seed=1)
    bare = train.select("feature", "logit", "label")
    losses = bare.extended(loss=F.cross_entropy(bare.logit, bare.label, reduction="none"))
    score = DEUP(**QUICK, recipe=recipe())
    expected = score.fit(losses).score(rows)
    assert torch.allclose(score.fit(bare).score(rows), expected, rtol=1e-4)
    assert not torch.allclose(score.fit(train).score(rows), expected, rtol=0.01)  # those of the table come first
    others = Table(**{name: bare.whole(name) for name in bare.columns}, label_space="own")
    of_other_task = bare.select(*bare.columns)
    of_other_task.provenance = Provenance(task_loss="binary_cross_entropy")
    for one in (others, of_other_task):
        with pytest.raises(MissingColumnError, match=r"deup\.fit needs column 'loss'"):
            score.fit(one)


def test_its_kind_is_that_of_what_is_left():
    assert SCORES["deup"].kind == DEUP().kind == "total"
    assert DEUP(aleatoric="entropy", recipe=recipe()).kind == "epistemic"


def test_it_predicts_the_mean_loss():
    train, rows = table(2000), table(500, seed=1)
    score = DEUP(inputs=["feature"], recipe=Recipe(loss="l2", batch=100, rows=60_000), **QUICK).fit(train)
    u = score.score(rows)
    assert score.learns_from == ("feature", "loss")
    assert u.mean().item() == pytest.approx(rows.loss.mean().item(), rel=0.2)
    assert spearman(u, rows.feature[:, -1]) > 0.95


def test_less_the_entropy():
    train, rows = table(), table(40, seed=1)
    whole, rest = (
        DEUP(aleatoric=one, inputs=("feature",), recipe=recipe("variance_nll"), **QUICK).fit(train).score(rows)
        for one in ("none", "entropy")
    )
    assert torch.allclose(whole - rest, Entropy().score(rows))


def test_its_default_makes_ten_passes():
    score = DEUP(width=8, depth=1).fit(table())
    assert score.trained_["rows_seen"] == pytest.approx(10 * 300, rel=0.1)
    assert score.score(table(9, seed=1)).min() > 0


def test_features_that_never_vary():
    train, rows = table(), table(40, seed=1)
    wider = [one.extended(feature=F.pad(one.feature, (0, 2), value=0.3)) for one in (train, rows)]
    score = DEUP(inputs=("feature",), recipe=recipe(), **QUICK).fit(wider[0])
    assert score.scale_[-2:].tolist() == [1.0, 1.0]
    assert bool(score.score(wider[1]).isfinite().all())


def test_it_is_made_only_where_it_is_named():
    result = available_scores(table(50, seed=1), table())
    assert "deup" not in result.scores
    assert "losses of images that the model was not trained on" in result.left_out["deup"]
    assert {"deup", "vbll"} <= set(result.not_extracted)
    with pytest.warns(DubitoWarning, match="deup is fitted on table in memory"):
        named = available_scores(table(50, seed=1), table(), settings={"deup": {**QUICK, "recipe": recipe()}})
    assert "deup" in named.scores


def test_what_cannot_be():
    with pytest.raises(ValueRangeError, match=r"deup: with aleatoric='entropy'.* got a recipe with loss 'log_l2'"):
        DEUP(aleatoric="entropy")
    with pytest.raises(ValueRangeError, match=r"deup: the recipe's loss must be one of l2, .*; got 'ranking'"):
        DEUP(recipe=Recipe())
    with pytest.raises(ValueRangeError, match=r"deup: inputs must be different names, at least one; got \(\)"):
        DEUP(inputs=())
    with pytest.raises(TableError, match=r"deup\.score: features must be 5 wide, as in fit; got 4"):
        DEUP(recipe=recipe(), **QUICK).fit(table()).score(Table(feature=torch.ones(2, 4), logit=torch.ones(2, C)))
    with pytest.raises(TableError, match=r"deup\.fit: table needs at least 5 images.* has 4"):
        DEUP().fit(table(4))


def test_logits_of_other_classes_are_refused():
    score, rows = DEUP(**QUICK, recipe=recipe()).fit(table()), table(4)
    with pytest.raises(TableError, match=r"logits must be of 3 classes, as in fit; got 2 in"):
        score.score(rows.extended(logit=rows.logit[:, :2]))
