"""Scores of members: by hand, against numpy, from summaries and from logits, in blocks, and refused where they lie."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.special import log_softmax, logsumexp, softmax
from torch import nn
from torch.func import jacrev

import dubito
from dubito.errors import MissingColumnError, NotFittedError, TableError, ValueRangeError
from dubito.metrics.information import decompose, member_weights
from dubito.metrics.streaming import SUMMARY, MemberStream
from dubito.probes import Noise
from dubito.scores import (
    ExpectedEntropy,
    MutualInformation,
    PerturbationVariance,
    PredictiveEntropy,
    Temperature,
    VariationRatio,
    WeightedMutualInformation,
    information,
    load_score,
    save_score,
)
from dubito.table import Provenance, Table, writer_of
from dubito.types import Score

ALL = [MutualInformation, WeightedMutualInformation, ExpectedEntropy, VariationRatio, PredictiveEntropy]


def logits(n: int = 30, m: int = 6, c: int = 5, seed: int = 0) -> torch.Tensor:
    return 2 * torch.randn(n, m, c, generator=torch.Generator().manual_seed(seed))


def summed_up(z: torch.Tensor) -> torch.Tensor:
    stream = MemberStream()
    stream.add(z)
    return stream.summary().float()


def weighted(z: torch.Tensor, by: str) -> np.ndarray:
    """Of each input with weights of its own, step by step."""
    z = z.double().numpy()
    size = logsumexp(z, -1) if by == "logsumexp" else z.sum(-1)
    result = []
    for row, large in zip(z, size, strict=True):
        w, p = np.exp(large) / np.exp(large).sum(), softmax(row, -1)
        mean = sum(w[m] * p[m] for m in range(len(w)))
        result.append(-(mean * np.log(mean)).sum() + sum(w[m] * (p[m] * np.log(p[m])).sum() for m in range(len(w))))
    return np.array(result)


def test_by_hand():
    # Row 0: two sure members that disagree. Row 1: two that are unsure alike. Row 2: p = (1, 0) and (1/2, 1/2), so
    # that the mean is (3/4, 1/4): total = 2 log 2 - 3/4 log 3, aleatoric = log 2 / 2.
    big = 60.0
    z = torch.tensor([[[big, 0.0], [0.0, big]], [[0.0, 0.0], [0.0, 0.0]], [[big, 0.0], [0.0, 0.0]]])
    table = Table(members_logit=z.double())
    log2, total = math.log(2), 2 * math.log(2) - 0.75 * math.log(3)
    expected = {
        MutualInformation: [log2, 0, total - log2 / 2],
        ExpectedEntropy: [0, log2, log2 / 2],
        PredictiveEntropy: [log2, log2, total],
        VariationRatio: [0.5, 0, 0],
        # In row 2, a member with a log-sum-exp of 60 against one of log 2 has all the weight.
        WeightedMutualInformation: [log2, 0, 0],
    }
    for kind, values in expected.items():
        assert kind().score(table).tolist() == pytest.approx(values, abs=1e-12), kind.name


def test_against_numpy():
    z = logits()
    log_p = log_softmax(z.double().numpy(), -1)
    mean = np.exp(log_p).mean(1)
    total = -(mean * np.log(mean)).sum(-1)
    aleatoric = -(np.exp(log_p) * log_p).sum(-1).mean(-1)
    votes = np.array([np.bincount(row, minlength=5).max() for row in z.argmax(-1).numpy()])
    table = Table(members_logit=z)
    for kind, expected in {
        MutualInformation: total - aleatoric,
        ExpectedEntropy: aleatoric,
        PredictiveEntropy: total,
        VariationRatio: 1 - votes / 6,
    }.items():
        np.testing.assert_allclose(kind().score(table).numpy(), expected, rtol=1e-5, atol=1e-7)
    for by in ("logsumexp", "sum"):
        result = WeightedMutualInformation(by=by).score(table).numpy()
        np.testing.assert_allclose(result, weighted(z, by), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("kind", ALL)
def test_a_summary_says_the_same_as_logits(kind):
    z = logits()
    from_logits = kind(of="tiles_3").score(Table(tiles_3_logit=z))
    from_summary = kind(of="tiles_3").score(Table(tiles_3=summed_up(z)))
    torch.testing.assert_close(from_summary, from_logits, rtol=1e-5, atol=1e-6)
    # Where both are there, the summary is read: it may be of another temperature.
    other = summed_up(logits(seed=1))
    both = kind(of="tiles_3").score(Table(tiles_3=other, tiles_3_logit=z))
    assert torch.equal(both, kind(of="tiles_3").score(Table(tiles_3=other)))


@pytest.mark.parametrize("by", ["logsumexp", "sum"])
def test_pooled_weights(by):
    train, test = logits(seed=1), logits(seed=2)
    score = WeightedMutualInformation(by=by, over="pooled").fit(Table(members_logit=train))
    expected = member_weights(train.transpose(0, 1), by=by, over="pooled")[:, 0]
    torch.testing.assert_close(score.weights_, expected)
    z = train.double().numpy()
    mass = np.exp(logsumexp(z, -1) if by == "logsumexp" else z.sum(-1)).sum(0)
    np.testing.assert_allclose(score.weights_.numpy(), mass / mass.sum(), rtol=1e-6)
    probs = test.double().softmax(-1).transpose(0, 1)
    result = score.score(Table(members_logit=test))
    torch.testing.assert_close(result, decompose(probs, score.weights_).epistemic, rtol=1e-6, atol=1e-9)
    # The summary has no pooled weights, and is not read.
    torch.testing.assert_close(score.score(Table(members=summed_up(train), members_logit=test)), result)


def test_pooled_weights_of_sums_too_large_for_exp():
    z = logits() + torch.tensor([0.0, 0, 0, 0, 0, 700.0])[:, None]  # a sum of 3500
    score = WeightedMutualInformation(by="sum", over="pooled").fit(Table(members_logit=z))
    assert score.weights_.tolist() == pytest.approx([0, 0, 0, 0, 0, 1])
    assert score.score(Table(members_logit=z)).tolist() == pytest.approx([0.0] * 30)


def test_pooled_weights_are_learned_saved_and_of_one_ensemble(tmp_path):
    score = WeightedMutualInformation(over="pooled", of="views")
    assert (score.needs, score.learns_from, score.learned) == (("views_logit",), ("views_logit",), ("weights_",))
    with pytest.raises(NotFittedError, match=r"weighted_mutual_information\.score was called before fit"):
        score.score(Table(views_logit=logits()))
    with pytest.raises(MissingColumnError, match=r"\.fit needs column 'views_logit'; table in memory has views\."):
        score.fit(Table(views=summed_up(logits())))
    score.fit(Table(views_logit=logits(), provenance=Provenance(weights="ab")))
    with pytest.raises(TableError, match=r"has 4 members in 'views_logit'; weights were fitted for 6\. Fit on a table"):
        score.score(Table(views_logit=logits(m=4)))
    with pytest.raises(TableError, match="must come from one model"):
        score.score(Table(views_logit=logits(), provenance=Provenance(weights="cd")))
    with pytest.raises(TableError, match=r"weighted_mutual_information\.fit needs rows; table in memory has none"):
        WeightedMutualInformation(over="pooled").fit(Table(members_logit=logits(n=0)))


@pytest.mark.parametrize("kind", ALL)
def test_blocks_do_not_matter(kind, monkeypatch):
    z = logits(n=23, m=7)
    score = kind() if kind is not WeightedMutualInformation else kind(over="pooled").fit(Table(members_logit=z))
    whole = score.score(Table(members_logit=z.double()))
    args = []

    class Column:
        shape = tuple(z.shape)

        def __getitem__(self, rows):
            args.append(len(z[rows]))
            return z[rows].double()

    # Of five classes and seven members a row has 5 * (28 + 64) bytes: four rows, and one member at a time.
    monkeypatch.setattr(information, "_BYTES", 4 * 5 * (28 + 64))
    result = score.score(Table(members_logit=Column()))
    torch.testing.assert_close(result, whole, rtol=1e-12, atol=1e-14)
    assert args == [4, 4, 4, 4, 4, 3]


def test_memory_is_bounded():
    class Column:
        """A million inputs of 49 members and 1,000 classes: 196 GB."""

        shape = (1_000_000, 49, 1000)
        largest = 0

        def __getitem__(self, rows):
            Column.largest = max(Column.largest, rows.stop - rows.start)
            raise StopIteration

    table = Table(tiles_7_logit=Column())
    with pytest.raises((StopIteration, RuntimeError)):
        MutualInformation(of="tiles_7").score(table)
    assert 1 < Column.largest * 49 * 1000 * 4 <= 64 * 2**20


def test_members_in_any_order():
    z = logits()
    for kind in ALL:
        one, other = kind().score(Table(members_logit=z)), kind().score(Table(members_logit=z.flip(1)))
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-7)


def test_identical_members():
    z = logits(m=1).expand(30, 4, 5)
    for kind in (MutualInformation, WeightedMutualInformation, VariationRatio):
        u = kind().score(Table(members_logit=z))
        assert bool((u >= 0).all())
        assert float(u.max()) < 1e-6


@pytest.mark.parametrize("kind", ALL)
def test_one_member(kind):
    z = logits(m=1)
    for table in (Table(members_logit=z), Table(members=summed_up(z))):
        if kind in (ExpectedEntropy, PredictiveEntropy):  # an entropy is one of one member too
            torch.testing.assert_close(
                kind().score(table), decompose(z.softmax(-1).transpose(0, 1)).total, rtol=1e-5, atol=1e-6
            )
            continue
        with pytest.raises(TableError) as error:
            kind().score(table)
        assert str(error.value) == (
            f"{kind.name}.score: the ensemble 'members' of table in memory has one member, which always agrees with "
            f"itself: the score would be 0 for every image. Pass at least two members."
        )


@pytest.mark.parametrize("kind", ALL)
def test_missing_columns_are_named_with_their_probe(kind):
    table = Table(logit=logits()[:, 0], name="cache/test")
    with pytest.raises(MissingColumnError) as error:
        kind().score(table)
    assert str(error.value) == (
        f"{kind.name}.score needs column 'members'; cache/test has logit. It is written by {writer_of('members')}."
    )
    assert "dubito.probes.Members(models)" in str(error.value)
    with pytest.raises(MissingColumnError, match=r"needs column 'tiles_7'; .* written by .*dubito\.probes\.Tiles\("):
        kind(of="tiles_7").score(table)
    with pytest.raises(MissingColumnError, match=r"needs column 'mine'; cache/test has logit\. Run the probe"):
        kind(of="mine").score(table)


def test_columns_of_another_shape():
    with pytest.raises(
        TableError, match=r"column 'members' must be the summary of an ensemble, \(n, 9\); got \(30, 6, 5\)"
    ):
        MutualInformation().score(Table(members=logits()))
    with pytest.raises(
        TableError, match=r"'members_logit' must be the logits of members, \(n, m, c\); got .* \(30, 5\)"
    ):
        MutualInformation().score(Table(members_logit=logits()[:, 0]))
    with pytest.raises(ValueRangeError, match=r"mutual_information\.score needs at least two classes"):
        MutualInformation().score(Table(members_logit=logits(c=1)))


def test_what_is_no_setting():
    for settings, message in (
        ({"by": "max"}, "by must be one of logsumexp, sum; got 'max'"),
        ({"over": "all"}, "over must"),
    ):
        score = WeightedMutualInformation()
        for name, value in settings.items():
            setattr(score, name, value)
        with pytest.raises(ValueRangeError, match=f"weighted_mutual_information: {message}"):
            score.__post_init__()


def test_half_precision_logits_are_good_enough():
    z = logits()
    exact = MutualInformation().score(Table(members_logit=z))
    torch.testing.assert_close(MutualInformation().score(Table(members_logit=z.half())), exact, rtol=5e-3, atol=1e-4)


def test_a_class_that_nobody_predicts():
    z = logits()
    z[..., 3] = -1e4
    without = z[..., [0, 1, 2, 4]]
    for kind in ALL:
        if kind is WeightedMutualInformation:
            continue  # a sum of logits does see it
        torch.testing.assert_close(
            kind().score(Table(members_logit=z)), kind().score(Table(members_logit=without)), rtol=1e-5, atol=1e-7
        )


def test_summary_columns_are_read_by_name_of_field():
    table = Table(members=torch.arange(2.0, 2 + len(SUMMARY))[None])
    result = {kind.name: kind().score(table).item() for kind in ALL}
    assert result == {
        "mutual_information": 5.0,
        "weighted_mutual_information": 6.0,
        "expected_entropy": 4.0,
        "variation_ratio": 8.0,
        "predictive_entropy": 3.0,
    }
    assert WeightedMutualInformation(by="sum").score(table).item() == 7.0


@pytest.mark.parametrize("path", ["cache/test", Path("cache/test")])
def test_a_path_is_no_table(path):
    score = MutualInformation()
    message = r'mutual_information.score: table must be a table; .*the path "cache/test".* Open it: dubito.open'
    with pytest.raises(TableError, match=message):
        Score.score.__wrapped__(score, path)


def test_saved_settings(tmp_path):
    score = WeightedMutualInformation(by="sum", over="pooled", of="tiles_7").fit(Table(tiles_7_logit=logits()))
    loaded = load_score(save_score(score, tmp_path))
    assert loaded == score
    assert loaded.needs == ("tiles_7_logit",)
    assert torch.equal(loaded.score(Table(tiles_7_logit=logits())), score.score(Table(tiles_7_logit=logits())))


def test_variance_by_hand():
    # Two members, p = (3/4, 1/4) and (1/4, 3/4): each class has variance 1/16.
    one = math.log(3)
    table = Table(noise_logit=torch.tensor([[[one, 0.0], [0.0, one]], [[one, 0.0], [one, 0.0]]], dtype=torch.float64))
    assert PerturbationVariance().score(table).tolist() == pytest.approx([1 / 8, 0])
    assert PerturbationVariance().score(Table(noise_variance=[0.25, 0.5])).tolist() == [0.25, 0.5]
    assert PerturbationVariance("views").score(Table(views_variance=[0.25])).tolist() == [0.25]


def test_variance_as_numpy_has_it():
    z = logits(n=20, c=4)
    expected = z.double().softmax(-1).numpy().var(1).sum(-1)
    result = PerturbationVariance().score(Table(noise_logit=z))
    torch.testing.assert_close(result, torch.from_numpy(expected), rtol=1e-10, atol=0)


def test_a_column_of_variances_goes_before_the_logits():
    table = Table(noise_logit=logits(n=2, c=4), noise_variance=[0.25, 0.5])
    assert PerturbationVariance().score(table).tolist() == [0.25, 0.5]


def test_small_noise_finds_the_gradient_of_the_probabilities():
    # E sum_c Var_m p_mc = sigma^2 sum_c ||dp_c/dx||^2, times (m - 1) / m because the mean is that of the copies.
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(12, 8), nn.Tanh(), nn.Linear(8, 3))
    model = dubito.wrap(net, name="net")
    x, sigma, copies = torch.randn(5, 12), 0.01, 1009  # a prime number, which has no sub-ensembles
    columns = Noise(copies, sigma).run(model, x, None)
    jacobians = torch.stack([jacrev(lambda row: net(row).softmax(-1))(row) for row in x])
    expected = sigma**2 * jacobians.detach().square().sum((1, 2)).double()
    result = PerturbationVariance().score(Table(noise_variance=columns["noise_variance"]))
    torch.testing.assert_close(result, expected, rtol=0.1, atol=0)


def test_variance_at_a_temperature():
    z = logits(n=20, c=4)
    table = Table(noise_logit=z, logit=z[:, 0], label=z[:, 0].argmax(1) * (torch.arange(20) % 5 > 0))
    score = Temperature(PerturbationVariance()).fit(table)
    expected = (z.double() / score.temperature_).softmax(-1).var(1, correction=0).sum(-1)
    torch.testing.assert_close(score.score(table), expected, rtol=1e-9, atol=0)


def test_variances_that_cannot_be():
    with pytest.raises(MissingColumnError) as error:
        PerturbationVariance().score(Table(logit=torch.ones(1, 2)))
    assert str(error.value) == (
        "perturbation_variance.score needs column 'noise_variance'; table in memory has logit. It is written by the "
        "probe of noisy copies (dubito.extract(..., probes=[dubito.probes.Noise()]))."
    )
    with pytest.raises(MissingColumnError, match=r'Views\(\)\]\)\), with keep="logits", from which it is computed\.$'):
        PerturbationVariance("views").score(Table(logit=torch.ones(1, 2)))
    with pytest.raises(TableError, match=r"must have one variance per image, \(n\); got \(1, 2\)"):
        PerturbationVariance().score(Table(noise_variance=torch.ones(1, 2)))
    with pytest.raises(TableError, match="has one member, which always agrees with itself"):
        PerturbationVariance().score(Table(noise_logit=logits(m=1)))
    with pytest.raises(ValueRangeError, match="needs at least two classes"):
        PerturbationVariance().score(Table(noise_logit=logits(c=1)))
    with pytest.raises(
        ValueRangeError, match=r"perturbation_variance\.score: column 'noise_variance' must be finite; row 0 "
    ):
        PerturbationVariance().score(Table(noise_variance=[math.nan, 0.0]))
    assert PerturbationVariance().score(Table(noise_variance=torch.ones(0))).shape == (0,)
