from pathlib import Path

import numpy as np
import pytest
import torch

from dubito.errors import DubitoWarning, GuardError, NotFittedError, TableError, ValueRangeError
from dubito.guard import DensityRatio, Guard, PredictionSets
from dubito.guard.clusters import cluster_classes
from dubito.guard.conformal import conformal_quantile, weighted_quantiles
from dubito.guard.set_scores import label_scores, set_scores, sets_up_to
from dubito.table import Table
from dubito.table.provenance import Provenance

from .world import blobs

pytestmark = pytest.mark.usefixtures("one_thread")
P = torch.tensor([[0.1, 0.4, 0.3, 0.2]])


def test_scores_by_hand() -> None:
    raps = set_scores(P.log(), "raps", penalty=0.5, free_ranks=2)[0]
    # ranks 4, 1, 2, 3: 1 + 0.5 2, the most likely class 0, 0.7, 0.9 + 0.5
    assert raps.tolist() == pytest.approx([2.0, 0.0, 0.7, 1.4])
    assert set_scores(P.log(), "saps", penalty=0.2)[0].tolist() == pytest.approx([1.0, 0.0, 0.6, 0.8])
    ties = set_scores(torch.tensor([[0.4, 0.3, 0.3]]).log(), "saps", penalty=0.2)[0]
    assert ties.tolist() == pytest.approx([0.0, 0.8, 0.8])


@pytest.mark.parametrize("method", ["raps", "saps"])
def test_scores_by_brute_force(method: str) -> None:
    logits = torch.randn(30, 6, generator=torch.Generator().manual_seed(0))
    scores, p = set_scores(logits, method, penalty=0.03, free_ranks=2), logits.double().softmax(1)
    for row in range(30):
        for y in range(6):
            above = p[row] >= p[row, y]
            rank = int(above.sum())
            expected = {
                "raps": float(p[row][above].sum()) + 0.03 * max(0, rank - 2),
                "saps": float(p[row].max()) + 0.03 * (rank - 1),
            }[method]
            assert float(scores[row, y]) == pytest.approx(0.0 if y == int(p[row].argmax()) else expected)


@pytest.mark.parametrize("method", ["lac", "aps", "raps", "saps"])
def test_labels_and_sets_have_the_scores_of_all_classes(method: str) -> None:
    """Also where classes tie, at thresholds that are scores themselves, and in several blocks of rows."""
    made = torch.Generator().manual_seed(0)
    logits = torch.randint(-3, 3, (700, 500), generator=made) + torch.randn(700, 1, generator=made)
    label = torch.randint(500, (700,), generator=made)
    scores = set_scores(logits, method)
    own = label_scores(logits, label, method)
    assert torch.equal(own, scores.gather(1, label[:, None])[:, 0])
    for q in (own[:, None], own[:1, None], torch.tensor([[torch.inf]]).double(), torch.tensor([[0.5]]).double()):
        assert torch.equal(sets_up_to(q, logits, method), scores <= q)


def test_certain_and_right_images_do_not_enlarge_sets() -> None:
    """Nine in ten images are certain and right: one class suffices for them, whatever the others need."""
    label = torch.arange(1000) % 20
    certain = torch.arange(1000) % 10 > 0
    logit = 30.0 * torch.eye(20)[label] * certain[:, None] + torch.randn(
        1000, 20, generator=torch.Generator().manual_seed(0)
    )
    table = Table(logit=logit, label=label)
    for method in ("aps", "raps", "saps"):
        assert PredictionSets(0.85, method).fit(table).sets(table).sum(1).tolist() == [1] * 1000


def draw(n: int, seed: int, c: int = 20) -> Table:
    """Classes above 9 are harder than the others; sites differ, too."""
    made = torch.Generator().manual_seed(seed)
    label, site = torch.randint(c, (n,), generator=made), torch.randint(3, (n,), generator=made)
    strength = torch.where(label < c // 2, 4.0, 2.0) - 1.2 * (site == 2)
    logit = strength[:, None] * torch.eye(c)[label] + torch.randn(n, c, generator=made)
    return Table(logit=logit, label=label, site=site)


def coverage(sets: torch.Tensor, table: Table) -> torch.Tensor:
    return sets.gather(1, table.label[:, None])[:, 0].double()


@pytest.mark.parametrize("method", ["raps", "saps"])
def test_the_true_class_is_in_as_many_sets_as_stated(method: str) -> None:
    """Over 150 calibration sets of 60; the mean may miss by three standard errors."""
    new = draw(1000, 1)
    shares = [
        float(coverage(PredictionSets(0.8, method).fit(draw(60, 100 + seed)).sets(new), new).mean())
        for seed in range(150)
    ]
    mean, error = np.mean(shares), (0.16 / 62 / 150 + 0.16 / 1000) ** 0.5
    assert 0.8 - 3 * error <= mean <= 0.93  # no set is empty, so the accuracy is a lower limit, too
    sets = PredictionSets(0.8, method).fit(draw(2000, 0)).sets(new)
    assert sets.any(1).all()
    assert sets.sum(1).double().mean() <= PredictionSets(0.8, "aps").fit(draw(2000, 0)).sets(new).sum(1).double().mean()


def test_groups_are_covered_each_where_all_together_are_not() -> None:
    new = draw(6000, 1)
    one = coverage(PredictionSets(0.8).fit(draw(3000, 0)).sets(new), new)
    each = coverage(PredictionSets(0.8, per="site").fit(draw(3000, 0)).sets(new), new)
    hard = new.column("site")[:] == 2
    assert float(one[hard].mean()) < 0.7
    for site in range(3):
        inside = new.column("site")[:] == site
        assert float(each[inside].mean()) == pytest.approx(0.8, abs=0.04)


def test_groups_have_their_own_quantiles_even_if_floats_could_not_tell_them_apart() -> None:
    table = draw(300, 0)
    site = torch.where(table.column("site")[:] == 2, 9007199254740993, 9007199254740992)
    sets = PredictionSets(0.8, per="site").fit(table.extended(site=site))
    assert sets.groups_ == (9007199254740992, 9007199254740993)
    own = set_scores(table.logit, "lac").gather(1, table.label[:, None])[:, 0]
    expected = [conformal_quantile(own[site == one], 0.8) for one in sets.groups_]
    assert sets.thresholds_.tolist() == expected
    assert expected[0] < expected[1]
    again = PredictionSets.from_json(sets.to_json())
    other = table.extended(site=torch.where(torch.arange(300) < 9, 5, site))
    with pytest.warns(
        DubitoWarning, match=r"whose 'site' is 5 get every class .* only of 9007199254740992, 9007\d+3\."
    ):
        found = again.sets(other)
    assert found[:9].all()  # of a group that was not there
    assert torch.equal(found[9:], sets.sets(table.extended(site=site))[9:])
    with pytest.raises(TableError, match="no column 'site'"):
        sets.sets(blobs(3, c=20))


def test_groups_with_too_few_images_are_warned_of() -> None:
    table = draw(100, 0).extended(site=["a"] * 95 + ["b"] * 5)
    with pytest.warns(DubitoWarning, match=r"at least 9 images of a group of 'site'; 1 of 2 groups have fewer"):
        assert PredictionSets(0.9, per="site").fit(table).sets(table)[95:].all()


def test_clusters_are_covered_each() -> None:
    """Two clusters, hard and easy classes; over 40 calibration sets of 50 images a class."""
    new = draw(8000, 1)
    shares = []
    for seed in range(40):
        sets = PredictionSets(0.8, clusters=2, seed=seed).fit(draw(1000, 100 + seed))
        assert sets.marginal_ == ()
        inside = coverage(sets.sets(new), new)
        shares.append([float(inside[new.label < 10].mean()), float(inside[new.label >= 10].mean())])
    assert np.mean(shares, axis=0) == pytest.approx([0.8, 0.8], abs=0.03)
    one = coverage(PredictionSets(0.8).fit(draw(1000, 0)).sets(new), new)
    assert float(one[new.label >= 10].mean()) < 0.72


def test_classes_without_a_cluster_get_the_quantile_of_all_and_this_is_stated() -> None:
    table = draw(1000, 0)
    table = table.rows((table.label != 3) | (torch.arange(1000) % 25 == 0))
    with pytest.warns(DubitoWarning, match=r"1 of 20 classes have too few images for a cluster .* on average over all"):
        sets = PredictionSets(0.8, clusters=2).fit(table)
    assert sets.to_json()["marginal"] == [3]
    order = torch.randperm(len(table), generator=torch.Generator().manual_seed(0))[len(table) // 2 :]
    own = set_scores(table.logit, "lac").gather(1, table.label[:, None])[:, 0]
    assert sets.thresholds_[3] == conformal_quantile(own[order], 0.8)
    assert PredictionSets.from_json(sets.to_json()).marginal_ == (3,)


def test_clusters_find_alike_classes() -> None:
    rng = np.random.default_rng(0)
    label = np.repeat(np.arange(8), 40)
    scores = rng.random(320) + 2.0 * (label % 2)
    found = cluster_classes(scores, label, 8, clusters=2, coverage=0.9, fewest=9)
    assert found.tolist() == [0, 1] * 4


def test_weighted_quantiles_by_brute_force() -> None:
    rng = np.random.default_rng(0)
    scores, weights, new = rng.random(50), rng.random(50), rng.random(20) * 3
    for w, q in zip(new, weighted_quantiles(scores, weights, new, 0.9), strict=True):
        fit = [s for s in np.sort(scores) if weights[scores <= s].sum() >= 0.9 * (weights.sum() + w)]
        assert q == (fit[0] if fit else np.inf)


def shifted(n: int, seed: int, mean: float) -> tuple[Table, np.ndarray]:
    """One feature of this mean; the higher, the harder. The density ratio of mean 1 to mean 0 is exp(x - 1 / 2)."""
    rng = np.random.default_rng(seed)
    x, label = rng.normal(mean, 1, n), rng.integers(4, size=n)
    logit = 3 * np.exp(-0.7 * x)[:, None].clip(0, 5) * np.eye(4)[label] + rng.normal(size=(n, 4))
    return Table(feature=x[:, None].astype(np.float32), logit=logit.astype(np.float32), label=label), np.exp(x - 0.5)


def test_weights_keep_the_coverage_under_a_shift() -> None:
    new, ratio = shifted(3000, 1, 1.0)
    plain, known, learned = [], [], []
    estimated = DensityRatio().fit(shifted(4000, 2, 0.0)[0], shifted(4000, 3, 1.0)[0])
    for seed in range(60):
        table, weights = shifted(300, 100 + seed, 0.0)
        plain.append(coverage(PredictionSets(0.8).fit(table).sets(new), new).mean())
        known.append(coverage(PredictionSets(0.8).fit(table, weights).sets(new, ratio), new).mean())
        sets = PredictionSets(0.8).fit(table, estimated.weights(table))
        learned.append(coverage(sets.sets(new, estimated.weights(new)), new).mean())
    assert np.mean(plain) < 0.7
    assert 0.79 <= np.mean(known) <= 0.84
    assert 0.78 <= np.mean(learned) <= 0.85


def test_a_density_ratio_is_the_true_one() -> None:
    ratio = DensityRatio().fit(shifted(20_000, 2, 0.0)[0], shifted(10_000, 3, 1.0)[0])
    new, truth = shifted(1000, 4, 0.5)
    assert np.abs(np.log(ratio.weights(new)) - np.log(truth)).max() < 0.35
    with pytest.raises(NotFittedError, match=r"fit\(source, target\) comes first"):
        DensityRatio().weights(new)


def test_images_of_the_source_are_warned_of(recwarn: pytest.WarningsRecorder) -> None:
    val, test = blobs(200), blobs(100, seed=1, noise=1.5)
    ratio = DensityRatio().fit(val.rows(slice(0, 100)), test)
    ratio.weights(val.rows(slice(100, 200)))
    ratio.weights(test)  # images of the target: labels are not read
    assert not recwarn.list
    again = Table(feature=val.feature + 1e-6, name="cache/val")
    words = r"weights: at least 100 of the 200 images of cache/val are also in the source .* on one half"
    with pytest.warns(DubitoWarning, match=words):
        ratio.weights(again)


def test_features_of_a_density_ratio_are_of_one_model_and_finite() -> None:
    source, target = shifted(100, 0, 0.0)[0], shifted(100, 1, 1.0)[0]
    wide = Table(feature=torch.zeros(5, 2))
    with pytest.raises(TableError, match=r"column 'feature' of target .* must be 1 wide.* got 2"):
        DensityRatio().fit(source, wide)
    source.provenance, target.provenance = Provenance(weights="ab12"), Provenance(weights="cd34")
    with pytest.raises(TableError, match="must come from one model"):
        DensityRatio().fit(source, target)
    target.provenance = Provenance(weights="ab12", calibration="vector 1f2e")  # of the logits alone
    ratio = DensityRatio().fit(source, target)
    with pytest.raises(TableError, match="features must be 1 wide, as in fit; those of table in memory are 2 wide"):
        ratio.weights(wide)
    with pytest.raises(TableError, match="must come from one model"):
        ratio.weights(Table(feature=source.feature, provenance=Provenance(weights="cd34")))
    source.feature[7] = np.nan
    for learn in (lambda: ratio.weights(source), lambda: DensityRatio().fit(source, target)):
        with pytest.raises(ValueRangeError, match="column 'feature' must be finite; row 7 of table in memory"):
            learn()


def test_weights_are_never_dropped_silently() -> None:
    table, weights = shifted(300, 0, 0.0)
    sets = PredictionSets(0.8).fit(table, weights)
    with pytest.raises(ValueRangeError, match="fitted with weights and needs those of the new images"):
        sets.sets(table)
    with pytest.raises(ValueRangeError, match="has no weights"):
        PredictionSets(0.8).fit(table).sets(table, weights)
    with pytest.raises(GuardError, match="a guard does not keep them"):
        Guard.fit(None, table, coverage=0.5, sets=sets)
    with pytest.raises(GuardError, match="not saved"):
        sets.to_json()
    with pytest.raises(ValueRangeError, match="weights must be finite numbers from 0 on"):
        PredictionSets(0.8).fit(table, -weights)
    assert not sets.fit(table).weighted


def test_one_kind_of_parts() -> None:
    with pytest.raises(ValueRangeError, match="got class_wise and clusters"):
        PredictionSets(0.8, class_wise=True, clusters=2)
    with pytest.raises(ValueRangeError, match="weights go with sets for all images"):
        PredictionSets(0.8, class_wise=True).fit(blobs(100), np.ones(100))


def test_a_guard_keeps_and_recalibrates_all_kinds(tmp_path: Path) -> None:
    table = blobs(2000).extended(site=["a", "b"] * 1000)
    for sets in (
        PredictionSets(0.8, "raps", penalty=0.2, free_ranks=1),
        PredictionSets(0.8, per="site"),
        PredictionSets(0.8, "saps", clusters=2),
    ):
        guard = Guard.fit(None, table, coverage=0.5, scores=["entropy"], sets=sets, novel=0.0)
        again = Guard.load(guard.save(tmp_path / "guard"))
        assert again.decide(table).sets == guard.decide(table).sets
        assert again.facts() == guard.facts()
        refitted = again.refit(blobs(1000, seed=3).extended(site=["a", "b"] * 500)).sets
        settings = ("per", "clusters", "penalty", "free_ranks", "method")
        assert [getattr(refitted, name) for name in settings] == [getattr(sets, name) for name in settings]
