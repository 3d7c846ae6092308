import math

import numpy as np
import pytest
import torch
from scipy.stats import entropy

from dubito.errors import TableError, ValueRangeError
from dubito.scores.kl_matching import KLMatching, kl_matching
from dubito.table import Table


def rows(n: int = 60, c: int = 4, seed: int = 0) -> torch.Tensor:
    return 2 * torch.randn(n, c, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_by_hand():
    # d_0 = (3/4, 1/4), d_1 = (1/4, 3/4); p = (1/2, 1/2) from either: (log 2/3 + log 2) / 2 = log(4/3) / 2
    train = Table(logit=torch.tensor([[3.0, 1.0], [1.0, 3.0]]).double().log())
    score = KLMatching().fit(train)
    u = score.score(Table(logit=[[0.0, 0.0], [math.log(3), 0.0]]))
    assert u.tolist() == pytest.approx([math.log(4 / 3) / 2, 0.0], abs=1e-9)


def test_as_scipy_has_it_for_every_pair():
    train, test = rows(), rows(30, seed=1)
    p = train.softmax(1).numpy()
    typical = [p[p.argmax(1) == k].mean(0) for k in range(4)]
    expected = [min(entropy(one, d) for d in typical) for one in test.softmax(1).numpy()]
    np.testing.assert_allclose(KLMatching().fit(Table(logit=train)).score(Table(logit=test)), expected, atol=1e-12)
    single = KLMatching().fit(Table(logit=train.float())).score(Table(logit=test.float()))
    np.testing.assert_allclose(single, expected, rtol=1e-5)


def test_classes_that_are_never_predicted_have_no_typical_image():
    logits = rows()
    logits[:, 2] = -5.0
    assert KLMatching().fit(Table(logit=logits)).log_typical_.shape == (3, 4)
    one = KLMatching().fit(Table(logit=[[9.0, 0.0]]))
    assert one.log_typical_.shape == (1, 2)
    assert one.score(Table(logit=[[9.0, 0.0]])).item() == pytest.approx(0.0, abs=1e-12)


def test_impossible_classes_are_far_but_finite():
    score = KLMatching().fit(Table(logit=[[0.0, -1e4]]))
    u = score.score(Table(logit=[[0.0, 5.0], [0.0, -1e4], [0.0, 9.0]])).tolist()
    assert u[1] == pytest.approx(0.0, abs=1e-9)
    assert 600 < u[0] < u[2] < 800


def test_an_image_at_the_mean_prediction_has_no_divergence():
    logits = torch.tensor([[3.0, 0.0, 0.0]])
    assert kl_matching(logits, logits.double().log_softmax(1)).item() == pytest.approx(0.0, abs=1e-12)


def test_other_numbers_of_classes():
    with pytest.raises(TableError, match=r"kl_matching\.score: logits must be of 4 classes, as in fit; got 3"):
        KLMatching().fit(Table(logit=rows())).score(Table(logit=rows(c=3)))
    with pytest.raises(ValueRangeError, match=r"kl_matching\.fit needs at least two classes"):
        KLMatching().fit(Table(logit=[[1.0]]))
    with pytest.raises(TableError, match=r"kl_matching\.fit: table needs at least 1 row"):
        KLMatching().fit(Table(logit=rows(0)))
