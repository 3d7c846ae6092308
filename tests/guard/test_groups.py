import contextlib
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.stats import binom

import dubito
from dubito.errors import GuardError, TableError, ValueRangeError
from dubito.guard import Guarantee, Guard, PredictionSets
from dubito.guard.groups import group_codes, group_thresholds, groups_in, limits
from dubito.guard.thresholds import NO_LIMIT, needed, risk_threshold
from dubito.table import Table

from .world import blobs

pytestmark = pytest.mark.usefixtures("one_thread")
STEEP = np.array([6.0, 3.0, 1.0])
"""In group g, an image is wrong with probability u^STEEP[g] / 2: below t, t^s / (2 (s + 1)) of them."""


def draw(n: int, seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    u, group = rng.random(n), rng.choice(3, n, p=[0.5, 0.3, 0.2])
    return u, rng.random(n) < u ** STEEP[group] / 2, group


def test_the_risk_is_kept_in_all_groups_together_where_one_threshold_breaks_it() -> None:
    guarantee, draws, broken, single = Guarantee("risk", 0.06, 0.9, per="site"), 200, 0, 0
    covered = []
    for seed in range(draws):
        u, wrong, group = draw(1500, seed)
        found = group_thresholds(guarantee, u, wrong, group, ["a", "b", "c"])[1]
        t = np.array([one.value for one in found]).clip(0.0, 1.0)
        broken += bool((t**STEEP / (2 * (STEEP + 1)) > 0.06).any())
        covered.append(t)
        one = risk_threshold(u, wrong, risk=0.06, confidence=0.9).value
        single += one ** STEEP[2] / (2 * (STEEP[2] + 1)) > 0.06
    assert broken / draws <= 0.1 + 2.6 * (0.09 / draws) ** 0.5
    assert single / draws > 0.9
    best = (2 * (STEEP + 1) * 0.06) ** (1 / STEEP)  # 0.97, 0.78, 0.24
    assert (np.mean(covered, axis=0)[:2] > 0.7 * best[:2]).all()


def test_each_group_is_tested_with_its_share_of_delta() -> None:
    u, wrong, group = draw(2000, 0)
    whole, found = group_thresholds(Guarantee("risk", 0.06, 0.9, per="site"), u, wrong, group, [0, 1, 2])
    for place, one in enumerate(found[:2]):
        own = group == place
        assert one[1:5] == tuple(risk_threshold(u[own], wrong[own], risk=0.06, confidence=1 - 0.1 / 3))
    assert whole.accepted == sum(one.accepted for one in found)
    inside = u <= limits(found, group)
    assert (inside.sum(), wrong[inside].sum(), len(u)) == (whole.accepted, whole.errors, whole.of)


def test_groups_with_too_few_images_take_no_part_of_delta() -> None:
    u, wrong, group = draw(1000, 0)
    group = np.append(group[:990], [3] * 10)
    found = group_thresholds(Guarantee("risk", 0.06, 0.9, per="site"), u, wrong, group, list("abcd"))[1]
    enough = needed(0.06, 1 - 0.1 / 3)
    assert found[3].value == -np.inf
    assert found[3].reason == f"it has 10 calibration images, and at least {enough} are needed"
    assert binom.cdf(0, enough, 0.06) <= 0.1 / 3
    assert limits(found, np.array([3, -1])).tolist() == [-np.inf, -np.inf]


def test_many_equal_groups_do_not_break_the_guarantee_together() -> None:
    """100 groups of 100 images, slightly more than the risk of them wrong: any threshold at all breaks the guarantee.

    delta / 8 allows the 8 largest groups; a test passes without an error, with probability 0.9499^100 < 0.05 / 8.
    """
    guarantee, draws = Guarantee("risk", 0.05, 0.95, per="site"), 200
    rng, group, broken = np.random.default_rng(0), np.repeat(np.arange(100), 100), 0
    for wrong in rng.binomial(1, 0.0501, (draws, 10_000)).astype(bool):
        with contextlib.suppress(GuardError):
            group_thresholds(guarantee, np.zeros(10_000), wrong, group, range(100))
            broken += 1
    assert broken / draws <= 0.05 + 2.6 * (0.05 * 0.95 / draws) ** 0.5


def test_no_more_groups_are_tested_than_share_delta() -> None:
    """`needed(0.05, 1 - 0.05 / K)` is 99 for K = 8, and 102 for K = 9."""
    sizes = [50, *[100] * 6, 101, *[100] * 3]
    group, right = np.repeat(np.arange(11), sizes), np.zeros(sum(sizes), dtype=bool)
    guarantee = Guarantee("risk", 0.05, 0.95, per="site")
    found = group_thresholds(guarantee, np.zeros(len(group)), right, group, range(11))[1]
    assert [one.group for one in found if not one.reason] == [*range(1, 9)]  # the largest, and of equal ones the first
    assert found[0].reason == "it has 50 calibration images, and at least 99 are needed"
    assert found[9].reason.startswith("it has 100 calibration images, and only the 8 largest of 11 can be tested")
    assert [one.of for one in found] == sizes
    none_left = group_thresholds(guarantee, np.zeros(142), np.zeros(142, bool), np.repeat([0, 1], 71), ["a", "b"])[1]
    assert "only the largest of 2 can be tested together" in none_left[1].reason


def test_nothing_can_be_guaranteed_in_any_group() -> None:
    u, wrong, group = draw(60, 0)
    with pytest.raises(GuardError, match=r"no group of 'site' has a threshold.* at least \d+ are needed.*leave out"):
        group_thresholds(Guarantee("risk", 0.06, 0.9, per="site"), u, wrong, group, list("abc"))


def test_groups_are_what_they_are() -> None:
    """As floating-point numbers, both would be 9007199254740992."""
    numbers = torch.tensor([9007199254740992, 9007199254740993, 9007199254740993])
    values = groups_in(Table(logit=torch.zeros(3, 2), site=numbers), "site", by="f")
    assert np.unique(values).tolist() == [9007199254740992, 9007199254740993]
    assert group_codes(values, [9007199254740993]).tolist() == [-1, 0, 0]
    assert group_codes(np.array(["1"]), [1]).tolist() == [-1]
    with pytest.raises(TableError, match="names or whole numbers"):
        groups_in(Table(logit=torch.zeros(2, 2), site=[1.0, 2.0]), "site", by="f")
    with pytest.raises(TableError, match=r"no column 'site'. Add it: table.extended"):
        groups_in(Table(logit=torch.zeros(2, 2)), "site", by="f")


def test_a_guard_of_every_class(tmp_path: Path) -> None:
    table = blobs(4000, c=4)
    table = table.rows((table.label != 3) | (torch.arange(4000) % 40 == 0))
    guard = Guard.fit(None, table, 0.1, 0.9, per="class", scores=["entropy"], novel=0.0, sets=False)
    new = blobs(3000, seed=5)
    decisions = guard.decide(new)
    predicted = new.logit.argmax(1)
    expected = torch.tensor([one.value for one in guard.groups])[predicted]
    assert torch.equal(decisions.accept, decisions.uncertainty <= expected)
    assert torch.equal(decisions.accept, decisions.compared <= guard.line)
    assert not decisions.accept[predicted == 3].any()
    row = int((predicted == 3).nonzero()[0, 0])
    assert (
        "predicted class 3 is refused: too many even of the most certain of its 106 calibration images"
        in decisions[row].reason
    )
    assert decisions.cause(row) == "predicted class without a threshold"
    assert guard.facts()["classes"].startswith("3 of 4 have a threshold; refused are class 3 (too many even")
    assert "in every predicted class (confidence 90 %, all together)" in guard.title()
    again = Guard.load(guard.save(tmp_path / "guard"))
    assert again.to_dict() == guard.to_dict()
    assert torch.equal(again.decide(new).accept, decisions.accept)
    check = again.check(new)
    assert [part.name for part in check.parts] == ["class 0", "class 1", "class 2"]
    assert sum(part.of for part in check.parts) == int(decisions.accept.sum()) == check.of
    stricter = again.with_risk(0.05)
    assert stricter.guarantee.per == "class"
    assert stricter.threshold.accepted < guard.threshold.accepted


def test_a_class_without_an_error_has_no_limit() -> None:
    """Class 0 is always right, so all of its images are accepted; class 1 is wrong for every uncertain image."""
    table = blobs(3000, c=2)
    predicted, u = table.logit.argmax(1), dubito.Entropy().score(table)
    table = table.extended(label=torch.where((predicted == 1) & (u > u[predicted == 1].median()), 0, predicted))
    guard = Guard.fit(None, table, 0.1, 0.9, per="class", scores=["entropy"], novel=0.01, sets=False)
    assert [one.value == NO_LIMIT for one in guard.groups] == [True, False]
    decisions = guard.decide(blobs(2000, seed=3, c=2))
    of_first = decisions.predicted[:, 0] == 0
    assert torch.equal(decisions.accept[of_first], ~decisions.novel[of_first])
    assert 0 < float(decisions.accept[~of_first].double().mean()) < 0.7
    assert torch.equal(decisions.accept, decisions.compared <= guard.line)
    finite = decisions.compared[~decisions.novel]
    assert float(finite.abs().max()) < 10  # of a size that a page can draw
    accepted = [one for row, one in enumerate(decisions) if of_first[row] and one.accept]
    assert not any("close to the threshold" in one.reason for one in accepted)


def test_a_guard_of_every_camera() -> None:
    table = blobs(2000)
    camera = ["left", "right"] * 1000
    settings = {"per": "camera", "scores": ["entropy"], "novel": 0.0, "sets": False}
    guard = Guard.fit(None, table.extended(camera=camera), 0.15, 0.9, **settings)
    new = blobs(300, seed=3)
    with pytest.raises(TableError, match="no column 'camera'"):
        guard.decide(new)
    decisions = guard.decide(new.extended(camera=["left"] * 100 + ["right"] * 100 + ["above"] * 100))
    assert not decisions.accept[200:].any()
    assert decisions[250].reason.startswith("camera 'above' is refused: it has no calibration images")
    assert "the guard knows 'left', 'right'" in decisions[250].reason
    left = guard(new, group="left")
    assert torch.equal(left.accept[:100], decisions.accept[:100])
    with pytest.raises(
        GuardError, match=r"one name or whole .*; got list\. .* guard\(table\.extended\(camera=\[\.\.\.\]"
    ):
        guard._grouped(new, ["left"] * 300)
    refitted = guard.refit(blobs(1500, seed=9).extended(camera=["above"] * 1500))
    assert [one.group for one in refitted.groups] == ["above"]
    with pytest.raises(GuardError, match="group goes with a guarantee or prediction sets for every group"):
        Guard.fit(None, table, 0.15, sets=False)(new, group="left")


def test_prediction_sets_of_every_camera_take_the_group_of_images() -> None:
    """Labels of the left camera are always the predicted class, so that its sets are smaller."""
    table, camera = blobs(2000), ["left", "right"] * 1000
    table.label[::2] = table.logit.argmax(1)[::2]
    table = table.extended(camera=camera, site=["here"] * 2000)
    settings = {"scores": ["entropy"], "novel": 0.0, "sets": PredictionSets(per="camera")}
    new, guard = blobs(300, seed=3), Guard.fit(None, table, 0.15, **settings)
    left, right = guard(new, group="left"), guard(new, group="right")
    assert left.sets == guard.decide(new.extended(camera=["left"] * 300)).sets
    assert sum(map(len, left.sets)) < sum(map(len, right.sets))
    assert torch.equal(left.accept, right.accept)
    assert guard.group_columns == ("camera",)
    both = Guard.fit(None, table, 0.15, per="camera", **settings)
    assert both(new, group="left").sets == left.sets
    with pytest.raises(GuardError, match="this guard needs two: columns 'site' and 'camera'"):
        Guard.fit(None, table, 0.15, per="site", **settings)(new, group="left")


def test_what_does_not_go_together() -> None:
    with pytest.raises(ValueRangeError, match="per='class' goes with a risk"):
        Guard.fit(None, blobs(400), coverage=0.5, per="class")
    with pytest.raises(ValueRangeError, match="costs go with a risk"):
        Guard.fit(None, blobs(400), coverage=0.5, costs=1 - np.eye(4))
