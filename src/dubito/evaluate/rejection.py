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

    p = softmax(logit / T)     p̄ = mean_m softmax(member logit / T)     uncertainties of p̄ and its members: `SUMMARY`

At T = 1 an ensemble's summary and loss columns suffice. At any other temperature, and for pooled weights (learned on
other images and equal for all rows), the members' logits are read in batches of bounded size.
"""

from collections.abc import Collection, Iterable, Sequence
from itertools import chain
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
import torch
from jaxtyping import Float64, Int64, Shaped
from torch import Tensor

from dubito import metrics, validate
from dubito.choices import WeighedBy
from dubito.errors import MissingColumnError, TableError
from dubito.evaluate.evaluate import errors_at_coverage
from dubito.evaluate.rejection_result import (
    FIGURES,
    ORIGINAL,
    UNCERTAINTIES,
    RejectionCurves,
    RejectionOrder,
    RejectionStudy,
    grid_of,
)
from dubito.metrics import SUMMARY, Interval, MemberStream
from dubito.metrics.bootstrap import area_under_ranks, aurc_weights, draw_counts, percentiles
from dubito.metrics.information import entropy_of
from dubito.metrics.ranking import chance_after
from dubito.scores.information import MutualInformation, WeightedMutualInformation, member_batches, members_of
from dubito.scores.temperature import fit_temperature
from dubito.table import Table, ensembles_in, recorded_settings, writer_of
from dubito.types import finite

Against = Literal["level", "uncertainty"]
"""What covariances are with: the level of a quantile, or the uncertainty in its bucket."""
Predictions = Literal["own", "original"]
"""Whose predictions an ensemble is measured by."""
Temperatures = Sequence[float | int | Literal["optimal"]]
DEFAULT = ("mutual_information", "weighted_logsumexp", "weighted_sum")
"""The uncertainties of ensembles: weights by input, in both readings of "logit sum"."""
_BY = "rejection_study"
_OTHER_FIELDS = {
    "mutual_information": "epistemic",
    "predictive_entropy": "total",
    "expected_entropy": "aleatoric",
    "variation_ratio": "variation",
}
"""Uncertainties of an ensemble that its summary holds under another name."""
_POOLED: dict[str, WeighedBy] = {f"pooled_{by}": by for by in get_args(WeighedBy)}
"""Uncertainties whose weights are learned on other images."""
_ROUNDING = 1e-5
"""Nats: what rounding in float32 may leave between images on which members always agree."""
_COMPARED, _CLOSE = 16, 2e-2
"""Rows whose summary is compared with their logits, and the tolerance: stored logits may be in half precision."""


def rejection_study(  # noqa: PLR0913 (options of a protocol, each with its default)
    table: Table,
    ensembles: Sequence[str] | None = None,
    *,
    calibration: Table | None = None,
    temperatures: Temperatures | None = None,
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
    validate.check_rows(table, by=_BY, least=2)
    validate.check_model_labels(table, by=_BY)
    validate.check_bootstrap(by=_BY, confidence=confidence, resamples=resamples, seed=seed)
    validate.check_choice(predictions, get_args(Predictions), by=_BY, what="predictions")
    validate.check_choice(against, get_args(Against), by=_BY, what="against")
    hint = f"{table.name} has {len(table)} rows; ten buckets, with a hundred rows or more in each, are usual."
    validate.check_number(buckets, f"[2, {len(table)}]", by=_BY, what="buckets", whole=True, hint=hint)
    ensembles = ensembles_of(table) if ensembles is None else _names(ensembles)
    uncertainties = _names(uncertainties)
    known = [name for name in UNCERTAINTIES if name != "entropy"]
    for name in uncertainties:
        validate.check_choice(name, known, by=_BY, what="uncertainties")
    pooled = [name for name in uncertainties if name in _POOLED]
    fitted = _fitted_temperatures(table, temperatures, calibration, pooled)
    needs_logits = next((f"T = {one:.3g}" for one in fitted if one != 1), pooled[0] if pooled else None)
    for name in ensembles:
        _require_ensemble(table, name, logits_for=needs_logits, own=predictions == "own")
        if calibration is not None and pooled:
            _require_ensemble(calibration, name, logits_for=pooled[0], own=False)
    orders = []
    for temperature in fitted:
        original = _model_predictions(table, temperature)
        orders.append((RejectionOrder(ORIGINAL, 1, "entropy", temperature), original))
        for name in ensembles:
            shown = _ensemble_predictions(table, name, temperature, uncertainties, calibration)
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
    centred = x - x.mean(axis=1, keepdims=True)
    return np.stack([*ranking, *(-(centred * curve).mean(axis=1) for curve in curves)], axis=1)


def ensembles_of(table: Table) -> list[str]:
    """The ensembles that a table has, as summaries or logits; grids of tiles last and by size."""
    return sorted(ensembles_in(table.columns), key=lambda name: (name.startswith("tiles_"), grid_of(name) or 0))


class _Predictions(NamedTuple):
    """Of every row: correctness, the label's loss and confidence minus correctness; and uncertainties by name."""

    members: int
    correct: Float64[Tensor, "n"]
    nll: Float64[Tensor, "n"]
    gap: Float64[Tensor, "n"]
    uncertainties: dict[str, Float64[Tensor, "n"]]


def _results(
    orders: Sequence[tuple[RejectionOrder, _Predictions]],
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
                errors_at_coverage=errors_at_coverage(torch.from_numpy(rows[0]), torch.from_numpy(1 - rows[1])),
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
    for kind, curve in (("bucket", metrics.bucket_curve), ("acceptance", metrics.acceptance_curve)):
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


def _fitted_temperatures(
    table: Table, temperatures: Temperatures | None, calibration: Table | None, pooled: Sequence[str]
) -> list[float]:
    """Temperatures as numbers, each once; raises unless there are other images of the model to fit what is fitted."""
    default: Temperatures = (1.0,) if calibration is None else (1.0, "optimal")
    chosen = default if temperatures is None else temperatures
    if calibration is not None:
        validate.check_model_labels(calibration, by=f"{_BY}: calibration")
        validate.check_same_model(table, {"calibration": calibration}, by=_BY)
        harm = "What is fitted on the studied images flatters them: keep the two sets apart."
        validate.check_disjoint(table, calibration, by=_BY, what="calibration", harm=harm)
    elif fitted := [*(str(one) for one in chosen if one == "optimal"), *pooled]:
        raise TableError(
            f"rejection_study: {fitted[0]} is fitted on other images and needs calibration=...; got none. Pass a table "
            f"of other labelled images of the same model, or half of this one (and study the other half)."
        )
    validate.check_number(len(chosen), "[1, inf)", by=_BY, what="the number of temperatures", hint="Use (1.0,).")
    optimal = None if calibration is None or "optimal" not in chosen else fit_temperature(calibration)
    numbers: list[Any] = [optimal if one == "optimal" else one for one in chosen]
    for one in numbers:
        validate.check_number(one, "(0, inf)", by=_BY, what="temperatures", hint="Use (1.0, 'optimal').")
    return list(dict.fromkeys(map(float, numbers)))


def _interpolated(
    number: Float64[np.ndarray, "b g"], sums: Float64[np.ndarray, "b g"], at: Float64[np.ndarray, "q"]
) -> Float64[np.ndarray, "b q"]:
    lines = zip(number, sums, strict=True)
    return np.stack([np.interp(at, np.append(0.0, count), np.append(0.0, total)) for count, total in lines])


def _model_predictions(table: Table, temperature: float) -> _Predictions:
    """The model's own predictions, with their entropy."""
    parts = []
    for batch in table.batches("logit", "label"):
        logit = batch.logit.double() / temperature
        entropy = entropy_of(logit.softmax(-1))
        right = metrics.correct(logit, batch.label).double()
        parts.append((right, metrics.nll_per_row(logit, batch.label), metrics.confidence(logit) - right, entropy))
    right, nll, gap, entropy = map(torch.cat, zip(*parts, strict=True))
    return _Predictions(1, right, nll, gap, {"entropy": entropy})


def _ensemble_predictions(
    table: Table, name: str, temperature: float, uncertainties: Collection[str], calibration: Table | None
) -> _Predictions:
    """What the members' mean predicts, with uncertainties by name; pooled weights are learned on `calibration`."""
    of_members = MutualInformation(of=name)
    stored = name in table and (f"{name}_loss" in table or of_members.logits not in table)
    stored = stored and temperature == 1 == _summary_temperature(table, name)
    summary, nll = _stored(table, of_members) if stored else _computed(table, of_members, temperature)
    columns = dict(zip(SUMMARY, summary.T, strict=True))
    values = {one: columns[_OTHER_FIELDS.get(one, one)] for one in uncertainties if one not in _POOLED}
    for one in uncertainties:
        if one in _POOLED and calibration is not None:
            score = WeightedMutualInformation(by=_POOLED[one], over="pooled", of=name)
            score.weights_ = score.pooled_weights(calibration, temperature)
            values[one] = torch.cat([score.of_logits(batch, temperature) for batch in score.batches(table)])
        u = finite(values[one], f"{one} of {name}")
        # Rows that differ by rounding alone must not be ordered by it.
        values[one] = u if float(u.max() - u.min()) > _ROUNDING else torch.zeros_like(u)
    right = (columns["predicted"].long() == table.label).double()
    # float32 may hold a probability as one plus a rounding error.
    return _Predictions(int(columns["members"][0]), right, nll, columns["confidence"].clamp(0, 1) - right, values)


def _require_ensemble(table: Table, name: str, *, logits_for: str | None, own: bool) -> None:
    """Raise MissingColumnError unless the table has the columns of an ensemble; the message says what writes them.

    `logits_for` says what needs the members' logits, if anything does; `own` predictions need their losses.
    """
    logits, at = f"{name}_logit", _summary_temperature(table, name)
    if logits in table:
        return
    if name not in table:
        raise MissingColumnError(
            f"rejection_study needs an ensemble '{name}'; {table.name} has {', '.join(ensembles_of(table)) or 'none'}. "
            f"It is written by {writer_of(name) or 'the probe of that name'}."
        )
    loss_for = "the NLL of the ensemble's own predictions, which predictions='original' does without" if own else None
    logits_for = logits_for if at == 1 else "T = 1"
    for column, reason in ((logits, logits_for), (f"{name}_loss", loss_for)):
        if reason and column not in table:
            raise MissingColumnError(
                f"rejection_study needs column '{column}' for {reason}; {table.name} has only the summary '{name}' "
                f"with temperature={at:g}. It is written by {writer_of(column) or 'the probe of the ensemble'}."
            )


def _stored(table: Table, of_members: MutualInformation) -> tuple[Float64[Tensor, "n s"], Float64[Tensor, "n"]]:
    """Summary and loss as the probe wrote them; TableError for a summary that is not that of the stored logits."""
    name, logits, loss = of_members.of, of_members.logits, f"{of_members.of}_loss"
    summary = finite(table.whole(name).double(), f"column '{name}'")
    of_members.of_summary(name, table)  # checks its shape and members
    if logits in table:
        stream, place = MemberStream(), SUMMARY.index("total")
        stream.add(table.select(logits).rows(slice(0, _COMPARED)).whole(logits))
        ours, theirs = stream.summary()[:, place], summary[:_COMPARED, place]
        if not torch.allclose(ours, theirs, rtol=_CLOSE, atol=_CLOSE):
            row = int((ours - theirs).abs().argmax())
            raise TableError(
                f"rejection_study: column '{name}' of {table.name} must be the summary of '{logits}' at T = 1; in row "
                f"{row} its total uncertainty is {float(theirs[row]):.4g}, that of the logits {float(ours[row]):.4g}. "
                f"Extract with temperature=1: other temperatures are studied from the logits, temperatures=(1.0, 2.0)."
            )
    if loss not in table:  # `_require_ensemble` has checked that nobody needs it
        return summary, torch.full((len(table),), torch.nan, dtype=torch.float64)
    return summary, finite(table.whole(loss).double(), f"column '{loss}'")


def _summary_temperature(table: Table, name: str) -> float:
    """The temperature of an ensemble's summary, if the table records it; 1 is usual."""
    return float((recorded_settings(table, name) or {}).get("temperature", 1.0))


def _computed(
    table: Table, of_members: MutualInformation, temperature: float
) -> tuple[Float64[Tensor, "n s"], Float64[Tensor, "n"]]:
    """Summary and loss from the members' logits."""
    column, classes, parts = of_members.logits, table.shape("logit")[1], []
    if table.shape(column)[-1] != classes:
        raise TableError(
            f"rejection_study: '{of_members.of}' must predict the classes of the logits, {classes}; its members have "
            f"{table.shape(column)[-1]}. Give an ensemble of the same classes."
        )
    for batch in member_batches(table, column, "label", by="rejection_study"):
        stream = MemberStream(temperature=temperature)
        for members in members_of(of_members, batch):
            stream.add(members)
        parts.append((stream.summary(), stream.loss(batch.label)))
    summary, nll = map(torch.cat, zip(*parts, strict=True))
    return summary, nll
