"""The page of a diagnosis: its table, the causes as bars, and histograms of the scores in and out of distribution."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dubito.explain.causes import SCORES, Causes, points
from dubito.explain.diagnosis import Diagnosis
from dubito.report.page import render
from dubito.report.svg import Axis, bars, histogram

_HEADER = {
    "A": "max probability",
    "B": "entropy",
    "C": "scaled entropy",
    "D": "density",
    "cause 1": "saturation, C \N{MINUS SIGN} B",
    "cause 2": "extrapolation, D \N{MINUS SIGN} C",
    "cause 3": "feature overlap, 1 \N{MINUS SIGN} D",
}
_HISTOGRAMS = {
    "max_probability": ("A: 1 \N{MINUS SIGN} max p", True),
    "entropy": ("B: entropy", True),
    "scaled_entropy": ("C: scaled entropy", False),
    "density": ("D: density, \N{MINUS SIGN}log q(z)", False),
    "norm": ("norm of the feature, \N{DOUBLE VERTICAL LINE}z\N{DOUBLE VERTICAL LINE}", False),
    "cosine": ("largest cosine with a class weight", False),
}
"""By score: its title, and whether the axis is logarithmic."""
_ABOUT = {
    "A, max probability": "Minus the probability of the predicted class.",
    "B, entropy": "Entropy of the predicted probabilities. The causes explain all that it misses, 1 \N{MINUS SIGN} B.",
    "C, scaled entropy": "Entropy of 0.1 x logits, where nothing is saturated.",
    "D, density": "How far the feature lies from those of training images, by a mixture of Gaussians.",
    "saturation": "Probabilities so close to 1 that their order is lost. C cures it.",
    "extrapolation": "The softmax is confident far from the training features, or uncertain about in-distribution "
    "images that are ambiguous. D cures it.",
    "feature overlap": "Out-of-distribution images have the features of in-distribution ones. No score on these "
    "features cures it; where the density fits badly, this part is overstated.",
    "AUROC": "The probability that an out-of-distribution image is more uncertain than an in-distribution one: 50 % is "
    "chance. Sets are balanced: as many images from either side.",
}


def write_diagnosis_page(diagnosis: Diagnosis, to: str | Path) -> Path:
    """Write the page of a diagnosis and return its path."""
    names = list(diagnosis.by_set)
    what = names[0] if len(names) == 1 else f"{len(names)} sets of out-of-distribution images"
    findings = diagnosis.findings_by_set()
    everywhere = [end for causes in diagnosis.all for part in causes.causes.values() for end in (part.low, part.high)]
    axis = Axis(min(0.0, *(100 * end for end in everywhere)), max(1.0, *(100 * end for end in everywhere)))
    return render(
        "diagnosis.html.j2",
        to,
        title=f"Why does confidence fail on {what}?",
        lead="A model should be less confident about images of things it has never seen. What it fails to separate is "
        "split into three causes, each with its own cure.",
        verdict=next(reversed(findings.values()))[0],
        facts=_facts(diagnosis),
        notes=diagnosis.notes,
        draws=diagnosis.draws,
        confidence=f"{diagnosis.confidence:.0%}",
        header=_HEADER,
        first_cause=list(_HEADER)[len(SCORES)],
        rows=[{"name": causes.name, "cells": list(_cells(causes))} for causes in diagnosis.all],
        bars=[_bars(causes, axis) for causes in diagnosis.all],
        in_distribution=diagnosis.in_distribution,
        sets=[
            {
                "name": name,
                "histograms": list(_histograms(diagnosis, name)),
                "findings": findings[name][len(names) == 1 :],  # the verdict on a single set is at the top of the page
            }
            for name in names
        ],
        about=_ABOUT,
    )


def _facts(diagnosis: Diagnosis) -> list[str]:
    return [
        f"in-distribution: {diagnosis.in_distribution}, {diagnosis.rows:,} images",
        *([] if diagnosis.accuracy is None else [f"accuracy {diagnosis.accuracy:.1%}"]),
        f"{diagnosis.classes:,} classes",
        f"density fitted on {diagnosis.fitted_on}",
        f"D: {diagnosis.density}",
    ]


def _cells(causes: Causes) -> Iterator[dict[str, Any]]:
    for place, (key, part) in enumerate([*causes.auroc.items(), *causes.causes.items()]):
        low, value, high = (points(end) for end in (part.low, part.value, part.high))
        style = ["first"] * (place == len(SCORES)) + ["largest"] * (key == causes.dominant)
        yield {"value": value, "small": [f"[{low}, {high}]", f"±{100 * part.spread:.2f}"], "style": " ".join(style)}


def _bars(causes: Causes, axis: Axis) -> dict[str, Any]:
    parts = {name: (100 * part.value, 100 * part.low, 100 * part.high) for name, part in causes.causes.items()}
    missed = 100 * (1 - causes.auroc["entropy"].value)
    return {"drawing": bars(parts, axis), "title": causes.name, "small": f"{missed:.1f} points missed"}


def _histograms(diagnosis: Diagnosis, name: str) -> Iterator[dict[str, Any]]:
    causes, ood_scores = diagnosis[name], diagnosis.ood_scores[name]
    for key, values in diagnosis.scores.items():
        title, log = _HISTOGRAMS[key]
        shift = 1.0 if key == "max_probability" else 0.0
        yield {
            "drawing": histogram((values + shift).numpy(), (ood_scores[key] + shift).numpy(), log=log),
            "title": title,
            "small": f"AUROC {100 * causes.auroc[key].value:.1f} %" if key in causes.auroc else "",
        }
