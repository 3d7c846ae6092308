"""The page of an ensemble: mutual information against the size of sub-ensembles, as a table, a curve and histograms."""

from pathlib import Path
from typing import Any

from dubito.explain.collapse import Collapse, EnsembleDiagnosis
from dubito.metrics import Interval
from dubito.report.page import render
from dubito.report.svg import Axis, Line, histogram, lines

_FLOOR = 1e-9
"""Mutual information below this is drawn here."""
_ABOUT = {
    "MI": "Mutual information of class and member, in nats: how much members disagree about an image. It is the "
    "epistemic part of the uncertainty; the rest, on which members agree, is the aleatoric part.",
    "24 x 1, 12 x 2 ...": "The same members as 24 single ones, as 12 pairs, and so on; the members of a sub-ensemble "
    "are averaged. MI is then computed between sub-ensembles.",
    "share": "MI divided by the total uncertainty, the entropy of the mean over all members.",
    "by averaging": "What would be left of MI if members were exchangeable and differed little: averaging alone makes "
    "sub-ensembles agree.",
    "AUROC": "The probability that MI of an out-of-distribution image exceeds that of an in-distribution one: 50 % is "
    "chance.",
}


def write_ensemble_page(diagnosis: EnsembleDiagnosis, to: str | Path) -> Path:
    """Write the page of an ensemble and return its path."""
    header, *body = diagnosis.lines()
    return render(
        "ensemble.html.j2",
        to,
        title="Do your members disagree?" if len(diagnosis.ensembles) == 1 else "Do larger models disagree less?",
        lead="What the members of an ensemble disagree about is what they do not know. Averaged into sub-ensembles, "
        "they seem to agree, although nothing has been learned.",
        verdict=diagnosis.verdict,
        findings=diagnosis.findings()[1:],
        facts=_facts(diagnosis),
        confidence=f"{diagnosis.confidence:.0%}",
        header=header,
        lines=body,
        curves=_curves(diagnosis),
        sets=[_set(one) for one in diagnosis.ensembles if one.ood is not None],
        about=_ABOUT,
    )


def _facts(diagnosis: EnsembleDiagnosis) -> list[str]:
    first = diagnosis.ensembles[0]
    sizes = "" if len(diagnosis.ensembles) == 1 else f", {len(diagnosis.ensembles)} model sizes"
    facts = [f"{first.name}, {first.rows:,} images", f"{first.members} {diagnosis.of}{sizes}", first.order]
    return facts + ([f"out-of-distribution: {first.ood}"] if first.ood else [])


def _curves(diagnosis: EnsembleDiagnosis) -> list[dict[str, Any]]:
    """MI against size: of models where there are several, and of sub-ensembles."""
    drawn = []
    if diagnosis.decay is not None:
        keys = [one.key or 1.0 for one in diagnosis.ensembles]
        drawing = _curve(keys, [one.epistemic for one in diagnosis.ensembles])
        drawn.append({"drawing": drawing, "title": "all members, by size of the models", "small": "MI in nats"})
    for one in diagnosis.ensembles:
        if len(one.levels) > 1 and one.kind != "same":
            sizes = [float(level.size) for level in one.levels]
            expected = [level.expected for level in one.levels]
            title = "by size of sub-ensembles" if one.key is None else f"models of {one.key:g}"
            exponent = "" if one.decay is None else f"s^\N{MINUS SIGN}{one.decay.exponent.value:.2f}"
            drawing = _curve(sizes, [level.information for level in one.levels], expected)
            drawn.append({"drawing": drawing, "title": title, "small": exponent})
    return drawn


def _curve(sizes: list[float], values: list[Interval], expected: list[float] | None = None) -> str:
    """MI with intervals, and the dashed line that averaging alone would leave."""
    y = [value.value for value in values]
    measured = Line(sizes, y, intervals=[(value.low, value.high) for value in values])
    compared = [Line(sizes, expected, dashed=True)] if expected else []
    ends = [end for value in values for end in (value.low, value.high)]
    return lines(
        [*compared, measured],
        x=Axis.over(sizes, log=True),
        y=Axis.over([*y, *ends, *(expected or [])], log=True, floor=_FLOOR, whole=True),
        x_ticks=sizes,
        label="Mutual information: " + ", ".join(f"{v:.2g} at {size:g}" for size, v in zip(sizes, y, strict=True)),
    )


def _set(one: Collapse) -> dict[str, Any]:
    """MI of in-distribution and out-of-distribution images, per size of sub-ensembles."""
    return {
        "in_distribution": one.name,
        "ood": one.ood,
        "of": "" if one.key is None else f", models of {one.key:g}",
        "histograms": [
            {
                "drawing": histogram(one.scores[level.size].numpy(), one.ood_scores[level.size].numpy(), log=True),
                "title": str(level),
                "small": "" if level.auroc is None else f"AUROC {100 * level.auroc.value:.1f} %",
            }
            for level in one.levels
        ],
    }
