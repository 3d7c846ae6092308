import pytest
import torch

from dubito.errors import DubitoError, GuardError, TableError
from dubito.guard.selection import Roles, competing, fitted_scores, must_learn, named_scores
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
from dubito.scores.density import default_density
from dubito.table import Table

from .world import blobs


def test_scores_by_name() -> None:
    assert named_scores(["entropy", MaxProbability()]) == {"entropy": Entropy(), "max_probability": MaxProbability()}
    assert named_scores({"mine": Entropy()}) == {"mine": Entropy()}
    assert named_scores("entropy") == {"entropy": Entropy()}
    with pytest.raises(TableError, match=r"guard.fit: scores in a list must have different names; two are called 'en"):
        named_scores(["entropy", Entropy()])
    with pytest.raises(DubitoError, match="got 'entropie'"):
        named_scores(["entropie"])
    with pytest.raises(TableError, match=r"guard.fit needs at least one score; got none"):
        named_scores([])


@pytest.mark.parametrize(("given", "kind"), [(3, "int"), (Entropy, "the class Entropy"), (torch.zeros(2), "Tensor")])
def test_what_is_no_score_is_told(given: object, kind: str) -> None:
    for scores in ([given], {"mine": given}):
        with pytest.raises(TableError, match=rf"guard.fit: scores must be scores, .*; got {kind}"):
            named_scores.__wrapped__(scores)  # past the type checks of the tests


def test_what_must_learn() -> None:
    assert must_learn(None)
    assert must_learn({"entropy": Entropy(), "density": Density()})
    assert not must_learn({"entropy": Entropy()})
    assert not must_learn({"fitted": Neighbours(k=2).fit(blobs(20))})


def test_given_scores_learn_as_copies() -> None:
    mine, learn, table = Neighbours(k=2), blobs(50), blobs(60, seed=1)
    found = fitted_scores({"near": mine, "t": Temperature()}, table, learn)
    assert not mine.is_fitted
    assert len(found["near"].bank_) == 50
    # A temperature is learned from the images at hand, not from those that the others learn from.
    assert found["t"].temperature_ == Temperature().fit(table).temperature_
    with pytest.raises(GuardError, match="score 'near' is not fitted, and there is nothing to learn from"):
        fitted_scores({"near": Neighbours()}, table, None)


def test_a_density_without_settings_is_the_one_that_suits() -> None:
    learn = blobs(60)
    suiting = default_density(learn).fit(learn)
    assert suiting.covariance != "full"
    assert fitted_scores({"density": Density()}, learn, learn)["density"].covariance == suiting.covariance
    own = fitted_scores({"density": Density(covariance="spherical")}, learn, learn)["density"]
    assert own.covariance == "spherical"


def test_by_default_all_that_columns_allow() -> None:
    found = fitted_scores(None, blobs(100), blobs(100, seed=1))
    assert {"max_probability", "entropy", "density", "neighbours", "temperature"} <= set(found)
    assert all(score.is_fitted for score in found.values())
    right = blobs(100).extended(label=blobs(100).logit.argmax(1))
    assert "temperature" not in fitted_scores(None, right, None)  # no best one where all is right
    with pytest.raises(GuardError, match="no score can be computed from table in memory, which has label"):
        fitted_scores(None, Table(label=[0, 1]), None)


def test_a_head_from_the_shelf_does_not_compete_unless_it_is_given() -> None:
    found = {"head": UncertaintyHead(), "entropy": Entropy()}
    assert competing(found, chosen_by_user=False) == ["entropy"]
    assert competing(found, chosen_by_user=True) == ["head", "entropy"]


def test_roles() -> None:
    table = Table(logit=torch.zeros(2, 3))
    scores = {"m": MaxProbability(), "density": Density(), "mutual_information:tiles_2": MutualInformation("tiles_2")}
    assert Roles.of(scores, table) == Roles("entropy", "mutual_information:tiles_2", "density")
    assert "entropy" in scores  # it stands in, so it must be there
    scores = {"expected": ExpectedEntropy(), "near": Neighbours()}
    assert Roles.of(scores, table) == Roles("expected", "near", None)
    assert Roles.of({"m": MaxProbability()}, Table(logit=torch.zeros(2, 1))).names == ()
