"""A watch: no alarm without a change, what changed and since when, labels that come later, and a state that lasts."""

import math
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import dubito
from dubito.errors import ArtefactError, DubitoWarning, GuardError, ValueRangeError
from dubito.guard import Guard
from dubito.guard.thresholds import risk_threshold
from dubito.guard.watch import Watch
from dubito.table import Table

from .world import blobs, named

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def guard() -> Guard:
    return Guard.fit(None, blobs(1500), risk=0.1, scores=["entropy"], sets=False)


def unlabelled(n: int, seed: int, noise: float = 1.0) -> Table:
    table = blobs(n, seed=seed, noise=noise)
    return named(table.select("feature", "logit"), f"{seed}-")


def test_images_like_those_of_the_calibration_raise_no_alarm(guard):
    watch = guard.watch()
    report = watch.update(guard.decide(unlabelled(600, seed=1)))
    assert (report.images, report.alarm, report.title()) == (600, False, "600 images, no alarm")
    assert report.findings()[-1].startswith("Nothing has to be done. About")


def test_a_change_is_found_named_and_dated(guard):
    watch = guard.watch()
    watch.update(guard.decide(unlabelled(300, seed=1)))
    report = watch.update(guard.decide(unlabelled(150, seed=2, noise=2.5)))
    (alarm,) = report.alarms
    assert alarm["kind"] == "images"
    assert 300 < alarm["images"] < 450
    assert abs(alarm["since"] - 300) < 60
    moved = " ".join(report.findings())
    assert "Features are rarer than those of the calibration images since image" in moved
    assert "of the images are accepted and" in moved
    assert "'2-" in moved  # images that show it
    assert "guard.refit" in report.advice
    again = watch.update(guard.decide(unlabelled(50, seed=3, noise=2.5)))
    assert again.alarms == report.alarms  # one alarm, not one per image


def test_classes_that_are_predicted_more_often(guard):
    table = unlabelled(2000, seed=4)
    only = table.rows((table.logit.argmax(1) == 2).nonzero()[:, 0][:120])
    report = guard.watch().update(guard.decide(only))
    assert report.evidence["classes"] > 200
    assert any(one.startswith("'class 2' is predicted for 100 % of the images") for one in report.findings())


def test_labels_of_a_batch_show_that_the_guarantee_is_broken(guard):
    table = named(blobs(400, seed=5))
    wrong = torch.rand(400, generator=torch.Generator().manual_seed(0)) < 0.4
    table = table.select("feature", "logit", "id").extended(
        label=torch.where(wrong, (table.label + 1) % 4, table.label)
    )
    report = guard.watch().update(guard.decide(table))
    assert [one["kind"] for one in report.alarms] == ["guarantee"]
    low, high = report.interval
    assert 0.1 < low < 0.4 < high
    assert report.findings()[0].startswith("The guarantee is broken: ")
    assert report.advice.startswith("Stop using its verdicts; label about")
    assert "guard.with_risk with a smaller risk accepts less, and guarantees nothing" in report.advice


def test_a_folder_of_other_things_is_no_watch(guard, tmp_path):
    (tmp_path / "photo.jpg").touch()
    with pytest.raises(ArtefactError, match=r"the watch cannot be saved in .* other things \(photo\.jpg\)"):
        guard.watch(tmp_path)
    assert [one.name for one in tmp_path.iterdir()] == ["photo.jpg"]


def test_a_change_that_is_over_is_still_described_by_the_images_that_showed_it(guard):
    watch = guard.watch()
    watch.update(guard.decide(unlabelled(300, seed=1)))
    changed = watch.update(guard.decide(unlabelled(60, seed=2, noise=3.0)))
    assert changed.alarm
    report = watch.update(guard.decide(unlabelled(1500, seed=3)))
    for name, examples in changed.examples.items():
        assert {one.partition("-")[0] for one in report.examples[name]} == {"2"}, examples
    assert report.moved[0].partition(" since ")[0] == changed.moved[0].partition(" since ")[0]


def test_a_class_that_was_never_predicted_before():
    table = blobs(1500, c=3)
    guard = Guard.fit(None, blobs(1500, seed=1, c=3), risk=0.2, scores=["entropy"], sets=False, novel=0.0)
    assert guard.classes is None
    known = table.logit.argmax(1) < 2
    guard = guard.refit(table.rows(known.nonzero()[:, 0]))
    report = guard.watch().update(guard.decide(named(blobs(200, seed=3, c=3)).select("feature", "logit", "id")))
    assert report.images == 200
    assert "classes" in report.evidence


@pytest.mark.parametrize("kind", ["coverage", "false_alarms"])
def test_other_guarantees(kind):
    guard = Guard.fit(None, blobs(1500), **{kind: 0.8 if kind == "coverage" else 0.1}, scores=["entropy"], sets=False)
    good = guard.watch().update(guard.decide(named(blobs(300, seed=7))))
    assert not good.alarm
    assert good.outcomes > 200
    bad = guard.watch().update(guard.decide(named(blobs(300, seed=8, noise=4))))
    assert "guarantee" in [one["kind"] for one in bad.alarms]
    assert bad.advice.startswith("It refuses more than is guaranteed: label about")


def test_the_state_is_read_again_and_belongs_to_one_guard(guard, tmp_path):
    table = unlabelled(120, seed=9)
    whole = guard.watch(seed=3).update(guard.decide(table))
    for start in range(0, 120, 40):
        report = guard.watch(tmp_path / "watch", seed=3).update(guard.decide(table.rows(slice(start, start + 40))))
    assert report.to_dict() == whole.to_dict()
    assert (tmp_path / "watch" / "watch.json").stat().st_size < 250_000
    for other in (guard.with_risk(0.2), guard):
        with pytest.raises(ArtefactError, match="is of another guard, or of another alpha or seed"):
            other.watch(tmp_path / "watch", seed=4)
    (tmp_path / "watch" / "watch.json").write_text("{}")
    with pytest.raises(ArtefactError, match=r"watch\.json must be of format 6"):
        guard.watch(tmp_path / "watch", seed=3)


def test_a_folder_is_opened_with_its_own_alpha_and_seed(guard, tmp_path):
    made = guard.watch(tmp_path / "watch", alpha=0.05, seed=3)
    made.update(guard.decide(unlabelled(20, seed=9)))
    for again in (guard.watch(tmp_path / "watch"), Watch.open(guard, tmp_path / "watch")):
        assert (again.alpha, again.seed, again.report().images) == (0.05, 3, 20)
    for contradiction in ({"alpha": 0.01}, {"seed": 0}):
        with pytest.raises(ArtefactError, match=r"another alpha or seed\. .* leave out alpha and seed"):
            guard.watch(tmp_path / "watch", **contradiction)
    assert (guard.watch().alpha, guard.watch().seed) == (0.01, 0)
    with pytest.raises(ArtefactError, match="is of another guard, or of another alpha or seed"):
        Watch.open(guard.with_risk(0.2), tmp_path / "watch")
    with pytest.raises(ArtefactError, match=r"watch: '.*none' must be the folder of a watch; it has no watch\.json"):
        Watch.open(guard, tmp_path / "none")
    assert not (tmp_path / "none").exists()  # looking for a watch makes none


def test_images_that_show_a_change_are_those_after_it(guard):
    watch = guard.watch()
    watch.update(guard.decide(unlabelled(300, seed=1)))
    assert watch.report().examples == {}
    report = watch.update(guard.decide(unlabelled(150, seed=2, noise=2.5)))
    assert set(report.examples) <= {"uncertainty", "density", "classes"}
    assert len(report.examples["density"]) == 12
    assert {name.partition("-")[0] for name in report.examples["density"]} == {"2"}
    assert ", ".join(f"'{name}'" for name in report.examples["density"][2::-1]) in " ".join(report.moved)


def test_the_history_counts_outcomes_when_labels_come(guard):
    watch = guard.watch()
    table = named(blobs(100, seed=6))
    decisions = guard.decide(table.select("feature", "logit", "id"))
    watch.update(decisions)
    assert watch.report().rates == ()
    labels = dict(zip(table.id.tolist(), table.label.tolist(), strict=True))
    report = watch.label({name: labels[name] for name in watch.request_labels(40)})
    assert report.rates == ((100.0, 40.0, report.observed, *report.interval),)
    assert report.history[-1][2] == pytest.approx(math.log(report.evidence["guarantee"]))  # after the last image
    assert report.history[-2][2] == 0.0


def feed(guard: Guard, folder: Path, seed: int) -> None:
    watch = guard.watch(folder)
    for start in range(5):
        watch.update(guard.decide(unlabelled(50, seed).rows(slice(10 * start, 10 * start + 10))))


def test_several_processes_feed_one_watch(guard, tmp_path):
    processes = [
        multiprocessing.get_context("fork").Process(target=feed, args=(guard, tmp_path, seed)) for seed in (1, 2)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(120)
    assert guard.watch(tmp_path).report().images == 100


KILLED = """
import sys
import dubito
guard = dubito.Guard.load(sys.argv[1])
table = dubito.open(sys.argv[2])
watch = guard.watch(sys.argv[3])
while True:
    watch.update(guard.decide(table))
    print(watch.report().images, flush=True)
"""


def test_killed_at_any_instant_nothing_is_lost(tmp_path):
    model = dubito.wrap(torch.nn.Linear(6, 4))
    cache = dubito.extract(model, torch.randn(5, 6), tmp_path / "cache", workers=0, progress=False)
    guard = Guard.fit(None, blobs(1500), risk=0.1, scores=["entropy"], sets=False, novel=0.0)
    guard.save(tmp_path / "guard")
    assert len(cache) == 5
    command = [sys.executable, "-c", KILLED, *(str(tmp_path / name) for name in ("guard", "cache", "watch"))]
    rng, seen = np.random.default_rng(0), 0
    for _ in range(4):
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            lines = [int(process.stdout.readline())]
            time.sleep(rng.uniform(0, 0.15))
            os.kill(process.pid, signal.SIGKILL)
            lines += [int(line) for line in process.stdout.read().splitlines() if line]
        images = guard.watch(tmp_path / "watch").report().images
        assert images % 5 == 0
        assert images >= max(lines) > seen
        seen = images
    undisturbed = guard.watch()
    for _ in range(images // 5):
        expected = undisturbed.update(guard.decide(cache))
    assert guard.watch(tmp_path / "watch").report().to_dict() == expected.to_dict()
    assert expected.alarms  # the same five images again and again


def test_a_guard_that_is_refitted_is_calibrated_on_all_new_images(guard):
    new = blobs(800, seed=11, noise=1.3)
    refitted = guard.refit(new)
    assert (refitted.rows["calibrate"], refitted.threshold.of) == (800, 800)
    u, wrong = refitted.calibration.outcomes
    assert refitted.threshold == risk_threshold(u, wrong, risk=0.1, confidence=0.95)
    assert refitted.threshold.value < guard.threshold.value
    assert not refitted.watch().update(refitted.decide(unlabelled(300, seed=12, noise=1.3))).alarm
    with pytest.raises(GuardError, match=r"guard\.refit: .*needs at least 29 calibration images"):
        guard.refit(new.rows(slice(0, 20)))


def test_a_stream_has_the_verdicts_of_the_guard(guard):
    table = unlabelled(45, seed=13)
    watch = guard.watch()
    streamed = list(guard.stream(table, batch=10, watch=watch))
    assert [one.to_dict() for one in streamed] == [one.to_dict() for one in guard.decide(table)]
    assert watch.report().images == 45


def test_broken_files_are_left_out_of_a_stream(tmp_path):
    module = torch.nn.Sequential(torch.nn.AdaptiveAvgPool2d(2), torch.nn.Flatten(), torch.nn.Linear(12, 2))
    model = dubito.wrap(module, transform=dubito.Preprocess(size=(8, 8)))
    for number in range(5):
        Image.new("RGB", (8, 8), (40 * number, 0, 0)).save(tmp_path / f"{number}.png")
    (tmp_path / "2.png").write_bytes(b"broken")
    inputs = torch.randn(60, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    guard = Guard.fit(model, dubito.extract(model, inputs, to=None, progress=False), coverage=0.5, scores=["entropy"])
    with pytest.warns(DubitoWarning, match=r"2\.png' must be an image file"):
        assert [one.id for one in guard.stream(tmp_path, batch=1)] == ["0.png", "1.png", "3.png", "4.png"]


def test_a_coverage_is_recalibrated_without_labels():
    guard = Guard.fit(None, blobs(600), coverage=0.8, scores=["entropy"])
    assert guard.sets is not None
    new = guard.refit(blobs(300, seed=4).select("feature", "logit"))
    assert (new.sets, new.threshold.of) == (None, 300)


def test_settings(guard):
    with pytest.raises(ValueRangeError, match="watch: alpha must be a number in"):
        Watch(guard, alpha=0.0)
    with pytest.raises(ValueRangeError, match=r"watch\.request_labels: count must be"):
        guard.watch().request_labels(0)
    assert guard.watch().request_labels(5) == []
    with pytest.raises(GuardError, match=r"guard\.stream: watch must be a watch of this guard"):
        next(guard.stream(unlabelled(5, seed=1), watch=guard.with_risk(0.2).watch()))
    strict = guard.with_risk(0.999).watch().update(guard.decide(unlabelled(5, seed=1)))
    assert strict.advice.endswith("would reveal a rate of 99.9 %.")
    pytest.importorskip("matplotlib")
    report = guard.watch().update(guard.decide(unlabelled(30, seed=1)))
    assert report.plot().get_ylabel() == "evidence, powers of ten"
    assert math.isfinite(report.history[-1][1])
