import re
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.stats import binom

import dubito
from dubito.errors import DubitoError, GuardError, UnknownNameError, ValueRangeError
from dubito.guard import Guarantee, Guard
from dubito.guard.missed import GRID, LEVELS, Missed, alerts, missed_classes, missed_threshold, missed_thresholds
from dubito.guard.thresholds import cost_threshold, needed, risk_threshold
from dubito.table import Table

from .world import blobs

pytestmark = pytest.mark.usefixtures("one_thread")
CRACK = Missed(1, 0.05, "crack")


def test_so_many_levels() -> None:
    assert len(GRID) == LEVELS
    assert (GRID[0], GRID[-2], GRID[-1]) == (0.0, 0.5, np.inf)
    assert (np.diff(GRID[:-1]) > 0).all()


def test_a_threshold_by_brute_force() -> None:
    """The largest level below which so few of 400 images lie that a share above 0.05 is refuted."""
    rng = np.random.default_rng(0)
    v = np.where(rng.random(400) < 0.3, 0.5 * rng.random(400), np.inf)
    places = [place for place in range(400) if binom.cdf(place, 400, 0.05) <= 0.1]
    exact = np.sort(v)[max(places)]
    assert missed_threshold(v, CRACK, 0.9) == max(level for level in GRID if level <= exact)


def test_no_more_are_missed_than_stated() -> None:
    """v is uniform in [0, 0.5] for 40 % of the images, and these are right otherwise: below t, 0.8 t are missed."""
    rng = np.random.default_rng(1)
    taus = []
    for _ in range(500):
        v = np.where(rng.random(300) < 0.4, 0.5 * rng.random(300), np.inf)
        taus.append(missed_threshold(v, CRACK, 0.9))
    missed = 0.8 * np.array(taus)
    assert np.mean(missed > 0.05) <= 0.1 + 2.6 * (0.09 / 500) ** 0.5
    assert missed.mean() > 0.4 * 0.05


def test_a_class_that_is_never_missed_needs_no_alert() -> None:
    assert missed_threshold(np.full(100, np.inf), CRACK, 0.9) == np.inf
    with pytest.raises(
        GuardError,
        match=rf"class crack .* at least {needed(0.05, 0.9)} .* there are 44, enough for a share of 0\.051\.",
    ):
        missed_threshold(np.zeros(44), CRACK, 0.9)


def draw(n: int, rng: np.random.Generator) -> Table:
    """Three classes, of which the second is weak: it is often predicted as another."""
    label = rng.choice(3, n, p=[0.5, 0.2, 0.3])
    feature = np.array([3.0, 1.8, 3.0])[label][:, None] * np.eye(3)[label] + rng.normal(size=(n, 3))
    return Table(logit=2 * feature.astype(np.float32), label=label)


def test_risk_and_missed_class_hold_together() -> None:
    """Both sides of one guarantee over 200 calibration sets, looked up in 50,000 images."""
    rng = np.random.default_rng(2)
    guarantee = Guarantee("risk", 0.1, 0.8, missed=(Missed(1, 0.1, "b"),))
    truth = draw(50_000, rng)
    p = truth.logit.double().softmax(1)
    u, predicted, label = (1 - p.max(1).values).numpy(), truth.logit.argmax(1).numpy(), truth.label.numpy()
    other, wrong, p = predicted != 1, predicted != label, p[:, 1].numpy()
    broken, coverage = 0, []
    for _ in range(200):
        table = draw(1500, rng)
        rules = missed_thresholds(guarantee, table, np.zeros(1500, dtype=bool), by="f")
        mine = (1 - table.logit.double().softmax(1).max(1).values).masked_fill(alerts(rules, table) >= 0, torch.inf)
        try:
            t = guarantee.threshold((mine.numpy(), (table.logit.argmax(1) != table.label).numpy())).value
        except GuardError:
            t = -np.inf
        accept = (u <= t) & ~(other & (p >= rules[0].value))
        coverage.append(accept.mean())
        broken += wrong[accept].mean() > 0.1 or (accept & wrong)[label == 1].mean() > 0.1
    assert broken / 200 <= 0.2 + 2.6 * (0.16 / 200) ** 0.5
    assert np.mean(coverage) > 0.5
    # What it is for: without it, more of this class is accepted as another.
    t = risk_threshold(u[:9000], wrong[:9000], risk=0.1, confidence=0.8).value
    assert ((u <= t) & wrong)[label == 1].mean() > 0.12


def test_a_guard_with_a_missed_class(tmp_path: Path) -> None:
    table = draw(5000, np.random.default_rng(3))
    table.classes = ["ok", "crack, fissure", "hole"]
    guard = Guard.fit(None, table, 0.1, 0.9, missed={"crack": 0.05}, novel=0.0, sets=False)
    new = draw(4000, np.random.default_rng(4))
    decisions = guard.decide(new)
    p, predicted = new.logit.double().softmax(1), new.logit.argmax(1)
    alert = (predicted != 1) & (p[:, 1] >= guard.missed[0].value)
    assert torch.equal(decisions.accept, (decisions.uncertainty <= guard.threshold.value) & ~alert)
    assert torch.equal(decisions.accept, decisions.compared <= guard.line)
    row = int((alert & (decisions.uncertainty <= guard.threshold.value)).nonzero()[0, 0])
    assert decisions[row].reason.startswith("may be crack, of which at most 5 % may be missed")
    assert "and at most 5 % of those of class crack are accepted as another class" in guard.title()
    of, lost = guard.missed[0].of, guard.missed[0].missed
    assert guard.facts()["alerts"] == (
        f"refused as 'may be crack' from a probability of {guard.missed[0].value:.2g} on; {lost} of {of} calibration "
        f"images of crack are missed"
    )
    again = Guard.load(guard.save(tmp_path / "guard"))
    assert again.to_dict() == guard.to_dict()
    assert torch.equal(again.decide(new).accept, decisions.accept)
    part = again.check(new).parts[0]
    lost = decisions.accept & (predicted != new.label) & (new.label == 1)
    assert (part.name, part.count, part.of) == ("missed crack", int(lost.sum()), int((new.label == 1).sum()))
    assert part.status == "kept"
    assert again.with_risk(0.2).missed == guard.missed
    with pytest.raises(GuardError, match=r"holds with confidence 0\.9 only"):
        again.with_risk(0.2, 0.95)
    again.classes = None
    assert again.refit(draw(4000, np.random.default_rng(5))).missed[0].of > 600


def test_images_with_an_alert_are_not_counted_as_novel() -> None:
    """Refused are both, and only the density makes an image novel."""
    settings = {"missed": {1: 0.05}, "sets": False, "scores": ["entropy"]}
    table = blobs(4000, noise=1.6)
    guard = Guard.fit(None, table, 0.3, **settings)
    density, gate = guard.calibration.density, guard.selection.gate
    assert density is not None
    assert guard.rows["novel"] == (density > gate).sum() > 0
    assert np.isinf(guard.calibration.uncertainty).sum() > guard.rows["novel"] + 20  # alerts
    assert Guard.fit(None, table, 0.3, novel=0.0, **settings).rows["novel"] == 0
    new = blobs(2000, seed=1, noise=1.6)
    assert guard.refit(new).rows["novel"] == guard.decide(new).novel.sum()


def test_errors_state_the_confidence_that_was_chosen() -> None:
    table = blobs(2000, noise=1.6)
    shared = r"Confidence 0\.\d+ is needed so that the risk and the missed class 1 hold together with 0\.95\."
    with pytest.raises(GuardError, match=rf"Guard\.fit: to miss at most 0\.001 .* share in missed=\. {shared}$"):
        Guard.fit(None, table, 0.3, missed={1: 0.001})
    with pytest.raises(GuardError, match=rf"Guard\.fit: no threshold .* {shared} Without missed=, fewer images"):
        Guard.fit(None, table, 0.01, missed={1: 0.1})


def test_classes_without_names_are_numbered() -> None:
    guard = Guard.fit(None, blobs(2000, noise=1.6), 0.3, missed={1: 0.05}, sets=False)
    decisions = guard.decide(blobs(1000, seed=1, noise=1.6))
    row = next(iter(decisions.rules))
    assert decisions[row].reason.startswith("may be class 1, of which at most 5 % may be missed")
    assert "calibration images of class 1 are missed" in guard.facts()["alerts"]


def test_names_of_missed_classes() -> None:
    classes = ["ok", "crack, fissure"]
    for key in ("crack", "crack, fissure", 1):
        assert missed_classes({key: 0.05}, classes, 2, by="f") == (CRACK,)
    with pytest.raises(UnknownNameError, match="a class of missed must be one of ok, crack"):
        missed_classes({"crak": 0.05}, classes, 2, by="f")
    with pytest.raises(ValueRangeError, match="a class of missed"):
        missed_classes({2: 0.05}, classes, 2, by="f")
    with pytest.raises(ValueRangeError, match="missed names class 1 twice, the second time as 'crack'"):
        missed_classes({1: 0.05, "crack": 0.1}, classes, 2, by="f")
    for level in (0.0, "0.1"):
        with pytest.raises(ValueRangeError, match="missed must be a number in"):
            missed_classes({1: level}, classes, 2, by="f")
    with pytest.raises(
        ValueRangeError, match=r"missed must be a dictionary.* got \['crack'\]\. Pass missed=\{\"crack\": 0\.01"
    ):
        missed_classes(["crack"], classes, 2, by="f")
    with pytest.raises(ValueRangeError, match=r"has no class names\. Use numbers, such as missed=\{1: 0\.05\}"):
        missed_classes({"crack": 0.05}, None, 2, by="f")


def test_a_coverage_that_alerts_make_impossible() -> None:
    """Alerts and novel images are counted each, and how many of the class are there to calibrate."""
    table = blobs(4000, noise=1.6)
    with pytest.raises(GuardError, match=r"share of 0\.9 cannot be accepted") as error:
        Guard.fit(None, table, coverage=0.9, missed={1: 0.02}, sets=False, scores=["entropy"])
    found = r"(\d+) of 3600 .* refused: (\d+) unlike the in-dist.*, ([\d,]+) that may be of class 1 \("
    counts = re.search(found, str(error.value))
    assert counts is not None
    refused, novel, alerts = (int(one.replace(",", "")) for one in counts.groups())
    assert refused == novel + alerts
    assert 0 < novel < 100 < alerts


def test_a_guard_with_costs_is_refitted(tmp_path: Path) -> None:
    costs = 1.0 - np.eye(4)
    costs[2] *= 3
    guard = Guard.fit(None, blobs(3000, noise=1.4), 0.3, 0.9, costs=costs, novel=0.0, sets=False, scores=["entropy"])
    new = blobs(2000, seed=8, noise=1.6)
    refitted = Guard.load(guard.save(tmp_path / "guard")).refit(new)
    u, loss = dubito.Entropy().score(new).numpy(), costs[new.label.numpy(), new.logit.argmax(1).numpy()]
    assert refitted.threshold == cost_threshold(u, loss / 3, cost=0.1, confidence=0.9)
    assert refitted.threshold.value < guard.threshold.value  # these images are harder
    again = Guard.load(refitted.save(tmp_path / "guard"))
    assert again.fingerprint == refitted.fingerprint != guard.fingerprint
    assert again.costs is not None
    assert (again.costs.costs == costs).all()
    with pytest.raises(DubitoError, match="label"):
        guard.refit(new.select("feature", "logit"))


def test_everything_at_once_is_refitted_and_kept() -> None:
    """Costs in every class, and a class that is rarely missed."""
    costs = 1.0 - np.eye(4)
    costs[2] *= 3
    settings = {"per": "class", "costs": costs, "missed": {1: 0.2}, "scores": ["entropy"], "novel": 0.0, "sets": False}
    guard = Guard.fit(None, blobs(3000, noise=1.6), 0.5, 0.8, **settings)
    refitted = guard.refit(blobs(4000, seed=8, noise=1.6))
    decisions = refitted.decide(blobs(4000, seed=9, noise=1.6))
    assert decisions.check is not None
    assert all(part.status != "broken" for part in decisions.check.parts)
    assert [part.name for part in decisions.check.parts] == [*(f"class {one}" for one in range(4)), "missed class 1"]
    assert torch.equal(decisions.accept, decisions.compared <= refitted.line)
    assert 0.3 < decisions.coverage < 1
    assert "cost at most 0.5 on average in every predicted class, and at most 20 %" in refitted.title()


def test_costs_of_a_guard(tmp_path: Path) -> None:
    costs = 1.0 - np.eye(4)
    costs[2] *= 3  # mistaking the third class for another costs three times as much
    guard = Guard.fit(None, blobs(5000, noise=1.4), 0.2, 0.9, costs=costs, scores=["entropy"], novel=0.0, sets=False)
    assert guard.title().endswith("those accepted cost at most 0.2 on average (confidence 90 %).")
    new = blobs(4000, seed=7, noise=1.4)
    decisions, again = guard.decide(new), Guard.load(guard.save(tmp_path / "guard"))
    assert torch.equal(again.decide(new).accept, decisions.accept)
    paid = costs[new.label.numpy(), new.logit.argmax(1).numpy()][decisions.accept.numpy()]
    check = again.check(new)
    assert check.observed is not None
    assert check.observed.value == pytest.approx(paid.mean())
    assert (check.count, check.of) == ((paid > 0).sum(), len(paid))
    assert paid.mean() <= 0.2 + 0.03
    assert f"a mean of {paid.mean():.3g}" in check.sentence()
    assert 0.3 < decisions.coverage < 1
    assert again.with_risk(0.3).threshold.accepted > guard.threshold.accepted
    with pytest.raises(GuardError, match="a guarantee about costs cannot be watched"):
        guard.watch()
