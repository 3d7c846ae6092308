"""The sections of a report that consist of numbers: scores, calibration, risk, OOD images, causes, geometry.

Every function returns the blocks of one section; none where the report lacks what it shows. A block is a kind, which
templates/report.html.j2 knows how to lay out, and its values:

    table      header, rows of cells and a caption        figures   (drawing, title, small text), side by side
    words      sentences                                  key       (name, kind, dashes) of lines
    heading    a text                                     sides     names of the in-distribution and the OOD images
    row        blocks side by side                        folded    a title, and sentences that open on demand
    facts      texts by name                              cards     images
    more       what else could be there, and the call that adds it
"""

import re
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from jaxtyping import Float64
from markupsafe import Markup

from dubito.evaluate.evaluate import USUAL, USUAL_TITLE, Evaluation
from dubito.explain.pages import cause_bars
from dubito.guard.watch_picture import watch_figures, watch_key
from dubito.metrics import Interval, proportion
from dubito.page.render import number, words
from dubito.page.svg import SERIES, Axis, Line, histogram, lines, stairs
from dubito.protocols.corruption_curve import CorruptionCurves
from dubito.report.parts import best_score
from dubito.report.report import ModelReport
from dubito.report.summary import share

Blocks = list[tuple[str, Any]]
Cell = tuple[str, str, str]
"""A text, a small text below it, and a class of the style sheet."""
_DRAWN = 5
"""Curves that have a colour; others are grey."""
_HISTOGRAMS = 3
"""Scores whose histograms are drawn, for each OOD table."""
_LEFT_OUT = "Left out:"
_PER_CENT = (0.0, 20.0, 40.0, 60.0, 80.0, 100.0)


def score_table(report: ModelReport) -> Blocks:
    """Every score by every question, the best first, and its cost."""
    comparison = report.comparison
    if comparison is None:
        return []
    errors = comparison.errors_at_coverage
    header = ["score", *([USUAL_TITLE] if errors else []), *(one.title for one in comparison.questions), "µs / image"]
    rows = []
    for name in comparison.ranking:
        best = name == comparison.choice
        cells: list[Cell] = [(words(name), "use this one" if best else "", "best" if best else "")]
        cells += [(share(errors[name][USUAL]), "", "")] if errors else []
        for question in comparison.questions:
            leads = "better" if name in question.leading and len(question.leading) < len(question.scores) else ""
            cells.append((*_interval(question.scores[name].value), leads))
        cost = comparison.costs[name]
        cells.append((number(cost.microseconds), f"reads {', '.join(cost.reads)}", ""))
        rows.append(cells)
    findings = [_named(sentence, comparison.costs) for sentence in comparison.findings()]
    left_out = [sentence for sentence in findings if sentence.startswith(_LEFT_OUT)]
    said = [sentence for sentence in findings if sentence not in left_out]
    folded = [("folded", ("Scores that were left out, and why", left_out))] if left_out else []
    learn = "Other in-distribution images would add scores that learn, such as densities:"
    more = [] if "learned from" in report.tables else [("more", (learn, report.how["train"]))]
    return [("row", [("table", {"header": header, "rows": rows}), ("words", said)]), *folded, *more]


def reliability(report: ModelReport) -> Blocks:
    """The reliability diagram with exact intervals, how often each probability occurs, and the model's own metrics."""
    evaluation = report.evaluation
    if evaluation is None or evaluation.reliability is None:
        return []
    bins = list(zip(*evaluation.reliability, strict=True))
    exact = [proportion(round(accuracy * images), images) for _, accuracy, images in bins]
    measured = Line(
        [100 * confidence for confidence, _, _ in bins],
        [100 * accuracy for _, accuracy, _ in bins],
        name="accuracy",
        intervals=[(100 * one.low, 100 * one.high) for one in exact],
    )
    diagram = lines(
        [Line([0.0, 100.0], [0.0, 100.0], name="calibrated", dashed=True), measured],
        x=Axis(0.0, 100.0, name="probability of the predicted class, %"),
        y=Axis(0.0, 100.0, name="of these, right, %"),
        x_ticks=_PER_CENT,
        label="; ".join(f"of {images} images at {q:.0%}, {accuracy:.0%} right" for q, accuracy, images in bins),
    )
    probability = [100 * one.probability for one in report.trust.images]
    counts, edges = np.histogram(probability, bins=20, range=(0.0, 100.0))
    how_often = stairs(edges, counts.astype(np.float64), label=f"Probabilities of {len(probability)} predictions")
    figures = [(diagram, "Reliability", "dashed: calibrated"), (how_often, "How often each probability occurs", "%")]
    metrics = [[(evaluation.heading(key), "", ""), (*_interval(one), "")] for key, one in evaluation.model.items()]
    table = {"header": ["metric", "value"], "rows": metrics}
    return [("row", [*(("figures", [figure]) for figure in figures), ("table", table)])]


def risk_coverage(report: ModelReport) -> Blocks:
    """The error of the most certain images, by their share, for every score."""
    evaluation, comparison = report.evaluation, report.comparison
    if evaluation is None or comparison is None or not comparison.errors_at_coverage:
        return []
    order = list(dict.fromkeys([best_score(comparison), *comparison.ranking]))
    drawn = [_risk_curve(evaluation, name, *SERIES[place]) for place, name in enumerate(order[:_DRAWN])]
    highest = 1.05 * max(1.0, *(max(line.y) for line in drawn))
    others = [_risk_curve(evaluation, name, "other", "", highest) for name in order[_DRAWN:]]
    drawing = lines(
        [*others, Line([0.0, 100.0], [drawn[0].y[-1]] * 2, name="all images", dashed=True), *reversed(drawn)],
        x=Axis(0.0, 100.0, name="coverage: share of images accepted, %"),
        y=Axis(0.0, highest, name="risk: of these, wrong, %"),
        x_ticks=_PER_CENT,
        label="; ".join(f"{words(line.name)}: {line.y[0]:.1f} % to {line.y[-1]:.1f} % wrong" for line in drawn),
    )
    key = [(words(line.name), line.kind, line.pattern) for line in drawn]
    key += [(f"{len(others)} other scores", "other", "")] if others else []
    errors = comparison.errors_at_coverage
    header = ["score", *(f"at {100 * coverage:g} %" for coverage in errors[order[0]])]
    rows = [
        [(words(name), "", ""), *((share(rate), "", "") for rate in errors[name].values())] for name in order[:_DRAWN]
    ]
    table = {"header": header, "rows": rows, "caption": "Errors among the accepted images, by coverage"}
    figure = (drawing, "Risk by coverage", "dashed: all images")
    return [("key", key), ("row", [("figures", [figure]), ("table", table)])]


def in_and_out(report: ModelReport) -> Blocks:
    """Histograms of uncertainties of in-distribution and of out-of-distribution images."""
    comparison, blocks = report.comparison, list[tuple[str, Any]]()
    if comparison is None:
        return []
    for name in report.confident_ood:
        question = comparison[name]
        figures = []
        for score in list(dict.fromkeys([best_score(comparison), *question.scores]))[:_HISTOGRAMS]:
            inside, outside = (comparison.uncertainties[score][of].double().numpy() for of in (None, name))
            auroc = question.scores[score].value.value
            figures.append((histogram(inside, outside), words(score), f"AUROC {auroc:.3f}"))
        blocks += [("sides", (short_place(report.trust.name), name)), ("figures", figures)]
    return blocks


def corruption(report: ModelReport) -> Blocks:
    """How uncertainties grow with the severity of corruptions."""
    curves = report.corruption
    if curves is None:
        return []
    style = dict(zip(dict.fromkeys(one.corruption for one in curves.curves), SERIES, strict=False))
    figures = [
        (_corruption_lines(curves, score, style), words(score), "median over images")
        for score in dict.fromkeys(one.score for one in curves.curves)
    ]
    rows = [
        [
            (words(one.score), "", ""),
            (one.corruption, "", "word"),
            (f"{one.rises} of {one.steps}", "", ""),
            (*_interval(one.spearman), ""),
        ]
        for one in curves.curves
    ]
    header = ["score", "corruption", "steps that raise the median", "rank correlation with severity"]
    severities = ", ".join(map(str, curves.severities))
    sample = f"Measured on {curves.rows:,} of the images, drawn at random, at severities {severities}; 0 is clean."
    key = [(kind, *style[kind]) for kind in style]
    table = {"header": header, "rows": rows}
    figure = [("figures", [one]) for one in figures]
    return [("words", [sample]), ("key", key), ("row", [*figure, ("table", table)])]


def causes(report: ModelReport) -> Blocks:
    """What saturation, extrapolation and feature overlap cost, and what to do about each."""
    diagnosis = report.diagnosis
    if diagnosis is None:
        return []
    blocks: Blocks = [("words", diagnosis.notes)] if diagnosis.notes else []
    figures = {title: (drawing, title, small) for drawing, title, small in cause_bars(diagnosis)}
    for name, sentences in diagnosis.findings_by_set().items():
        blocks.append(("row", [("figures", [figures[name]]), ("words", sentences)]))
    return blocks


def geometry(report: ModelReport) -> Blocks:
    """Lengths, biases and angles of the last layer's weights, beside the optimal ones."""
    layer = report.structure
    if layer is None:
        return []
    marks = {"norm": None, "bias": (0.0, "optimal"), "cosine": (layer.optimal_cosine, "optimal")}
    figures = []
    for (key, mark), title in zip(marks.items(), ("length of weights", "bias", "cosine of pairs"), strict=True):
        edges, counts = _used_bins(*(one.double().numpy() for one in layer.histograms[key]))
        figures.append((stairs(edges, counts, label=f"Histogram: {title}", mark=mark), title, ""))
    header, *body = layer.lines()
    rows = [[(text, "", "") for text in line] for line in body]
    table = {"header": header, "rows": rows}
    return [("figures", figures), ("row", [("table", table), ("words", layer.findings())])]


def watch_history(report: ModelReport) -> Blocks:
    """How the evidence of a watch grew, its alarms, what has moved since when, and what to do next."""
    watch = report.watch
    if watch is None:
        return []
    figures = [("figures", [figure]) for figure in watch_figures(watch)]
    told = [*watch.alarms_in_words(), *watch.findings()]
    return [
        ("heading", watch.title()),
        ("key", watch_key(watch)),
        ("row", [*figures, ("words", told)]),
        ("facts", watch.facts()),
    ]


def short_place(name: str) -> str:
    """The last two parts of a path: where images lie on this machine is nobody else's business."""
    return "/".join(name.rstrip("/").split("/")[-2:])


def _interval(value: Interval) -> tuple[str, str]:
    return f"{value.value:.3f}", f"[{value.low:.3f}, {value.high:.3f}]"


def _risk_curve(evaluation: Evaluation, name: str, kind: str, pattern: str, highest: float = 100.0) -> Line:
    points = evaluation.risk_coverage[name]
    shown = points[min(len(points) - 1, len(points) // 20) :]  # of a handful of images, the error jumps
    risk = [min(100 * y, highest) for _, y in shown]
    return Line([100 * x for x, _ in shown], risk, name=name, kind=kind, pattern=pattern)


def _named(sentence: str, scores: Iterable[str]) -> str:
    """A sentence that calls scores as the tables do."""
    return re.sub("|".join(map(re.escape, sorted(scores, key=len, reverse=True))), lambda one: words(one[0]), sentence)


def _corruption_lines(curves: CorruptionCurves, score: str, style: Mapping[str, tuple[str, str]]) -> Markup:
    drawn = []
    for one in curves.curves:
        if one.score == score:
            severities, medians = (
                [float(level.severity) for level in one.levels],
                [level.median for level in one.levels],
            )
            kind, pattern = style[one.corruption]
            drawn.append(Line(severities, medians, name=one.corruption, kind=kind, pattern=pattern))
    return lines(
        drawn,
        x=Axis(float(curves.severities[0]), float(curves.severities[-1]), name="severity"),
        y=Axis.over([value for line in drawn for value in line.y], name=words(score)),
        x_ticks=[float(severity) for severity in curves.severities],
        label="; ".join(f"{line.name} from {line.y[0]:.3g} to {line.y[-1]:.3g}" for line in drawn),
    )


def _used_bins(
    middles: Float64[np.ndarray, "k"], counts: Float64[np.ndarray, "k"]
) -> tuple[Float64[np.ndarray, "_"], Float64[np.ndarray, "_"]]:
    """Edges and counts of a histogram, without the empty bins at either end."""
    used, width = np.nonzero(counts)[0], middles[1] - middles[0]
    kept = slice(max(int(used[0]) - 1, 0), int(used[-1]) + 2)
    return np.append(middles[kept] - width / 2, middles[kept][-1] + width / 2), counts[kept]
