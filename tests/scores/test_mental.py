import math

import pytest
import torch
from torch import nn

from dubito.errors import ModelError, TableError
from dubito.models.wrap import wrap
from dubito.scores.mental import MentalModel, mental_log_odds, mental_probability
from dubito.table import Provenance, Table


def table(n: int = 200, d: int = 6, c: int = 4, *, noise: float = 0.0, seed: int = 0) -> tuple[Table, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    feature = torch.randn(n, d, generator=generator, dtype=torch.float64)
    weights = torch.randn(c, d, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
    logit = feature @ weights.T + torch.arange(c) + noise * torch.randn(n, c, generator=generator)
    return Table(feature=feature, logit=logit), weights


def equation_7(z: torch.Tensor, weights: torch.Tensor) -> list[float]:
    """As it is printed."""
    k, values = len(weights), []
    for row in z:
        cosine = max(float(row @ w / (row.norm() * w.norm())) for w in weights)
        values.append(-1 / (1 + (k - 1) * math.exp(-float(row.norm()) * (1 / (k - 1) + cosine))))
    return values


def test_equation_7():
    rows, weights = table(50)
    printed = equation_7(rows.feature, weights)
    assert (-mental_probability(rows.feature, weights)).tolist() == pytest.approx(printed, rel=1e-12)
    assert (
        mental_log_odds(rows.feature, weights).argsort().tolist() == torch.tensor(printed).double().argsort().tolist()
    )


def test_by_hand():
    # Three classes at 120 degrees: z along the first, of length 2: a = 2 (1/2 + 1) = 3, u = log 2 - 3
    weights = torch.tensor([[1.0, 0.0], [-0.5, 0.75**0.5], [-0.5, -(0.75**0.5)]])
    u = mental_log_odds(torch.tensor([[2.0, 0.0], [0.0, 0.0]]), 5 * weights)
    assert u.tolist() == pytest.approx([math.log(2) - 3, math.log(2)])
    # Without a feature every class is equally likely: p = 1/3
    assert mental_probability(torch.zeros(1, 2), weights).item() == pytest.approx(1 / 3)


def test_on_an_optimal_structure_it_is_the_softmax():
    # A simplex of weights of length (K - 1) / K without biases, and a feature along one of them: the assumptions hold.
    k = 5
    simplex = torch.eye(k, dtype=torch.float64) - 1 / k
    simplex = simplex / simplex.norm(dim=1, keepdim=True)
    for length in (0.5, 3.0):
        z = length * simplex[2:3]
        assert mental_probability(z, simplex).item() == pytest.approx((z @ simplex.T).softmax(1).max().item())


def test_it_does_not_saturate():
    rows, weights = table(20)
    far = [mental_log_odds(scale * rows.feature, weights) for scale in (1e2, 1e3, 1e4)]
    assert all(len(u.unique()) == 20 for u in far)
    assert len(mental_probability(1e4 * rows.feature, weights).unique()) == 1
    assert bool((far[2] < far[1]).all())


def test_fit_finds_the_weights():
    train, weights = table()
    score = MentalModel().fit(train)
    assert torch.allclose(score.weights_, weights, atol=1e-9)
    rows, _ = table(30, seed=1)
    assert torch.allclose(score.score(rows), mental_log_odds(rows.feature, weights), atol=1e-9)


def test_features_that_never_vary_get_no_weight():
    train, weights = table()
    dead = Table(feature=torch.cat([train.feature, torch.full((200, 1), 2.0)], dim=1), logit=train.logit)
    result = MentalModel().fit(dead).weights_
    assert torch.allclose(result[:, :6], weights, atol=1e-9)
    assert result[:, 6].abs().max().item() < 1e-9


def test_logits_that_are_not_linear_are_refused():
    train, _ = table()
    with pytest.raises(
        TableError,
        match=r"^mental\.fit: logits must be linear in the features; a linear layer misses those of table in memory by "
        r"\d+% of their deviation\. Pass features and logits of the same layer and model, or take",
    ):
        MentalModel().fit(Table(feature=train.feature, logit=train.logit.abs()))
    with pytest.raises(TableError, match="by 100% of their deviation"):
        MentalModel().fit(Table(feature=train.feature, logit=torch.ones(200, 3)))
    assert MentalModel().fit(table(noise=0.1)[0]).weights_.shape == (4, 6)


@pytest.mark.parametrize("n", [42, 45, 60])
def test_noise_is_not_linear_in_the_features_however_few_rows_there_are(n):
    # With 40 features, 42 rows of noise leave a residual of a fifth of the deviation or so; by its degrees all of it.
    draw = torch.Generator().manual_seed(0)
    noise = Table(feature=torch.randn(n, 40, generator=draw), logit=torch.randn(n, 50, generator=draw))
    with pytest.raises(TableError, match=r"by (8|9|10|11|12)\d% of their deviation|by 1[0-2]\d% of their deviation"):
        MentalModel().fit(noise)
    weights = torch.randn(50, 40, generator=draw, dtype=torch.float64)
    exact = noise.extended(logit=noise.feature.double() @ weights.T)
    assert torch.allclose(MentalModel().fit(exact).weights_, weights, atol=1e-6)


def test_dead_features_need_no_rows():
    train, weights = table(12)
    wide = Table(feature=torch.cat([train.feature, torch.zeros(12, 30)], dim=1), logit=train.logit)
    assert torch.allclose(MentalModel().fit(wide).weights_[:, :6], weights, atol=1e-9)


def test_too_few_rows_and_too_few_classes():
    train, _ = table()
    with pytest.raises(
        TableError, match=r"mental\.fit: weights of 6 independent features need more than 7 rows; table .* has 7\. Fit"
    ):
        MentalModel().fit(train.rows(slice(0, 7)))
    with pytest.raises(
        TableError, match=r"^mental\.fit: table needs at least 1 row; table in memory has 0\. Pass a table"
    ):
        MentalModel().fit(train.rows(slice(0, 0)))
    with pytest.raises(ModelError, match=r"mental\.fit: the weights from .* must be of two classes or more; got 1\."):
        MentalModel().fit(Table(feature=train.feature, logit=train.logit[:, :1]))
    with pytest.raises(TableError, match=r"mental\.score: features must be 6 wide, as in fit; got 2 in other\. Score"):
        MentalModel().fit(train).score(Table(feature=torch.ones(2, 2), name="other"))


def test_of_a_classifier():
    torch.manual_seed(0)
    model = wrap(nn.Sequential(nn.Flatten(), nn.Linear(12, 5), nn.ReLU(), nn.Linear(5, 3)))
    z = model.features(torch.randn(40, 3, 2, 2))
    score = MentalModel.of(model)
    weight, _ = model.head()
    assert torch.equal(score.weights_, weight.detach().double())
    rows = Table(feature=z, logit=model.logits(z))
    assert torch.allclose(score.score(rows), mental_log_odds(z, weight), rtol=1e-9)
    with pytest.raises(TableError, match=r"mental\.score: .* must come from one model"):
        score.score(Table(feature=z, provenance=Provenance(weights="another")))
    with torch.no_grad():
        model.module[3].weight[1] = 0
    with pytest.raises(ModelError, match=r"the head of Sequential must have a direction for every class; those of cla"):
        MentalModel.of(model)
