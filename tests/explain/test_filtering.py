"""Lengths, angles and patterns, in and out: hand-made features, brute force, and what cannot be compared."""

import importlib
import json

import numpy as np
import pytest
import torch
from torch import nn

import dubito
from dubito import metrics
from dubito.errors import MissingColumnError, TableError, ValueRangeError
from dubito.explain.filtering import QUANTILES, filtering, patterns
from dubito.table import Table

subject = importlib.import_module("dubito.explain.filtering")  # the package's attribute is the function
QUICK = {"resamples": 60}


def table(n: int, d: int, scale: float = 1.0, seed: int = 0) -> Table:
    z = torch.randn(n, d, generator=torch.Generator().manual_seed(seed))
    return Table(feature=scale * z, name=f"set {seed}")


def weights(c: int, d: int) -> torch.Tensor:
    return torch.randn(c, d, generator=torch.Generator().manual_seed(99))


def by_hand(weight: torch.Tensor, of: Table) -> dict[str, np.ndarray]:
    """One row and one class at a time."""
    norms, largest, others = [], [], []
    for z in of.feature.double().numpy():
        cosine = [z @ w / np.linalg.norm(z) / np.linalg.norm(w) for w in weight.double().numpy()]
        norms.append(np.linalg.norm(z))
        largest.append(max(cosine))
        others += sorted(cosine)[:-1]
    return {"norm": np.array(norms), "max_cosine": np.array(largest), "other_cosines": np.array(others)}


@pytest.mark.parametrize("cells", [2**21, 64])
def test_numbers_are_those_of_brute_force_whatever_the_blocks(monkeypatch, cells):
    monkeypatch.setattr(subject, "_CELLS", cells)
    weight, known, ood = weights(5, 8), table(150, 8, 2.0), table(90, 8, 1.5, seed=1)
    found = filtering(weight, known, ood, **QUICK)
    for side, of in ((found.in_distribution, known), (found.ood, ood)):
        expected = by_hand(weight, of)
        for key in ("norm", "max_cosine"):
            mine, values = getattr(side, key), expected[key]
            assert list(mine.quantiles.values()) == pytest.approx(np.quantile(values, QUANTILES).tolist())
            assert (mine.mean, mine.low, mine.high) == pytest.approx((values.mean(), values.min(), values.max()))
            assert mine.counts.tolist() == np.histogram(values, mine.edges.numpy())[0].tolist()
            assert int(mine.counts.sum()) == len(of)
        mine, values = side.other_cosines, expected["other_cosines"]
        assert list(mine.quantiles.values()) == pytest.approx(np.quantile(values, QUANTILES).tolist(), abs=0.02)
        assert (mine.mean, mine.low, mine.high) == pytest.approx((values.mean(), values.min(), values.max()))
        assert mine.counts.tolist() == np.histogram(values, mine.edges.numpy())[0].tolist()
        assert int(mine.counts.sum()) == 4 * len(of)
    positive = torch.arange(240) >= 150
    for key, mine in (("norm", found.norm_auroc), ("max_cosine", found.max_cosine_auroc)):
        u = -np.concatenate([by_hand(weight, known)[key], by_hand(weight, ood)[key]])
        assert mine == pytest.approx(metrics.interval(metrics.auroc, u, positive, **QUICK))


def test_by_hand():
    # cosines of (3, 4) with the axes: 0.6 and 0.8; of (0, 2): 0 and 1; of zeros: none, which counts as 0
    known, ood = Table(feature=[[3.0, 4.0], [0.0, 2.0]]), Table(feature=[[0.0, 0.0], [0.0, 0.0]])
    found = filtering(torch.tensor([[5.0, 0.0], [0.0, 0.1]]), known, ood, **QUICK)
    assert (found.in_distribution.norm.low, found.in_distribution.norm.high) == (2.0, 5.0)
    assert found.in_distribution.max_cosine.mean == pytest.approx(0.9)
    assert found.in_distribution.other_cosines.mean == pytest.approx(0.3)
    assert found.in_distribution.other_cosines.high == pytest.approx(0.6)
    assert (found.ood.norm.median, found.ood.max_cosine.median, found.ood.other_cosines.median) == (0.0, 0.0, 0.0)
    assert found.norm_auroc.value == found.max_cosine_auroc.value == 1.0


def test_quantiles_of_counted_cosines_are_exact_to_a_bin():
    weight, known = weights(40, 16), table(400, 16)
    mine = filtering(weight, known, known, **QUICK).in_distribution.other_cosines
    expected = np.quantile(by_hand(weight, known)["other_cosines"], QUANTILES)
    assert list(mine.quantiles.values()) == pytest.approx(expected.tolist(), abs=0.0011)


def test_findings_follow_the_intervals():
    weight, known = weights(4, 6), table(200, 6)
    weak = filtering(weight, known, table(200, 6, 0.3, seed=1), **QUICK)
    assert weak.norm_auroc.low > 0.5
    first, second = weak.findings()
    assert first == (
        f"Features of OOD images are weaker: median {weak.ood.norm.median:.3g} against "
        f"{weak.in_distribution.norm.median:.3g}; the network filters them by strength "
        f"(AUROC {weak.norm_auroc.value:.3f}, {weak.norm_auroc.low:.3f} to {weak.norm_auroc.high:.3f})."
    )
    assert second.startswith("Combinations of features of OOD images are neither less like those of a class nor")
    strong = filtering(weight, known, table(200, 6, 3.0, seed=1), **QUICK)
    assert "are stronger" in strong.findings()[0]
    assert "does not filter them by strength (AUROC" in strong.findings()[0]
    along = Table(feature=weight[torch.arange(200) % 4] + 0.1 * table(200, 6, seed=2).feature, name="classes")
    assert "are less like those of a class" in (finding := filtering(weight, along, known, **QUICK).findings()[1])
    assert "the network filters them by combination (AUROC" in finding


def test_a_classifier_its_layer_and_its_weight_say_the_same():
    net = nn.Sequential(nn.Linear(3, 6), nn.ReLU(), nn.Linear(6, 4))
    model = dubito.wrap(net, name="mine")
    model.features(torch.zeros(2, 3))
    known, ood = table(30, 6), table(20, 6, seed=1)
    found = filtering(model, known, ood, **QUICK)
    assert (found.name, found.classes) == ("mine", 4)
    for other in (net[2], net[2].weight):
        again = filtering(other, known, ood, **QUICK)
        assert (again.norm_auroc, again.max_cosine_auroc) == (found.norm_auroc, found.max_cosine_auroc)
        assert again.in_distribution == found.in_distribution


def test_json_text_and_plot():
    found = filtering(weights(4, 6), table(50, 6), table(40, 6, 0.5, seed=1), **QUICK)
    plain = json.loads(json.dumps(found.to_dict()))
    assert plain["norm_auroc"]["value"] == found.norm_auroc.value
    assert sum(plain["in_distribution"]["other_cosines"]["counts"]) == 150
    assert len(plain["ood"]["norm"]["edges"]) == len(plain["ood"]["norm"]["counts"]) + 1
    assert str(found).splitlines()[0] == "weights: set 0 (50 rows), set 1 (40 rows)"
    assert str(found).endswith("\n".join(found.findings()))
    pytest.importorskip("matplotlib")
    assert [axes.get_title() for axes in found.plot()] == ["||z||", "all other cosines", "largest cosine"]


def test_what_cannot_be_compared_is_refused():
    weight, known = weights(4, 6), table(10, 6)
    with pytest.raises(TableError, match=r"filtering: table needs at least 1 row; nothing has 0"):
        filtering(weight, known, Table(feature=torch.zeros(0, 6), name="nothing"))
    with pytest.raises(TableError, match=r"set 1 has features of width 7; weights reads 6. Pass one of the same model"):
        filtering(weight, known, table(10, 7, seed=1))
    with pytest.raises(TableError, match="weights has one class, and so no other cosines"):
        filtering(weight[:1], known, known)
    with pytest.raises(MissingColumnError, match="filtering needs column 'feature'"):
        filtering(weight, known, Table(logit=[[1.0, 2.0]]))
    with pytest.raises(ValueRangeError, match="features of broken: 1 of 6 values are NaN or infinite"):
        filtering(weight, known, Table(feature=[[0.0, 1.0, torch.inf, 0.0, 0.0, 0.0]], name="broken"))


MEANS = torch.tensor([[0.0, 5.0, 0.0, 1.0], [3.0, 0.0, 0.0, 2.0], [0.0, 0.0, 4.0, 0.0]])
"""Of three classes over four neurons: neuron 1 belongs to the first, 0 and 3 to the second, 2 to the third."""


def rows_of(n: int, labels: list[int], noise: float = 0.0) -> Table:
    label = torch.tensor(labels)[torch.arange(n) % len(labels)]
    where = torch.tensor([labels.index(y) for y in label.tolist()])
    draw = torch.randn(n, 4, generator=torch.Generator().manual_seed(0))
    return Table(feature=MEANS[where] + noise * draw, label=label, name="known")


def test_neurons_are_grouped_by_class_and_fall_within_it():
    found = patterns(rows_of(6, [0, 1, 2]), Table(feature=[[2.0, 2.0, 2.0, 2.0]], name="ood"))
    assert found.order.tolist() == [1, 0, 3, 2]
    assert found.owner.tolist() == [0, 1, 1, 2]
    assert torch.equal(found.mean.float(), MEANS[:, [1, 0, 3, 2]])
    assert found.ood_mean.tolist() == [2.0, 2.0, 2.0, 2.0]
    assert found.names == ["0", "1", "2"]


def test_numbers_by_hand():
    # The OOD rows (0, 0, 2, 0) and (0, 3, 0, 4): cosine 1 with class 2; with class 0 (15 + 4) / (5 sqrt 26).
    found = patterns(rows_of(6, [0, 1, 2]), Table(feature=[[0.0, 0.0, 2.0, 0.0], [0.0, 3.0, 0.0, 4.0]], name="ood"))
    assert found.own_cosine.tolist() == pytest.approx([1.0, 1.0, 1.0])
    assert found.own_norm.tolist() == pytest.approx([26**0.5, 13**0.5, 4.0])
    assert found.ood_share.tolist() == [0.5, 0.0, 0.5]
    assert found.ood_cosine == pytest.approx((1 + 19 / (5 * 26**0.5)) / 2)
    assert found.ood_norm == pytest.approx(3.5)


def test_labels_need_not_be_dense_and_have_names():
    table = Table(feature=MEANS, label=[2, 5, 4], classes=list("abcdef"), name="known")
    found = patterns(table, table)
    assert found.classes.tolist() == [2, 4, 5]
    assert found.names == ["c", "e", "f"]
    assert found.owner.tolist() == [0, 1, 2, 2]
    assert torch.equal(found.mean.float(), MEANS[[0, 2, 1]][:, found.order])
    foreign = Table(feature=MEANS, label=[2, 5, 4], classes=list("ab"), label_space="own")
    assert patterns(foreign, foreign).names == ["2", "4", "5"]  # the names are those of the logits, not of these labels


def test_examples_are_rows_of_their_class_drawn_by_the_seed():
    table = rows_of(300, [7, 1, 4], noise=0.1)
    found = patterns(table, table, examples=5, seed=3)
    assert [len(rows) for rows in found.examples] == [5, 5, 5]
    for y, rows in zip(found.classes.tolist(), found.examples, strict=True):
        own = table.feature[table.label == y][:, found.order]
        assert all(bool((own == row).all(1).any()) for row in rows)
        assert len(rows.unique(dim=0)) == 5
    assert torch.equal(found.ood_examples, patterns(table, table, examples=5, seed=3).ood_examples)
    assert not torch.equal(found.ood_examples, patterns(table, table, examples=5, seed=4).ood_examples)
    few = patterns(rows_of(4, [0, 1, 2]), Table(feature=MEANS[:1]), examples=5)
    assert [len(rows) for rows in few.examples] == [2, 1, 1]
    assert len(few.ood_examples) == 1


def test_statistics_are_those_of_all_rows_over_many_blocks():
    known = rows_of(5000, [0, 1, 2], noise=0.5)
    ood = Table(feature=torch.rand(4500, 4, generator=torch.Generator().manual_seed(1)), name="ood")
    found = patterns(known, ood)
    means = torch.stack([known.feature[known.label == y].double().mean(0) for y in range(3)])
    assert torch.allclose(found.mean, means[:, found.order])
    cosine = torch.cosine_similarity(ood.feature.double()[:, None], means[None], dim=2)
    assert found.ood_cosine == pytest.approx(float(cosine.amax(1).mean()))
    assert found.ood_share.tolist() == pytest.approx((torch.bincount(cosine.argmax(1), minlength=3) / 4500).tolist())
    rows = known.feature[known.label == 1].double()
    others = torch.stack([torch.cat([rows[:i], rows[i + 1 :]]).mean(0) for i in range(len(rows))])
    assert float(found.own_cosine[1]) == pytest.approx(float(torch.cosine_similarity(rows, others, dim=1).mean()))


def test_a_row_is_not_compared_with_itself():
    # Two rows at a right angle: each has the cosine 0 with the other; with their common mean it would be 0.71.
    table = Table(feature=[[1.0, 0.0], [0.0, 1.0], [2.0, 2.0]], label=[0, 0, 1])
    found = patterns(table, table)
    assert found.own_cosine[0].item() == pytest.approx(0.0)


def test_a_class_of_one_row_has_no_others():
    table = Table(feature=[[1.0, 0.0], [0.0, 1.0], [2.0, 2.0]], label=[0, 0, 1], name="known")
    found = patterns(table, Table(feature=[[3.0, 3.0]]))
    assert found.own_cosine.isnan().tolist() == [False, True]
    assert json.loads(json.dumps(found.to_dict(), allow_nan=False))["own_cosine"] == [pytest.approx(0.0), None]
    assert found.findings()[0].startswith("Rows have a cosine of 0.00 with the mean of others")  # not 0.50
    alone = patterns(table.rows([0, 2]), Table(feature=[[3.0, 3.0]]))
    assert alone.findings()[::2] == [
        "Every class has one row, so none has a cosine with others of its class; OOD rows have one of 1.00 with the "
        "pattern they resemble most.",
        "100% of the OOD rows resemble '1' most; that class has one row.",
    ]


def test_patterns_as_json_text_and_plot():
    boots = Table(feature=2 * MEANS[[2, 2, 2, 0]], name="digits")
    found = patterns(rows_of(6, [0, 1, 2]), boots)
    assert found.findings() == [
        "Rows have a cosine of 1.00 with the mean of others of their class, OOD rows one of 1.00 with the pattern they "
        "resemble most.",
        f"OOD rows are {found.ood_norm / float(found.own_norm.mean()):.2f} times as long as in-distribution rows.",
        "75% of the OOD rows resemble '2' most; for rows of that class the cosine is 1.00.",
    ]
    assert json.loads(json.dumps(found.to_dict()))["ood_share"] == [0.25, 0.0, 0.75]
    assert str(found).startswith("known (3 classes) against digits\n")
    pytest.importorskip("matplotlib")
    assert len(found.plot()) == 4
    assert len(found.plot(classes=[2])) == 2
    long = Table(feature=MEANS, label=[0, 1, 2], classes=["hen, Gallus", "x" * 30, "b"], name="caches/birds")
    labels = [axes.get_ylabel() for axes in patterns(long, long).plot()]
    assert labels == ["hen", "x" * 17 + "…", "b", "birds"]
    with pytest.raises(ValueRangeError, match=r"labels that occur, such as \[0, 1, 2\]; got \[9\]."):
        found.plot(classes=[9])


def test_what_cannot_be_shown_is_refused():
    known = rows_of(6, [0, 1, 2])
    with pytest.raises(TableError, match="patterns: ood needs at least 1 row; nothing has 0"):
        patterns(known, Table(feature=torch.zeros(0, 4), name="nothing"))
    with pytest.raises(TableError, match=r"column 'feature' of ood .* must be 4 wide, as in known; got 3"):
        patterns(known, Table(feature=[[1.0, 2.0, 3.0]], name="ood"))
    with pytest.raises(MissingColumnError, match="patterns needs column 'label'"):
        patterns(known.select("feature"), known)
    with pytest.raises(ValueRangeError, match="examples must be a whole number, at least 1; got 0"):
        patterns(known, known, examples=0)
    with pytest.raises(TableError, match="label of known must be a number, at least 0; got -1"):
        patterns(rows_of(6, [0, -1]), known)
    with pytest.raises(ValueRangeError, match="features of broken: 1 of 4 values are NaN"):
        patterns(known, Table(feature=[[torch.nan, 0.0, 0.0, 0.0]], name="broken"))


def test_records_start_with_the_class_that_ood_rows_resemble_most():
    found = patterns(rows_of(6, [0, 1, 2]), Table(feature=2 * MEANS[[2, 2, 0]], name="digits"))
    assert [row["class"] for row in found.records()] == ["2", "0", "1"]
    assert found.to_pandas()["ood_share"].tolist() == pytest.approx([2 / 3, 1 / 3, 0])
    many = Table(feature=torch.eye(30), label=list(range(30)), name="many")
    assert (len(patterns(many, many).records()), len(patterns(many, many).lines())) == (30, 1 + 10)
