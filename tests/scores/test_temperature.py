import math

import pytest
import torch
import torch.nn.functional as F
from scipy.optimize import minimize_scalar

from dubito.errors import MissingColumnError, TableError, UnknownNameError, ValueRangeError
from dubito.metrics.information import decompose
from dubito.scores import (
    Energy,
    Entropy,
    ExpectedEntropy,
    LastLayerGradient,
    Margin,
    MaxProbability,
    MutualInformation,
    Neighbours,
    Temperature,
    VariationRatio,
    WeightedMutualInformation,
    load_score,
    save_score,
)
from dubito.scores.temperature import fit_temperature
from dubito.table import Table
from dubito.types import Score


def calibrated(n: int, c: int = 5, scale: float = 2.0, seed: int = 0) -> Table:
    """Labels drawn from the softmax of the logits: their temperature is one."""
    generator = torch.Generator().manual_seed(seed)
    logit = scale * torch.randn(n, c, generator=generator, dtype=torch.float64)
    label = torch.multinomial(logit.softmax(1), 1, generator=generator)[:, 0]
    return Table(logit=logit, label=label)


def times(table: Table, factor: float) -> Table:
    return table.extended(logit=table.logit * factor)


def loss(table: Table, temperature: float) -> float:
    return float(F.cross_entropy(table.logit.double() / temperature, table.label))


def reference(table: Table) -> float:
    result = minimize_scalar(
        lambda b: loss(table, math.exp(-b)), bounds=(-6, 6), method="bounded", options={"xatol": 1e-10}
    )
    return math.exp(-result.x)


@pytest.mark.parametrize(
    "table",
    [
        calibrated(300),
        times(calibrated(300, c=2), 7.0),
        times(calibrated(200, c=30), 0.05),
        calibrated(100, c=3, scale=15.0),
        Table(logit=[[4.0, 0.0], [0.0, 3.0], [1.0, 0.0]], label=[0, 1, 1]),
    ],
    ids=["calibrated", "over-confident", "under-confident", "saturated", "three rows"],
)
def test_against_scipy(table):
    result = fit_temperature(table)
    assert result == pytest.approx(reference(table), rel=1e-4)
    assert loss(table, result) <= loss(table, reference(table)) + 1e-12


def test_by_hand():
    # Gap 1 in every row, right three times of four: p = 3/4 = 1 / (1 + exp(-1/T)), so 1/T = log 3
    table = Table(logit=[[1.0, 0.0]] * 4, label=[0, 0, 0, 1])
    assert fit_temperature(table) == pytest.approx(1 / math.log(3), rel=1e-8)


@pytest.mark.parametrize("factor", [0.2, 1.0, 5.0])
def test_a_known_temperature_is_found(factor):
    # 8,000 labels tell T to about one per cent
    assert fit_temperature(times(calibrated(8000), factor)) == pytest.approx(factor, rel=0.05)


def test_scaling_the_logits_scales_the_temperature():
    table = calibrated(300)
    assert fit_temperature(times(table, 3.0)) == pytest.approx(3 * fit_temperature(table), rel=1e-8)


@pytest.mark.parametrize("c", [2, 10, 100])
@pytest.mark.parametrize("factor", [0.01, 0.3, 1.0, 3.0, 30.0])
def test_the_table_is_read_a_few_times_only(monkeypatch, c, factor):
    passes = []
    batches = Table.batches
    monkeypatch.setattr(Table, "batches", lambda self, *columns: passes.append(1) or batches(self, *columns))
    fit_temperature(times(calibrated(2000, c=c), factor))
    assert len(passes) <= 16


def test_a_tiny_error_among_many_sure_answers_is_found():
    # The 50 sure rows say nothing. Of the others 99 of 100 are right: 1 / (1 + exp(-0.01 / T)) = 99/100
    logits = [[20.0, 0.0]] * 50 + [[0.01, 0.0]] * 100
    table = Table(logit=torch.tensor(logits, dtype=torch.float64), label=[0] * 149 + [1])
    assert 1 / fit_temperature(table) == pytest.approx(math.log(99) / 0.01, rel=1e-6)


@pytest.mark.parametrize("gap", [0.5, 5.0, 20.0, 200.0])
def test_labels_that_are_all_predicted_right(gap):
    table = Table(logit=torch.eye(4).repeat(5, 1) * gap, label=[0, 1, 2, 3] * 5, name="cache/train")
    with pytest.raises(ValueRangeError) as error:
        Temperature().fit(table)
    assert str(error.value) == (
        "temperature.fit: the likelihood of 20 labels in cache/train grows without end towards T = 0, as when every "
        "label is predicted right. Fit on held-out images with a few errors."
    )


def test_labels_worse_than_chance():
    table = Table(logit=[[2.0, 0.0], [0.0, 2.0], [3.0, 0.0]], label=[1, 0, 1])
    with pytest.raises(ValueRangeError, match="grows without end towards T = infinity, as when none is"):
        Temperature().fit(table)


def test_labels_of_another_set():
    table = Table(logit=[[1.0, 0.0]], label=[0], label_space="own", name="photos/birds")
    with pytest.raises(
        TableError,
        match=r"temperature\.fit needs labels of the model's own classes; those of photos/birds are another set's\.",
    ):
        Temperature().fit(table)


def test_labels_beyond_the_logits():
    for label, classes in (([0, 2], "0 to 2"), ([-1, 0], "-1 to 0")):
        with pytest.raises(TableError, match=rf"temperature\.fit: .* must be classes from 0 to 1; got {classes}\."):
            Temperature().fit(Table(logit=[[1.0, 0.0], [0.0, 1.0]], label=label))


def test_no_rows():
    with pytest.raises(TableError, match=r"temperature\.fit needs labelled rows; table in memory has none\."):
        Temperature().fit(calibrated(5).rows(slice(0, 0)))


def test_nan_is_named_as_such():
    table = Table(logit=[[1.0, float("nan")], [0.0, 1.0]], label=[0, 0])
    with pytest.raises(
        ValueRangeError, match=r"temperature\.fit: logits of table in memory: 1 of 4 values are NaN or infinite"
    ):
        Temperature().fit(table)


@pytest.mark.parametrize("inner", [MaxProbability(), Entropy(), Margin(), Energy(2.0)])
def test_any_softmax_score_on_top(inner):
    table = times(calibrated(200), 4.0)
    score = Temperature(inner).fit(table)
    expected = inner.score(times(table, 1 / score.temperature_))
    assert torch.allclose(score.score(table), expected, rtol=1e-12)
    assert score.kind == inner.kind
    assert not torch.allclose(score.score(table), inner.score(table), rtol=1e-3)


@pytest.mark.parametrize(
    ("inner", "message"),
    [
        (Neighbours(), "neighbours reads feature and learns bank_"),
        (Temperature(), "temperature reads logit and learns temperature_"),
        (LastLayerGradient(), "last_layer_gradient reads feature, logit and learns nothing"),
        (WeightedMutualInformation(over="pooled"), "weighted_.* reads members_logit and learns weights_"),
    ],
)
def test_only_softmax_scores_on_top(inner, message):
    expected = r"temperature: score_of must read logits alone, or an ensemble, and learn nothing; "
    with pytest.raises(TableError, match=rf"{expected}{message}\. Use one of the softmax family; .* over='input'"):
        Temperature(inner)


def test_the_score_on_top_by_name():
    assert Temperature("entropy") == Temperature(Entropy())
    assert Temperature(score_of="energy").kind == "epistemic"
    with pytest.raises(UnknownNameError, match="Did you mean entropy"):
        Temperature("entropi")


def test_a_score_of_logits_of_a_users_own_on_top():
    class Spread(Score):
        name, kind, needs = "spread", "total", ("logit",)

        def score_batch(self, batch):
            return -batch.logit.std(1)

    table = times(calibrated(200), 4.0)
    score = Temperature(Spread()).fit(table)
    torch.testing.assert_close(score.score(table), -table.logit.std(1) / score.temperature_)


def test_calibration_makes_the_loss_no_worse():
    table = times(calibrated(2000), 6.0)
    result = fit_temperature(table)
    assert loss(table, result) < loss(table, 1.0)
    assert result > 1  # over-confident


def with_tiles(table: Table, seed: int = 1) -> Table:
    """Nine members around the model's own logits."""
    noise = torch.randn(len(table), 9, table.shape("logit")[1], generator=torch.Generator().manual_seed(seed))
    return table.extended(tiles_3_logit=table.logit[:, None] + 3 * noise.double())


def test_a_score_of_members_on_top(tmp_path):
    table = with_tiles(times(calibrated(300), 4.0))
    score = Temperature(MutualInformation(of="tiles_3")).fit(table)
    # T is that of the model itself, not of its members.
    assert score.temperature_ == pytest.approx(fit_temperature(table.select("logit", "label")))
    probs = (table.whole("tiles_3_logit") / score.temperature_).softmax(-1).transpose(0, 1)
    torch.testing.assert_close(score.score(table), decompose(probs).epistemic, rtol=1e-9, atol=1e-12)
    assert (score.kind, score.needs, score.learns_from) == ("epistemic", ("tiles_3_logit",), ("logit", "label"))
    assert Temperature(ExpectedEntropy()).kind == "aleatoric"
    loaded = load_score(save_score(score, tmp_path))
    assert loaded == score
    assert torch.equal(loaded.score(table.select("tiles_3_logit")), score.score(table))


def test_a_temperature_of_one_changes_no_score_of_members():
    table = with_tiles(calibrated(100))
    for inner in (MutualInformation("tiles_3"), WeightedMutualInformation(of="tiles_3"), VariationRatio("tiles_3")):
        score = Temperature(inner).fit(table)
        score.temperature_ = 1.0
        torch.testing.assert_close(score.score(table), inner.score(table))


def test_a_summary_is_not_enough_for_a_temperature():
    table = with_tiles(calibrated(100))
    score = Temperature(MutualInformation("tiles_3")).fit(table)
    with pytest.raises(MissingColumnError) as error:
        score.score(Table(logit=table.logit, tiles_3=torch.zeros(100, 9)))
    assert str(error.value) == (
        "temperature.score needs column 'tiles_3_logit'; table in memory has logit, tiles_3. It is written by the "
        'tiles probe (dubito.extract(..., probes=[dubito.probes.Tiles()])), with keep="logits".'
    )
