"""Labels for a watch: which images are drawn, labels that arrive in any order or never, and alarms that stay rare."""

import copy
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import binomtest

from dubito.errors import GuardError, ImagesError
from dubito.guard import Decisions, Guard, Watch, WatchReport

from .world import blobs, named

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def guard() -> Guard:
    return Guard.fit(None, blobs(1500), risk=0.1, scores=["entropy"], sets=False)


@pytest.fixture(scope="module")
def refusing() -> Guard:
    """At most half of the correct predictions are refused."""
    return Guard.fit(None, blobs(1500), false_alarms=0.5, scores=["entropy"], sets=False)


def drawn_decisions(guard: Guard, n: int, accepted: float) -> Decisions:
    """Of n images, of which a share is accepted, whatever their uncertainty is."""
    decisions = guard.decide(named(blobs(n, seed=6)).select("feature", "logit", "id"))
    return replace(decisions, accept=torch.rand(n, generator=torch.Generator().manual_seed(0)) < accepted)


def seen(guard: Guard, decisions: Decisions) -> Callable[..., Watch]:
    """Makes watches that have seen these images: many streams of labels need one stream of images."""
    first = guard.watch()
    first.update(decisions)

    def make(**settings: Any) -> Watch:
        watch = guard.watch(**settings)
        watch._state = copy.deepcopy(first._state)
        return watch

    return make


def labels_of(decisions: Decisions, wrong: np.ndarray) -> dict[str, int]:
    predicted = decisions.predicted[:, 0].tolist()
    return {name: (predicted[row] + int(wrong[row])) % 4 for row, name in enumerate(decisions.ids)}


def test_labels_that_come_later_count_if_they_were_drawn(guard):
    watch = guard.watch()
    table = named(blobs(300, seed=6))
    truth = dict(zip(table.id.tolist(), table.label.tolist(), strict=True))
    decisions = guard.decide(table.select("feature", "logit", "id"))
    watch.update(decisions)
    requested = watch.request_labels(50)
    accepted = {name for name, accept in zip(table.id.tolist(), decisions.accept.tolist(), strict=True) if accept}
    assert len(set(requested)) == 50
    assert set(requested) <= accepted
    assert watch.report().requested == 50
    report = watch.label({f"folder/{name}": truth[name] for name in requested})  # by file name, as everywhere
    assert (report.outcomes, report.requested, report.volunteered) == (50, 0, 0)
    left = sorted(name for name, one in watch._state.pending.items() if one["accept"])
    assert len(left) == len(accepted) - 150  # each label speaks for two other images, which are not drawn again
    others = left[:20]
    report = watch.label({name: float(truth[name]) for name in others})
    assert (report.outcomes, report.volunteered) == (50, 20)
    more = left[20:30]
    assert watch.label({name: str(truth[name]) for name in more}, drawn=True).outcomes == 60
    assert watch.label({"nobody.png": 0}).unknown == 1
    with pytest.raises(GuardError, match=r"a label must be a class of the model, .* got 'cat'\. Nothing was changed"):
        watch.label({others[0]: "cat"})
    for label in (True, "1" * 5000, -1, 0.5):
        with pytest.raises(GuardError, match="a label must be a class of the model"):
            watch.label({others[0]: label})
    with pytest.raises(ImagesError, match=r"labels must be a mapping from image to label, .*; got list"):
        watch.label([0, 1])


def test_labels_are_tested_in_the_order_of_the_draw(guard):
    """Errors that come first, all of them before the rest, raise no alarm: their turn comes with that of the others."""
    table = named(blobs(400, seed=6))
    decisions = guard.decide(table.select("feature", "logit", "id"))
    make = seen(guard, decisions)
    for seed in range(5):
        watch = make(seed=seed)
        predicted = dict(zip(table.id.tolist(), decisions.predicted[:, 0].tolist(), strict=True))
        requested = watch.request_labels(90)
        wrong = requested[1::12]  # 8 of 90, below the risk of 0.1
        report = watch.label({name: (predicted[name] + 1) % 4 for name in wrong})
        assert (report.outcomes, report.waiting) == (0, 8)
        report = watch.label({name: predicted[name] for name in requested if name not in wrong})
        assert (report.outcomes, report.waiting) == (90, 0)
        assert not report.alarms


def test_labels_of_likely_errors_leave_the_rate_unbiased():
    """Errors are rare among certain images; drawn more often where they are likely, they weigh less."""
    guard = Guard.fit(None, blobs(1500, noise=1.6), risk=0.2, scores=["entropy"], sets=False)
    table = named(blobs(900, seed=6, noise=1.6))
    decisions = guard.decide(table.select("feature", "logit", "id"))
    wrong = (decisions.predicted[:, 0] != table.label)[decisions.accept].double()
    truth = dict(zip(table.id.tolist(), table.label.tolist(), strict=True))
    rates, errors = [], []
    make = seen(guard, decisions)
    for seed in range(30):
        watch = make(seed=seed)
        requested = watch.request_labels(int(decisions.accept.sum()) // 3)
        report = watch.label({name: truth[name] for name in requested})
        rates.append(report.observed)
        predicted = dict(zip(table.id.tolist(), decisions.predicted[:, 0].tolist(), strict=True))
        errors.append(np.mean([truth[name] != predicted[name] for name in requested]))
    assert np.mean(errors) > 1.1 * wrong.mean()  # more errors are seen than in a draw of all alike
    assert abs(np.mean(rates) - wrong.mean()) < 3 * np.std(rates) / math.sqrt(30)
    alike = math.sqrt(wrong.mean() * (1 - wrong.mean()) / len(requested) * 2 / 3)
    assert np.std(rates) < alike


def test_names_that_are_used_again_are_counted(guard):
    watch = guard.watch()
    for seed in (6, 7):
        report = watch.update(guard.decide(named(blobs(20, seed=seed)).select("feature", "logit", "id")))
    assert report.repeated == 20
    assert report.facts()["names seen before"].startswith("20: a label is of the image that it was requested for, else")


def test_requests_are_named_until_their_labels_come(guard):
    watch = guard.watch()
    table = named(blobs(300, seed=6))
    decisions = guard.decide(table.select("feature", "logit", "id"))
    watch.update(decisions)
    first = watch.request_labels(20)
    assert watch.request_labels(20) == first
    assert watch.request_labels(5) == first[:5]
    more = watch.request_labels(30)
    assert (more[:20], len(set(more))) == (first, 30)
    watch.update(guard.decide(table.select("feature", "logit", "id", "label")))  # labels of other images of these names
    assert watch.report().requested == 30


def test_labels_find_their_image_by_its_name_alone(guard):
    watch = guard.watch()
    table = blobs(4, seed=6).extended(id=["a/0001.png", "a/0002.png", "b/0002.png", "b/0003.png"])
    watch.update(guard.decide(table.select("feature", "logit", "id")))
    report = watch.label({"3": 0, "x/1.png": 0, "0001": 0, "c/0002.png": 0}, drawn=True)  # a stem, a number, one of two
    assert (report.outcomes, report.unknown) == (0, 4)
    names = [name for name, one in watch._state.pending.items() if one["accept"]]
    watch.label({"elsewhere/0003.png": 0, "a/0002.png": 0}, drawn=True)
    assert set(names) - set(watch._state.pending) <= {"b/0003.png", "a/0002.png"}
    assert watch.report().unknown == 4


def test_labels_that_people_send_do_not_hide_errors(guard):
    """Complaints about every error leave only right answers; drawn among all images, errors are found all the same."""
    table = named(blobs(300, seed=6, noise=2.0))
    decisions = guard.decide(table.select("feature", "logit", "id"))
    wrong = decisions.predicted[:, 0] != table.label
    watch = guard.watch()
    watch.update(decisions)
    rows = (wrong & decisions.accept).nonzero()[:, 0].tolist()
    watch.label({str(table.id[row]): int(table.label[row]) for row in rows})
    assert watch.report().outcomes == 0
    labels = dict(zip(table.id.tolist(), table.label.tolist(), strict=True))
    report = watch.label({name: labels[name] for name in watch.request_labels(1000)})
    assert report.outcomes == int(decisions.accept.sum())
    assert report.observed == pytest.approx(len(rows) / report.outcomes)
    assert "guarantee" in [one["kind"] for one in report.alarms]


def test_names_that_come_again_and_labels_that_come_late(guard):
    watch = guard.watch()
    table = named(blobs(100, seed=6))
    first = guard.decide(table.select("feature", "logit", "id"))
    watch.update(first)
    requested = watch.request_labels(30)
    for seed in (7, 8, 9):
        watch.update(guard.decide(named(blobs(500, seed=seed)).select("feature", "logit", "id")))
    predicted = dict(zip(table.id.tolist(), first.predicted[:, 0].tolist(), strict=True))
    report = watch.label({name: predicted[name] for name in requested})
    assert (report.outcomes, report.observed) == (30, 0.0)


def answered(watch: Watch, labels: dict[str, int | None], names: list[str], answer: str) -> WatchReport:
    """Labels of some images; those of the others never arrive, or cannot be known."""
    others = {} if answer == "never" else {name: None for name in labels if name not in names}
    return watch.label({name: labels[name] for name in names} | others)


@pytest.mark.parametrize("answer", ["never", "cannot be known"])
def test_labels_of_refused_images_alone_raise_no_alarm(refusing, answer):
    """Half of the correct predictions are refused, as guaranteed; whoever labels only these sees nothing else."""
    decisions = drawn_decisions(refusing, 900, accepted=0.5)
    refused = {name for name, accept in zip(decisions.ids, decisions.accept.tolist(), strict=True) if not accept}
    make = seen(refusing, decisions)
    for seed in range(3):
        watch = make(seed=seed)
        labels = labels_of(decisions, np.zeros(900))
        requested = watch.request_labels(900)
        report = answered(watch, {name: labels[name] for name in requested}, sorted(refused), answer)
        assert report.evidence["guarantee"] < 20
        assert report.missing > 300
        assert report.outcomes == len(refused) - report.waiting
        low, high = report.interval
        assert low <= 0.5 <= high


@pytest.mark.parametrize("answer", ["never", "cannot be known"])
def test_errors_that_nobody_labels_are_within_the_interval(guard, answer):
    decisions, rng = drawn_decisions(guard, 900, accepted=1.0), np.random.default_rng(0)
    wrong = rng.random(900) < 0.37
    labels = labels_of(decisions, wrong)
    watch = guard.watch()
    watch.update(decisions)
    requested = watch.request_labels(300)
    right = [name for name in requested if not wrong[decisions.ids.index(name)]]
    report = answered(watch, {name: labels[name] for name in requested}, right, answer)
    assert (report.observed, report.alarms) == (0.0, ())
    assert report.interval[0] == 0.0
    assert report.interval[1] > 0.37
    assert report.outcomes == len(right) - report.waiting
    assert report.rates[-1][1:] == (report.outcomes, 0.0, *report.interval)
    shown = report.facts()
    assert shown["errors among accepted images"].startswith(f"at least 0 % from {report.outcomes} outcomes")
    assert shown["labels missing"].startswith(f"{report.missing}: no alarm depends on them")


@pytest.mark.parametrize("order", ["errors first", "errors alone", "errors last"])
def test_alarms_stay_rare_in_whatever_order_labels_arrive(guard, order):
    """At an error rate of exactly the risk, with errors where the uncertainty is high."""
    decisions, rng, alarms, outside = drawn_decisions(guard, 300, accepted=1.0), np.random.default_rng(0), 0, 0
    rank = decisions.uncertainty.argsort().argsort().numpy() / 300
    make = seen(guard, decisions)
    for seed in range(40):
        watch = make(alpha=0.4, seed=seed)
        wrong = rng.random(300) < 0.2 * rank  # 0.1 on average
        labels = labels_of(decisions, wrong)
        requested = watch.request_labels(100)
        first = [name for name in requested if wrong[decisions.ids.index(name)] != (order == "errors last")]
        watch.label({name: labels[name] for name in first[::2]})
        watch.label({name: labels[name] for name in first[1::2]})
        if order != "errors alone":
            watch.label({name: labels[name] for name in requested if name not in first})
        report = watch.report()
        alarms += any(one["kind"] == "guarantee" for one in report.alarms)
        outside += not report.interval[0] <= 0.1 <= report.interval[1]
    assert binomtest(alarms, 40, 0.2, alternative="greater").pvalue > 0.01
    assert binomtest(outside, 40, 0.2, alternative="greater").pvalue > 0.01


@pytest.mark.parametrize("kind", ["risk", "false_alarms"])
def test_a_label_that_does_not_arrive_is_missing_once_a_hundred_wait_for_it(guard, refusing, kind):
    chosen = guard if kind == "risk" else refusing
    decisions = drawn_decisions(chosen, 700, accepted=1.0)
    watch, labels = chosen.watch(), labels_of(decisions, np.zeros(700))
    watch.update(decisions)
    requested = watch.request_labels(130)
    report = watch.label({name: labels[name] for name in requested[1:100]})
    assert (report.outcomes, report.waiting, report.requested, report.missing) == (0, 99, 31, 0)
    report = watch.label({requested[100]: labels[requested[100]]})
    # twenty draws of five are tested, with 99 labels; one of the next draw waits
    assert (report.outcomes, report.waiting, report.requested, report.missing) == (99, 1, 29, 1)
    assert report.rates[-1][1] == 99.0


def test_images_that_are_lost_make_room_for_others(guard):
    decisions = drawn_decisions(guard, 400, accepted=1.0)
    watch = guard.watch()
    watch.update(decisions)
    lost = watch.request_labels(50)
    assert watch.request_labels(50) == lost
    report = watch.label(dict.fromkeys(lost, "?"))
    assert (report.outcomes, report.missing, report.requested, report.observed) == (0, 50, 0, None)
    assert not set(watch.request_labels(50)) & set(lost)


def test_labels_of_every_form(tmp_path):
    guard = Guard.fit(None, blobs(1500), risk=0.1, scores=["entropy"], sets=False)
    guard.classes = ("ant", "bee", "cat", "dog")
    watch = guard.watch()
    (tmp_path / "labels.csv").write_text("path,label\na.png,bee\nb.png,3\nc.png,\nd.png,?\n")
    assert watch.check_labels(tmp_path / "labels.csv") == {"a.png": 1, "b.png": 3, "d.png": None}
    assert watch.check_labels({"a": 2.0, "b": "2", "c": None, "d": "", "e": "?"}) == {
        "a": 2,
        "b": 2,
        "c": None,
        "d": None,
        "e": None,
    }
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame({"id": ["a", "b", "c"], "label": [1.0, float("nan"), 3.0]})
    assert watch.check_labels(frame) == {"a": 1, "c": 3}
    with pytest.raises(GuardError, match="a label must be a class of the model, by its number or its name; got 'eel'"):
        watch.check_labels({"a": "eel"})


def test_the_rate_is_never_above_one(guard):
    decisions = drawn_decisions(guard, 300, accepted=1.0)
    make = seen(guard, decisions)
    for seed in range(5):
        watch = make(seed=seed)
        labels = labels_of(decisions, np.ones(300))
        report = watch.label({name: labels[name] for name in watch.request_labels(20)})
        assert 0.5 < report.observed <= 1
        assert report.interval[0] > 0.1


def test_weights_are_within_their_bound_where_all_strata_are_alike(guard):
    """By rounding, 1 / pi may exceed it, and what is read again must be a draw that can have been made."""
    make = seen(guard, drawn_decisions(guard, 80, accepted=1.0))
    for rate in np.linspace(0.0005, 0.05, 40).tolist():
        state = make()._state
        state.strata = [[1.0, rate] for _ in state.strata]
        state.request("risk", 33, np.random.default_rng(0))
        assert all(max(one["weights"]) <= one["largest"] for one in state.requests)
