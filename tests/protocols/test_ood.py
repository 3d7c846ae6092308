"""OOD against in-distribution images: by data set, pooled, and what the pooled value hides."""

import json

import pytest
import torch

from dubito import metrics
from dubito.errors import TableError
from dubito.protocols.ood import ood_auroc_by_dataset
from dubito.scores import Entropy, MaxProbability
from dubito.table import Provenance, Table

QUICK = {"resamples": 40}


def confident(by: float, n: int = 150, seed: int = 0) -> Table:
    """Logits whose first class leads by about so much: the larger, the surer."""
    noise = torch.rand(n, 2, generator=torch.Generator().manual_seed(seed))
    return Table(logit=noise + torch.tensor([by, 0.0]), name=f"by {by}")


@pytest.fixture(scope="module")
def id_table() -> Table:
    return confident(2.0)


def test_values_are_those_of_the_metric(id_table):
    ood = {"harder": confident(1.7, seed=1), "easier": confident(2.6, n=80, seed=2)}
    result = ood_auroc_by_dataset({"entropy": Entropy(), "max_probability": MaxProbability()}, id_table, ood, **QUICK)
    for name, score in (("entropy", Entropy()), ("max_probability", MaxProbability())):
        u = score.score(id_table)
        parts = {key: score.score(table) for key, table in ood.items()}
        for key, other in parts.items():
            both = torch.cat([u, other])
            expected = metrics.interval(metrics.auroc, both, torch.arange(len(both)) >= 150, **QUICK)
            assert result.by_dataset[name][key] == expected
        both = torch.cat([u, parts["harder"], parts["easier"]])
        assert result.pooled[name].value == metrics.auroc(both, torch.arange(len(both)) >= 150)
    assert result.by_dataset["entropy"]["easier"].high < 0.5 < result.by_dataset["entropy"]["harder"].low
    assert result.rows == {"harder": 150, "easier": 80}


def test_opposite_values_are_reported(id_table):
    result = ood_auroc_by_dataset(
        {"u": Entropy()}, id_table, {"harder": confident(1.0, seed=1), "easier": confident(3.0, seed=2)}, **QUICK
    )
    (sentence,) = result.findings()
    below, above = result.by_dataset["u"]["easier"].value, result.by_dataset["u"]["harder"].value
    assert result.pooled["u"].value == pytest.approx(0.5, abs=0.02)
    assert sentence == (
        f"u: the pooled {result.pooled['u'].value:.3f} hides opposite values. Less uncertain than the "
        f"in-distribution images: easier {below:.3f}; more uncertain: harder {above:.3f}."
    )
    assert str(result).endswith(sentence)


@pytest.mark.parametrize(
    "ood",
    [
        {"harder": confident(1.0, seed=1), "harder too": confident(1.2, seed=2)},
        {"harder": confident(1.0, seed=1), "like it": confident(2.0, seed=3)},
    ],
)
def test_what_is_not_opposite_is_not_reported(id_table, ood):
    assert ood_auroc_by_dataset({"u": Entropy()}, id_table, ood, **QUICK).findings() == []


def test_text_and_json(id_table):
    result = ood_auroc_by_dataset({"u": Entropy()}, id_table, {"a": confident(1.0, seed=1)}, **QUICK)
    assert result.lines()[0] == ["score", "a", "pooled"]
    assert result.lines()[1][1] == result.lines()[1][2]  # one set, so pooled is the same
    assert str(result).startswith("AUROC of OOD images against by 2.0 (150 images)\nscore  a ")
    plain = json.loads(result.to_json())
    assert plain["pooled"]["u"]["value"] == result.pooled["u"].value
    assert plain["by_dataset"]["u"]["a"]["high"] == result.by_dataset["u"]["a"].high
    assert (plain["in_distribution_rows"], plain["rows"], plain["findings"]) == (150, {"a": 150}, [])
    assert plain["published_pooled"] == 0.503


def test_errors(id_table):
    one, other = (Table(logit=id_table.logit, provenance=Provenance(weights=by)) for by in ("aa", "bb"))
    with pytest.raises(TableError, match=r"ood_auroc_by_dataset: ood 'cub' .* one model .* \(bb there, aa here\)"):
        ood_auroc_by_dataset({"entropy": Entropy()}, one, {"cub": other}, **QUICK)
    with pytest.raises(TableError, match="ood_auroc_by_dataset needs at least one OOD table"):
        ood_auroc_by_dataset({"u": Entropy()}, id_table, {})
    with pytest.raises(TableError, match=r"ood_auroc_by_dataset \(none\): table needs at least 1 row; by 2.0 has 0"):
        ood_auroc_by_dataset({"u": Entropy()}, id_table, {"none": id_table.rows([])})


def test_plot_shows_every_data_set_and_pooled(id_table, axes):
    scores = {"u": Entropy(), "v": MaxProbability()}
    ood = {"a": confident(1.0, seed=1), "b": confident(2.5, seed=2)}
    result = ood_auroc_by_dataset(scores, id_table, ood, **QUICK)
    assert result.plot(axes) is axes
    assert [text.get_text() for text in axes.get_yticklabels()] == ["a", "b", "pooled"]
    assert axes.containers[1].lines[0].get_xdata().tolist() == [
        result.by_dataset["v"]["a"].value,
        result.by_dataset["v"]["b"].value,
        result.pooled["v"].value,
    ]
