"""Lengths and angles, in and out: hand-made features, brute force, and what cannot be compared."""

import importlib
import json

import numpy as np
import pytest
import torch
from torch import nn

import dubito
from dubito import metrics
from dubito.errors import MissingColumnError, TableError, ValueRangeError
from dubito.explain.filtering import QUANTILES, filtering
from dubito.table import Provenance, Table

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
    result = filtering(weight, known, ood, **QUICK)
    for side, of in ((result.in_distribution, known), (result.ood, ood)):
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
    for key, mine in (("norm", result.norm_auroc), ("max_cosine", result.max_cosine_auroc)):
        u = -np.concatenate([by_hand(weight, known)[key], by_hand(weight, ood)[key]])
        assert mine == pytest.approx(metrics.interval(metrics.auroc, u, positive, **QUICK))


def test_by_hand():
    # cosines of (3, 4) with the axes: 0.6 and 0.8; of (0, 2): 0 and 1; of zeros: none, which counts as 0
    known, ood = Table(feature=[[3.0, 4.0], [0.0, 2.0]]), Table(feature=[[0.0, 0.0], [0.0, 0.0]])
    result = filtering(torch.tensor([[5.0, 0.0], [0.0, 0.1]]), known, ood, **QUICK)
    assert (result.in_distribution.norm.low, result.in_distribution.norm.high) == (2.0, 5.0)
    assert result.in_distribution.max_cosine.mean == pytest.approx(0.9)
    assert result.in_distribution.other_cosines.mean == pytest.approx(0.3)
    assert result.in_distribution.other_cosines.high == pytest.approx(0.6)
    assert (result.ood.norm.median, result.ood.max_cosine.median, result.ood.other_cosines.median) == (0.0, 0.0, 0.0)
    assert result.norm_auroc.value == result.max_cosine_auroc.value == 1.0


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
    result = filtering(model, known, ood, **QUICK)
    assert (result.name, result.classes) == ("mine", 4)
    for other in (net[2], net[2].weight):
        again = filtering(other, known, ood, **QUICK)
        assert (again.norm_auroc, again.max_cosine_auroc) == (result.norm_auroc, result.max_cosine_auroc)
        assert again.in_distribution == result.in_distribution


def test_json_text_and_plot():
    result = filtering(weights(4, 6), table(50, 6), table(40, 6, 0.5, seed=1), **QUICK)
    plain = json.loads(json.dumps(result.to_dict()))
    assert plain["norm_auroc"]["value"] == result.norm_auroc.value
    assert sum(plain["in_distribution"]["other_cosines"]["counts"]) == 150
    assert len(plain["ood"]["norm"]["edges"]) == len(plain["ood"]["norm"]["counts"]) + 1
    assert str(result).splitlines()[0] == "weights: set 0 (50 rows), set 1 (40 rows)"
    assert str(result).endswith("\n".join(result.findings()))
    pytest.importorskip("matplotlib")
    assert [axes.get_title() for axes in result.plot()] == ["||z||", "all other cosines", "largest cosine"]


def test_what_cannot_be_compared_is_refused():
    weight, known = weights(4, 6), table(10, 6)
    with pytest.raises(TableError, match=r"filtering: table needs at least 1 row; nothing has 0"):
        filtering(weight, known, Table(feature=torch.zeros(0, 6), name="nothing"))
    with pytest.raises(TableError, match=r"set 1 has features of width 7; weights reads 6. Pass one of the same model"):
        filtering(weight, known, table(10, 7, seed=1))
    one, other = (Table(feature=known.feature, provenance=Provenance(weights=by)) for by in ("aa", "bb"))
    with pytest.raises(TableError, match=r"filtering: ood .* must come from one model .* \(bb there, aa here\)"):
        filtering(weight, one, other)
    with pytest.raises(TableError, match="weights has one class, and so no other cosines"):
        filtering(weight[:1], known, known)
    with pytest.raises(MissingColumnError, match="filtering needs column 'feature'"):
        filtering(weight, known, Table(logit=[[1.0, 2.0]]))
    with pytest.raises(ValueRangeError, match="features of broken: 1 of 6 values are NaN or infinite"):
        filtering(weight, known, Table(feature=[[0.0, 1.0, torch.inf, 0.0, 0.0, 0.0]], name="broken"))
