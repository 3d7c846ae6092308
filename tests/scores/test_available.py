"""One policy for which scores a table allows, for the library and the command line."""

import pytest
import torch

from dubito.errors import MissingColumnError, NotFittedError, TableError
from dubito.scores import (
    Density,
    Entropy,
    MaxProbability,
    MutualInformation,
    Neighbours,
    REGrad,
    Temperature,
    _last_layer,
    available_scores,
    default_density,
)
from dubito.scores.available import default_score, why_not_comparable
from dubito.scores.density import QUICK
from dubito.table import Provenance, Table

LEARNED = {"neighbours", "density", "mahalanobis", "temperature", "mental", "laplace"} | {
    *("mahalanobis_pp", "nnguide", "prototypes"),
    *("kl_matching", "residual", "vim", "fdbd", "nci", "react"),
}
REFUSED = {"scale", "ash"}
"""They learn too, but not from features with negative values."""


def images(n: int, seed: int = 0, **columns: torch.Tensor) -> Table:
    generator = torch.Generator().manual_seed(seed)
    feature = torch.randn(n, 6, generator=generator)
    weight = torch.randn(6, 4, generator=torch.Generator().manual_seed(9))
    label = torch.randint(4, (n,), generator=generator)
    return Table(feature=feature, logit=feature @ weight, label=label, name=f"set {seed}", **columns)


def test_the_one_score_of_a_table_where_none_is_named():
    table = images(40)
    assert default_score(table) == (MaxProbability(), "max_probability")
    assert default_score(table, Entropy()) == (Entropy(), "entropy")
    score, words = default_score(table.select("feature"), Entropy())
    assert isinstance(score, Neighbours)
    assert score.is_fitted
    assert words.startswith("neighbours, the distance of an image to its tenth nearest neighbour")
    with pytest.raises(MissingColumnError, match="feature"):
        default_score(table.select("label"))


def members(n: int, m: int = 3) -> torch.Tensor:
    return torch.randn(n, m, 4, generator=torch.Generator().manual_seed(2))


def truncated() -> Table:
    """A gradient probe that wrote one of three layers."""
    probe = {"settings": {"last": 1}, "notes": {"depth": [2], "of": 3}}
    return Table(logit=[[1.0, 0.0]], gradient=[[1.0]], provenance=Provenance(probes={"gradient": probe}))


def test_all_that_the_columns_allow_and_reasons_for_the_others():
    result = available_scores(images(80))
    assert {"max_probability", "entropy", "energy", "grad_norm"} <= set(result.scores)
    assert result.left_out["neighbours"] == "it learns from feature: give other in-distribution images to fit on"
    assert set(result.unfitted) == LEARNED | REFUSED
    assert result.left_out["regrad"].startswith("there is no column 'gradient'; it is written by the gradient probe")
    assert {"regrad", "mutual_information", "perturbation_variance"} <= set(result.not_extracted)
    assert result.left_out["head"].startswith("no head ships for the model of the table")
    assert not result.fit_seconds


def test_those_that_learn_are_fitted():
    result = available_scores(images(80), images(80, 1))
    assert set(result.scores) >= LEARNED
    assert set(result.fit_seconds) == LEARNED
    assert {name for name, why in result.left_out.items() if "hardly any of them negative" in why} == REFUSED


def test_scores_for_ood_images_alone_can_be_left_out():
    result = available_scores(images(80), images(80, 1), ood_only=False)
    assert {"temperature", "neighbours", "gen"} <= set(result.scores)
    left = {"kl_matching", "residual", "vim", "fdbd", "nci", "react", "scale", "ash"}
    assert not left & set(result.scores)
    assert {result.left_out[name] for name in left} == {"it is designed to find OOD images alone; name it to use it"}
    named = available_scores(images(80), images(80, 1), names=["vim"], ood_only=False)
    assert set(named.scores) == {"vim"}


def test_the_last_layer_is_recovered_once_for_all_scores(monkeypatch):
    calls = []
    recover = _last_layer.linear_logits
    monkeypatch.setattr(_last_layer, "linear_logits", lambda pairs: calls.append(1) or recover(pairs))
    table = images(80, 1)
    result = available_scores(images(80), table)
    assert {"mental", "residual", "vim", "fdbd", "react"} <= set(result.scores)
    assert len(calls) == 1
    available_scores(images(80), table)  # nothing is kept: the table may have been changed
    assert len(calls) == 2
    assert all(score.is_fitted for score in result.scores.values())


def test_a_column_of_the_model_itself_that_is_missing_is_worth_a_note():
    result = available_scores(Table(logit=[[1.0, 0.0]]), head=False)
    assert "head" not in result.left_out
    assert "grad_norm" in result.left_out
    assert "grad_norm" not in result.not_extracted


def test_the_density_suits_the_table_unless_it_was_requested():
    table, fit = images(30), images(90, 1)
    quick = available_scores(table, fit)
    expected = default_density(fit, most=QUICK)
    assert quick.scores["density"] == expected != Density()
    assert quick.remarks == [
        "density: 4 Gaussians (one per class), tied covariances of 6 features, by EM, 0.0 MB, to suit 90 images of "
        "set 1."
    ]
    assert available_scores(table, fit, names=["density"]).scores["density"] == Density()
    tied = available_scores(table, fit, settings={"density": {"covariance": "diagonal"}})
    assert tied.scores["density"] == Density(covariance="diagonal")
    assert not tied.remarks


def test_a_score_of_members_for_each_ensemble():
    one = available_scores(images(40, members_logit=members(40))).scores
    assert one["mutual_information"] == MutualInformation(of="members")
    assert not any(":" in name for name in one)
    both = images(40, members_logit=members(40), dropout_logit=members(40, 2))
    result = available_scores(both).scores
    assert result["mutual_information:dropout"] == MutualInformation(of="dropout")
    chosen = available_scores(both, settings={"mutual_information": {"of": "dropout"}}).scores
    assert chosen["mutual_information"] == MutualInformation(of="dropout")
    assert "mutual_information:members" not in chosen


def test_one_member_is_refused_when_it_is_scored():
    result = available_scores(images(5, members_logit=members(5, 1)))
    with pytest.raises(TableError, match="has one member"):
        result.scores["mutual_information"].score(images(5, members_logit=members(5, 1)))


def test_a_truncated_gradient_is_left_out_unless_named():
    table = truncated()
    result = available_scores(table)
    assert "has 1 of 3 layers" in result.left_out["regrad"]
    assert "regrad" not in result.not_extracted
    kept = available_scores(table, names=["regrad"], settings={"regrad": {"layers": "kept"}}).scores
    assert kept == {"regrad": REGrad(layers="kept")}
    with pytest.raises(TableError, match="has 1 of 3 layers"):
        available_scores(table, names=["regrad"])


def test_what_was_requested_and_cannot_be_made_is_an_error():
    table = Table(logit=[[1.0, 0.0]])
    with pytest.raises(MissingColumnError, match=r"mahalanobis\.score needs column 'feature'"):
        available_scores(table, names=["mahalanobis"])
    with pytest.raises(NotFittedError, match="temperature learns from logit, label: give other in-distribution"):
        available_scores(table, settings={"temperature": {}})


def test_scores_are_comparable_where_both_tables_have_the_same_columns():
    subset, many = (Provenance(probes={"dropout": {"settings": {"passes": n}}}) for n in (10, 20))
    here = Table(dropout_logit=members(3), provenance=subset, name="here")
    there = Table(dropout_logit=members(3), provenance=many, name="there")
    for score in (MutualInformation(of="dropout"), Temperature(score_of=MutualInformation(of="dropout"))):
        assert why_not_comparable(score, here, here) is None
        assert why_not_comparable(score, here, there) == (
            "'dropout' of here and of there were extracted with different settings (passes=10 and passes=20)"
        )
        assert "lacks column" in str(why_not_comparable(score, here, Table(logit=[[0.0, 1.0]])))
