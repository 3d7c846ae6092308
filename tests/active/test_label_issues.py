"""Wrong labels that were planted are found, with probabilities that mean what they say; weak models flag little."""

import csv
import json

import numpy as np
import pytest
import torch

from dubito import Table, find_label_issues
from dubito.active.label_issues import _default_count, _fit_noise, _Noise, _rate, _similar
from dubito.errors import MissingColumnError, TableError, ValueRangeError


def planted(
    n: int = 2000, *, wrong: float = 0.05, classes: int = 5, strength: float = 3.0, scale: float = 1.0, seed: int = 0
) -> tuple[Table, np.ndarray]:
    """Labels drawn from softmax(logits / scale), so T = scale is right; some of them are then changed."""
    draw = torch.Generator().manual_seed(seed)
    logit = strength * torch.randn(n, classes, generator=draw, dtype=torch.float64)
    label = torch.multinomial(logit.softmax(1), 1, generator=draw)[:, 0]
    chosen = torch.rand(n, generator=draw) < wrong
    shift = torch.randint(1, classes, (n,), generator=draw)
    return Table(logit=scale * logit, label=torch.where(chosen, (label + shift) % classes, label)), chosen.numpy()


def test_by_hand():
    # Two classes, q = 0.9 for the label of nine rows and 0.1 for that of the tenth: at e = 0.05,
    # P(wrong) = 0.05 * 0.9 / (0.05 * 0.9 + 0.95 * 0.1) = 0.045 / 0.14.
    noise, q = _Noise(1.0, 0.05), np.array([[0.1, 0.9]], dtype=np.float32)
    mistaken = [noise.mistaken(q[:, y].astype(float), q, np.array([y]))[0] for y in (0, 1)]
    posterior = noise.posterior(np.array([0.1, 0.9]), np.array(mistaken))
    assert posterior == pytest.approx([0.045 / 0.14, 0.005 / (0.005 + 0.95 * 0.9)])


def test_similar_classes_by_hand():
    # Products of the two images' probabilities: 0 and 1: 0.6 * 0.3 + 0.1 * 0.1 = 0.19; 0 and 2: 0.06 + 0.08 = 0.14;
    # 1 and 2: 0.03 + 0.08 = 0.11. So class 0 is mistaken for 1 with 0.19 / 0.33, class 2 for 1 with 0.11 / 0.25.
    q = np.array([[0.6, 0.3, 0.1], [0.1, 0.1, 0.8]], dtype=np.float32)
    similar = _similar(2 * np.log(q), 2.0)
    expected = np.array([[0, 0.19 / 0.3, 0.14 / 0.25], [0.19 / 0.33, 0, 0.11 / 0.25], [0.14 / 0.33, 0.11 / 0.3, 0]])
    assert similar == pytest.approx(expected, abs=1e-6)
    assert similar.sum(axis=0) == pytest.approx(np.ones(3))
    # Label 1 of the second image, a quarter of the mistakes between similar classes:
    # 0.75 * (1 - 0.1) / 2 + 0.25 * (0.1 * 0.19 / 0.33 + 0.8 * 0.11 / 0.25).
    mistaken = _Noise(2.0, 0.05, 0.25, similar).mistaken(np.array([0.1]), q[1:], np.array([1]))
    assert mistaken == pytest.approx([0.75 * 0.45 + 0.25 * (0.1 * 0.19 / 0.33 + 0.8 * 0.11 / 0.25)])


def test_share_of_similar_classes_falls_with_the_wrong_labels():
    few, many = (planted(4000, wrong=wrong, strength=6.0)[0] for wrong in (0.002, 0.1))
    noise = _fit_noise(few, few.label.numpy())
    count = (noise.rate * 4002 - 1) / 4000 * 4000  # without the label that Laplace's rule adds
    assert 0.01 < noise.share == pytest.approx(1 / (2 + count), rel=1e-6)
    assert _fit_noise(many, many.label.numpy()).similar is None


def test_probabilities_are_those_of_brute_force():
    """Over a grid of temperature and noise, nothing is likelier than what was fitted."""
    table, _ = planted(400, wrong=0.1, scale=2.0)
    label, logit = table.label.numpy(), table.logit
    noise = _fit_noise(table, label)

    def likelihood(temperature: float, rate: float) -> float:
        q = (logit / temperature).softmax(1).gather(1, table.label[:, None])[:, 0]
        return float(((1 - rate) * q + rate * (1 - q) / 4).log().mean())

    best = likelihood(noise.temperature, noise.rate)
    grid = [likelihood(t, e) for t in np.exp(np.linspace(-2, 2, 41)) for e in np.linspace(0.001, 0.5, 51)]
    assert best >= max(grid) - 1e-5


@pytest.mark.parametrize("scale", [0.3, 1.0, 4.0])
def test_probabilities_are_those_of_who_knows_temperature_and_noise(scale):
    table, wrong = planted(4000, scale=scale, strength=6.0)
    result = find_label_issues(table, least=1e-6)
    q = (table.logit / scale).softmax(1).gather(1, table.label[:, None])[:, 0].numpy()
    expected = 0.05 * (1 - q) / 4 / (0.05 * (1 - q) / 4 + 0.95 * q)
    off = np.abs(result.probability - expected[result.rows])
    assert off.mean() < 0.01
    assert off[(expected[result.rows] > 0.05) & (expected[result.rows] < 0.95)].mean() < 0.1
    assert (np.diff(result.probability) <= 0).all()
    assert result.wrong_labels == pytest.approx(wrong.sum(), rel=0.25)


@pytest.mark.parametrize("strength", [1.5, 3.0, 6.0])
def test_probabilities_are_calibrated(strength):
    table, wrong = planted(20_000, strength=strength)
    result = find_label_issues(table, least=0.05)
    for low, high in ((0.05, 0.3), (0.3, 0.7), (0.7, 1.0)):
        inside = (result.probability >= low) & (result.probability < high)
        if inside.sum() >= 50:
            assert wrong[result.rows[inside]].mean() == pytest.approx(result.probability[inside].mean(), abs=0.12)
    assert inside.sum() or strength < 3


def test_a_weak_model_flags_little_and_says_so():
    table, wrong = planted(4000, strength=1.0)
    result = find_label_issues(table)
    assert len(result) < 0.3 * wrong.sum()
    text = str(result)
    assert f"The model's predictions agree with {result.accuracy.value:.1%} [" in text
    assert "which these predictions cannot point out: a more accurate model would." in text


def test_by_default_a_list_ends_at_a_tenth_or_where_two_thirds_of_it_are_wrong():
    # Of the first one, two, three and four, wrong by estimate: 1, 1.9 / 2 = 0.95, 2.1 / 3 = 0.7 and 2.2 / 4 = 0.55.
    assert _default_count(np.array([1.0, 0.9, 0.2, 0.1])) == 3
    # 5.1 / 6 and 5.19 / 7 = 0.74 are more than two thirds, but 0.09 is less than a tenth.
    assert _default_count(np.array([1.0, 1.0, 1.0, 1.0, 1.0, 0.1, 0.09])) == 6
    assert _default_count(np.array([0.6, 0.5])) == _default_count(np.array([])) == 0


def test_clean_labels_are_left_alone():
    table, _ = planted(4000, wrong=0.0)
    result = find_label_issues(table)
    assert result.suspicious or len(result) <= 0.005 * 4000
    assert result.wrong_labels < 0.01 * 4000


def test_without_wrong_labels_the_most_suspicious_hundredth_is_reported():
    draw = torch.Generator().manual_seed(0)
    logit = 3 * torch.randn(1000, 4, generator=draw, dtype=torch.float64)
    label = torch.multinomial(logit.softmax(1), 1, generator=draw)[:, 0]
    table = Table(logit=logit, label=label)
    result = find_label_issues(table)
    assert result.suspicious
    assert len(result) == 10
    assert (logit.argmax(1) != label)[result.rows].all()
    assert result.rows.tolist() == find_label_issues(table, least=1e-12).rows[:10].tolist()
    assert str(result).splitlines()[0] == (
        "table in memory: no label is shown to be wrong, of 1000 images; most suspicious: 10"
    )
    assert any("most of its labels are probably right" in one for one in result.findings())
    assert result.to_dict()["suspicious"] is True
    assert not find_label_issues(table, least=0.9).suspicious


def test_suggestions_are_the_most_probable_other_class():
    table, wrong = planted(strength=6.0)
    result = find_label_issues(table)
    without = table.logit.clone()
    without[torch.arange(len(without)), table.label] = -torch.inf
    assert (result.suggested == without.argmax(1).numpy()[result.rows]).all()
    assert wrong[result.rows].any()


def test_linear_classifiers_stand_in_where_labels_are_not_the_models():
    draw = torch.Generator().manual_seed(0)
    label = torch.arange(400) % 4
    feature = 4 * torch.eye(4, 8)[label] + torch.randn(400, 8, generator=draw)
    wrong = torch.randperm(400, generator=draw)[:20]
    noisy = label.clone()
    noisy[wrong] = (noisy[wrong] + 1) % 4
    result = find_label_issues(Table(feature=feature, label=noisy))
    assert result.cross_validated
    assert set(wrong.tolist()) <= set(result.rows.tolist())
    assert len(result) <= 22
    hit = np.isin(result.rows, wrong.numpy())
    assert (result.suggested[hit] == label.numpy()[result.rows[hit]]).all()
    assert "Cross-validated linear classifiers agree with 9" in str(result)
    own = Table(feature=feature, logit=feature[:, :2], label=noisy, label_space="own", label_names=list("abcd"))
    assert find_label_issues(own).rows.tolist() == result.rows.tolist()
    assert find_label_issues(own, seed=1).cross_validated


def test_a_model_that_has_memorised_its_labels_is_not_believed_but_cross_validation_is():
    draw = torch.Generator().manual_seed(0)
    label = torch.arange(400) % 4
    feature = 4 * torch.eye(4, 8)[label] + torch.randn(400, 8, generator=draw)
    noisy = label.clone()
    noisy[:20] = (noisy[:20] + 1) % 4
    table = Table(feature=feature, logit=9.0 * torch.eye(4)[noisy], label=noisy)
    memorised = find_label_issues(table)
    assert len(memorised) == 0
    assert "If the model was trained on these labels, it has learned the wrong ones, too" in str(memorised)
    assert set(find_label_issues(table, cross_validate=True).rows.tolist()) >= set(range(20))


def test_more_rows_than_the_sample_are_all_examined(monkeypatch):
    monkeypatch.setattr("dubito.active.label_issues._SAMPLE", 500)
    table, wrong = planted(3000, strength=6.0)
    assert wrong[find_label_issues(table).rows].sum() > 0.75 * wrong.sum()


def test_the_rate_is_that_of_counts():
    # Certain predictions: the rate is the share of labels that they contradict.
    q = np.where(np.arange(1000) < 930, 1 - 1e-9, 1e-9)
    assert _rate(q, 10) == pytest.approx(0.07, abs=1e-4)


def test_one_class_has_no_issues():
    result = find_label_issues(Table(feature=torch.eye(4) + 1, label=[2] * 4), folds=2)
    assert len(result) == 0
    assert str(result).splitlines()[0] == "table in memory: no label is shown to be wrong, of 4 images"


def test_json_csv_and_class_names(tmp_path):
    logit = 6 * torch.eye(2)[[0, 1] * 20]
    table = Table(logit=logit, label=[0, 1] * 19 + [1, 1], classes=["cat, tom", "dog"])
    result = find_label_issues(table)
    values = json.loads(json.dumps(result.to_dict()))
    assert [(one["id"], one["label"], one["suggested"], one["row"]) for one in values["issues"]] == [
        ("38", "dog", "cat, tom", 38)
    ]
    assert values["accuracy"]["value"] == 39 / 40
    assert values["expected_right"] == pytest.approx(1 - values["issues"][0]["probability"])
    assert result.lines()[1][1:3] == ["dog", "cat"]
    with result.to_csv(tmp_path / "issues.csv").open(newline="") as file:
        (row,) = csv.DictReader(file)
    assert list(row) == ["id", "label", "suggested", "probability", "row"]


def test_a_least_of_zero_ranks_all_labels():
    table, _ = planted(300)
    # Of labels with a logit 1,000 above the others, the probability is exactly 0: these follow, by row.
    sure = table.logit.clone()
    sure[:100] = 1000 * torch.eye(5, dtype=torch.float64)[table.label[:100]]
    result = find_label_issues(table.extended(logit=sure), least=0.0)
    assert sorted(result.rows.tolist()) == list(range(300))
    assert (np.diff(result.probability) <= 0).all()
    zero = result.rows[result.probability == 0]
    assert len(zero) >= 100
    assert (np.diff(zero) > 0).all()
    some = find_label_issues(table.extended(logit=sure), least=1e-300)
    assert result.rows[: len(some)].tolist() == some.rows.tolist()


def test_what_cannot_be_judged_is_refused():
    table, _ = planted(20)
    with pytest.raises(ValueRangeError, match=r"least must be a number in \[0, 1\]; got -0.1"):
        find_label_issues(table, least=-0.1)
    with pytest.raises(MissingColumnError, match="find_label_issues needs column 'label'"):
        find_label_issues(table.select("logit"))
    with pytest.raises(MissingColumnError, match="find_label_issues needs column 'feature'"):
        find_label_issues(table, cross_validate=True)
    broken = table.logit.clone()
    broken[3, 1] = torch.nan
    with pytest.raises(ValueRangeError, match="find_label_issues: column 'logit' must be finite; row 3"):
        find_label_issues(table.extended(logit=broken))
    with pytest.raises(TableError, match="find_label_issues: the labels must be classes from 0 to 1; got 0 to 2"):
        find_label_issues(Table(logit=torch.eye(2)[[0, 1, 0]], label=[0, 1, 2]))
    own = Table(logit=torch.eye(2)[[0, 1, 0]], label=[0, 1, 1], label_space="own")
    with pytest.raises(TableError, match="find_label_issues needs labels of the model's own classes"):
        find_label_issues(own, cross_validate=False)
    with pytest.raises(ValueRangeError, match="find_label_issues needs at least two classes"):
        find_label_issues(Table(logit=torch.zeros(3, 1), label=[0, 0, 0]))
    with pytest.raises(TableError, match=r"3 of 4 .* Leave them out: table.rows\(table.label >= 0\)"):
        find_label_issues(Table(feature=torch.eye(4), label=[0, -1, -1, -1]))
    with pytest.raises(ValueRangeError, match="folds must be"):
        find_label_issues(Table(feature=torch.eye(4), label=[0, 1, 0, 1]), folds=5)
    for rows in ([], [0]):
        with pytest.raises(TableError, match=f"find_label_issues: table needs at least 2 rows; .* has {len(rows)}"):
            find_label_issues(table.rows(rows))


@pytest.mark.parametrize(("classes", "n", "signal"), [(3, 300, 1.0), (2, 3000, 0.2), (10, 3000, 0.0), (10, 3000, 1.0)])
def test_what_errors_of_a_weak_model_explain_is_not_called_wrong(classes, n, signal):
    draw = torch.Generator().manual_seed(0)
    truth = torch.randint(classes, (n,), generator=draw)
    logit = signal * torch.eye(classes)[truth] + 1.5 * torch.randn(n, classes, generator=draw)
    wrong = torch.rand(n, generator=draw) < 0.05
    label = torch.where(wrong, (truth + 1) % classes, truth)
    issues = find_label_issues(Table(logit=logit, label=label))
    assert issues.suspicious or float(wrong[issues.rows].float().mean()) > 0.5
    assert any("explain the disagreements" in one or "cannot point out" in one for one in issues.findings())
    assert issues.probability.max() < 0.5 or not issues.suspicious
