"""What `diagnose` is given: which density, which rows it learns from, and what is refused."""

import pytest
import torch

from dubito.errors import DubitoWarning, MissingColumnError, TableError, ValueRangeError
from dubito.explain._given import given
from dubito.explain.causes import diagnose
from dubito.scores.density import Density
from dubito.table import Provenance, Table
from tests.explain.blobs import QUICK, First, Watched, blobs


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


def test_too_large_a_density_is_refused_beforehand():
    with pytest.raises(ValueRangeError, match=r"memory=1e-06 allows 1e-06 GB"):
        diagnose(blobs(40), blobs(40, seed=1), density=Density(memory=1e-6), **QUICK)


def test_the_same_table_twice_is_warned_of():
    table = blobs(60)
    with pytest.warns(
        DubitoWarning,
        match=r"60 of 60 images of ood \(100.0 %\) are the same images as some of known, by their features",
    ):
        found = diagnose(table, table, density=First(), **QUICK)
    assert found["ood"].auroc["density"].value == pytest.approx(0.5)
    assert found["ood"].causes["overlap"].value == pytest.approx(0.5)
    assert found.notes[0] in str(found)
    assert "so AUROCs come near 50 % and overlap near 50 points. Give images of other things." in found.notes[0]
    said = r"20 of 60 images of known \(33.3 %\) are the same .* D is too high by at most about 33.3 points. Fit it on"
    with pytest.warns(DubitoWarning, match=said):
        diagnose(table, blobs(60, seed=1), train=table.rows(slice(0, 20)), **QUICK)
    with pytest.warns(DubitoWarning, match=r"40 of 60 images .* too well, and D is too high. Fit it on other images."):
        diagnose(table, blobs(60, seed=1), train=table.rows(slice(0, 40)), **QUICK)


def test_a_few_shared_images_matter_little_and_that_is_said():
    known, other = blobs(100), blobs(200, seed=1)
    shared = {
        column: torch.cat([known.whole(column)[:1], other.whole(column)[1:]])
        for column in ("feature", "logit", "label")
    }
    said = (
        "1 of 200 images of ood (0.5 %) are the same images as some of known, by their features: AUROCs are drawn "
        "towards 50 % by at most about 0.2 points. Give images of other things."
    )
    with pytest.warns(DubitoWarning) as told_of:
        found = diagnose(known, Table(**shared), density=First(), **QUICK)
    assert [str(warning.message) for warning in told_of] == [said]
    assert found.notes == (said,)


def test_the_same_images_in_other_batches_and_in_half_precision_are_warned_of():
    known, other = blobs(100), blobs(100, seed=1)
    noise = 1 + 1e-6 * torch.randn(5, 8, generator=torch.Generator().manual_seed(0))
    anew = torch.cat([known.feature[:5] * noise, other.feature[5:]])
    for feature in (anew, anew.half()):
        with pytest.warns(DubitoWarning, match=r"5 of 100 images of ood \(5.0 %\) are the same .* of known, by"):
            diagnose(known, other.extended(feature=feature), density=First(), **QUICK)
        with pytest.warns(DubitoWarning, match=r"5 of 100 images of known \(5.0 %\) are .* by at most about 5.0"):
            diagnose(known, blobs(100, seed=2), train=other.extended(feature=feature), **QUICK)


def test_what_a_fitted_density_was_fitted_on_cannot_be_seen():
    known, foreign, train = blobs(40), blobs(40, seed=1), blobs(40, seed=2)
    note = "The density was fitted before: whether on images of known cannot be seen. If it was, D is too high."
    found = diagnose(known, foreign, density=Density(covariance="diagonal").fit(train), **QUICK)
    assert found.notes == (note,)
    assert note in str(found)
    assert "4 Gaussians (one a class), diagonal covariances" in found.density
    assert diagnose(known, foreign, density=Density(covariance="diagonal"), train=train, **QUICK).notes == ()
    assert diagnose(known, foreign, density=First(), **QUICK).notes == ()  # there is nothing that it could learn


def made(source: str, name: str, n: int = 8) -> Table:
    table = blobs(n)
    return Table(
        feature=table.feature, logit=table.logit, provenance=Provenance(name, weights=source), name=f"of {name}"
    )


@pytest.mark.parametrize(
    ("error", "text", "call"),
    [
        (TableError, "needs at least one OOD table", lambda t: diagnose(t, {})),
        (TableError, "ood must have at least 2 rows; it has 0. Look at", lambda t: diagnose(t, t.rows(slice(0, 0)))),
        (TableError, "cats must have at least 2 rows; it has 1. One", lambda t: diagnose(t, {"cats": t.rows([0])})),
        (TableError, "known must have at least 2 rows", lambda t: diagnose(t.rows([1]), t)),
        (TableError, "needs at least 4 rows; it has 3. Give train", lambda t: diagnose(t.rows([0, 1, 2]), t)),
        (TableError, "train has none. Give training", lambda t: diagnose(t, blobs(9), train=t.rows(slice(0, 0)))),
        (TableError, "train must be other rows than known", lambda t: diagnose(t, blobs(9), train=t)),
        (TableError, r"different ones \(b \w+ and a \w+\)", lambda t: diagnose(made("1", "a"), made("2", "b"))),
        (TableError, r"ones \(c \w+ and a \w+\)", lambda t: diagnose(made("1", "a"), blobs(8), train=made("3", "c"))),
        (TableError, "column 'logit' must be as wide", lambda t: diagnose(t, blobs(9, classes=5))),
        (
            MissingColumnError,
            r"diagnose \(known\) needs column 'feature'",
            lambda t: diagnose(Table(logit=t.logit), t),
        ),
        (MissingColumnError, r"diagnose \(x\) needs column 'logit'", lambda t: diagnose(t, {"x": t.select("feature")})),
        (ValueRangeError, "confidence=1.0, draws=5", lambda t: diagnose(t, t, confidence=1.0)),
        (ValueRangeError, "draws=0", lambda t: diagnose(t, t, draws=0)),
        (ValueRangeError, "diagnose: seed must not be negative; got -1", lambda t: diagnose(t, blobs(9), seed=-1)),
        (TableError, "no OOD set may be called 'mean', which is the line", lambda t: diagnose(t, {"mean": blobs(9)})),
        (TableError, "rename the folder of its cache", lambda t: diagnose(t, blobs(9, name="caches/mean"))),
        (ValueRangeError, "came together with a density", lambda t: diagnose(t, t, density=First(), covariance="tied")),
    ],
)  # fmt: skip
def test_errors(error, text, call):
    with pytest.raises(error, match=text):
        call(blobs(12))


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        (("cache", blobs(4), None), "known"),
        ((blobs(4), "cache", None), "ood"),
        ((blobs(4), {"cats": "cache"}, None), "ood 'cats'"),
        ((blobs(4), blobs(5), "cache"), "train"),
    ],
)
def test_paths_are_told(arguments, what):
    with pytest.raises(TableError, match=rf'diagnose: {what} must be a table; the path "cache" came. Open it: dubito'):
        given.__wrapped__(*arguments, None)  # past the type checks of the tests


@pytest.mark.parametrize(
    ("column", "text"),
    [
        ("feature", "density.score: features must be finite; feature 1 of row 3 of table in memory is nan"),
        (
            "logit",
            "max_probability.score of table in memory: 1 of 12 values are NaN or infinite, the first at position 3",
        ),
    ],
)
def test_nan_is_an_error(column, text):
    clean, bad = blobs(12), blobs(12, seed=1)
    values = bad.whole(column).clone()
    values[3, 1] = torch.nan
    with pytest.raises(ValueRangeError, match=text):
        diagnose(clean, bad.extended(**{column: values}), **QUICK)
