import inspect

import pytest
import torch

from dubito.errors import DubitoError, GuardError, MissingColumnError, TableError
from dubito.guard.selection import Roles, fitted_scores, select_scores, split
from dubito.scores import (
    Density,
    Entropy,
    ExpectedEntropy,
    MaxProbability,
    MutualInformation,
    Neighbours,
    Temperature,
    UncertaintyHead,
)
from dubito.scores.available import AvailableScores
from dubito.scores.density import default_density
from dubito.table import Table

from .world import blobs


def selected(scores: object) -> tuple[list[str], dict[str, int]]:
    """The scores of a selection, past the type checks of the tests, and how many images each part has."""
    selection, _, rows = inspect.unwrap(select_scores)(blobs(200), scores, None, labelled=True, novel=0.0, seed=0)
    return list(selection.combination.aurc), rows


def test_scores_by_name() -> None:
    assert set(selected(["entropy", MaxProbability()])[0]) == {"entropy", "max_probability"}
    assert selected({"mine": Entropy()})[0] == ["mine"]
    assert selected("entropy")[0] == ["entropy"]
    with pytest.raises(TableError, match=r"Guard.fit: scores in a list must have different names; two are called 'en"):
        selected(["entropy", Entropy()])
    with pytest.raises(DubitoError, match="got 'entropie'"):
        selected(["entropie"])
    with pytest.raises(TableError, match=r"Guard.fit needs at least one score; got none"):
        selected([])


@pytest.mark.parametrize(("original", "kind"), [(3, "int"), (Entropy, "the class Entropy"), (torch.zeros(2), "Tensor")])
def test_what_is_no_score_is_reported(original: object, kind: str) -> None:
    for scores in ([original], {"mine": original}):
        with pytest.raises(TableError, match=rf"Guard.fit: scores must be scores, .*; got {kind}"):
            selected(scores)


def test_a_tenth_is_for_reference_and_the_rest_calibrates() -> None:
    assert [len(part) for part in split(blobs(1000), seed=0)] == [100, 900]
    assert [len(part) for part in split(blobs(300), seed=0)] == [40, 260]  # at least 40 ...
    assert [len(part) for part in split(blobs(100), seed=0)] == [20, 80]  # ... if a fifth suffices
    assert selected(None)[1] == {"train": 0, "reference": 40, "calibrate": 160}


def test_a_score_that_needs_more_than_the_reference_images_asks_for_train() -> None:
    """Sixty of six hundred rows recover no layer of a hundred features."""
    draw = torch.Generator().manual_seed(0)
    feature, weight = torch.randn(1200, 100, generator=draw), torch.randn(100, 3, generator=draw)
    table = Table(feature=feature, logit=feature @ weight, label=torch.arange(1200) % 3, name="vit")
    few, train = table.rows(slice(600)), table.rows(slice(600, 1200))
    with pytest.raises(GuardError, match=r"Of the 600 images of vit, scores learn from the 60 reference.* Pass train="):
        select_scores(few, ["vim"], None, labelled=True, novel=0.0, seed=0)
    with pytest.raises(GuardError, match=r"k must be .* Pass train="):
        select_scores(few, [Neighbours(k=61)], None, labelled=True, novel=0.0, seed=0)
    assert select_scores(few, ["vim"], train, labelled=True, novel=0.0, seed=0)[2]["train"] == 600
    with pytest.raises(MissingColumnError, match="feature"):
        select_scores(few.select("logit", "label"), ["vim"], None, labelled=True, novel=0.0, seed=0)


def test_scores_are_compared_by_what_they_have_not_learned_from() -> None:
    """The nearest neighbour of a reference image among all of them is itself; among the other folds, it never is."""
    mine = {"near": Neighbours(k=1), "entropy": Entropy()}
    selection = inspect.unwrap(select_scores)(blobs(600), mine, None, labelled=False, novel=0.0, seed=0)[0]
    reference, _ = split(blobs(600), seed=0)
    assert torch.all(selection.scores["near"].score(reference) < 1e-6)
    assert torch.all(selection.reference_quantiles["near"] > 1e-6)


def test_with_train_nothing_is_cross_fitted() -> None:
    options = {"labelled": False, "novel": 0.0, "seed": 0}
    selection, _, rows = inspect.unwrap(select_scores)(blobs(600), [Neighbours(k=1)], blobs(50, seed=1), **options)
    assert rows["train"] == 50
    reference, _ = split(blobs(600), seed=0)
    expected = Neighbours(k=1).fit(blobs(50, seed=1)).score(reference).sort().values
    torch.testing.assert_close(selection.reference_quantiles["neighbours"], expected)


def test_given_scores_learn_as_copies() -> None:
    mine, learn, table = Neighbours(k=2), blobs(50), blobs(60, seed=1)
    result, _ = fitted_scores({"near": mine, "t": Temperature()}, table, learn)
    assert not mine.is_fitted
    assert len(result["near"].bank_) == 50
    # A temperature is learned from the images at hand, not from those that the others learn from.
    assert result["t"].temperature_ == Temperature().fit(table).temperature_
    assert len(fitted_scores({"near": mine}, table)[0]["near"].bank_) == 60  # without such images, these


def test_a_density_without_settings_is_the_one_that_suits() -> None:
    learn = blobs(60)
    suiting = default_density(learn).fit(learn)
    assert suiting.covariance != "full"
    for mine, covariance in ((Density(), suiting.covariance), (Density(covariance="spherical"), "spherical")):
        assert fitted_scores({"density": mine}, learn, learn)[0]["density"].covariance == covariance


def test_by_default_all_that_columns_allow() -> None:
    result, competing = fitted_scores(None, blobs(100), blobs(100, seed=1))
    assert competing == list(result)
    assert competing[0] == "temperature"
    assert {"max_probability", "entropy", "density", "neighbours", "temperature"} <= set(result)
    assert all(score.is_fitted for score in result.values())
    right = blobs(100).extended(label=blobs(100).logit.argmax(1))
    assert "temperature" not in fitted_scores(None, right, None)[0]  # no best one where all is right
    with pytest.raises(
        GuardError, match=r"from table in memory, which has label\. Extract logits, or pass scores=\[...\]"
    ):
        fitted_scores(None, Table(label=[0, 1]), None)


def test_a_head_from_the_shelf_does_not_compete_unless_it_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    both, table = {"head": UncertaintyHead(), "entropy": Entropy()}, blobs(100).select("feature", "logit")
    monkeypatch.setattr(UncertaintyHead, "is_fitted", True)
    monkeypatch.setattr("dubito.guard.selection.available_scores", lambda *_, **__: AvailableScores(dict(both)))
    assert fitted_scores(None, table, None) == (both, ["entropy"])
    assert fitted_scores(both, table, None) == (both, ["head", "entropy"])


def test_roles() -> None:
    table = Table(logit=torch.zeros(2, 3))
    scores = {"m": MaxProbability(), "density": Density(), "mutual_information:tiles_2": MutualInformation("tiles_2")}
    assert Roles.of(scores, table) == Roles("entropy", "mutual_information:tiles_2", "density")
    assert "entropy" in scores  # it stands in, so it must be there
    scores = {"expected": ExpectedEntropy(), "near": Neighbours()}
    assert Roles.of(scores, table) == Roles("expected", "near", None)
    assert Roles.of({"m": MaxProbability()}, Table(logit=torch.zeros(2, 1))) == (None, None, None)
