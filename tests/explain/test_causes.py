"""What each cause costs: by hand, and against references."""

import numpy as np
import pytest
import torch
from sklearn.metrics import roc_auc_score

from dubito.errors import TableError
from dubito.explain._sentences import ALL, REST, TOGETHER
from dubito.explain.causes import diagnose
from dubito.explain.causes_result import Diagnosis
from dubito.metrics import auroc, interval
from dubito.scores import Entropy, ScaledEntropy
from dubito.table import Table
from tests.explain.blobs import DOUBTFUL, QUICK, SURE, First, blobs, example


@pytest.fixture(scope="module")
def found() -> Diagnosis:
    return example()


def test_by_hand():
    known = Table(feature=[[0.0, 0.0], [2.0, 0.0], [0.5, 0.0]], logit=[SURE] * 3)
    foreign = Table(feature=[[1.0, 1.0], [3.0, 1.0], [0.5, 1.0]], logit=[DOUBTFUL] * 3)
    found = diagnose(known, foreign, density=First(), **QUICK)["ood"]
    # D: 1 beats 0 and 0.5, 3 beats all, 0.5 beats 0 and ties with 0.5: (2 + 3 + 1.5) / 9
    expected = {"max_probability": 1, "entropy": 1, "scaled_entropy": 0, "density": 6.5 / 9}
    assert {name: value.value for name, value in found.auroc.items()} == pytest.approx(expected)
    parts = {"saturation": 0 - 1, "extrapolation": 6.5 / 9 - 0, "overlap": 1 - 6.5 / 9}
    assert {name: value.value for name, value in found.causes.items()} == pytest.approx(parts)
    assert found.together.value == pytest.approx(6.5 / 9 - 1)
    assert found.rows == 3
    assert all(value.spread == 0 for value in found.auroc.values())  # equally many: all draws are the same


@pytest.mark.parametrize(
    ("known", "foreign", "features", "expected"),
    [
        # B, C and D in order: three parts.
        (SURE, SURE, (0, 5), {"saturation": 0.0, "extrapolation": 0.5, "overlap": 0.0}),
        # B = 1, C = 0, D = 1: cooling hurts, the density does not.
        (SURE, DOUBTFUL, (0, 5), {TOGETHER: 0.0, "overlap": 0.0}),
        # B = 1, C = 0, D = 0: both hurt.
        (SURE, DOUBTFUL, (5, 0), {ALL: 0.0}),
        # B = 0, C = 1, D = 0: the density hurts.
        (DOUBTFUL, SURE, (5, 0), {"saturation": 1.0, REST: 0.0}),
    ],
)
def test_what_is_compared(known, foreign, features, expected):
    inside, outside = (
        Table(feature=level + torch.rand(9, 1), logit=[logit] * 9)
        for level, logit in zip(features, (known, foreign), strict=True)
    )
    found = diagnose(inside, outside, density=First(), **QUICK)["ood"]
    assert {name: part.value for name, part in found.parts.items()} == pytest.approx(expected)
    if len(expected) == 1:
        assert (found.lead, found.dominant) == (None, None)
    else:
        first, second, *_ = sorted(expected.values(), reverse=True)
        assert found.lead.value == pytest.approx(first - second)
        assert found.dominant == (found.ranked[0] if first > second else None)


def test_parts_add_up_to_what_entropy_misses(found):
    for causes in found.all:
        assert sum(value.value for value in causes.causes.values()) == pytest.approx(1 - causes.auroc["entropy"].value)
        assert sum(part.value for part in causes.parts.values()) == pytest.approx(1 - causes.auroc["entropy"].value)
        assert causes.together.value == pytest.approx(
            causes.causes["saturation"].value + causes.causes["extrapolation"].value
        )


def test_draws_are_balanced_and_close_to_all_pairs():
    known, foreign = blobs(300, seed=1), blobs(60, scale=3.0, seed=2)
    found = diagnose(known, foreign, density=First(), draws=200, **QUICK)["ood"]
    both = [torch.cat([score.score(known), score.score(foreign)]) for score in (Entropy(), ScaledEntropy(), First())]
    truth = np.arange(360) >= 300
    assert found.rows == 60
    for name, scores in zip(("entropy", "scaled_entropy", "density"), both, strict=True):
        value = found.auroc[name]
        # A mean over 200 draws, each with that spread, around the AUROC of all pairs.
        assert value.value == pytest.approx(roc_auc_score(truth, scores), abs=4 * value.spread / 200**0.5)
        assert 0 < value.spread < 0.05


def test_intervals_are_those_of_the_bootstrap():
    known, foreign = blobs(200, seed=1), blobs(200, scale=3.0, seed=2)
    found = diagnose(known, foreign, density=First(), resamples=1500)["ood"].auroc["entropy"]
    scores = torch.cat([Entropy().score(known), Entropy().score(foreign)])
    reference = interval(auroc, scores, torch.arange(400) >= 200, resamples=1500, seed=1)
    assert found.value == pytest.approx(reference.value)
    assert (found.low, found.high) == pytest.approx((reference.low, reference.high), abs=0.012)


def test_mean_over_sets(found):
    for name in ("entropy", "density"):
        values = [causes.auroc[name].value for causes in found.by_set.values()]
        assert found.mean.auroc[name].value == pytest.approx(sum(values) / 2)
        widths = [causes.auroc[name].high - causes.auroc[name].low for causes in found.by_set.values()]
        assert found.mean.auroc[name].high - found.mean.auroc[name].low < max(widths)
    assert diagnose(blobs(40), blobs(40, seed=1), density=First(), **QUICK).mean is None


def test_same_seed_same_answer():
    known, foreign = blobs(80, seed=1), blobs(50, scale=2.0, seed=2)
    first, again, other = (diagnose(known, foreign, seed=seed, **QUICK) for seed in (0, 0, 1))
    assert first.to_json() == again.to_json()
    assert first.to_json()["sets"] != other.to_json()["sets"]


def test_saturated_shares_and_accuracy():
    # In float32, softmax of (20, 0) rounds to 1: exp(-20) = 2e-9 is below half a unit of the last place, 6e-8.
    logit = [[20.0, 0.0], [10.0, 0.0], [0.0, 30.0], [0.0, 1.0]]
    known = Table(feature=torch.randn(4, 2), logit=logit, label=[0, 1, 1, 1])
    foreign = Table(feature=torch.randn(2, 2), logit=logit[1::2])
    found = diagnose(known, foreign, density=First(), **QUICK)
    assert (found.saturated, found["ood"].saturated, found.accuracy) == (0.5, 0.0, 0.75)


def test_lengths_and_angles_with_a_classifier():
    linear = torch.nn.Linear(2, 3, bias=False)
    linear.weight.data = torch.tensor([[2.0, 0.0], [0.0, 1.0], [-1.0, 0.0]])
    known = Table(feature=[[3.0, 4.0], [0.0, 0.0]], logit=[[1.0, 0.0, 0.0]] * 2)
    found = diagnose(known, Table(feature=[[-1.0, 0.0], [0.0, -2.0]], logit=[[1.0, 0, 0]] * 2), density=First(),
                     classifier=linear, **QUICK)  # fmt: skip
    assert found.inside["norm"].tolist() == [5.0, 0.0]
    assert found.inside["cosine"].tolist() == pytest.approx([0.8, 0.0])
    assert found.outside["ood"]["cosine"].tolist() == pytest.approx([1.0, 0.0])


def test_a_classifier_of_another_width_is_an_error():
    with pytest.raises(TableError, match=r"classifier must read features of 8 numbers, as in known; its weight has 5"):
        diagnose(blobs(12), blobs(12, seed=1), density=First(), classifier=torch.nn.Linear(5, 4), **QUICK)
