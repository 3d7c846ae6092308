"""The picture of a watch: every line, mark and interval is where the numbers of the report say."""

import math
import xml.etree.ElementTree as ET
from dataclasses import replace

import pytest

from dubito.guard import Guarantee
from dubito.guard.watch_picture import watch_figures, watch_key
from dubito.guard.watch_report import WatchReport

EVIL = "<img src=x onerror=alert(1)>&'\".png"
TEN = math.log(10)


def report(**changes) -> WatchReport:
    made = WatchReport(
        images=400,
        alpha=0.02,  # an alarm is raised at 2 / 0.02 = 10²
        guarantee=Guarantee("risk", 0.1, 0.95),
        alarms=({"kind": "images", "images": 300, "id": EVIL, "since": 200},),
        evidence={"uncertainty": 1e4, "guarantee": 10.0},
        since={"uncertainty": 200, "guarantee": 0},
        outcomes=40,
        observed=0.2,
        interval=(0.07, 0.42),
        waiting=0,
        missing=0,
        repeated=0,
        requested=0,
        volunteered=0,
        unknown=0,
        moved=(),
        advice="",
        examples={},
        history=(
            (100.0, 0.0, 0.0),
            (200.0, 1 * TEN, 0.0),
            (300.0, 2 * TEN, 0.5 * TEN),
            (400.0, 4 * TEN, 1 * TEN),
        ),
        rates=((200.0, 10.0, 0.1, 0.01, 0.6), (400.0, 40.0, 0.2, 0.07, 0.42)),
    )
    return replace(made, **changes)


def drawn(report: WatchReport) -> list[ET.Element]:
    return [ET.fromstring(str(svg)) for svg, _, _ in watch_figures(report)]  # noqa: S314 (our own drawing)


def path(figure: ET.Element, name: str) -> str:
    return next(str(one.get("d")) for one in figure.iter("path") if one[0].text == name)


def y(powers: float, highest: float = 4.4) -> float:
    """Below the name of the axis and a margin, 24, there are 158 pixels; the axis ends a tenth above all lines."""
    return 24 + 158 * (1 - powers / highest)


def test_evidence_is_that_of_the_history_and_begins_at_one():
    evidence, _ = drawn(report())
    # 252 pixels right of a margin of 40, for 400 images: 63 for 100. Capital begins at 1, which is 0 powers of ten.
    points = [(40, 0), (103, 0), (166, 1), (229, 2), (292, 4)]
    assert path(evidence, "images") == "M" + "L".join(f"{x:.1f} {y(powers):.1f}" for x, powers in points)
    points = [(40, 0), (103, 0), (166, 0), (229, 0.5), (292, 1)]
    expected = "M" + "L".join(f"{x:.1f} {y(powers):.1f}" for x, powers in points)
    assert path(evidence, "errors among accepted images") == expected
    assert path(evidence, "alarm") == f"M40.0 {y(2):.1f}L292.0 {y(2):.1f}"  # log10(2 / 0.02)
    assert [name for name, _, _ in watch_key(report())] == ["images", "errors among accepted images"]


def test_an_alarm_is_marked_at_its_image_with_its_number_and_shaded_since_the_change():
    second = {"kind": "guarantee", "images": 400, "id": "b.png", "since": 100}
    evidence, _ = drawn(report(alarms=(*report().alarms, second)))
    first, last = (one for one in evidence.iter("g"))
    assert (first.get("class"), last.get("class")) == ("span first", "span second")
    assert (first.find("rect").get("x"), first.find("rect").get("width")) == ("166.0", "63.0")  # images 200 to 300
    assert (first.find("line").get("x1"), first.find("text").text) == ("229.0", "1")
    assert (last.find("rect").get("x"), last.find("rect").get("width")) == ("103.0", "189.0")
    assert (last.find("line").get("x1"), last.find("text").text) == ("292.0", "2")
    assert first.find("text").get("y") != last.find("text").get("y")  # close alarms can be told apart
    told = f"Alarm 1 after 300 images, at '{EVIL}': images have changed, since about image 201."
    assert first.find("title").text == told
    assert told in evidence.get("aria-label")
    assert "images 4.0, errors among accepted images 1.0; an alarm is raised at 2.0." in evidence.get("aria-label")


def test_without_an_alarm_nothing_is_marked():
    evidence, _ = drawn(report(alarms=()))
    assert list(evidence.iter("g")) == []
    assert evidence.get("aria-label").endswith("No alarm.")


def test_names_stay_text():
    (svg, _, _), *_ = watch_figures(report())
    assert "<img" not in svg


def test_the_rate_has_the_interval_of_every_time_at_which_outcomes_became_known():
    _, rate = drawn(report())
    dots = [float(one.get("cx")) for one in rate.iter("circle")]
    assert dots == [166.0, 292.0]  # 10 outcomes after 200 images, 40 after 400
    low, high = report().interval
    highest = 1.5 * 100 * high
    whisker = [one for one in rate.iter("line") if one.get("class") == "whisker"][-1]
    assert float(whisker.get("y1")) == pytest.approx(y(100 * low, highest), abs=0.06)
    assert float(whisker.get("y2")) == pytest.approx(y(100 * high, highest), abs=0.06)
    circle = list(rate.iter("circle"))[-1]
    assert float(circle.get("cy")) == pytest.approx(y(20, highest), abs=0.06)
    assert path(rate, "guaranteed").startswith(f"M40.0 {y(10, highest):.1f}L")
    assert "20 % from 40 outcomes, between 7.0 % and 42 %;" in rate.get("aria-label")


def test_many_outcomes_have_few_intervals_and_the_last_one_is_there():
    rates = tuple((float(n), float(n), 0.1, 0.0, 0.5) for n in range(1, 401))
    _, rate = drawn(report(rates=rates))
    dots = [float(one.get("cx")) for one in rate.iter("circle")]
    assert len(dots) <= 12
    assert dots[-1] == 292.0


def test_a_lasting_change_does_not_hide_the_line_of_alarm():
    history = (*report().history[:-1], (400.0, 300 * TEN, 1 * TEN))
    (svg, _, small), _ = watch_figures(report(history=history))
    evidence = ET.fromstring(str(svg))  # noqa: S314 (our own drawing)
    assert path(evidence, "images").endswith(f"L292.0 {y(10, 11):.1f}")
    assert small == "dashed: alarm; drawn up to 10"
    assert "images 300.0," in evidence.get("aria-label")


def test_no_image_and_no_outcome_yet():
    (evidence,) = drawn(report(images=0, alarms=(), outcomes=0, observed=None, history=(), rates=()))
    assert path(evidence, "images") == f"M40.0 {y(0, 2.2):.1f}"
    assert [one.text for one in evidence.iter("text") if one.get("text-anchor") == "middle"] == [
        "0",
        "1",
        "2",
        "3",
        "4",
    ]


def test_a_guaranteed_coverage_bounds_refusals():
    _, rate = drawn(report(guarantee=Guarantee("coverage", 0.75, 0.95)))
    assert "Refused images: 20 % from 40 outcomes" in rate.get("aria-label")
    assert "at most 25 % are guaranteed" in rate.get("aria-label")
