"""What each cause costs: by hand, against references, and what is said where it cannot be told."""

import json
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import pytest
import torch
from sklearn.metrics import roc_auc_score

from dubito.diagnosis._balanced import balanced, points
from dubito.diagnosis._given import default_density, repeated_rows, told
from dubito.diagnosis._sentences import ALL, REST, TOGETHER
from dubito.diagnosis.causes import diagnose
from dubito.errors import DubitoWarning, MissingColumnError, TableError, ValueRangeError
from dubito.metrics import auroc, interval
from dubito.scores import Cool, Entropy
from dubito.scores.density import Density
from dubito.table import Table
from dubito.types import Score

QUICK = {"resamples": 40}
DOUBTFUL, SURE = [5.0, 5.0, -100.0], [3.0, 0.0, 0.0]
"""H = log 2 and 0.37, but cooled log 2 and 1.09: by entropy the first is the more uncertain, by cool the second."""


@dataclass
class First(Score):
    """The first feature, as it is."""

    name = "first"
    kind = "epistemic"
    needs = ("feature",)

    def rows(self, batch: Table) -> torch.Tensor:
        return batch.feature[:, 0]


@dataclass
class Watched(Score):
    """The first feature again, after having seen others."""

    fits: ClassVar[list[list[float]]] = []

    name = "watched"
    kind = "epistemic"
    needs = ("feature",)
    learns_from = ("feature",)
    learned = ("seen_",)

    def learn(self, table: Table) -> None:
        self.seen_ = len(table)
        Watched.fits.append(table.feature[:, 0].tolist())

    def rows(self, batch: Table) -> torch.Tensor:
        return batch.feature[:, 0]


def blobs(n: int, *, scale: float = 6.0, seed: int = 0, name: str = "table in memory", classes: int = 4) -> Table:
    """Features around the weights of their classes; the smaller the scale, the less so."""
    weight = torch.nn.functional.normalize(torch.randn(classes, 8, generator=torch.Generator().manual_seed(99)), dim=1)
    draw = torch.Generator().manual_seed(seed)
    label = torch.arange(n) % classes
    feature = scale * weight[label] + torch.randn(n, 8, generator=draw)
    return Table(feature=feature, logit=3 * feature @ weight.T, label=label, name=name)


@pytest.fixture(scope="module")
def found():
    foreign = {"far": blobs(150, scale=0.0, seed=2), "near": blobs(90, scale=4.0, seed=3)}
    return diagnose(blobs(200, seed=1, name="caches/mine"), foreign, train=blobs(400), resamples=200)


def test_by_hand():
    known = Table(feature=[[0.0, 0.0], [2.0, 0.0], [0.5, 0.0]], logit=[SURE] * 3)
    foreign = Table(feature=[[1.0, 1.0], [3.0, 1.0], [0.5, 1.0]], logit=[DOUBTFUL] * 3)
    found = diagnose(known, foreign, density=First(), **QUICK)["ood"]
    # D: 1 beats 0 and 0.5, 3 beats all, 0.5 beats 0 and ties with 0.5: (2 + 3 + 1.5) / 9
    expected = {"max_probability": 1, "entropy": 1, "cool": 0, "density": 6.5 / 9}
    assert {name: value.value for name, value in found.auroc.items()} == pytest.approx(expected)
    parts = {"saturation": 0 - 1, "extrapolation": 6.5 / 9 - 0, "overlap": 1 - 6.5 / 9}
    assert {name: value.value for name, value in found.causes.items()} == pytest.approx(parts)
    assert found.together.value == pytest.approx(6.5 / 9 - 1)
    assert found.rows == 3
    assert all(value.spread == 0 for value in found.auroc.values())  # equally many: all draws are the same


@pytest.mark.parametrize(
    ("known", "foreign", "features", "expected"),
    [
        # B, C and D in order: three parts.
        (SURE, SURE, (0, 5), {"saturation": 0.0, "extrapolation": 0.5, "overlap": 0.0}),
        # B = 1, C = 0, D = 1: cooling hurts, the density does not.
        (SURE, DOUBTFUL, (0, 5), {TOGETHER: 0.0, "overlap": 0.0}),
        # B = 1, C = 0, D = 0: both hurt.
        (SURE, DOUBTFUL, (5, 0), {ALL: 0.0}),
        # B = 0, C = 1, D = 0: the density hurts.
        (DOUBTFUL, SURE, (5, 0), {"saturation": 1.0, REST: 0.0}),
    ],
)
def test_what_is_compared(known, foreign, features, expected):
    inside, outside = (
        Table(feature=level + torch.rand(9, 1), logit=[logit] * 9)
        for level, logit in zip(features, (known, foreign), strict=True)
    )
    found = diagnose(inside, outside, density=First(), **QUICK)["ood"]
    assert {name: part.value for name, part in found.parts.items()} == pytest.approx(expected)
    if len(expected) == 1:
        assert (found.lead, found.dominant) == (None, None)
    else:
        first, second, *_ = sorted(expected.values(), reverse=True)
        assert found.lead.value == pytest.approx(first - second)
        assert found.dominant == (found.ranked[0] if first > second else None)


def test_parts_add_up_to_what_entropy_misses(found):
    for causes in found.all:
        assert sum(value.value for value in causes.causes.values()) == pytest.approx(1 - causes.auroc["entropy"].value)
        assert sum(part.value for part in causes.parts.values()) == pytest.approx(1 - causes.auroc["entropy"].value)
        assert causes.together.value == pytest.approx(
            causes.causes["saturation"].value + causes.causes["extrapolation"].value
        )


def test_draws_are_balanced_and_close_to_all_pairs():
    known, foreign = blobs(300, seed=1), blobs(60, scale=3.0, seed=2)
    found = diagnose(known, foreign, density=First(), draws=200, **QUICK)["ood"]
    both = [torch.cat([score.score(known), score.score(foreign)]) for score in (Entropy(), Cool(), First())]
    truth = np.arange(360) >= 300
    assert found.rows == 60
    for name, scores in zip(("entropy", "cool", "density"), both, strict=True):
        value = found.auroc[name]
        # A mean over 200 draws, each with that spread, around the AUROC of all pairs.
        assert value.value == pytest.approx(roc_auc_score(truth, scores), abs=4 * value.spread / 200**0.5)
        assert 0 < value.spread < 0.05


def test_intervals_are_those_of_the_bootstrap():
    known, foreign = blobs(200, seed=1), blobs(200, scale=3.0, seed=2)
    found = diagnose(known, foreign, density=First(), resamples=1500)["ood"].auroc["entropy"]
    scores = torch.cat([Entropy().score(known), Entropy().score(foreign)])
    reference = interval(auroc, scores, torch.arange(400) >= 200, resamples=1500, seed=1)
    assert found.value == pytest.approx(reference.value)
    assert (found.low, found.high) == pytest.approx((reference.low, reference.high), abs=0.012)


def test_resamples_are_paired():
    rng = np.random.default_rng(0)
    known, foreign = rng.normal(size=(1, 80)), rng.normal(1, size=(1, 50))
    twice = balanced(np.repeat(known, 2, 0), np.repeat(foreign, 2, 0), draws=3, resamples=30, seed=0)
    assert (twice.resampled[:, 0] == twice.resampled[:, 1]).all()
    assert len(set(twice.resampled[:, 0].tolist())) > 10
    assert (twice.drawn[:, 0] == twice.drawn[:, 1]).all()


def test_known_rows_are_drawn_alike_for_every_foreign_table():
    rng = np.random.default_rng(0)
    known, same = rng.normal(size=(1, 80)), np.zeros((1, 50))  # all foreign rows alike: only known ones matter
    first, second = (balanced(known, same, draws=3, resamples=30, seed=0, number=number) for number in (0, 1))
    assert (first.resampled == second.resampled).all()
    foreign = rng.normal(size=(1, 50))
    first, second = (balanced(known, foreign, draws=3, resamples=30, seed=0, number=number) for number in (0, 1))
    assert (first.resampled != second.resampled).any()


def test_resampled_values_count_ties():
    known, foreign = np.array([[0.0, 0.0, 1.0]]), np.array([[1.0, 0.0]])
    values = set(balanced(known, foreign, draws=1, resamples=200, seed=0).resampled[:, 0].round(4).tolist())
    # Two of either side: every pair is won, tied or lost, so the AUROC is a multiple of one eighth.
    assert values <= {0.0, 0.25, 0.5, 0.75, 1.0}
    assert len(values) == 5


def test_mean_over_sets(found):
    for name in ("entropy", "density"):
        values = [causes.auroc[name].value for causes in found.by_set.values()]
        assert found.mean.auroc[name].value == pytest.approx(sum(values) / 2)
        widths = [causes.auroc[name].high - causes.auroc[name].low for causes in found.by_set.values()]
        assert found.mean.auroc[name].high - found.mean.auroc[name].low < max(widths)
    assert diagnose(blobs(40), blobs(40, seed=1), density=First(), **QUICK).mean is None


def test_same_seed_same_answer():
    known, foreign = blobs(80, seed=1), blobs(50, scale=2.0, seed=2)
    first, again, other = (diagnose(known, foreign, seed=seed, **QUICK) for seed in (0, 0, 1))
    assert first.to_json() == again.to_json()
    assert first.to_json()["sets"] != other.to_json()["sets"]


def test_without_train_known_is_split():
    Watched.fits.clear()
    known = Table(feature=torch.arange(21.0)[:, None], logit=torch.randn(21, 3))
    foreign = Table(feature=100 + torch.arange(5.0)[:, None], logit=torch.randn(5, 3))
    found = diagnose(known, foreign, density=Watched(), **QUICK)
    (fitted,), scored = Watched.fits, found.inside["density"].tolist()
    assert sorted(fitted + scored) == list(range(21))
    assert (len(fitted), found.known_rows) == (10, 11)
    assert found.fitted_on == "half of known (10 rows drawn with seed 0), which is not scored"


def test_train_is_fitted_on_and_all_of_known_is_scored():
    Watched.fits.clear()
    score = Watched()
    known, foreign = blobs(20, seed=1), blobs(20, seed=2)
    found = diagnose(known, foreign, train=blobs(30, seed=3, name="a/train"), density=score, **QUICK)
    assert (len(Watched.fits[0]), found.known_rows) == (30, 20)
    assert found.fitted_on == "train (30 rows)"
    assert not hasattr(score, "seen_")  # the user's own is left as it was
    diagnose(known, foreign, density=Watched().fit(blobs(30, seed=3)), **QUICK)
    assert len(Watched.fits) == 2  # by the line above; one that is fitted is not fitted again


def test_saturated_shares_and_accuracy():
    # In float32, softmax of (20, 0) rounds to 1: exp(-20) = 2e-9 is below half a unit of the last place, 6e-8.
    logit = [[20.0, 0.0], [10.0, 0.0], [0.0, 30.0], [0.0, 1.0]]
    known = Table(feature=torch.randn(4, 2), logit=logit, label=[0, 1, 1, 1])
    foreign = Table(feature=torch.randn(2, 2), logit=logit[1::2])
    found = diagnose(known, foreign, density=First(), **QUICK)
    assert (found.saturated, found["ood"].saturated, found.accuracy) == (0.5, 0.0, 0.75)


def test_lengths_and_angles_with_a_classifier():
    linear = torch.nn.Linear(2, 3, bias=False)
    linear.weight.data = torch.tensor([[2.0, 0.0], [0.0, 1.0], [-1.0, 0.0]])
    known = Table(feature=[[3.0, 4.0], [0.0, 0.0]], logit=[[1.0, 0.0, 0.0]] * 2)
    found = diagnose(known, Table(feature=[[-1.0, 0.0], [0.0, -2.0]], logit=[[1.0, 0, 0]] * 2), density=First(),
                     classifier=linear, **QUICK)  # fmt: skip
    assert found.inside["norm"].tolist() == [5.0, 0.0]
    assert found.inside["cosine"].tolist() == pytest.approx([0.8, 0.0])
    assert found.outside["ood"]["cosine"].tolist() == pytest.approx([1.0, 0.0])


@pytest.mark.parametrize(
    ("rows", "width", "classes", "expected"),
    [
        (4000, 16, 10, ("class", "full", 100)),  # 4000 >= 5 x 10 x 16
        (700, 16, 10, ("class", "tied", 100)),
        (100, 64, 10, ("class", "diagonal", 100)),
        (1500, 4, 150, ("class", "tied", 0)),  # more than a hundred: in closed form
        (400, 8, 100, ("free", "full", 100)),  # four rows a class: 400 / 50 clusters, 400 >= 5 x 8 x 8
    ],
)
def test_default_density(rows, width, classes, expected):
    table = Table(feature=torch.randn(rows, width), label=torch.arange(rows) % classes)
    density = default_density(table)
    assert (density.start, density.covariance, density.max_iterations) == expected
    assert default_density(table, "spherical").covariance == "spherical"


def test_default_density_without_labels_and_its_words():
    table = Table(feature=torch.randn(120, 4), logit=torch.randn(120, 10))
    density = default_density(table)
    assert (density.components, density.start) == (2, "free")
    assert told(density, table) == "2 Gaussians (found by k-means), full covariances of 4 features, by EM, 0.0 MB"
    many = Table(feature=torch.zeros(2000, 100), label=torch.arange(2000) % 200)
    assert told(default_density(many), many) == (
        "200 Gaussians (one a class), tied covariances of 100 features, in closed form, 0.2 MB"
    )
    assert told(First(), table) == "first"


def test_too_large_a_density_is_refused_beforehand():
    with pytest.raises(ValueRangeError, match=r"memory=1e-06 allows 1e-06 GB"):
        diagnose(blobs(40), blobs(40, seed=1), density=Density(memory=1e-6), **QUICK)


def test_words(found):
    words = found.findings()
    assert list(words) == ["far", "near", "mean"]
    assert len(words["far"]) == 4
    assert words["far"][0].startswith("The entropy misses ")
    assert "No score on these features can repair it" in words["near"][3]
    assert "of mine and" in words["near"][1]  # of caches/mine, the folder alone
    text = str(found)
    assert text.startswith("AUROC of foreign images against mine (200 images, accuracy ")
    for part in ("A max p", "D density", "2 extrapolation", "95% interval", "over draws", "fitted on train (400 rows)"):
        assert part in text


def test_words_where_cooling_hurts():
    known = Table(feature=torch.rand(30, 1), logit=[SURE] * 30)
    found = diagnose(known, Table(feature=torch.rand(30, 1), logit=[DOUBTFUL] * 30), density=First(), **QUICK)
    verdict, saturation, extrapolation, overlap = found.findings()["ood"]
    assert verdict == "There is little to explain: the entropy misses 0.0 points of AUROC."
    assert "-100.0 [-100.0, -100.0] points, negative. Cooling makes it worse: it lets all small logits" in saturation
    assert "make up for what cooling lost. Against the entropy itself, the density brings -" in extrapolation
    assert "The density is a worse guide than the entropy" in extrapolation
    assert "`max_probability` misses 0.0 points only, so overlap is at most that." in overlap
    thousand = torch.zeros(30, 1000)
    thousand[:, 0] = 12
    raised = torch.full((30, 1000), -40.0)
    raised[:, :2] = 0
    found = diagnose(
        Table(feature=known.feature, logit=thousand),
        Table(feature=known.feature + 2, logit=raised),
        density=First(),
        **QUICK,
    )
    assert "0.1 x logits flatten the softmax of 1000 classes" in found.findings()["ood"][1]


def test_words_where_nothing_can_be_told():
    draw = torch.Generator().manual_seed(0)
    known = Table(feature=5 + torch.rand(60, 1), logit=[SURE] * 60)
    mixed = [DOUBTFUL] * 45 + [[4.0, 0.0, 0.0]] * 15  # three quarters more uncertain than the known, one quarter less
    foreign = Table(feature=torch.rand(60, 1, generator=draw), logit=mixed)
    verdict, _, extrapolation, _ = diagnose(known, foreign, density=First(), **QUICK).findings()["ood"]
    # C = 0 as well as D: nothing is there to be made up for.
    assert verdict == (
        "The entropy misses 25.0 points of AUROC. Neither cooling nor the density does better, so the causes cannot be "
        "told apart."
    )
    assert "make up for" not in extrapolation


def test_words_where_saturation_or_the_density_rules():
    # Entropy and cool turned around: known DOUBTFUL, foreign SURE. So C - B = 1.
    known = Table(feature=torch.rand(30, 1), logit=[DOUBTFUL] * 30)
    foreign = Table(feature=torch.rand(30, 1), logit=[SURE] * 30)
    found = diagnose(known, foreign, density=First(), **QUICK)["ood"]
    assert (found.ranked[0], found.dominant) == ("saturation", "saturation")
    words = diagnose(known, foreign, density=First(), **QUICK).findings()["ood"]
    assert (
        "The largest part is saturation, 100.0 [100.0, 100.0]; it is ahead of extrapolation and overlap t" in words[0]
    )
    assert "The score `cool`, the entropy of 0.1 x logits, gets these points back" in words[1]
    # Known and foreign alike in logits, apart in features: all is extrapolation.
    apart = Table(feature=torch.rand(30, 1) + 5, logit=[DOUBTFUL] * 30)
    words = diagnose(known, apart, density=First(), **QUICK).findings()["ood"]
    assert "The largest part is extrapolation with aleatoric overlap, 50.0 [50.0, 50.0]" in words[0]
    assert "The score `density` gets these points back" in words[2]
    assert words[3] == (
        "Feature overlap costs next to nothing, 0.0 [0.0, 0.0] points: the features tell ood from known."
    )
    # And with features that lie closer than the known ones.
    closer = Table(feature=torch.rand(30, 1) - 5, logit=[DOUBTFUL] * 30)
    words = diagnose(known, closer, density=First(), **QUICK).findings()["ood"]
    assert "The largest part is extrapolation and overlap together, 50.0 [50.0, 50.0]" in words[0]
    assert "so overlap is at most that" in words[3]
    assert "D is even below 50 %" in words[3]


def test_a_lead_by_chance_is_called_so():
    # B = C = D = 1/2 but for chance: saturation and extrapolation are both about zero, overlap one half.
    draw = torch.Generator().manual_seed(0)
    known, foreign = (
        Table(feature=torch.rand(40, 1, generator=draw), logit=torch.randn(40, 3, generator=draw)) for _ in range(2)
    )
    found = diagnose(known, foreign, density=First(), **QUICK)
    assert found["ood"].dominant == "overlap"
    assert "Saturation costs nothing that could be told from zero" in found.findings()["ood"][1]
    # D - C and 1 - D are both 1/4 where D = 3/4 and C = 1/2.
    known = Table(feature=torch.arange(40.0)[:, None], logit=[DOUBTFUL] * 40)
    half = torch.cat([torch.full((20, 1), 99.0), torch.arange(0.5, 40, 2)[:, None]])
    found = diagnose(known, Table(feature=half, logit=[DOUBTFUL] * 40), density=First(), **QUICK)
    assert found["ood"].dominant is None
    assert found.findings()["ood"][0].endswith(": within the interval, so neither can be called the main cause.")


def test_json(found):
    plain = json.loads(json.dumps(found.to_json()))
    assert list(plain["sets"]) == ["far", "near", "mean"]
    assert plain["sets"]["far"]["causes"]["overlap"]["value"] == found["far"].causes["overlap"].value
    assert (plain["known"], plain["known_rows"], plain["classes"], plain["draws"]) == ("mine", 200, 4, 5)
    assert plain["findings"] == found.findings()
    assert points(-0.0004) == "0.0"


def test_the_same_table_twice_is_warned_of():
    table = blobs(60)
    with pytest.warns(DubitoWarning, match=r"60 of 60 images of ood have the very features of images of known"):
        found = diagnose(table, table, density=First(), **QUICK)
    assert found["ood"].auroc["density"].value == pytest.approx(0.5)
    assert found["ood"].causes["overlap"].value == pytest.approx(0.5)
    assert found.notes[0] in str(found)
    assert repeated_rows(blobs(30).rows(slice(20, 30)), blobs(30).rows(slice(0, 25))) == 5
    with pytest.warns(DubitoWarning, match=r"20 of 60 images of known have the very features of images that the"):
        diagnose(table, blobs(60, seed=1), train=table.rows(slice(0, 20)), **QUICK)


def made(source: str, name: str, n: int = 8) -> Table:
    table = blobs(n)
    return Table(feature=table.feature, logit=table.logit, source=source, maker={"name": name}, name=f"of {name}")


@pytest.mark.parametrize(
    ("error", "text", "call"),
    [
        (TableError, "needs at least one OOD table", lambda t: diagnose(t, {})),
        (TableError, "ood must have at least 2 rows; it has 0. Look at", lambda t: diagnose(t, t.rows(slice(0, 0)))),
        (TableError, "cats must have at least 2 rows; it has 1. One", lambda t: diagnose(t, {"cats": t.rows([0])})),
        (TableError, "known must have at least 2 rows", lambda t: diagnose(t.rows([1]), t)),
        (TableError, "needs at least 4 rows; it has 3. Give train", lambda t: diagnose(t.rows([0, 1, 2]), t)),
        (TableError, "train must be other rows than known", lambda t: diagnose(t, blobs(9), train=t)),
        (TableError, r"different ones \(b and a\)", lambda t: diagnose(made("1", "a"), made("2", "b"))),
        (TableError, r"different ones \(c and a\)", lambda t: diagnose(made("1", "a"), blobs(8), train=made("3", "c"))),
        (TableError, "column 'logit' must be as wide", lambda t: diagnose(t, blobs(9, classes=5))),
        (
            MissingColumnError,
            r"diagnose \(known\) needs column 'feature'",
            lambda t: diagnose(Table(logit=t.logit), t),
        ),
        (MissingColumnError, r"diagnose \(x\) needs column 'logit'", lambda t: diagnose(t, {"x": t.select("feature")})),
        (ValueRangeError, "confidence=1.0, draws=5", lambda t: diagnose(t, t, confidence=1.0)),
        (ValueRangeError, "draws=0", lambda t: diagnose(t, t, draws=0)),
        (ValueRangeError, "came together with a density", lambda t: diagnose(t, t, density=First(), covariance="tied")),
    ],
)  # fmt: skip
def test_errors(error, text, call):
    with pytest.raises(error, match=text):
        call(blobs(12))


@pytest.mark.parametrize("column", ["feature", "logit"])
def test_nan_is_an_error(column):
    clean, bad = blobs(12), blobs(12, seed=1)
    values = bad.whole(column).clone()
    values[3, 1] = torch.nan
    with pytest.raises(ValueRangeError, match=r"finite|NaN"):
        diagnose(clean, bad.extended(**{column: values}), **QUICK)


def test_a_classifier_of_another_width_is_an_error():
    with pytest.raises(TableError, match=r"classifier must read features of 8 numbers, as in known; its weight has 5"):
        diagnose(blobs(12), blobs(12, seed=1), density=First(), classifier=torch.nn.Linear(5, 4), **QUICK)
