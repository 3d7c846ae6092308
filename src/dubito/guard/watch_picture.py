"""The history of a watch as drawings for pages: how evidence grew, where alarms were raised, where the rate lies.

evidence    log10 of the capital of the tests of the images, and of the guarantee's, by number of images; an alarm is
            raised at 2 / alpha; shaded, from where a change has most likely begun to its alarm
rate        what the guarantee bounds, with the interval that holds at all times at once, beside the bound
"""

import math

from markupsafe import Markup

from dubito.guard.thresholds import percent
from dubito.guard.watch_report import WatchReport
from dubito.page.svg import SERIES, Axis, Line, Span, lines

Figure = tuple[Markup, str, str]
"""A drawing, its title, and a small text beside the title."""
_TALLEST = 10.0
"""Powers of ten: evidence of a lasting change grows without end, and the line of alarm is to be seen."""
_POINTS = 12
"""Intervals that have room beside each other."""


def watch_figures(report: WatchReport) -> list[Figure]:
    """Evidence by number of images and, once outcomes of the guarantee are known, their rate."""
    return [_evidence(report), *([_rates(report)] if report.outcomes else [])]


def watch_key(report: WatchReport) -> list[tuple[str, str, str]]:
    """Name, class of the style sheet and dashes of the two lines of evidence."""
    return [(name, *style) for name, style in zip(("images", report.rate), SERIES, strict=False)]


def _evidence(report: WatchReport) -> Figure:
    history = [(0.0, 0.0, 0.0), *(one[:3] for one in report.history)]
    alarm_at, last = report.alarm_at / math.log(10), [one / math.log(10) for one in history[-1][1:]]
    of_alarm = dict(zip(("images", "guarantee"), SERIES, strict=False))
    drawn = [
        Line(
            [one[0] for one in history],
            [min(one[place] / math.log(10), _TALLEST) for one in history],
            name=name,
            kind=kind,
            pattern=pattern,
        )
        for place, (name, kind, pattern) in enumerate(watch_key(report), 1)
    ]
    values = [value for line in drawn for value in line.y]
    end = _end(report)
    reached = ", ".join(f"{line.name} {value:.1f}" for line, value in zip(drawn, last, strict=True))
    words = report.alarms_in_words()
    spans = [
        Span(float(one["since"]), float(one["images"]), str(number), sentence, of_alarm[one["kind"]][0])
        for number, (one, sentence) in enumerate(zip(report.alarms, words, strict=True), 1)
    ]
    drawing = lines(
        [Line([0.0, end], [alarm_at] * 2, name="alarm", dashed=True), *drawn],
        x=Axis(0.0, end, name="images"),
        y=Axis(min(0.0, *values), 1.1 * max(alarm_at, *values), name="evidence, powers of ten"),
        spans=spans,
        label=f"Evidence after {report.images:,} images, in powers of ten: {reached}; an alarm is raised at "
        f"{alarm_at:.1f}. {' '.join(words) or 'No alarm.'}",
    )
    cut = f"; drawn up to {_TALLEST:g}" if max(last) > _TALLEST else ""
    return drawing, "Evidence", f"dashed: alarm{cut}"


def _rates(report: WatchReport) -> Figure:
    points = report.rates[::-1][:: math.ceil(len(report.rates) / _POINTS)][::-1]
    bound, last = 100 * report.guarantee.bound, points[-1]
    highest = min(100.0, 1.5 * max(bound, 100 * last[4]))  # the first few outcomes do not set the scale
    shown = [(100 * min(low, highest / 100), 100 * min(high, highest / 100)) for *_, low, high in points]
    rates = Line(
        [one[0] for one in points],
        [min(100 * one[2], highest) for one in points],
        name=report.rate,
        intervals=shown,
    )
    low, high = (percent(one) for one in last[3:])
    end = _end(report)
    drawing = lines(
        [Line([0.0, end], [bound] * 2, name="guaranteed", dashed=True), rates],
        x=Axis(0.0, end, name="images"),
        y=Axis(0.0, highest, name=f"{report.rate}, %"),
        label=f"{report.rate.capitalize()}: {report.rate_observed}, between {low} and {high}; at most "
        f"{percent(report.guarantee.bound)} are guaranteed.",
    )
    return drawing, "Is the guarantee kept?", "dashed: guaranteed"


def _end(report: WatchReport) -> float:
    """Of the axis of images, which has whole numbers."""
    return float(max(report.images, 4))
