"""Why does the confidence of a model fail on foreign images? What saturation, extrapolation and overlap cost.

    A = AUROC(max_probability)   B = AUROC(entropy)   C = AUROC(cool)   D = AUROC(density)

    cause 1, saturation                             C - B
    cause 2, extrapolation with aleatoric overlap   D - C
    cause 3, feature overlap                        1 - D        together: 1 - B, all that the entropy misses

Pearce et al. 2021 (arXiv 2106.04972), section 6 and Table 1, on balanced sets (`_balanced`). The caption of Table 1
calls cause 1 dominant; its numbers say cause 3, and its 0.7 % for CIFAR-10 is 10.7 %.

Parts may be negative. They are shown like that, and a sentence says why. With a thousand classes, C is far below B, and
cause 2 is large only because it makes up for that; with a poor density, D is below C, and cause 3 is too large. So what
is compared to find the main cause are steps that do not fall, beyond their intervals: where C < B, D - B and 1 - D;
where D < C, C - B and 1 - C; where both C < B and D < B, nothing can be told.

Which density by default: `dubito.scores.default_density`.
"""

import copy
import warnings
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from jaxtyping import Float, Float64
from torch import Tensor, nn

from dubito.choices import Covariance
from dubito.errors import DubitoWarning, TableError
from dubito.explain._balanced import Estimate, estimate, points
from dubito.explain._given import MEAN, Given, called, check_numbers, given
from dubito.explain._sentences import ALL, CAUSES, REST, TOGETHER
from dubito.explain._spread import cosines, directions
from dubito.explain.causes_result import SCORES, Causes, Diagnosis
from dubito.explain.last_layer import last_layer
from dubito.metrics import balanced_auroc, table_accuracy
from dubito.metrics.bootstrap import BalancedAuroc
from dubito.scores import Entropy, MaxProbability, ScaledEntropy
from dubito.scores.default_density import told
from dubito.table import Table
from dubito.table.overlap import shared_rows
from dubito.types import Classifier, Score

_MOST = 0.5
"""With more shared images than this, what is measured is mostly them."""


def diagnose(  # noqa: PLR0913 (one call that users type; everything after `ood` is optional)
    known: Table,
    ood: Table | Mapping[str, Table],
    *,
    train: Table | None = None,
    density: Score | None = None,
    covariance: Covariance | None = None,
    classifier: Classifier | nn.Linear | None = None,
    draws: int = 5,
    confidence: float = 0.95,
    resamples: int = 1000,
    seed: int = 0,
) -> Diagnosis:
    """Ask why a model's confidence does not tell known from foreign images.

    Args:
        known: Test images of the classes that the model knows, with feature and logit.
        ood: Images of other things, with the same columns: one table, or several by name.
        train: Images that the density is fitted on, best those that the model was trained on. By default half of
            `known`, drawn at random; the other half is scored.
        density: A score for D. It is fitted on `train`; one that is fitted already is used as it is if there is no
            `train`, and then all of `known` is scored: it must not have been fitted on that, which cannot be seen
            here. By default a Density that fits the number of rows, features and classes.
        covariance: Of that default, if another is wanted.
        classifier: Or its last layer. Adds lengths of features and their largest cosines with class weights.
        draws: How many balanced sets.
        confidence: Of the bootstrap intervals.
        resamples: Of the bootstrap.
        seed: Of the split, the draws and the bootstrap; not negative.
    """
    check_numbers(confidence=confidence, draws=draws, resamples=resamples, seed=seed)
    asked = given(known, ood, train, density, covariance=covariance, seed=seed)
    notes = _notes(asked)
    fitted = asked.density if asked.train is None else copy.deepcopy(asked.density).fit(asked.train)
    weight = None if classifier is None else _weight(classifier, asked.known)
    inside = _scored(asked.known, fitted, weight)
    outside = {name: _scored(table, fitted, weight) for name, table in asked.foreign.items()}
    found = {
        name: balanced_auroc(
            _stacked(inside), _stacked(scores), draws=draws, resamples=resamples, seed=seed, number=number
        )
        for number, (name, scores) in enumerate(outside.items())
    }
    by_set = {
        name: _causes(name, [result], [_saturated(asked.foreign[name])], confidence) for name, result in found.items()
    }
    shares = [causes.saturated for causes in by_set.values()]
    return Diagnosis(
        known=called(asked.known, "known"),
        known_rows=len(asked.known),
        classes=asked.known.shape("logit")[1],
        accuracy=table_accuracy(asked.known),
        saturated=_saturated(asked.known),
        by_set=by_set,
        mean=_causes(MEAN, list(found.values()), shares, confidence) if len(found) > 1 else None,
        density=told(fitted, asked.train),
        fitted_on=asked.train_name,
        draws=draws,
        confidence=confidence,
        notes=notes,
        inside=inside,
        outside=outside,
    )


def _scored(table: Table, density: Score, weight: Float[Tensor, "c d"] | None) -> dict[str, Tensor]:
    """The four scores of every row, and where a weight is given the length and the angle of its feature."""
    by_name = dict(zip(SCORES, (MaxProbability(), Entropy(), ScaledEntropy(), density), strict=True))
    found = {name: score.score(table) for name, score in by_name.items()}
    return found if weight is None else found | _geometry(table, weight)


def _weight(classifier: Classifier | nn.Linear, known: Table) -> Float[Tensor, "c d"]:
    weight: Tensor = last_layer(classifier)[1].weight
    if weight.shape[1] != known.shape("feature")[1]:
        raise TableError(
            f"diagnose: classifier must read features of {known.shape('feature')[1]} numbers, as in "
            f"{called(known, 'known')}; its weight has {weight.shape[1]}. Give the model that made the tables."
        )
    return weight


def _geometry(table: Table, weight: Float[Tensor, "c d"]) -> dict[str, Tensor]:
    """||z||, and the largest cosine with a class weight: 0 where there is no direction."""
    unit = directions(weight)
    norms, largest = [], []
    for batch in table.batches("feature"):
        z = batch.feature.double()
        norms.append(z.norm(dim=1))
        largest.append(cosines(z, unit).amax(1))
    return {"norm": torch.cat(norms), "cosine": torch.cat(largest)}


def _stacked(scores: Mapping[str, Tensor]) -> Float64[np.ndarray, "s n"]:
    return torch.stack([scores[name] for name in SCORES]).numpy()


def _causes(name: str, results: Sequence[BalancedAuroc], saturated: Sequence[float], confidence: float) -> Causes:
    """From one set, or the mean over several, draw by draw and resample by resample."""
    drawn = _with_parts(np.mean([result.drawn for result in results], axis=0))
    resampled = _with_parts(np.mean([result.resampled for result in results], axis=0))

    def of(column: str, less: str | None = None) -> Estimate:
        of_draws, of_resamples = (part[column] - (0 if less is None else part[less]) for part in (drawn, resampled))
        return estimate(of_draws, of_resamples, confidence)

    causes, together = {cause: of(cause) for cause in CAUSES}, of(TOGETHER)
    compared = _compared(causes, together)
    first, *others = sorted(compared, key=lambda part: -float(drawn[part].mean()))
    return Causes(
        name=name,
        rows=min(result.rows for result in results),
        auroc={score: of(score) for score in SCORES},
        causes=causes,
        together=together,
        parts={part: of(part) for part in compared},
        lead=of(first, less=others[0]) if others else None,
        saturated=float(np.mean(saturated)),
    )


def _compared(causes: Mapping[str, Estimate], together: Estimate) -> tuple[str, ...]:
    """The causes, those on both sides of a score that is worse than the one before it as one."""
    if causes["saturation"].high < 0:
        return (ALL,) if together.high < 0 else (TOGETHER, "overlap")
    return ("saturation", REST) if causes["extrapolation"].high < 0 else CAUSES


def _with_parts(aurocs: Float64[np.ndarray, "b 4"]) -> dict[str, Float64[np.ndarray, "b"]]:
    """By name, the AUROCs and what they make of the causes."""
    a, b, c, d = aurocs.T
    parts = {"saturation": c - b, "extrapolation": d - c, "overlap": 1 - d, TOGETHER: d - b, REST: 1 - c, ALL: 1 - b}
    return {**dict(zip(SCORES, (a, b, c, d), strict=True)), **parts}


def _saturated(table: Table) -> float:
    """As users compute it: in float32, where all that rounds to one has no order."""
    full = sum(int((batch.logit.float().softmax(1).amax(1) == 1).sum()) for batch in table.batches("logit"))
    return full / len(table)


def _notes(asked: Given) -> tuple[str, ...]:
    """The same pictures on both sides cannot be told apart, whatever the scores do; how much that can matter."""
    known = called(asked.known, "known")
    notes = []
    for name, table in asked.foreign.items():
        if same := len(shared_rows(table, asked.whole).here):
            share = same / len(table)
            notes.append(
                f"{_counted(same, table, name)} are the same images as some of {known}, by their features: "
                + (
                    "nothing can tell them apart, so AUROCs come near 50 % and overlap near 50 points."
                    if share > _MOST
                    else f"AUROCs are drawn towards 50 % by at most about {points(share / 2)} points."
                )
                + " Give images of other things."
            )
    if asked.train is not None and (same := len(shared_rows(asked.known, asked.train).here)):
        share = same / len(asked.known)
        notes.append(
            f"{_counted(same, asked.known, known)} are the same images as some that the density was fitted on, by "
            f"their features: it knows them too well, and D is too high"
            + (". " if share > _MOST else f" by at most about {points(share)} points. ")
            + "Fit it on other images."
        )
    for note in notes:
        warnings.warn(note, DubitoWarning, stacklevel=3)
    if asked.train is None and asked.density.learned:  # nothing to warn of: it is mostly in order
        notes.append(
            f"The density was fitted before: whether on images of {known} cannot be seen. If it was, D is too high."
        )
    return tuple(notes)


def _counted(same: int, table: Table, name: str) -> str:
    return f"{same} of {len(table)} images of {name} ({points(same / len(table))} %)"
