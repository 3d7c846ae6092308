"""Does the disagreement of members collapse? Mutual information against the size of sub-ensembles, and of models.

    I[Y; M] = I[Y; K] + I[Y; M | K]        members = between sub-ensembles K + within them

As sub-ensembles grow, their means come together and I[Y; K] vanishes, while members disagree as before (Kirsch 2024,
arXiv 2409.02628, section 3 and eqs 10 to 17). What is fitted is I[Y; K] ~ A s^-a for sub-ensembles of s members, by
least squares in logarithms.

How much of a fall says nothing about the members? Where they differ little, MI is half a variance, and over all
partitions of m members into means of s the variance between means is, whatever the members,

    (m - s) / (s (m - 1))  of that between members: 1/s, less for the last few sub-ensembles

(sampling without replacement; ours, not the paper's). It stands beside every value as "by averaging". Random partitions
deviate from it only where members differ much; neighbours as they came also where they belong together.

Intervals are bootstraps over images, with the same images for all sizes, so that falls and exponents have intervals of
their own. The members are taken as they are: how much another ensemble would differ is not in the intervals.
"""

import math
from collections.abc import Mapping, Sequence
from numbers import Real
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Float64

from dubito.errors import TableError, ValueRangeError
from dubito.explain._members import BY, Said, check_alike, check_asked_alike, said
from dubito.explain.collapse_result import Collapse, Decay, EnsembleDiagnosis, Level
from dubito.metrics import Interval, balanced_auroc
from dubito.metrics.bootstrap import draw_rows, percentiles
from dubito.table import Table

_NOTHING = 1e-9
"""Nats: a mean MI below has no logarithm worth fitting."""

ByModel = Mapping[Any, Table]
"""Tables by the size of the models that made them: positive numbers."""
Means = Float64[np.ndarray, "b v"]
"""Of total, aleatoric and MI by size: the first row of all images, then of every resample."""


class _Aurocs(NamedTuple):
    """By size, over partitions: the mean, in the first row of balanced draws, then of resamples; and the deviation."""

    mean: Float64[np.ndarray, "b q"]
    spread: Float64[np.ndarray, "q"]


def diagnose_ensemble(
    table: Table | ByModel,
    *,
    of: str = "members",
    foreign: Table | ByModel | None = None,
    partitions: int = 5,
    confidence: float = 0.95,
    resamples: int = 1000,
    seed: int = 0,
) -> EnsembleDiagnosis:
    """Ask how much members disagree, alone and in sub-ensembles.

    Args:
        table: With the ensemble's logits (column NAME_logit), or its summary (NAME, NAME_between). To compare models of
            several sizes: a table for each, by width, number of parameters or another positive number.
        of: NAME, such as "members", "dropout", "views", "tiles_7", "masks".
        foreign: Images of other things with the same columns, to see how well MI tells them; for several sizes, one
            table for each.
        partitions: Random ones that are averaged for each size. 0: neighbours stay together as they came, which tells
            whether they belong together. A summary knows neighbours only.
        confidence: Of the bootstrap intervals.
        resamples: Of the bootstrap.
        seed: Of partitions, balanced draws and the bootstrap; not negative.
    """
    _check(partitions=partitions, confidence=confidence, resamples=resamples, seed=seed)
    tables, others = _paired(table, foreign)
    found, means = [], []
    for key, one in tables.items():
        known = said(one, of, partitions=partitions, seed=seed)
        outside = None
        if key in others:
            outside = said(others[key], of, partitions=partitions, seed=seed, otherwise="foreign")
            check_alike(known, outside)
            check_asked_alike(one, others[key], of)
        means.append(_means(known, resamples, seed))
        aurocs = None if outside is None else _aurocs(known, outside, resamples, seed)
        found.append(_collapse(known, outside, means[-1], aurocs, key, confidence))
    if len(found) == 1:
        return EnsembleDiagnosis(of, tuple(found), confidence)
    mi = np.stack([of_model[:, 2] for of_model in means], 1)
    return EnsembleDiagnosis(
        of,
        tuple(found),
        confidence,
        decay=_fitted(mi, [one.key or 0.0 for one in found], confidence),
        fall=_interval(_ratio(mi[:, 0], mi[:, -1]), confidence) if float(mi.min()) > _NOTHING else None,
    )


def _collapse(
    known: Said,
    foreign: Said | None,
    means: Means,
    aurocs: _Aurocs | None,
    key: float | None,
    confidence: float,
) -> Collapse:
    """Everything about one ensemble, from its means of all images and of resamples."""
    mi = means[:, 2:]
    sizes = [float(size) for _, size in known.cuts]
    decay = _fitted(mi, sizes, confidence)
    if decay is not None:
        decay = decay._replace(expected=float(_exponents(np.array([_averaging(known)]), sizes)[0]))
    return Collapse(
        name=known.name,
        key=key,
        rows=len(known.total),
        members=known.members,
        order=known.order,
        total=_interval(means[:, 0], confidence),
        aleatoric=_interval(means[:, 1], confidence),
        levels=_levels(known, means, aurocs, confidence),
        decay=decay,
        largest=float(known.epistemic.max()),
        foreign=None if foreign is None else foreign.name,
        change=None
        if aurocs is None or len(sizes) < 2
        else _interval(aurocs.mean[:, -1] - aurocs.mean[:, 0], confidence),
        inside=_first(known),
        outside={} if foreign is None else _first(foreign),
    )


def _levels(known: Said, means: Means, aurocs: _Aurocs | None, confidence: float) -> tuple[Level, ...]:
    total, mi = means[:, 0], means[:, 2:]
    return tuple(
        Level(
            count,
            size,
            information=_interval(mi[:, place], confidence),
            share=_interval(_ratio(mi[:, place], total, otherwise=0.0), confidence),
            fall=_interval(_ratio(mi[:, 0], mi[:, place]) if place else np.ones(len(mi)), confidence),
            expected=float(mi[0, 0]) * left,
            auroc=None if aurocs is None else _interval(aurocs.mean[:, place], confidence),
            spread=float(known.between[place].mean(0).std(correction=0)),
            auroc_spread=None if aurocs is None else float(aurocs.spread[place]),
        )
        for place, ((count, size), left) in enumerate(zip(known.cuts, _averaging(known), strict=True))
    )


def _averaging(known: Said) -> list[float]:
    """By size, what averaging alone leaves of MI."""
    m = known.members
    return [(m - size) / (size * (m - 1)) for _, size in known.cuts]


def _means(of: Said, resamples: int, seed: int) -> Means:
    """MI is averaged over partitions before rows are drawn: intervals are those of images."""
    rows = torch.stack([of.total, of.aleatoric, *(values.mean(1) for values in of.between)], 1).numpy()
    drawn = [rows[line].mean(0) for block in draw_rows(len(rows), resamples, seed) for line in block]
    return np.stack([rows.mean(0), *drawn])


def _aurocs(known: Said, foreign: Said, resamples: int, seed: int) -> _Aurocs:
    inside, outside = (torch.cat(side.between, 1).T.contiguous().numpy() for side in (known, foreign))
    found = balanced_auroc(inside, outside, draws=5, resamples=resamples, seed=seed)
    both = np.concatenate([found.drawn.mean(0, keepdims=True), found.resampled])
    ends = np.cumsum([values.shape[1] for values in known.between])
    by_size = np.split(both, ends[:-1], axis=1)
    return _Aurocs(np.stack([part.mean(1) for part in by_size], 1), np.array([part[0].std() for part in by_size]))


def _fitted(mi: Float64[np.ndarray, "b q"], sizes: Sequence[float], confidence: float) -> Decay | None:
    if len(sizes) < 2 or float(mi.min()) <= _NOTHING:
        return None
    exponents = _exponents(mi, sizes)
    scale = float(np.exp(np.log(mi[0]).mean() + exponents[0] * np.log(sizes).mean()))
    return Decay(scale, _interval(exponents, confidence))


def _exponents(mi: Float64[np.ndarray, "b q"], sizes: Sequence[float]) -> Float64[np.ndarray, "b"]:
    """Minus the slope of log MI over log size, by least squares."""
    x = np.log(np.array(sizes, dtype=float))
    x -= x.mean()
    slope: np.ndarray = np.log(mi) @ x / (x @ x)
    return -slope


def _interval(values: Float64[np.ndarray, "b"], confidence: float) -> Interval:
    """The first is the value; the others are resamples. Infinite ones stay so."""
    kept = np.where(np.isfinite(values[1:]), values[1:], np.finfo(float).max)
    low, high = percentiles(kept, confidence, method="nearest")
    least, most = (math.inf if end == np.finfo(float).max else float(end) for end in (low, high))
    return Interval(float(values[0]), least, most, confidence)


def _ratio(
    part: Float64[np.ndarray, "b"], whole: Float64[np.ndarray, "b"], *, otherwise: float = math.inf
) -> Float64[np.ndarray, "b"]:
    """Where the whole is nothing but rounding, `otherwise`."""
    some = whole > _NOTHING
    found: np.ndarray = np.where(some, part / np.where(some, whole, 1.0), otherwise)
    return found


def _first(of: Said) -> dict[int, torch.Tensor]:
    return {size: values[:, 0] for (_, size), values in zip(of.cuts, of.between, strict=True)}


def _paired(
    table: Table | ByModel, foreign: Table | ByModel | None
) -> tuple[dict[float | None, Table], dict[float | None, Table]]:
    """Tables by size of the models, the smallest first; a single one has none."""
    if isinstance(table, Table):
        if isinstance(foreign, Mapping):
            raise TableError(
                f"{BY}: foreign must be one table where the known one is; got a mapping. Give one, or call it once "
                f"for each."
            )
        return {None: table}, {} if foreign is None else {None: foreign}
    sizes = list(table)
    if len(sizes) < 2 or not all(isinstance(size, Real) and 0 < float(size) < math.inf for size in sizes):
        raise TableError(
            f"{BY}: tables by size of the models must be two or more, with positive numbers as keys; "
            f"{', '.join(map(repr, sizes)) or 'none'} came. Give {{width: table, ...}}, or a single table."
        )
    if foreign is not None and (isinstance(foreign, Table) or set(foreign) != set(sizes)):
        came = "one table" if isinstance(foreign, Table) else ", ".join(map(repr, foreign))
        raise TableError(
            f"{BY}: foreign must have a table for each size of the models, {', '.join(map(repr, sizes))}; {came} came. "
            f"Foreign images must have been seen by every ensemble."
        )
    order = sorted(sizes)
    others: dict[float | None, Table] = {} if foreign is None else {float(size): foreign[size] for size in order}
    return {float(size): table[size] for size in order}, others


def _check(*, partitions: int, confidence: float, resamples: int, seed: int) -> None:
    if not 0 < confidence < 1 or resamples < 1 or partitions < 0 or seed < 0:
        raise ValueRangeError(
            f"{BY} needs a confidence in (0, 1), at least one resample, and neither partitions nor seed below 0; "
            f"confidence={confidence}, resamples={resamples}, partitions={partitions}, seed={seed} came. "
            f"0.95, 1000, 5 and 0 are usual."
        )
