import math
from pathlib import Path

import pytest
import torch

from dubito.errors import DubitoWarning, GuardError, NotFittedError, TableError, ValueRangeError
from dubito.guard import Guard
from dubito.guard.conformal import PredictionSets, conformal_quantile, fitted_sets, needed_for_sets, set_scores
from dubito.table import Table
from dubito.table.provenance import Provenance

from .world import blobs


def data(n: int, seed: int = 0, c: int = 4) -> Table:
    draw = torch.Generator().manual_seed(seed)
    label = torch.randint(c, (n,), generator=draw)
    logit = 2 * torch.eye(c)[label] + torch.randn(n, c, generator=draw)
    return Table(logit=logit, label=label)


def test_scores_by_hand() -> None:
    logits = torch.tensor([[0.2, 0.5, 0.3]]).log()
    assert set_scores(logits, "lac")[0].tolist() == pytest.approx([0.8, 0.5, 0.7])
    assert set_scores(logits, "aps")[0].tolist() == pytest.approx([1.0, 0.0, 0.8])


def test_equally_likely_classes_have_the_same_score_unless_one_is_predicted() -> None:
    scores = set_scores(torch.tensor([[0.4, 0.2, 0.2, 0.2], [0.25, 0.25, 0.25, 0.25]]).log(), "aps")
    assert scores[0].tolist() == pytest.approx([0.0, 1.0, 1.0, 1.0])
    assert scores[1].tolist() == pytest.approx([0.0, 1.0, 1.0, 1.0])


def test_quantile_counts_the_new_image_too() -> None:
    scores = torch.arange(1.0, 20.0).double()  # 19 of them: (19 + 1) 0.9 = 18
    assert conformal_quantile(scores, 0.9) == 18
    assert conformal_quantile(scores, 0.95) == 19
    assert conformal_quantile(scores, 0.96) == math.inf


@pytest.mark.parametrize(("coverage", "n"), [(0.9, 9), (0.95, 19), (0.5, 1), (0.99, 99)])
def test_so_many_are_needed(coverage: float, n: int) -> None:
    assert needed_for_sets(coverage) == n
    assert math.isfinite(conformal_quantile(torch.arange(float(n)).double(), coverage))
    assert math.isinf(conformal_quantile(torch.arange(float(n - 1)).double(), coverage))


@pytest.mark.parametrize("method", ["lac", "aps"])
def test_the_true_class_is_in_as_many_sets_as_promised(method: str) -> None:
    """Over 100 calibration sets of 40, and 200 new images for each; the mean may miss by three standard errors."""
    new = data(200, seed=1)
    share = []
    for seed in range(100):
        sets = PredictionSets(0.8, method).fit(data(40, seed=100 + seed)).sets(new)
        share.append(float(sets.gather(1, new.label[:, None]).double().mean()))
    mean = sum(share) / len(share)
    # The coverage of one calibration set has a standard deviation of about sqrt(0.8 0.2 / 42); new images are the same.
    assert mean >= 0.8 - 3 * (0.16 / 42 / 100) ** 0.5 - 3 * (0.16 / 200) ** 0.5
    assert mean <= 0.95


def test_class_wise_holds_for_the_hard_class_where_marginal_does_not() -> None:
    def unequal(n: int, seed: int) -> Table:
        draw = torch.Generator().manual_seed(seed)
        label = torch.randint(2, (n,), generator=draw)
        logit = torch.stack([torch.zeros(n), (2.0 * label - 1) * torch.tensor([4.0, 0.3])[label]], 1)
        return Table(logit=logit + torch.randn(n, 2, generator=draw), label=label)

    new, hard = unequal(4000, 1), unequal(4000, 1).label == 1
    result = {}
    for class_wise in (False, True):
        sets = PredictionSets(0.9, "lac", class_wise=class_wise).fit(unequal(2000, 0)).sets(new)
        result[class_wise] = float(sets[hard, 1].double().mean())
    assert result[False] < 0.87
    assert result[True] == pytest.approx(0.9, abs=0.025)


def test_a_class_with_too_few_images_is_in_every_set() -> None:
    table = data(40, c=2).extended(label=torch.tensor([0] * 35 + [1] * 5))
    with pytest.warns(DubitoWarning, match=r"needs at least 9 images of a class; 1 of 2 classes have fewer"):
        sets = PredictionSets(0.9, class_wise=True).fit(table)
    assert sets.sets(table)[:, 1].all()
    assert PredictionSets.from_json(sets.to_json()).sets(table)[:, 1].all()


def test_too_few_images_are_reported() -> None:
    with pytest.raises(GuardError, match=r"coverage 0.9 need at least 9 labelled images; table in memory has 8"):
        PredictionSets(0.9).fit(data(8))
    assert PredictionSets(0.9).fit(data(9)).rows_ == 9


def test_what_else_can_be_wrong() -> None:
    table = data(30)
    with pytest.raises(NotFittedError, match=r"sets: fit\(table\) comes first"):
        PredictionSets().sets(table)
    with pytest.raises(ValueRangeError, match=r"coverage must be a number in \(0, 1\)"):
        PredictionSets(1.0)
    with pytest.raises(TableError, match="labels of the model's own classes"):
        PredictionSets().fit(Table(logit=table.logit, label=table.label, label_space="own"))
    with pytest.raises(TableError, match="must be classes from 0 to 3; got 0 to 9"):
        PredictionSets().fit(Table(logit=table.logit, label=torch.arange(30) % 10))
    with pytest.warns(DubitoWarning):
        fitted = PredictionSets(class_wise=True).fit(table)
    for sets in (fitted, PredictionSets().fit(table)):
        with pytest.raises(TableError, match="4 classes were fitted; table in memory has 3"):
            sets.sets(Table(logit=torch.zeros(2, 3)))
    with pytest.raises(ValueRangeError, match="penalty goes with the methods raps and saps; got method 'aps'"):
        PredictionSets(method="aps", penalty=0.1)


def test_tables_of_another_model_are_refused() -> None:
    mine, other = Provenance(model="one", weights="ab12"), Provenance(model="two", weights="cd34")
    table, new = data(50), data(5, seed=1)
    table.provenance, new.provenance = mine, other
    sets = PredictionSets().fit(table)
    with pytest.raises(TableError, match=r"must come from one model .*\(two, not one\)"):
        sets.sets(new)
    kept = PredictionSets.from_json(sets.to_json(), mine)
    with pytest.raises(TableError, match="must come from one model"):
        kept.sets(new)
    new.provenance = mine
    assert torch.equal(kept.sets(new), sets.sets(new))


def test_a_guard_keeps_the_model_of_its_sets(tmp_path: Path) -> None:
    table, new = blobs(400), blobs(5, seed=1)
    table.provenance, new.provenance = Provenance(weights="ab12"), Provenance(weights="cd34")
    guard = Guard.fit(None, table, 0.3, scores=["entropy"], novel=0.0)
    for sets in (guard.sets, Guard.load(guard.save(tmp_path / "guard")).sets):
        assert sets is not None
        with pytest.raises(TableError, match="must come from one model"):
            sets.sets(new)


@pytest.mark.parametrize("method", ["lac", "aps"])
def test_logits_that_are_not_finite_have_no_sets(method: str) -> None:
    new = data(5, seed=1)
    new.logit[3, 0] = math.nan
    with pytest.raises(ValueRangeError, match="column 'logit' must be finite; row 3 of table in memory holds nan"):
        PredictionSets(0.8, method).fit(data(50)).sets(new)


def test_no_rows_have_no_sets() -> None:
    sets = PredictionSets().fit(data(30)).sets(Table(logit=torch.zeros(0, 4)))
    assert sets.shape == (0, 4)


def test_aps_is_never_empty_and_lac_may_be() -> None:
    """A model that is too sure of itself: most calibration images have their class at 0.6, a new one has 0.99."""
    logit = torch.tensor([[0.6, 0.4]]).log().expand(30, 2)
    known, new = Table(logit=logit, label=torch.zeros(30).long()), Table(logit=torch.tensor([[0.01, 0.99]]).log())
    assert PredictionSets(0.9, "aps").fit(known).sets(new).tolist() == [[False, True]]
    unsure = Table(logit=torch.zeros(1, 3))
    sure = Table(logit=torch.tensor([[3.0, 0.0, 0.0]]).expand(30, 3), label=torch.zeros(30).long())
    assert PredictionSets(0.9, "lac").fit(sure).sets(unsure).tolist() == [[False, False, False]]


def test_a_guard_fits_a_copy_so_that_two_guards_do_not_share_one() -> None:
    mine = PredictionSets(0.8, "lac")
    one, other = (fitted_sets(mine, data(50, seed=seed), labelled=True) for seed in (0, 1))
    assert one is not None and other is not None  # noqa: PT018 (for mypy)
    assert mine.thresholds_ is None
    assert (one.coverage, one.method) == (0.8, "lac")
    assert not torch.equal(one.thresholds_, other.thresholds_)


def test_the_default_is_left_out_where_it_cannot_be() -> None:
    assert fitted_sets(True, data(9), labelled=True) is not None
    assert fitted_sets(True, data(8), labelled=True) is None
    assert fitted_sets(True, data(9), labelled=False) is None
    assert fitted_sets(False, data(9), labelled=True) is None
    with pytest.raises(
        ValueRangeError, match=r"sets must be PredictionSets\(...\), True or False; got 0.9\. Use sets=Pred"
    ):
        fitted_sets(0.9, data(9), labelled=True)


def test_class_wise_holds_with_few_images_of_a_class() -> None:
    """Twelve images of class 1, over 200 calibration sets: its coverage is 12/13 on average, as ceil(13 0.9) = 12."""
    share = []
    for seed in range(200):
        draw = torch.Generator().manual_seed(seed)
        label = (torch.arange(72) >= 60).long()
        table = Table(logit=torch.eye(2)[label] + torch.randn(72, 2, generator=draw), label=label)
        new = Table(logit=torch.tensor([0.0, 1.0]) + torch.randn(100, 2, generator=draw))
        share.append(float(PredictionSets(0.9, "lac", class_wise=True).fit(table).sets(new)[:, 1].double().mean()))
    assert sum(share) / 200 == pytest.approx(12 / 13, abs=0.02)


def test_class_wise_sets_of_no_class_are_refused() -> None:
    with pytest.raises(GuardError, match=r"at least 99 images of a class; none of 4 classes has so many in blobs\."):
        PredictionSets(0.99, class_wise=True).fit(blobs(200))
