"""The pages of a diagnosis, with its causes as bars, and of an ensemble, with mutual information against size."""

from collections.abc import Iterator

from torch import Tensor

from dubito.explain.causes import Causes, Estimate, points
from dubito.explain.collapse import EnsembleDiagnosis
from dubito.explain.diagnosis import Diagnosis
from dubito.metrics import Interval
from dubito.page.render import fill
from dubito.page.svg import Axis, Line, bars, histogram, lines

_HISTOGRAMS = {
    "max_probability": ("A: 1 \N{MINUS SIGN} max p", True),
    "entropy": ("B: entropy", True),
    "scaled_entropy": ("C: scaled entropy", False),
    "density": ("D: density, \N{MINUS SIGN}log q(z)", False),
    "norm": ("norm of the feature, \N{DOUBLE VERTICAL LINE}z\N{DOUBLE VERTICAL LINE}", False),
    "cosine": ("largest cosine with a class weight", False),
}
"""By score: its title, and whether the axis is logarithmic."""
_FLOOR = 1e-9
"""Mutual information below this is drawn here."""


def diagnosis_page(diagnosis: Diagnosis) -> str:
    """The page of a diagnosis."""
    names = list(diagnosis.by_set)
    what = names[0] if len(names) == 1 else f"{len(names)} sets of out-of-distribution images"
    findings = diagnosis.findings_by_set()
    return fill(
        "diagnosis.html.j2",
        title=f"Why does confidence fail on {what}?",
        verdict=next(reversed(findings.values()))[0],
        facts=[
            f"in-distribution: {diagnosis.in_distribution}, {diagnosis.rows:,} images",
            *([] if diagnosis.accuracy is None else [f"accuracy {diagnosis.accuracy:.1%}"]),
            f"{diagnosis.classes:,} classes",
            f"density fitted on {diagnosis.fitted_on}",
            f"D: {diagnosis.density}",
        ],
        diagnosis=diagnosis,
        points=points,
        bars=cause_bars(diagnosis),
        # The verdict on a single set is at the top of the page.
        sets=[(name, [*_histograms(diagnosis, name)], findings[name][len(names) == 1 :]) for name in names],
    )


def ensemble_page(diagnosis: EnsembleDiagnosis) -> str:
    """The page of an ensemble."""
    header, *body = diagnosis.lines()
    first, *larger = diagnosis.ensembles
    sizes = f", {len(diagnosis.ensembles)} model sizes" if larger else ""
    facts = [f"{first.name}, {first.rows:,} images", f"{first.members} {diagnosis.of}{sizes}", first.order]
    sets = [
        (one, [_histogram(one.scores[at.size], one.ood_scores[at.size], str(at), at.auroc) for at in one.levels])
        for one in diagnosis.ensembles
        if one.ood is not None
    ]
    return fill(
        "ensemble.html.j2",
        title="Do larger models disagree less?" if larger else "Do your members disagree?",
        verdict=diagnosis.verdict,
        findings=diagnosis.findings()[1:],
        facts=facts + ([f"out-of-distribution: {first.ood}"] if first.ood else []),
        diagnosis=diagnosis,
        header=header,
        lines=body,
        curves=_curves(diagnosis),
        sets=sets,
    )


def cause_bars(diagnosis: Diagnosis) -> list[tuple[str, str, str]]:
    """Of every OOD set, and of their mean, what each cause costs: drawing, title and what the entropy misses."""
    parts = [part for causes in diagnosis.all for part in causes.causes.values()]
    axis = Axis(100 * min(0.0, *(part.low for part in parts)), 100 * max(0.01, *(part.high for part in parts)))
    return [_bars(causes, axis) for causes in diagnosis.all]


def _bars(causes: Causes, axis: Axis) -> tuple[str, str, str]:
    parts = {name: (100 * part.value, 100 * part.low, 100 * part.high) for name, part in causes.causes.items()}
    missed = 100 * (1 - causes.auroc["entropy"].value)
    return bars(parts, axis), causes.name, f"{missed:.1f} points missed"


def _histograms(diagnosis: Diagnosis, name: str) -> Iterator[tuple[str, str, str]]:
    for key, values in diagnosis.scores.items():
        title, log = _HISTOGRAMS[key]
        shift = 1.0 if key == "max_probability" else 0.0
        auroc = diagnosis[name].auroc.get(key)
        yield _histogram(values + shift, diagnosis.ood_scores[name][key] + shift, title, auroc, log=log)


def _histogram(
    values: Tensor, ood: Tensor, title: str, auroc: Interval | Estimate | None, *, log: bool = True
) -> tuple[str, str, str]:
    text = "" if auroc is None else f"AUROC {100 * auroc.value:.1f} %"
    return histogram(values.numpy(), ood.numpy(), log=log), title, text


def _curves(diagnosis: EnsembleDiagnosis) -> list[tuple[str, str, str]]:
    """MI against size: of models where there are several, and of sub-ensembles."""
    drawn = []
    if diagnosis.decay is not None:
        keys = [one.key or 1.0 for one in diagnosis.ensembles]
        drawing = _curve(keys, [one.epistemic for one in diagnosis.ensembles])
        drawn.append((drawing, "all members, by size of the models", "MI in nats"))
    for one in diagnosis.ensembles:
        if len(one.levels) > 1 and one.kind != "same":
            sizes = [float(level.size) for level in one.levels]
            expected = [level.expected for level in one.levels]
            drawing = _curve(sizes, [level.information for level in one.levels], expected)
            title = "by size of sub-ensembles" if one.key is None else f"models of {one.key:g}"
            exponent = "" if one.decay is None else f"s^\N{MINUS SIGN}{one.decay.exponent.value:.2f}"
            drawn.append((drawing, title, exponent))
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
