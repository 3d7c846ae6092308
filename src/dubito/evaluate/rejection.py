"""Which images should a model refuse? Classification with rejection, for a model's entropy and its ensembles' doubts.

Rows are sorted by an uncertainty. At each level q (0.1, 0.2, ..., 1) stand accuracy, NLL and calibration error

    in the bucket between the level before and q          ("bucket average")
    over all rows up to q, those that are accepted        ("acceptance threshold")

of the original model, sorted by its own entropy, and of every ensemble, sorted by its mutual information, plain or
weighted; as they are and at the optimal temperature. Kirsch, (Implicit) Ensembles of Ensembles (2024), Figure 5, Tables
3 to 6, B.2 and B.3. The calibration error is the paper's |mean confidence - mean accuracy| of the rows in question, not
the binned ECE.

How the paper computes the covariances of its tables is not told. Ours: minus the covariance of the level with the curve
at that level (`against="level"`), or of the mean uncertainty in the bucket that ends there (`against="uncertainty"`);
both over the levels, for all three curves, by bucket and by acceptance. The optimal temperature is one number, fitted
on the original model's logits for other images; members' logits are divided by it, too. Beside them stand what the
paper has not: AUROC of errors and AURC, and how far they are from those of the original's entropy, with paired
bootstrap intervals over images.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Literal

import numpy as np
from jaxtyping import Float64, Int64

from dubito.errors import TableError
from dubito.evaluate._member_predictions import (
    POOLED,
    Said,
    Weights,
    ensembles_of,
    pooled_weights,
    require_ensemble,
    said_by_ensemble,
    said_by_model,
)
from dubito.evaluate._rejection_given import Against, Predictions, check, temperatures_of
from dubito.evaluate._resampled_curves import FIGURES, Ranked, figures_of
from dubito.evaluate.rejection_result import ORIGINAL, Order, Rejected, RejectionStudy
from dubito.metrics import Interval, acceptance_curve, bucket_curve
from dubito.metrics.bootstrap import draw_counts, percentiles
from dubito.table import Table
from dubito.validate import check_bootstrap

DEFAULT = ("mutual_information", "weighted_logsumexp", "weighted_sum")
"""The uncertainties of ensembles: weights by input, in both readings of "logit sum"."""


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
        ensembles: Their names, such as "tiles_2" or "members"; by default all that the table has.
        calibration: Other labelled images of the same model, which the optimal temperature (and pooled weights) are
            fitted on.
        temperatures: Numbers, or "optimal"; by default 1, and with a calibration table the optimal one, too. Any other
            than 1 needs the members' logits.
        uncertainties: Of ensembles: mutual_information, weighted_logsumexp, weighted_sum, pooled_logsumexp, pooled_sum,
            predictive_entropy, expected_entropy, variation_ratio.
        predictions: "own": an ensemble is judged by what its members' mean predicts, as in the paper. "original": all
            by what the original model predicts, so that only the order of rows differs.
        against: What the covariances are with.
        buckets: How many levels.
        confidence: Of the bootstrap intervals.
        resamples: Of the bootstrap.
        seed: Of the bootstrap.
    """
    check(table, ensembles, uncertainties, buckets, {"predictions": predictions, "against": against})
    check_bootstrap(by="rejection_study", confidence=confidence, resamples=resamples, seed=seed)
    names = ensembles_of(table) if ensembles is None else list(dict.fromkeys(ensembles))
    wanted = _Wanted(names, list(dict.fromkeys(uncertainties)), predictions, calibration)
    chosen = temperatures_of(table, temperatures, calibration)
    wanted.require(table, chosen)
    levels = np.arange(1, buckets + 1) / buckets
    orders = [order for temperature in chosen for order in wanted.orders(table, temperature)]
    ranked = [_ranked(said, doubt) for _, said, doubt in orders]
    everyone = np.ones((1, len(table)), dtype=np.int64)
    figures = _figures(ranked, levels, against, chain([everyone], draw_counts(len(table), resamples, seed)))
    first = {order.temperature: place for place, (order, _, _) in reversed(list(enumerate(orders)))}
    results = [
        _measured(order, said, doubt, levels, _intervals(figures[place], figures[first[order.temperature]], confidence))
        for place, (order, said, doubt) in enumerate(orders)
    ]
    return RejectionStudy(
        name=table.name,
        model=(table.provenance.model if table.provenance else None) or table.name,
        images=len(table),
        calibrated_on=None if calibration is None else calibration.name,
        predictions=predictions,
        against=against,
        levels=tuple(levels.tolist()),
        results=results,
    )


@dataclass
class _Wanted:
    """Which orders of the rows are asked for."""

    ensembles: list[str]
    uncertainties: list[str]
    predictions: Predictions
    calibration: Table | None

    def require(self, table: Table, temperatures: Sequence[float]) -> None:
        pooled = [name for name in self.uncertainties if name in POOLED]
        if pooled and self.calibration is None:
            raise TableError(
                f"rejection_study: {pooled[0]} learns its weights on other images, which it needs as calibration=...; "
                f"none came. Give a table of other images of the same model, or choose weighted_logsumexp."
            )
        other = [temperature for temperature in temperatures if temperature != 1]
        reason = f"T = {other[0]:.3g}" if other else pooled[0] if pooled else None
        for name in self.ensembles:
            require_ensemble(table, name, logits_for=reason, own=self.predictions == "own")
            if pooled and self.calibration is not None:
                require_ensemble(self.calibration, name, logits_for=pooled[0], own=False)

    def orders(self, table: Table, temperature: float) -> list[tuple[Order, Said, str]]:
        """The original first, then every ensemble by every uncertainty."""
        original = said_by_model(table, temperature)
        found = [(Order(ORIGINAL, 1, "entropy", temperature), original, "entropy")]
        for name in self.ensembles:
            weights = self._weights(name, temperature)
            said = said_by_ensemble(table, name, temperature, self.uncertainties, weights)
            if self.predictions == "original":
                said = original._replace(members=said.members, doubts=said.doubts)
            found += [(Order(name, said.members, doubt, temperature), said, doubt) for doubt in self.uncertainties]
        return found

    def _weights(self, name: str, temperature: float) -> Weights:
        if self.calibration is None or not set(self.uncertainties) & set(POOLED):
            return {}
        return pooled_weights(self.calibration, name, temperature)


def _ranked(said: Said, doubt: str) -> Ranked:
    right = said.correct.double()
    return Ranked(said.doubts[doubt].numpy(), right.numpy(), said.nll.numpy(), (said.confidence - right).numpy())


def _figures(
    orders: Sequence[Ranked],
    levels: Float64[np.ndarray, "q"],
    against: Against,
    drawn: Iterable[Int64[np.ndarray, "b n"]],
) -> Float64[np.ndarray, "o r f"]:
    """AUROC, AURC and covariances of every order, on all rows first and then on resamples, the same for all orders."""
    by_doubt = against == "uncertainty"
    blocks = [np.stack([figures_of(o, rows, levels, against_uncertainty=by_doubt) for o in orders]) for rows in drawn]
    return np.concatenate(blocks, axis=1)


def _intervals(
    figures: Float64[np.ndarray, "r f"], reference: Float64[np.ndarray, "r f"], confidence: float
) -> tuple[dict[str, Interval | None], dict[str, Interval | None]]:
    """Of every figure, and of its difference to the reference's on the same resamples."""

    def told(values: Float64[np.ndarray, "r"]) -> Interval | None:
        value, resampled = float(values[0]), values[1:][np.isfinite(values[1:])]
        if not np.isfinite(value) or not len(resampled):
            return None
        low, high = percentiles(resampled, confidence)
        return Interval(value, float(low), float(high), confidence)

    own = {name: told(figures[:, place]) for place, name in enumerate(FIGURES)}
    return own, {name: told(figures[:, place] - reference[:, place]) for place, name in enumerate(FIGURES)}


def _measured(
    order: Order,
    said: Said,
    doubt: str,
    levels: Float64[np.ndarray, "q"],
    figures: tuple[dict[str, Interval | None], dict[str, Interval | None]],
) -> Rejected:
    u, right = said.doubts[doubt], said.correct.double()
    columns = {"accuracy": right, "nll": said.nll, "calibration_error": said.confidence - right}
    curves = {
        kind: {name: tuple(curve(u, values, levels.tolist()).tolist()) for name, values in columns.items()}
        for kind, curve in (("bucket", bucket_curve), ("acceptance", acceptance_curve))
    }
    for by_name in curves.values():
        by_name["calibration_error"] = tuple(abs(gap) for gap in by_name["calibration_error"])
    return Rejected(
        order=order,
        accuracy=float(right.mean()),
        nll=float(said.nll.mean()),
        calibration_error=abs(float(columns["calibration_error"].mean())),
        curves=curves,
        figures=figures[0],
        differences=None if order.ensemble == ORIGINAL else figures[1],
        constant=bool(u.min() == u.max()),
    )
