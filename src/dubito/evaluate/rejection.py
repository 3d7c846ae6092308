"""Selective prediction: which images should a model reject, by its own entropy or by an ensemble's uncertainties?

Rows are sorted by an uncertainty. At each level q (0.1, 0.2, ..., 1) there are accuracy, NLL and calibration error

    in the bucket between the previous level and q         ("bucket average")
    over all rows up to q, those that are accepted         ("acceptance threshold")

for the original model, sorted by its own entropy, and for every ensemble, sorted by its mutual information, plain or
weighted; at T = 1 and at the optimal temperature. Kirsch, (Implicit) Ensembles of Ensembles (2024), Figure 5, Tables
3 to 6, B.2 and B.3. The calibration error is the paper's |mean confidence - mean accuracy| of the rows in question, not
the binned ECE.

The paper does not say how it computes the covariances of its tables. Ours: minus the covariance of the level with the
curve at that level (`against="level"`), or of the mean uncertainty in the bucket that ends there
(`against="uncertainty"`); both over the levels, a grid and not a sample, so they divide by their number. The optimal
temperature is one number, fitted on the original model's logits for other images; members' logits are divided by it,
too. AUROC of errors and AURC, and their differences to those of the original's entropy, with paired bootstrap intervals
over images, are not in the paper.
"""

from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Literal, get_args

import numpy as np
from jaxtyping import Float64, Int64, Shaped

from dubito.errors import TableError
from dubito.evaluate.member_predictions import (
    POOLED,
    SUMMARY_FIELDS,
    MemberPredictions,
    ensemble_predictions,
    ensembles_of,
    model_predictions,
    require_ensemble,
)
from dubito.evaluate.rejection_result import FIGURES, ORIGINAL, RejectionCurves, RejectionOrder, RejectionStudy
from dubito.metrics import Interval, acceptance_curve, bucket_curve
from dubito.metrics.bootstrap import area_under_ranks, aurc_weights, draw_counts, percentiles
from dubito.metrics.ranking import chance_after
from dubito.scores.temperature import fit_temperature
from dubito.table import Table
from dubito.validate import (
    check_bootstrap,
    check_choice,
    check_disjoint,
    check_model_labels,
    check_number,
    check_rows,
    check_same_model,
)

Against = Literal["level", "uncertainty"]
"""What covariances are with: the level of a quantile, or the uncertainty in its bucket."""
Predictions = Literal["own", "original"]
"""Whose predictions an ensemble is measured by."""
DEFAULT = ("mutual_information", "weighted_logsumexp", "weighted_sum")
"""The uncertainties of ensembles: weights by input, in both readings of "logit sum"."""

_BY = "rejection_study"


def rejection_study(  # noqa: PLR0913 (options of a protocol, each with its default)
    table: Table,
    ensembles: Sequence[str] | None = None,
    *,
    calibration: Table | None = None,
    temperatures: Sequence[float | int | Literal["optimal"]] | None = None,
    uncertainties: Sequence[str] = DEFAULT,
    predictions: Predictions = "own",
    against: Against = "level",
    buckets: int = 10,
    confidence: float = 0.95,
    resamples: int = 1000,
    seed: int = 0,
) -> RejectionStudy:
    """Accuracy, NLL and calibration error by uncertainty, for the original model and its ensembles.

    Args:
        table: Labelled images of the model's classes, with the columns of the ensembles.
        ensembles: Names such as "tiles_2" or "members". Default: all ensembles of the table.
        calibration: Other labelled images of the same model, on which the optimal temperature (and pooled weights) are
            fitted.
        temperatures: Numbers, or "optimal". Default: 1, and with a calibration table also the optimal one. Any other
            than 1 needs the members' logits.
        uncertainties: Uncertainties of ensembles: mutual_information, weighted_logsumexp, weighted_sum,
            pooled_logsumexp, pooled_sum, predictive_entropy, expected_entropy, variation_ratio.
        predictions: "own" measures an ensemble by what its members' mean predicts, as in the paper; "original" measures
            all by what the original model predicts, so that only the order of rows differs.
        against: What the covariances are with.
        buckets: Number of levels.
        confidence: Confidence of the bootstrap intervals.
        resamples: Number of bootstrap resamples.
        seed: Seed of the bootstrap.
    """
    check_rows(table, by=_BY, least=2)
    check_model_labels(table, by=_BY)
    check_bootstrap(by=_BY, confidence=confidence, resamples=resamples, seed=seed)
    check_choice(predictions, get_args(Predictions), by=_BY, what="predictions")
    check_choice(against, get_args(Against), by=_BY, what="against")
    hint = f"{table.name} has {len(table)} rows; ten buckets, with a hundred rows or more in each, are usual."
    check_number(buckets, f"[2, {len(table)}]", by=_BY, what="buckets", whole=True, hint=hint)
    ensembles = ensembles_of(table) if ensembles is None else _names(ensembles)
    uncertainties = _names(uncertainties)
    for name in uncertainties:
        check_choice(name, (*SUMMARY_FIELDS, *POOLED), by=_BY, what="uncertainties")
    pooled = [name for name in uncertainties if name in POOLED]
    temperatures = temperatures if temperatures is not None else (1.0,) if calibration is None else (1.0, "optimal")
    _check_calibration(table, calibration, [*(one for one in temperatures if one == "optimal"), *pooled])
    fitted = _temperatures(temperatures, calibration)
    needs_logits = next((f"T = {one:.3g}" for one in fitted if one != 1), pooled[0] if pooled else None)
    for name in ensembles:
        require_ensemble(table, name, logits_for=needs_logits, own=predictions == "own")
        if calibration is not None and pooled:
            require_ensemble(calibration, name, logits_for=pooled[0], own=False)
    orders = []
    for temperature in fitted:
        original = model_predictions(table, temperature)
        orders.append((RejectionOrder(ORIGINAL, 1, "entropy", temperature), original))
        for name in ensembles:
            shown = ensemble_predictions(table, name, temperature, uncertainties, calibration)
            if predictions == "original":
                shown = original._replace(members=shown.members, uncertainties=shown.uncertainties)
            orders += [(RejectionOrder(name, shown.members, one, temperature), shown) for one in uncertainties]
    levels = np.arange(1, buckets + 1) / buckets
    return RejectionStudy(
        name=table.name,
        model=str((table.provenance and table.provenance.model) or table.name),
        images=len(table),
        calibrated_on=None if calibration is None else calibration.name,
        predictions=predictions,
        against=against,
        levels=tuple(levels.tolist()),
        results=_results(orders, levels, against, draw_counts(len(table), resamples, seed), confidence),
    )


def figures_of(
    rows: Float64[np.ndarray, "4 n"],
    counts: Shaped[np.ndarray, "b n"],
    levels: Float64[np.ndarray, "q"],
    *,
    against_uncertainty: bool = False,
) -> Float64[np.ndarray, "b f"]:
    """FIGURES of every resample; NaN where undefined.

    Rows are sorted once. Running sums of counts, and of counts times values, say how many rows, and which sum of
    values, lie at or below each distinct uncertainty; between two of them, quantiles are interpolated linearly.

    Args:
        rows: Of every image, uncertainty, correctness, loss, and confidence minus correctness.
        counts: How often each row was drawn, one line per resample with n draws.
        levels: Rising in (0, 1], the last 1.
        against_uncertainty: Whether covariances are with the mean uncertainty in the bucket that ends at a level,
            instead of the level itself.
    """
    order = np.argsort(rows[0], kind="stable")
    u, n = rows[0, order], len(order)
    ends = np.append(np.flatnonzero(u[1:] != u[:-1]), n - 1)
    drawn = counts[:, order].astype(np.float64)
    number = np.cumsum(drawn, axis=1)[:, ends]
    sums = [np.cumsum(drawn * rows[column, order], axis=1)[:, ends] for column in (1, 2, 3, 0)]
    below = [_interpolated(number, total, levels * n) for total in sums]
    bucket = [np.diff(total, axis=1, prepend=0.0) / (np.diff(levels, prepend=0.0) * n) for total in below]
    accepted = [total / (levels * n) for total in below[:3]]
    x = bucket[3] if against_uncertainty else np.broadcast_to(levels, bucket[3].shape)
    each, right = (np.diff(total, axis=1, prepend=0.0) for total in (number, sums[0]))
    ranking = [chance_after(right, each - right), area_under_ranks(each, each - right, aurc_weights(n))]
    # The calibration error is the size of the gap.
    curves = [*bucket[:2], np.abs(bucket[2]), *accepted[:2], np.abs(accepted[2])]
    return np.stack([*ranking, *(-_covariance(x, curve) for curve in curves)], axis=1)


def _results(
    orders: Sequence[tuple[RejectionOrder, MemberPredictions]],
    levels: Float64[np.ndarray, "q"],
    against: Against,
    draws: Iterable[Int64[np.ndarray, "b n"]],
    confidence: float,
) -> list[RejectionCurves]:
    """Curves and figures of every order, on all rows first and then on resamples, the same for all orders."""
    ranked = [np.stack([one.uncertainties[order.uncertainty], one.correct, one.nll, one.gap]) for order, one in orders]
    everyone = np.ones((1, ranked[0].shape[1]), dtype=np.int64)
    by_uncertainty = against == "uncertainty"
    blocks = [
        np.stack([figures_of(rows, counts, levels, against_uncertainty=by_uncertainty) for rows in ranked])
        for counts in chain([everyone], draws)
    ]
    figures = np.concatenate(blocks, axis=1)
    results: list[RejectionCurves] = []
    reference = figures[0]
    for (order, predictions), rows, values in zip(orders, ranked, figures, strict=True):
        original = order.ensemble == ORIGINAL
        reference = values if original else reference
        results.append(
            RejectionCurves(
                order=order,
                accuracy=float(predictions.correct.mean()),
                nll=float(predictions.nll.mean()),
                calibration_error=abs(float(predictions.gap.mean())),
                curves=_curves(rows, levels.tolist()),
                figures=_intervals(values, confidence),
                differences=None if original else _intervals(values - reference, confidence),
                constant=bool(rows[0].min() == rows[0].max()),
            )
        )
    return results


def _curves(rows: Float64[np.ndarray, "4 n"], levels: list[float]) -> dict[str, dict[str, tuple[float, ...]]]:
    u, *columns = rows
    curves: dict[str, dict[str, tuple[float, ...]]] = {}
    for kind, curve in (("bucket", bucket_curve), ("acceptance", acceptance_curve)):
        accuracy, nll, gap = (curve(u, column, levels) for column in columns)
        values = {"accuracy": accuracy, "nll": nll, "calibration_error": gap.abs()}
        curves[kind] = {metric: tuple(y.tolist()) for metric, y in values.items()}
    return curves


def _intervals(figures: Float64[np.ndarray, "r f"], confidence: float) -> dict[str, Interval | None]:
    """The first line holds the values, the others those of resamples; None for what is undefined."""
    intervals: dict[str, Interval | None] = {}
    for name, (value, *resampled) in zip(FIGURES, figures.T.tolist(), strict=True):
        defined = np.array([one for one in resampled if np.isfinite(one)])
        intervals[name] = None
        if np.isfinite(value) and len(defined):
            low, high = percentiles(defined, confidence).tolist()
            intervals[name] = Interval(value, low, high, confidence)
    return intervals


def _names(names: Sequence[str]) -> list[str]:
    """Each name once; one name needs no list."""
    return list(dict.fromkeys([names] if isinstance(names, str) else names))


def _check_calibration(table: Table, calibration: Table | None, fitted_on_it: Sequence[object]) -> None:
    """Raise unless there are other images of the same model for what is fitted on them."""
    if calibration is not None:
        check_model_labels(calibration, by=f"{_BY}: calibration")
        check_same_model(table, {"calibration": calibration}, by=_BY)
        harm = "What is fitted on the studied images flatters them: keep the two sets apart."
        check_disjoint(table, calibration, by=_BY, what="calibration", harm=harm)
    elif fitted_on_it:
        raise TableError(
            f"rejection_study: {fitted_on_it[0]} is fitted on other images and needs calibration=...; got none. Give a "
            f"table of other labelled images of the same model, or half of this one (and study the other half)."
        )


def _temperatures(temperatures: Sequence[float | int | Literal["optimal"]], calibration: Table | None) -> list[float]:
    """Temperatures as numbers, each once."""
    check_number(len(temperatures), "[1, inf)", by=_BY, what="the number of temperatures", hint="Use (1.0,).")
    fitted = []
    for one in temperatures:
        if one == "optimal" and calibration is not None:
            fitted.append(fit_temperature(calibration))
        else:
            check_number(one, "(0, inf)", by=_BY, what="temperatures", hint="Use (1.0, 'optimal').")
            fitted.append(float(one))
    return list(dict.fromkeys(fitted))


def _interpolated(
    number: Float64[np.ndarray, "b g"], sums: Float64[np.ndarray, "b g"], at: Float64[np.ndarray, "q"]
) -> Float64[np.ndarray, "b q"]:
    lines = zip(number, sums, strict=True)
    return np.stack([np.interp(at, np.append(0.0, count), np.append(0.0, total)) for count, total in lines])


def _covariance(x: Float64[np.ndarray, "b q"], y: Float64[np.ndarray, "b q"]) -> Float64[np.ndarray, "b"]:
    covariance: np.ndarray = ((x - x.mean(axis=1, keepdims=True)) * y).mean(axis=1)
    return covariance
