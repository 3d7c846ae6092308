import re

import numpy as np
import pytest
from scipy.stats import binomtest

from dubito.errors import DubitoWarning, MissingColumnError, TableError
from dubito.guard import Guarantee, Guard
from dubito.guard.check import GuaranteePart, check_guarantee
from dubito.guard.missed import Missed
from dubito.guard.shift import Shift
from dubito.table import Table, concat

from .world import blobs

ALIKE = Shift(100, 100, 0.01, ())


def flags(n, first):
    return np.arange(n) < first


@pytest.mark.parametrize(
    ("kind", "level", "accepted", "wrong", "count", "of", "status"),
    [
        ("risk", 0.1, 200, 5, 5, 200, "kept"),
        ("risk", 0.1, 200, 60, 60, 200, "broken"),
        ("risk", 0.1, 200, 18, 18, 200, "too few to tell"),
        ("coverage", 0.5, 200, 0, 200, 300, "kept"),
        ("coverage", 0.8, 200, 0, 200, 300, "broken"),
        ("false_alarms", 0.5, 200, 20, 100, 280, "kept"),
        ("false_alarms", 0.2, 200, 20, 100, 280, "broken"),
    ],
)
def test_what_labels_show(kind, level, accepted, wrong, count, of, status):
    """300 images; the first are accepted, and the first of these are wrong."""
    result = check_guarantee(Guarantee(kind, level, 0.95), flags(300, accepted), flags(300, wrong), ALIKE)
    assert (result.status, result.count, result.of) == (status, count, of)
    reference = binomtest(count, of).proportion_ci(0.95, method="exact")
    assert (result.observed.low, result.observed.high) == pytest.approx((reference.low, reference.high))
    assert result.to_dict()["status"] == status


def test_the_sentence():
    result = check_guarantee(Guarantee("risk", 0.1, 0.95), flags(300, 200), flags(300, 5), ALIKE)
    assert result.findings() == [
        "Kept: 5 of 200 accepted images are wrong, 2.5 % (95 % interval 0.8 % to 5.7 %); at most 10 % are guaranteed."
    ]
    assert str(result).startswith("guarantee kept")


def test_all_images_together_have_a_status_of_their_own():
    """Of 200 accepted images 5 are wrong; of a class with 10 images none is missed, which shows nothing."""
    guarantee = Guarantee("risk", 0.1, 0.95, missed=(Missed(1, 0.05, "crack"),))
    accept, wrong = flags(300, 200), flags(300, 5)
    parts = [GuaranteePart("missed crack", np.arange(300) >= 290, accept & wrong, 0.05)]
    result = check_guarantee(guarantee, accept, wrong, ALIKE, parts=parts)
    assert (result.status, result.together) == ("too few to tell", "kept")
    assert [(row["part"], row["status"]) for row in result.records()] == [
        ("all", "kept"),
        ("missed crack", "too few to tell"),
    ]
    assert str(result).startswith("too few images to tell\n")
    assert result.sentence() == (
        "All together: kept, 5 of 200 accepted images are wrong, 2.5 % (97.5 % interval 0.7 % to 6.3 %); at most 10 % "
        "are guaranteed. Parts: 0 of 1 kept, 1 with too few images to tell."
    )
    parts = [GuaranteePart("missed crack", wrong, accept & wrong, 0.05)]
    assert (
        check_guarantee(guarantee, accept, wrong, ALIKE, parts=parts)
        .sentence()
        .endswith(" Parts: 0 of 1 kept, 1 broken (missed crack: 5 of 5, at most 5 % are guaranteed).")
    )


def test_nothing_accepted_shows_nothing():
    result = check_guarantee(Guarantee("risk", 0.1, 0.95), flags(9, 0), flags(9, 9), ALIKE)
    assert (result.status, result.observed) == ("too few to tell", None)
    assert str(result).splitlines()[-1] == (
        "Too few images to tell: 0 of 0 accepted images are wrong; at most 10 % are guaranteed."
    )


def test_check_needs_labels_of_the_model_unless_coverage_is_guaranteed():
    guard, new = Guard.fit(None, blobs(400), 0.3), blobs(100, seed=1)
    unlabelled = Table(logit=new.logit, feature=new.feature)
    with pytest.raises(MissingColumnError, match=r"guard\.check needs column 'label'"):
        guard.check(unlabelled)
    with pytest.raises(TableError, match="must be classes from 0 to 3; got 0 to 99"):
        guard.check(new.extended(label=np.arange(100)))
    assert guard.decide(new.extended(label=np.arange(100))).check is None
    covering = Guard.fit(None, blobs(400), coverage=0.5)
    assert covering.check(unlabelled).of == 100
    assert covering.decide(unlabelled).check is None


def test_the_shift_is_part_of_it():
    guard = Guard.fit(None, blobs(400), 0.3)
    result = guard.check(blobs(300, seed=1, noise=3.0))
    assert result.shift.detected
    assert "These images are not like those" in str(result)
    assert result.to_dict()["shift"]["detected"]


OWN = r" About (\d+) % of these images are the guard's own calibration images, so this is no independent check\."


def test_calibration_images_are_no_independent_check(tmp_path):
    table, new = blobs(400), blobs(400, seed=1)
    guard = Guard.load(Guard.fit(None, table, 0.3).save(tmp_path / "guard"))
    assert guard.rows["calibrate"] == 360
    for result in (guard.check(table), guard.decide(table).check):
        assert re.search(OWN, result.sentence())[1] == "90"
        assert result.to_dict()["own"] == 0.9
    assert guard.decide(table).findings()[-1] == guard.check(table).sentence()
    half = concat([table.rows(slice(0, 200)), new.rows(slice(0, 200))])
    assert 40 <= int(re.search(OWN, str(guard.with_risk(0.25).check(half)))[1]) <= 50
    for other in (new, concat([table.rows(slice(0, 4)), new])):  # a handful changes nothing
        assert guard.check(other).own == 0
        assert "independent" not in str(guard.check(other))


def test_calibration_images_show_no_coverage_either():
    table = blobs(400).select("feature", "logit")
    guard = Guard.fit(None, table, coverage=0.5)
    assert re.search(OWN, str(guard.check(table)))
    assert guard.decide(table).check is None


def test_of_many_images_the_share_is_estimated(monkeypatch):
    table, new = blobs(1000), blobs(1000, seed=1)
    guard = Guard.fit(None, table, 0.3)
    assert guard.check(concat([table, new])).own == 0.45  # 900 of 2,000
    monkeypatch.setattr("dubito.guard.identity._MOST_COMPARED", 500)
    assert guard.check(concat([table, new])).own == pytest.approx(0.45, abs=0.07)
    assert guard.check(new).own == 0


def test_a_guard_is_not_refitted_on_images_that_it_was_fitted_on(recwarn):
    table, new = blobs(400), blobs(400, seed=1)
    guard = Guard.fit(None, table, 0.3)
    with pytest.warns(DubitoWarning, match="guard.refit: about 90 % of the images of blobs are calibration"):
        guard.refit(table)
    recwarn.clear()
    refitted = guard.refit(new)
    assert refitted.check(new).own == 1
    assert refitted.refit(new).threshold == refitted.threshold  # no score was chosen on these
    assert not recwarn.list
